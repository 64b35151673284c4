"""Deployment formats that a policy can be trained in, and the models and GPUs that support them.

fp8         weights FP8 (E4M3), a scale per output channel; activations FP8, a scale per token.
fp8_block   weights FP8 in blocks of 128 x 128; activations FP8 in groups of 128, dynamic scales.
fp8_static  weights FP8, one scale; activations FP8, one calibrated scale.
w4a16       weights INT4, symmetric, groups of 128, or of 64 if 128 does not divide every layer's inputs.
nvfp4a16    weights FP4 (E2M1) in groups of 16 with E4M3 scales under one global scale.
nvfp4       the same, with activations in FP4 too, under a calibrated global scale (W4A4).

Each is a layout that `python -m merge` writes; kit/weights/quantize.py defines its numbers and `format_names` reads
its name. Imports torch only to look at a GPU.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.core.errors import BadInput

GROUPS = {"fp8": 128, "nvfp4": 16}  # activation values that share a scale, in formats per block
# Keys of a model's configuration that only a mixture of experts sets.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
FP8_CAPABILITY = (8, 9)
INT4_GROUPS = (128, 64)  # weights that share a scale: the first that divides. An NF4 base has blocks of 64


@dataclass(frozen=True)
class WeightFormat:
    kind: Literal["fp8", "int4", "nvfp4"]
    block: tuple[int | None, int | None]  # (rows, columns) that share a scale, None = all


@dataclass(frozen=True)
class ActivationFormat:
    kind: Literal["fp8", "nvfp4"]
    per: Literal["token", "tensor", "block"]
    is_static: bool  # its range comes from calibration

    @property
    def group(self) -> int:
        """Inputs of a token that share a scale, for a format per block."""
        return GROUPS[self.kind]


@dataclass(frozen=True)
class QuantFormat:
    name: str  # as in `python -m merge --format`
    weight: WeightFormat
    activation: ActivationFormat | None

    @property
    def needs_calibration(self) -> bool:
        return self.activation is not None and self.activation.is_static

    @property
    def shares_peak(self) -> bool:
        """Whether layers that a server fuses (q, k, v; gate, up) must share one peak: the largest of theirs."""
        return self.weight.kind == "nvfp4"


FORMATS = {
    one.name: one
    for one in (
        QuantFormat("fp8", WeightFormat("fp8", (1, None)), ActivationFormat("fp8", "token", False)),
        QuantFormat("fp8_block", WeightFormat("fp8", (128, 128)), ActivationFormat("fp8", "block", False)),
        QuantFormat("fp8_static", WeightFormat("fp8", (None, None)), ActivationFormat("fp8", "tensor", True)),
        QuantFormat("w4a16", WeightFormat("int4", (1, 128)), None),
        QuantFormat("nvfp4a16", WeightFormat("nvfp4", (1, 16)), None),
        QuantFormat("nvfp4", WeightFormat("nvfp4", (1, 16)), ActivationFormat("nvfp4", "block", True)),
    )
}


def int4_group(inputs: Iterable[int]) -> int:
    """INT4 weights per scale for layers with these input sizes: one value for all of them, 128 if none fits."""
    sizes = set(inputs)
    return next((group for group in INT4_GROUPS if not any(size % group for size in sizes)), INT4_GROUPS[0])


def fitted(fmt: QuantFormat, inputs: Iterable[int]) -> QuantFormat:
    """`fmt` as stored by a model whose quantized layers have these input sizes: INT4 uses a group that divides
    them."""
    if fmt.weight.kind != "int4":
        return fmt
    return replace(fmt, weight=WeightFormat("int4", (1, int4_group(inputs))))


def check_model(fmt: QuantFormat, model_config: Any) -> QuantFormat:
    """`fmt` as stored by a model with this configuration (transformers' object, or the content of a config.json).

    Raises `BadInput` if the model cannot have a checkpoint in `fmt`: a mixture of experts, or linear layers whose
    sizes the format's blocks do not divide.
    """
    facts = model_config if isinstance(model_config, Mapping) else model_config.to_dict()
    kind = facts.get("model_type", "unknown")
    if experts := find_experts(facts):
        raise BadInput(
            f"policy.quant_cfg {fmt.name}: the model ({kind}) is a mixture of experts ({experts}). Its experts' "
            "weights are no linear layers: neither adapter nor quantizer reaches them, and servers store them in "
            "other layouts. Take a dense model."
        )
    facts = facts.get("text_config") or facts
    if facts.get("hidden_size") and facts.get("intermediate_size") and facts.get("num_attention_heads"):
        shapes = _decoder_shapes(facts)
        check_shapes(fmt, shapes)
        return fitted(fmt, (inputs for _, inputs in shapes.values()))
    return fmt


def find_experts(facts: Mapping[str, Any]) -> str:
    """A mixture-of-experts key with its value; empty for a dense model.

    `facts` is the content of a config.json or a part of it (text_config).
    """
    for key, value in facts.items():
        if isinstance(value, Mapping) and (found := find_experts(value)):
            return found
        if key in EXPERTS and value:
            return f"{key} {value}"
    return ""


def _decoder_shapes(facts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """{layer: (out, in)} of a decoder with attention and a gated MLP."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    size = facts.get("head_dim") or math.ceil(hidden / heads)
    inner, keys = facts["intermediate_size"], size * (facts.get("num_key_value_heads") or heads)
    return {
        **{"q_proj": (size * heads, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)},
        **{"o_proj": (hidden, size * heads), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        "down_proj": (hidden, inner),
    }


def check_shapes(fmt: QuantFormat, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `BadInput` if `fmt` cannot store one of these linear layers, {name: (out, in)}."""
    fmt = fitted(fmt, (size for _, size in shapes.values()))
    rows, columns = fmt.weight.block
    across = columns or 1
    odd = [name for name, (_, size) in shapes.items() if size % across]
    if fmt.name == "fp8_block":
        # Readers of the layout tell a single column of blocks from a scale per output channel by shape alone.
        odd = [n for n, (o, i) in shapes.items() if o % rows or i % columns or o > rows == i]
    if not odd:
        return
    out, size = shapes[odd[0]]
    needs = f"groups of {' or '.join(map(str, INT4_GROUPS)) if fmt.weight.kind == 'int4' else columns} inputs"
    if fmt.name == "fp8_block":
        needs = f"whole blocks of {rows} x {columns}, and more than one across when there is more than one down"
    raise BadInput(
        f"policy.quant_cfg {fmt.name} needs {needs}; {len(odd)} of {len(shapes)} kinds of linear layers do not have "
        f"them ({odd[0]}: {out} outputs, {size} inputs). fp8 has no such limit."
    )


def check_hardware(fmt: QuantFormat, backend: str) -> None:
    """Raise `BadInput` if this machine's GPU cannot sample in `fmt` with `rollout.backend`.

    Training is never refused: every format's numbers are computed in the model's dtype, on any GPU and on a CPU,
    including FP4 without FP4 arithmetic. A rollout server leaves FP8 to vLLM, which on a GPU without FP8 arithmetic
    does not quantize activations: that is another policy than the one that learns.
    """
    import torch

    if backend != "server" or fmt.name not in ("fp8", "fp8_block") or not torch.cuda.is_available():
        return
    if (capability := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise BadInput(
            f"policy.quant_cfg {fmt.name}: {torch.cuda.get_device_name()} has no FP8 arithmetic (compute capability "
            f"{capability[0]}.{capability[1]}, needed 8.9), so vLLM would not quantize activations as the policy "
            "does. Use fp8_static, w4a16, nvfp4a16 or nvfp4, whose numbers are served as BF16, or rollout.backend "
            "in_process."
        )
