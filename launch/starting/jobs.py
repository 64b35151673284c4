"""Non-server commands of a run: start each with its own log, watch and end it, and find out why it ended."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from kit.core.errors import BAD_INPUT, CHECK_FAILED, KitError
from launch.replicas import first_error, how_it_ended, log_end, members, read_end, start_logged
from launch.starting.trainer_command import Command
from launch.vllm_command import ROOT

STOP_S = 30.0  # grace period for a job after SIGINT
KILL_S = 5.0
MOST_REASON_LINES = 10
# How accelerate and torchrun, which exit with 1 whatever happened, report how the recipe ended.
HOW_THE_RECIPE_ENDED = re.compile(
    r"returned non-zero exit status (?P<code>\d+)|died with <Signals\.(?P<signal>SIG\w+)"
    r"|^\s*exitcode\s*: (?P<torch>-?\d+)"
)
TRACEBACK = "Traceback (most recent call last)"
LAUNCHER_ERROR = re.compile(r"(subprocess\.CalledProcessError|torch\.distributed\.elastic\.\S+Error)\b")
# Lines that follow the recipe's message: the launcher's traceback, or its own log lines.
AFTER_THE_MESSAGE = re.compile(r"Traceback \(|[EWI]\d{4} |\[rank\d|Exception ignored")


def leash() -> list[str]:
    """Words to put before a command so that it ends with this process and leaves no process behind."""
    return [sys.executable, str(ROOT / "launch" / "starting" / "leash.py"), str(os.getpid())]


@dataclass
class Job:
    """One command with its log. As a context manager it ends the command and all its descendants on exit."""

    name: str
    command: Command
    log: Path
    gpus: tuple[str, ...] = ()
    on_wait: Callable[[], None] = lambda: None  # called while waiting for it to end
    process: subprocess.Popen | None = None
    started: float = 0.0  # time.monotonic()

    def __enter__(self) -> "Job":
        environment = {**os.environ, **self.command.environment}
        self.process = start_logged(self.command.words, self.log, environment, leash())
        self.started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
            self._wait(STOP_S)
        if self.process.poll() is None:
            kill_trees([self.process.pid])
            self._wait(KILL_S)
        if members(self.process.pid):  # the leash itself was killed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.on_wait()
            time.sleep(0.1)

    def ended(self) -> int | None:
        """None while it runs; then the exit code of what accelerate launched, negative for a signal."""
        code = self.process.poll()
        if code != 1:
            return code
        found = [match for line in read_end(self.log) if (match := HOW_THE_RECIPE_ENDED.search(line))]
        if not found:
            return code
        last = found[-1]  # torchrun names the first failure last
        if last["signal"]:
            return -signal.Signals[last["signal"]]
        return int(last["code"] or last["torch"])

    def failure(self, code: int) -> "JobFailed":
        """Error that explains an exit with `code`."""
        lines = without_launcher(read_end(self.log))
        reason = message(lines)
        if code == BAD_INPUT and reason:
            return JobFailed(self.name, f"{self.name}: {reason}\nIts log is {self.log}.", code)
        told = f"{reason}\n" if reason else first_error(lines)
        return JobFailed(self.name, f"{self.name} {how_it_ended(code)}. {told}{log_end(self.log, lines)}", code)


class JobFailed(KitError):
    """The command `name` of the run failed with `code`, negative for a signal; the exit code for bad input is
    preserved."""

    def __init__(self, name: str, text: str, code: int):
        super().__init__(text)
        self.name, self.code = name, code
        self.exit_code = BAD_INPUT if code == BAD_INPUT else CHECK_FAILED


def message(lines: list[str]) -> str | None:
    """The first error message of a kit command in a log (`error: …`, possibly continued over several lines)."""
    for number, line in enumerate(lines):
        if line.startswith("error: "):
            said = [line.removeprefix("error: ")]
            for further in lines[number + 1 : number + MOST_REASON_LINES]:
                if AFTER_THE_MESSAGE.match(further):
                    break
                said.append(further)
            return "\n".join(said).rstrip()
    return None


def without_launcher(lines: list[str]) -> list[str]:
    """Lines of a log without accelerate's or torchrun's traceback, which says only that the recipe failed."""
    ends = [number for number, line in enumerate(lines) if LAUNCHER_ERROR.match(line)]
    starts = [number for number, line in enumerate(lines[: ends[-1]]) if TRACEBACK in line] if ends else []
    return lines[: starts[-1]] if starts else lines


def kill_trees(pids: list[int]) -> None:
    """Send SIGKILL to these processes and all their descendants."""
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    one.kill()
