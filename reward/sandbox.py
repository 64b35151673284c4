"""Run untrusted code against hidden tests in processes that cannot reach the tests, the machine or the verdict.

Roles:

- The *candidate* process runs the model's code and nothing else. It is asked for function calls and answers with plain
  values (`sandbox_values`); it never receives a test, an expected value or a verdict to write.
- The *judge* process runs the tests and never runs the model's code. There, a tested function is a proxy that sends
  the arguments over a pipe and rebuilds the result from plain types. Equality is the judge's own, so an object that
  claims to equal everything, a patched `assert`, a printed marker, `sys.exit(0)` or a forged reply change nothing:
  whatever the candidate does is either a value, which is compared, or the loss of the candidate, which fails the
  sample even if the tests catch every exception.
- The *fork server* (one per worker, an interpreter of its own with the standard library loaded) forks the two for
  every sample. The candidate is forked before the job is read, so no test is in its memory.
- This process only sends jobs and reads verdicts. It parses and compiles no model text.

Isolation of candidate and judge, as far as the machine allows (`Sandbox.isolation`, determined by trying):

- namespaces for mounts (a read-only root with only the standard library, a fresh 16 MiB in-memory file system, no
  /proc, no /dev, no packages), network (no interface that is up), IPC and processes (the kernel kills what is left
  together with the candidate), in a user namespace if the trainer is not root;
- a system call filter: no sockets, no new processes or threads, no signals, no ptrace, no mounts;
- without the mount namespace, Landlock file rules (only the standard library) and no writing to files at all;
- nobody instead of root, no capabilities, memory hidden from other processes, an empty environment, standard streams
  on /dev/null, limits on CPU time, memory, file size, open files and processes.

The kernel limits CPU time, so a verdict does not depend on the machine's other load. The wall clock is enforced by the
judge, again by the fork server and again here. Code runs only in the namespaces and behind the filter, unless the
configuration accepts less (`ISOLATIONS`); with neither, no code is run.

Limits: functions are called with copies, so tests see no in-place changes to arguments; results that are not plain
values (instances of the completion's classes, functions) are true or false and equal nothing; only the standard
library can be imported; a function can recognize arguments that its prompt shows. With neither namespaces nor
Landlock, the candidate can read what its user can read. Kernel bugs are not defended against: use a virtual machine
for that.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput
from reward.pool import process_wide
from reward.sandbox_pipe import failed, read_frame, write_frame

WALL_PER_CPU = 4.0  # waiting counts too, so it matters only if code sleeps or the machine is loaded
CHILD = Path(__file__).with_name("sandbox_child.py")
START_TIMEOUT_S = 120.0
MAX_VERDICT_BYTES = 1 << 20
BACKSTOP_S = 120.0  # beyond the limits inside: only a broken fork server takes this long
MEMORY_MIB = 512
NAMESPACES = frozenset({"mount", "net", "ipc", "pid"})
# What a configuration may ask for: to the levels (`Isolation.level`) that it accepts.
ISOLATIONS = {
    "full": ("full",),
    "confined": ("full", "namespaces", "confined"),
    "any": ("full", "namespaces", "confined", "filter"),
}
# Files of the kernel that forbid namespaces to a user: to the value that does, and the command that allows them.
SWITCHES = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=1000"),
}
CONTAINER_FLAGS = "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"


@dataclass(frozen=True)
class Job:
    """A completion's code and the tests it must pass. `prompt` and `setup` are trusted code.

    `prompt` runs before the completion and before the tests (imports, helper functions, the signature to complete);
    `setup` runs only before the tests, out of the completion's reach. `names` are the completion's functions that the
    tests call. `shown` is a function of the code that is called without arguments instead of any test; its text is
    returned.
    """

    code: str
    tests: tuple[str, ...]
    names: tuple[str, ...]
    setup: str = ""
    prompt: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Outcome:
    """How many tests passed, and why not all: "wrong", "timeout", "died", "syntax", "output", an exception's name…

    "sandbox" (the isolation or one of its processes failed) and "gold" (the tests cannot run) do not count as a score.
    """

    passed: int
    total: int
    reason: str
    error: str = ""
    shown: str = ""  # what `Job.shown` returned

    @property
    def decided(self) -> bool:
        return self.reason not in ("sandbox", "judge", "gold")


@dataclass(frozen=True)
class Isolation:
    """The isolation in force (`parts`), and which stronger sets were tried and the kernel's error for each."""

    parts: tuple[str, ...]
    missing: tuple[str, ...] = field(default=(), compare=False)

    @property
    def level(self) -> str:
        """One of "full", "namespaces" (without the filter), "confined" (filter and file rules) and "filter" alone.

        Only with the last can files outside the standard library be read.
        """
        if set(self.parts) >= NAMESPACES:
            return "full" if "seccomp" in self.parts else "namespaces"
        return "confined" if "landlock" in self.parts else "filter"

    def lacks(self, asked: str) -> str:
        """What this isolation lacks of the asked one (`ISOLATIONS`), with the kernel's error and how to enable it;
        empty if it suffices."""
        if self.level in ISOLATIONS[asked]:
            return ""
        spaces = sorted(NAMESPACES - set(self.parts))
        lacking = [f"the namespaces {', '.join(spaces)}"] if spaces else []
        lacking += ["the system call filter (seccomp)"] if "seccomp" not in self.parts else []
        lacking += ["file rules (landlock)"] if asked == "confined" else []
        errors = "; ".join(self.missing[:2]) or "no error"
        return f"this machine lacks {' and '.join(lacking)} ({errors}). {enabling()}"

    def describe(self) -> str:
        """One line for the log."""
        text = f"code sandbox: isolation {self.level} ({', '.join(self.parts)})"
        if not {"mount", "landlock"} & set(self.parts):
            text += "; tested code can read the files and, without a namespace, the processes that its user can read"
        return text


