"""Rollouts that are generated behind the update: what runs when, from which version, and that nothing else changes.

The stand-in replica answers a prompt always alike, whatever adapter it serves. So an overlapped run must learn bit for
bit what a strict run learns, and a resumed one what an uninterrupted one does, unless a batch is skipped, repeated or
taken for another.
"""

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, TrainerCallback

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.metrics_log import phases
from kit.core.run_directory import RunDir
from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.overlap import Ahead, Lookahead
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from tests.conftest import CONFIG
from tests.unit.fake_replica import FakeReplica
from tests.unit.test_heldout import learned
from tests.unit.test_rollout import GROUP, rollout, served, tokenizer, view  # noqa: F401
from tests.unit.test_sync import Adapter

STEPS, GROUPS, WAIT_S = 6, 4, 20
# A pass over the data is four steps: 16 problems, 4 a step, in two forwards of 8 completions.
KEYS = {"data.max_train_problems": 16, "train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
KEYS |= {"train.max_steps": STEPS, "train.keep_checkpoints": 3, "watch.completions_every": 1}
KEYS |= {"rollout.backend": "server", "rollout.canary_prompts": 0, "rollout.max_sampler_k3": 1e6}
KEYS |= {"rollout.server_wait_s": 5, "server.base": "/none", "reward.functions": "[boxed_format]"}
KEYS |= {"reward.options": "{}"}
# What an overlapped run has of its own.
OVERLAP_ONLY = ("adapter_version", "policy_lag", "sync_seconds")


def boxing_replica(model: Path) -> FakeReplica:
    """A stand-in for a replica of a model that answers some samples of every prompt in a box, always the same."""
    from kit.weights.frozen_base import hash_base, load_nf4

    names = AutoTokenizer.from_pretrained(model)
    base = hash_base(load_nf4(model, dtype="float32", double_quantization=True, device="cpu"))
    found = FakeReplica(base_hash=base["hash"], tokenizer_hash=tokenizer_hash(names), vocab_size=len(names))
    end = [names.eos_token_id]
    plain, boxed = (names.encode(text, add_special_tokens=False) + end for text in ("4", "\\boxed{4}"))

    def answer(body: dict) -> dict:
        right = sum(decode_ids(body["token_ids"]).tolist()) % body["n"]
        chosen = [boxed if index <= right else plain for index in range(body["n"])]
        samples = [
            {"token_ids": encode_ids(ids), "logprobs": encode_floats([-1.0] * len(ids)), "finish_reason": "stop"}
            for ids in chosen
        ]
        return {"version": body["version"], "samples": samples}

    found.answer_all = found.before["generate"] = answer
    return found


@pytest.fixture(scope="module")
def replica(learning_model_dir) -> Iterator[FakeReplica]:
    found = boxing_replica(learning_model_dir)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def train(build_trainer, recipe_arguments, learning_model_dir, replica) -> Callable[..., Any]:
    """`train(folder, overlap, changes, callback)`: one run against the replica; the trainer that ran."""

    def run(folder: Path, overlap: bool, changes: dict | None = None, callback: Any = None, resume=False) -> Any:
        keys = {**KEYS, "rollout.server_urls": f"['{replica.url}']", "rollout.overlap": str(overlap).lower()}
        flags = ("--resume",) if resume else ()
        trainer = build_trainer(recipe_arguments(learning_model_dir, folder, keys | (changes or {}), flags))
        if callback:
            trainer.add_callback(callback)
        try:
            trainer.train_run(resume=resume)
        finally:
            trainer.sampler.close()
        return trainer

    return run


class Interleaved(TrainerCallback):
    """Lets update k end only when a request of batch k + 1 has arrived, and answers those only when it has ended.

    So a run without overlap stops at `WAIT_S`. `events` is what happened, in order.
    """

    def __init__(self, replica: FakeReplica, ahead: set[int]):
        self.replica, self.ahead, self.events, self.requests = replica, ahead, [], 0
        self.lock = threading.Lock()
        self.arrived, self.updated = ([threading.Event() for _ in range(STEPS + 2)] for _ in range(2))
        replica.before["generate"] = self.generate
        replica.before["activate"] = lambda body: self.events.append(("sync", body["version"]))

    def generate(self, body: dict) -> dict:
        with self.lock:
            batch = 1 + self.requests // GROUPS
            self.requests += 1
            self.events.append(("asked", batch, body["version"]))
        self.arrived[batch].set()
        if batch in self.ahead:
            assert self.updated[batch - 1].wait(WAIT_S), f"batch {batch} is waited for before update {batch - 1} ends"
        return self.replica.answer_all(body)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step + 1
        if step + 1 in self.ahead:
            assert self.arrived[step + 1].wait(WAIT_S), f"batch {step + 1} is not asked for while update {step} runs"

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("updated", state.global_step + 1))
        self.updated[state.global_step + 1].set()


