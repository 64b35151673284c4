"""Distribute generation requests over the replicas: by load, near their cached prefix, each answer used once.

`Dispatcher.open` accepts requests from any thread and any asyncio loop while others are in flight, such as the turns
of many episodes; `Dispatcher.run` sends a fixed set and returns its answers in order.

One thread schedules, and only it changes the state: requests run in threads of their own and pass their outcome to it
as an event. It accepts an answer only from the attempt in flight for its request; late answers of abandoned attempts
are dropped.
"""

import contextlib
import functools
import heapq
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from kit.core.errors import CheckFailed, KitError
from kit.core.progress import beat
from kit.rollout.replica import CONTINUE, Hangs, Replica, ReplicaError, Sample, silences

RETRY_AFTER_S = 1.0  # delay before retrying on the same replica; another one is tried at once
TICK_S = 0.5  # how often deadlines and delayed retries are looked at
# A request leaves the replica that has its prefix cached when that one's load, as a share of its capacity, is above
# twice the smallest plus this: computing the prefix again costs less than waiting there.
MORE_LOADED = 0.125

# (replica, id of the attempt, token ids of the prompt) -> the samples
Ask = Callable[[Replica, str, list[int]], list[Sample]]
# (replica, its error, whether only another process can help) -> done once it serves again
BringBack = Callable[[Replica, ReplicaError, bool], "Future[None]"]


class GenerationFailed(KitError):
    """A prompt that no attempt could complete; `errors` are those of its attempts, in order."""

    def __init__(self, prompt_tokens: int, errors: list[ReplicaError]):
        self.prompt_tokens, self.errors = prompt_tokens, errors
        super().__init__("; then ".join(dict.fromkeys(map(str, errors))))


@dataclass(order=True)
class _Task:
    """One request and the outcome of its attempts. The smallest `order` is sent first."""

    order: tuple[float, int]
    prompt: list[int] = field(compare=False)
    ask: Ask = field(compare=False)
    home: Hashable = field(compare=False)
    future: Future = field(compare=False, default_factory=Future)
    errors: list[ReplicaError] = field(compare=False, default_factory=list)
    not_before: float = field(compare=False, default=0.0)
    last: int | None = field(compare=False, default=None)


@dataclass
class _Attempt:
    task: _Task
    place: int  # index of the replica
    deadline: float


class Dispatcher:
    """Send prompts to replicas and collect the samples.

    `capacity[i]` is the number of prompts that replica i can generate at once; load is measured relative to it.
    `late_answers` counts answers that arrived after their attempt was abandoned. With `bring_back`, a replica that
    fails gets no requests until it is back, and its own are sent again; without, failures end the run.
    """

    def __init__(
        self,
        replicas: list[Replica],
        capacity: list[float],
        retries: int,
        max_in_flight: int,
        timeout_s: float,
        bring_back: BringBack | None = None,
    ):
        self.replicas, self.capacity, self.retries = replicas, capacity, retries
        self.bring_back = bring_back
        # Prompts beyond twice the total capacity would only queue on a replica, where no other can take them over.
        self.most = max(1, min(max_in_flight, int(2 * sum(capacity))))
        self.timeout_s, self.late_answers = timeout_s, 0
        self.serial = itertools.count()

    def run(self, prompts: list[list[int]], ask: Ask, name: str) -> list[list[Sample]]:
        """Return the samples of every prompt, in the order of `prompts`; errors are those of `Requests`."""
        with self.open(name) as requests:
            return [future.result() for future in requests.submit_all(prompts, ask)]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator["Requests"]:
        """Accept requests until the block ends; `name` starts the ids of their attempts."""
        requests = Requests(self, name)
        try:
            yield requests
        finally:
            requests.close()


