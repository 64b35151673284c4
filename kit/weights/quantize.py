"""Fake quantization: the numbers that a quantized checkpoint computes with, in the dtype of the model.

Weights are bit for bit what a reader of `merge/quantize.py`'s checkpoint computes with (`read_back`), rounded once to
the compute dtype; only the sign of a zero may differ. Scales of FP8 and INT4 are BF16 numbers, as readers load them.
Activations are quantized as a server does it: FP8 per token, per group of 128 or by one static scale; FP4 in groups
of 16 with E4M3 scales under a static global scale, as vLLM 0.31 emulates it.

A *peak* is the largest |value| that a scale must cover: of a whole weight (`fp8_static`; `nvfp4`'s global scale), of
each output channel (`fp8`), or of a layer's input, from calibration. Formats with a scale per block need none.

On a GPU with FP8 arithmetic `quantize_kernel.py` computes the same numbers in one pass; elsewhere PyTorch does, and it
is the reference implementation. Not covered: gradients (quantized_linear.py passes them straight through).
"""

import functools
from typing import Any

import bitsandbytes as bnb
import torch

from kit.core.cards import generation
from kit.core.formats import FORMATS, ActivationFormat, QuantFormat
from kit.core.limits import PACK_CHUNK
from kit.weights import fp8, stored_weight
from kit.weights.fp8 import E4M3_MAX
from kit.weights.stored_weight import Layer

E2M1_MAX, INT4_MAX = 6.0, 7.5
LEAST_GLOBAL_EXPONENT, MOST_GLOBAL_EXPONENT = -126, 126
ZERO_SCALE = torch.finfo(torch.float32).eps  # compressed-tensors' scale of a block of zeros
ZERO_E4M3_SCALE = 0.125  # of a group of zeros
LEAST_GROUP_PEAK = 1e-10  # vLLM's, for groups of FP8 activations


@torch.no_grad()
def effective_weight(
    layer: Layer, a: torch.Tensor | None = None, b: torch.Tensor | None = None, scaling: float = 1.0
) -> torch.Tensor:
    """Return base + scaling · b · a (out, in) in the base's dtype, summed in float32 and rounded once to BF16, as
    merging does. a (r, in) and b (out, r) are both None without an adapter."""
    if kernels := _kernels(layer.weight):
        return kernels.quantize(_source(layer), a, b, scaling, None, None)
    return effective_weight_in_torch(layer, a, b, scaling)


