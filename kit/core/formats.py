"""Deployment formats: `FORMATS` has one row for each, with every fact about it.

Configuration, plan, policy, server, merge, pages and plots read the rows. To add a format, add a row; a new kind of
numbers is defined in kit/weights/quantize.py, a new layout is written in merge/quantize.py. Imports no torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.core.errors import BadInput

GROUPS = {"fp8": 128, "nvfp4": 16}  # activation values that share a scale, in formats per block
# Keys of a model's configuration that only a mixture of experts sets.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")


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


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    name: str  # as in `python -m merge --format`
    stores: str  # who reads a checkpoint, and what it holds: a line of its model card
    bytes_per_weight: float  # of a quantized layer, scales included
    color: str  # in every plot; Okabe and Ito (2008), Tol (2021)
    marker: str
    weight: WeightFormat | None = None  # None: no scale of rows and columns (bf16, bitsandbytes' flat blocks)
    activation: ActivationFormat | None = None
    # Sizes that a group of inputs may have instead of `weight.block[1]`: the first that divides the inputs of every
    # layer. An NF4 base has blocks of 64.
    groups: tuple[int, ...] = ()
    layout: str = ""  # its name in compressed-tensors, or bitsandbytes
    preset: str = ""  # compressed-tensors' scheme
    weights_preset: str = ""  # scheme of the weights if it is another one's
    served_as: str = "bf16"  # server.weights of a run that trains for it; bf16 holds the same numbers
    kernels: str = ""  # server.weights that holds them as stored, for vLLM's own kernels
    not_trained: str = ""  # why no run trains for it, and what to do instead
    modelopt: str = ""  # nvidia-modelopt's configuration of the same numbers
    called: tuple[str, ...] = ()  # names used elsewhere for these numbers or the nearest ones
    needs_llmcompressor: bool = False

    @property
    def needs_calibration(self) -> bool:
        """Whether the inputs of its layers have calibrated ranges."""
        return self.activation is not None and self.activation.is_static

    @property
    def needs_data(self) -> bool:
        """Whether quantizing a model takes data."""
        return self.needs_calibration or self.needs_llmcompressor

    @property
    def shares_peak(self) -> bool:
        """Whether layers that a server fuses (q, k, v; gate, up) must share one peak: the largest of theirs."""
        return self.weight is not None and self.weight.kind == "nvfp4"

    @property
    def servers(self) -> tuple[str, ...]:
        """Values of server.weights that hold these numbers."""
        return (self.served_as, self.kernels) if self.kernels else (self.served_as,)

    @property
    def by_vllm(self) -> bool:
        """Whether a rollout server leaves it to vLLM's own quantization."""
        return self.served_as != "bf16"


