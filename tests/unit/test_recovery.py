"""A trainer whose replicas are started again (`launch.up --restarts`): what it waits for, what it asks for, and what
it does before a replica serves again."""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.rollout import recovery
from kit.rollout.dispatch import Dispatcher
from kit.rollout.generation import Generation
from kit.rollout.noise import Noise
from kit.rollout.recovery import Recovery
from kit.rollout.replica import Replica
from kit.rollout.restart_requests import Request, ask_for_restart, take_request
from kit.rollout.sync import AdapterSync
from tests import processes
from tests.unit.fake_replica import FakeReplica
from tests.unit.test_sync import CONFIG, Adapter, scores_of

GROUP = 2


class Kept:
    """Stand-in replicas on version 1, and what a `launch.up` would do with them."""

    def __init__(self, fakes: list[FakeReplica], sync: AdapterSync, run: RunDir):
        self.fakes, self.sync, self.run = fakes, sync, run
        self.requests: list[tuple[str, Request]] = []
        self.ended = threading.Event()
        threading.Thread(target=self._launch_up, daemon=True).start()

    def _launch_up(self) -> None:
        while not self.ended.wait(0.02):
            for fake in self.fakes:
                if (request := take_request(self.run, fake.url)) is not None and request.pid == fake.pid:
                    self.requests.append((fake.url, request))
                    if not fake.is_down:
                        fake.die()
                        time.sleep(0.1)
                    fake.come_back()

    def generate(self, prompts: int = 6) -> list[list[int]]:
        """The completions of these prompts, whose first token tells the prompt."""
        config, sync = self.sync.config.rollout, self.sync
        facts = config, self.run, sync.session, sync.served, [0], sync.recovery
        generation = Generation(sync.replicas, [16] * len(self.fakes), *facts)
        groups = generation.groups([[number, 1, 2] for number in range(prompts)], GROUP)
        return [sample.token_ids.tolist() for group in groups for sample in group]


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Iterator[Callable[..., Kept]]:
    monkeypatch.setattr(recovery, "POLL_S", 0.02)
    monkeypatch.setattr(recovery, "PATIENCE_S", 20)
    monkeypatch.setattr("kit.rollout.dispatch.RETRY_AFTER_S", 0.05)
    monkeypatch.setattr("kit.rollout.dispatch.TICK_S", 0.05)
    made: list[FakeReplica] = []
    started: list[Kept] = []

    def make(count: int, *overrides: str, wait_s: float = 60, timeout_s: float = 30, synced: bool = True) -> Kept:
        made.extend(FakeReplica() for _ in range(count))
        config = load_config(CONFIG, ["--run.name=run", f"--rollout.group_size={GROUP}", *overrides])
        run = RunDir(tmp_path)
        sync = AdapterSync([Replica(fake.url, timeout_s) for fake in made], config, run)
        sync.recovery = Recovery(sync.replicas, run, wait_s, sync.restore)
        sync.recovery.know({fake.url: {"pid": fake.pid} for fake in made})
        if synced:
            sync.publish(1, Adapter(), scores_of(1))
            sync.settle()
        started.append(Kept(made, sync, run))
        for fake in made:
            fake.calls.clear()
        return started[-1]

    yield make
    for one in started:
        one.ended.set()
    for fake in made:
        fake.stop()


EXPECTED = [[number, index] for number in range(6) for index in range(GROUP)]


def when(found: Callable[[], bool], then: Callable[[], None]) -> None:
    """Call `then` from a thread as soon as `found()` is true."""
    threading.Thread(target=lambda: processes.wait_until(found) and then(), daemon=True).start()


def after_return(fake: FakeReplica) -> list[str]:
    """What a replica was asked after it came back, without requests for its state."""
    return [action for action in fake.calls if action != "info"]


@pytest.mark.parametrize("count", [1, 2])
def test_requests_of_a_replica_that_dies_are_sent_again_and_answered_once(kept, count):
    it = kept(count)
    fake, dies = it.fakes[0], threading.Semaphore(1)
    fake.seconds_per_request = 0.3

    def die_at_the_third(body: dict) -> None:
        if fake.calls.count("generate") >= 3 and dies.acquire(blocking=False):
            fake.die()
            when(lambda: "info" in fake.calls, fake.come_back)  # it is looked for

    fake.before["generate"] = die_at_the_third
    assert it.generate() == EXPECTED
    it.sync.recovery.settle()
    assert it.fakes[0].served == (it.sync.session, 1) and it.requests == []


