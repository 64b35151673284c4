"""Tensors of one process that another process of the same machine and user maps, described in JSON.

The owner calls `describe`, the other process `attach`. A description holds no data and no pickle: where each
allocation can be opened, and each tensor's place in it.

On a GPU an allocation is opened by its CUDA IPC handle, and every byte that the other process writes changes the
owner's tensor: compare hashes. On a CPU `move_to_file` first moves the owner's tensors into an anonymous file in
memory, which the other process maps copy-on-write: what it writes stays its own, and nothing is left behind when both
are killed. Not covered: cumem allocations (vLLM's sleep mode), which CUDA cannot export this way.
"""

import base64
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kit.core.errors import BadInput

ALIGNED = 64  # bytes: where a tensor may begin in the file
# What torch 2.13's `UntypedStorage._share_cuda_` returns after the device; `_new_shared_cuda` takes the same.
CUDA_FIELDS = ("handle", "bytes", "offset", "counter", "counter_offset", "event", "event_sync")


def move_to_file(tensors: Iterable[torch.Tensor]) -> int | None:
    """Move CPU tensors into one anonymous file in memory and return its descriptor; None without any CPU tensor.

    Each tensor keeps its values, shape and strides; tensors that share an allocation still do. The descriptor stays
    open for as long as the owner lives.
    """
    held: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if not tensor.is_cuda and storage.nbytes():
            held.setdefault(storage.data_ptr(), (storage, []))[1].append(tensor)
    if not held:
        return None
    starts, size = [], 0
    for storage, _ in held.values():
        starts.append(size)
        size += -(-storage.nbytes() // ALIGNED) * ALIGNED
    fd = os.memfd_create("shared-base", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    # The file's only storage: torch closes its own descriptor of it and keeps the mapping.
    whole = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=True, nbytes=size)
    file = torch.empty(0, dtype=torch.uint8).set_(whole)
    for start, key in zip(starts, list(held), strict=True):
        storage, users = held.pop(key)  # release one before the next is copied
        file[start : start + storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
        for tensor in users:
            offset = start // tensor.element_size() + tensor.storage_offset()
            moved = torch.empty(0, dtype=tensor.dtype).set_(whole, offset, tensor.shape, tensor.stride())
            tensor.data = moved
        del storage, users
    return fd


def describe(tensors: dict[str, torch.Tensor], fd: int | None = None) -> dict[str, Any]:
    """Describe tensors of this process for `attach`; those on a CPU are in the file `fd` of `move_to_file`."""
    storages: list[dict[str, Any]] = []
    known: dict[int, int] = {}
    found = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known[storage.data_ptr()] = len(storages)
            storages.append(_cuda_handle(storage) if tensor.is_cuda else {"fd": fd, "bytes": storage.nbytes()})
        found[name] = {
            "storage": known[storage.data_ptr()],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "offset": tensor.storage_offset(),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }
    gpu = next((gpu_id(tensor.device) for tensor in tensors.values() if tensor.is_cuda), None)
    return {"pid": os.getpid(), "gpu": gpu, "storages": storages, "tensors": found}


def gpu_id(device: torch.device) -> str:
    """UUID of a GPU, which is the same in processes that number the GPUs differently."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _cuda_handle(storage: torch.UntypedStorage) -> dict[str, Any]:
    _, *values = storage._share_cuda_()
    encoded = [base64.b64encode(one).decode() if isinstance(one, bytes) else one for one in values]
    return dict(zip(CUDA_FIELDS, encoded, strict=True))


def attach(description: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Map the tensors of a description into this process, on `device`; they are read-only by agreement.

    `BadInput` if their owner is gone, belongs to another user or machine, or holds them on another device.
    """
    pid, gpu = description["pid"], description["gpu"]
    here = gpu_id(device) if device.type == "cuda" else None
    if gpu != here:
        raise BadInput(
            f"the server holds its base on {_place(gpu)}, the trainer computes on {_place(here)}: only memory of one "
            "device can be shared. Give both the same GPU, or set server.share_base to false."
        )
    try:
        if device.type == "cuda":
            storages = [_open_cuda(one, device) for one in description["storages"]]
        else:
            storages = [
                torch.UntypedStorage.from_file(str(Path("/proc", str(pid), "fd", str(one["fd"]))), False, one["bytes"])
                for one in description["storages"]
            ]
    except (OSError, RuntimeError) as error:
        raise BadInput(
            f"the memory of the server's process {pid} cannot be mapped: {str(error).splitlines()[0]}. Trainer and "
            "server must run on one machine, as one user and in one container; else set server.share_base to false."
        ) from None
    return {name: _view(storages[one["storage"]], one) for name, one in description["tensors"].items()}


def _place(gpu: str | None) -> str:
    return "a CPU" if gpu is None else f"GPU {gpu}"


def _open_cuda(one: dict[str, Any], device: torch.device) -> torch.UntypedStorage:
    torch.cuda._lazy_init()
    values = [base64.b64decode(one[name]) if isinstance(one[name], str) else one[name] for name in CUDA_FIELDS]
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.UntypedStorage._new_shared_cuda(index, *values)


def _view(storage: torch.UntypedStorage, place: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, place["dtype"])
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, place["offset"], place["shape"], place["stride"])


def described_bytes(description: dict[str, Any]) -> int:
    """Bytes of the described tensors; those of two names at one place count once."""
    places = {
        (one["storage"], one["offset"], one["dtype"], *one["shape"]): math.prod(one["shape"])
        * getattr(torch, one["dtype"]).itemsize
        for one in description["tensors"].values()
    }
    return sum(places.values())
