"""`train.recompute_offload`: keep the inputs of recomputed layers in pinned host memory.

A layer's input is copied to the host on a separate stream while the next layers run, and back while the layer after it
is recomputed, one ahead: the card holds two inputs instead of one per layer. transformers' `offload` copies on the
compute stream, which then waits; TRL's `activation_offloading` is not a field of its GRPOConfig (trl 1.16).

The process queues a layer only when the card has reached the one before. If it ran further ahead, released inputs
would stay allocated until the card catches up, and every layer's input would be on the card again.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

AHEAD = 1  # layers queued behind the one that the card computes


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event."""

    def synchronize(self) -> None: ...


class _Waiting:
    """An input on the host; being copied back once `fetched` is set."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: "_Waiting | None"):
        self.host, self.device = host, device
        # The graph owns the inputs; a chain of strong references would keep those of finished steps alive.
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.fetched: torch.Tensor | None = None
        self.event: torch.cuda.Event | None = None


class HostInputs:
    """Hooks for tensors that autograd saves: `pack` offloads one, `unpack` restores it. Without a GPU the copies are
    plain ones, in the same order. Tensors that need no gradient stay: masks and rotary angles, which all layers share.
    So does the empty CPU tensor that torch 2.11's checkpoint saves next to its arguments."""

    def __init__(self) -> None:
        self._latest: Callable[[], _Waiting | None] = lambda: None
        self._stream: torch.cuda.Stream | None = None
        self._reached: list[Event] = []  # events of the layers queued last

    def pack(self, tensor: torch.Tensor) -> "_Waiting | torch.Tensor":
        if not tensor.requires_grad or not tensor.numel():
            return tensor
        if tensor.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(self._stream):
                host.copy_(tensor, non_blocking=True)
                event = self._stream.record_event()
            tensor.record_stream(self._stream)
            self._stay_close(event)
        else:
            host = tensor.detach().clone()
        waiting = _Waiting(host, tensor.device, self._latest())
        self._latest = weakref.ref(waiting)
        return waiting

    def unpack(self, waiting: "_Waiting | torch.Tensor") -> torch.Tensor:
        if isinstance(waiting, torch.Tensor):
            return waiting
        self._fetch(waiting)
        tensor = waiting.fetched
        waiting.fetched = None
        if waiting.event is not None:
            stream = torch.cuda.current_stream(waiting.device)
            stream.wait_event(waiting.event)
            tensor.record_stream(stream)
            self._stay_close(stream.record_event())
        if (before := waiting.before()) is not None:
            self._fetch(before)
        return tensor

    def _stay_close(self, event: Event) -> None:
        """Wait until the card is at most `AHEAD` layers behind the one that `event` belongs to."""
        self._reached.append(event)
        if len(self._reached) > AHEAD:
            self._reached.pop(0).synchronize()

    def _fetch(self, waiting: _Waiting) -> None:
        if waiting.fetched is not None:
            return
        if self._stream is None:
            waiting.fetched = waiting.host.clone()
            return
        # Allocated on this stream, so it reuses no memory that the compute stream may still use; the copy out came
        # first.
        with torch.cuda.stream(self._stream):
            waiting.fetched = waiting.host.to(waiting.device, non_blocking=True)
            waiting.event = self._stream.record_event()