@dataclass
class Runs:
    overlapped: RunDir
    strict: RunDir
    resumed: RunDir  # after step 2
    events: list[tuple]


AHEAD = {2, 3, 4, 6}  # 5 is the first batch of the second pass over the data


@pytest.fixture(scope="module")
def runs(train, replica, tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("overlap")
    order = Interleaved(replica, AHEAD)
    try:
        train(folder / "overlapped", True, callback=order)
    finally:
        replica.before = {"generate": replica.answer_all}
    shutil.copytree(folder / "overlapped", folder / "resumed")
    for step in (4, 6):
        shutil.rmtree(folder / "resumed" / "checkpoints" / f"step-{step:06d}")
    train(folder / "resumed", True, resume=True)
    train(folder / "strict", False)
    return Runs(*(RunDir(folder / name) for name in ("overlapped", "strict", "resumed")), order.events)


def test_the_next_batch_is_asked_for_after_the_sync_and_before_the_update_ends(runs):
    events = runs.events
    for step in range(1, STEPS + 1):
        sync, updated = events.index(("sync", step - 1)), events.index(("updated", step))
        assert sync < updated
        if step + 1 in AHEAD:
            asked = [place for place, event in enumerate(events) if event[:2] == ("asked", step + 1)]
            assert len(asked) == GROUPS and all(events[place][2] == step - 1 for place in asked)
            assert sync < asked[0] < updated
    assert [event for event in events if event[0] == "sync"] == [("sync", version) for version in range(STEPS)]
    assert sum(event[0] == "asked" for event in events) == STEPS * GROUPS, "nothing is generated that no step takes"


def test_the_lag_is_one_but_where_nothing_was_generated_ahead(runs, read_jsonl):
    rows = read_jsonl(runs.overlapped.metrics_file)
    assert [row["policy_lag"] for row in rows] == [0, 1, 1, 1, 0, 1]
    assert [row["adapter_version"] for row in rows] == [0, 0, 1, 2, 4, 4]
    for row in rows:
        sampled = read_jsonl(runs.overlapped.completions / f"step-{row['step']:06d}.jsonl")
        assert {line["adapter_version"] for line in sampled} == {row["adapter_version"]}
    assert [row["policy_lag"] for row in read_jsonl(runs.strict.metrics_file)] == [0] * STEPS
    assert [row["policy_lag"] for row in read_jsonl(runs.resumed.metrics_file)] == [0, 1, 0, 1, 0, 1]


def only_learned(run: RunDir, read_jsonl: Callable) -> list[dict]:
    rows = learned(read_jsonl(run.metrics_file))
    return [{key: value for key, value in row.items() if key not in OVERLAP_ONLY} for row in rows]


@pytest.mark.parametrize("other", ["strict", "resumed"])
def test_given_the_same_completions_it_learns_what_a_strict_and_an_uninterrupted_run_learn(runs, other, read_jsonl):
    rows, others = (only_learned(run, read_jsonl) for run in (runs.overlapped, getattr(runs, other)))
    assert rows == others and any(row["grad_norm"] > 0 for row in rows)
    hashes = {
        json.loads((run.adapter_dir(STEPS) / "manifest.json").read_text())["tensor_hash"]
        for run in (runs.overlapped, getattr(runs, other))
    }
    assert len(hashes) == 1


def test_the_ledger_has_every_step_once_and_no_problem_twice_in_a_pass(runs, read_jsonl):
    lines = read_jsonl(runs.overlapped.ledger_file)
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    first = [problem for line in lines[:4] for problem in line["problem_ids"]]
    assert len(set(first)) == len(first) == 16
    assert lines == read_jsonl(runs.strict.ledger_file) == read_jsonl(runs.resumed.ledger_file)


def test_what_is_hidden_is_told_apart_from_what_is_waited_for(runs, read_jsonl):
    for row in read_jsonl(runs.overlapped.metrics_file):
        seconds = row["seconds"]
        assert (seconds["rollout_hidden"] > 0) == (row["policy_lag"] == 1)
        made_in = seconds["rollout"] + seconds["rollout_hidden"]
        assert row["rollout_tokens_per_s"] == pytest.approx(row["completion_tokens"] / made_in, rel=1e-2)
        assert sum(phases(row).values()) == pytest.approx(seconds["step"], rel=0.02), "phases add up to the step"
    assert all("rollout_hidden" not in row["seconds"] for row in read_jsonl(runs.strict.metrics_file))


def test_a_replica_that_fails_behind_the_update_ends_the_next_step_as_a_strict_run(
    train, replica, read_jsonl, tmp_path
):
    requests = []

    def fail(body: dict) -> Any:
        requests.append(body["version"])
        return replica.answer_all(body) if len(requests) <= 2 * GROUPS else (500, {"error": "out of blocks"})

    replica.before = {"generate": fail}
    started = time.monotonic()
    try:
        with pytest.raises(CheckFailed, match=rf"server at {replica.url} failed on a prompt .* 500: out of blocks"):
            train(tmp_path / "run", True, {"data.max_train_problems": 200, "rollout.retries": 0})
    finally:
        replica.before = {"generate": replica.answer_all}
    assert time.monotonic() - started < 150
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2], "update 2 was made"
    assert [line["step"] for line in read_jsonl(tmp_path / "run/ledger.jsonl")] == [1, 2, 3]


