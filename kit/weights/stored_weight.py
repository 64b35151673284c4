"""A frozen layer's weight as it is stored (NF4, FP8 or plain), read as numbers or as FP8 codes; rows of activations
and of gradients in FP8.

With `fp8.py` these functions say what the numbers are; on a GPU `fp8_kernel.py` makes the same.
"""

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit

from kit.weights.fp8 import LEAST_SCALE, Fp8Linear, row_scales, to_e4m3

# A gradient is smaller than any activation: with vLLM's limit most of it would be zero. Above this one the division by
# the scale is exact in float32.
LEAST_GRADIENT_SCALE = 2.0**-80
MULTIPLE = 16  # torch._scaled_mm takes no other sizes


def quantize_rows(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 codes (T, n), scale (T, 1)) of x (T, n), or of x · by_column (n values, float32), one scale per row.

    With the defaults, vLLM's dynamic quantization per token.
    """
    if x.is_cuda:
        from kit.weights import fp8_kernel

        return fp8_kernel.quantize_rows([x], floor, None if by_column is None else [by_column])
    return quantize_rows_in_torch(x, floor, by_column)


def quantize_rows_in_torch(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_rows` is to return."""
    value = x if by_column is None else x.float() * by_column.view(1, -1)
    scale = row_scales(value, floor)
    return to_e4m3(value, scale), scale


def quantize_gradients(parts: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of gradients (T, outᵢ) side by side, each times its layer's scales: one scale a token."""
    if parts[0].is_cuda:
        from kit.weights import fp8_kernel

        return fp8_kernel.quantize_rows(parts, LEAST_GRADIENT_SCALE, scales)
    return quantize_rows_in_torch(torch.cat(parts, 1), LEAST_GRADIENT_SCALE, torch.cat(scales))


Layer = bnb.nn.Linear4bit | Fp8Linear | torch.nn.Linear


def weight_of(
    layer: Layer,
    scale: torch.Tensor | None = None,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dequantized weight (out, in) in its storage dtype; with `scale` (out, 1), FP8 codes of weight / scale,
    stored as (in, out) when `transposed`. Written to `out` if given; not to be written to otherwise, because in
    `kept_weights.keeping_weights` it is kept."""
    kept = vars(layer).get("kept") if out is None and not transposed else None
    if kept is None:
        return _make_weight(layer, scale, transposed, out)
    if (kind := "codes" if scale is not None else "weight") not in kept:
        kept[kind] = _make_weight(layer, scale)
    return kept[kind]


def _make_weight(
    layer: Layer, scale: torch.Tensor | None, transposed: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    packed, state = layer.weight.data, getattr(layer.weight, "quant_state", None)
    if packed.is_cuda and state is not None and state.quant_type == "nf4" and not state.shape[1] % state.blocksize:
        from kit.weights import fp8_kernel

        blocks = (state.blocksize, state.state2.blocksize if state.nested else fp8_kernel.NESTED_BLOCK)
        if blocks == (fp8_kernel.BLOCK_SIZE, fp8_kernel.NESTED_BLOCK):
            return fp8_kernel.unpack(packed, state, scale, transposed, out)
    weight = weight_in_torch(layer, scale, transposed)
    return weight if out is None else out.copy_(weight)


def weight_in_torch(layer: Layer, scale: torch.Tensor | None = None, transposed: bool = False) -> torch.Tensor:
    """What `weight_of` is to return."""
    if isinstance(layer, Fp8Linear) and scale is not None:
        return layer.codes.t().contiguous() if transposed else layer.codes
    if isinstance(layer, Fp8Linear):
        weight = layer.dequantized()
    elif isinstance(layer, bnb.nn.Linear4bit):
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:  # merge.verify.compute_in casts the weight to compute in another dtype; its numbers stay
        weight = layer.weight.data.to(getattr(layer, "storage_dtype", layer.weight.dtype))
    if scale is None:
        return weight
    codes = to_e4m3(weight, scale)
    return codes.t().contiguous() if transposed else codes


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(left · rightᵀ) · rows · columns in `dtype`: left (T, k), right (n, k) in FP8, rows (T, 1), columns (1, n)."""
    if left.is_cuda:
        # Fast accumulation is what the server's kernel uses, and torch's kernels for scales per row are slow without.
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=dtype, use_fast_accum=True)
    return ((left.float() @ right.float().t()) * rows * columns).to(dtype)
