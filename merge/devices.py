"""Device map for scoring a checkpoint: one device if it fits, otherwise all GPUs, and host memory for plain weights.

A layer computes where it lies, or on a GPU with a copy of its weights if it lies in the host's memory; accelerate's
hooks move the activations. The numbers are those of one device: nothing but the place of a layer changes.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kit.core.errors import BadInput
from kit.policy.host_memory import available_gib

if TYPE_CHECKING:
    import torch

GIB = 2**30
ROOM = 0.9  # of a GPU's free memory for weights: the rest is for a batch's activations and log-probs


def free_bytes(index: int) -> int:
    """Bytes that this process may still allocate on a GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def placement(
    empty: "torch.nn.Module", device: "torch.device", dtype: "torch.dtype", is_plain: bool, name: str | Path
) -> "dict[str, int | str | torch.device]":
    """transformers' `device_map` for the weights of `empty`, a model on the meta device, in `dtype`.

    `is_plain`: the checkpoint's weights need no work after loading, so some may stay in the host's memory. `BadInput`
    with the sizes if the machine does not have the memory.
    """
    import torch

    if device.type != "cuda":
        return {"": device}
    needed = sum(one.numel() for one in empty.parameters()) * dtype.itemsize
    free = {index: int(ROOM * free_bytes(index)) for index in range(torch.cuda.device_count())}
    if needed <= free[torch.cuda.current_device() if device.index is None else device.index]:
        return {"": device}
    from accelerate import infer_auto_device_map

    rooms: dict[int | str, int] = dict(free.items())
    if is_plain:
        rooms["cpu"] = int(ROOM * available_gib() * GIB)
    # A layer stays whole, so that a little more than the sum is needed.
    found = infer_auto_device_map(empty, rooms, empty._no_split_modules, dtype=dtype)
    if set(found.values()) <= set(rooms):
        return found
    gpus, host = " and ".join(f"{room / GIB:.1f}" for room in free.values()), ""
    if is_plain:
        host = f" and the host {rooms['cpu'] / GIB:.1f} GiB"
    raise BadInput(
        f"{name} takes {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}; of {len(free)} GPUs, {gpus} GiB "
        f"are free for weights{host}. Free them or use more of them; --skip_verify merges without comparing."
    )
