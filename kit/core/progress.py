"""Progress of a trainer's processes: each says what it does, and one that stands still ends the run.

A process exists, and its threads run, while its main thread waits for something that never comes: a collective whose
other side is stopped, a reward that hangs, a device that does not answer. So what is watched is progress: `beat` is
called by every forward pass, answered request, judged completion and turn of an episode. From the first step to the
last, a process without a beat for `launch.stall_s` writes the stacks of its threads and ends with exit code 1.

Every process writes one line to `logs/progress-<rank>`, once a second: its pid, the time of its last beat, whether it
trains, and its launch. A process that waits in a collective while another one samples or judges has no beat of its
own: a beat of any process is progress of all. A process that is stopped, or whose interpreter is stuck, cannot end
itself: its line gets old, the processes that wait for it name it, and `launch.up` ends the run
(`launch/starting/stall.py`). SIGUSR2 makes a trainer write its stacks at any time.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kit.core.errors import CHECK_FAILED
from kit.core.run_directory import RunDir

TICK_S = 1.0
LOOK_S = 5.0  # between looks at the other processes' lines
ALONE_TICKS = 3  # by which the first process that can run is ahead of the others in saying what happened
PR_SET_PDEATHSIG = 1
LAUNCHERS = ("accelerate", "torchrun", "torch.distributed", "deepspeed")
STATES = {
    "T": "is stopped (SIGSTOP or a debugger)",
    "t": "is held by a debugger",
    "D": "waits in the kernel (state D)",
}
MOST_FRAMES = 4
STACKS_S = 1.0  # for a process to write its stacks
MACHINE = socket.gethostname()


@dataclass(frozen=True)
class Line:
    """What a process last wrote: wall-clock seconds of its last `beat` and of the line itself."""

    rank: int
    pid: int
    beat: float
    written: float
    trains: bool
    launch: str

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, on this machine."""
        return self.launch.split("/")[0] == MACHINE


class Progress:
    """Watches this process; `on_stall` gets the reason before the process ends."""

    def __init__(self, run: RunDir, rank: int, stall_s: float, on_stall: Callable[[str], None]):
        self.run, self.rank, self.stall_s, self.on_stall = run, rank, stall_s, on_stall
        self.file, self.stacks = progress_file(run, rank), stacks_file(run, rank)
        self.trains, self.launch = False, launch_id()
        self.last = time.time()
        self.still_s = 0.0  # without a beat of any process, in time during which this process ran
        self._others: dict[int, float] = {}  # last beats by rank
        self._looked = 0.0
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def start(self) -> None:
        self.run.logs.mkdir(parents=True, exist_ok=True)
        self._stacks = open(self.stacks, "w")
        faulthandler.register(signal.SIGUSR2, self._stacks, all_threads=True)
        self.write()
        self._thread.start()

    def silence(self) -> None:
        self._ended.set()
        self._thread.join(TICK_S)
        self.file.unlink(missing_ok=True)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self.file.unlink(missing_ok=True)
        faulthandler.unregister(signal.SIGUSR2)
        self._stacks.close()
        if not self.stacks.stat().st_size:
            self.stacks.unlink()

    def beat(self) -> None:
        self.last, self.still_s = time.time(), 0.0

    def _watch(self) -> None:
        while not self._ended.wait(TICK_S):
            self.write()
            # Ticks, not the clock: a process that was stopped and goes on has not stood still itself.
            self.still_s += TICK_S
            self._look()
            if self.trains and self.stall_s and self.still_s >= self.stall_s and self._is_first():
                self._end()

    def _look(self) -> None:
        """Take a beat of another process for progress."""
        if not self.stall_s or time.monotonic() - self._looked < min(LOOK_S, self.stall_s / 4):
            return
        self._looked = time.monotonic()
        others = {line.rank: line.beat for line in read_lines(self.run) if line.rank != self.rank}
        if others != self._others:
            self._others, self.still_s = others, 0.0

    def _is_first(self) -> bool:
        """Whether this process is the one to say that the run stands still: of those that can run, the first."""
        if self.still_s >= self.stall_s + ALONE_TICKS * TICK_S:
            return True
        return not any(line.rank < self.rank and line.is_here for line in read_lines(self.run))

    def write(self) -> None:
        partial = self.file.with_name(f"{self.file.name}.partial")
        # A full disk is reported by what needs it. Two threads write: this one's and the one that trains.
        with self._writing, contextlib.suppress(OSError):
            partial.write_text(f"{os.getpid()} {self.last:.3f} {int(self.trains)} {self.launch}\n")
            os.replace(partial, self.file)  # a process killed here still leaves a whole line

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        others = describe_others(self.run, self.rank)
        stacks = ", ".join(map(str, [self.stacks, *ask_for_stacks(self.run, self.rank)]))
        reason = (
            f"no progress for {self.stall_s:g} s (launch.stall_s) in process {os.getpid()}, rank {self.rank}. "
            f"{others}It stands in {innermost()}. All stacks: {stacks}. Continue with --resume."
        )
        with contextlib.suppress(Exception):
            self.on_stall(reason)
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(CHECK_FAILED)  # the main thread will not return, and neither will exit handlers that wait for it


