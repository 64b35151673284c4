"""Write checkpoint files tensor by tensor: memory holds a tensor or two, never a shard.

Covers: files whose tensors are known in advance (`TensorFile`) and files of parts that arrive as they are made
(`write_parts`), the index of several files, a full disk. Not covered: reading (checkpoint.py).
"""

import contextlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kit.core.checkpoint_files import INDEX, SINGLE, read_header
from kit.core.errors import CheckFailed

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # size of the widest type: any tensor after a part of a multiple of this size is aligned
MOST_PARTS = 8  # most parts that a format stores per tensor; NF4 stores six
ENTRY_BYTES = 200  # header bytes per part, besides its module's name


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Values of a tensor as bytes in host memory, row-major; no copy if it is already stored that way."""
    return memoryview(tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """`CheckFailed` naming the free space if the block fails to write `path`."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise CheckFailed(
            f"could not write {path}: {error}. {free / 2**20:.0f} MiB are free there. "
            "Nothing of this checkpoint was kept; make room or choose another place with --out."
        ) from None


def write_index(directory: Path, weight_map: dict[str, str], total: int) -> None:
    """Write the index of a checkpoint of several shards: {tensor: its file} and the bytes of all tensors."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


class TensorFile:
    """Safetensors file written tensor by tensor, in any order and by several threads; byte-identical to safetensors'
    `save_file`.

    `tensors` is {name: (dtype, shape)} of everything that will be written. `CheckFailed` if the disk is full.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]):
        self.path = path
        self.header: dict[str, Any] = {"__metadata__": metadata}
        # Wide types first, as in save_file, so that every tensor is aligned.
        end = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            start, end = end, end + dtype.itemsize * math.prod(shape)
            self.header[name] = header_entry(dtype, shape, start, end)
        self.missing = set(tensors)

    def __enter__(self) -> "TensorFile":
        text = json.dumps(self.header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.data_start = 8 + len(text)
        with writing(self.path):
            self.file = open(self.path, "wb", buffering=0)
            self.file.write(len(text).to_bytes(8, "little") + text)
        return self

    def write(self, name: str, tensor: torch.Tensor, at: int = 0) -> None:
        """Write a tensor, which must have the dtype and size given in the header.

        With `at`, or with fewer values than in the header, write a piece: values [at, at + numel) in row-major order.
        """
        entry, data = self.header[name], tensor_bytes(tensor)
        start, end = entry["data_offsets"]
        start += at * tensor.element_size()
        if SAFETENSORS_NAMES[tensor.dtype] != entry["dtype"] or len(data) > end - start:
            raise ValueError(f"{name} is {tensor.dtype} of {len(data)} bytes, {self.path} has {entry} for it.")
        with writing(self.path):
            written = 0
            while written < len(data):  # Linux writes at most 2 GiB at once
                written += os.pwrite(self.file.fileno(), data[written:], self.data_start + start + written)
        if start + len(data) == end:
            self.missing.discard(name)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            return
        with writing(self.path):
            self.file.close()
        if self.missing:
            raise ValueError(f"{self.path} lacks {sorted(self.missing)[0]} ({len(self.missing)} tensors).")


def header_entry(dtype: torch.dtype, shape: tuple[int, ...], start: int, end: int) -> dict:
    """Entry of a tensor in a safetensors header."""
    return {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}


def stored_kinds(directory: Path, files: dict[str, str]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return {name: (dtype, shape)} of tensors as a checkpoint stores them, from {name: file} of `directory`."""
    headers = {file: read_header(directory / file).tensors for file in set(files.values())}
    dtypes = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
    return {name: (dtypes[headers[file][name][0]], headers[file][name][1]) for name, file in files.items()}


class PartsFile:
    """Safetensors file of parts that arrive one at a time, with types and sizes unknown in advance.

    Parts are stored in order of arrival. The header is written last, into space reserved for `names` tensors of at
    most `MOST_PARTS` parts each and padded with blanks, as the format allows. A part whose size is not a multiple of
    `ALIGNMENT` is deferred to the end, so that every tensor is aligned: such parts are small (NF4's quant state).
    """

    def __init__(self, path: Path, names: list[str]):
        self.path = path
        room = 64 + sum(MOST_PARTS * (len(name.encode()) + ENTRY_BYTES) for name in names)
        self.room = room + -room % ALIGNMENT
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.waiting: dict[str, torch.Tensor] = {}
        self.end = 0

    def __enter__(self) -> "PartsFile":
        with writing(self.path):
            self.file = open(self.path, "wb")
            self.file.seek(8 + self.room)
        return self

    def write(self, name: str, part: torch.Tensor) -> None:
        """Write a part, or defer it to the end if its size would misalign what follows."""
        if part.nbytes % ALIGNMENT:
            self.waiting[name] = part.clone()  # it may be a view of a much larger tensor
        else:
            self._append(name, part)

    def _append(self, name: str, part: torch.Tensor) -> None:
        if name in self.header:
            raise ValueError(f"{self.path} holds {name} already.")
        start, self.end = self.end, self.end + part.nbytes
        self.header[name] = header_entry(part.dtype, tuple(part.shape), start, self.end)
        with writing(self.path):
            self.file.write(tensor_bytes(part))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                self.file.close()
            return
        for name in sorted(self.waiting, key=lambda name: (-self.waiting[name].element_size(), name)):
            self._append(name, self.waiting[name])
        text = json.dumps(self.header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > self.room:
            raise ValueError(f"{self.path} has a header of {len(text)} bytes and {self.room} bytes of room for it.")
        with writing(self.path):
            self.file.seek(0)
            self.file.write(self.room.to_bytes(8, "little") + text.ljust(self.room))
            self.file.close()


class Behind:
    """Run calls on background threads, by default on one and so one after the other, while the caller prepares the
    next.

    Calls in flight have a total `size` of at most `room`, or are a single larger one. `run` waits until its call fits
    and raises what an earlier call raised. torch computes with one CPU thread in each of several.
    """

    def __init__(self, room: int = 0, threads: int = 1) -> None:
        alone: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)} if threads > 1 else {}
        self.pool = ThreadPoolExecutor(threads, **alone)
        self.room = room
        self.calls: deque[tuple[int, Future]] = deque()

    def run(self, size: int, call: Callable[..., Any], *arguments: Any) -> None:
        while self.calls and sum(waiting for waiting, _ in self.calls) + size > self.room:
            self.calls.popleft()[1].result()
        self.calls.append((size, self.pool.submit(call, *arguments)))

    def wait(self) -> None:
        """Return when no call is in flight."""
        while self.calls:
            self.calls.popleft()[1].result()

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.pool.shutdown(cancel_futures=True)


def flush(path: Path) -> None:
    """Flush a complete file to disk, so that this overlaps with making the next one."""
    with writing(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def write_parts(
    directory: Path, shards: dict[str, list[str]], parts: Callable[[str], dict[str, torch.Tensor]]
) -> None:
    """Write a checkpoint of the files `shards` ({file: names of the tensors that it is made from}) into `directory`.

    `parts(name)` returns what is stored for a tensor, {stored name: tensor on any device}, at most `MOST_PARTS`. It is
    called while a thread writes the parts of the previous tensor, so the parts of two tensors are in memory. A single
    file is named model.safetensors, several get an index. `CheckFailed` if the disk is full; the caller's `publish`
    then removes what was written.
    """
    files = {file: names for file, names in shards.items() if names}
    weight_map: dict[str, str] = {}
    total = 0
    with Behind() as writer, Behind() as disk:
        for file, names in files.items():
            with PartsFile(directory / file, names) as out:
                for name in names:
                    made = {key: part.cpu() for key, part in parts(name).items()}
                    weight_map |= dict.fromkeys(made, file)
                    total += sum(part.nbytes for part in made.values())
                    writer.run(1, _write_all, out, made)
                    del made  # the writer has it, and releases it before the tensor after the next is made
                writer.wait()
            disk.run(0, flush, directory / file)
    name_files(directory, weight_map, total)


def _write_all(out: PartsFile, parts: dict[str, torch.Tensor]) -> None:
    for name, part in parts.items():
        out.write(name, part)


def name_files(directory: Path, weight_map: dict[str, str], total: int) -> None:
    """Write the index of several files; a single one gets the name that transformers looks for."""
    if len(files := set(weight_map.values())) > 1:
        write_index(directory, weight_map, total)
    else:
        (directory / files.pop()).rename(directory / SINGLE)
