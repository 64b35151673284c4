"""GPU kernels of the linear layers: NF4 to BF16 or FP8 in one pass, FP8 rows of activations and gradients, and the
adapter's part of an output.

The PyTorch reference implementations are in `stored_weight.py`, the adapter's part in `kit/policy/fused_linear.py`.
The kernels match them bit for bit except for the order of the adapter's sums; `bench/linear_check.py` compares them.
Written in Triton, for compute capability 8.9 and above (any, for those without FP8). Imported on a GPU only.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_SIZE, NESTED_BLOCK = 64, 256  # of NF4, and of double quantization's second level
MOST_PARTS = 3  # matrices whose rows are quantized together
TILE = 4096  # columns that a program reads at once
MOST_HELD = 4096  # columns of a row that a program holds in registers between its peak and its codes
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _to_e4m3(value, scale, inverse):
    """value / scale rounded to float32 and then to FP8, as PyTorch rounds it.

    `inverse` is 1 / scale, correctly rounded: a quotient corrected once by its remainder is then correctly rounded
    itself (Markstein's theorem), and a row needs one division instead of one per value. A scale is at least the
    largest value / 448, rounded, so a quotient is above 448 by its rounding at most, and the conversion gives 448.
    """
    quotient = value * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, value), inverse, quotient)
    return quotient.to(tl.float8e4nv)


@triton.jit
def _unpack(
    out, packed, absmax, code, nested_absmax, nested_code, offset, scale, rows, columns, bytes_, blocks, stride,
    IS_NESTED: tl.constexpr, IS_FP8: tl.constexpr, IS_TRANSPOSED: tl.constexpr, WEIGHT_TYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    # 64-bit offset of the tile, 32-bit offsets inside it.
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    left_rows = rows - tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)  # (R,)
    column = tl.arange(0, COLUMNS)  # (C,)
    byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)  # (C / 2,)
    block = tl.program_id(1) * (COLUMNS // BLOCK_SIZE) + tl.arange(0, COLUMNS // BLOCK_SIZE)  # (C / 64,)
    is_row = row[:, None] < left_rows
    packed += first_row * bytes_
    pairs = tl.load(packed + row[:, None] * bytes_ + byte[None, :], mask=is_row & (byte[None, :] < bytes_), other=0)
    pairs = pairs.to(tl.int32)
    # The first of a byte's two weights is in its upper half.
    value = tl.interleave(tl.load(code + (pairs >> 4)), tl.load(code + (pairs & 15)))  # (R, C)
    # One load per block of 64: one per weight makes the kernel several times slower.
    is_block = is_row & (block[None, :] < blocks)
    number = first_row * blocks + row[:, None] * blocks + block[None, :]
    if IS_NESTED:
        index = tl.load(absmax + number, mask=is_block, other=0).to(tl.int32)
        peak = tl.load(nested_code + index) * tl.load(nested_absmax + number // NESTED_BLOCK, mask=is_block, other=0.0)
        peak = peak + tl.load(offset)
    else:
        peak = tl.load(absmax + number, mask=is_block, other=0.0)
    value = tl.reshape(value, (ROWS, COLUMNS // BLOCK_SIZE, BLOCK_SIZE)) * peak[:, :, None]
    # Round the dequantized weight to the storage type before using it.
    value = tl.reshape(value, (ROWS, COLUMNS)).to(WEIGHT_TYPE)
    if IS_FP8:
        by_row = tl.load(scale + first_row + row, mask=row < left_rows, other=1.0)  # (R,)
        value = _to_e4m3(value.to(tl.float32), by_row[:, None], tl.div_rn(1.0, by_row)[:, None])
    is_inside = is_row & (first_column + column[None, :] < columns)
    if IS_TRANSPOSED:
        out += first_column.to(tl.int64) * stride + first_row
        tl.store(out + column[None, :] * stride + row[:, None], value, mask=is_inside)
    else:
        out += first_row * stride + first_column
        tl.store(out + row[:, None] * stride + column[None, :], value, mask=is_inside)


def unpack(
    packed: torch.Tensor,
    state: Any,
    scale: torch.Tensor | None = None,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize NF4 bytes with the bitsandbytes quant state `state` to a weight (out, in) in the state's dtype; with
    `scale` (out, 1) float32, return weight / scale in FP8 (e4m3), stored as (in, out) when `transposed`. Written to
    `out`, whose rows may have any stride, if given.

    Requires blocks of 64 and `in` a multiple of 64; double quantization (blocks of 256) is undone in the same pass.
    """
    rows, columns = state.shape
    shape = (columns, rows) if transposed else (rows, columns)
    dtype = state.dtype if scale is None else torch.float8_e4m3fn
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=packed.device)
    nested = state.state2 if state.nested else None
    tile_rows, tile_columns = (128, 64) if transposed else (64, 128)
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))
    with _on(out):
        _unpack[grid](
            out, packed.view(torch.uint8), state.absmax, state.code,
            nested.absmax if nested else state.absmax, nested.code if nested else state.code,
            state.offset if nested else state.absmax, scale if scale is not None else state.absmax, rows, columns,
            columns // 2, columns // BLOCK_SIZE, out.stride(0),
            IS_NESTED=nested is not None, IS_FP8=scale is not None, IS_TRANSPOSED=transposed,
            WEIGHT_TYPE=TYPES[state.dtype], ROWS=tile_rows, COLUMNS=tile_columns, BLOCK_SIZE=BLOCK_SIZE,
            NESTED_BLOCK=NESTED_BLOCK, num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds the product before adding the offset
        )  # fmt: skip
    return out


