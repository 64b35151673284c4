"""`rollout.stream_groups`: the update with the first groups while the servers generate the others, strictly on-policy.

The stand-in replica answers a prompt always alike, so a streamed run must learn what a strict run learns, up to the
order in which float32 gradients are added. It withholds a step's first two groups until the trainer has passed the
others backward, so a trainer that waits for all of them fails.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.metrics_log import phases
from kit.core.run_directory import RunDir
from kit.rollout.generation import GroupStream
from tests.conftest import CONFIG
from tests.unit.fake_replica import FakeReplica
from tests.unit.test_heldout import learned
from tests.unit.test_overlap import KEYS as SERVED
from tests.unit.test_overlap import replica  # noqa: F401

STEPS, GROUPS, WAIT_S = 3, 4, 20
KEYS = SERVED | {"train.max_steps": STEPS, "train.micro_batch_tokens": 1024, "train.beta": 0.05}
STREAMED = {"rollout.stream_groups": 1}
# A token is 1/8 of the rewards' mean; sums in another order differ far less.
CLOSE = {"rel": 1e-4, "abs": 1e-7}
LOSSES = ["dr_grpo", "dapo", "grpo", "cispo"]


@pytest.fixture(scope="module")
def train(build_trainer, recipe_arguments, learning_model_dir, replica) -> Callable[..., RunDir]:  # noqa: F811
    """`train(folder, changes, callback)`: one run against the replica."""

    def run(folder: Path, changes: dict, callback: Any = None) -> RunDir:
        keys = {**KEYS, "rollout.server_urls": f"['{replica.url}']", **changes}
        trainer = build_trainer(recipe_arguments(learning_model_dir, folder, keys))
        if callback:
            callback.watch(trainer)
            trainer.add_callback(callback)
        try:
            trainer.train_run(resume=False)
        finally:
            trainer.sampler.close()
            replica.before = {"generate": replica.answer_all}
        return RunDir(folder)

    return run


class Withheld(TrainerCallback):
    """Answers the first two groups of a step only when a gradient of the step is there: after `WAIT_S` it gives up.

    `events` is what happened, in order."""

    def __init__(self, replica: FakeReplica):  # noqa: F811
        self.replica, self.events, self.requests = replica, [], 0
        self.lock, self.backward = threading.Lock(), [threading.Event() for _ in range(STEPS + 2)]
        self.step = 1
        replica.before["generate"] = self.generate

    def watch(self, trainer: Any) -> None:
        first = next(parameter for parameter in trainer.model.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(lambda _: self.passed())

    def passed(self) -> None:
        self.events.append(("backward", self.step))
        self.backward[self.step].set()

    def generate(self, body: dict) -> dict:
        with self.lock:
            number, self.requests = self.requests, self.requests + 1
        step = 1 + number // GROUPS
        if number % GROUPS < 2:
            assert self.backward[step].wait(WAIT_S), f"nothing is learned in step {step} before all groups are there"
        self.events.append(("answered", step))
        return self.replica.answer_all(body)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("updated", self.step))
        self.step += 1


@pytest.fixture(scope="module")
def streamed(train, replica, tmp_path_factory) -> tuple[RunDir, list[tuple]]:  # noqa: F811
    order = Withheld(replica)
    return train(tmp_path_factory.mktemp("streamed") / "run", STREAMED, order), order.events


@pytest.fixture(scope="module")
def strict(train, tmp_path_factory) -> RunDir:
    return train(tmp_path_factory.mktemp("strict") / "run", {})


def adapter(run: RunDir, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(run.adapter_dir(step) / "adapter_model.safetensors")


def assert_learned_alike(one: RunDir, other: RunDir, read_jsonl: Callable) -> None:
    rows, others = (learned(read_jsonl(run.metrics_file)) for run in (one, other))
    assert len(rows) == len(others) == STEPS and any(row["grad_norm"] > 0 for row in rows)
    for row, same in zip(rows, others, strict=True):
        assert row.keys() == same.keys()
        for key, value in row.items():
            if key == "sync_seconds":
                continue
            assert value == (pytest.approx(same[key], **CLOSE) if isinstance(value, float) else same[key]), key
    mine, theirs = adapter(one), adapter(other)
    assert mine.keys() == theirs.keys() and any(tensor.abs().max() > 0 for tensor in mine.values())
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-6)


def test_the_first_groups_are_learned_from_while_the_last_are_generated(streamed):
    _, events = streamed
    for step in range(1, STEPS + 1):
        answers = [place for place, event in enumerate(events) if event == ("answered", step)]
        assert len(answers) == GROUPS
        backward, updated = events.index(("backward", step)), events.index(("updated", step))
        assert answers[1] < backward < answers[2] <= answers[3] < updated, "and the update comes after the last"
        assert sum(event == ("backward", step) for event in events) >= 2


def test_given_the_same_completions_it_learns_what_a_strict_run_learns(streamed, strict, read_jsonl):
    assert_learned_alike(streamed[0], strict, read_jsonl)


def test_its_records_are_those_of_a_strict_run(streamed, strict, read_jsonl):
    run, _ = streamed
    assert read_jsonl(run.ledger_file) == read_jsonl(strict.ledger_file)
    for step in range(1, STEPS + 1):
        name = f"step-{step:06d}.jsonl"
        rows, others = (read_jsonl(one.completions / name) for one in (run, strict))
        assert len(rows) == len(others) > GROUPS
        for row, other in zip(rows, others, strict=True):
            assert row.pop("advantage") == pytest.approx(other.pop("advantage"))
            assert row == other
    rows = read_jsonl(run.metrics_file)
    assert [row["policy_lag"] for row in rows] == [0] * STEPS, "strictly on-policy"


def test_generation_that_nobody_waited_for_is_told_apart(streamed, strict, read_jsonl):
    for row in read_jsonl(streamed[0].metrics_file):
        seconds = row["seconds"]
        assert seconds["rollout_hidden"] > 0
        made_in = seconds["rollout"] + seconds["rollout_hidden"]
        assert row["rollout_tokens_per_s"] == pytest.approx(row["completion_tokens"] / made_in, rel=1e-2)
        assert sum(phases(row).values()) == pytest.approx(seconds["step"], rel=0.02), "phases add up to the step"
    assert all("rollout_hidden" not in row["seconds"] for row in read_jsonl(strict.metrics_file))


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_every_loss_divides_by_the_whole_step(loss, train, replica, tmp_path, read_jsonl):  # noqa: F811
    changes = {"train.loss_type": loss} | ({"train.epsilon_high": 5.0} if loss == "cispo" else {})
    mine = train(tmp_path / "streamed", changes | STREAMED, Withheld(replica))
    assert_learned_alike(mine, train(tmp_path / "strict", changes), read_jsonl)


def test_held_out_problems_and_masked_completions_go_with_it(train, tmp_path, read_jsonl):
    changes = {"watch.eval_every": 1, "watch.eval_problems": 4, "train.mask_truncated": "true"}
    changes |= {"train.loss_type": "dapo"}
    mine, other = train(tmp_path / "streamed", STREAMED | changes), train(tmp_path / "strict", changes)
    assert_learned_alike(mine, other, read_jsonl)
    accuracies = [[row["heldout_accuracy"] for row in read_jsonl(run.metrics_file)] for run in (mine, other)]
    assert accuracies[0] == accuracies[1] and None not in accuracies[0]


def test_a_replica_that_fails_between_two_batches_ends_the_step_before_its_update(
    train,
    replica,  # noqa: F811
    tmp_path,
    read_jsonl,
):
    requests: list[int] = []
    first = Withheld(replica)

    def fail(body: dict) -> Any:
        requests.append(body["version"])
        if len(requests) <= GROUPS + 2:
            return replica.answer_all(body)
        assert first.backward[2].wait(WAIT_S)
        return 500, {"error": "out of blocks"}

    replica.before["generate"] = fail
    started = time.monotonic()
    with pytest.raises(CheckFailed, match=rf"server at {replica.url} failed on a prompt .* 500: out of blocks"):
        train(tmp_path / "run", STREAMED | {"rollout.retries": 0}, first)
    assert time.monotonic() - started < 60
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1]
    assert ("updated", 1) in first.events and ("updated", 2) not in first.events


def test_a_sampler_that_is_not_the_policy_stops_the_run_before_the_update(train, tmp_path, read_jsonl):
    with pytest.raises(CheckFailed, match="step 1: the sampler is not the policy"):
        train(tmp_path / "run", STREAMED | {"rollout.max_sampler_k3": 1e-6})
    (row,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert row["sampler_k3"] > 1e-6, "over all groups of the step"
    assert not [*(tmp_path / "run").glob("adapters/step-000001*")]


# The stream, without a trainer


class Promised:
    """A stand-in for `Generation` and the futures of its groups."""

    def __init__(self, groups: int, processes: int):
        from concurrent.futures import Future

        from kit.rollout.generation import Generation

        self.futures: list[Future] = [Future() for _ in range(groups)]
        generation = SimpleNamespace(_failure_named=lambda: Generation._failure_named(self))  # type: ignore[arg-type]
        self.stream = GroupStream(generation, self.futures, processes)  # type: ignore[arg-type]

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.futures[number].set_result([f"group {number}"])


def test_every_process_gets_equally_many_groups_those_that_finished_first():
    promised = Promised(8, processes=2)  # groups 0 to 3 are of the first process
    promised.finish(3, 1, 0, 6)
    assert promised.stream.take(1) == [[(3, ["group 3"])], [(2, ["group 6"])]]
    promised.finish(5, 4)
    taken = promised.stream.take(1)
    assert taken == [[(1, ["group 1"]), (0, ["group 0"])], [(1, ["group 5"]), (0, ["group 4"])]], "all that are there"
    promised.finish(7, 2)
    assert promised.stream.take(5) == [[(2, ["group 2"])], [(3, ["group 7"])]], "and at most those that are missing"
    assert promised.stream.taken == promised.stream.size == 4
    assert promised.stream.ended < time.perf_counter()


def test_it_waits_until_the_slowest_process_has_its_groups():
    promised, found = Promised(4, processes=2), []
    waiting = threading.Thread(target=lambda: found.append(promised.stream.take(1)))
    waiting.start()
    promised.finish(0, 1)
    waiting.join(0.2)
    assert waiting.is_alive() and not found
    promised.finish(2)
    waiting.join(WAIT_S)
    assert found == [[[(0, ["group 0"])], [(0, ["group 2"])]]]


@pytest.fixture
def keys() -> list[str]:
    found = ["--rollout.backend=server", "--rollout.stream_groups=2", "--train.micro_batch_tokens=2048"]
    return [*found, "--train.per_device_train_batch_size=32", "--rollout.group_size=8"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ("rollout.backend=in_process", "cannot update while it generates"),
        ("train.micro_batch_tokens=null", "without train.micro_batch_tokens"),
        ("train.per_device_train_batch_size=12 train.gradient_accumulation_steps=2", None),
        ("train.per_device_train_batch_size=20 train.gradient_accumulation_steps=2", None),
        (
            "train.per_device_train_batch_size=28",
            "28 completions a step, which rollout.group_size .8. does not divide",
        ),
        ("rollout.stream_groups=4", "has 4 groups a step, so it would wait for all of them"),
        ("rollout.overlap=true", "rollout.overlap true, which generates the whole next batch"),
        ("server.sleep=true", "server.sleep true: a replica that sleeps"),
        ("rollout.resample_rounds=1", "with rollout.resample_rounds, which needs all"),
        ("rollout.replay_steps=1", "with rollout.replay_steps, which needs all"),
        ("train.kl_in_reward=true train.beta=0.1", "with train.kl_in_reward, which needs all"),
        ("train.scale_rewards=batch", "scaled by the deviation over the whole batch"),
        ('train.trl={"multi_objective_aggregation":"normalize_then_sum"}', "scaled by the deviation"),
        ("train.num_iterations=2", "a batch is used once"),
        ("train.entropy_coef=0.1 train.loss_type=dapo", "rescaled as one"),
        ("train.entropy_coef=0.1 train.loss_type=dr_grpo", None),
        ("rollout.routing=compare", "was not tested"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(keys, changes, reason):
    check_config(load_config(CONFIG, keys), 1)
    flags = [*keys, *(f"--{change}" for change in changes.split())]
    if reason is None:
        check_config(load_config(CONFIG, flags), 1)
        return
    with pytest.raises(BadInput, match=reason):
        check_config(load_config(CONFIG, flags), 2 if "28" in changes else 1)


def test_deepspeed_is_refused(keys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(BadInput, match=r"rollout\.stream_groups is 2 under DeepSpeed"):
        check_config(load_config(CONFIG, keys), 1)
