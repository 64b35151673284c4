"""A layer's experts on a vLLM worker, as linear layers that `remerge.py` folds adapters into.

vLLM stacks the experts of a worker in two parameters, `w13_weight` (E, 2I, H), gate rows first, and `w2_weight`
(E, H, I). Each is one `Linear` here whose rows are those of all its experts and whose parts are the matrices of the
checkpoint, so that copies are read and weights dequantized as for any other layer. An adapter's factors are those of
the whole parameter, a (E, r, columns) and b (E, rows of an expert, r).

Covers tensor parallelism (w13 by rows, w2 by columns), expert parallelism, and every quantization that vLLM computes
when it loads a checkpoint. Not covered: redundant experts (EPLB), sizes that vLLM pads, biases. Written for vllm 0.26
to 0.31.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kit.core import lora
from kit.core.file_kinds import BASE
from kit.core.run_files import read_optional
from kit.rollout.server.shard import Linear, Part
from kit.rollout.server.vllm_types import ExpertLayer

if TYPE_CHECKING:
    import torch

SLOTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


def find_experts(model: "torch.nn.Module") -> list[Linear]:
    """Find a worker's experts: for each layer of experts one `Linear` for w13 and one for w2.

    `ValueError` for experts that the worker does not hold as the checkpoint has them.
    """
    try:
        from vllm.model_executor.layers.fused_moe import RoutedExperts
    except ImportError:  # a model without experts needs no support for them
        return []
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            found += _of_layer(name.removesuffix(".routed_experts"), layer)
    return found


def _of_layer(name: str, layer: Any) -> list[Linear]:
    moe = layer.moe_config
    hidden, inner = layer.hidden_size, moe.intermediate_size_per_partition
    wanted = moe.hidden_dim_unpadded, moe.intermediate_size_per_partition_unpadded
    if (hidden, inner) != wanted:
        raise ValueError(
            f"{name}: vLLM pads its experts from {wanted} to {(hidden, inner)} (hidden size, rows of an expert on "
            "this worker), which remerge does not cover. Serve it with another server.weights or tensor_parallel"
        )
    backend = getattr(getattr(layer.quant_method, "fp8_backend", None), "name", "")
    if "MARLIN" in backend:
        raise ValueError(
            f"{name}: its FP8 weights are repacked for Marlin's kernels (no FP8 arithmetic, or server.force_w8a16), "
            "which remerge covers for linear layers only. Set server.weights to bf16"
        )
    if getattr(moe, "has_bias", False):
        raise ValueError(f"{name}: its experts have biases, which remerge does not cover")
    places, experts = local_experts(layer), layer.global_num_experts
    if len(places) != (wanted := experts if layer._expert_map is None else layer.local_num_experts):
        raise ValueError(f"{name}: it holds {len(places)} of {experts} experts, {wanted} were expected")
    rank, whole = moe.tp_rank, inner * moe.tp_size
    gate, up, down = (getattr(layer, f"ckpt_{one}_proj_name") for one in ("gate", "up", "down"))
    parts: dict[str, list[Part]] = {"gate_up_proj": [], "down_proj": []}
    for place, expert in enumerate(places):
        for number, projection in enumerate((gate, up)):
            row = (2 * place + number) * inner
            parts["gate_up_proj"].append(Part(f"{name}.{expert}.{projection}", row, inner, rank * inner, 0))
        parts["down_proj"].append(Part(f"{name}.{expert}.{down}", place * hidden, hidden, 0, rank * inner))
    widths = {"gate_up_proj": (hidden, hidden), "down_proj": (inner, whole)}  # the worker's columns, and all
    return [
        Linear(f"{name}.{one}", layer, sum(part.rows for part in parts[one]), columns, parts[one], width=width)
        for one, (columns, width) in widths.items()
    ]


def local_experts(layer: ExpertLayer) -> list[int]:
    """Numbers of the experts that a worker holds, in its order."""
    if (table := layer._expert_map) is None:
        return list(range(layer.global_num_experts))
    pairs = [(local, expert) for expert, local in enumerate(table.tolist()) if local >= 0]
    return [expert for _, expert in sorted(pairs)]


def is_experts(linear: Linear) -> bool:
    return linear.name.rpartition(".")[2] in SLOTS and hasattr(linear.layer, "global_num_experts")


def read_factors(linear: Linear, tensors: dict[str, "torch.Tensor"], config: dict, prefix: str) -> Any:
    """Take this worker's factors of a parameter's experts out of an adapter's `tensors`: (a (E, r, columns),
    b (E, rows of an expert, r), scale), in the file's dtype; None if the adapter has none.

    `ValueError` for factors that do not fit.
    """
    import torch

    module, _, name = linear.name.rpartition(".")
    wrappers = lora.expert_wrappers(module)
    key = next((one for one in wrappers if lora.expert_parameter(config, one) == f"{module}.{name}"), None)
    if key is None:
        return None
    a, b = (tensors.pop(f"{prefix}{key}.{factor}.weight", None) for factor in ("lora_A", "lora_B"))
    if a is None and b is None:
        return None
    if a is None or b is None:
        raise ValueError(f"{linear.name} has one of its two factors only")
    layer, inner = cast(ExpertLayer, linear.layer), linear.parts[0].rows
    experts, rank = layer.global_num_experts, lora.rank_of(config, f"{module}.{name}")
    rows = 2 * inner * layer.moe_config.tp_size if name == "gate_up_proj" else linear.parts[0].rows
    if rank is None or a.shape != (rank * experts, linear.width) or b.shape != (rows, rank * experts):
        raise ValueError(
            f"{linear.name} has factors of {tuple(a.shape)} and {tuple(b.shape)}; rank {rank} on {experts} experts of "
            f"{(rows, linear.width)} needs {(f'{rank} x {experts}', linear.width)} and {(rows, f'{rank} x {experts}')}"
        )
    mine = torch.tensor(local_experts(layer), device=a.device)
    first = linear.parts[0].first_in
    a = a.view(experts, rank, -1)[mine, :, first : first + linear.columns]
    # peft has the expert as the last axis.
    b = b.view(rows, rank, experts)[:, :, mine].permute(2, 0, 1)
    if name == "gate_up_proj":
        first = linear.parts[0].first_out
        gate, up = b.split(rows // 2, dim=1)
        b = torch.cat([gate[:, first : first + inner], up[:, first : first + inner]], dim=1)
    return a.contiguous(), b.contiguous(), lora.scale_of(config, f"{module}.{name}")


def add_updates(weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", scale: float) -> None:
    """weight (E, rows, columns) += scale · b · a in place, an expert at a time: summed in float32, rounded once."""
    for expert, (left, right) in enumerate(zip(b, a, strict=True)):
        weight[expert] = weight[expert].float() + scale * (left.float() @ right.float())


def write_experts(layer: Any, w13: "torch.Tensor", w2: "torch.Tensor") -> None:
    """Make a layer of vLLM compute with experts w13 (E, 2I, H) and w2 (E, H, I), applying its own quantization.

    On a GPU every parameter keeps its address; `RuntimeError` if its shape or type would change.
    """
    from torch import nn

    fresh = _shallow(layer)
    fresh.__dict__.pop("_already_called_process_weights_after_loading", None)
    fresh._parameters["w13_weight"] = nn.Parameter(w13, requires_grad=False)
    fresh._parameters["w2_weight"] = nn.Parameter(w2, requires_grad=False)
    # The method keeps its kernel and the scales that the kernel reads: a copy of it gets those of `fresh`.
    method = _shallow(layer.quant_method)
    fresh.__dict__["quant_method"] = method
    if not w13.is_cuda:
        method.moe_kernel = None  # a kernel that is there already would not pack the new weights
    _quantize(method, fresh)
    for name, value in fresh._parameters.items():
        current = layer._parameters.get(name)
        if value is None or value is current:
            continue
        if current is None or current.shape != value.shape or current.dtype != value.dtype:
            if w13.is_cuda:
                raise RuntimeError(f"{name} of {type(layer).__name__} would change its shape or type")
            setattr(layer, name, value)
        else:
            current.data.copy_(value.data)
    if not w13.is_cuda:
        layer.quant_method = method  # whatever a CPU kernel keeps outside the parameters


def _shallow(module: "torch.nn.Module") -> Any:
    """A copy of a module that shares its tensors; what is set on it is not set on the module."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        if name in module.__dict__:  # vllm 0.26's quantization methods are no modules
            made.__dict__[name] = dict(module.__dict__[name])
    return made


