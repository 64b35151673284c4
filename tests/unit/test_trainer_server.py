"""What the trainer does with rollouts that it did not sample: records their mismatch, and stops on damaged ones."""

import math
import random
from typing import Any

import pytest

from kit.core.errors import CheckFailed
from kit.train.mismatch import KEYS

TOKENS = 5


class Sampler:
    """Stands in for the replicas: completions of `TOKENS` random ids, each with the log-prob `logprob(row, place)`."""

    def __init__(self, logprob: Any):
        self.logprob, self.versions, self.calls = logprob, [], 0
        self.report = {}

    def generate(self, trainer: Any, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        self.calls += 1
        rows = range(len(prompt_ids))
        self.versions = [trainer.adapter_version] * len(prompt_ids)
        self.report = {"canary_delta": 0.01, "canary_k3": 1e-4, "sync_seconds": {"write": 0.5}}
        ids = [[random.randint(5, 15) for _ in range(TOKENS)] for _ in rows]
        return ids, [[self.logprob(row, place) for place in range(TOKENS)] for row in rows]


@pytest.fixture
def sampled_trainer(build_trainer, recipe_arguments, tiny_model_dir, tmp_path):
    """A trainer of two steps whose rollouts come from a `Sampler`."""

    def build(logprob: Any, **keys: Any) -> Any:
        random.seed(0)
        changes = {"train.max_steps": 2, "rollout.max_sampler_k3": 1e6, "watch.completions_every": 1, **keys}
        trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run", changes))
        trainer.rollout = Sampler(logprob)
        return trainer

    return build


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask", "none"])
def test_the_mismatch_of_every_step_is_recorded(sampled_trainer, read_jsonl, correction):
    # Uniform over 256 entries where the untrained policy is nearly uniform over 316 to 347.
    trainer = sampled_trainer(lambda row, place: -math.log(256), **{"rollout.correction": correction})
    trainer.train_run(resume=False)
    rows = read_jsonl(trainer.run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(row[key] is not None for key in KEYS)
        assert 0 < row["sampler_delta_mean"] <= row["sampler_delta_p95"] <= row["sampler_delta_p99"]
        assert row["sampler_delta_p99"] <= row["sampler_delta_max"] < 2
        assert row["canary_delta"] == 0.01 and row["sync_seconds"] == {"write": 0.5}
        assert 0 < row["effective_sample_size"] < 1 and 0 < row["sampler_k3"] < 1


def test_a_batch_used_twice_has_its_mismatch_once(sampled_trainer, read_jsonl):
    keys = {"train.num_iterations": 2, "train.max_steps": 4}
    trainer = sampled_trainer(lambda row, place: -5.5, **keys)
    trainer.train_run(resume=False)
    rows = read_jsonl(trainer.run.metrics_file)
    assert [row["sampler_k3"] is None for row in rows] == [False, True, False, True]
    assert [row["canary_delta"] is None for row in rows] == [False, True, False, True]
    assert trainer.rollout.calls == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_probs_that_are_not_numbers_stop_the_run_after_they_are_recorded(sampled_trainer, read_jsonl, value):
    trainer = sampled_trainer(lambda row, place: value if row == 3 and place < 2 else -5.5)
    with pytest.raises(CheckFailed, match="step 1: 2 log-probs of the sampler are not finite"):
        trainer.train_run(resume=False)
    (row,) = read_jsonl(trainer.run.metrics_file)
    assert row["step"] == 1 and row["sampler_nan_count"] == 2 and row["loss"] is None
    assert row["sampler_k3"] is not None
    assert not trainer.run.adapters.exists(), "nothing was learned from it"


def test_a_sampler_that_is_not_the_policy_stops_the_run_after_it_is_recorded(sampled_trainer, read_jsonl):
    trainer = sampled_trainer(lambda row, place: -9.0, **{"rollout.max_sampler_k3": 0.1})
    with pytest.raises(CheckFailed, match=r"step 1: the sampler is not the policy: k3 KL .* limit .* 0\.1"):
        trainer.train_run(resume=False)
    (row,) = read_jsonl(trainer.run.metrics_file)
    assert row["sampler_k3"] > 0.1 and row["corrected_token_fraction"] == 1.0


def test_completions_carry_the_version_that_sampled_them(sampled_trainer, read_jsonl):
    trainer = sampled_trainer(lambda row, place: -5.5)
    trainer.train_run(resume=False)
    for step in (1, 2):
        rows = read_jsonl(trainer.run.completions / f"step-{step:06d}.jsonl")
        assert len(rows) == 16 and {row["adapter_version"] for row in rows} == {step - 1}


def test_the_trainer_looks_at_what_accelerate_made_of_its_settings(
    build_trainer, recipe_arguments, tiny_model_dir, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr("kit.train.trainer.prepare", lambda *both: seen.append(both))
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run"))
    assert seen == [(trainer.accelerator, trainer.model)]
