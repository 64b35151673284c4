"""`train.packed_attention: flash`: attention over a packed row with FlashAttention's kernels and shared prompts.

Those kernels support concatenated sequences that attend to themselves, or to sequences of another row. Here a position
sees two such parts: its own segment, causally, and the prompt that its segment shares, whole. With the log-sum-exp l
that the kernels return with each output o, softmax over both is

    l = log(exp(l1) + exp(l2)),   o = exp(l1 - l) o1 + exp(l2 - l) o2

(Liu et al., Ring Attention, arXiv:2310.01889, without its ring). Backward is exact as well: of the softmax, a kernel's
backward pass needs only l and the row sums of o · do, so each part is called with those of the whole; gradients add.

A packed row has its shared prompts first and the segments after them next, so that either part is a slice. Either part
may use cuDNN's kernels instead (`cudnn_packed`), which have the same inputs and outputs.

With the kernels `joined` for shared prompts both parts are one call: a prompt's keys and values are repeated before
those of each segment that sees it, and the last query of a sequence sees all of its keys. Nothing is merged, and what
backward computes once per query, o · do and the conversion of its gradient, is not computed again for the prompts.
"""

import functools
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch.autograd.function import FunctionCtx
from torch.nn.attention.flex_attention import BlockMask

from kit.core.cards import generation
from kit.core.errors import BadInput
from kit.policy.packed import cudnn
from kit.policy.packed.span import Backward, Forward, Saved, Span, head_fault

TYPES = (torch.bfloat16, torch.float16)
MULTIPLE = 16  # packed rows are padded to this multiple; the kernels take any length, FP8 products prefer it
LARGEST_HEAD = 256
MOST_JOINED = 1.5  # keys per position of a joined row: rows of long prompts and short segments would take much memory

Kernels = Literal["flash", "cudnn", "joined"]  # joined: of shared prompts, by the kernels of the segments


def fault(head_dim: int) -> str | None:
    """Why FlashAttention's kernels cannot serve heads of `head_dim` here, or None; also None without a GPU, if the
    size is supported."""
    if (why := head_fault(head_dim, LARGEST_HEAD)) or not torch.cuda.is_available():
        return why
    if torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} comes without its CUDA kernels"
    if not generation(torch.cuda.get_device_capability()).flash:
        return f"{torch.cuda.get_device_name()} is older than Ampere (compute capability 8.0), which its kernels need"
    return None


class Repeats(NamedTuple):
    """Where the S joined keys of a row of T positions come from, and where each position's went."""

    source: torch.Tensor  # (S,) int32: position of each joined key
    own: torch.Tensor  # (T,) int32: place of each position's key before its own segment's queries
    copies: torch.Tensor  # (P, C) int32: all places of the P positions of shared prompts
    is_copy: torch.Tensor | None  # (P, C) bool: False where a prompt has fewer than C; None if none has


def joined(lengths: list[int], prompts: list[int], behind: list[int]) -> tuple[list[int], list[np.ndarray]]:
    """Number of joined keys of each segment, and `Repeats` as arrays. Arguments as in `FlashMask`."""
    starts = [0, *accumulate(lengths)]
    ends_behind = [*accumulate(behind, initial=sum(prompts))][1:]  # of the segments after each prompt
    keys, source, own = [], [], []
    places: list[list[int]] = [[] for _ in prompts]
    at = which = 0
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        before = 0
        if number < len(prompts):
            places[number].append(at)
        elif which < len(prompts):
            before = prompts[which]
            source.append(np.arange(starts[which], starts[which] + before))
            places[which].append(at)
            which += start + length == ends_behind[which]
        source.append(np.arange(start, start + length))
        own.append(np.arange(at + before, at + before + length))
        keys.append(before + length)
        at += before + length
    most = max(map(len, places))
    filled = [one + one[:1] * (most - len(one)) for one in places]
    copies = [np.array(one) + np.arange(length)[:, None] for one, length in zip(filled, prompts, strict=True)]
    is_copy = [np.tile(np.arange(most) < len(one), (length, 1)) for one, length in zip(places, prompts, strict=True)]
    return keys, [np.concatenate(one) for one in (source, own, copies, is_copy)]