def test_a_replica_that_was_started_again_is_checked_by_the_canary_before_it_serves(kept):
    it = kept(1)
    it.fakes[0].come_back()  # nobody noticed that it was away
    it.fakes[0].calls.clear()
    assert it.generate() == EXPECTED
    asked = after_return(it.fakes[0])
    refused = asked.index("stage")
    assert set(asked[:refused]) == {"generate"} and asked[refused : refused + 3] == ["stage", "activate", "score"]
    assert Counter(asked[refused + 3 :])["generate"] == 6


def test_noise_is_put_back_on_a_replica_that_was_started_again(kept):
    it = kept(1, synced=False)
    it.sync.publish(1, Adapter(), scores_of(1), Noise(0.01, 7))
    it.fakes[0].come_back()
    it.fakes[0].noise = None
    assert it.generate() == EXPECTED
    assert it.fakes[0].noise == {"session": it.sync.session, "version": 1, "sigma": 0.01, "seed": 7}


def test_a_lost_connection_is_no_reason_for_a_restart(kept):
    it = kept(2)
    lost = threading.Semaphore(1)

    def lose(body: dict) -> None:
        if lost.acquire(blocking=False):
            raise ConnectionResetError

    it.fakes[0].before["generate"] = lose
    assert it.generate() == EXPECTED
    it.sync.recovery.settle()
    assert it.requests == [] and [fake.pid for fake in it.fakes] == [1, 1]


def hang_until_killed(it: Kept) -> Callable[[dict], None]:
    """Answer nothing as the process that it is now."""
    fake = it.fakes[0]

    def hang(body: dict | None) -> None:
        if fake.pid == 1:
            processes.wait_until(lambda: fake.pid != 1 or it.ended.is_set())
            raise ConnectionResetError

    return hang


def test_a_replica_that_answers_nothing_is_reported_with_its_process_and_started_again(kept, monkeypatch):
    monkeypatch.setattr("kit.rollout.replica.PROBE_EVERY_S", 0.05)
    monkeypatch.setattr("kit.rollout.replica.PROBE_TIMEOUT_S", 0.5)
    it = kept(1)
    it.fakes[0].before["generate"] = it.fakes[0].before["info"] = hang_until_killed(it)
    assert it.generate() == EXPECTED
    ((url, request),) = it.requests
    assert url == it.fakes[0].url and request.pid == 1 and "answers none, not even info" in request.reason


def test_an_engine_that_stands_still_behind_a_server_that_answers_is_reported_at_the_requests_limit(kept):
    it = kept(1, "--rollout.request_timeout_s=3")
    it.fakes[0].before["generate"] = hang_until_killed(it)
    assert it.generate() == EXPECTED
    assert [request.reason for _, request in it.requests] == ["no answer within 3 s"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((500, {"error": "the workers did not answer"}), "the workers did not answer"),
        ({"version": 7, "samples": []}, "sampled from adapter version 7, version 1 was asked for"),
        ({"version": 1, "samples": []}, "the answer is not what was asked for: 0 samples"),
        ({"version": 1}, "the answer is not of protocol"),
    ],
)
def test_a_replica_that_answers_wrongly_is_reported_and_started_again(kept, fault, reason):
    it = kept(1)
    it.fakes[0].before["generate"] = lambda body: fault if it.fakes[0].pid == 1 else None
    assert it.generate() == EXPECTED
    it.sync.recovery.settle()
    assert [(url, reason in request.reason) for url, request in it.requests] == [(it.fakes[0].url, True)]
    assert it.fakes[0].served == (it.sync.session, 1)


def test_a_refusal_ends_the_run_as_it_does_without_restarts(kept):
    it = kept(1)
    it.fakes[0].refuses["generate"] = (400, "n (2) is above the server's --max-num-seqs 1.")
    with pytest.raises(CheckFailed, match="above the server's --max-num-seqs"):
        it.generate()
    it.fakes[0].refuses["generate"] = (409, "The trainer of run other has it.")
    with pytest.raises(CheckFailed, match="The trainer of run other has it"):
        it.generate()
    assert it.requests == []


class Rewritten(Adapter):
    """Replaces a version that was written before, as the trainer's file does."""

    def write(self, directory: Path, version: int) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        return super().write(directory, version)


def publish(it: Kept, version: int) -> None:
    it.sync._publish_to_all(version, Rewritten(), scores_of(version))
    it.sync.settle()


