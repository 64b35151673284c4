"""Names of a model's tensors in its plain checkpoint, where a mixture of experts is laid out otherwise than the model.

transformers 5 fuses a layer's experts into two parameters, `experts.gate_up_proj` (E, 2I, H), gate rows first, and
`experts.down_proj` (E, H, I); the checkpoint has one matrix per expert and projection. Everything on disk (base.json,
the base and its NF4 copy, merged checkpoints) uses the checkpoint's names, so that an expert's matrix is one more
weight of a linear layer. The names come from transformers' own conversion, in reverse.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kit.core.errors import BadInput
from kit.core.lora import EXPERT_PARAMETERS

# Layers that send tokens to experts: they stay frozen and in 16 bits.
ROUTERS = ("gate", "router", "shared_expert_gate")
# Parts of an expert's matrix that the checkpoint stores as tensors of their own.
PARTS = {"gate_up_proj": 2, "down_proj": 1}


@dataclass(frozen=True)
class ExpertMatrix:
    """Place of a checkpoint's tensor (rows, columns): part `part` of expert `expert` in the parameter `name` of the
    module `module`."""

    module: str
    name: str
    expert: int
    part: int
    rows: int
    columns: int

    @property
    def index(self) -> int:
        """Number of the matrix among those of its parameter: all parts of an expert, then those of the next."""
        return self.expert * PARTS[self.name] + self.part


def expert_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return {name: module} of the modules that hold a layer's experts, without peft's wrappers."""
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"}
    return {name: getattr(module, "get_base_layer", lambda module=module: module)() for name, module in found.items()}


def expert_shapes(module: torch.nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return {parameter: (E, out, in)} of a module of experts, as transformers builds it or as the base stores it."""
    if (stored := getattr(module, "shapes", None)) is not None:
        return stored
    return {name: tuple(one.shape) for name, one in module.named_parameters(recurse=False)}


def expert_fault(module: torch.nn.Module) -> str | None:
    """Why the experts of this module cannot be trained; None if they can."""
    if hasattr(module, "shapes"):
        return None
    found = {name: tuple(one.shape) for name, one in module.named_parameters(recurse=False)}
    if set(found) != set(EXPERT_PARAMETERS) or any(len(shape) != 3 for shape in found.values()):
        if not found and isinstance(module, torch.nn.ModuleList):
            return "its experts are modules of their own, not two fused parameters"
        return (
            f"its experts have the parameters {', '.join(sorted(found))}, not {' and '.join(EXPERT_PARAMETERS)} alone"
        )
    if getattr(module, "is_transposed", False):
        return "its experts' weights are stored as (in, out)"
    if not getattr(module, "is_concatenated", True):
        return "its experts' gate and up rows are interleaved"
    if getattr(type(module), "_apply_gate", None) is not getattr(_plain_experts(), "_apply_gate", None):
        return "its experts have an activation of their own"
    (_, double, hidden), (_, out, inner) = found["gate_up_proj"], found["down_proj"]
    if double != 2 * inner or hidden != out:
        return f"its experts' shapes {found} are not (E, 2I, H) and (E, H, I)"
    return None


def _plain_experts() -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return Qwen3MoeExperts


def expert_matrices(model: Any) -> dict[str, ExpertMatrix]:
    """Return {name in the checkpoint: its place in the model} of all experts' weights; empty for a dense model.

    `model` may be on the meta device and may store its experts quantized. `BadInput` for experts that cannot be
    trained, with the reason.
    """
    from transformers.core_model_loading import revert_weight_conversion

    modules = expert_modules(model)
    if not modules:
        return {}
    kind = model.config.model_type
    for name, module in modules.items():
        if fault := expert_fault(module):
            raise BadInput(f"{kind} is a mixture of experts that cannot be trained here: {name}: {fault}.")
    places: dict[str, ExpertMatrix] = {}
    for name, module in modules.items():
        shapes = expert_shapes(module)
        # Stand-ins of the same number of experts and parts, whose values say where they were: conversion moves them
        # as it moves weights.
        numbered = {
            f"{name}.{one}": torch.arange(shape[0] * PARTS[one]).view(shape[0], PARTS[one], 1)
            for one, shape in shapes.items()
        }
        for one, tensor in numbered.items():
            parameter = one.rpartition(".")[2]
            _, rows, columns = shapes[parameter]
            for stored, value in revert_weight_conversion(model, {one: tensor}).items():
                if value.numel() != 1:
                    raise BadInput(
                        f"{kind} is a mixture of experts that cannot be trained here: its checkpoint stores them "
                        f"fused ({stored}, {tuple(shapes[parameter])}), not one matrix per expert."
                    )
                expert, part = divmod(int(value), PARTS[parameter])
                places[stored] = ExpertMatrix(name, parameter, expert, part, rows // PARTS[parameter], columns)
    return places


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return {name in the checkpoint: shape} of every parameter of a model, a tied one once, in the model's order."""
    by_parameter: dict[str, dict[str, tuple[int, ...]]] = {}
    for stored, place in expert_matrices(model).items():
        by_parameter.setdefault(f"{place.module}.{place.name}", {})[stored] = (place.rows, place.columns)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shapes |= by_parameter.get(name) or {name: tuple(parameter.shape)}
    return shapes


def unquantized_names(model: torch.nn.Module) -> list[str]:
    """Names of linear layers that stay in 16 bits and get no adapter: the output embedding, and the routers and gates
    beside a layer's experts (transformers 5 makes most routers no linear layer)."""
    output, blocks = model.get_output_embeddings(), {name.rpartition(".")[0] for name in expert_modules(model)}

    def decides(name: str) -> bool:
        block, _, leaf = name.rpartition(".")
        return leaf in ROUTERS and block in blocks

    return [name for name, one in model.named_modules() if one is output or decides(name)]


def expert_factors(
    places: dict[str, ExpertMatrix], parameter: str, a: torch.Tensor, b: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return {name in the checkpoint: (A (r, in), B (rows, r))}, as views, of peft's factors of a fused parameter.

    `parameter` is its name (`….experts.gate_up_proj`), `a` (r·E, in) holds the experts one after the other, `b`
    (out, r·E) has the expert as its last axis, as in peft 0.21. `ValueError` if the factors do not fit the experts;
    empty if `places`, from `expert_matrices`, have no such parameter.
    """
    own = {name: one for name, one in places.items() if f"{one.module}.{one.name}" == parameter}
    if not own:
        return {}
    first = next(iter(own.values()))
    experts, out = max(one.expert for one in own.values()) + 1, first.rows * PARTS[first.name]
    rank = a.shape[0] // experts
    if rank * experts != a.shape[0] or a.shape[1] != first.columns or b.shape != (out, rank * experts):
        raise ValueError(
            f"{parameter} has A {tuple(a.shape)} and B {tuple(b.shape)}; {experts} experts of {(out, first.columns)} "
            f"need A ({experts} r, {first.columns}) and B ({out}, r {experts})"
        )
    by_expert, columns = a.view(experts, rank, -1), b.view(out, rank, experts)
    return {
        name: (by_expert[one.expert], columns[one.part * one.rows : (one.part + 1) * one.rows, :, one.expert])
        for name, one in own.items()
    }