def effective_weight_in_torch(
    layer: Layer, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Reference implementation of `effective_weight`."""
    weight = stored_weight.weight_in_torch(layer)
    dtype, weight = weight.dtype, weight.float()
    if a is not None:
        weight = weight + scaling * (b.float() @ a.float())
    return weight.to(torch.bfloat16).to(dtype)


@torch.no_grad()
def effective_peak(
    layer: Layer, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, fmt: QuantFormat
) -> torch.Tensor | None:
    """`weight_peak(effective_weight(layer, a, b, scaling), fmt)`."""
    if _has_peak(fmt) and (kernels := _kernels(layer.weight)):
        return kernels.peak_of(_source(layer), a, b, scaling, fmt)
    return weight_peak(effective_weight(layer, a, b, scaling), fmt) if _has_peak(fmt) else None


def _has_peak(fmt: QuantFormat) -> bool:
    return fmt.weight.kind == "nvfp4" or fmt.weight.block[1] is None


def weight_peak(weight: torch.Tensor, fmt: QuantFormat) -> torch.Tensor | None:
    """Peak that `fmt` needs of a weight (out, in), float32: () for the whole weight, (out, 1) per output channel; None
    if each block uses its own. Layers that a server fuses share the largest of their peaks (`fmt.shares_peak`)."""
    if not _has_peak(fmt):
        return None
    return _peak(weight, 1 if fmt.weight.block == (1, None) else None)


def _peak(value: torch.Tensor, dim: int | None) -> torch.Tensor:
    low, high = value.aminmax() if dim is None else value.aminmax(dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs()).float()


@torch.no_grad()
def fake_quantize_weight(weight: torch.Tensor, fmt: QuantFormat, peak: torch.Tensor | None = None) -> torch.Tensor:
    """Return `weight` (out, in) as a reader of the exported checkpoint computes with it, in the same dtype.

    `peak` comes from `weight_peak`; None computes it from `weight`. Both sizes must be multiples of the format's
    block.
    """
    peak = weight_peak(weight, fmt) if peak is None else peak
    if kernels := _kernels(weight):
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        source = kernels.Source(weight, None, tuple(weight.shape), weight.dtype)
        return kernels.quantize(source, None, None, 1.0, fmt, peak, is_rounded=False)
    return fake_quantize_weight_in_torch(weight, fmt, peak)


def fake_quantize_weight_in_torch(
    weight: torch.Tensor, fmt: QuantFormat, peak: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference implementation of `fake_quantize_weight`."""
    peak = weight_peak(weight, fmt) if peak is None else peak
    rows, columns = (size or whole for size, whole in zip(fmt.weight.block, weight.shape, strict=True))
    blocks = weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (out / R, R, in / C, C)
    if fmt.weight.kind == "nvfp4":
        value = _nvfp4(blocks, global_scale(peak))
    else:
        block_peak = _block_peak(blocks) if peak is None else peak.view(-1, 1, 1, 1)
        value = _fp8(blocks, block_peak) if fmt.weight.kind == "fp8" else _int4(blocks, block_peak)
    return value.view(weight.shape).to(weight.dtype)


def _block_peak(blocks: torch.Tensor) -> torch.Tensor:
    """Largest |value| of each block: (out / R, 1, in / C, 1) from (out / R, R, in / C, C)."""
    peak = blocks.abs().amax(-1, keepdim=True)
    return peak if blocks.shape[1] == 1 else peak.amax(1, keepdim=True)


def _divided(value: torch.Tensor, by: float) -> torch.Tensor:
    # Divide by a tensor: with a Python number, PyTorch multiplies by its reciprocal on a GPU.
    return value / torch.full((), by, device=value.device)


def bf16_scale(peak: torch.Tensor, largest: float) -> torch.Tensor:
    """peak / largest rounded to BF16, in float32; never 0."""
    scale = _divided(peak, largest).to(torch.bfloat16).float()
    return torch.where(scale == 0, ZERO_SCALE, scale)


def _fp8(value: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    scale = bf16_scale(peak, E4M3_MAX)
    return fp8.to_e4m3(value, scale).float() * scale


def _int4(value: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    scale = bf16_scale(peak, INT4_MAX)
    return int4_codes(value, scale) * scale


def int4_codes(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes from -8 to 7 of `value`, in float32 like it."""
    return (value / scale).round_().clamp_(-8, 7)


@torch.no_grad()
def pack_int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a w4a16 checkpoint stores of `weight` (out, in), rounded to BF16 first: codes (out, in / 8) int32,
    the first of eight in the lowest bits, and BF16 scales (out, in / group). Works in pieces that take 15 bytes per
    weight."""
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=weight.device)
    scale = torch.empty(rows, columns // group, dtype=torch.bfloat16, device=weight.device)
    step = max(1, PACK_CHUNK // columns)
    for piece in (slice(at, at + step) for at in range(0, rows, step)):
        value = weight[piece].to(torch.bfloat16).float().unflatten(1, (-1, group))  # (R, in / group, group)
        own = bf16_scale(value.abs().amax(-1, keepdim=True), INT4_MAX)
        codes = int4_codes(value, own).add_(8).to(torch.uint8).view(len(value), -1, 2)
        packed[piece] = (codes[..., 0] | codes[..., 1] << 4).view(torch.int32)
        scale[piece] = own[..., 0].to(torch.bfloat16)
    return packed, scale


def global_scale(peak: torch.Tensor) -> torch.Tensor:
    """NVFP4's global scale for weights with this peak: the power of two at or below 448 · 6 / peak, float32."""
    tiny = torch.finfo(torch.float32).tiny
    quotient = torch.full((), E4M3_MAX * E2M1_MAX, device=peak.device) / peak.float().clamp(min=tiny)
    quotient = torch.where(quotient.isfinite(), quotient, 1.0)
    exponent = (torch.frexp(quotient).exponent - 1).clamp(LEAST_GLOBAL_EXPONENT, MOST_GLOBAL_EXPONENT)
    return torch.ldexp(torch.ones_like(quotient), exponent)


def _nvfp4(blocks: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Fake-quantize (…, 16) to E2M1 with E4M3 scales that are multiplied by 1 / `by`."""
    scale = _to_e4m3_number(_divided(_block_peak(blocks), E2M1_MAX) * by)
    scale = torch.where(scale == 0, ZERO_E4M3_SCALE, scale) / by
    return to_e2m1(blocks / scale) * scale


def _to_e4m3_number(value: torch.Tensor) -> torch.Tensor:
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Round `value` (float32) to the nearest E2M1 number, ties to even: ±0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 or ±6."""
    value = value.clamp(-E2M1_MAX, E2M1_MAX)
    size = value.abs()
    # 1 / the distance between two neighbours: exact powers of two.
    inverse = torch.where(size < 2, 2.0, torch.where(size < 4, 1.0, 0.5))
    return (value * inverse).round_().div_(inverse)


@torch.no_grad()
def quantized_weight(
    layer: Layer,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    fmt: QuantFormat,
    peak: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fake_quantize_weight(effective_weight(layer, a, b, scaling), fmt, peak)`."""
    if kernels := _kernels(layer.weight):
        peak = effective_peak(layer, a, b, scaling, fmt) if peak is None else peak
        return kernels.quantize(_source(layer), a, b, scaling, fmt, peak)
    return fake_quantize_weight_in_torch(effective_weight_in_torch(layer, a, b, scaling), fmt, peak)


@torch.no_grad()
def fp8_weight(
    layer: Layer, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, peak: torch.Tensor
) -> torch.Tensor:
    """FP8 codes (out, in) of the effective weight in format fp8, scaled by `bf16_scale(peak, E4M3_MAX)` with the
    effective weight's `peak` (out, 1)."""
    if kernels := _kernels(layer.weight):
        return kernels.quantize(_source(layer), a, b, scaling, FORMATS["fp8"], peak, is_codes=True)
    return fp8.to_e4m3(effective_weight_in_torch(layer, a, b, scaling), bf16_scale(peak, E4M3_MAX))


@torch.no_grad()
def fake_quantize_activation(x: torch.Tensor, fmt: ActivationFormat, peak: torch.Tensor | None = None) -> torch.Tensor:
    """Return x (…, in) as a server computes with it, in the same dtype. `peak` (): the largest |x| from calibration,
    for static formats."""
    if x.numel() and (kernels := _kernels(x)):
        return kernels.fake_quantize_activation(x, fmt, peak)
    return fake_quantize_activation_in_torch(x, fmt, peak)


def fake_quantize_activation_in_torch(
    x: torch.Tensor, fmt: ActivationFormat, peak: torch.Tensor | None
) -> torch.Tensor:
    """Reference implementation of `fake_quantize_activation`."""
    if fmt.kind == "nvfp4":
        return _nvfp4_activation(x.float(), peak, fmt.group).to(x.dtype)
    if fmt.per == "tensor":
        scale = bf16_scale(peak, E4M3_MAX)
        return (fp8.to_e4m3(x, scale).float() * scale).to(x.dtype)
    if fmt.per == "token":
        codes, scale = stored_weight.quantize_rows_in_torch(x.reshape(-1, x.shape[-1]), fp8.LEAST_SCALE)
        return (codes.float() * scale).to(x.dtype).view(x.shape)
    groups = x.float().unflatten(-1, (-1, fmt.group))
    scale = _divided(groups.abs().amax(-1, keepdim=True).clamp(min=LEAST_GROUP_PEAK), E4M3_MAX)
    return (fp8.to_e4m3(groups, scale).float() * scale).to(x.dtype).view(x.shape)


def _nvfp4_activation(x: torch.Tensor, peak: torch.Tensor, group: int) -> torch.Tensor:
    by = torch.full((), E4M3_MAX * E2M1_MAX, device=x.device) / peak.float()
    groups = x.unflatten(-1, (-1, group))
    # vLLM's order of operations; it decides ties.
    scale = _to_e4m3_number(by * (groups.abs().amax(-1, keepdim=True) * (1 / E2M1_MAX)))
    inverse = torch.where(scale == 0, 0.0, by / scale)
    return (to_e2m1(groups * inverse) * (scale / by)).flatten(-2)


def _kernels(tensor: torch.Tensor) -> Any:
    """The kernel module if the tensor is on a GPU that supports it, else None."""
    if not tensor.is_cuda or not _has_fp8(tensor.device):
        return None
    from kit.weights import quantize_kernel

    return quantize_kernel


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return generation(torch.cuda.get_device_capability(device)).trainer_fp8


def _source(layer: Layer) -> Any:
    """Base of a layer in the kernels' form: its NF4 bytes, or the plain weight if stored otherwise."""
    from kit.weights.quantize_kernel import BLOCK_SIZE, NESTED_BLOCK, Source

    if not isinstance(layer, bnb.nn.Linear4bit):
        weight = stored_weight.weight_in_torch(layer)
        return Source(weight, None, tuple(weight.shape), weight.dtype)
    state = stored_weight.quant_state_of(layer)
    shape = tuple(state.shape)
    nested = state.state2.blocksize if state.nested else NESTED_BLOCK
    if (
        state.quant_type == "nf4"
        and (state.blocksize, nested) == (BLOCK_SIZE, NESTED_BLOCK)
        and not shape[1] % BLOCK_SIZE
    ):
        return Source(layer.weight.data, state, shape, state.dtype)
    return Source(stored_weight.weight_in_torch(layer), None, shape, state.dtype)