def enabling() -> str:
    """How to allow namespaces here, as far as this machine shows what forbids them."""
    found = []
    for file, (value, command) in SWITCHES.items():
        with contextlib.suppress(OSError):
            if Path(file).read_text().strip() == value:
                found.append(command)
    if found:
        return f"Allow user namespaces, as root: {'; '.join(found)}."
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return f"Start the container with {CONTAINER_FLAGS}."
    return "Start as root or allow user namespaces; a container needs " + CONTAINER_FLAGS + "."


class _Server:
    """A fork server and its two pipes."""

    def __init__(self, timeout_s: float, memory_mib: int, refused: Sequence[str]):
        self.scratch = Path(tempfile.gettempdir()) / f"code-sandbox-{os.getpid()}-{id(self):x}"
        how: dict[str, Any] = {
            "timeout_s": timeout_s,
            "wall_s": WALL_PER_CPU * timeout_s,
            "memory_bytes": memory_mib << 20,
        }
        how |= {"refused": list(refused), "scratch": str(self.scratch)}
        environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(CHILD), str(os.getpid()), json.dumps(how)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        os.set_blocking(self.process.stderr.fileno(), False)
        try:
            hello = self._read(time.monotonic() + START_TIMEOUT_S)
        except (EOFError, TimeoutError, ValueError) as error:
            tail = self._tail()
            self.kill()
            raise BadInput(f"the code sandbox does not start: {type(error).__name__}. Last output: {tail}") from None
        self.isolation = Isolation(tuple(hello["isolation"]), tuple(hello["missing"]))

    def judge(self, job: Job, backstop_s: float) -> dict:
        """Return the judge's verdict as written; `EOFError`, `TimeoutError` or `OSError` if the server is broken."""
        deadline = time.monotonic() + backstop_s
        write_frame(self.process.stdin.fileno(), json.dumps(asdict(job)).encode(), deadline)
        return self._read(deadline)

    def _read(self, deadline: float) -> dict:
        return json.loads(read_frame(self.process.stdout.fileno(), MAX_VERDICT_BYTES, deadline))

    def _tail(self) -> str:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.process.stderr.fileno(), 1 << 16).decode(errors="replace")[-2000:].strip()
        return ""

    def kill(self) -> None:
        """Kill the server; its children die with it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


class Sandbox:
    """Up to `workers` fork servers; a job has `timeout_s` CPU time, four times that by the clock, and `memory_mib`.

    Servers start with the first jobs and stay. Callable from any thread, one batch at a time; after a fork the child
    starts its own servers. `isolation` is the least that is accepted (`ISOLATIONS`): on a machine that allows less,
    every use is a `BadInput`. `refused` excludes parts of the isolation, for tests.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_mib: int = MEMORY_MIB,
        isolation: str = "full",
        refused: Sequence[str] = (),
    ):
        if workers < 1 or timeout_s <= 0 or memory_mib < 64:
            raise BadInput(
                f"the code sandbox needs at least 1 worker (not {workers}), a time limit above 0 (not {timeout_s}) "
                f"and at least 64 MiB of memory (not {memory_mib})."
            )
        if not sys.platform.startswith("linux"):
            raise BadInput(f"the code sandbox needs Linux, this is {sys.platform}.")
        self.workers, self.timeout_s, self.memory_mib, self.refused = workers, timeout_s, memory_mib, tuple(refused)
        self.least = isolation
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self.workers)  # of run_one
        self._idle: list[_Server] = []
        self._all: list[_Server] = []
        self._isolation: Isolation | None = None

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Return an `Outcome` for every job, in order, the same for any number of workers; equal jobs run once."""
        if self._owner != os.getpid():  # after a fork the pipes belong to the parent
            self._reset()
        with self._lock:
            distinct = list(dict.fromkeys(jobs))
            outcomes: dict[Job, Outcome] = {}
            errors: list[BaseException] = []
            waiting = iter(distinct)
            turn = threading.Lock()

            def work() -> None:
                try:
                    while not errors:
                        with turn:
                            job = next(waiting, None)
                        if job is None:
                            return
                        outcomes[job] = self._run_one(job)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.workers, len(distinct)))]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:  # Ctrl-C: a half-read verdict must not reach the next batch
                errors.append(KeyboardInterrupt())
                self._stop()
                raise
        if errors:
            raise errors[0]
        return [outcomes[job] for job in jobs]

    def run_one(self, job: Job) -> Outcome:
        """The `Outcome` of a job, once fewer than `workers` others run; callable from several threads."""
        if self._owner != os.getpid():
            self._reset()
        with self._slots:
            return self._run_one(job)

    def _run_one(self, job: Job) -> Outcome:
        for _ in range(2):  # a broken server is replaced, once
            server = self._take()
            try:
                verdict = server.judge(job, WALL_PER_CPU * self.timeout_s + BACKSTOP_S)
            except (EOFError, TimeoutError, OSError, ValueError) as error:
                verdict = failed("sandbox", error=type(error).__name__, leaving=True)
            if verdict.pop("leaving", False):
                self._discard(server)
            else:
                self._idle.append(server)
            texts = verdict.get("error", ""), verdict.get("shown", "")
            outcome = Outcome(verdict["passed"], verdict["total"], verdict["reason"], *texts)
            if outcome.reason not in ("sandbox", "judge"):
                return outcome
        return outcome

    def _take(self) -> _Server:
        with contextlib.suppress(IndexError):
            while True:
                server = self._idle.pop()
                if server.process.poll() is None:
                    return server
                self._discard(server)
        server = _Server(self.timeout_s, self.memory_mib, self.refused)
        if lacking := server.isolation.lacks(self.least):
            server.kill()
            raise BadInput(
                f"the code sandbox runs no code: it needs isolation {self.least!r}, and {lacking} Or accept less with "
                "reward.options.code.isolation (for the tool python environment.isolation): confined keeps code from "
                "files and network by weaker means, any also runs code that can read this user's files."
            )
        self._all.append(server)
        self._isolation = self._isolation or server.isolation
        return server

    def _discard(self, server: _Server) -> None:
        with contextlib.suppress(ValueError):
            self._all.remove(server)
        server.kill()

    def isolation(self) -> Isolation:
        """The isolation in force, determined by starting a server if none has run yet."""
        if self._owner != os.getpid():
            self._reset()
        with self._lock:
            if self._isolation is None:
                self._idle.append(self._take())
            return self._isolation

    def pids(self) -> list[int]:
        """Process ids of the live fork servers."""
        return [server.process.pid for server in self._all]

    def close(self) -> None:
        """End all servers. The sandbox can be used again afterwards."""
        if self._owner == os.getpid():
            with self._lock:
                self._stop()

    def _stop(self) -> None:
        self._idle.clear()
        while self._all:
            self._all.pop().kill()


_announced = False


def shared_sandbox(
    workers: int = 2, timeout_s: float = 5.0, memory_mib: int = MEMORY_MIB, isolation: str = "full"
) -> Sandbox:
    """The process-wide sandbox with these settings. The first call prints the isolation in force; `BadInput` if it is
    less than asked for."""
    sandbox = process_wide(Sandbox, workers, timeout_s, memory_mib, isolation)
    _announce(sandbox)
    return sandbox


def isolation_level(least: str = "any") -> dict[str, object]:
    """The isolation that this machine allows, for a run's record: level, parts, and why it is not stronger; `BadInput`
    if it is less than `least`.

    Prints it unless already printed. Takes a fraction of a second and leaves no process.
    """
    sandbox = Sandbox(1, isolation=least)
    try:
        found = sandbox.isolation()
        _announce(sandbox)
    finally:
        sandbox.close()
    return {"level": found.level, "parts": list(found.parts), "missing": list(found.missing)}


def _announce(sandbox: Sandbox) -> None:
    global _announced
    if not _announced:
        _announced = True
        if os.environ.get("RANK", "0") == "0":
            print(sandbox.isolation().describe(), flush=True)
