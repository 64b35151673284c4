"""GPU kernels of `fused_mlp.py`: SwiGLU and its backward pass on products without their adapter's part.

The PyTorch reference implementations are in `fused_mlp.py`. The kernels match them except for the order of the
adapter's sums, and for sigmoid's last bit; `bench/mlp_check.py` compares them. A program computes some rows for a
range of columns, so that a tile of B serves all its rows, and adds to the products of these rows with A or B, which
would read the tiles again: one partial sum for each range of columns. Written in Triton for BF16 and FP16. Imported on
a GPU only.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kit.policy.fused_linear import LowRank
from kit.weights import fp8_kernel

ROWS, COLUMNS = 64, 64  # of a tile
GRADIENT_COLUMNS = {9: 64}  # by the card's major capability: only Hopper holds so large a tile in registers, others 32
RANGE, WARPS = 1024, 4  # columns and warps of a program
STAGES = 3  # tiles in flight: the one that is computed and those that are loaded meanwhile
LEAST_RANK = 16  # of `tl.dot`


@triton.jit
def _rows_of_program(rows, ROWS: tl.constexpr):
    """The first row of a program in 64 bits, the rows from there in 32 bits, and which of them exist (R, 1)."""
    row = tl.arange(0, ROWS)
    return tl.program_id(0).to(tl.int64) * ROWS, row, row[:, None] < rows - tl.program_id(0) * ROWS


@triton.jit
def _left(left, stride, first_row, is_row, rank, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Load rows of a left factor (R, r)."""
    k = tl.arange(0, RANK)
    place = left + first_row * stride + tl.arange(0, ROWS)[:, None] * stride + k[None, :]
    return tl.load(place, mask=is_row & (k[None, :] < rank), other=0.0)


@triton.jit
def _right(right, stride, step, column, columns, rank, RANK: tl.constexpr):
    """Load columns of a right factor (r, C)."""
    k = tl.arange(0, RANK)
    is_inside = (k[:, None] < rank) & (column[None, :] < columns)
    return tl.load(right + k[:, None] * stride + column[None, :].to(tl.int64) * step, mask=is_inside, other=0.0)


@triton.jit
def _added(y, left, right, scaling):
    """y + scaling · left · right in float32, rounded to the factors' dtype."""
    return (y + scaling * tl.dot(left, right)).to(left.dtype).to(tl.float32)


@triton.jit
def _store_sum(out, total, is_row, rank, ROWS: tl.constexpr, RANK: tl.constexpr):
    """Store the partial sums (R, r) of a program."""
    k = tl.arange(0, RANK)
    row = tl.arange(0, ROWS)
    tl.store(out + row[:, None] * rank + k[None, :], total, mask=is_row & (k[None, :] < rank))