def test_no_update_is_made_before_the_replicas_serve_the_version_before_it(train, replica, tmp_path, read_jsonl):
    served = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            served.append((state.global_step, replica.served[1]))

    replica.before["activate"] = lambda body: time.sleep(2.0)  # longer than the rest of a step
    try:
        train(tmp_path / "run", True, {"train.max_steps": 3}, Watch())
    finally:
        replica.before = {"generate": replica.answer_all}
    assert served == [(0, 0), (1, 1), (2, 2)]
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert all(row["sync_seconds"]["activate"] > 1.5 for row in rows), "the figures of a step are those of its sync"
    for row in rows:
        assert 0 < row["seconds"]["sync"] <= row["seconds"]["rollout"]
        assert sum(phases(row).values()) == pytest.approx(row["seconds"]["step"], rel=0.02)


def test_a_sync_that_fails_behind_a_step_ends_the_run_before_its_update(train, replica, tmp_path, read_jsonl):
    replica.before["activate"] = lambda body: (500, {"error": "no blocks"}) if body["version"] == 1 else None
    try:
        with pytest.raises(CheckFailed, match=r"did not switch to adapter version 1: .*no blocks"):
            train(tmp_path / "run", True)
    finally:
        replica.before = {"generate": replica.answer_all}
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1]


def test_a_lag_that_moves_the_policy_too_far_is_named_as_a_cause(train, replica, tmp_path):
    changes = {"data.max_train_problems": 200, "train.learning_rate": 1.0}
    # Step 1 compares equal versions; what it finds is the stand-in's own distance.
    with pytest.raises(CheckFailed, match=r"step 2: the sampler is not the policy.* the change of one update"):
        train(tmp_path / "run", True, changes | {"rollout.max_sampler_k3": 3})


# The rollout's side, without a trainer


PROMPTS = [[number] * 3 for number in (7, 8) for _ in range(GROUP)]
REQUEST_S = 3.0  # longer than a loaded machine stalls: less time than this means that nobody waited


