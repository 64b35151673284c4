"""GPU kernels for fake quantization: a policy's weight from its NF4 bytes and adapter in one pass, and activations.

The PyTorch reference implementations are in `kit/weights/quantize.py`. The kernels match them bit for bit except for
the order of the adapter's sums and the signs of zeros; blocks of weights with a scale below 2^-120 become 0.
`bench/fake_quant_check.py` compares them. Written in Triton, for compute capability 8.9 and above. Imported on a
GPU only.

A weight costs 0.5 bytes to read and 2 to write. Formats with a peak per channel or of the whole weight need one more
pass first, which reads the same bytes and writes next to nothing.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kit.core.formats import ActivationFormat, QuantFormat
from kit.weights import fp8_kernel
from kit.weights.fp8_kernel import BLOCK_SIZE, NESTED_BLOCK, TYPES, _peak, _to_e4m3

ROWS, COLUMNS = 64, 128
FLAT, WIDEST = 4096, 4096  # values per program
LEAST_SCALE = 1 / (448.0 * 512)  # stored_weight.py's, for per-token activations


class Source(NamedTuple):
    """Base weight: NF4 bytes with their bitsandbytes quant state, or the plain weight with None."""

    data: torch.Tensor
    state: Any
    shape: tuple[int, int]
    dtype: torch.dtype


@triton.jit
def _merged(
    source, absmax, code, nested_absmax, nested_code, offset, a, b, scaling, rows, columns, stride, rank, stride_a,
    stride_b,
    IS_NF4: tl.constexpr, IS_NESTED: tl.constexpr, HAS_UPDATE: tl.constexpr, IS_ROUNDED: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's tile (R, C) of base + scaling · b · a in float32, rounded to BF16 if IS_ROUNDED; 0 outside the
    weight."""
    # 64-bit offset of the tile, 32-bit offsets inside it.
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    row = tl.arange(0, ROWS)  # (R,)
    column = first_column + tl.arange(0, COLUMNS)  # (C,)
    is_row = row[:, None] < rows - tl.program_id(0) * ROWS
    source += first_row * stride
    if IS_NF4:
        byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)  # (C / 2,)
        block = tl.program_id(1) * (COLUMNS // BLOCK_SIZE) + tl.arange(0, COLUMNS // BLOCK_SIZE)  # (C / 64,)
        blocks = columns // BLOCK_SIZE
        pairs = tl.load(
            source + row[:, None] * stride + byte[None, :], mask=is_row & (byte[None, :] < columns // 2), other=0
        )
        pairs = pairs.to(tl.int32)
        # The first of a byte's two weights is in its upper half.
        weight = tl.interleave(tl.load(code + (pairs >> 4)), tl.load(code + (pairs & 15)))  # (R, C)
        # One load per block of 64: one per weight makes the kernel several times slower.
        is_block = is_row & (block[None, :] < blocks)
        number = first_row * blocks + row[:, None] * blocks + block[None, :]
        if IS_NESTED:
            index = tl.load(absmax + number, mask=is_block, other=0).to(tl.int32)
            size = tl.load(nested_absmax + number // NESTED_BLOCK, mask=is_block, other=0.0)
            size = tl.load(nested_code + index) * size
            size = size + tl.load(offset)
        else:
            size = tl.load(absmax + number, mask=is_block, other=0.0)
        size = tl.where(is_block, size, 0.0)  # outside the weight only the offset is left
        weight = tl.reshape(weight, (ROWS, COLUMNS // BLOCK_SIZE, BLOCK_SIZE)) * size[:, :, None]
        # Round the dequantized weight to the storage type before using it.
        weight = tl.reshape(weight, (ROWS, COLUMNS)).to(WEIGHT_TYPE).to(tl.float32)
    else:
        weight = tl.load(
            source + row[:, None] * stride + column[None, :], mask=is_row & (column[None, :] < columns), other=0.0
        ).to(tl.float32)
    if HAS_UPDATE:
        b += first_row * stride_b
        update = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, rank, RANK_BLOCK):
            inner = start + tl.arange(0, RANK_BLOCK)
            left = tl.load(
                b + row[:, None] * stride_b + inner[None, :], mask=is_row & (inner[None, :] < rank), other=0.0
            )
            right = tl.load(
                a + inner[:, None] * stride_a + column[None, :],
                mask=(inner[:, None] < rank) & (column[None, :] < columns),
                other=0.0,
            )
            update = tl.dot(left.to(tl.float32), right.to(tl.float32), update, input_precision="ieee")
        weight = weight + scaling * update
    if IS_ROUNDED:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    return weight


@triton.jit
def _merged_scale(peak, largest):
    """peak / largest rounded to BF16, never 0."""
    scale = tl.div_rn(peak, largest).to(tl.bfloat16).to(tl.float32)
    return tl.where(scale == 0.0, 1.1920928955078125e-07, scale)


@triton.jit
def _inverse(scale):
    """1 / scale, or 0 where it is too large to correct a quotient with."""
    return tl.where(scale < 7.52316384526264e-37, 0.0, tl.div_rn(1.0, scale))  # 2^-120


@triton.jit
def _quotient(value, scale, inverse):
    """value / scale, correctly rounded: see fp8_kernel._to_e4m3."""
    quotient = value * inverse
    return tl.fma(tl.fma(-quotient, scale, value), inverse, quotient)


@triton.jit
def _to_e2m1(value):
    """Round float32 to the nearest E2M1 number, ties to even. Adding and subtracting 1.5 · 2^23 · step rounds to a
    multiple of `step`, the distance between two neighbours."""
    value = tl.where(value > 6.0, 6.0, value)
    value = tl.where(value < -6.0, -6.0, value)
    size = tl.abs(value)
    shift = tl.where(size < 2.0, 6291456.0, tl.where(size < 4.0, 12582912.0, 25165824.0))
    return (value + shift) - shift


@triton.jit
def _weight_global_scale(peak):
    """Power of two at or below 448 · 6 / peak: a float32's exponent alone."""
    quotient = tl.div_rn(2688.0, tl.where(peak < 1.1754943508222875e-38, 1.1754943508222875e-38, peak))
    by = (quotient.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    by = tl.where(quotient > 3.4028234663852886e38, 1.0, by)
    return tl.where(by > 8.507059173023462e37, 8.507059173023462e37, by)  # 2^126


@triton.jit
def _fake_nvfp4(value, peak, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    by = _weight_global_scale(tl.load(peak))
    groups = tl.reshape(value, (ROWS, COLUMNS // 16, 16))
    scale = tl.div_rn(tl.max(tl.abs(groups), 2), 6.0) * by
    scale = tl.where(scale > 448.0, 448.0, scale).to(tl.float8e4nv).to(tl.float32)
    scale = scale * tl.div_rn(1.0, by)  # exact; a scale of 0 has an inverse of 0, so its codes are 0
    inverse = _inverse(scale)
    groups = _to_e2m1(_quotient(groups, scale[:, :, None], inverse[:, :, None])) * scale[:, :, None]
    return tl.reshape(groups, (ROWS, COLUMNS))


@triton.jit
def _fake_int4(value):
    scale = _merged_scale(tl.max(tl.abs(value), 1), 7.5)  # (R,)
    code = _quotient(value, scale[:, None], _inverse(scale)[:, None])
    code = (code + 12582912.0) - 12582912.0  # to an integer, ties to even
    code = tl.where(code > 7.0, 7.0, code)
    code = tl.where(code < -8.0, -8.0, code)
    return code * scale[:, None]


@triton.jit
def _quantize(
    out, source, absmax, code, nested_absmax, nested_code, offset, a, b, peak, scaling, rows, columns, stride, rank,
    stride_a, stride_b,
    KIND: tl.constexpr, IS_CODES: tl.constexpr,
    IS_NF4: tl.constexpr, IS_NESTED: tl.constexpr, HAS_UPDATE: tl.constexpr, IS_ROUNDED: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    value = _merged(
        source, absmax, code, nested_absmax, nested_code, offset, a, b, scaling, rows, columns, stride, rank,
        stride_a, stride_b, IS_NF4, IS_NESTED, HAS_UPDATE, IS_ROUNDED, WEIGHT_TYPE, RANK_BLOCK, ROWS, COLUMNS,
        BLOCK_SIZE, NESTED_BLOCK,
    )  # fmt: skip
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    first_column = tl.program_id(1) * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = row < rows - tl.program_id(0) * ROWS
    if KIND == "nvfp4":
        value = _fake_nvfp4(value, peak, ROWS, COLUMNS)
    elif KIND == "int4":
        value = _fake_int4(value)
    elif KIND != "none":
        if KIND == "channel":
            scale = _merged_scale(tl.load(peak + first_row + row, mask=is_row, other=1.0), 448.0)[:, None]
        elif KIND == "tensor":
            scale = _merged_scale(tl.load(peak), 448.0)
        else:  # the tile is a block
            scale = _merged_scale(tl.max(tl.max(tl.abs(value), 1), 0), 448.0)
        value = _to_e4m3(value, scale, _inverse(scale))
        if not IS_CODES:
            value = value.to(tl.float32) * scale
    value = value.to(out.dtype.element_ty)
    is_inside = is_row[:, None] & (first_column + column[None, :] < columns)
    out += first_row * columns + first_column
    tl.store(out + row[:, None] * columns + column[None, :], value, mask=is_inside)


@triton.jit
def _peaks(
    out, source, absmax, code, nested_absmax, nested_code, offset, a, b, scaling, rows, columns, stride, rank,
    stride_a, stride_b, tiles,
    IS_NF4: tl.constexpr, IS_NESTED: tl.constexpr, HAS_UPDATE: tl.constexpr, IS_ROUNDED: tl.constexpr,
    WEIGHT_TYPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    value = _merged(
        source, absmax, code, nested_absmax, nested_code, offset, a, b, scaling, rows, columns, stride, rank,
        stride_a, stride_b, IS_NF4, IS_NESTED, HAS_UPDATE, IS_ROUNDED, WEIGHT_TYPE, RANK_BLOCK, ROWS, COLUMNS,
        BLOCK_SIZE, NESTED_BLOCK,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    out += tl.program_id(0).to(tl.int64) * ROWS * tiles + tl.program_id(1)
    tl.store(out + row * tiles, tl.max(tl.abs(value), 1), mask=row < rows - tl.program_id(0) * ROWS)


@triton.jit
def _fake_groups(
    out, x, peak, count, KIND: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Fake-quantize activations in groups of GROUP, or as a whole with a static range."""
    first = tl.program_id(0).to(tl.int64) * TILE
    index = tl.arange(0, TILE)
    is_inside = index < count - first
    x += first
    out += first
    value = tl.load(x + index, mask=is_inside, other=0.0).to(tl.float32)
    if KIND == "nvfp4":
        by = tl.div_rn(2688.0, tl.load(peak))
        groups = tl.reshape(value, (TILE // GROUP, GROUP))
        scale = by * (tl.max(tl.abs(groups), 1) * 0.16666666666666666)
        scale = tl.where(scale > 448.0, 448.0, scale).to(tl.float8e4nv).to(tl.float32)
        inverse = tl.where(scale == 0.0, 0.0, tl.div_rn(by, scale))
        groups = _to_e2m1(groups * inverse[:, None]) * tl.div_rn(scale, by)[:, None]
        value = tl.reshape(groups, (TILE,))
    elif KIND == "group":
        groups = tl.reshape(value, (TILE // GROUP, GROUP))
        largest = tl.max(tl.abs(groups), 1)
        scale = tl.div_rn(tl.where(largest < 1e-10, 1e-10, largest), 448.0)
        codes = _to_e4m3(groups, scale[:, None], tl.div_rn(1.0, scale)[:, None])
        value = tl.reshape(codes.to(tl.float32) * scale[:, None], (TILE,))
    else:
        scale = _merged_scale(tl.load(peak), 448.0)
        value = _to_e4m3(value, scale, _inverse(scale)).to(tl.float32) * scale
    tl.store(out + index, value.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _fake_rows(out, x, columns, floor, TILE: tl.constexpr):
    """Fake-quantize activations with a scale per row; each row is read twice, as in fp8_kernel._quantize_rows."""
    row = tl.program_id(0).to(tl.int64)
    x += row * columns
    out += row * columns
    peak = _peak(tl.zeros((TILE,), tl.float32), x, x, columns, False, TILE)
    scale = tl.maximum(tl.div_rn(tl.max(peak, 0), 448.0), floor)
    inverse = tl.div_rn(1.0, scale)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        is_inside = column < columns
        value = tl.load(x + column, mask=is_inside, other=0.0).to(tl.float32)
        value = _to_e4m3(value, scale, inverse).to(tl.float32) * scale
        tl.store(out + column, value.to(out.dtype.element_ty), mask=is_inside)


def _kind(fmt: QuantFormat | None) -> str:
    if fmt is None:
        return "none"
    if fmt.weight.kind != "fp8":
        return fmt.weight.kind
    kinds: dict[tuple, str] = {(1, None): "channel", (None, None): "tensor"}
    return kinds.get(fmt.weight.block, "block")


def _arguments(
    source: Source, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, is_rounded: bool
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Arguments of `_merged`: tensors, numbers, constants."""
    (rows, columns), state, data = source.shape, source.state, source.data
    has_update = a is not None
    if has_update and (a.stride(1) != 1 or b.stride(1) != 1):
        a, b = a.contiguous(), b.contiguous()
    nested = state.state2 if state is not None and state.nested else None
    absmax = state.absmax if state is not None else data
    tensors = [
        data.view(torch.uint8) if state is not None else data, absmax, state.code if state is not None else data,
        nested.absmax if nested else absmax, nested.code if nested else absmax, state.offset if nested else absmax,
        a if has_update else data, b if has_update else data,
    ]  # fmt: skip
    stride = columns // 2 if state is not None else data.stride(0)
    numbers = [float(scaling), rows, columns, stride, a.shape[0] if has_update else 0]
    numbers += [a.stride(0), b.stride(0)] if has_update else [0, 0]
    constants = {
        "IS_NF4": state is not None,
        "IS_NESTED": nested is not None,
        "HAS_UPDATE": has_update,
        "IS_ROUNDED": is_rounded,
        "WEIGHT_TYPE": TYPES[source.dtype],
        "RANK_BLOCK": 32 if has_update and a.shape[0] > 16 else 16,
        "BLOCK_SIZE": BLOCK_SIZE,
        "NESTED_BLOCK": NESTED_BLOCK,
        "enable_fp_fusion": False,  # the reference implementations round products before adding
    }
    return tensors, numbers, constants


def quantize(
    source: Source,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scaling: float,
    fmt: QuantFormat | None,
    peak: torch.Tensor | None,
    is_rounded: bool = True,
    is_codes: bool = False,
) -> torch.Tensor:
    """Return base + scaling · b · a (out, in), rounded to BF16 if `is_rounded` and fake-quantized to `fmt` (None: not
    quantized), in the base's dtype; its FP8 codes (fmt fp8) if `is_codes`.

    a (r, in) and b (out, r) are float32 or 16 bits, both None without an adapter; `peak` comes from
    `quantize.weight_peak`. NF4 requires blocks of 64 and `in` a multiple of 64; both sizes must be multiples of the
    format's block.
    """
    (rows, columns), kind = source.shape, _kind(fmt)
    dtype = torch.float8_e4m3fn if is_codes else source.dtype
    out = torch.empty(rows, columns, dtype=dtype, device=source.data.device)
    tensors, numbers, constants = _arguments(source, a, b, scaling, is_rounded)
    # A scale is shared by a row of a tile in INT4, by the whole tile in block-wise FP8.
    tile = (128, 128) if kind == "block" else (ROWS, fmt.weight.block[1] if kind == "int4" else COLUMNS)
    grid = (triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1]))
    with fp8_kernel._on(out):
        _quantize[grid](
            out, *tensors, peak if peak is not None else tensors[0], *numbers,
            KIND=kind, IS_CODES=is_codes, ROWS=tile[0], COLUMNS=tile[1], **constants,
            num_warps=8 if kind == "block" else 4,
        )  # fmt: skip
    return out


def peak_of(
    source: Source, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, fmt: QuantFormat
) -> torch.Tensor:
    """`quantize.weight_peak` of base + scaling · b · a, float32: (out, 1) per output channel, () for all of it."""
    rows, columns = source.shape
    tiles = triton.cdiv(columns, COLUMNS)
    out = torch.empty(rows, tiles, dtype=torch.float32, device=source.data.device)
    tensors, numbers, constants = _arguments(source, a, b, scaling, is_rounded=True)
    with fp8_kernel._on(out):
        _peaks[(triton.cdiv(rows, ROWS), tiles)](
            out, *tensors, *numbers, tiles, ROWS=ROWS, COLUMNS=COLUMNS, **constants, num_warps=4
        )
    return out.amax(1, keepdim=True) if _kind(fmt) == "channel" else out.amax()


def fake_quantize_activation(x: torch.Tensor, fmt: ActivationFormat, peak: torch.Tensor | None) -> torch.Tensor:
    """GPU version of `quantize.fake_quantize_activation`."""
    x = x.contiguous()
    out, count, columns = torch.empty_like(x), x.numel(), x.shape[-1]
    with fp8_kernel._on(x):
        if fmt.per == "token":
            tile = min(WIDEST, triton.next_power_of_2(columns))
            _fake_rows[(count // columns,)](
                out, x, columns, LEAST_SCALE, TILE=tile, num_warps=min(8, max(1, tile // 512)), enable_fp_fusion=False
            )
            return out
        kind = "nvfp4" if fmt.kind == "nvfp4" else "group" if fmt.per == "block" else "tensor"
        _fake_groups[(triton.cdiv(count, FLAT),)](
            out, x, peak if peak is not None else x, count,
            KIND=kind, GROUP=fmt.group, TILE=FLAT, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
