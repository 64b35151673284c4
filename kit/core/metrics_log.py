"""Read the steps of a run from `metrics.jsonl` while the file still grows."""

import contextlib
import difflib
import itertools
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kit.core.errors import BadInput
from kit.core.file_kinds import COMPLETIONS, STEP
from kit.core.run_directory import RunDir
from kit.core.run_files import is_there, opened, parse_line
from kit.core.run_state import DONE, INTERRUPTED, End, is_restarting, last_end, trainer_pid

RECENT = 10  # steps counted as "recent" in the terminal, in the JSON summary and in the health rules
SMOOTH = 10  # steps over which a drawn curve is smoothed
# A run is called silent after this many step times, and never before this many seconds.
SILENT_STEPS, SILENT_S = 5, 60.0
ENDED = ("finished", "stopped", "failed")
LARGEST = 1e100
CHUNK = 1 << 20  # bytes read at once
WITHIN_ROLLOUT = ("wake", "sync", "sleep")  # parts of seconds.rollout with a server
# No phases of the step: the servers generate during the update, and other episodes go on while one waits for a tool.
BESIDE = ("rollout_hidden", "environment")


class MetricsLog:
    """Lines of one `metrics.jsonl` in step order; `poll` adds what was appended since the last call.

    A line counts once its newline is written, so a partial line is never read. A step that goes back means a resumed
    run: its line replaces every earlier line of that step and later ones. A replaced or truncated file is read from
    the start; known rows stay if the new file continues from them, as after a rotation. `bad_lines` counts complete
    lines that are not a step, or not what was written. With `most`, only so many of the newest rows are kept, and a
    long file is never in memory as a whole.
    """

    def __init__(self, path: Path, most: int | None = None):
        self.path, self.most = Path(path), most
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict] = []
        self.bad_lines = 0
        self.resumed_at: list[int] = []
        self._offset, self._tail = 0, b""
        self._inode: int | None = None
        self._is_new_file = False

    def poll(self) -> bool:
        """Read new lines; return whether steps were added or the file was replaced."""
        if not is_there(self.path):
            return False
        with opened(self.path, STEP.fix) as file:
            changed = self._restart_if_replaced(file)
            before = len(self.rows), self.rows[-1:]
            while data := file.read(CHUNK):
                self._offset += len(data)
                *lines, self._tail = (self._tail + data).split(b"\n")
                for line in lines:
                    self._add(line)
        return changed or (len(self.rows), self.rows[-1:]) != before

    def _restart_if_replaced(self, file: BinaryIO) -> bool:
        status = os.fstat(file.fileno())
        replaced = self._inode not in (None, status.st_ino) or status.st_size < self._offset
        if replaced:
            self._offset, self._tail, self._is_new_file = 0, b"", True
        self._inode = status.st_ino
        file.seek(self._offset)
        return replaced

    def _add(self, line: bytes) -> None:
        if not line.strip():
            return
        row = _parse(line)
        if row is None:
            self.bad_lines += 1
            return
        if self._is_new_file and self.rows and row["step"] <= self.rows[-1]["step"]:
            self.rows, self.resumed_at, self.bad_lines = [], [], 0
        self._is_new_file = False
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            self.resumed_at.append(row["step"])
            while self.rows and self.rows[-1]["step"] >= row["step"]:
                self.rows.pop()
        self.rows.append(row)
        if self.most is not None:
            del self.rows[: -self.most]


def read_completions(file: Path) -> list[dict]:
    """The whole lines of a `completions/step-*.jsonl` that hold a completion; empty if the file cannot be read."""
    rows = []
    with contextlib.suppress(BadInput), opened(file) as lines:
        for line in lines:
            with contextlib.suppress(ValueError, BadInput):
                if line.endswith(b"\n"):  # text after the last newline is still being written
                    rows.append(parse_line(line, COMPLETIONS))
    return rows


def group(values: Any, key: str) -> dict:
    """The group of keys at `key`; empty if there is none, as in a log from another version."""
    found = values.get(key) if isinstance(values, dict) else None
    return found if isinstance(found, dict) else {}


def _parse(line: bytes) -> dict | None:
    # A run that was killed mid-line and resumed leaves half a line followed by a whole one.
    for start in (0, line.rfind(b'{"step"')):
        with contextlib.suppress(ValueError, BadInput):
            return parse_line(line[max(start, 0) :], STEP)
    return None


def number(row: dict, key: str) -> float | None:
    """The value of `key` as a float (`seconds.rollout` is nested); None if it is absent, null or not a number."""
    value = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(rows: Sequence[dict], key: str) -> list[float]:
    """One value per step; NaN if it is missing, not finite or too large to draw."""
    values = (number(row, key) for row in rows)
    return [value if value is not None and abs(value) < LARGEST else math.nan for value in values]