@pytest.fixture
def begun(rollout) -> tuple[Any, Any]:  # noqa: F811
    """A rollout on version 1 that has begun to generate for `PROMPTS`, and its policy."""
    found = served(rollout(1, None, "--rollout.overlap=true", "--rollout.backend=server"))
    found.fakes[0].seconds_per_request = REQUEST_S
    found.begin(policy := view(version=1), PROMPTS)
    return found, policy


def test_what_was_begun_is_taken_once(begun):
    found, policy = begun
    time.sleep(0.1)
    made = found.generate(policy, PROMPTS)
    assert made.token_ids == [[number, index] for number in (7, 8) for index in range(GROUP)]
    assert len(made.logps) == len(made.token_ids) and made.version == 1
    assert 0.1 <= made.report.seconds["rollout_hidden"] < REQUEST_S - 0.5, "only until someone waited"
    assert found.fakes[0].calls == ["generate"] * 2
    found.fakes[0].seconds_per_request = 0.0
    assert found.generate(policy, PROMPTS).report.seconds["rollout_hidden"] == 0
    assert found.fakes[0].calls == ["generate"] * 4


def test_the_replicas_sync_while_the_trainer_goes_on_and_it_waits_before_the_policy_changes(rollout):  # noqa: F811
    found = served(rollout(1, None, "--rollout.overlap=true", "--rollout.backend=server"))
    fake, policy = found.fakes[0], view(version=2, adapter=Adapter)
    asked, may_load = threading.Event(), threading.Event()

    def stage(body: dict) -> None:
        asked.set()
        assert may_load.wait(WAIT_S)

    fake.before["stage"] = stage
    report = found.begin(policy, PROMPTS)
    assert asked.wait(WAIT_S) and report.seconds["sync"] < WAIT_S / 2 and "sync_seconds" not in report.figures
    assert found.sync.served == 1 and "generate" not in fake.calls
    may_load.set()
    settled = found.settle(policy)
    assert found.sync.served == 2 and {"write", "stage", "activate", "score"} <= settled.figures["sync_seconds"].keys()
    assert found.settle(policy).figures == {}, "figures of a sync are reported once"
    assert found.generate(policy, PROMPTS).version == 2 and fake.calls.count("stage") == 1


def test_the_canary_is_scored_while_the_replicas_load(rollout):  # noqa: F811
    found = served(rollout(1, None, "--rollout.overlap=true", "--rollout.backend=server"))
    policy, asked, seen = view(version=2, adapter=Adapter), threading.Event(), []
    found.fakes[0].before["stage"] = lambda body: asked.set()
    found.sync.scorer.scores = lambda scored: seen.append((scored, asked.wait(WAIT_S)))
    found.begin(policy, PROMPTS)
    assert seen == [(policy, True)] and found.settle(policy).figures["sync_seconds"]["score"] > 0


def test_a_canary_that_cannot_be_scored_ends_the_run_with_the_replicas_on_the_version_before(rollout):  # noqa: F811
    found = served(rollout(1, None, "--rollout.overlap=true", "--rollout.backend=server"))

    def spoiled(policy: Any) -> None:
        raise CheckFailed("the adapter is spoiled.")

    found.sync.scorer.sequences, found.sync.scorer.scores = [[1, 2]], spoiled
    with pytest.raises(CheckFailed, match=r"the adapter is spoiled\. .*version 1"):
        found.begin(view(version=2, adapter=Adapter), PROMPTS)
    fake = found.fakes[0]
    assert found.sync.served == 1 and fake.calls.count("activate") == 2 and "generate" not in fake.calls


def test_other_prompts_than_those_begun_are_an_error(begun):
    found, policy = begun
    with pytest.raises(CheckFailed, match="the 2 prompts of this step are not the 4 that were generated ahead"):
        found.generate(policy, PROMPTS[:GROUP])


