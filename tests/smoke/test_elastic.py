"""A run goes on with another number of processes: the same problems in the same order, and where a server samples, the
same completions and an adapter that differs by rounding."""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kit.core.run_directory import RunDir, read_manifest
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from tests import processes
from tests.smoke.test_two_processes import fake_replica, server_keys

STEPS, LEARNING_RATE = 5, 1e-3
REWARD = """
def stars(prompts, completions, **columns):
    flat = [sum(map(ord, prompt[-1]["content"])) % 2 == 1 for prompt in prompts]
    return [1.0 if same else float(len(one[-1]["content"]) % 3) for same, one in zip(flat, completions)]
"""
# 9 problems, four a step: two steps are a pass over the data.
KEYS = {"data.max_train_problems": 9, "train.save_steps": 1, "train.keep_checkpoints": STEPS, "train.max_steps": STEPS}
KEYS |= {"train.learning_rate": LEARNING_RATE}
SAMPLED = {"rollout.correction": "none", "rollout.resample_rounds": 1, "rollout.replay_steps": 2}
SAMPLED |= {"rollout.resample_budget": 4}  # one group a step, so that others are replaced by replayed ones
PLACES = {1: {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}}
PLACES |= {2: {"train.per_device_train_batch_size": 8}, 4: {"train.per_device_train_batch_size": 4}}
PACKED = {"train.micro_batch_tokens": 96}


def sampled(body: dict) -> dict:
    """Completions that are a function of the prompt and of their number in the group."""
    prompt, samples = decode_ids(body["token_ids"]), []
    for number in range(body["n"]):
        digest = hashlib.blake2b(f"{prompt.tolist()} {number}".encode(), digest_size=24).digest()
        length = 6 + digest[0] % 12
        ids = [20 + byte % 200 for byte in digest[:length]]
        sample = {"token_ids": encode_ids(ids), "logprobs": encode_floats([-5.0] * length), "finish_reason": "length"}
        samples.append(sample)
    return {"version": body["version"], "samples": samples}


@dataclass
class Runs:
    """Where the runs lie, and what their processes wrote, by the number of the run."""

    folder: Path

    def rows(self, name: str, file: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name / file).read_text().splitlines()]

    def adapter(self, name: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / f"adapters/v{step:06d}/adapter_model.safetensors")

    def said(self, number: int) -> str:
        return (self.folder / f"{number}-0.txt").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe_arguments, learning_model_dir) -> Runs:
    """`whole`: five steps of two processes with a server. `chain`: the same of two, one (whose step is in packs), four
    and two processes, a checkpoint after each. `own`: five steps of two processes that generate themselves, and
    `first`, `second`: the same with one process from the fourth step on."""
    folder, plan = tmp_path_factory.mktemp("elastic"), []
    (folder / "reward_by_length.py").write_text(REWARD)
    replica = fake_replica(learning_model_dir)
    replica.before["generate"] = sampled
    served = server_keys(replica) | SAMPLED | KEYS
    served |= {"reward.functions": "[reward_by_length:stars]", "reward.options": "{}"}

    def add(name: str, count: int, changes: dict, copy: str = "", keep: int | None = None) -> None:
        flags = () if keep is None else ("--resume",)
        arguments = recipe_arguments(learning_model_dir, folder / name, {**changes, **PLACES[count]}, flags)
        run: dict = {"processes": count, "arguments": arguments}
        if copy:
            run["copy"] = [str(folder / copy), str(folder / name)]
            run["remove"] = [
                str(folder / name / f"checkpoints/step-{step:06d}") for step in range(keep + 1, STEPS + 1)
            ]
        plan.append(run)

    add("whole", 2, served)
    add("chain", 1, served | PACKED | {"train.max_steps": 2}, "whole", keep=1)
    add("chain", 4, served | {"train.max_steps": 3}, keep=2)
    add("chain", 2, served, keep=3)
    add("own", 2, KEYS)
    for name in ("first", "second"):
        add(name, 1, KEYS, "own", keep=3)
    (folder / "plan.json").write_text(json.dumps(plan))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    try:
        done = processes.run(
            [sys.executable, "-m", "tests.ranks", str(folder / "plan.json")], env=os.environ | {"PYTHONPATH": path}
        )
    finally:
        replica.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    return Runs(folder)


def test_a_run_of_two_then_one_then_four_then_two_processes_takes_the_problems_of_two(runs):
    whole, chain = (runs.rows(name, "ledger.jsonl") for name in ("whole", "chain"))
    assert chain == whole
    assert any(row.get("replayed") for row in whole) and any(row.get("round") for row in whole)
    drawn = [row["problem_ids"] for row in whole if "replaces" not in row and row["problem_ids"]]
    assert len(drawn) == STEPS and len({name for two in drawn[2:4] for name in two}) == 8, "each once in a pass"


def test_its_completions_and_rewards_are_those_of_two_and_its_adapters_differ_by_rounding(runs):
    whole, chain = (runs.rows(name, "metrics.jsonl") for name in ("whole", "chain"))
    for row, other in zip(chain, whole, strict=True):
        for key in ("step", "reward", "completion_length", "learning_rate", "completion_tokens", "replayed_groups"):
            assert row[key] == other[key], (row["step"], key)
        for key in ("loss", "grad_norm", "kl", "entropy"):
            assert row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-7), (row["step"], key)
    assert min(row["grad_norm"] for row in whole) > 0
    for step in range(1, STEPS + 1):
        mine, expected = (runs.adapter(name, step) for name in ("chain", "whole"))
        gap = max((mine[name] - tensor).abs().max().item() for name, tensor in expected.items())
        assert gap < 0.02 * LEARNING_RATE, (step, gap)


def test_each_resume_records_and_prints_how_many_processes_go_on(runs):
    found = runs.rows("chain", "resumes.jsonl")
    assert [(row["step"], row["processes_before"], row["processes"]) for row in found] == [
        (1, 2, 1),
        (2, 1, 4),
        (3, 4, 2),
    ]
    stays = "the same problems in the same order, gradients summed in another order"
    assert f"processes 2 -> 1: {stays}\n" in runs.said(1)
    drawn = "; completions are drawn from other random numbers"
    assert f"processes 2 -> 1: {stays}{drawn}\n" in runs.said(5)
    (checkpoint, *_) = sorted(RunDir(runs.folder / "chain").checkpoints.iterdir(), reverse=True)
    assert read_manifest(checkpoint)["processes"] == 2


def test_generating_in_process_it_takes_the_same_problems_and_two_such_resumes_are_equal(runs):
    own, first, second = (runs.rows(name, "ledger.jsonl") for name in ("own", "first", "second"))
    assert first == second == own
    mine, other, before = (runs.adapter(name, STEPS) for name in ("first", "second", "own"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in mine.items()), "other completions"
    assert runs.adapter("first", 1).keys() == mine.keys()