@triton.jit
def _peak(peak, x, by_column, columns, IS_SCALED: tl.constexpr, TILE: tl.constexpr):
    # With factors, rows bypass the L1 cache, which is left to the factors: every row reads them twice.
    CACHE: tl.constexpr = ".cg" if IS_SCALED else ""
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        is_inside = column < columns
        value = tl.load(x + column, mask=is_inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
        if IS_SCALED:
            value = value * tl.load(by_column + column, mask=is_inside, other=0.0)
        peak = tl.maximum(peak, tl.abs(value))
    return peak


@triton.jit
def _codes(out, x, by_column, columns, by_row, inverse, IS_SCALED: tl.constexpr, TILE: tl.constexpr):
    CACHE: tl.constexpr = ".cg" if IS_SCALED else ""
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        is_inside = column < columns
        value = tl.load(x + column, mask=is_inside, other=0.0, cache_modifier=CACHE).to(tl.float32)
        if IS_SCALED:
            value = value * tl.load(by_column + column, mask=is_inside, other=0.0)
        tl.store(out + column, _to_e4m3(value, by_row, inverse), mask=is_inside)


@triton.jit
def _quantize_rows(
    out, scale, x0, x1, x2, by0, by1, by2, columns0, columns1, columns2, stride0, stride1, stride2, floor,
    PARTS: tl.constexpr, IS_SCALED: tl.constexpr, IS_HELD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x0 += row * stride0
    if IS_HELD:
        column = tl.arange(0, TILE)
        value = tl.load(x0 + column, mask=column < columns0, other=0.0).to(tl.float32)
        if IS_SCALED:
            value = value * tl.load(by0 + column, mask=column < columns0, other=0.0)
        by_row = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), 448.0), floor)
        tl.store(scale + row, by_row)
        codes = _to_e4m3(value, by_row, tl.div_rn(1.0, by_row))
        tl.store(out + row * columns0 + column, codes, mask=column < columns0)
        return
    # Read each row twice: first for its peak, then, from a cache, for its codes. Held in registers, a row of 12,288
    # leaves no room for a second program to load while the first one stores.
    x1 += row * stride1
    x2 += row * stride2
    peak = _peak(tl.zeros((TILE,), tl.float32), x0, by0, columns0, IS_SCALED, TILE)
    if PARTS > 1:
        peak = _peak(peak, x1, by1, columns1, IS_SCALED, TILE)
    if PARTS > 2:
        peak = _peak(peak, x2, by2, columns2, IS_SCALED, TILE)
    by_row = tl.maximum(tl.div_rn(tl.max(peak, 0), 448.0), floor)
    inverse = tl.div_rn(1.0, by_row)
    tl.store(scale + row, by_row)
    out += row * (columns0 + columns1 + columns2)
    _codes(out, x0, by0, columns0, by_row, inverse, IS_SCALED, TILE)
    if PARTS > 1:
        _codes(out + columns0, x1, by1, columns1, by_row, inverse, IS_SCALED, TILE)
    if PARTS > 2:
        _codes(out + columns0 + columns1, x2, by2, columns2, by_row, inverse, IS_SCALED, TILE)


