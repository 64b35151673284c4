"""Directories for adapters that a server was sent or has copied: in /dev/shm if that has room, and never left behind.

Each server process has one root directory and holds a lock on it. Roots whose lock is free belong to dead processes
and are removed by the next one, even from another container that shares the memory.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX, UNFINISHED = "rollout-adapters-", ".new-rollout-adapters-"
LOCK = ".lock"
LEAST_BYTES = 512 << 20  # a container has 64 MiB of /dev/shm unless it is given more


class PrivateFiles:
    """Private directories of this process; the root is created with the first one."""

    def __init__(self, parent: Path | None = None):
        memory = Path("/dev/shm")
        usable = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= LEAST_BYTES
        self.parent = parent or (memory if usable else Path(tempfile.gettempdir()))
        self._root: Path | None = None
        self._lock: int | None = None

    def make(self) -> Path:
        """Create an empty directory that only this user can read."""
        if self._root is None:
            self._remove_abandoned()
            self._root = self._make_root()
            atexit.register(self.close)
        return Path(tempfile.mkdtemp(dir=self._root))

    def free_bytes(self) -> int:
        """Bytes that are free where the directories lie."""
        return shutil.disk_usage(self.parent).free

    def remove(self, directory: Path | None) -> None:
        """Remove a directory that `make` returned; a no-op for None."""
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = None

    def _make_root(self) -> Path:
        # Use another name until it is locked: others would treat an unlocked root as abandoned.
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self.parent))
        self._lock = os.open(unfinished / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return unfinished.rename(self.parent / f"{PREFIX}{unfinished.name.removeprefix(UNFINISHED)}")

    def _remove_abandoned(self) -> None:
        for root in self.parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                lock = os.open(root / LOCK, os.O_RDWR)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(root, ignore_errors=True)
                finally:
                    os.close(lock)
