"""A directory on a disk that can be made full, and emptied again.

The disk is a small tmpfs where it may be mounted (root); elsewhere a limit on the size of a process's files, which the
kernel refuses in the same place with another error number.
"""

import contextlib
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """A directory; `mounted` says whether it is a disk of its own, of `size` bytes."""

    def __init__(self, folder: Path, size: int = 64 << 20):
        self.folder, self.size = folder, size
        self.unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.mounted = shutil.which("mount") is not None and self._mount("", size)

    def leave(self, free: int, largest_file: int, pid: int = 0) -> None:
        """Leave this many bytes; without a disk of its own, limit the files of process `pid` (0: this one)."""
        if self.mounted:
            used = shutil.disk_usage(self.folder).used
            self._mount("remount,", used + free)
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest_file, self.unlimited[1]))

    def release(self, pid: int = 0) -> None:
        if self.mounted:
            self._mount("remount,", self.size)
        else:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, self.unlimited)

    def _mount(self, option: str, size: int) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"{option}size={size}", "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path, size: int = 64 << 20) -> Iterator[Disk]:
    """A new directory as a disk, gone at the end where it was mounted."""
    folder.mkdir()
    disk = Disk(folder, size)
    try:
        yield disk
    finally:
        disk.release()
        if disk.mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
