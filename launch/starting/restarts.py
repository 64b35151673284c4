"""`launch.up --restarts N`: start again what failed, at most N times, and record it in `restarts.jsonl`.

A replica is started again when its process ends or when the trainer asks for it (`kit/rollout/restart_requests.py`);
the trainer syncs it before it serves. A trainer is started again, by `--resume`, after a fault of the machine:
`may_resume` decides. Each restart waits before it starts, longer each time until a step is made.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from kit.core.errors import CheckFailed
from kit.core.metrics_log import MetricsLog
from kit.core.run_directory import RunDir
from kit.core.run_state import FAILED, Restarted, last_end, write_restarts
from kit.rollout.protocol import Info
from kit.rollout.restart_requests import take_request
from launch.replicas import POLL_S, Replicas, Running, ask_info, how_it_ended
from launch.starting.jobs import JobFailed
from launch.vllm_command import Plan

MOST_RESTARTS = 10_000
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
ANSWER_S = 1.0  # for one answer of a replica that loads, between looks at everything else
DELIBERATE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # somebody ended the trainer


@dataclass
class Restarts:
    """The restarts of one `launch.up`, at most `most`; `say` prints an event. The run's file keeps those of an
    `earlier` one."""

    run: RunDir
    most: int
    say: Callable[[str], None]
    earlier: list[Restarted] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made: list[Restarted] = []
        self._failed_at: list[float] = []  # of each, in time.monotonic()
        self._log = MetricsLog(self.run.metrics_file, most=1)

    @property
    def step(self) -> int:
        """The newest step of the run, 0 before the first."""
        newest = self._newest()
        return newest["step"] if newest else 0

    def has_step_since(self, restart: Restarted) -> bool:
        """Whether a step was made after this failure."""
        newest = self._newest()
        return newest is not None and newest.get("time", 0) > restart.time

    def _newest(self) -> dict | None:
        """The line of the newest step, the only one that is kept: a long run's lines would be most of the memory."""
        self._log.poll()
        return self._log.rows[-1] if self._log.rows else None

    @property
    def delay_s(self) -> float:
        """Seconds before the newest restart starts: doubled by each restart since the last step."""
        alike = sum(one.step == self.made[-1].step for one in self.made)
        return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(alike - 1, 30))

    def begin(self, what: str, why: str, details: str = "") -> Restarted:
        """Count and record a restart of `what`; `CheckFailed` with the first and the last cause once all are used up.
        `details` follow the last cause."""
        if len(self.made) == self.most:
            first = f" The first was {self.made[0]}." if self.made else ""
            raise CheckFailed(
                f"{what} {why}, and --restarts {self.most} are used up.{first}{details and f' {details}'}"
            )
        restart = Restarted(what, why, self.step, time.time(), os.getpid())
        self.made.append(restart)
        self._failed_at.append(time.monotonic())
        self._write()
        self.say(f"{what}: {why}; restart {len(self.made)} of {self.most} in {self.delay_s:g} s")
        return restart

    def is_back(self, restart: Restarted) -> None:
        """Record that what was started again works."""
        restart.seconds = round(time.monotonic() - self._failed_at[self.made.index(restart)], 1)
        self._write()
        self.say(f"{restart.what}: back after {restart.seconds:.0f} s")

    def _write(self) -> None:
        write_restarts(self.run, [*self.earlier, *self.made])

    def summary(self) -> list[str]:
        """A line for each restart."""
        return [f"restart {number} of {self.most}: {one}" for number, one in enumerate(self.made, 1)]


@dataclass
class _Down:
    """A replica that failed."""

    restart: Restarted
    starts_at: float  # time.monotonic()
    deadline: float | None = None  # for its first answer, once it was started
    asked: float = 0.0


class KeptReplicas:
    """Replicas that are started again; `look` does what is due and never waits.

    A replica must answer within `wait_s` of its start, as `check` wants it. `failed` has those that are down.
    """

    def __init__(self, servers: Replicas, restarts: Restarts, wait_s: float, check: Callable[[Plan, Info], None]):
        self.servers, self.restarts, self.wait_s, self.check = servers, restarts, wait_s, check
        self.failed: dict[str, _Down] = {}
        for one in servers.running:
            take_request(restarts.run, one.plan.url)  # left by a trainer that was killed

    def look(self) -> None:
        """Notice replicas that failed, carry on with those that are down; `CheckFailed` when no restart is left."""
        for one in self.servers.running:
            down = self.failed.get(one.plan.url)
            if down is None or down.deadline is not None:
                self._notice(one)
                self._ask(one)
            elif time.monotonic() >= down.starts_at:
                self.servers.start_again(one)
                down.deadline = time.monotonic() + self.wait_s

    def _notice(self, one: Running) -> None:
        if (code := one.process.poll()) is not None:
            self._begin(one, how_it_ended(code))
        elif one.plan.url not in self.failed:  # the trainer may have asked before it was seen to be back
            request = take_request(self.restarts.run, one.plan.url)
            if request is not None and request.pid in _pids(one):
                self._begin(one, f"is not usable: {request.reason}")

    def _begin(self, one: Running, why: str) -> None:
        details = str(self.servers.death(one) or f"Its log is {one.plan.log}.")
        self.servers.end(one)
        self.failed.pop(one.plan.url, None)
        restart = self.restarts.begin(f"server {one.plan.url}", why, details)
        self.failed[one.plan.url] = _Down(restart, time.monotonic() + self.restarts.delay_s)

    def _ask(self, one: Running) -> None:
        """Take a replica back once it answers; restart it again when it does not in time, or not as it should."""
        down, now = self.failed.get(one.plan.url), time.monotonic()
        if down is None or down.deadline is None or now - down.asked < POLL_S:
            return
        down.asked = now
        try:
            info, reason = ask_info(one.plan, ANSWER_S)
            if info is not None:
                self.check(one.plan, info)
        except CheckFailed as failed:
            self._begin(one, f"is not usable: {failed}")
            return
        if info is not None:
            del self.failed[one.plan.url]
            self.servers.serving.add(one.plan.url)
            self.restarts.is_back(down.restart)
        elif now > down.deadline:
            self._begin(one, f"was not ready within {self.wait_s:g} s (rollout.server_wait_s): {reason}")


def _pids(one: Running) -> set[int]:
    try:
        root = psutil.Process(one.process.pid)
        return {root.pid, *(child.pid for child in root.children(recursive=True))}
    except psutil.Error:
        return set()


def may_resume(failed: JobFailed, run: RunDir) -> bool:
    """Whether a trainer that ended may do better from its newest checkpoint: it was killed, or the machine failed it.

    Not after bad input or a failed check, which would fail again, nor when somebody ended it.
    """
    if failed.code < 0:
        return -failed.code not in DELIBERATE
    end = last_end(run)
    return failed.code == 1 and end is not None and end.how == FAILED and end.is_machine


def why_it_ended(failed: CheckFailed | JobFailed) -> str:
    """The first sentence of a trainer's failure, without its name."""
    return " ".join(str(failed).removeprefix("trainer").lstrip(": ").partition(". ")[0].split())
