"""`train.recompute_offload`: inputs of layers that are run again wait in pinned host memory.

A layer's input goes to the host on a stream of its own while the next layers run, and comes back while the layer after
it is run again, one ahead: the card holds two of them instead of one a layer. transformers' `offload` copies on the
compute stream, which then waits; TRL's `activation_offloading` is no field of its GRPOConfig (trl 1.16).

The process queues a layer only when the card has come to the one before. Further ahead, what it lets go would stay
taken until the card is there, and every layer's input would lie on the card once more.
"""

import weakref
from typing import Any

import torch

AHEAD = 1  # layers that are queued behind the one that the card computes


class _Waiting:
    """An input on the host; on its way back once `fetched` is there."""

    def __init__(self, host: torch.Tensor, device: torch.device, before: "_Waiting | None"):
        self.host, self.device = host, device
        # Who needs it is the graph; a chain of references would keep the inputs of steps long done.
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.fetched: torch.Tensor | None = None
        self.event: Any = None


class HostInputs:
    """Hooks for tensors that autograd saves: `pack` takes one away, `unpack` gives it back. Without a GPU the copies
    are plain ones, in the same order. What needs no gradient stays: masks and rotary angles, which all layers share;
    and so does the empty tensor on the CPU that the checkpoint of torch 2.11 saves beside its arguments."""

    def __init__(self) -> None:
        self._latest: Any = lambda: None
        self._stream: Any = None
        self._reached: list[Any] = []  # events of the layers queued last

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

    def _stay_close(self, event: Any) -> None:
        """Wait until the card is `AHEAD` layers behind the one that `event` belongs to."""
        self._reached.append(event)
        if len(self._reached) > AHEAD:
            self._reached.pop(0).synchronize()

    def _fetch(self, waiting: _Waiting) -> None:
        if waiting.fetched is not None:
            return
        if self._stream is None:
            waiting.fetched = waiting.host.clone()
            return
        # Made on this stream, so it takes no memory that the compute stream may still use; the copy out came first.
        with torch.cuda.stream(self._stream):
            waiting.fetched = waiting.host.to(waiting.device, non_blocking=True)
            waiting.event = self._stream.record_event()