def test_held_out_problems_may_be_asked_for_meanwhile(begun):
    found, policy = begun
    assert found.generate(policy, [[9, 9]], group=1).token_ids == [[9, 0]]
    assert found.generate(policy, PROMPTS).token_ids[0] == [7, 0]


def test_no_version_is_changed_while_requests_are_under_way_and_the_end_of_a_run_does_not_wait_for_them(begun):
    found, _ = begun
    started = time.monotonic()
    with pytest.raises(CheckFailed, match="a new version while requests of the one before are under way"):
        found.begin(view(version=2), PROMPTS)
    assert "stage" not in found.fakes[0].calls
    found.close()
    assert time.monotonic() - started < REQUEST_S - 0.5
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "rollout-ahead")


def test_an_error_of_the_background_is_raised_where_it_is_taken():
    ahead = Ahead([[1]], version=1)
    ahead.start(dict, lambda: 1 // 0)
    assert ahead.synced() == {}
    with pytest.raises(ZeroDivisionError):
        ahead.take()


def test_a_sync_that_fails_in_the_background_is_raised_by_either_and_nothing_is_generated():
    ahead, generated = Ahead([[1]], version=1), []
    ahead.start(lambda: {"sync": 1 // 0}, lambda: generated.append(1))
    for ask in (ahead.synced, ahead.take):
        with pytest.raises(ZeroDivisionError):
            ask()
    assert not generated


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["--rollout.backend=in_process"], "rollout.overlap is true and rollout.backend in_process"),
        (["--rollout.correction=none"], "nothing would correct for that"),
        (["--train.num_iterations=2"], "a batch would be up to 2 updates old"),
        (["--server.sleep=true"], "a replica that sleeps during the update cannot generate"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(changes, reason):
    keys = ["--rollout.backend=server", "--rollout.overlap=true"]
    check_config(load_config(CONFIG, keys), 1)
    with pytest.raises(BadInput, match=reason):
        check_config(load_config(CONFIG, [*keys, *changes]), 1)


def drawn(max_steps: int, passes: list[int]) -> tuple[list, list[int]]:
    """The batches of every step of two batches, in passes over the data of so many batches; how many were drawn."""
    ahead, steps, counts = Lookahead(), [], []
    for number, length in enumerate(passes):
        counts.append(0)

        def rows(number: int = number, length: int = length) -> Iterator:
            for batch in range(length):
                counts[number] += 1
                yield [{"prompt": 100 * number + 10 * batch + row} for row in range(2)]

        iterator = rows()

        def draw(iterator: Iterator = iterator) -> tuple:
            return list(itertools.islice(iterator, 2)), None

        for _ in range(-(-length // 2)):
            if len(steps) < max_steps:
                batches = ahead.draw(iterator, draw, len(steps) + 1 == max_steps)[0]
                steps.append(
                    ([[row["prompt"] for row in batch] for batch in batches], [row["prompt"] for row in ahead.rows()])
                )
    return steps, counts


def test_every_batch_is_taken_once_and_those_of_the_next_step_are_known():
    steps, counts = drawn(5, [6, 4])
    assert [batches for batches, _ in steps] == [
        *([[0, 1], [10, 11]], [[20, 21], [30, 31]], [[40, 41], [50, 51]]),
        *([[100, 101], [110, 111]], [[120, 121], [130, 131]]),
    ]
    # Trl generates for the first batch of a step, which holds all of its prompts; none is known across a pass' end.
    assert [ahead for _, ahead in steps] == [[20, 21], [40, 41], [], [120, 121], []]
    assert counts == [6, 4]


def test_nothing_is_drawn_beyond_the_last_step():
    steps, counts = drawn(2, [8])
    assert len(steps) == 2 and counts == [4] and steps[-1][1] == []


def test_what_is_hidden_ends_when_someone_waits_or_all_is_there():
    slow, quick = Ahead([[1]], 1), Ahead([[1]], 1)
    quick.start(dict, lambda: None)
    slow.start(dict, lambda: time.sleep(3.0))
    slow.take()  # someone waits from the start
    quick.take()  # all has been there for three seconds
    assert slow.hidden_s < 2.5 and quick.hidden_s < 2.5
