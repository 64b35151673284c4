"""Killable worker processes for answer comparison: a wall-clock limit per sample, and a budget for unknowns.

A fork server runs `reward/worker.py` in an interpreter of its own. It is not a `multiprocessing` child, because spawn
would import the training script again (torch, trl) and fork would copy a process that holds CUDA and threads. It
imports sympy once and forks a worker in milliseconds, so replacing a hung one costs no import. The parent watches the
clock; the server does the killing, because only it can know that a process id is still its child. There are no signal
handlers, so any thread may score. The server starts on the first answer that needs it and ends with its parent, even
if that is killed (see `worker.py`).
"""

import atexit
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kit.core.errors import BadInput, CheckFailed
from kit.core.progress import beat

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 120.0  # the server imports sympy first; on a loaded machine that takes seconds
EXAMPLES = 5
# Reason -> advice for samples that could not be computed.
ADVICE = {
    "timeout": "raise reward.timeout_s if these are sound answers on a slow machine",
    "gold": "fix these reference answers",
    "none": "find out why the function returned None or NaN for these",
    "late": "raise reward.request_timeout_s (the judge has a timeout_s of its own), or send fewer requests at once",
    "no connection": "check that the judge's server still runs",
    "no reply": "raise the judge's max_tokens if it thinks before it answers",
    "unparseable": "compare these replies with the judge's pattern, json_key and prompt_file",
    "off the scale": "state the scale in the judge's prompt_file",
    "too long": "raise the reward model's max_length, or lower rollout.max_completion_length",
}

Closable = TypeVar("Closable")
Task = tuple[str | None, str, str]  # predicted (None: only check the gold), gold, policy as JSON


@dataclass(frozen=True)
class Verdict:
    """True, False, or None for undecided, and why: "exact", "algebra", "timeout", "crash", "memory", "gold", …"""

    value: bool | None
    reason: str


class _Server:
    """The interpreter that forks workers, and the socket to it."""

    def __init__(self, command: list[str], timeout_s: float):
        self.stderr = tempfile.TemporaryFile()
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(timeout_s)],
                stdin=theirs.fileno(),
                stdout=self.stderr,
                stderr=self.stderr,
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # the trainer handles Ctrl-C in the terminal
            )
        self.control.settimeout(START_TIMEOUT_S)

    def ask(self, request: bytes, descriptors: tuple[int, ...] = ()) -> bytes:
        """Send a request and return the one-line answer; OSError if the server is gone or does not answer."""
        if request:
            socket.send_fds(self.control, [request], descriptors)
        answer = b""
        while not answer.endswith(b"\n"):
            data = self.control.recv(64)
            if not data:
                raise OSError("the fork server has ended")
            answer += data
        return answer.strip()

    def stop(self) -> str:
        """End the server and its workers now; return the tail of their stderr."""
        with contextlib.suppress(OSError):
            self.ask(b"stop\n")
        self.control.close()
        self.process.kill()
        self.process.wait()
        self.stderr.seek(0)
        tail = self.stderr.read().decode(errors="replace")[-2000:].strip()
        self.stderr.close()
        return tail


