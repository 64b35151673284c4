"""GPU memory of a trainer process: allocator settings, limit and release."""

import gc
import os

import torch

from kit.core.config.schema import Config
from kit.core.errors import BadInput

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_expandable_segments() -> None:
    """Make torch's allocator grow its segments instead of keeping one for every requested size; a no-op without a GPU,
    or if one of `ALLOCATOR_VARIABLES` is set.

    Completion lengths, and so activation sizes, differ in every step. After a first step too short for a whole pack,
    12 of 97 GiB were held in segments that later activations did not fit (bench/STEP.md).
    Call before this process allocates anything. Not set through the environment, which servers started from the same
    shell would inherit: vLLM has to switch it off for the memory pool of `server.sleep`.
    """
    if torch.cuda.is_available() and not any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def limit_gpu_memory(config: Config) -> None:
    """Cap this process's GPU memory at `train.max_gpu_gib`; `BadInput` if the card is smaller.

    An allocation beyond it is an out-of-memory error, even if the card has room: that room is the replica's.
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
    """Return this process's unused GPU memory to the card; a no-op without a GPU."""
    if torch.cuda.is_available():
        gc.collect()  # tensors in reference cycles count as allocated
        torch.cuda.empty_cache()
