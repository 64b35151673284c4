"""Memory and time that `policy.quant_cfg` adds: layers that compute in a deployment format (quantized_linear.py).

Ŵ = Q(base + s·B·A) is made for every matmul, in the forward, the backward and the reference's pass, and then released:
one layer's at a time. What stays for the backward pass is x̂, the layer's input in the format. Weight peaks and input
ranges, 4 bytes per channel or layer, are not counted. On a GPU with FP8 arithmetic one kernel makes a weight; on
others, and on a CPU, the reference implementation in PyTorch does, which writes float32 copies (quantize.py). Imports
no torch.

Bytes were counted by tracing every allocation, as in memory.py (`tests/unit/test_plan_quantized.py`); seconds per
weight were measured on an H200.
"""

import functools

from kit.core.config import format_rules
from kit.core.config.schema import TRAIN, Config
from kit.core.errors import BadInput
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat, check_shapes, shape_fault
from kit.plan.decoder import Shape
from kit.plan.gpus import Card

GIB = 2**30
# Peak bytes per value while PyTorch makes a weight, and an input, of this kind.
TORCH_WEIGHT, TORCH_INPUT = {"fp8": 15, "int4": 15, "nvfp4": 24}, {"fp8": 13, "nvfp4": 22}
# Bytes per value that it reads and writes for them.
TORCH_WEIGHT_MOVES, TORCH_INPUT_MOVES = {"fp8": 97, "int4": 95, "nvfp4": 157}, {"fp8": 58, "nvfp4": 117}
# FP8 codes become float32 x̂ again in the backward pass: bytes beyond the MLP's two gradients that are alive then.
FP8_ROWS = 6


@functools.cache
def _read(text: str) -> QuantFormat:
    return read_quant_format(text)


def format_of(config: Config) -> QuantFormat | None:
    """The format that the policy computes in; raises `BadInput` if `policy.quant_cfg` names none."""
    return None if config.policy.quant_cfg is None else _read(config.policy.quant_cfg)


def has_kernels(card: Card) -> bool:
    """Whether the kernels of quantize_kernel.py run on the card; an unknown card is assumed to be new."""
    return not card.is_cpu and (card.generation is None or card.generation.trainer_fp8)


def multiplies_fp8(config: Config, card: Card) -> bool:
    """Whether forward matmuls take FP8 codes."""
    fmt = format_of(config)
    return fmt is not None and fmt.name == "fp8" and has_kernels(card) and config.model.dtype == "bfloat16"


def faults(shape: Shape, config: Config) -> list[str]:
    """Errors about a shape that `policy.quant_cfg` or packed server weights do not support."""
    if shape.experts is not None:  # refused by expert_rules
        return []
    found, shapes = format_rules.faults(config), {one.name: (one.outs, one.ins) for one in shape.linears}
    if (fmt := format_of(config)) is not None:
        try:
            check_shapes(fmt, shapes)
        except BadInput as error:
            found.append(str(error))
    elif (packed := format_rules.packed_of(config)) and (fault := shape_fault(packed, shapes)):
        found.append(f"server.weights {config.server.weights} {fault}. Set server.weights to fp8_per_channel.")
    return found


def kept_bytes(shape: Shape, config: Config, card: Card) -> float:
    """Bytes per token that a layer keeps for its backward pass beyond memory.layer_bytes.

    x̂ in place of x; attention keeps x beside it, as its output.
    """
    fmt = format_of(config)
    if fmt is None or fmt.activation is None:
        return 0.0
    targets = shape.targeted(config.policy.target_modules)
    narrow, attention = 4 if config.model.dtype == "float32" else 2, "o_proj" in targets
    if not multiplies_fp8(config, card):
        return narrow * shape.q_size * attention
    # FP8 codes and a float32 scale per token, instead of 16 bits.
    hidden = bool({"q_proj", "k_proj", "v_proj"} & set(targets)) + bool({"gate_proj", "up_proj"} & set(targets))
    saved = hidden * shape.hidden + shape.intermediate * ("down_proj" in targets)
    return shape.q_size * attention + 4 * (hidden + attention + ("down_proj" in targets)) - saved


def backward_bytes(shape: Shape, config: Config, card: Card) -> float:
    """Bytes per token beyond memory.backward_bytes at the peak of a layer's backward pass, without what it keeps."""
    fmt = format_of(config)
    if fmt is None or fmt.activation is None:
        return 0.0
    if multiplies_fp8(config, card):
        return FP8_ROWS * shape.intermediate
    narrow = 4 if config.model.dtype == "float32" else 2
    made = 0 if has_kernels(card) else max(0, TORCH_INPUT[fmt.activation.kind] - 2 * narrow) * shape.intermediate
    return max(narrow * shape.hidden, made)  # x beside x̂


def weight_gib(shape: Shape, config: Config, card: Card) -> float:
    """GiB of one Ŵ, of the largest layer, and of the temporaries that make it."""
    fmt, narrow = format_of(config), 4 if config.model.dtype == "float32" else 2
    return shape.largest_linear * (narrow if has_kernels(card) else TORCH_WEIGHT[fmt.weight.kind]) / GIB


def calibration_tokens(config: Config) -> int:
    """Maximum tokens of a forward pass that calibrates input ranges; 0 in formats that have none."""
    fmt, policy = format_of(config), config.policy
    if fmt is None or not fmt.needs_calibration:
        return 0
    length = policy.quant_sequence_length
    if policy.quant_calib_data == TRAIN:
        length = min(length, config.rollout.max_prompt_length)
    return min(policy.quant_batch_size, policy.quant_calib_size) * length
