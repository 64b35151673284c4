"""Processes that tests start. They may be slow, as on a busy machine, but must not stand still.

A limit on wall-clock time is a guess about the machine. What hangs, takes no CPU time, however idle the machine; what
works, gets some, however busy. So a process is given up when it and all that it started took less than `LEAST_CPU_S`
in `STILL_S`. What spins forever is ended by pytest's own `timeout`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
STILL_S = 180.0
LEAST_CPU_S = 0.5
_LOOK_S = 2.0


class Progress:
    """The CPU time of a process and its descendants, or of this process's descendants alone."""

    def __init__(self, pid: int | None = None, still_s: float | None = None):
        self.pid = pid
        self.still_s = STILL_S if still_s is None else still_s
        self.seconds: dict[psutil.Process, float] = {}  # of those that have ended as well
        self.counted, self.since = self._look(), time.monotonic()

    def _look(self) -> float:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.pid)
            for process in [*root.children(recursive=True), *([root] if self.pid else [])]:
                with contextlib.suppress(psutil.Error):
                    self.seconds[process] = sum(process.cpu_times()[:4])  # its own, and its children's that ended
        return sum(self.seconds.values())

    def stands_still(self) -> bool:
        """Whether nothing happened for `still_s`."""
        if (now := self._look()) - self.counted >= LEAST_CPU_S:
            self.counted, self.since = now, time.monotonic()
        return time.monotonic() - self.since > self.still_s


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    """Whether a server of this machine takes connections on `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill_group(process: subprocess.Popen) -> None:
    """End a process and its group, when it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            return os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def finish(process: subprocess.Popen, still_s: float | None = None) -> tuple[Any, Any]:
    """What is left of a process's output once it has ended; an AssertionError with it when it stands still."""
    progress = Progress(process.pid, still_s)
    while True:
        try:
            return process.communicate(timeout=min(_LOOK_S, progress.still_s))
        except subprocess.TimeoutExpired:
            if not progress.stands_still():
                continue
        kill_group(process)
        said = "\n".join(str(part)[-5000:] for part in process.communicate() if part)
        raise AssertionError(f"{process.args} did nothing for {progress.still_s:g} s and was killed. {said}")


def run(command: list, still_s: float | None = None, **settings: Any) -> subprocess.CompletedProcess:
    """A command that ended, run from the root of the kit, with what it wrote; nothing of its group is left."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT} | settings
    with subprocess.Popen(command, start_new_session=True, **settings) as process:
        try:
            out, err = finish(process, still_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its id stays that of the group while one of it is left
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def wait_until(
    found: Callable, process: subprocess.Popen | None = None, log: Path | None = None, still_s: float | None = None
) -> Any:
    """The first true value of `found`. An AssertionError, with the end of `log`, when `process` has ended before, and
    when all children of this process stand still."""
    progress, looked = Progress(still_s=still_s), time.monotonic()
    while not (value := found()):
        said = f": {log.read_text()[-3000:]}" if log and log.exists() else ""
        if process is not None and process.poll() is not None and not (value := found()):
            said = said or process.communicate()
            raise AssertionError(f"{process.args} ended with exit code {process.returncode}{said}")
        if time.monotonic() - looked > min(_LOOK_S, progress.still_s):
            looked = time.monotonic()
            assert not progress.stands_still(), f"waited in vain, nothing happened for {progress.still_s:g} s{said}"
        time.sleep(0.01)
    return value
