"""Run steps of `launch.checks.steps` in child processes: a crash or hang ends the child, not the doctor."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.checks.machine import ROOT, Machine

POLL_S = 0.2
LOG_CHARACTERS = 20_000
# A child reports in before its first step; Python itself starts in well under a second.
START_LIMIT_S = 30.0
MOST_PATIENCE = 8.0


def patience() -> float:
    """Factor by which a step may exceed its idle-machine limit: the load per core, clamped to 1 … `MOST_PATIENCE`.

    CPU time would not tell a hang from work: collectives that wait for each other spin.
    """
    return min(max(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1.0), MOST_PATIENCE)


@dataclass(frozen=True)
class Outcome:
    """How a step ended. `fault` is empty on success; `log` is what the child printed."""

    seconds: float
    facts: Any = None
    fault: str = ""
    log: str = ""


Step = Sequence[str | int | float | None]  # the name of a function of steps.py, and its arguments
_stopping = threading.Event()


@dataclass
class _Child:
    process: subprocess.Popen
    results: int
    log: Path
    buffer: bytes = b""
    lines: list[dict] = field(default_factory=list)


def run_steps(
    steps: Sequence[Step],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    keep_log: Path | None = None,
) -> list[Outcome]:
    """Return one outcome per step, in order; a step names a function of `launch.checks.steps`, then its arguments.

    The steps share one child for as long as it lives. A step that raises is recorded and the next one runs. A step
    that exceeds `limit_s` (times `patience()` on a busy machine) or kills the child is recorded, and the remaining
    steps run in a new child. The children's output is appended to `keep_log`.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(steps):
        outcomes += _one_child(steps[len(outcomes) :], limit_s, environment or os.environ, keep_log)
    return outcomes


def run_step(machine: Machine, limit_s: float, log: str, *step: str | int | float | None, **variables: str) -> Outcome:
    """Outcome of one step in a child of its own, in the machine's environment and these variables; its output is
    appended to the log of that name."""
    return run_steps([step], limit_s, {**machine.environment, **variables}, machine.log(log))[0]


@contextlib.contextmanager
def stopped() -> Iterator[None]:
    """Within the block every child is ended and no step starts; remaining steps are recorded as not tried."""
    _stopping.set()
    try:
        yield
    finally:
        _stopping.clear()


def reason(outcome: Outcome) -> str:
    """What happened; for a child that died or hung, also the last error line (or last line) of its log."""
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    if not lines or not re.match("its process|hangs", outcome.fault):
        return outcome.fault
    errors = [line for line in lines if re.search(r"\w*(Error|Exception|Fault)\b", line)]
    return f"{outcome.fault}; it said: {(errors or lines)[-1][:300]}"


def _one_child(
    steps: Sequence[Step], limit_s: float, environment: Mapping[str, str], keep_log: Path | None
) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        log = Path(folder) / "log"
        reader, writer = os.pipe()
        try:
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "launch.checks.steps", str(writer), json.dumps(list(steps))],
                    env={**environment, "PYTHONPATH": _import_path(environment)},
                    stdin=subprocess.PIPE,  # closes when this process ends, which ends the child
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writer,),
                    cwd=folder,
                    start_new_session=True,
                )
        finally:
            os.close(writer)
        child = _Child(process, reader, log)
        try:
            return _collect(child, steps, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
            os.close(reader)
            if keep_log is not None:
                with open(keep_log, "ab") as file:
                    file.write(log.read_bytes())


def _import_path(environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))


def _collect(child: _Child, steps: Sequence[Step], limit_s: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    since, limit = time.monotonic(), START_LIMIT_S + limit_s
    while len(outcomes) < len(steps):
        if _stopping.is_set():
            return outcomes + [Outcome(0.0, fault="not tried")] * (len(steps) - len(outcomes))
        ended = _read(child)
        for line in child.lines:
            if "started" in line:
                since, limit = time.monotonic(), limit_s
            else:
                outcomes.append(Outcome(line["seconds"], line.get("facts"), line.get("fault", ""), _log(child)))
        child.lines.clear()
        if len(outcomes) == len(steps):
            break
        took = time.monotonic() - since
        if ended is not None:
            return [*outcomes, Outcome(took, fault=_death(ended), log=_log(child))]
        if took > limit * patience():
            return [*outcomes, Outcome(took, fault=f"hangs: no end within {took:.0f} s", log=_log(child))]
    return outcomes


def _read(child: _Child) -> int | None:
    """Read the child's output for up to POLL_S; return its exit code once it has ended and its output is drained."""
    ended = child.process.poll()
    ready, _, _ = select.select([child.results], [], [], 0 if ended is not None else POLL_S)
    if ready:
        piece = os.read(child.results, 1 << 16)
        child.buffer += piece
        *lines, child.buffer = child.buffer.split(b"\n")
        child.lines += [json.loads(line) for line in lines]
        if piece:
            return None
        if ended is None:  # closed its end but still alive: it is exiting
            time.sleep(POLL_S / 10)
    return ended


def _death(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    hint = " (the system does so when memory runs out)" if code == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-code).name}{hint}"


def _log(child: _Child) -> str:
    with contextlib.suppress(OSError):
        return child.log.read_text(errors="replace")[-LOG_CHARACTERS:]
    return ""
