"""The arguments that the attention kernels of flash.py and cudnn.py share."""

from typing import NamedTuple, Protocol

import torch


class Span(NamedTuple):
    """Concatenated sequences of queries, each with a sequence of keys that it sees."""

    query_ends: torch.Tensor  # (N + 1,) int32: 0, then where each sequence ends
    key_ends: torch.Tensor  # (N + 1,) int32
    longest_query: int
    longest_key: int
    causal: bool
    scale: float | None  # of the scores; None: D ** -0.5


class Forward(Protocol):
    """Output (T, H, D) and log-sum-exp (H, T), float32, of query (T, H, D), key and value (S, G, D)."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class Backward(Protocol):
    """Gradients of query, key and value from `out` and `lse` of the softmax over all keys, of which `key` may be a
    part."""

    def __call__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        span: Span,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def head_fault(head_dim: int, largest: int) -> str | None:
    """Why kernels for heads of up to `largest` cannot serve heads of `head_dim`, or None."""
    if head_dim <= largest and head_dim % 8 == 0:
        return None
    return f"its kernels take heads of up to {largest} in steps of 8, the model's have {head_dim}"