# In the order in which checkpoints are made: the others are made from bf16.
ROWS = (
    QuantFormat(
        name="bf16",
        stores="transformers and vLLM; the weights are plain BF16",
        bytes_per_weight=2.0,
        color="#404040",
        marker="s",
        not_trained="training computes in 16 bits without quantizers. Leave policy.quant_cfg out.",
    ),
    QuantFormat(
        name="fp8",
        stores="transformers and vLLM; E4M3 weights with a scale per output channel, activations quantized per token",
        bytes_per_weight=1.0,
        color="#0072b2",
        marker="D",
        weight=WeightFormat("fp8", (1, None)),
        activation=ActivationFormat("fp8", "token", False),
        layout="float-quantized",
        preset="FP8_DYNAMIC",
        served_as="fp8_per_channel",
        modelopt="FP8_PER_CHANNEL_PER_TOKEN_CFG",
        called=("int8", "w8a8"),
    ),
    QuantFormat(
        name="fp8_block",  # dynamic activation scales in groups of 128
        stores="transformers and vLLM; E4M3 weights with a scale per block of 128 x 128",
        bytes_per_weight=1.0,
        color="#56b4e9",
        marker="^",
        weight=WeightFormat("fp8", (128, 128)),
        activation=ActivationFormat("fp8", "block", False),
        layout="float-quantized",
        preset="FP8_BLOCK",
        served_as="fp8_per_block",
    ),
    QuantFormat(
        name="fp8_static",
        stores="transformers and vLLM; E4M3 weights with one scale each, activations by calibrated scales",
        bytes_per_weight=1.0,
        color="#88ccee",
        marker="h",
        weight=WeightFormat("fp8", (None, None)),
        activation=ActivationFormat("fp8", "tensor", True),
        layout="float-quantized",
        preset="FP8",
        # Given a single scale per weight, vLLM 0.31 takes the largest of the layers that it fuses and requantizes the
        # others, through FP16. Repeated for every output channel, the scale is kept as it is.
        weights_preset="FP8_DYNAMIC",
        modelopt="FP8_DEFAULT_CFG",
    ),
    QuantFormat(
        name="w4a16",  # symmetric INT4
        stores="transformers and vLLM; INT4 weights in groups of 128, rounded to nearest",
        bytes_per_weight=0.52,
        color="#e69f00",
        marker="v",
        weight=WeightFormat("int4", (1, 128)),
        groups=(128, 64),
        layout="pack-quantized",
        preset="W4A16",
        kernels="w4a16",
        modelopt="INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
        called=("int4",),
    ),
    QuantFormat(
        name="awq",
        stores="transformers and vLLM; INT4 weights in groups of 128, by AWQ",
        bytes_per_weight=0.52,
        color="#d55e00",
        marker="P",
        weight=WeightFormat("int4", (1, 128)),
        groups=(128, 64),
        layout="pack-quantized",
        preset="W4A16",
        needs_llmcompressor=True,
        not_trained="its scales are found on the trained weights. Train for w4a16, which is stored the same way, or "
        "leave policy.quant_cfg out and merge with --format awq.",
    ),
    QuantFormat(
        name="nvfp4a16",  # E2M1 in groups of 16 with E4M3 scales under one global scale
        stores="vLLM; FP4 weights in groups of 16, activations in 16 bits",
        bytes_per_weight=0.57,
        color="#009e73",
        marker="X",
        weight=WeightFormat("nvfp4", (1, 16)),
        layout="nvfp4-pack-quantized",
        preset="NVFP4A16",
        modelopt="W4A16_NVFP4_CFG",
        called=("fp4",),
    ),
    QuantFormat(
        name="nvfp4",  # W4A4: FP4 activations under a calibrated global scale
        stores="vLLM on GPUs with FP4 arithmetic; FP4 weights and activations in groups of 16",
        bytes_per_weight=0.57,
        color="#332288",
        marker="*",
        weight=WeightFormat("nvfp4", (1, 16)),
        activation=ActivationFormat("nvfp4", "block", True),
        layout="nvfp4-pack-quantized",
        preset="NVFP4",
        weights_preset="NVFP4A16",
        modelopt="NVFP4_DEFAULT_CFG",
        called=("w4a4",),
    ),
    QuantFormat(
        name="nf4",
        stores="transformers with bitsandbytes; NF4 weights in blocks of 64, double quantization",
        bytes_per_weight=0.52,
        color="#cc79a7",
        marker="o",
        layout="bitsandbytes",
        not_trained="it is how the frozen base is stored (policy.quantization). Leave policy.quant_cfg out.",
    ),
)
FORMATS = {fmt.name: fmt for fmt in ROWS}
TRAINED = {fmt.name: fmt for fmt in ROWS if not fmt.not_trained}  # those that a run can be trained for


def packed_format(weights: str | None) -> QuantFormat | None:
    """The format whose stored form `server.weights` holds; None for weights that vLLM quantizes, and for bf16."""
    return next((fmt for fmt in ROWS if fmt.kernels and fmt.kernels == weights), None)


def served_bytes(weights: str, bf16: float = 2.0) -> float:
    """Bytes of a linear layer's weight in `server.weights`; `bf16` are those of an unquantized one."""
    if weights == "bf16":
        return bf16
    packed = packed_format(weights)
    return packed.bytes_per_weight if packed else 1.0


