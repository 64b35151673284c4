"""A worker's shard of a linear layer, or of the experts of a layer, and the base's copy of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass
class Part:
    """One Hugging Face linear layer inside a worker's (possibly fused) layer: its rows [row, row + rows).

    The worker's shard of the whole layer begins at output `first_out` and input `first_in`.
    """

    name: str
    row: int
    rows: int
    first_out: int
    first_in: int


@dataclass
class Linear:
    """A worker's linear layer (rows, columns) with its copy, on the GPU or in pinned host memory. For NF4, `packed`
    (rows·columns/2) is uint8 and `absmax` (rows·columns/64) float32; otherwise see `base_copy.py`."""

    name: str
    layer: Any  # vLLM's
    rows: int
    columns: int
    parts: list[Part]
    packed: "torch.Tensor | None" = None
    absmax: "torch.Tensor | None" = None
    width: int = 0  # columns over all workers, of experts; 0: those that the layer says
