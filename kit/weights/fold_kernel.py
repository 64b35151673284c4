"""GPU kernel that computes dequantize(NF4) + scale · B · A, so that a sync reads 4.5 bits per weight and writes 16.

The same sum in PyTorch (`dequantize` and `add_update` of `kit/rollout/server/remerge.py`) moves 38.6 bytes per weight,
the kernel 2.6. Imported on a GPU only: Triton comes with vLLM's CUDA build.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_SIZE = 64
ROWS, COLUMNS = 64, 128


@triton.jit
def _fold(
    out, packed, absmax, code, a, b, scale, rows, columns, rank,
    stride_a, stride_b, expert_a, expert_b,
    HAS_UPDATE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    left_rows = rows - first
    row = tl.arange(0, ROWS)  # (R,), 32-bit offsets from the first row
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)  # (C,)
    byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)  # (C / 2,)
    block = tl.program_id(1) * (COLUMNS // BLOCK_SIZE) + tl.arange(0, COLUMNS // BLOCK_SIZE)  # (C / 64,)
    bytes_, blocks = columns // 2, columns // BLOCK_SIZE  # per row
    expert = tl.program_id(2).to(tl.int64)
    row_of_all = expert * rows + first
    out += row_of_all * columns
    packed += row_of_all * bytes_
    absmax += row_of_all * blocks
    a += expert * expert_a
    b += expert * expert_b + first * stride_b
    is_row = row[:, None] < left_rows
    pairs = tl.load(packed + row[:, None] * bytes_ + byte[None, :], mask=is_row & (byte[None, :] < bytes_), other=0)
    pairs = pairs.to(tl.int32)
    # The first of a byte's two weights is in its upper half.
    value = tl.interleave(tl.load(code + (pairs >> 4)), tl.load(code + (pairs & 15)))  # (R, C)
    # One load per block of 64: one per weight makes the kernel four times slower.
    scales = tl.load(
        absmax + row[:, None] * blocks + block[None, :], mask=is_row & (block[None, :] < blocks), other=0.0
    )
    value = tl.reshape(value, (ROWS, COLUMNS // BLOCK_SIZE, BLOCK_SIZE)) * scales[:, :, None]
    # The dequantized weight is rounded to the storage type, as in the trainer; the sum is float32.
    weight = tl.reshape(value, (ROWS, COLUMNS)).to(out.dtype.element_ty).to(tl.float32)
    if HAS_UPDATE:
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
            update = tl.dot(left, right, update, input_precision="ieee")
        weight += scale * update
    is_inside = is_row & (column[None, :] < columns)
    tl.store(out + row[:, None] * columns + column[None, :], weight.to(out.dtype.element_ty), mask=is_inside)


def fold(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor, code: torch.Tensor, update: Any) -> None:
    """out (rows, columns) = dequantize(packed, absmax) + scale · b · a, summed in float32 and rounded once.

    `packed` (rows·columns/2,) uint8 and `absmax` (rows·columns/64,) float32 are bitsandbytes' own, `code` is (16,)
    float32; `update` is (a (r, columns), b (rows, r), scale) or None. columns must be a multiple of 64. Rows of E
    experts one after the other take a (E, r, columns) and b (E, rows / E, r), in one launch.
    """
    rows, columns = out.shape
    a, b, scale = update if update is not None else (out, out, 0.0)
    experts = len(a) if a.dim() == 3 else 1
    rank = a.shape[-2] if update is not None else 0
    if update is not None and (a.stride(-1) != 1 or b.stride(-1) != 1):
        a, b = a.contiguous(), b.contiguous()
    between = (a.stride(0), b.stride(0)) if a.dim() == 3 else (0, 0)
    rows //= experts
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), experts)
    with torch.cuda.device(out.device):
        _fold[grid](
            out, packed, absmax, code, a, b, float(scale), rows, columns, rank, a.stride(-2), b.stride(-2), *between,
            HAS_UPDATE=update is not None, RANK_BLOCK=32 if rank > 16 else 16, ROWS=ROWS, COLUMNS=COLUMNS,
            BLOCK_SIZE=BLOCK_SIZE,
        )  # fmt: skip
