"""Replica processes: start, wait for, watch, and end them with all their descendants."""

import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.errors import CheckFailed
from kit.rollout.protocol import Info
from launch.vllm_command import Plan

POLL_S = 0.5
ANSWER_S = 5.0  # longest wait for one answer while a server starts
STOP_S = 20.0  # grace period for a server
LOG_LINES = 15
START = "==== "  # torchrun's table of failures has longer lines of these
# The last lines come from processes that went down after the first one; its error is further up.
ERROR = re.compile(r"\b(\w*(?:Error|Exception): .+)")
# vLLM's warnings name errors that did not occur: "This can cause fd limit errors like `OSError: [Errno 24] ...`".
WARNING = re.compile(r"^(?:\([^)]*\) )?(?:WARNING|INFO|DEBUG) \d\d-\d\d ")
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """The user ended the command; the argument is the signal (SIGINT or SIGTERM)."""


@dataclass
class Running:
    """One replica's process, the leader of its own process group, to which its workers belong."""

    plan: Plan
    process: subprocess.Popen
    started: float  # time.monotonic()


class Replicas:
    """All replicas of one command. As a context manager it ends every process on exit, unless `leave_running`.

    `prefix` is prepended to each replica's command: a wrapper program that runs it.
    `look` is called on every liveness check and handles signals; without it SIGINT and SIGTERM raise `Stopped`.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        detach: bool = False,
        prefix: Sequence[str] = (),
        look: Callable[[], None] | None = None,
    ):
        self.plans, self.detach, self.prefix = plans, detach, prefix
        self.look = look or self._raise_if_stopped
        self.running: list[Running] = []
        self.serving: set[str] = set()  # URLs that answered as they should
        self.started = time.monotonic()
        self._handled = () if look else (signal.SIGINT, signal.SIGTERM)
        self._signal: int | None = None
        self._left = False

    def __enter__(self) -> "Replicas":
        self._before = {number: signal.signal(number, self._note) for number in self._handled}
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

    def _raise_if_stopped(self) -> None:
        if self._signal is not None:
            raise Stopped(self._signal)

    def leave_running(self) -> None:
        """Keep the processes running after this command."""
        self._left = True

    def start(self) -> None:
        """Start every replica, appending its output to its log."""
        self.started = time.monotonic()
        for plan in self.plans:
            self.running.append(Running(plan, self._process(plan), time.monotonic()))

    def end(self, one: Running) -> None:
        """Kill what is left of a replica that failed; a hanging one would not listen."""
        self.serving.discard(one.plan.url)
        stop_groups([one.process.pid], 0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(1)

    def start_again(self, one: Running) -> None:
        """Start a replica that has ended, by the same command."""
        one.process, one.started = self._process(one.plan), time.monotonic()

    def _process(self, plan: Plan) -> subprocess.Popen:
        prctl = ctypes.CDLL(None).prctl

        def die_with_the_launcher() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        environment = {**os.environ, **plan.environment}
        # The kit needs neither vLLM's development routes nor pickle between its processes.
        for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
            environment.pop(name, None)
        return start_logged(
            plan.command,
            plan.log,
            environment,
            self.prefix,
            # `python -m` puts the working directory first on the import path, so not the checkout.
            cwd=plan.log.parent,
            preexec_fn=None if self.detach else die_with_the_launcher,
        )

    def wait_ready(self, wait_s: float, check: Callable[[Plan, Info], None]) -> None:
        """Wait until every replica answers /v1/rollout/info and `check` accepts the answer, within one deadline.

        `CheckFailed` names the replica and its log: at once for a process that ended, else at the deadline.
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
                info, reason = ask_info(one.plan, min(ANSWER_S, left))
                if info is None:
                    waiting[url] = (one, reason)
                else:
                    check(one.plan, info)
                    self.serving.add(url)
                    del waiting[url]
            if waiting:
                time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))

    def watch(self) -> None:
        """Block until the user ends the command (`Stopped`) or a replica ends (`CheckFailed`)."""
        while True:
            self.check_alive()
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise `CheckFailed` if a replica has ended, `Stopped` if the user wants everything to end."""
        self.look()
        for one in self.running:
            if (died := self.death(one)) is not None:
                raise died

    def death(self, one: Running) -> CheckFailed | None:
        """The error of a replica that has ended; None while it runs."""
        if (code := one.process.poll()) is None:
            return None
        others = " The other replicas were stopped." if len(self.running) > 1 else ""
        return CheckFailed(f"the server at {one.plan.url} {how_it_ended(code)}.{others} {_log(one.plan)}")


def ask_info(plan: Plan, limit_s: float) -> tuple["Info | None", str]:
    """(answer, "") from /v1/rollout/info, or (None, why there is none yet); `CheckFailed` if there never will be."""
    from kit.rollout.replica import Replica, ReplicaError  # imports numpy and requests, which --help need not wait for

    host = f"[{plan.host}]" if ":" in plan.host else plan.host
    # A wildcard address is queried through loopback.
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
    """Describe the end of a process from its exit code; negative codes are signals."""
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "was killed by SIGKILL (the kernel does so if the machine or container runs out of memory: see dmesg)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def start_logged(
    command: Sequence[str], log: Path, environment: Mapping[str, str], prefix: Sequence[str] = (), **options: Any
) -> subprocess.Popen:
    """Start a command in a session of its own. Its output is appended to `log`, which may hold earlier starts, below
    a line with the time and the command."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        words = shlex.join(command).replace("\n", " ")
        file.write(f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')} {words}\n")
        file.flush()
        return subprocess.Popen(
            [*prefix, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


def _log(plan: Plan) -> str:
    lines = read_end(plan.log)
    return first_error(lines) + log_end(plan.log, lines)


def first_error(lines: list[str]) -> str:
    """A line that quotes the first error in a log; empty if it names none."""
    cause = next((found[1] for line in lines if not WARNING.match(line) and (found := ERROR.search(line))), None)
    return f"The first error in it: {cause[:300]}\n" if cause else ""


def log_end(log: Path, lines: list[str]) -> str:
    """Path of a log, and its last lines."""
    tail = "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES:])
    return f"Its log is {log}; the last lines:\n{tail}"


def read_end(log: Path, most_bytes: int = 1 << 18) -> list[str]:
    """The lines of a log's newest start, from its last `most_bytes`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return [str(error)]
    starts = [number for number, line in enumerate(lines) if line.startswith(START)]
    return lines[starts[-1] + 1 if starts else 0 :]


def stop_groups(groups: list[int], patience_s: float = STOP_S) -> list[int]:
    """End whole process groups: SIGTERM to the leader, SIGKILL to all after `patience_s`; return groups still alive.

    Only the leader gets SIGTERM: a server whose workers are signalled at the same time waits for them until a timeout
    (15 s with vLLM 0.31, 1 s this way).
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
    """Living processes of a group; zombies, which a container may never reap, are not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) and int(fields[2]) == group:
            if fields[0] not in ("Z", "X"):
                found.append(int(entry.name))
    return found


def started_at(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; with it a pid is unique even after reuse."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else None


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (0 state, 2 process group, 19 start time)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