def phases(row: dict) -> dict[str, float]:
    """Seconds of a step by phase, in the order in which they run, adding up to the step.

    Phases that `seconds.rollout` includes are listed separately; "other" is the rest. Empty if the step has no times.
    """
    known = {name: number(row, f"seconds.{name}") for name in group(row, "seconds") if name not in BESIDE}
    known = {name: value for name, value in known.items() if value is not None and math.isfinite(value) and value > 0}
    whole = known.pop("step", None)
    inside = {name: known.pop(name) for name in WITHIN_ROLLOUT if name in known}
    if "rollout" in known:
        known["rollout"] = max(0.0, known["rollout"] - sum(inside.values()))
    order = ("rollout", "heldout", "reference", "reward", "teacher", "update")
    found = inside | {name: known.pop(name) for name in order if name in known}
    found |= known
    if found and whole is not None and (rest := whole - sum(found.values())) > 0.01 * whole:
        found["other"] = rest
    return found


def last_known(rows: Sequence[dict], key: str) -> float | None:
    """The newest value of a metric that is not measured at every step; None if there is none."""
    found = (number(row, key) for row in reversed(rows))
    return next((value for value in found if value is not None), None)


def mean(values: Sequence[float]) -> float | None:
    """Mean of the finite values, None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def median(values: Sequence[float]) -> float | None:
    """Median of the finite values, None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else None


def smoothing(key: str) -> str:
    """How a curve of `key` is smoothed, by mean or median.

    Estimates of a KL have single steps that are a hundred times the rest, and a mean would show nothing else.
    """
    return "median" if key in ("kl", "sampler_k3") else "mean"


def smooth(values: Sequence[float], kind: str = "mean") -> list[float]:
    """Mean or median of each value and the SMOOTH - 1 before it, NaN if none of them is known."""
    of = median if kind == "median" else mean
    found = (of(values[max(0, end - SMOOTH) : end]) for end in range(1, len(values) + 1))
    return [math.nan if value is None else value for value in found]


def total_steps(rows: Sequence[dict]) -> int | None:
    """The planned number of steps, None if the log does not say."""
    total = number(rows[-1], "total_steps") if rows else None
    return int(total) if total is not None and 0 < total < 1e12 else None


def step_seconds(rows: Sequence[dict]) -> float | None:
    """Median duration of the recent steps in seconds: as logged, or else the time between their lines."""
    recent = rows[-2 * RECENT :]
    times = series(recent, "time")
    return median(series(recent, "seconds.step")) or median([b - a for a, b in itertools.pairwise(times)])


def progress(log: MetricsLog, now: float | None = None) -> dict:
    """Progress of a run: its state, step and times, and the error of one that stopped or failed.

    The keys are state (waiting, running, silent, restarting, finished, stopped, failed), step, total_steps, seconds
    since the last line, time left, and for a run that stopped or failed its error and end time. Silent means that no
    line came for `SILENT_STEPS` step times and at least `SILENT_S` seconds: stopped, or stuck. `trainer_pid` says
    which, for a trainer on this machine. While there is one, the last step does not mean finished: it may predate a
    resume with more steps.
    """
    rows, run = log.rows, RunDir(log.path.parent)
    end = last_end(run)
    is_between = end is not None and end.how != DONE and is_restarting(run)
    if is_between:  # of two trainers
        end = None
    state: dict = {
        "state": "restarting" if is_between else "waiting",
        "step": None,
        "total_steps": None,
        "since_last_line_s": None,
        "time_left_s": None,
        "trainer_pid": trainer_pid(run),
        "error": None,
        "ended": None,
    }
    if not rows:
        return state | _ended(end)
    last, total, duration = rows[-1], total_steps(rows), step_seconds(rows)
    written = number(last, "time")
    if written is None or not math.isfinite(written):
        try:
            written = log.path.stat().st_mtime
        except OSError:  # moved away in the meantime
            written = time.time()
    age = max(0.0, (time.time() if now is None else now) - written)
    state |= {"state": "running", "step": last["step"], "total_steps": total, "since_last_line_s": age}
    is_whole = total is not None and last["step"] >= total and state["trainer_pid"] is None
    if end is not None and end.how != DONE and not (is_whole and end.time is None):
        return state | _ended(end)
    if is_whole:
        return state | {"state": "finished", "time_left_s": 0.0}
    if is_between:
        return state | {"state": "restarting"}
    if age > max(SILENT_S, SILENT_STEPS * (duration or 0.0)):
        return state | {"state": "silent"}
    if total is not None and duration is not None:
        state["time_left_s"] = max(0.0, (total - last["step"]) * duration - min(age, duration))
    return state


def _ended(end: End | None) -> dict:
    """State, error and end time of a trainer that did not finish; empty otherwise."""
    if end is None or end.how == DONE:
        return {}
    return {"state": "stopped" if end.how == INTERRUPTED else "failed", "error": end.error, "ended": end.time}


def open_run(path: str) -> RunDir:
    """The run directory at `path`; if there is none, raises a `BadInput` that names the nearest one."""
    try:
        return RunDir.open(path)
    except BadInput as error:
        folder = Path(path).parent
        runs = sorted(found.parent.name for found in folder.glob("*/config.json"))
        near = difflib.get_close_matches(Path(path).name, runs, n=1, cutoff=0.5)
        if near:
            hint = f" Did you mean {folder / near[0]}?"
        else:
            hint = f" Runs in {folder}: {', '.join(runs[:10])}." if runs else " Pass the directory of a started run."
        raise BadInput(f"{error}{hint}") from None
