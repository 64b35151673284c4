"""Distribute the generation requests of a step over the replicas: by load, long prompts first, each answer used once.

Requests run in their own threads and never write a result: they pass it to the loop in `run`, which accepts an answer
only from the attempt in flight for its prompt. Late answers of abandoned attempts are dropped.
"""

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kit.core.errors import CheckFailed, KitError
from kit.rollout.replica import CONTINUE, Replica, ReplicaError, Sample, silences

RETRY_AFTER_S = 1.0  # delay before retrying on the same replica; another one is tried at once

# (replica, id of the attempt, token ids of the prompt) -> the group's samples
Ask = Callable[[Replica, str, list[int]], list[Sample]]


class GenerationFailed(KitError):
    """A prompt that no attempt could complete; `errors` are those of its attempts, in order."""

    def __init__(self, prompt_tokens: int, errors: list[ReplicaError]):
        self.prompt_tokens, self.errors = prompt_tokens, errors
        super().__init__("; then ".join(dict.fromkeys(map(str, errors))))


@dataclass
class _Task:
    """One prompt: its row in the batch and the outcome of its attempts."""

    row: int
    errors: list[ReplicaError] = field(default_factory=list)
    not_before: float = 0.0
    last: int | None = None


@dataclass
class _Attempt:
    task: _Task
    place: int  # index of the replica
    deadline: float


class Dispatcher:
    """Send prompts to replicas and collect the samples in order.

    `capacity[i]` is the number of prompts that replica i can generate at once; load is measured relative to it.
    `late_answers` counts answers that arrived after their attempt was abandoned.
    """

    def __init__(
        self, replicas: list[Replica], capacity: list[float], retries: int, max_in_flight: int, timeout_s: float
    ):
        self.replicas, self.capacity, self.retries = replicas, capacity, retries
        # Prompts beyond twice the total capacity would only queue on a replica, where no other can take them over.
        self.most = max(1, min(max_in_flight, int(2 * sum(capacity))))
        self.timeout_s, self.late_answers = timeout_s, 0
        self._serial = itertools.count()

    def run(self, prompts: list[list[int]], ask: Ask, name: str) -> list[list[Sample]]:
        """Return the samples of every prompt, in the order of `prompts`.

        `GenerationFailed` as soon as one prompt has failed `1 + retries` times, or once in a way that a retry cannot
        fix; any other error of `ask` is re-raised. Requests still in flight are then abandoned.
        """
        # Long prompts first: the last one to finish then costs least.
        ready = deque(_Task(row) for row in sorted(range(len(prompts)), key=lambda row: -len(prompts[row])))
        waiting: list[_Task] = []
        answers: list[list[Sample] | None] = [None] * len(prompts)
        running: dict[str, _Attempt] = {}
        down: set[int] = set()
        results: queue.SimpleQueue = queue.SimpleQueue()
        finished = threading.Event()
        for place in range(len(self.replicas)):
            threading.Thread(target=self._probe, args=(place, running, results, finished), daemon=True).start()
        try:
            while ready or waiting or running:
                now = time.monotonic()
                ready.extendleft(task for task in waiting if task.not_before <= now)
                waiting = [task for task in waiting if task.not_before > now]
                while ready and len(running) < self.most:
                    task = ready.popleft()
                    attempt = _Attempt(task, self._pick(running, down, task), now + self.timeout_s)
                    running[key := f"{name}-{next(self._serial)}"] = attempt
                    self._start(key, attempt, prompts[task.row], ask, results)
                for key, outcome in self._wait(results, running, down):
                    attempt = running.pop(key, None)
                    if attempt is None:
                        self.late_answers += 1
                    elif isinstance(outcome, list):
                        answers[attempt.task.row] = outcome
                    else:
                        waiting.append(self._failed(attempt, outcome, len(prompts[attempt.task.row]), down))
        finally:
            finished.set()
        return answers

    def _start(self, key: str, attempt: _Attempt, prompt: list[int], ask: Ask, results: queue.SimpleQueue) -> None:
        replica = self.replicas[attempt.place]

        def request() -> None:
            try:
                results.put((key, ask(replica, key, prompt)))
            except Exception as error:
                results.put((key, error))

        # Not a pool: its threads are joined at exit, and a hanging request would keep the run alive.
        threading.Thread(target=request, daemon=True).start()

    def _pick(self, running: dict[str, _Attempt], down: set[int], task: _Task) -> int:
        """Pick the replica with the least load; after a failed attempt, a different one if possible."""
        load = [0] * len(self.replicas)
        for attempt in running.values():
            load[attempt.place] += 1
        places = [place for place in range(len(self.replicas)) if place not in down] or [*range(len(self.replicas))]
        others = [place for place in places if place != task.last] or places
        return min(others, key=lambda place: (load[place] / self.capacity[place], place))

    def _wait(self, results: queue.SimpleQueue, running: dict[str, _Attempt], down: set[int]) -> list[tuple]:
        """Return finished attempts as (attempt, samples or error), including those past their deadline or on a dead
        replica."""
        now = time.monotonic()
        found = []
        try:
            key, outcome = results.get(timeout=0.5)
            if isinstance(key, int):
                down.add(key)
                found = [(name, outcome) for name, attempt in running.items() if attempt.place == key]
            else:
                found = [(key, outcome)]
        except queue.Empty:
            pass
        for key, attempt in running.items():
            if now > attempt.deadline and all(key != name for name, _ in found):
                url = self.replicas[attempt.place].url
                found.append((key, ReplicaError(url, "generate", f"no answer within {self.timeout_s:g} s")))
        return found

    def _failed(self, attempt: _Attempt, error: Exception, tokens: int, down: set[int]) -> _Task:
        """Return the task to retry; raise if it must not be retried."""
        task = attempt.task
        if not isinstance(error, ReplicaError):
            raise error
        if error.is_conflict:
            raise CheckFailed(f"{error} {CONTINUE}")
        task.errors.append(error)
        if not error.retry or len(task.errors) > self.retries:
            raise GenerationFailed(tokens, task.errors)
        if error.status is None:
            down.add(attempt.place)
        task.last = attempt.place
        if len(down) >= len(self.replicas) or len(self.replicas) == 1:
            task.not_before = time.monotonic() + RETRY_AFTER_S
        return task

    def _probe(
        self, place: int, running: dict[str, _Attempt], results: queue.SimpleQueue, finished: threading.Event
    ) -> None:
        def has_work() -> bool:
            return any(attempt.place == place for attempt in list(running.values()))

        for error in silences(self.replicas[place], "generate", has_work, finished):
            results.put((place, error))
