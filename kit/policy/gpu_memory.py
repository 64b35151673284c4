"""What a trainer process takes of its GPU, and what it gives back."""

import gc
import os

import torch

from kit.core.config.schema import Config
from kit.core.errors import BadInput

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments in place of keeping one for every size that it was asked for; nothing
    without a GPU, or when one of `ALLOCATOR_VARIABLES` says what is wanted.

    Completions have other lengths in every step, so activations have other sizes. After a first step too short for a
    whole pack, 12 of 97 GiB lay in segments that later activations did not fit (recipes/PERFORMANCE.md).
    Called before this process allocates anything. Not by the environment, which servers that are started from the
    same shell would have too: vLLM has to switch it off for the memory pool of `server.sleep`.
    """
    if torch.cuda.is_available() and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def limit_gpu_memory(config: Config) -> None:
    """Let this process take at most `train.max_gpu_gib` of its GPU; `BadInput` when the card is smaller.

    An allocation beyond it is an out-of-memory error, also when the card has room: that room is the replica's.
    """
    limit = config.train.max_gpu_gib
    if limit is None:
        return
    if not torch.cuda.is_available():
        raise BadInput(f"train.max_gpu_gib is {limit:g} and there is no GPU. Leave it out.")
    device = torch.cuda.current_device()
    card = torch.cuda.get_device_properties(device).total_memory / 2**30
    if limit > card:
        raise BadInput(f"train.max_gpu_gib ({limit:g}) is above the {card:.1f} GiB of the card. Lower it.")
    torch.cuda.set_per_process_memory_fraction(limit / card, device)


def free_gpu_cache() -> None:
    """Hand this process's unused GPU memory back to the card; nothing without a GPU."""
    if torch.cuda.is_available():
        gc.collect()  # tensors in reference cycles count as used
        torch.cuda.empty_cache()
