"""The deployment formats that a policy can be trained in, by the kit's name, a name of nvidia-modelopt, or its YAML.

fp8         weights FP8 (E4M3), a scale per output channel; activations FP8, a scale per token.
fp8_block   weights FP8 in blocks of 128 x 128; activations FP8 in groups of 128, scales found as they come.
fp8_static  weights FP8, one scale; activations FP8, one scale that calibration finds.
w4a16       weights INT4, symmetric, groups of 128, or of 64 where 128 does not divide every layer's inputs.
nvfp4a16    weights FP4 (E2M1) in groups of 16 with E4M3 scales under one global scale.
nvfp4       the same, and activations in FP4 like them, under a global scale that calibration finds (W4A4).

Each is a layout that `python -m merge` writes, and fake_quant.py has its numbers. A configuration of
nvidia-modelopt says which layout it is (modelopt_config.py), not how scales are found. Imports no torch.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from recipes.parts.config import Config
from recipes.parts.errors import BadInput, did_you_mean

GROUPS = {"fp8": 128, "nvfp4": 16}  # values of an activation that share a scale, in formats per block
# Keys of a model's configuration that only a mixture of experts sets.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
FP8_CAPABILITY = (8, 9)
INT4_GROUPS = (128, 64)  # weights that share a scale, the first that divides; an NF4 base has blocks of 64


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
        """Inputs of a token that share a scale, of a format per block."""
        return GROUPS[self.kind]


@dataclass(frozen=True)
class QuantFormat:
    name: str  # of `python -m merge --format`
    weight: WeightFormat
    activation: ActivationFormat | None

    @property
    def needs_calibration(self) -> bool:
        return self.activation is not None and self.activation.is_static

    @property
    def shares_peak(self) -> bool:
        """Whether layers that a server fuses (q, k, v; gate, up) have to take one peak: the largest of theirs."""
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
    """How many INT4 weights share a scale in a checkpoint whose layers have these numbers of inputs: one number for
    all of them, 128 where nothing fits."""
    sizes = set(inputs)
    return next((group for group in INT4_GROUPS if not any(size % group for size in sizes)), INT4_GROUPS[0])


def fitted(fmt: QuantFormat, inputs: Iterable[int]) -> QuantFormat:
    """`fmt` as a model stores it whose quantized layers have these numbers of inputs: INT4 with the group that divides
    them."""
    if fmt.weight.kind != "int4":
        return fmt
    return replace(fmt, weight=WeightFormat("int4", (1, int4_group(inputs))))


# The merge's other formats: what to do in place of training for one.
NOT_TRAINED = {
    "bf16": "training computes in 16 bits without quantizers. Leave policy.quant_cfg out.",
    "nf4": "it is how the frozen base is stored (policy.quantization). Leave policy.quant_cfg out.",
    "awq": "its scales are found on the trained weights. Train for w4a16, which is stored the same way, or leave "
    "policy.quant_cfg out and merge with --format awq.",
}
# What numbers are called elsewhere, and the format of the kit that has them or comes nearest.
CALLED = {"int4": "w4a16", "fp4": "nvfp4a16", "int8": "fp8", "w4a4": "nvfp4", "w8a8": "fp8"}


def read_quant_format(text: str, key: str = "policy.quant_cfg") -> QuantFormat:
    """The format that `key` names: a format of the merge, a configuration of nvidia-modelopt, or a YAML file in its
    form. `BadInput` for an unknown name, with the nearest, and for what no layout stores, with the reason.
    """
    from recipes.parts import modelopt_config

    if text in FORMATS:
        return FORMATS[text]
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return modelopt_config.read_file(Path(text), key)
    if (found := modelopt_config.by_name(text, key)) is not None:
        return found
    if text in NOT_TRAINED:
        raise BadInput(
            f"{key} ({text}) is a format of the merge that no run is trained for: {NOT_TRAINED[text]} "
            f"Known: {', '.join(FORMATS)}."
        )
    names = {name: name for name in FORMATS} | modelopt_config.LAYOUTS
    raise BadInput(
        f"{key} ({text}) is no format, no configuration of nvidia-modelopt and no YAML file.{_nearest(text, names)} "
        f"Known: {', '.join(names)}."
    )


def _nearest(text: str, names: Mapping[str, str]) -> str:
    """Which of `names`, {name: format}, was meant: one with the same numbers before one that is spelled alike."""
    folded = text.lower()
    if folded in CALLED:
        return f" Did you mean {CALLED[folded]}?"
    kind = next((FORMATS[fmt].weight.kind for start, fmt in CALLED.items() if folded.startswith(start)), None)
    if alike := [name for name, fmt in names.items() if FORMATS[fmt].weight.kind == kind]:
        return did_you_mean(text, alike, cutoff=0)
    return did_you_mean(text, names, cutoff=0.4)


def check_model(fmt: QuantFormat, model_config: Any) -> QuantFormat:
    """`fmt` as a model with this configuration (transformers' object, or the content of a config.json) stores it.

    `BadInput` when it has no checkpoint in `fmt`: a mixture of experts, or linear layers whose sizes the format's
    blocks do not divide."""
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
    """A key of a mixture of experts with its value, from the content of a config.json or a part of it (text_config);
    empty for a dense model."""
    for key, value in facts.items():
        if isinstance(value, Mapping) and (found := find_experts(value)):
            return found
        if key in EXPERTS and value:
            return f"{key} {value}"
    return ""


def _decoder_shapes(facts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """{layer: (out, in)} of a decoder of attention and gated MLP."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    size = facts.get("head_dim") or math.ceil(hidden / heads)
    inner, keys = facts["intermediate_size"], size * (facts.get("num_key_value_heads") or heads)
    return {
        **{"q_proj": (size * heads, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)},
        **{"o_proj": (hidden, size * heads), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        "down_proj": (hidden, inner),
    }


def check_shapes(fmt: QuantFormat, shapes: Mapping[str, tuple[int, int]]) -> None:
    """`BadInput` when `fmt` cannot store one of these linear layers, {name: (out, in)}."""
    fmt = fitted(fmt, (size for _, size in shapes.values()))
    rows, columns = fmt.weight.block
    across = columns or 1
    odd = [name for name, (_, size) in shapes.items() if size % across]
    if fmt.name == "fp8_block":
        # Readers of the layout tell a single column of blocks from a scale per output channel by the shapes alone.
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
    """`BadInput` when this machine's GPU cannot sample in `fmt` with `rollout.backend`.

    Training is never refused: every format's numbers are computed with in the model's dtype, on any GPU and on a CPU,
    also FP4 where no FP4 arithmetic is. A rollout server leaves FP8 to vLLM, which on a GPU without FP8 arithmetic
    multiplies with activations that are not quantized: another policy than the one that learns.
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


def problems(config: Config) -> list[str]:
    """Why this configuration cannot train in its format, beside what its servers need (served_format.py), which also
    says that there is no such format; nothing without `policy.quant_cfg`."""
    policy = config.policy
    try:
        fmt = read_quant_format(policy.quant_cfg) if policy.quant_cfg is not None else None
    except BadInput:
        return []
    if fmt is None:
        return []
    counts = {
        "policy.quant_calib_size": policy.quant_calib_size,
        "policy.quant_batch_size": policy.quant_batch_size,
        "policy.quant_sequence_length": policy.quant_sequence_length,
    }
    found = [f"{key} ({value}) must be at least 1." for key, value in counts.items() if value < 1]
    if config.model.path and (file := Path(config.model.path) / "config.json").is_file():
        try:
            check_model(fmt, json.loads(file.read_text()))
        except BadInput as error:
            found.append(str(error))
    return found
