"""GPU kernel of `flash.merge`, which has the PyTorch reference implementation: one pass over the output, not several.

Written in Triton. Imported on a GPU only; `bench/packing_check.py` compares them.
"""

import torch
import triton
import triton.language as tl

TILE = 4096  # output values per program


@triton.jit
def _merge(
    out, lse, other, other_lse, heads, dim, lse_stride, other_stride, HEADS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_head = head < heads
    lse += head * lse_stride + row
    own = tl.load(lse, mask=is_head, other=0.0)
    more = tl.load(other_lse + head * other_stride + row, mask=is_head, other=0.0)
    top = tl.maximum(own, more)
    both = top + tl.log(tl.exp(own - top) + tl.exp(more - top))
    place = (row * heads + head)[:, None] * dim + column[None, :]
    is_inside = is_head[:, None] & (column[None, :] < dim)
    value = tl.load(out + place, mask=is_inside, other=0.0).to(tl.float32) * tl.exp(own - both)[:, None]
    value += tl.load(other + place, mask=is_inside, other=0.0).to(tl.float32) * tl.exp(more - both)[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=is_inside)
    tl.store(lse, both, mask=is_head)


def merge_in_place(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge `other` into `out`, both (T, H, D) and contiguous. `lse` and `other_lse` are (H, T) float32, finite, with
    adjacent positions."""
    rows, heads, dim = out.shape
    columns = triton.next_power_of_2(dim)
    tile = min(triton.next_power_of_2(heads), max(1, TILE // columns))
    _merge[(rows, triton.cdiv(heads, tile))](
        out, lse, other, other_lse, heads, dim, lse.stride(0), other_lse.stride(0), HEADS=tile, COLUMNS=columns
    )