class FlashMask(BlockMask):
    """Layout of a packed row for the kernels. Transformers passes a 4-D mask through unchanged if it is a tensor or a
    `BlockMask`, so this subclasses `BlockMask` in name only, without blocks."""

    def __init__(
        self,
        lengths: list[int],
        prompts: list[int],
        behind: list[int],
        device: torch.device | str,
        kernels: tuple[Kernels, Kernels] = ("flash", "flash"),
    ):
        """`lengths` of the row's segments in order; `prompts`, those of the shared prompts, which come first;
        `behind`, the number of tokens that see each prompt, which follow in the same order. None is zero. `kernels`
        of a segment on itself and of the segments after a prompt on the prompt."""
        length, first, then = sum(lengths), sum(prompts), sum(prompts) + sum(behind)
        by_own, by_shared = kernels
        keys, repeats = None, None
        if by_shared == "joined":
            by_shared = by_own
            if prompts and sum((found := joined(lengths, prompts, behind))[0]) <= MOST_JOINED * length:
                (keys, repeats), prompts, behind = found, [], []
        self.kernels = by_own, by_shared
        longest = max(2, *lengths), max(2, *behind, 0), max(prompts, default=0)
        longest_key = max(keys or lengths)
        if by_own == "cudnn":
            lengths = cudnn.filled_up(lengths)
            keys = keys and cudnn.filled_up(keys)
        if by_shared == "cudnn" and prompts:
            prompts, behind = cudnn.filled_up(prompts), cudnn.filled_up(behind)
        ends = [[0, *accumulate(one)] for one in (lengths, keys or [], behind, prompts)]
        # One tensor, so that the device is waited for once.
        parts = [np.array(one, dtype=np.int32) for one in (*ends, *(repeats or []))]
        whole = torch.from_numpy(np.concatenate([one.ravel() for one in parts])).to(device)
        own, own_keys, queries, prompt_keys, *places = whole.split([one.size for one in parts])
        # A longest query of one takes a different path in the kernels, with a different log-sum-exp layout.
        self.own = (own, own_keys if keys else None, longest[0], longest_key)
        self.shared = (queries, prompt_keys, *longest[1:], first, then) if prompts else None
        self.repeats = None
        if repeats:
            source, place, copies, is_copy = places
            copies, is_copy = (one.view(parts[-1].shape) for one in (copies, is_copy))
            self.repeats = Repeats(source, place, copies, None if repeats[-1].all() else is_copy.bool())
        self.seq_lengths = (length, length)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, *self.seq_lengths)

    def __repr__(self) -> str:
        return f"FlashMask(shape={self.shape})"

    __str__ = __repr__


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: FlashMask, scale: float | None
) -> torch.Tensor:
    """Compute attention (T, H, D) of query (T, H, D), key and value (T, G, D), bfloat16 or float16, G a divisor of H;
    `scale` multiplies the scores, by default D ** -0.5."""
    if mask.repeats is not None:
        key, value = _Repeat.apply(key, value, mask.repeats)
    return _Attention.apply(query, key, value, mask, scale)


