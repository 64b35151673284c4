"""Why one of several trainer processes ended, as the others say it: the first cause, once.

When a process fails or is killed, the others fail in the collective in which they wait for it, with an error about a
connection; or they wait on, and the launcher sends them SIGTERM. Neither names the cause. So a process that fails
leaves `logs/failed-<rank>.json` and its error in `end.json`, and one that was killed leaves its line of progress
(`progress.py`). A process looks for both when it gets SIGTERM or an error that is not the kit's, and ends with that
cause. It also looks every `LOOK_S`: a collective that does not notice a dead process holds it for `LEFT_S` at most.
"""

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kit.core.errors import BAD_INPUT, CHECK_FAILED, BadInput, Followed, KitError, is_machine_fault
from kit.core.file_kinds import FAILED
from kit.core.progress import MACHINE, all_lines, forget, is_gone, launch_id, read_lines
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_object
from kit.core.run_state import describe_error, record_failure

LOOK_S = 5.0
LEFT_S = 30.0
FOUND_WITHIN_S = 3.0  # a process that was killed closes its connections a moment before it is gone


@dataclass(frozen=True)
class Cause:
    """Why a process ended; `is_machine`: the machine failed it; `is_told`: it prints that itself."""

    text: str
    exit_code: int
    is_machine: bool
    is_told: bool


class FirstCause:
    """The watch of one of several processes of a run."""

    def __init__(self, run: RunDir, rank: int):
        self.run, self.rank, self.launch, self.began = run, rank, launch_id(), time.time()
        self.file = run.logs / f"failed-{rank}.json"
        self._told = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, name="first cause", daemon=True)

    def start(self) -> None:
        self.file.unlink(missing_ok=True)
        # The handler does nothing: the byte in the pipe wakes the thread while the main thread is in a collective.
        self._handler = signal.signal(signal.SIGTERM, lambda *_: None)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGTERM, self._handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def fail(self, error: BaseException) -> None:
        """Leave this process's error to the others."""
        text, code = describe_error(error), getattr(error, "exit_code", CHECK_FAILED)
        with contextlib.suppress(OSError):
            left = {"pid": os.getpid(), "launch": self.launch, "time": time.time()}
            write_json(self.file, left | {"error": text, "exit_code": code, "is_machine": is_machine_fault(error)})
        if code != BAD_INPUT:  # a refused start changes nothing
            record_failure(self.run, text, is_machine_fault(error))

    def look(self) -> Cause | None:
        """Why another process of the run has failed or is gone; None if none has."""
        found = []
        for file in self.run.logs.glob("failed-*.json"):
            with contextlib.suppress(BadInput, ValueError):  # gone meanwhile, or of no process of a run
                left = read_object(file, FAILED)
                if file != self.file and self._is_current(left["launch"], left["time"]):
                    rank = file.stem.removeprefix("failed-")
                    text = f"process {left['pid']}, rank {rank}: {left['error']}"
                    how = left["exit_code"], left["is_machine"]
                    found.append((left["time"], Cause(text, *how, is_told=True)))
        if found:
            return min(found, key=lambda one: one[0])[1]
        for line in all_lines(self.run):
            if line.rank != self.rank and line.launch == self.launch and is_gone(line):
                return Cause(
                    f"process {line.pid}, rank {line.rank}, is gone and left no error: it was killed, as the kernel "
                    "does when memory runs out (see dmesg), or crashed. Continue with --resume.",
                    CHECK_FAILED,
                    is_machine=True,
                    is_told=False,
                )
        return None

    def _is_current(self, launch: str, when: float) -> bool:
        """Whether a failure is of this launch, not of an earlier one in the directory; another machine has another id
        for it."""
        is_here = launch.split("/")[0] == MACHINE
        return launch == self.launch if is_here else when >= self.began

    def wait(self) -> Cause | None:
        """`look`, for `FOUND_WITHIN_S` at most."""
        until = time.monotonic() + FOUND_WITHIN_S
        while (found := self.look()) is None and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def tell(self, cause: Cause) -> None:
        """Print and record the cause, in the first process that is left; only once."""
        first = min([line.rank for line in read_lines(self.run)] + [self.rank])
        if cause.is_told or first != self.rank or not self._told.acquire(blocking=False):
            return
        record_failure(self.run, cause.text, cause.is_machine)
        os.write(2, f"error: {cause.text}\n".encode())  # at once: this process may be about to be killed

    def _listen(self) -> None:
        since = None
        while True:
            ready, *_ = select.select([self._read], [], [], LOOK_S)
            if ready:
                received = os.read(self._read, 64)
                if signal.SIGTERM in received:
                    self._end_by_sigterm()
                if 0 in received:
                    return
            elif cause := self.look():
                since = since or time.monotonic()
                if time.monotonic() - since >= LEFT_S:
                    self.tell(cause)
                    os._exit(cause.exit_code)  # the main thread does not return from its collective

    def _end_by_sigterm(self) -> None:
        if cause := self.look():
            self.tell(cause)
        forget()  # or this one would be taken for a cause
        ctypes.CDLL(None).signal(signal.SIGTERM, 0)  # SIG_DFL; Python's own function is for the main thread only
        os.kill(os.getpid(), signal.SIGTERM)


_current: FirstCause | None = None
_forking = threading.local()


def _before_fork() -> None:
    """Hold SIGTERM back: a child that gets it at once would write to the pipe of its parent, and end that."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    if _current is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def fail(error: BaseException) -> None:
    """Leave an error that ends this process to the others of its run; a no-op in a run of one process."""
    if _current is not None:
        _current.fail(error)


@contextlib.contextmanager
def first_cause(run: RunDir, rank: int, processes: int) -> Iterator[None]:
    """Leave this process's error in the block to the others; raise `Followed` with theirs if they failed first."""
    global _current
    if processes == 1:
        yield
        return
    watch = FirstCause(run, rank)
    watch.start()
    _current = watch
    try:
        yield
    except KitError as error:
        watch.fail(error)
        raise
    except Exception as error:
        if (cause := watch.wait()) is None:
            watch.fail(error)
            raise
        watch.tell(cause)
        raise Followed(cause.text, cause.exit_code, cause.is_machine) from error
    finally:
        _current = None
        watch.stop()
