"""Attention over a packed row: several sequences one after the other, some following a prompt that they share.

A position sees itself and earlier positions of its own segment and, after a shared prompt, all of that prompt. On a
GPU this is torch's FlexAttention with a `BlockMask` or, in half precision, FlashAttention's or cuDNN's kernels
(`flash_packed`; selected by `train.packed_attention`), on a CPU sdpa with a dense boolean mask. Each is passed through
transformers as the attention mask, which a layer recomputed in the backward pass receives again.
`bench/packing_check.py` compares them and prints their times.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kit.core.errors import BadInput
from kit.policy.packed import sequence_parallel
from kit.policy.packed.flash import MULTIPLE, TYPES, FlashMask, Kernels, flash_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "sdpa_packed"
# Block size of the block mask. A packed row on a GPU is a multiple of it long, so that blocks are whole and their
# number is the number of positions divided by it: this lets one compiled kernel serve every length.
BLOCK = 128


Kind = Literal["dense", "flex", "flash", "cudnn"]
# {kind: (kernels of a segment on itself, kernels of the segments after a shared prompt on the prompt)}.
KERNELS: dict[str, tuple[Kernels, Kernels]] = {"flash": ("flash", "flash"), "cudnn": ("cudnn", "cudnn")}


class Sequences(NamedTuple):
    """Segment lengths of a packed row, none zero: shared prompts, segments after each in the same order, the rest."""

    lengths: list[int]  # all segments
    prompts: list[int]  # the shared prompts, which are the first segments
    behind: list[int]  # tokens of all segments after each shared prompt


class Segments(NamedTuple):
    """Positions that each position of a packed row of T tokens sees: [own, itself] and [shared_from, shared_to)."""

    own: torch.Tensor  # (T,) int32: first position of the position's segment
    shared_from: torch.Tensor  # (T,) int32
    shared_to: torch.Tensor  # (T,) int32, equal to shared_from without a shared prompt


def use_packed_attention(model: "PreTrainedModel", is_split: bool = False) -> None:
    """Make a transformers `model` on a GPU accept a `BlockMask` or a `FlashMask`; other masks still use sdpa.
    `is_split`: and, on any device, rows whose tokens are split over processes."""
    if model.device.type != "cuda" and not is_split:
        return
    register()
    model.set_attn_implementation(NAME)


def register() -> None:
    """Register the attention with transformers as `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def mask_kind(model: torch.nn.Module, device: torch.device, wanted: Kind) -> Kind:
    """Mask kind that a forward of `model` on `device` uses under the current autocast; `wanted` is
    `train.packed_attention`. FlashAttention's and cuDNN's kernels do not support float32."""
    if device.type == "cpu":
        return "dense"
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    return wanted if wanted in KERNELS and _attention_dtype(device.type, dtype) in TYPES else "flex"


def _attention_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    # autocast casts sdpa's inputs, but not those of the other two, which require a single dtype.
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype


def row_length(tokens: int, kind: Kind, parts: int = 1) -> int:
    """Padded length of a packed row of `tokens` tokens, split into equal `parts`."""
    if parts > 1:
        return parts * row_length(-(-tokens // parts), kind)
    if kind == "flex":  # at least two blocks: torch compiles separately for a size of one
        return BLOCK * max(2, -(-tokens // BLOCK))
    multiple = MULTIPLE if kind in KERNELS else 1
    return multiple * max(1, -(-tokens // multiple))


def attention_mask(sequences: Sequences, kind: Kind, device: torch.device) -> torch.Tensor | BlockMask:
    """Mask of a packed row for a model on `device`."""
    if kind in KERNELS:
        return FlashMask(*sequences, device, KERNELS[kind])
    segments = segments_of(sequences, device)
    return dense_mask(segments) if kind == "dense" else block_mask(segments)


def segments_of(sequences: Sequences, device: torch.device | str) -> Segments:
    lengths, prompts, behind = (np.array(one, dtype=np.int32) for one in sequences)
    first, then = prompts.sum(), prompts.sum() + behind.sum()
    facts = np.zeros((3, lengths.sum()), dtype=np.int32)
    facts[0] = np.repeat(lengths.cumsum() - lengths, lengths)
    facts[1, first:then] = np.repeat(prompts.cumsum() - prompts, behind)
    facts[2, first:then] = np.repeat(prompts.cumsum(), behind)
    return Segments(*torch.from_numpy(facts).to(device))


def dense_mask(segments: Segments) -> torch.Tensor:
    """Boolean (1, 1, T, T): whether the row's position sees the column's."""
    own, start, end = (one[:, None] for one in segments)
    position = torch.arange(len(own), device=own.device)
    query, key = position[:, None], position[None, :]
    return (((key >= own) & (key <= query)) | ((key >= start) & (key < end)))[None, None]


def block_mask(segments: Segments) -> BlockMask:
    """The same mask as a `BlockMask` with blocks of `BLOCK`; T must be a multiple of it. Takes T x T / 128 memory.

    `create_block_mask` would make T x T booleans for every mask unless it is compiled.
    """
    own, start, end = segments
    length = len(own)
    first = torch.arange(0, length, BLOCK, device=own.device, dtype=torch.int32)  # (T / 128,)
    until = torch.arange(1, length + 1, device=own.device, dtype=torch.int32)  # (T,)
    seen = _overlap(own, until, first) + _overlap(start, end, first)  # (T, T / 128): positions of the block
    by_block = seen.view(len(first), BLOCK, len(first))
    whole = (by_block == BLOCK).all(1)
    some = (by_block > 0).any(1) & ~whole

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ((key >= own[query]) & (key <= query)) | ((key >= start[query]) & (key < end[query]))

    return BlockMask.from_kv_blocks(
        *_ordered(some), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _overlap(start: torch.Tensor, end: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Number of positions of each [start, end) that lie in each block that begins at `first`: (T, T / 128)."""
    low = torch.maximum(start[:, None], first)
    return (torch.minimum(end[:, None], first + BLOCK) - low).clamp_(min=0)


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number (1, 1, Q) of chosen key blocks per query block, and the block indices (1, 1, Q, K), chosen ones first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: query (B, H, T, D), key and value (B, G, T, D), output (B, T, H, D).

    Uses FlashAttention or cuDNN for a `FlashMask` and FlexAttention for any other `BlockMask`; everything else,
    generation included, is transformers' sdpa unchanged. With fewer tokens than the mask has, the others are those of
    the processes of `sequence_parallel`.
    """
    group = None
    if attention_mask is not None and len(attention_mask.shape) == 4:
        group = sequence_parallel.attention_group(query.size(2), attention_mask.shape[-2])
    if group is not None:
        query, key, value = (sequence_parallel.heads_to_tokens(one, group) for one in (query, key, value))
        if isinstance(attention_mask, BlockMask):
            output = _packed(query, key, value, attention_mask, scaling)
        else:
            given = {"attn_mask": attention_mask, "scale": scaling, "enable_gqa": True}
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2)
        return sequence_parallel.tokens_to_heads(output, group), None
    if isinstance(attention_mask, BlockMask):
        return _packed(query, key, value, attention_mask, scaling), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: BlockMask, scaling: float | None
) -> torch.Tensor:
    """Attention (B, T, H, D) of a packed row by the kernels of its mask."""
    dtype = _attention_dtype(query.device.type, query.dtype)
    parts = [one.to(dtype) for one in (query, key, value)]
    if isinstance(attention_mask, FlashMask):
        if dtype not in TYPES:
            raise BadInput(
                f"train.packed_attention is {attention_mask.kernels[0]}, and the model's attention is in {dtype}. "
                "Set it to flex."
            )
        # Not one[0]: its gradient is copied into zeros of the other layout, which rotary embedding copies back.
        rows = [one.squeeze(0).transpose(0, 1) for one in parts]
        return flash_attention(rows[0], rows[1], rows[2], attention_mask, scaling)[None]
    for one in parts:
        # Otherwise torch unifies sizes that happen to be equal, such as the numbers of heads and of blocks.
        torch._dynamo.mark_static(one, (0, 1, 3))
        if (base := one._base) is not None:  # (B, T, ...), a projection's output
            torch._dynamo.mark_static(base, [n for n in range(base.dim()) if n != 1])
    output = _compiled()(*parts, attention_mask, scaling)
    return output.transpose(1, 2).contiguous()


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    """FlexAttention, compiled on its first call for rows of every length."""
    import torch._inductor.config as inductor

    # Inside DDP's forward torch splits compiled graphs at DDP's bucket boundaries; there are no parameters here.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.specialize_float = True  # the scale is a constant of the kernel
    # Two kernels are compiled: not worth a pool of processes that each import torch.
    inductor.compile_threads = 1
    # fullgraph: raise an error instead of computing T x T scores uncompiled.
    return torch.compile(_flex, dynamic=True, fullgraph=True)


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scaling: float | None
) -> torch.Tensor:
    torch._check(query.shape[2] % BLOCK == 0)  # the kernel then needs no bounds checks
    return flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
