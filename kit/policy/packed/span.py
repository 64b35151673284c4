"""The arguments that the attention kernels of flash.py and cudnn.py share."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Concatenated sequences of queries, each with a sequence of keys that it sees."""

    query_ends: torch.Tensor  # (N + 1,) int32: 0, then where each sequence ends
    key_ends: torch.Tensor  # (N + 1,) int32
    longest_query: int
    longest_key: int
    causal: bool  # the last query of a sequence sees all of its keys, each earlier one a key less
    scale: float | None  # of the scores; None: D ** -0.5


class Saved(NamedTuple):
    """What a forward leaves to its backward. `out` and `lse` may be those of a softmax over more keys than `key`."""

    query: torch.Tensor  # (T, H, D)
    key: torch.Tensor  # (S, G, D)
    value: torch.Tensor  # (S, G, D)
    out: torch.Tensor  # (T, H, D)
    lse: torch.Tensor  # (H, T) float32, log-sum-exp of the scores


# query, key, value, span -> out, lse
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Span], tuple[torch.Tensor, torch.Tensor]]
# gradient of out, saved, span -> gradients of query, key, value
Backward = Callable[[torch.Tensor, Saved, Span], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def head_fault(head_dim: int, largest: int) -> str | None:
    """Why kernels for heads of up to `largest` cannot serve heads of `head_dim`, or None."""
    if head_dim <= largest and head_dim % 8 == 0:
        return None
    return f"its kernels take heads of up to {largest} in steps of 8, the model's have {head_dim}"