def fitted(fmt: QuantFormat, inputs: Iterable[int]) -> QuantFormat:
    """`fmt` as stored by a model whose quantized layers have these input sizes: with a group that divides them, or the
    largest if none does."""
    if not fmt.groups:
        return fmt
    sizes = set(inputs)
    group = next((group for group in fmt.groups if not any(size % group for size in sizes)), fmt.groups[0])
    return replace(fmt, weight=replace(fmt.weight, block=(1, group)))


def fitted_to(fmt: QuantFormat, model_config: Any) -> QuantFormat:
    """`fmt` as stored by a model with this configuration (transformers' object, or the content of a config.json)."""
    return fitted(fmt, (inputs for _, inputs in _decoder_shapes(_facts(model_config)).values()))


def check_model(fmt: QuantFormat, model_config: Any) -> None:
    """Raise `BadInput` if a model with this configuration cannot be trained for `fmt`: a mixture of experts, or
    linear layers whose sizes the format's blocks do not divide."""
    facts = _facts(model_config)
    if experts := find_experts(facts):
        raise BadInput(
            f"policy.quant_cfg {fmt.name}: the model ({facts.get('model_type', 'unknown')}) is a mixture of experts "
            f"({experts}). Its experts' weights are no linear layers, so no quantizer of the training reaches them. "
            "Take a dense model, or leave policy.quant_cfg out."
        )
    check_shapes(fmt, _decoder_shapes(facts))


def model_fault(fmt: QuantFormat, model_config: Any) -> str:
    """Error text if vLLM's kernels for `fmt` do not support a model with this configuration; empty if they do."""
    facts = _facts(model_config)
    if experts := find_experts(facts):
        return f"does not hold experts ({experts}): the kit folds an adapter into linear layers of {fmt.name} only"
    return shape_fault(fmt, _decoder_shapes(facts))


def _facts(model_config: Any) -> Mapping[str, Any]:
    return model_config if isinstance(model_config, Mapping) else model_config.to_dict()


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
    """{layer: (out, in)} of a decoder with attention and a gated MLP; empty for any other model."""
    facts = facts.get("text_config") or facts
    hidden, inner, heads = (facts.get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    if not (hidden and inner and heads):
        return {}
    size = facts.get("head_dim") or math.ceil(hidden / heads)
    keys = size * (facts.get("num_key_value_heads") or heads)
    return {
        **{"q_proj": (size * heads, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)},
        **{"o_proj": (hidden, size * heads), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        "down_proj": (hidden, inner),
    }


def shape_fault(fmt: QuantFormat, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What `fmt` needs that some of these linear layers, {name: (out, in)}, do not have; empty if all fit.

    Blocks of several rows must be whole, and more than one across if more than one down. compressed-tensors 0.17
    dequantizes by shape alone: given a partial block it takes all blocks to be smaller, and it takes a single column
    of blocks for a scale per output channel. vLLM 0.31 rejects fused layers in which a block would span two of them.
    """
    if fmt.weight is None:
        return ""
    rows, columns = fitted(fmt, (size for _, size in shapes.values())).weight.block
    if rows is None or rows == 1:
        odd = [name for name, (_, size) in shapes.items() if size % (columns or 1)]
        needs = f"groups of {' or '.join(map(str, fmt.groups or (columns,)))} inputs"
    else:
        odd = [n for n, (o, i) in shapes.items() if o % rows or i % columns or o > rows == i]
        needs = f"whole blocks of {rows} x {columns}, and more than one across when there is more than one down"
    if not odd:
        return ""
    out, size = shapes[odd[0]]
    return (
        f"needs {needs}; {len(odd)} of {len(shapes)} linear layers do not have them ({odd[0]}: {out} outputs, {size} "
        "inputs)"
    )


def check_shapes(fmt: QuantFormat, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `BadInput` if `fmt` cannot store one of these kinds of linear layers, {name: (out, in)}."""
    if fault := shape_fault(fmt, shapes):
        raise BadInput(f"policy.quant_cfg {fmt.name} {fault}. fp8 has no such limit.")


def others_than_vllms() -> str:
    """Formats that a rollout server holds as BF16, in words."""
    *names, last = [name for name, fmt in TRAINED.items() if not fmt.by_vllm]
    return f"{', '.join(names)} or {last}"
