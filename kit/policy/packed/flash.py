"""`train.packed_attention: flash`: attention over a packed row with FlashAttention's kernels and shared prompts.

Those kernels support concatenated sequences that attend to themselves, or to sequences of another row. Here a position
sees two such parts: its own segment, causally, and the prompt that its segment shares, whole. With the log-sum-exp l
that the kernels return with each output o, softmax over both is

    l = log(exp(l1) + exp(l2)),   o = exp(l1 - l) o1 + exp(l2 - l) o2

(Liu et al., Ring Attention, arXiv:2310.01889, without its ring). Backward is exact as well: of the softmax, a kernel's
backward pass needs only l and the row sums of o · do, so each part is called with those of the whole; gradients add.

A packed row has its shared prompts first and the segments after them next, so that either part is a slice. Either part
may use cuDNN's kernels instead (`cudnn_packed`), which have the same inputs and outputs.

Where that takes little memory, both parts are one call (`Joined`): a prompt's keys and values are repeated before
those of each segment that sees it, and the last query of a sequence sees all of its keys. With FlashAttention's
kernels that is faster forward and backward, with cuDNN's only forward (bench/STEP.md, [24]).
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
MOST_JOINED = 1.5  # keys per position of a joined row; with long prompts and short segments they would be many

Kernels = Literal["flash", "cudnn"]
JOINED_BACKWARD: tuple[Kernels, ...] = ("flash",)


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


class Joined(NamedTuple):
    """A row of T positions whose P positions of shared prompts are repeated before each segment that sees them: S keys
    and values."""

    ends: torch.Tensor  # (N + 1,) int32: 0, then where the keys of each segment end
    longest: int
    source: torch.Tensor  # (S,) int32: the position that each key is of
    own: torch.Tensor  # (T,) int32: where the key of each position is, before its own segment's queries
    copies: torch.Tensor  # (P, C) int32: where all keys of a prompt's position are
    is_copy: torch.Tensor | None  # (P, C) bool: False where there are fewer than C; None if nowhere

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient (T, G, D) of a row's keys or values from that of the joined ones, (S, G, D)."""
        found = grad.index_select(0, self.own)
        copies = grad.index_select(0, self.copies.view(-1)).unflatten(0, self.copies.shape)  # (P, C, G, D)
        if self.is_copy is not None:
            copies = copies * self.is_copy[:, :, None, None]
        found[: len(copies)] = copies.sum(1, dtype=torch.promote_types(copies.dtype, torch.float32))
        return found


def joined_places(lengths: list[int], prompts: list[int], behind: list[int]) -> tuple[list[int], list[np.ndarray]]:
    """Number of keys of each joined segment, and `source`, `own`, `copies`, `is_copy` of `Joined`. Arguments as in
    `FlashMask`."""
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
    copies, is_copy = [], []
    for found, length in zip(places, prompts, strict=True):
        filled = np.array(found + found[:1] * (most - len(found)))
        copies.append(filled + np.arange(length)[:, None])
        is_copy.append(np.tile(np.arange(most) < len(found), (length, 1)))
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
        first, then = sum(prompts), sum(prompts) + sum(behind)
        self.kernels = kernels
        self.seq_lengths = (sum(lengths), sum(lengths))
        keys, places = joined_places(lengths, prompts, behind) if prompts else ([], [])
        if sum(keys) > MOST_JOINED * sum(lengths):
            keys, places = [], []
        longest = max(2, *lengths), max(2, *behind, 0), max(prompts, default=0), max(keys, default=0)
        if kernels[0] == "cudnn":
            lengths, keys = cudnn.filled_up(lengths), keys and cudnn.filled_up(keys)
        if kernels[1] == "cudnn" and prompts:
            prompts, behind = cudnn.filled_up(prompts), cudnn.filled_up(behind)
        parts = [np.array([0, *accumulate(one)]) for one in (lengths, behind, prompts, keys)] + places
        # One tensor, so that the device is waited for once.
        whole = torch.from_numpy(np.concatenate([one.ravel() for one in parts]).astype(np.int32)).to(device)
        own, queries, prompt_ends, ends, *joined = whole.split([one.size for one in parts])
        # A longest query of one takes a different path in the kernels, with a different log-sum-exp layout.
        self.own = (own, longest[0])
        self.shared = (queries, prompt_ends, *longest[1:3], first, then) if prompts else None
        self.joined: Joined | None = None
        if places:
            source, place, copies, is_copy = joined
            some = None if places[-1].all() else is_copy.view(places[-1].shape).bool()
            self.joined = Joined(ends, longest[3], source, place, copies.view(places[-1].shape), some)

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
    return _Attention.apply(query, key, value, mask, scale)


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
        joined = (mask.joined.source, mask.joined.ends, mask.joined.longest) if mask.joined else (None, None, 0)
        out, lse = packed_flash_attention(query, key, value, *mask.own, *shared, *joined, scale, *mask.kernels)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, grad, mask = Saved(*ctx.saved_tensors), grad.contiguous(), ctx.mask
        (_, backward), (_, shared_backward) = (_kernels(one) for one in mask.kernels)
        if mask.joined and mask.kernels[0] in JOINED_BACKWARD:
            joined = mask.joined
            key, value = (one.index_select(0, joined.source) for one in (saved.key, saved.value))
            span = _joined_span(mask.own, (joined.ends, joined.longest), ctx.scale)
            for_query, *for_keys = backward(grad, saved._replace(key=key, value=value), span)
            return for_query, *(joined.gradient(one) for one in for_keys), None, None
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


def _own_span(own: tuple[torch.Tensor, int], scale: float | None) -> Span:
    """Segments, each on itself."""
    ends, longest = own
    return Span(ends, ends, longest, longest, True, scale)


def _joined_span(own: tuple[torch.Tensor, int], keys: tuple[torch.Tensor, int], scale: float | None) -> Span:
    """Segments, each on the prompt that it sees and on itself."""
    return Span(own[0], keys[0], own[1], keys[1], True, scale)


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
    longest: int,
    query_ends: torch.Tensor | None,
    key_ends: torch.Tensor | None,
    longest_query: int,
    longest_key: int,
    first: int,
    then: int,
    source: torch.Tensor | None,
    joined_ends: torch.Tensor | None,
    longest_joined: int,
    scale: float | None,
    own_by: str,
    shared_by: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (T, H, D) and log-sum-exp (H, T), float32. Arguments as in `FlashMask`: `ends` of the segments,
    `query_ends` within positions [first, then), which see shared prompts, `key_ends` within [0, first), which hold
    them, `source`, `joined_ends` and `longest_joined` of a row that is joined, and the kernels of both parts."""
    (forward, _), (shared_forward, _) = (_kernels(one) for one in (own_by, shared_by))
    if source is not None:
        span = _joined_span((ends, longest), (joined_ends, longest_joined), scale)
        out, lse = forward(query, key.index_select(0, source), value.index_select(0, source), span)
    else:
        out, lse = forward(query, key, value, _own_span((ends, longest), scale))
    if lse.shape != query.shape[1::-1]:  # differs between FlashAttention releases
        raise BadInput(
            f"torch {torch.__version__}: the log-sum-exp of FlashAttention has the shape {tuple(lse.shape)}, "
            f"{tuple(query.shape[1::-1])} was expected. Set train.packed_attention to flex."
        )
    out, lse = out.contiguous(), lse.contiguous()
    if query_ends is not None and source is None:
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
