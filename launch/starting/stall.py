"""A job of `launch.up` that stands still: found from outside, for what a process cannot find itself.

A trainer writes its progress every second (`kit/core/progress.py`) and ends itself when it makes none. One that is
stopped, swapped out or stuck with the interpreter's lock cannot: its line gets old. Before a trainer's first line and
after its last, and for the other jobs, progress is processor time of the job's processes.
"""

import contextlib
import shlex
import time
from dataclasses import dataclass, field

import psutil

from kit.core.errors import CheckFailed
from kit.core.progress import Line, ask_for_stacks, describe_state, read_lines
from kit.core.run_directory import RunDir

LOOK_S = 2.0
GRACE_S = 10.0  # beyond `launch.stall_s`: a process that can end itself knows more


class StoodStill(CheckFailed):
    """The job made no progress for `launch.stall_s`."""


@dataclass
class StallWatch:
    """Watches the process tree of one job at a time; `stall_s` 0 watches nothing."""

    run: RunDir
    stall_s: float
    _shown: dict[tuple[int, str], float] = field(default_factory=dict)  # by process: its last progress, its last line
    _still_s: dict[tuple[int, str], float] = field(default_factory=dict)  # and for how long that has been its last
    _looked: float = 0.0

    def check(self, name: str, pid: int) -> None:
        """Raise `StoodStill` if the job `name`, whose first process is `pid`, has made no progress for too long."""
        now = time.monotonic()
        if not self.stall_s or now - self._looked < LOOK_S:
            return
        # Neither a clock that steps nor a stop of this process itself is a stall of the job: times of the lines are
        # compared with earlier ones only, and a look that came late counts as one that came in time.
        passed, self._looked = min(now - self._looked, 2 * LOOK_S), now
        tree = _tree(pid)
        own = {process.pid for process in tree}
        lines = [line for line in read_lines(self.run) if line.is_here and line.pid in own]
        shown = {(line.pid, "progress"): _progress(line) for line in lines}
        shown |= {(line.pid, "line"): line.written for line in lines}
        shown = shown or {(pid, "processor"): _processor_s(tree)}
        still = {
            one: self._still_s[one] + passed if self._shown.get(one) == value else 0.0 for one, value in shown.items()
        }
        self._shown, self._still_s = shown, still
        worst = max(lines, key=lambda line: still[line.pid, "progress"], default=None)
        still_s = max(still.values())
        if lines:  # a beat of any process is progress of all, but one that does not even write its line has stopped
            beats = min(still[line.pid, "progress"] for line in lines)
            still_s = max(beats, *(still[line.pid, "line"] for line in lines))
        if still_s > self.stall_s + GRACE_S:
            raise StoodStill(self._describe(name, tree, lines, worst, still_s))

    def _describe(
        self, name: str, tree: list[psutil.Process], lines: list[Line], worst: Line | None, still_s: float
    ) -> str:
        ranks = {line.pid: f", rank {line.rank}" for line in lines}
        told = [
            f"process {process.pid}{ranks.get(process.pid, '')} ({_words(process)}) {state}"
            for process in tree
            if (state := describe_state(process.pid))
        ]
        if not told and worst is not None:
            told = [f"process {worst.pid}, rank {worst.rank}, is the one that is the furthest behind"]
        if not told:
            told = [f"processes {', '.join(str(process.pid) for process in tree)} use no processor time"]
        stacks = ask_for_stacks(self.run, rank=-1) if lines else []
        more = f" Stacks: {', '.join(map(str, stacks))}." if stacks else ""
        return f"{name}: no progress for {still_s:.0f} s (launch.stall_s {self.stall_s:g}): {'; '.join(told)}.{more}"


def _progress(line: Line) -> float:
    """When a process last made progress, in wall-clock seconds; outside of its steps, when it last ran."""
    return line.beat if line.trains else line.written


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def _processor_s(tree: list[psutil.Process]) -> float:
    total = 0.0
    for process in tree:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return shlex.join(process.cmdline())[-80:]
    return "?"
