"""Read a frozen layer's stored weight (NF4, FP8 or plain) as numbers or FP8 codes; quantize rows of activations and
gradients to FP8.

Together with `fp8.py` these functions define the numbers; on a GPU `fp8_kernel.py` computes the same ones.
"""

from typing import TypeAlias

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit

from kit.weights.fp8 import LEAST_SCALE, Fp8Linear, row_scales, to_e4m3

# Gradients are smaller than any activation: with vLLM's floor most of them would become zero. Above this floor,
# dividing by the scale is exact in float32.
LEAST_GRADIENT_SCALE = 2.0**-80
MULTIPLE = 16  # torch._scaled_mm only accepts sizes that are multiples of this


def quantize_rows(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (FP8 codes (T, n), scale (T, 1)) of x (T, n), or of x · by_column (n values, float32), one scale per row.

    The defaults give vLLM's dynamic per-token quantization.
    """
    if x.is_cuda:
        from kit.weights import fp8_kernel

        return fp8_kernel.quantize_rows([x], floor, None if by_column is None else [by_column])
    return quantize_rows_in_torch(x, floor, by_column)


def quantize_rows_in_torch(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `quantize_rows`."""
    value = x if by_column is None else x.float() * by_column.view(1, -1)
    scale = row_scales(value, floor)
    return to_e4m3(value, scale), scale


def quantize_gradients(parts: list[torch.Tensor], scales: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` of concatenated gradients (T, outᵢ), each times its layer's scales: one scale per token."""
    if parts[0].is_cuda:
        from kit.weights import fp8_kernel

        return fp8_kernel.quantize_rows(parts, LEAST_GRADIENT_SCALE, scales)
    return quantize_rows_in_torch(torch.cat(parts, 1), LEAST_GRADIENT_SCALE, torch.cat(scales))


Layer: TypeAlias = bnb.nn.Linear4bit | Fp8Linear | torch.nn.Linear


def weight_of(
    layer: Layer, scale: torch.Tensor | None = None, transposed: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the dequantized weight (out, in) in its storage dtype; with `scale` (out, 1), the FP8 codes of
    weight / scale, stored as (in, out) when `transposed`. Written to `out` if given. Otherwise the result is
    read-only, because `kept_weights.keeping_weights` caches it."""
    kept = vars(layer).get("kept") if out is None and not transposed else None
    if kept is None:
        return _make_weight(layer, scale, transposed, out)
    if (kind := "codes" if scale is not None else "weight") not in kept:
        kept[kind] = _make_weight(layer, scale)
    return kept[kind]


def quant_state_of(layer: Layer) -> QuantState | None:
    """bitsandbytes' facts of a layer's packed bytes; None if it has none. FSDP2 replaces bitsandbytes' parameter with
    a plain one, and the layer keeps them."""
    found = getattr(layer.weight, "quant_state", None)
    return getattr(layer, "quant_state", None) if found is None else found


def _make_weight(
    layer: Layer, scale: torch.Tensor | None, transposed: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    packed, state = layer.weight.data, quant_state_of(layer)
    if packed.is_cuda and state is not None and state.quant_type == "nf4" and not state.shape[1] % state.blocksize:
        from kit.weights import fp8_kernel

        blocks = (state.blocksize, state.state2.blocksize if state.nested else fp8_kernel.NESTED_BLOCK)
        if blocks == (fp8_kernel.BLOCK_SIZE, fp8_kernel.NESTED_BLOCK):
            return fp8_kernel.unpack(packed, state, scale, transposed, out)
    weight = weight_in_torch(layer, scale, transposed)
    return weight if out is None else out.copy_(weight)


def weight_in_torch(layer: Layer, scale: torch.Tensor | None = None, transposed: bool = False) -> torch.Tensor:
    """Reference implementation of `weight_of`."""
    if isinstance(layer, Fp8Linear) and scale is not None:
        return layer.codes.t().contiguous() if transposed else layer.codes
    if isinstance(layer, Fp8Linear):
        weight = layer.dequantized()
    elif isinstance(layer, bnb.nn.Linear4bit):
        weight = dequantize_4bit(layer.weight.data, quant_state_of(layer))
    else:  # merge.verify.compute_in casts the weight to another compute dtype; its numbers stay the same
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
        # The server's kernel uses fast accumulation, and torch's kernels for per-row scales are slow without it.
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=dtype, use_fast_accum=True)
    return ((left.float() @ right.float().t()) * rows * columns).to(dtype)