class _Repeat(torch.autograd.Function):
    """Joined keys and values (S, G, D) of those of a row (T, G, D)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, key: torch.Tensor, value: torch.Tensor, repeats: Repeats
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.repeats = repeats
        return key.index_select(0, repeats.source), value.index_select(0, repeats.source)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, own, copies, is_copy = ctx.repeats
        found = []
        for grad in grads:
            whole = grad.index_select(0, own)
            some = grad.index_select(0, copies.view(-1)).unflatten(0, copies.shape)  # (P, C, G, D)
            if is_copy is not None:
                some = some * is_copy[:, :, None, None]
            whole[: len(copies)] = some.sum(1, dtype=torch.promote_types(some.dtype, torch.float32))
            found.append(whole)
        return *found, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: FlashMask,
        scale: float | None,
    ) -> torch.Tensor:
        shared = mask.shared or (None, None, 0, 0, 0, 0)
        out, lse = packed_flash_attention(query, key, value, *mask.own, *shared, scale, *mask.kernels)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, grad, mask = Saved(*ctx.saved_tensors), grad.contiguous(), ctx.mask
        (_, backward), (_, shared_backward) = (_kernels(one) for one in mask.kernels)
        found = backward(grad, saved, _own_span(mask.own, ctx.scale))
        if mask.shared:
            *_, first, then = mask.shared
            some = slice(first, then)
            query, key, value, out, lse = saved
            part = Saved(query[some], key[:first], value[:first], out[some], lse[:, some].contiguous())
            more = shared_backward(grad[some], part, _shared_span(mask.shared[:4], ctx.scale))
            for whole, added, where in zip(found, more, (some, slice(first), slice(first)), strict=True):
                whole[where].add_(added)
        return *found, None, None


def _own_span(own: tuple[torch.Tensor, torch.Tensor | None, int, int], scale: float | None) -> Span:
    """Segments, each on itself, or on its joined keys."""
    ends, key_ends, longest, longest_key = own
    return Span(ends, ends if key_ends is None else key_ends, longest, longest_key, True, scale)


def _shared_span(shared: tuple[torch.Tensor, torch.Tensor, int, int], scale: float | None) -> Span:
    """Segments after shared prompts, each on its prompt."""
    query_ends, key_ends, longest_query, longest_key = shared
    return Span(query_ends, key_ends, longest_query, longest_key, False, scale)


# A single operator for torch, so that selective recomputation (recompute.py) sees and keeps its outputs.
@torch.library.custom_op("kit::packed_flash_attention", mutates_args=())
def packed_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    joined_ends: torch.Tensor | None,
    longest: int,
    longest_joined: int,
    query_ends: torch.Tensor | None,
    key_ends: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    first: int,
    then: int,
    scale: float | None,
    own_by: str,
    shared_by: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (T, H, D) and log-sum-exp (H, T), float32. Arguments as in `FlashMask`: `ends` of the segments,
    `joined_ends` of their keys if joined, `query_ends` within positions [first, then), which see shared prompts,
    `key_ends` within [0, first), which hold them, and the kernels of both parts."""
    (forward, _), (shared_forward, _) = (_kernels(one) for one in (own_by, shared_by))
    out, lse = forward(query, key, value, _own_span((ends, joined_ends, longest, longest_joined), scale))
    if lse.shape != query.shape[1::-1]:  # differs between FlashAttention releases
        raise BadInput(
            f"torch {torch.__version__}: the log-sum-exp of FlashAttention has the shape {tuple(lse.shape)}, "
            f"{tuple(query.shape[1::-1])} was expected. Set train.packed_attention to flex."
        )
    out, lse = out.contiguous(), lse.contiguous()
    if query_ends is not None:
        some = slice(first, then)
        span = _shared_span((query_ends, key_ends, longest_query, longest_key), scale)
        other = shared_forward(query[some], key[:first], value[:first], span)
        merge(out[some], lse[:, some], *other)
    return out, lse


def _kernels(name: str) -> tuple[Forward, Backward]:
    """Forward and backward functions of the named kernels."""
    return (attention, attention_backward) if name == "flash" else (cudnn.attention, cudnn.attention_backward)


def merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Merge the output (T, H, D) and log-sum-exp (H, T) over further keys into those of an attention, in place."""
    if out.is_cuda:
        from kit.policy.packed.flash_kernel import merge_in_place

        merge_in_place(out, lse, other.contiguous(), other_lse.contiguous())
        return
    both = torch.logaddexp(lse, other_lse)
    for_out, for_other = ((one - both).exp().t()[:, :, None] for one in (lse, other_lse))
    out.copy_(out * for_out + other * for_other)
    lse.copy_(both)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention's forward."""
    *sequences, causal, scale = span
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *sequences, 0.0, causal, False, scale=scale
    )
    return out, lse


def attention_backward(
    grad: torch.Tensor, saved: Saved, span: Span
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention's backward."""
    *sequences, causal, scale = span
    return torch.ops.aten._flash_attention_backward(
        grad, *saved, *sequences, 0.0, causal, *_no_dropout(grad.device), scale=scale
    )


@functools.cache
def _no_dropout(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random state that the backward pass requires but does not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