def _quantize(method: Any, layer: Any) -> None:
    """Run a quantization on freshly loaded weights; with a scale per row, on all experts' rows at once: their numbers
    do not depend on other rows, and vLLM would launch its kernels for each expert."""
    if not getattr(method, "per_out_ch_quant", False) or not layer.w13_weight.is_cuda:
        method.process_weights_after_loading(layer)
        return
    shapes = {name: getattr(layer, name).shape for name in SLOTS.values()}
    for name, (experts, rows, columns) in shapes.items():
        getattr(layer, name).data = getattr(layer, name).data.view(1, experts * rows, columns)
    kept, setup = layer.local_num_experts, method._setup_kernel

    def stacked(layer: Any, w13: Any, w2: Any, w13_scale: Any, w2_scale: Any, **others: Any) -> None:
        layer.local_num_experts = kept
        experts = shapes["w13_weight"][0]
        scales = (scale.view(experts, -1, 1) for scale in (w13_scale, w2_scale))
        setup(layer, w13.view(shapes["w13_weight"]), w2.view(shapes["w2_weight"]), *scales, **others)

    layer.local_num_experts, method._setup_kernel = 1, stacked
    method.process_weights_after_loading(layer)


def adapter_modules(linears: list[Linear]) -> list[str]:
    """Names under which an adapter's file may have factors for experts (peft's nested wrappers)."""
    modules = dict.fromkeys(one.name.rpartition(".")[0] for one in linears if is_experts(one))
    return [name for module in modules for name in lora.expert_wrappers(module)]


def unquantized(directory: Path, names: "set[str]") -> set[str]:
    """Those of the layers `names` that the base in a directory stores unquantized and that no adapter may target:
    routers."""
    facts = read_optional(directory / "base.json", BASE)
    quantized, tensors = set(facts.get("quantized") or ()), facts.get("tensors") or {}
    return {name for name in names if name not in quantized and f"{name}.weight" in tensors}
