"""How requests are spread: the order of prompts, how many are under way, where later turns go, and when a replica
counts as hanging."""

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kit.rollout.dispatch import Dispatcher, GenerationFailed
from kit.rollout.replica import ReplicaError, silences
from tests import processes


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
    ask = Requests(0.1)
    Dispatcher(replicas(len(capacity)), capacity, 0, max_in_flight, 60).run([[1]] * 12, ask, "v1")
    assert ask.most == most


def test_turns_of_an_asyncio_loop_go_on_while_another_episode_waits_for_its_answer():
    """An episode that is slow holds up nobody else, whatever thread asks."""
    release, turns = threading.Event(), []

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        if prompt == [0]:
            assert release.wait(30)
        turns.append(prompt[0])
        return [prompt[0]]

    async def episode(requests, number: int) -> int:
        samples = []
        for _ in range(3):
            samples += await asyncio.wrap_future(requests.submit([number], ask))
        if number == 3:
            release.set()
        return sum(samples)

    async def episodes(requests) -> list[int]:
        return await asyncio.gather(*(episode(requests, number) for number in range(4)))

    with Dispatcher(replicas(2), [4.0, 4.0], retries=0, max_in_flight=8, timeout_s=60).open("v1") as requests:
        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(lambda: requests.submit([9], ask).result(30)) for _ in range(4)]
            assert asyncio.run(episodes(requests)) == [0, 3, 6, 9]
        assert [one.result() for one in others] == [[9]] * 4
    assert turns.index(0) > turns.index(3), "the first prompt was answered after an episode had ended"
    assert Counter(turns) == {0: 3, 1: 3, 2: 3, 3: 3, 9: 4}


def placed(requests, homes: list) -> list[str]:
    """The replica that answers each of these requests, which are under way together."""
    under_way = threading.Barrier(len(homes), timeout=30)

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        under_way.wait()
        return [replica.url]

    return [one.result(30)[0] for one in [requests.submit([1], ask, home) for home in homes]]


def test_a_later_turn_goes_to_the_replica_that_has_its_prefix():
    with Dispatcher(replicas(3), [8.0] * 3, retries=0, max_in_flight=64, timeout_s=60).open("v1") as requests:
        first = placed(requests, ["a", "b", "c"])
        assert sorted(first) == ["http://0", "http://1", "http://2"]
        for homes in (["c", "b", "a"], ["b", "a"], ["a", "c"]):
            assert placed(requests, homes) == [first["abc".index(home)] for home in homes]
        assert placed(requests, [None, None]) == ["http://0", "http://1"], "else the load decides"


def test_a_turn_leaves_its_replica_when_that_one_is_clearly_more_loaded_and_stays_where_it_went():
    with Dispatcher(replicas(2), [8.0, 8.0], retries=0, max_in_flight=64, timeout_s=60).open("v1") as requests:
        assert placed(requests, ["a"]) == ["http://0"]
        # One request is an eighth of what each generates at once, two are more.
        assert placed(requests, ["a"] * 3) == ["http://0", "http://0", "http://1"]
        assert placed(requests, ["a"]) == ["http://1"]


def test_a_turn_whose_replica_died_goes_on_at_another_one():
    died = threading.Event()

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        if replica.url == "http://0" and died.is_set():
            raise ReplicaError(replica.url, "generate", "connection refused")
        return [replica.url]

    with Dispatcher(replicas(2), [8.0, 8.0], retries=1, max_in_flight=8, timeout_s=60).open("v1") as requests:
        answers = []
        for turn in range(4):
            if turn == 1:
                died.set()
            answers += requests.submit([1] * (1 + turn), ask, "episode").result(30)
    assert answers == ["http://0", "http://1", "http://1", "http://1"]


def test_one_failure_ends_all_requests_pending_and_later():
    release = threading.Event()

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        if prompt == [1]:
            raise ReplicaError(replica.url, "generate", "no KV cache left", 500)
        release.wait(30)
        return []

    with Dispatcher(replicas(1), [1.0], retries=0, max_in_flight=2, timeout_s=60).open("v1") as requests:
        pending = [requests.submit([number], ask) for number in (2, 1, 3)]  # the last is not sent
        for one in pending:
            with pytest.raises(GenerationFailed, match="no KV cache left"):
                one.result(20)
        with pytest.raises(GenerationFailed, match="no KV cache left"):
            requests.submit([4], ask)
    release.set()


def test_what_is_pending_when_the_step_ends_is_abandoned_and_what_was_cancelled_is_never_sent():
    release, asked = threading.Event(), []

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        asked.append(prompt)
        release.wait(30)
        return []

    with Dispatcher(replicas(1), [1.0], retries=0, max_in_flight=1, timeout_s=60).open("v1") as requests:
        first = requests.submit([1], ask)
        processes.wait_until(lambda: asked)
        cancelled, third = requests.submit([2], ask), requests.submit([3], ask)
        assert cancelled.cancel()
        release.set()
        assert first.result(20) == third.result(20) == []
        release.clear()
        last = requests.submit([4], ask)
    with pytest.raises(RuntimeError, match="were closed"):
        last.result(20)
    release.set()
    assert [2] not in asked


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
