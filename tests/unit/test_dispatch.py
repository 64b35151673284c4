"""How requests are spread: the order of prompts, how many are under way, and when a replica counts as hanging."""

import threading
import time
from types import SimpleNamespace

import pytest

from kit.rollout.dispatch import Dispatcher
from kit.rollout.replica import ReplicaError, silences


class Requests:
    """An `ask` that notes what runs at once."""

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.lock, self.now, self.most, self.asked = seconds, threading.Lock(), 0, 0, []

    def __call__(self, replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        with self.lock:
            self.asked.append(prompt)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        return [tuple(prompt)]


def replicas(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(url=f"http://{number}", info=lambda timeout_s: {}) for number in range(count)]


def test_long_prompts_are_sent_first_and_answers_keep_the_prompts_order():
    prompts, ask = [[1], [2] * 3, [3] * 2, [4] * 5], Requests()
    answers = Dispatcher(replicas(1), [1.0], retries=0, max_in_flight=1, timeout_s=60).run(prompts, ask, "v1")
    assert [len(prompt) for prompt in ask.asked] == [5, 3, 2, 1], "the last to finish then costs least"
    assert answers == [[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize(
    ("capacity", "max_in_flight", "most"), [([8.0, 8.0], 3, 3), ([1.0, 1.5], 64, 5), ([0.2], 9, 1)]
)
def test_no_more_is_under_way_than_allowed_or_twice_what_runs_at_once(capacity, max_in_flight, most):
    """What would only queue on a replica, no other could take over."""
    ask = Requests(0.02)
    Dispatcher(replicas(len(capacity)), capacity, 0, max_in_flight, 60).run([[1]] * 12, ask, "v1")
    assert ask.most == most


def test_a_replica_hangs_when_it_leaves_two_probes_in_a_row_unanswered_while_it_has_work(monkeypatch):
    monkeypatch.setattr("kit.rollout.replica.PROBE_EVERY_S", 0.001)
    states, seen, finished = [], 0, threading.Event()
    silent, busy, fine = None, 503, 200

    def info(timeout_s: float) -> dict:
        nonlocal seen
        status, seen = states[seen], seen + 1
        if status != fine:
            raise ReplicaError("http://one", "info", "no answer", status)
        return {}

    replica = SimpleNamespace(url="http://one", info=info)
    states += [silent, fine, silent, busy, fine, busy, busy, silent, silent]
    error = next(silences(replica, "generate", lambda: True, finished))
    assert seen == 9 and "takes requests and answers none" in str(error) and error.status is None
    asked = iter([True, False, True, False])
    states[:], seen = [silent, silent, silent, silent], 0

    def has_work() -> bool:
        work = next(asked, None)
        if work is None:
            finished.set()
        return bool(work)

    assert list(silences(replica, "generate", has_work, finished)) == [] and seen == 2, "idle in between"