@pytest.mark.parametrize("action", ["stage", "activate", "score"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_sync_waits_for_a_replica_that_fails_and_then_all_serve_the_version(kept, action, version):
    """The first version of a session has none before it."""
    it = kept(2, synced=version > 1)
    fake = it.fakes[1]

    def fail(body: dict) -> None:
        if fake.pid == 1:
            fake.die()
            threading.Timer(0.2, fake.come_back).start()
            raise ConnectionResetError

    fake.before[action] = fail
    publish(it, version)
    assert [one.served for one in it.fakes] == [(it.sync.session, version)] * 2 and it.sync.served == version
    ours = [[number for session, number in one.staged if session == it.sync.session] for one in it.fakes]
    assert ours == [[version]] * 2


@pytest.mark.parametrize("action", ["stage", "activate", "score"])
def test_a_sync_whose_answer_is_lost_is_made_again_without_a_restart(kept, action):
    """The replica has done what it was asked to: the version is staged, or served, already."""
    it = kept(2)
    fake, lost = it.fakes[1], threading.Semaphore(1)
    answer = fake.answer

    def cut(asked: str, body: dict, query: dict) -> tuple[int, dict]:
        found = answer(asked, body, query)
        if asked == action and lost.acquire(blocking=False):
            raise ConnectionResetError
        return found

    fake.answer = cut
    publish(it, 2)
    assert it.requests == [] and [one.served for one in it.fakes] == [(it.sync.session, 2)] * 2
    assert [one.versions for one in it.fakes] == [[2], [2]]


@pytest.mark.parametrize("lost", [["activate"] * 2, ["activate"] * 3, ["activate", "discard"]])
def test_a_sync_whose_answers_stay_lost_is_made_again_with_another_process(kept, lost):
    """The version is staged on the old one, which did not confirm that it was discarded."""
    it = kept(2)
    fake, left = it.fakes[1], [*lost]
    answer = fake.answer

    def cut(asked: str, body: dict, query: dict) -> tuple[int, dict]:
        found = answer(asked, body, query)
        if left and asked == left[0]:
            del left[0]
            raise ConnectionResetError
        return found

    fake.answer = cut
    publish(it, 2)
    assert not left and [one.served for one in it.fakes] == [(it.sync.session, 2)] * 2
    assert [one.versions for one in it.fakes] == [[2], [2]] and {url for url, _ in it.requests} == {fake.url}


def test_a_replica_whose_canary_is_off_is_started_again_until_it_is_not(kept):
    it = kept(2)
    fake = it.fakes[0]
    fake.holds, came_back = 9, fake.come_back

    def come_back_wrong_once() -> None:
        came_back()
        fake.holds = 9 if fake.pid == 2 else None

    fake.come_back = come_back_wrong_once
    it.fakes[1].calls.clear()
    publish(it, 2)
    assert it.fakes[1].calls.count("stage") == 2, "the other replica is asked again when both are right"
    assert [one.served for one in it.fakes] == [(it.sync.session, 2)] * 2
    assert [request.pid for _, request in it.requests] == [1, 2]
    assert all("its log-probs differ from the trainer's" in request.reason for _, request in it.requests)


def test_a_replica_that_does_not_come_back_ends_the_run_at_the_limit(kept, monkeypatch):
    it = kept(1, wait_s=1)
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.2)
    it.ended.set()
    it.fakes[0].die()
    with pytest.raises(CheckFailed, match=f"at {it.fakes[0].url} was not back within 1 s.*--resume"):
        it.generate()


def test_a_trainer_that_waits_for_a_replica_makes_progress(kept, monkeypatch):
    """`launch.stall_s` is for what nobody bounds."""
    beats = []
    monkeypatch.setattr(recovery, "beat", lambda: beats.append(time.monotonic()))
    it = kept(1)
    it.fakes[0].die()
    when(lambda: len(beats) > 3, it.fakes[0].come_back)
    assert it.generate() == EXPECTED and len(beats) > 3 and it.requests == []


def test_without_an_allowance_nobody_waits(kept):
    it = kept(1)
    it.fakes[0].die()
    started = time.monotonic()
    bare = Dispatcher(it.sync.replicas, [1.0], retries=0, max_in_flight=1, timeout_s=30)
    with pytest.raises(Exception, match="generate"):
        bare.run([[1]], lambda replica, key, prompt: replica.generate(key, prompt), "v1")
    assert time.monotonic() - started < 20


def test_a_request_is_taken_once_and_a_damaged_one_is_dropped(tmp_path):
    run, url = RunDir(tmp_path), "http://127.0.0.1:8000"
    assert take_request(run, url) is None
    ask_for_restart(run, url, Request(5, "it hangs"))
    assert take_request(run, "http://127.0.0.1:8001") is None
    assert take_request(run, url) == Request(5, "it hangs") and take_request(run, url) is None
    (run.logs / "server-8000.log.restart").write_text("{")
    assert take_request(run, url) is None and not any(run.logs.iterdir())