_current: Progress | None = None


def beat() -> None:
    """Something was computed, answered or judged. A no-op outside `watched`."""
    if _current is not None:
        _current.beat()


@contextlib.contextmanager
def watched(run: RunDir, rank: int, stall_s: float, on_stall: Callable[[str], None]) -> Iterator[None]:
    """Watch this process in the block; `stall_s` 0 only writes its lines and stacks."""
    global _current
    progress = Progress(run, rank, stall_s, on_stall)
    progress.start()
    _current = progress
    try:
        yield
    finally:
        _current = None
        progress.stop()


def forget() -> None:
    """Remove this process's line, as a process does that ends by itself."""
    if _current is not None:
        _current.silence()


@contextlib.contextmanager
def steps() -> Iterator[None]:
    """In the block, no progress ends the run: from the first step to the last."""
    if (progress := _current) is None:
        yield
        return
    progress.beat()
    progress.trains = True
    progress.write()
    try:
        yield
    finally:
        progress.trains = False
        progress.write()


def stacks_file(run: RunDir, rank: int) -> Path:
    return run.logs / f"stacks-{rank}.txt"


def launch_id() -> str:
    """The same in all processes of a launch on this machine, and another one in the next launch."""
    return f"{MACHINE}/{os.getppid()}/{os.environ.get('MASTER_PORT', '')}"


def progress_file(run: RunDir, rank: int) -> Path:
    return run.logs / f"progress-{rank}"


def all_lines(run: RunDir) -> list[Line]:
    """What the processes of a run last wrote, by rank. A process that ends by itself removes its line."""
    found = []
    for file in run.logs.glob("progress-*"):
        with contextlib.suppress(OSError, ValueError):
            pid, last, trains, launch = file.read_text().split()
            rank = int(file.name.removeprefix("progress-"))
            found.append(Line(rank, int(pid), float(last), file.stat().st_mtime, trains == "1", launch))
    return sorted(found, key=lambda line: line.rank)


def is_gone(line: Line) -> bool:
    """Whether the process of a line no longer exists; False on another machine, which cannot be looked at."""
    return line.is_here and not state_of(line.pid)


def read_lines(run: RunDir) -> list[Line]:
    """`all_lines` without those of processes that are gone."""
    return [line for line in all_lines(run) if not is_gone(line)]


def ask_for_stacks(run: RunDir, rank: int) -> list[Path]:
    """Have the other processes of the run on this machine write their stacks; return the files that have any."""
    lines = [line for line in read_lines(run) if line.rank != rank and line.is_here]
    for line in lines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(line.pid, signal.SIGUSR2)
    if lines:
        time.sleep(STACKS_S)
    files = [stacks_file(run, line.rank) for line in lines]
    return [file for file in files if file.is_file() and file.stat().st_size]


def state_of(pid: int) -> str:
    """The kernel's letter for a process, such as R, S, D or T; empty if there is none, or only its remains."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in ("Z", "X") else state


def describe_state(pid: int) -> str:
    """A phrase if a process can do nothing, such as "is stopped (SIGSTOP or a debugger)"; empty if it can."""
    state = state_of(pid)
    where = ""
    if state == "D":
        with contextlib.suppress(OSError):
            where = f" in {Path(f'/proc/{pid}/wchan').read_text()}"
    return STATES[state] + where if state in STATES else ""


def describe_others(run: RunDir, rank: int) -> str:
    """A sentence for each other process of the run that is stopped or has stopped writing; if there is none, one for
    that whose last progress is the oldest, unless it is this one."""
    lines, found = read_lines(run), []
    for line in lines:
        late, state = time.time() - line.written, describe_state(line.pid) if line.is_here else ""
        if line.rank != rank and (told := state or (late > 5 * TICK_S and "does not run")):
            found.append(f"Process {line.pid}, rank {line.rank}, {told}; its last line is {late:.0f} s old. ")
    first = min(lines, key=lambda line: line.beat, default=None)
    if not found and first is not None and first.rank != rank:
        found.append(f"Process {first.pid}, rank {first.rank}, is the one that is the furthest behind. ")
    return "".join(found)


def innermost() -> str:
    """Where this process's main thread is: its innermost frames, the last called first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)[-MOST_FRAMES:] if frame else []
    return ", called by ".join(f"{one.name} ({Path(one.filename).name}:{one.lineno})" for one in reversed(frames))


def end_with_launcher() -> None:
    """Have the kernel end this process when the launcher that started it is gone: `accelerate launch` killed outright
    would leave a trainer that goes on alone. A no-op for a process that a shell started."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return
    if not any(name in word for word in words for name in LAUNCHERS):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        os.kill(os.getpid(), signal.SIGTERM)