class Requests:
    """Requests of an open dispatcher. Thread-safe.

    One failure ends all: once a request has failed `1 + retries` times, or once in a way that a retry cannot fix,
    every pending and later request raises `GenerationFailed`; any other error of an `ask` is re-raised in the same
    way. Requests still in flight are then abandoned, as they are at the end. With `bring_back`, only a refusal and a
    replica that does not come back end all.
    """

    def __init__(self, dispatcher: Dispatcher, name: str):
        self._dispatcher, self._name = dispatcher, name
        self._lock = threading.Lock()  # guards the next two
        self._pending: set[Future] = set()
        self._error: BaseException | None = None
        # The rest is read and changed in the scheduling thread only, except that probes read `_running`.
        self._ready: list[_Task] = []  # a heap
        self._delayed: list[_Task] = []
        self._running: dict[str, _Attempt] = {}
        self._down: set[int] = set()
        self._recovering: set[int] = set()
        self._homes: dict[Hashable, int] = {}
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._finished = threading.Event()
        threads = [(self._schedule, ())] + [(self._probe, (place,)) for place in range(len(dispatcher.replicas))]
        for work, arguments in threads:
            threading.Thread(target=work, args=arguments, daemon=True).start()

    def submit(self, prompt: list[int], ask: Ask, home: Hashable = None) -> "Future[list[Sample]]":
        """Request the samples of one prompt. Requests with the same `home` share a prefix, so they go to the same
        replica unless it is down or clearly more loaded than another. A request that is cancelled before it was sent
        never is."""
        return self._put([self._task(prompt, ask, home)])[0]

    def submit_all(self, prompts: list[list[int]], ask: Ask) -> "list[Future[list[Sample]]]":
        """Request the samples of these prompts, in their order."""
        return self._put([self._task(prompt, ask, None) for prompt in prompts])

    def close(self) -> None:
        """Abandon what is in flight; pending requests raise."""
        self._end(RuntimeError("the requests of this step were closed"))

    def _task(self, prompt: list[int], ask: Ask, home: Hashable) -> _Task:
        # Long prompts first: the last one to finish then costs least.
        return _Task((-len(prompt), next(self._dispatcher.serial)), prompt, ask, home)

    def _put(self, tasks: list[_Task]) -> list[Future]:
        futures = [task.future for task in tasks]
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending.update(futures)
        for future in futures:
            future.add_done_callback(self._forget)

        def make_ready() -> None:
            for task in tasks:
                heapq.heappush(self._ready, task)

        self._events.put(make_ready)
        return futures

    def _forget(self, future: Future) -> None:
        with self._lock:
            self._pending.discard(future)

    def _end(self, error: BaseException) -> None:
        """Raise `error` from every pending and later request; a no-op after the first."""
        with self._lock:
            if self._error is not None:
                return
            self._error, pending = error, [*self._pending]
        self._finished.set()
        self._events.put(lambda: None)  # wakes the scheduling thread
        for future in pending:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)

    def _schedule(self) -> None:
        try:
            while not self._finished.is_set():
                self._start_ready()
                try:
                    event = self._events.get(timeout=TICK_S if self._running or self._delayed else None)
                except queue.Empty:
                    pass
                else:
                    event()
                self._expire()
        except BaseException as error:
            self._end(error)

    def _start_ready(self) -> None:
        now = time.monotonic()
        for task in self._delayed:
            if task.not_before <= now:
                heapq.heappush(self._ready, task)
        self._delayed = [task for task in self._delayed if task.not_before > now]
        while self._ready and len(self._running) < self._dispatcher.most and self._has_replica():
            task = heapq.heappop(self._ready)
            if not task.future.cancelled():
                self._start(task, now)

    def _has_replica(self) -> bool:
        """Whether a replica can be asked. Without `bring_back` one that is down is asked again."""
        return self._dispatcher.bring_back is None or len(self._down) < len(self._dispatcher.replicas)

    def _start(self, task: _Task, now: float) -> None:
        attempt = _Attempt(task, self._pick(task), now + self._dispatcher.timeout_s)
        key = f"{self._name}-{next(self._dispatcher.serial)}"
        self._running[key] = attempt
        if task.home is not None:
            self._homes[task.home] = attempt.place
        replica = self._dispatcher.replicas[attempt.place]

        def request() -> None:
            outcome: Any
            try:
                outcome = task.ask(replica, key, task.prompt)
            except Exception as error:
                outcome = error
            self._events.put(lambda: self._answered(key, outcome))

        # Not a pool: its threads are joined at exit, and a hanging request would keep the run alive.
        threading.Thread(target=request, daemon=True).start()

    def _pick(self, task: _Task) -> int:
        """Pick the replica that has the prefix, unless it is clearly more loaded, or the one with the least load;
        after a failed attempt, a different one if possible."""
        count, capacity = [0] * len(self._dispatcher.replicas), self._dispatcher.capacity
        for attempt in self._running.values():
            count[attempt.place] += 1
        load = [requests / most for requests, most in zip(count, capacity, strict=True)]
        places = [place for place in range(len(load)) if place not in self._down] or [*range(len(load))]
        others = [place for place in places if place != task.last] or places
        least = min(others, key=lambda place: (load[place], place))
        home = self._homes.get(task.home)
        return home if home in others and load[home] <= 2 * load[least] + MORE_LOADED else least

    def _answered(self, key: str, outcome: Any) -> None:
        """Use the outcome of an attempt, samples or error."""
        beat()
        attempt = self._running.pop(key, None)
        if attempt is None:
            self._dispatcher.late_answers += 1
        elif isinstance(outcome, Exception):
            self._failed(attempt, outcome)
        else:
            with contextlib.suppress(InvalidStateError):  # cancelled in the meantime
                attempt.task.future.set_result(outcome)

    def _expire(self) -> None:
        """Fail the attempts that are past their deadline."""
        now = time.monotonic()
        for key, attempt in [*self._running.items()]:
            if now > attempt.deadline:
                url = self._dispatcher.replicas[attempt.place].url
                text = f"no answer within {self._dispatcher.timeout_s:g} s"
                self._answered(key, Hangs(url, "generate", text))

    def _failed(self, attempt: _Attempt, error: Exception) -> None:
        """Retry the request; raise if it must not be retried."""
        task, bring_back = attempt.task, self._dispatcher.bring_back
        if not isinstance(error, ReplicaError):
            raise error
        if error.is_conflict and bring_back is None:
            raise CheckFailed(f"{error} {CONTINUE}")
        task.errors.append(error)
        if error.status is None:
            self._down.add(attempt.place)
        is_spent = not error.retry or len(task.errors) > self._dispatcher.retries
        if bring_back and (error.is_conflict or (not error.is_refusal and (is_spent or error.status is None))):
            self._begin_recovery(attempt.place, error, is_spent and not error.is_conflict, bring_back)
            task.errors = [] if is_spent else task.errors
            is_spent = False
        if task.future.cancelled():
            return
        if is_spent:
            raise GenerationFailed(len(task.prompt), task.errors)
        task.last = attempt.place
        task.order = (-math.inf, task.order[1])  # before all others
        replicas = self._dispatcher.replicas
        if len(self._down) >= len(replicas) or len(replicas) == 1:
            task.not_before = time.monotonic() + RETRY_AFTER_S
        self._delayed.append(task)

    def _begin_recovery(self, place: int, error: ReplicaError, is_final: bool, bring_back: BringBack) -> None:
        """Send nothing to a replica until it is back."""
        self._down.add(place)
        if place not in self._recovering:
            self._recovering.add(place)
            future = bring_back(self._dispatcher.replicas[place], error, is_final)
            future.add_done_callback(lambda done: self._events.put(functools.partial(self._is_back, place, done)))

    def _is_back(self, place: int, done: "Future[None]") -> None:
        done.result()
        self._recovering.discard(place)
        self._down.discard(place)

    def _silent(self, place: int, error: ReplicaError) -> None:
        """Give up a replica that hangs, with all its requests."""
        self._down.add(place)
        for key, attempt in [*self._running.items()]:
            if attempt.place == place:
                self._answered(key, error)

    def _probe(self, place: int) -> None:
        def has_work() -> bool:
            return any(attempt.place == place for attempt in list(self._running.values()))

        for error in silences(self._dispatcher.replicas[place], "generate", has_work, self._finished):
            self._events.put(functools.partial(self._silent, place, error))
