"""Host memory of this machine and of this process. Needs only the standard library."""

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

CLEAR_REFS, MEMINFO, OWN_GROUPS = Path("/proc/self/clear_refs"), Path("/proc/meminfo"), Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
# Limit, usage, and the part of the usage that is reclaimable page cache: cgroup v2 and v1.
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def reset_peak_resident() -> None:
    """Reset the peak that `peak_resident_gib` reports; a no-op if the system does not support it."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_resident_gib() -> float:
    """Peak resident memory of this process since the last reset, or since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def release_freed() -> None:
    """Return freed memory to the system, which glibc retains while blocks behind it are in use; a no-op with another C
    library."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def available_gib() -> float:
    """Host memory that processes may still allocate: Linux's MemAvailable, or what is left of a cgroup's limit."""
    return min(_meminfo("MemAvailable"), *(limit - used for limit, used in _groups()), _total()) / 2**30


def limit_gib() -> float:
    """Host memory of this machine, or its cgroup's limit if lower."""
    return min(_total(), *(limit for limit, _ in _groups()), _meminfo("MemTotal")) / 2**30


def _total() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(name: str) -> float:
    try:
        return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)[1])
    except (OSError, TypeError):  # not Linux
        return _total()


def _groups() -> Iterator[tuple[int, int]]:
    """Yield (limit, usage without inactive page cache) in bytes of every memory cgroup that this process is in."""
    try:
        lines = [line.split(":", 2) for line in OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (GROUPS / "memory", VERSION_1) if controllers else (GROUPS, VERSION_2)
        place = root / path.strip("/")  # in a container the path may be the host's and the root the container's
        for folder in dict.fromkeys([place, *place.parents]):
            if folder.is_relative_to(root) and (found := _group(folder, *names)):
                yield found


def _group(folder: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    try:
        most = int((folder / limit).read_text())  # "max": no limit
        cached = re.search(rf"^{cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        return most, int((folder / used).read_text()) - (int(cached[1]) if cached else 0)
    except (OSError, ValueError):
        return None