def quantize_rows(
    parts: list[torch.Tensor], floor: float, by_column: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes (T, n) in FP8 (e4m3), scale (T, 1) float32) of up to three matrices (T, nᵢ) side by side,
    n = Σ nᵢ, each times its `by_column` (nᵢ values, float32); one scale per row, at least `floor`.
    """
    parts = [x if x.stride(1) == 1 else x.contiguous() for x in parts]
    rows, widths = len(parts[0]), [x.shape[1] for x in parts]
    out = torch.empty(rows, sum(widths), dtype=torch.float8_e4m3fn, device=parts[0].device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=parts[0].device)
    tile = min(TILE, triton.next_power_of_2(max(widths)))
    absent = MOST_PARTS - len(parts)
    factors = by_column if by_column is not None else [scale] * len(parts)
    with _on(out):
        _quantize_rows[(rows,)](
            out, scale, *parts, *parts[:1] * absent, *factors, *factors[:1] * absent, *widths, *[0] * absent,
            *(x.stride(0) for x in parts), *[0] * absent, floor,
            PARTS=len(parts), IS_SCALED=by_column is not None,
            IS_HELD=len(parts) == 1 and widths[0] <= MOST_HELD, TILE=tile,
            num_warps=min(8, max(1, tile // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return out, scale


@triton.jit
def _add_low_rank(
    y, left, right, rows, columns, rank, y_stride, left_stride, right_stride, right_step, scaling,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(1).to(tl.int64) * ROWS
    first_column = tl.program_id(0) * COLUMNS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    k = tl.arange(0, RANK)
    is_row = row[:, None] < rows - tl.program_id(1) * ROWS
    is_column = first_column + column[None, :] < columns
    y += first_row * y_stride + first_column + row[:, None] * y_stride + column[None, :]
    left += first_row * left_stride + row[:, None] * left_stride + k[None, :]
    right += k[:, None] * right_stride + (first_column + column[None, :]) * right_step
    value = tl.load(y, mask=is_row & is_column, other=0.0)
    total = tl.dot(
        tl.load(left, mask=is_row & (k[None, :] < rank), other=0.0),
        tl.load(right, mask=is_column & (k[:, None] < rank), other=0.0),
    )
    tl.store(y, (value.to(tl.float32) + scaling * total).to(value.dtype), mask=is_row & is_column)


def add_low_rank(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
    """y += scaling · left · right in place. y (T, n) has a column stride of 1, left (T, r) and right (r, n) any
    strides; all BF16 or all FP16, r at most 64. Summed in float32 and rounded once.
    """
    (rows, columns), rank = y.shape, left.shape[1]
    left = left if left.stride(1) == 1 else left.contiguous()
    tile_rows, tile_columns = 64, 128
    with _on(y):
        _add_low_rank[(triton.cdiv(columns, tile_columns), triton.cdiv(rows, tile_rows))](
            y, left, right, rows, columns, rank, y.stride(0), left.stride(0), *right.stride(), scaling,
            ROWS=tile_rows, COLUMNS=tile_columns, RANK=max(16, triton.next_power_of_2(rank)), num_warps=4,
        )  # fmt: skip


def _on(tensor: torch.Tensor) -> Any:
    return torch.cuda.device(tensor.device)