@triton.jit
def _swiglu(
    act, sums, gate, up, gate_left, gate_right, up_left, up_right, down, rows, columns,
    gate_stride, up_stride, gate_left_stride, gate_right_stride, gate_step, gate_rank, gate_scaling,
    up_left_stride, up_right_stride, up_step, up_rank, up_scaling, down_stride, down_step, down_rank,
    HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row, row, is_row = _rows_of_program(rows, ROWS)
    gate += first_row * gate_stride
    up += first_row * up_stride
    act += first_row * columns
    kind = act.dtype.element_ty
    if HAS_GATE:
        gate_rows = _left(gate_left, gate_left_stride, first_row, is_row, gate_rank, ROWS, GATE_RANK)
    if HAS_UP:
        up_rows = _left(up_left, up_left_stride, first_row, is_row, up_rank, ROWS, UP_RANK)
    if HAS_DOWN:
        total = tl.zeros((ROWS, DOWN_RANK), tl.float32)
    first = tl.program_id(1) * RANGE
    for start in tl.range(first, tl.minimum(first + RANGE, columns), COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_inside = is_row & (column[None, :] < columns)
        g = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=is_inside, other=0.0).to(tl.float32)
        u = tl.load(up + row[:, None] * up_stride + column[None, :], mask=is_inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate_b = _right(gate_right, gate_right_stride, gate_step, column, columns, gate_rank, GATE_RANK)
            g = _added(g, gate_rows, gate_b, gate_scaling)
        if HAS_UP:
            up_b = _right(up_right, up_right_stride, up_step, column, columns, up_rank, UP_RANK)
            u = _added(u, up_rows, up_b, up_scaling)
        value = ((g * tl.sigmoid(g)).to(kind).to(tl.float32) * u).to(kind)
        tl.store(act + row[:, None] * columns + column[None, :], value, mask=is_inside)
        if HAS_DOWN:
            a = _right(down, down_stride, down_step, column, columns, down_rank, DOWN_RANK)
            total = tl.dot(value, tl.trans(a), total)
    if HAS_DOWN:
        sums += (tl.program_id(1).to(tl.int64) * rows + first_row) * down_rank
        _store_sum(sums, total, is_row, down_rank, ROWS, DOWN_RANK)


@triton.jit
def _swiglu_gradient(
    gate, up, grad, gate_sums, up_sums, gate_left, gate_right, up_left, up_right, down_left, down_right, rows, columns,
    gate_stride, up_stride, grad_stride, gate_left_stride, gate_right_stride, gate_step, gate_rank, gate_scaling,
    up_left_stride, up_right_stride, up_step, up_rank, up_scaling,
    down_left_stride, down_right_stride, down_step, down_rank, down_scaling,
    HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr,
    GATE_RANK: tl.constexpr, UP_RANK: tl.constexpr, DOWN_RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first_row, row, is_row = _rows_of_program(rows, ROWS)
    gate += first_row * gate_stride
    up += first_row * up_stride
    grad += first_row * grad_stride
    kind = gate.dtype.element_ty
    if HAS_GATE:
        gate_rows = _left(gate_left, gate_left_stride, first_row, is_row, gate_rank, ROWS, GATE_RANK)
        gate_total = tl.zeros((ROWS, GATE_RANK), tl.float32)
    if HAS_UP:
        up_rows = _left(up_left, up_left_stride, first_row, is_row, up_rank, ROWS, UP_RANK)
        up_total = tl.zeros((ROWS, UP_RANK), tl.float32)
    if HAS_DOWN:
        down_rows = _left(down_left, down_left_stride, first_row, is_row, down_rank, ROWS, DOWN_RANK)
    first = tl.program_id(1) * RANGE
    for start in tl.range(first, tl.minimum(first + RANGE, columns), COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_inside = is_row & (column[None, :] < columns)
        gate_at = gate + row[:, None] * gate_stride + column[None, :]
        up_at = up + row[:, None] * up_stride + column[None, :]
        grad_at = grad + row[:, None] * grad_stride + column[None, :]
        g = tl.load(gate_at, mask=is_inside, other=0.0).to(tl.float32)
        u = tl.load(up_at, mask=is_inside, other=0.0).to(tl.float32)
        d = tl.load(grad_at, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate_b = _right(gate_right, gate_right_stride, gate_step, column, columns, gate_rank, GATE_RANK)
            g = _added(g, gate_rows, gate_b, gate_scaling)
        if HAS_UP:
            up_b = _right(up_right, up_right_stride, up_step, column, columns, up_rank, UP_RANK)
            u = _added(u, up_rows, up_b, up_scaling)
        if HAS_DOWN:
            a = _right(down_right, down_right_stride, down_step, column, columns, down_rank, DOWN_RANK)
            d = _added(d, down_rows, a, down_scaling)
        share = tl.sigmoid(g)
        silu = g * share
        tl.store(grad_at, (silu.to(kind).to(tl.float32) * u).to(kind), mask=is_inside)
        by_gate = (d * u * (silu * (1.0 - share) + share)).to(kind)
        by_up = (d * silu).to(kind)
        tl.store(gate_at, by_gate, mask=is_inside)
        tl.store(up_at, by_up, mask=is_inside)
        if HAS_GATE:
            gate_total = tl.dot(by_gate, tl.trans(gate_b), gate_total)
        if HAS_UP:
            up_total = tl.dot(by_up, tl.trans(up_b), up_total)
    part = tl.program_id(1).to(tl.int64) * rows + first_row
    if HAS_GATE:
        _store_sum(gate_sums + part * gate_rank, gate_total, is_row, gate_rank, ROWS, GATE_RANK)
    if HAS_UP:
        _store_sum(up_sums + part * up_rank, up_total, is_row, up_rank, ROWS, UP_RANK)


def gradient_columns(capability: int) -> int:
    """Columns of a tile of the backward pass."""
    return GRADIENT_COLUMNS.get(capability, 32)


def _padded(rank: int) -> int:
    return max(LEAST_RANK, triton.next_power_of_2(rank))


def _of(low: LowRank | None, absent: torch.Tensor) -> tuple[list[torch.Tensor], list[Any], int]:
    """Arguments for one adapter: its factors, strides, rank and scaling, and its padded rank."""
    if low is None:
        return [absent, absent], [0, 0, 0, 0, 0.0], LEAST_RANK
    left = low.left if low.left.stride(1) == 1 else low.left.contiguous()
    rank = left.shape[1]
    return [left, low.right], [left.stride(0), *low.right.stride(), rank, float(low.scaling)], _padded(rank)


def _sums(low: LowRank | None, y: torch.Tensor, ranges: int) -> torch.Tensor | None:
    return None if low is None else y.new_empty(ranges, len(y), low.left.shape[1], dtype=torch.float32)


def _total(sums: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if sums is None else sums.sum(0).to(dtype)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, gate_low: LowRank | None, up_low: LowRank | None, a: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """GPU version of `fused_mlp.swiglu_in_torch`; column strides of 1."""
    (rows, columns), act = gate.shape, torch.empty_like(gate, memory_format=torch.contiguous_format)
    ranges = triton.cdiv(columns, RANGE)
    rank = 0 if a is None else len(a)
    sums = None if a is None else act.new_empty(ranges, rows, rank, dtype=torch.float32)
    (gate_tensors, gate_numbers, gate_rank) = _of(gate_low, act)
    (up_tensors, up_numbers, up_rank) = _of(up_low, act)
    with fp8_kernel._on(act):
        _swiglu[(triton.cdiv(rows, ROWS), ranges)](
            act, act if sums is None else sums, gate, up, *gate_tensors, *up_tensors, act if a is None else a, rows,
            columns, gate.stride(0), up.stride(0), *gate_numbers, *up_numbers,
            *((0, 0) if a is None else a.stride()), rank,
            HAS_GATE=gate_low is not None, HAS_UP=up_low is not None, HAS_DOWN=a is not None, GATE_RANK=gate_rank,
            UP_RANK=up_rank, DOWN_RANK=_padded(rank), ROWS=ROWS, COLUMNS=COLUMNS,
            RANGE=RANGE, STAGES=STAGES, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return act, _total(sums, act.dtype)


def swiglu_gradient(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *lows: LowRank | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """GPU version of `fused_mlp.swiglu_gradient_in_torch`; column strides of 1."""
    (rows, columns), (gate_low, up_low, down_low) = gate.shape, lows
    tile = gradient_columns(torch.cuda.get_device_capability(gate.device)[0] if gate.is_cuda else 0)
    ranges = triton.cdiv(columns, RANGE)
    gate_sums, up_sums = _sums(gate_low, gate, ranges), _sums(up_low, gate, ranges)
    (gate_tensors, gate_numbers, gate_rank) = _of(gate_low, gate)
    (up_tensors, up_numbers, up_rank) = _of(up_low, gate)
    (down_tensors, down_numbers, down_rank) = _of(down_low, gate)
    with fp8_kernel._on(gate):
        _swiglu_gradient[(triton.cdiv(rows, ROWS), ranges)](
            gate, up, grad, gate if gate_sums is None else gate_sums, gate if up_sums is None else up_sums,
            *gate_tensors, *up_tensors, *down_tensors, rows, columns, gate.stride(0), up.stride(0), grad.stride(0),
            *gate_numbers, *up_numbers, *down_numbers,
            HAS_GATE=gate_low is not None, HAS_UP=up_low is not None, HAS_DOWN=down_low is not None,
            GATE_RANK=gate_rank, UP_RANK=up_rank, DOWN_RANK=down_rank,
            ROWS=ROWS, COLUMNS=tile, RANGE=RANGE, STAGES=STAGES, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return _total(gate_sums, gate.dtype), _total(up_sums, gate.dtype)
