"""GPU kernels of `fused_norms.py`: RMSNorm with a frozen weight, with a residual sum before it, rotary embedding with
or without the norm of each head before it, and SwiGLU.

The PyTorch reference implementations are in `fused_norms.py`. The backward pass sums an input's squares again while it
reads it. Written in Triton for any floating-point dtype. Imported on a GPU only; `bench/kernels_check.py` compares
them.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kit.weights import fp8_kernel

HEAD_ROWS = 32  # heads of positions, of a program of rotary embedding
TILE = 2048  # values, of a program of SwiGLU


@triton.jit
def _norm(
    y, total, x, more, weight, columns, x_stride, more_stride, eps, HAS_MORE: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < columns
    kind = y.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_MORE:
        added = tl.load(more + row * more_stride + column, mask=is_inside, other=0.0).to(tl.float32)
        value = (value + added).to(kind).to(tl.float32)
        tl.store(total + row * columns + column, value.to(kind), mask=is_inside)
    by = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    tl.store(y + row * columns + column, (value.to(kind).to(tl.float32) * by).to(kind), mask=is_inside)


@triton.jit
def _norm_gradient(
    dx, dy, past, x, weight, columns, past_stride, x_stride, eps, HAS_PAST: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    is_inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    by = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    grad = by * tl.load(dy + row * columns + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    along = tl.sum(grad * value, 0) / columns
    found = scale * (grad - value * (scale * scale * along))
    if HAS_PAST:
        found += tl.load(past + row * past_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(dx + row * columns + column, found.to(dx.dtype.element_ty), mask=is_inside)


@triton.jit
def _places_of(positions, heads, half, POSITIONS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The first position of a program in 64 bits, the tile's positions, heads and columns, (P, 1, 1), (1, H, 1) and
    (1, 1, D / 2), and which of its values exist."""
    first = tl.program_id(0).to(tl.int64) * POSITIONS
    row = tl.arange(0, POSITIONS)[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    column = tl.arange(0, HALF)[None, None, :]
    return first, row, head, column, (row < positions - first) & (head < heads) & (column < half)


@triton.jit
def _load(x, place, mask):
    return tl.load(x + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate(
    y, x, weight, cos, sin, rows, positions, heads, half, x_stride, batch_stride, angle_stride, eps,
    HAS_NORM: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    first, row, head, column, is_inside = _places_of(rows, heads, half, POSITIONS, HEADS, HALF)
    kind = y.dtype.element_ty
    x += first * x_stride
    place = row * x_stride + head * (2 * half) + column
    x1, x2 = _load(x, place, is_inside), _load(x + half, place, is_inside)
    if HAS_NORM:
        by1, by2 = _load(weight, column, column < half), _load(weight + half, column, column < half)
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 2) / (2 * half) + eps)[:, :, None]
        x1 = ((x1 * scale).to(kind).to(tl.float32) * by1).to(kind).to(tl.float32)
        x2 = ((x2 * scale).to(kind).to(tl.float32) * by2).to(kind).to(tl.float32)
    angle = ((first + row) // positions) * batch_stride + ((first + row) % positions) * angle_stride + column
    is_angle = (row < rows - first) & (column < half)
    cos1, cos2 = _load(cos, angle, is_angle), _load(cos + half, angle, is_angle)
    sin1, sin2 = _load(sin, angle, is_angle), _load(sin + half, angle, is_angle)
    y += first * heads * 2 * half
    place = (row * heads + head) * (2 * half) + column
    tl.store(y + place, (x1 * cos1 - x2 * sin1).to(kind), mask=is_inside)
    tl.store(y + half + place, (x2 * cos2 + x1 * sin2).to(kind), mask=is_inside)


@triton.jit
def _rotate_gradient(
    dx, dy, x, weight, cos, sin, rows, positions, heads, half, x_stride, batch_stride, angle_stride, eps,
    HAS_NORM: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    first, row, head, column, is_inside = _places_of(rows, heads, half, POSITIONS, HEADS, HALF)
    dy += first * heads * 2 * half
    out = (row * heads + head) * (2 * half) + column
    dy1, dy2 = _load(dy, out, is_inside), _load(dy + half, out, is_inside)
    angle = ((first + row) // positions) * batch_stride + ((first + row) % positions) * angle_stride + column
    is_angle = (row < rows - first) & (column < half)
    cos1, cos2 = _load(cos, angle, is_angle), _load(cos + half, angle, is_angle)
    sin1, sin2 = _load(sin, angle, is_angle), _load(sin + half, angle, is_angle)
    grad1 = dy1 * cos1 + dy2 * sin2
    grad2 = dy2 * cos2 - dy1 * sin1
    if HAS_NORM:
        x += first * x_stride
        place = row * x_stride + head * (2 * half) + column
        x1, x2 = _load(x, place, is_inside), _load(x + half, place, is_inside)
        grad1 *= _load(weight, column, column < half)
        grad2 *= _load(weight + half, column, column < half)
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 2) / (2 * half) + eps)[:, :, None]
        along = (tl.sum(grad1 * x1 + grad2 * x2, 2) / (2 * half))[:, :, None] * scale * scale
        grad1, grad2 = scale * (grad1 - x1 * along), scale * (grad2 - x2 * along)
    kind = dx.dtype.element_ty
    dx += first * heads * 2 * half
    tl.store(dx + out, grad1.to(kind), mask=is_inside)
    tl.store(dx + half + out, grad2.to(kind), mask=is_inside)


@triton.jit
def _swiglu(act, gate, up, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    g, u = _load(gate, place, place < count), _load(up, place, place < count)
    kind = act.dtype.element_ty
    tl.store(act + place, ((g * tl.sigmoid(g)).to(kind).to(tl.float32) * u).to(kind), mask=place < count)


@triton.jit
def _swiglu_gradient(gate, up, grad, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = place < count
    g, u, d = _load(gate, place, is_inside), _load(up, place, is_inside), _load(grad, place, is_inside)
    share = tl.sigmoid(g)
    silu = g * share
    kind = gate.dtype.element_ty
    tl.store(gate + place, (d * u * (silu * (1.0 - share) + share)).to(kind), mask=is_inside)
    tl.store(up + place, (d * silu).to(kind), mask=is_inside)


def _warps(columns: int) -> int:
    return min(16, max(1, columns // 512))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x (…, n) as (T, n) with adjacent columns."""
    return x.reshape(-1, x.shape[-1]) if x.stride(-1) == 1 else x.contiguous().view(-1, x.shape[-1])


def norm(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPU version of `fused_norms.norm_in_torch`."""
    rows, y = _rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    total, others = (x, rows) if more is None else (torch.empty_like(y), _rows(more))
    columns = triton.next_power_of_2(rows.shape[1])
    if rows.numel():
        with fp8_kernel._on(x):
            _norm[(len(rows),)](
                y, total, rows, others, weight, rows.shape[1], rows.stride(0), others.stride(0), eps,
                HAS_MORE=more is not None, COLUMNS=columns, num_warps=_warps(columns),
            )  # fmt: skip
    return total, y


def norm_gradient(
    grad: torch.Tensor, past: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """GPU version of `fused_norms.norm_gradient_in_torch`, written over `grad` unless that is strided."""
    rows, dx = _rows(h), _rows(grad.to(h.dtype)).contiguous()
    others = dx if past is None else _rows(past)
    columns = triton.next_power_of_2(rows.shape[1])
    if rows.numel():
        with fp8_kernel._on(h):
            _norm_gradient[(len(rows),)](
                dx, dx, others, rows, weight, rows.shape[1], others.stride(0), rows.stride(0), eps,
                HAS_PAST=past is not None, COLUMNS=columns, num_warps=_warps(columns),
            )  # fmt: skip
    return dx.view(h.shape)


def _launch(
    kernel: Any,
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    has_norm: bool,
) -> None:
    """Launch a kernel of rotary embedding for x (B, T, H, D); `tensors` are its arguments before cos and sin."""
    batch, positions, heads, dim = x.shape
    tile = min(HEAD_ROWS, triton.next_power_of_2(heads))
    many, rows = HEAD_ROWS // tile, batch * positions
    if not rows:
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    with fp8_kernel._on(x):
        kernel[(triton.cdiv(rows, many), triton.cdiv(heads, tile))](
            *tensors, cos, sin, rows, positions, heads, dim // 2, x.stride(1), cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1), eps, HAS_NORM=has_norm, POSITIONS=many, HEADS=tile, HALF=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )  # fmt: skip


def _physical(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) as (B, T, H, D) with adjacent heads and evenly spaced positions."""
    x = x.transpose(1, 2)
    batch, positions, _, dim = x.shape
    is_even = x.stride()[2:] == (dim, 1) and (batch == 1 or x.stride(0) == positions * x.stride(1))
    return x if is_even else x.contiguous()


def rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """GPU version of `fused_norms.rotate_in_torch`."""
    x = _physical(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(_rotate, x, [y, x, x if weight is None else weight], cos, sin, eps, weight is not None)
    return y.transpose(1, 2)


def rotate_gradient(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """GPU version of `fused_norms.rotate_gradient_in_torch`, written over `grad` if its heads are adjacent."""
    dy = grad.transpose(1, 2).contiguous()
    x = dy if x is None else _physical(x)
    _launch(_rotate_gradient, x, [dy, dy, x, x if weight is None else weight], cos, sin, eps, weight is not None)
    return dy.transpose(1, 2)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPU version of `fused_norms.swiglu_in_torch` for contiguous tensors."""
    act = torch.empty_like(gate)
    if gate.numel():
        with fp8_kernel._on(gate):
            _swiglu[(triton.cdiv(gate.numel(), TILE),)](act, gate, up, gate.numel(), TILE=TILE)
    return act


def swiglu_gradient(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GPU version of `fused_norms.swiglu_gradient_in_torch` for contiguous tensors, written over gate and up."""
    if gate.numel():
        with fp8_kernel._on(gate):
            _swiglu_gradient[(triton.cdiv(gate.numel(), TILE),)](gate, up, grad, gate.numel(), TILE=TILE)
    return gate, up
