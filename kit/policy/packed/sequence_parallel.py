"""`train.sequence_parallel`: sequence parallelism for packed rows, as in DeepSpeed-Ulysses (2309.14509).

Groups of N consecutive ranks share their rows. Each rank runs T / N of a row's T tokens through embedding, norms,
matmuls, adapter and head, in any precision of the base. Attention needs the whole row: an all-to-all before it
exchanges a token shard with all heads for all tokens with H / N heads, and a second one reverses that. Log-probs are
gathered at the end, so every rank computes the loss of all rows; gradients flow through its own tokens only.

    queries   (H, T/N, D) in each ──all-to-all──► (H/N, T, D)
    attention (T, H/N, D)         ──all-to-all──► (T/N, H, D)

Gradients of the adapter are parts that sum to the whole, and DDP, FSDP2 and ZeRO average over processes: `gathered`
multiplies them by N. Keys and values with fewer heads than processes are repeated first.

A model forward outside of packs (canary, generation) is not split. Not covered: adapter dropout, whose masks would be
those of a part, and experts chosen by the sampler.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class SequenceGroup(NamedTuple):
    """The processes that share a packed row."""

    processes: "dist.ProcessGroup"
    size: int
    rank: int  # of this process, within the group

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """This process's tokens (1, T/N) of (1, T)."""
        return tokens.chunk(self.size, dim=1)[self.rank]


_group: SequenceGroup | None = None


def start(size: int) -> SequenceGroup | None:
    """Group the processes by `size` neighbours; None for a size of 1. Called by all processes, once per trainer."""
    global _group
    _group = None
    if size > 1:
        rank = dist.get_rank()
        for first in range(0, dist.get_world_size(), size):
            processes = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                _group = SequenceGroup(processes, size, rank - first)
    return _group


def attention_group(tokens: int, mask_tokens: int) -> SequenceGroup | None:
    """The group to trade with, if a layer's `tokens` are a part of the row that its mask is for."""
    return None if tokens == mask_tokens else _group


def head_fault(size: int, heads: int, key_heads: int) -> str | None:
    """Error text if heads in these numbers cannot be split over `size` processes; None if they can."""
    if heads % size:
        return f"{heads} attention heads do not divide over {size} processes"
    if key_heads % size and size % key_heads:
        return f"{key_heads} heads of keys and values neither divide over {size} processes nor divide {size}"
    return None


def heads_to_tokens(heads: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """(1, H, T/N, D) of this process's tokens to (1, H/N, T, D) of its heads; H is repeated up to N."""
    if heads.size(1) < group.size:
        heads = heads.repeat_interleave(group.size // heads.size(1), dim=1)
    _, number, tokens, width = heads.shape
    traded = _AllToAll.apply(heads.reshape(group.size, number // group.size, tokens, width), group.processes)
    return traded.transpose(0, 1).reshape(1, number // group.size, group.size * tokens, width)


def tokens_to_heads(tokens: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """(1, T, H/N, D) of this process's heads to (1, T/N, H, D) of its tokens."""
    _, length, number, width = tokens.shape
    traded = _AllToAll.apply(tokens.reshape(group.size, length // group.size, number, width), group.processes)
    return traded.transpose(0, 1).reshape(1, length // group.size, group.size * number, width)


def gathered(part: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """(1, T) from the parts (1, T/N) of the group; the gradient is N times that of this process's part."""
    return _Gather.apply(part, group)


class _AllToAll(torch.autograd.Function):
    """Row j of (N, ...) goes to process j of the group; its own inverse, and so is its gradient."""

    @staticmethod
    def forward(ctx: "FunctionCtx", rows: torch.Tensor, processes: "dist.ProcessGroup") -> torch.Tensor:
        ctx.processes = processes
        rows = rows.contiguous()
        dist.all_to_all_single(found := torch.empty_like(rows), rows, group=processes)
        return found

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradient, ctx.processes), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "FunctionCtx", part: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
        ctx.group = group
        return torch.cat(all_gathered(part.detach(), group), dim=1)

    @staticmethod
    def backward(ctx: "FunctionCtx", gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.part(gradient) * ctx.group.size, None


def all_gathered(tensor: torch.Tensor, group: SequenceGroup) -> list[torch.Tensor]:
    """The tensors of the group's processes, which have one shape."""
    tensor = tensor.contiguous()
    found = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(found, tensor, group=group.processes)
    return found
