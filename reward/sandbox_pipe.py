"""Frames on a pipe: a four-byte length and the content, read and written with a deadline. Standard library only."""

import os
import select
import time


def read_exactly(descriptor: int, size: int, deadline: float) -> bytes:
    """Read `size` bytes; `EOFError` if the other end is closed, `TimeoutError` at the deadline (monotonic seconds)."""
    parts = []
    while size:
        wait(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, min(size, 1 << 16))
        if not part:
            raise EOFError("the pipe is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_frame(descriptor: int, limit: int, deadline: float) -> bytes:
    """Read the content of the next frame; `ValueError` if it is longer than `limit`."""
    size = int.from_bytes(read_exactly(descriptor, 4, deadline), "big")
    if size > limit:
        raise ValueError(f"a frame of {size} bytes, at most {limit}")
    return read_exactly(descriptor, size, deadline)


def write_frame(descriptor: int, data: bytes, deadline: float = float("inf")) -> None:
    """Write a frame; never blocks beyond the deadline, even if the other end does not read."""
    data = len(data).to_bytes(4, "big") + data
    for start in range(0, len(data), 4096):  # poll guarantees room for one page
        wait(descriptor, select.POLLOUT, deadline)
        part = data[start : start + 4096]
        while part:
            part = part[os.write(descriptor, part) :]


def failed(reason: str, **more: object) -> dict:
    """The verdict on a job of which no test was run."""
    return {"passed": 0, "total": 1, "reason": reason} | more


def wait(descriptor: int, event: int, deadline: float) -> None:
    """Return when the descriptor is ready or closed; `TimeoutError` at the deadline."""
    poll = select.poll()
    poll.register(descriptor, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(None if left == float("inf") else left * 1000):
        raise TimeoutError
