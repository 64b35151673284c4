"""The processes of the replicas: started, waited for, watched, ended with everything that they started."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kit.core.errors import CheckFailed
from kit.rollout.replica import Replica, ReplicaError
from launch.vllm_command import Plan

POLL_S = 0.5
ANSWER_S = 5.0  # longest wait for one answer while a server starts
STOP_S = 20.0  # what a server gets to end by itself
LOG_LINES = 15
START = "===="
# The last lines are those of the processes that follow the first one down; what brought that down stands above.
ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
# vLLM's warnings name errors that did not happen: "This can cause fd limit errors like `OSError: [Errno 24] ...`".
WARNING = re.compile(r"^(?:\([^)]*\) )?(?:WARNING|INFO|DEBUG) \d\d-\d\d ")
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """The user ended the command; the signal (SIGINT or SIGTERM) is its argument."""


@dataclass
class Running:
    """One replica's process; it leads a process group of its own, which its workers belong to."""

    plan: Plan
    process: subprocess.Popen


class Replicas:
    """All replicas of one command. Use as a context: leaving it ends every process, unless `leave_running`.

    `prefix` are words before each replica's command, of a program that runs the command in the replica's place.
    """

    def __init__(self, plans: list[Plan], detach: bool = False, prefix: Sequence[str] = ()):
        self.plans, self.detach, self.prefix = plans, detach, prefix
        self.running: list[Running] = []
        self._signal: int | None = None
        self._left = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Replicas":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._left:
            stop_groups([one.process.pid for one in self.running])
        for one in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(0 if self._left else 1)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._signal = number

    def leave_running(self) -> None:
        """Keep the processes after this command."""
        self._left = True

    def start(self) -> None:
        """Start every replica, its output appended to its log."""
        prctl = ctypes.CDLL(None).prctl

        def die_with_the_launcher() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        for plan in self.plans:
            plan.log.parent.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, **plan.environment}
            # Its routes answer whoever reaches the port, key or not, and the kit's own do not need it.
            environment.pop("VLLM_SERVER_DEV_MODE", None)
            with open(plan.log, "a") as log:
                mark_start(log, plan.command)
                process = subprocess.Popen(
                    [*self.prefix, *plan.command],
                    # `python -m` puts the working directory first on the import path: not the checkout.
                    cwd=plan.log.parent,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=None if self.detach else die_with_the_launcher,
                )
            self.running.append(Running(plan, process))

    def wait_ready(self, wait_s: float, check: Callable[[Plan, dict], None]) -> None:
        """Wait until every replica answers /v1/rollout/info and `check` accepts the answer, within one deadline.

        `CheckFailed` names the replica and its log: a process that ended, at once; anything else, at the deadline.
        """
        deadline = time.monotonic() + wait_s
        waiting = {one.plan.url: (one, "it was not asked yet") for one in self.running}
        while waiting:
            for url, (one, reason) in [*waiting.items()]:
                self.check_alive()
                if (left := deadline - time.monotonic()) <= 0:
                    raise CheckFailed(
                        f"the server at {url} was not ready within {wait_s:g} s (rollout.server_wait_s): {reason}. "
                        f"{_log(one.plan)}"
                    )
                info, reason = _ask(one.plan, min(ANSWER_S, left))
                if info is None:
                    waiting[url] = (one, reason)
                else:
                    check(one.plan, info)
                    del waiting[url]
            if waiting:
                time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))

    def watch(self) -> None:
        """Until the user ends the command (`Stopped`) or a replica ends (`CheckFailed`)."""
        while True:
            self.check_alive()
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """`CheckFailed` when a replica has ended, `Stopped` when the user wants it all to end."""
        if self._signal is not None:
            raise Stopped(self._signal)
        for one in self.running:
            if (code := one.process.poll()) is not None:
                others = " The other replicas were stopped." if len(self.running) > 1 else ""
                raise CheckFailed(f"the server at {one.plan.url} {how_it_ended(code)}.{others} {_log(one.plan)}")


def _ask(plan: Plan, limit_s: float) -> tuple[dict | None, str]:
    """(answer, "") of /v1/rollout/info, or (None, why there is none yet); `CheckFailed` when there never will be."""
    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    # An address that stands for all of the machine's is asked under one of them.
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    client = Replica(f"http://{here}:{plan.port}", limit_s)
    try:
        return client.info(timeout_s=limit_s), ""
    except ReplicaError as error:
        if error.status in (None, 503) and error.retry:
            return None, f"{error.text}{f' ({error.status})' if error.status else ''}"
        raise CheckFailed(f"the server at {plan.url} cannot be used: {error}. {_log(plan)}") from None
    finally:
        client.close()


def how_it_ended(code: int) -> str:
    """The end of a process in words, from its exit code; below 0 it is the signal that ended it."""
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "was killed by SIGKILL (the kernel does that when the machine or container is out of memory: dmesg)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def mark_start(log: IO[str], command: list[str]) -> None:
    """The line that a command's output follows in its log, which may hold earlier starts."""
    words = shlex.join(command).replace("\n", " ")
    log.write(f"{START} {time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
    log.flush()


def _log(plan: Plan) -> str:
    lines = read_end(plan.log)
    return first_error(lines) + log_end(plan.log, lines)


def first_error(lines: list[str]) -> str:
    """A line with the first error among those of a log, nothing when none is named."""
    cause = next((found[1] for line in lines if not WARNING.match(line) and (found := ERROR.search(line))), None)
    return f"The first error in it: {cause[:300]}\n" if cause else ""


def log_end(log: Path, lines: list[str]) -> str:
    """Where a log is, and the last of its lines."""
    tail = "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES:])
    return f"Its log is {log}; the last lines:\n{tail}"


def read_end(log: Path, most_bytes: int = 1 << 18) -> list[str]:
    """The lines of the newest start in a log, as far as they fit into `most_bytes`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    return lines[starts[-1] + 1 if starts else 0 :]


def stop_groups(groups: list[int], patience_s: float = STOP_S) -> list[int]:
    """End whole process groups: SIGTERM to the leader, after `patience_s` SIGKILL to all; the groups still there.

    The leader alone is asked: a server whose workers are told at the same time waits for them in vain (15 s with
    vLLM 0.31, 1 s this way).
    """
    for group in groups:
        leader_lives = started_at(group) is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM) if leader_lives else os.killpg(group, signal.SIGTERM)
    left = _wait_gone(groups, patience_s)
    for group in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return _wait_gone(left, 5.0) if left else []


def _wait_gone(groups: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [group for group in groups if members(group)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def members(group: int) -> list[int]:
    """Living processes of a group; zombies, which nobody may ever collect in a container, are not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and int(fields[2]) == group:
            if fields[0] not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def started_at(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with it a pid names one process, not its successor."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on (0 state, 2 process group, 19 start time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