class _Worker:
    """One forked worker: its process id and the socket to it."""

    def __init__(self, server: _Server):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.pid = int(server.ask(b"fork\n", (theirs.fileno(),)))
        self.buffer = b""
        self.task: Task | None = None
        self.deadline = 0.0

    def send(self, task: Task, timeout_s: float) -> None:
        # At most 2 x 4,096 characters: fits in the socket's buffer, so this never blocks on a stuck worker.
        self.task, self.deadline = task, time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # a dead worker is detected when its socket is read
            self.socket.sendall(json.dumps(task).encode() + b"\n")

    def read(self) -> dict | None:
        """The reply that has arrived; {} if it is not complete yet, None if the worker has died."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        self.buffer += data
        if not self.buffer.endswith(b"\n"):
            return {}
        line, self.buffer = self.buffer, b""
        return json.loads(line)

    def is_dead(self) -> bool:
        """Whether an idle worker has exited."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class WorkerPool:
    """Up to `workers` processes that compare answers, with `timeout_s` seconds of wall clock per pair.

    A worker that hangs or dies is replaced and its pair is undecided. Safe to call from any thread (one batch at a
    time); after a fork the child starts its own workers. `counts` holds how often each reason occurred.
    """

    def __init__(self, workers: int = 2, timeout_s: float = 2.0, command: list[str] | None = None):
        if workers < 1 or timeout_s <= 0:
            raise BadInput(
                f"reward.workers ({workers}) must be at least 1 and reward.timeout_s ({timeout_s}) above 0."
            )
        self.workers, self.timeout_s = workers, timeout_s
        # -P: without it the script's folder leads sys.path and `import math` finds reward/math.py.
        self.command = command or [sys.executable, "-P", str(WORKER)]
        self.counts: Counter[str] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._live: list[_Worker] = []
        self._server: _Server | None = None

    def compare(self, pairs: list[tuple[str | None, str]], policy: str = "") -> list[Verdict]:
        """Return a `Verdict` for every (predicted, gold) pair, in order, the same for any number of workers.

        A pair without a prediction asks whether the gold can be parsed. `policy` is a `reward.exact.Policy` as JSON.
        Equal pairs of a batch are compared once. Raises `BadInput` if no worker can be started.
        """
        if self._owner != os.getpid():  # after a fork the pipes belong to the parent
            self._reset()
        with self._lock:
            decided = self._run(list(dict.fromkeys((*pair, policy) for pair in pairs)))
        verdicts = [decided[(*pair, policy)] for pair in pairs]
        self.counts.update(verdict.reason for verdict in verdicts)
        return verdicts

    def _run(self, tasks: list[Task]) -> dict[Task, Verdict]:
        waiting = deque(tasks)
        decided: dict[Task, Verdict] = {}
        try:
            while len(decided) < len(tasks):
                self._feed(waiting)
                self._collect(decided)
        except BaseException:
            self._stop()  # Ctrl-C or a failed start: a half-read reply must not reach the next batch
            raise
        return decided

    def _feed(self, waiting: deque) -> None:
        """Give every idle worker a task, forking workers while there are more tasks than workers."""
        for worker in [w for w in self._live if w.task is None and w.is_dead()]:
            self._end(worker)  # died while idle: no sample's fault
        busy = sum(worker.task is not None for worker in self._live)
        while len(self._live) < min(self.workers, busy + len(waiting)):
            self._live.append(self._forked())
        for worker in self._live:
            if waiting and worker.task is None:
                worker.send(waiting.popleft(), self.timeout_s)

    def _forked(self) -> _Worker:
        """Fork a new worker, first starting the server if there is none (any more)."""
        tail = ""
        for _ in range(3):
            try:
                if self._server is None:
                    self._server = _Server(self.command, self.timeout_s)
                    self._server.ask(b"")  # says "ready" once it has imported what the workers need
                return _Worker(self._server)
            except (OSError, ValueError) as error:
                tail = str(error)
                if self._server is not None:
                    tail = self._server.stop()
                    self._server = None
        raise BadInput(
            f"reward workers do not start (3 attempts). Command: {' '.join(self.command)}. "
            f"Install math-verify in this environment. Last output: {tail}"
        )

    def _collect(self, decided: dict) -> None:
        """Wait for a reply, a death or a deadline, and record the outcome."""
        active = [worker for worker in self._live if worker.task is not None]
        # poll, not select: select rejects file descriptors above 1023, which a trainer with many shards reaches.
        with selectors.PollSelector() as selector:
            for worker in active:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            wait_s = min(worker.deadline for worker in active) - time.monotonic()
            replied = [key.data for key, _ in selector.select(max(0.0, wait_s))]
        for worker in replied:
            self._book(worker, worker.read(), decided)
        now = time.monotonic()
        for worker in active:
            if worker in self._live and worker.task and worker.deadline <= now:
                self._replace(worker, "timeout", decided)

    def _book(self, worker: _Worker, reply: dict | None, decided: dict) -> None:
        beat()
        if reply is None:
            self._replace(worker, "crash", decided)
        elif "reason" in reply:
            decided[worker.task] = Verdict(reply["value"], reply["reason"])
            worker.task = None
            if reply.get("leaving"):
                self._end(worker)

    def _replace(self, worker: _Worker, reason: str, decided: dict) -> None:
        """End a worker and record its task as undecided; `_feed` forks a new one when there is work for it."""
        self._end(worker)
        decided[worker.task] = Verdict(None, reason)

    def _end(self, worker: _Worker) -> None:
        self._live.remove(worker)
        worker.socket.close()
        if self._server is None:
            return
        try:
            self._server.ask(f"kill {worker.pid}\n".encode())  # a pid of an earlier server is not its child: harmless
        except OSError:  # the server is gone; its other workers notice and exit
            self._server.stop()
            self._server = None

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.pid for worker in self._live]

    def close(self) -> None:
        """End all workers. The pool can be used again afterwards."""
        if self._owner == os.getpid():
            with self._lock:
                self._stop()

    def _stop(self) -> None:
        for worker in self._live:
            worker.socket.close()
        self._live.clear()
        if self._server is not None:
            self._server.stop()
            self._server = None


