"""What the trainer does with rollouts that it did not sample: records their mismatch and the version that sampled."""

import math
import random
from typing import Any

import pytest

from kit.rollout.policy_view import Report, Rollouts
from kit.train.mismatch import KEYS


class Replicas:
    """A sampler of five random ids a prompt, each with the same log-prob."""

    def __init__(self):
        self.calls = 0

    def generate(self, policy: Any, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        self.calls += 1
        figures = {"canary_delta": 0.01, "canary_k3": 1e-4, "sync_seconds": {"write": 0.5}}
        ids = [[random.randint(5, 15) for _ in range(5)] for _ in prompt_ids]
        # Uniform over 256 entries where the untrained policy is nearly uniform over 316 to 347.
        return Rollouts(ids, [[-math.log(256)] * 5 for _ in ids], policy.version, Report(figures, {"sync": 0.25}))


@pytest.mark.parametrize(("correction", "times"), [("token_truncate", 1), ("sequence_mask", 2), ("none", 1)])
def test_the_mismatch_of_every_batch_is_recorded_once_with_its_version(
    build_trainer, recipe_arguments, tiny_model_dir, tmp_path, read_jsonl, monkeypatch, correction, times
):
    seen = []
    monkeypatch.setattr("kit.train.trainer.prepare", lambda *both: seen.append(both))
    keys = {"train.max_steps": 2 * times, "train.num_iterations": times, "rollout.correction": correction}
    keys |= {"rollout.max_sampler_k3": 1e6, "watch.completions_every": 1}
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run", keys))
    assert seen == [(trainer.accelerator, trainer.model)], "what accelerate made of its settings is looked at"
    trainer.sampler = Replicas()
    trainer.train_run(resume=False)
    rows = read_jsonl(trainer.run.metrics_file)
    assert trainer.sampler.calls == 2 and [row["step"] for row in rows] == [*range(1, 2 * times + 1)]
    for row in rows:
        if (row["step"] - 1) % times:
            assert row["sampler_k3"] is None and row["canary_delta"] is None, "of the first update with a batch"
            continue
        assert all(row[key] is not None for key in KEYS)
        assert 0 < row["sampler_delta_mean"] <= row["sampler_delta_p95"] <= row["sampler_delta_p99"]
        assert row["sampler_delta_p99"] <= row["sampler_delta_max"] < 2
        assert row["canary_delta"] == 0.01 and row["sync_seconds"] == {"write": 0.5}
        assert row["seconds"]["sync"] == 0.25
        assert 0 < row["effective_sample_size"] < 1 and 0 < row["sampler_k3"] < 1
        sampled = read_jsonl(trainer.run.completions / f"step-{row['step']:06d}.jsonl")
        assert len(sampled) == 16 and {one["adapter_version"] for one in sampled} == {row["step"] - 1}