_shared: dict[tuple, Any] = {}
_shared_lock = threading.Lock()


def process_wide(kind: type[Closable], *settings: float | str) -> Closable:
    """The one instance of `kind` with these settings in this process, closed at exit."""
    with _shared_lock:
        key = (kind, *settings)
        if key not in _shared:
            _shared[key] = kind(*settings)
            atexit.register(_shared[key].close)
        return _shared[key]


def shared_pool(workers: int = 2, timeout_s: float = 2.0) -> WorkerPool:
    """The process-wide pool with these settings; reward functions share its workers."""
    return process_wide(WorkerPool, workers, timeout_s)


class UnknownBudget:
    """Stop a run whose reward is unknown too often: at most `max_fraction` of the last `window` samples.

    Until `minimum` samples have been seen the fraction is taken of `minimum`, so that one early hang does not end a
    run while a reward that always hangs ends it at once. `key` of the configuration is `max_fraction`; `what` says in
    an error what is unknown.
    """

    def __init__(
        self,
        name: str,
        max_fraction: float,
        window: int = 1024,
        minimum: int = 256,
        key: str = "reward.max_unknown_fraction",
        what: str = "reward {!r} could not be computed",
    ):
        if not 0.0 <= max_fraction <= 1.0:
            raise BadInput(f"{key} is {max_fraction}, expected 0 to 1.")
        self.name, self.max_fraction, self.minimum = name, max_fraction, minimum
        self.key, self.what = key, what.format(name)
        self.counts: Counter[str] = Counter()  # unknown samples by reason, over the whole run
        self._window: deque[str | None] = deque(maxlen=window)
        self._examples: deque[str] = deque(maxlen=EXAMPLES)

    def record(self, verdicts: list[Verdict], examples: list[str], extracted: Sequence[str | None] = ()) -> None:
        """Count a batch; raise `CheckFailed` with reasons and examples if the budget is exceeded.

        `extracted` are the answers that were judged, for a `reward.score.Explanation` in place of a budget.
        """
        for verdict, example in zip(verdicts, examples, strict=True):
            reason = verdict.reason if verdict.value is None else None
            self._window.append(reason)
            if reason is not None:
                self.counts[reason] += 1
                self._examples.append(f"{reason}: {example}")
        reasons = Counter(reason for reason in self._window if reason is not None)
        unknown, seen = reasons.total(), len(self._window)
        if unknown > self.max_fraction * max(seen, self.minimum):
            by_reason = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
            shown = "".join(f"\n  {example}" for example in self._examples)
            raise CheckFailed(
                f"{self.what} for {unknown} of the last {seen} samples ({by_reason}); "
                f"{self.key} allows {self.max_fraction:.2%} of {max(seen, self.minimum)}. "
                f"The last ones:{shown}\n{self._advice(reasons)}"
            )

    def _advice(self, reasons: Counter[str]) -> str:
        """Advice for these reasons, most frequent first."""
        known = [ADVICE[reason] for reason, _ in reasons.most_common() if reason in ADVICE]
        text = "; or ".join([*known, f"raise {self.key} to mask such samples"])
        return f"{text[0].upper()}{text[1:]}."
