"""Two trainer processes (gloo, CPU): one run directory, groups split between them.

Resuming is not here: transformers 5.17 loads the optimizer of several CPU processes to `cpu:0`, which torch refuses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from merge.base import hash_nf4_model, load_nf4
from recipes.parts.replica import decode_ids, encode_floats, encode_ids, tokenizer_hash
from recipes.parts.rundir import RunDir
from tests.unit.fake_replica import FakeReplica

ROOT = Path(__file__).parents[2]


def rows(run: RunDir, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


def launch(arguments: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["recipes/grpo_qlora.py", *arguments]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_two_processes_write_one_run(tmp_path, recipe_arguments, learning_model_dir):
    run = RunDir(tmp_path / "run")
    # 8 completions on each process: two groups of 4.
    keys = {"train.per_device_train_batch_size": 8, "train.max_steps": 2}
    done = launch(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("base unchanged") == 1 and done.stdout.count("training problems:") == 1
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]
    assert json.loads(run.config_file.read_text())["processes"] == 2
    # Sixteen completions of both processes: four groups of four.
    assert all(len(row["problem_ids"]) == 4 for row in rows(run, "ledger.jsonl"))
    sampled = rows(run, "completions/step-000002.jsonl")
    assert len(sampled) == 16 and len({row["problem_id"] for row in sampled}) == 4
    assert run.newest_adapter().name == "v000002"


@pytest.fixture
def replica(tiny_model_dir):
    """A stand-in for a replica of the tiny model; what it samples of a prompt is the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    base = hash_nf4_model(load_nf4(tiny_model_dir, dtype="float32", double_quantization=True, device="cpu"))
    found = FakeReplica(base_hash=base["hash"], tokenizer_hash=tokenizer_hash(tokenizer), vocab_size=len(tokenizer))

    def echo(body: dict) -> dict:
        ids = decode_ids(body["token_ids"])[-24:]
        sample = {"token_ids": encode_ids(ids), "logprobs": encode_floats([-5.0] * len(ids)), "finish_reason": "stop"}
        return {"version": body["version"], "samples": [sample] * body["n"]}

    found.before["generate"] = echo
    yield found
    found.stop()


def server_keys(replica: FakeReplica) -> dict:
    # The stand-in's log-probs are not the model's.
    keys = {"rollout.backend": "server", "rollout.server_urls": f"['{replica.url}']", "rollout.max_sampler_k3": 1e6}
    keys |= {"rollout.max_canary_delta": 1e6, "server.base": "/none", "rollout.server_wait_s": 20}
    return {**keys, "train.per_device_train_batch_size": 8, "train.max_steps": 2, "watch.completions_every": 1}


def test_two_processes_share_one_sync_and_get_the_completions_of_their_own_prompts(
    tmp_path, recipe_arguments, tiny_model_dir, replica
):
    run = RunDir(tmp_path / "run")
    done = launch(recipe_arguments(tiny_model_dir, run.path, server_keys(replica)))
    assert done.returncode == 0, done.stderr[-3000:]
    one_step = ["stage", "activate", "score", *["generate"] * 4]
    assert [call for call in replica.calls if call not in ("info", "discard")] == one_step * 2
    for step in (1, 2):
        sampled = rows(run, f"completions/step-{step:06d}.jsonl")
        assert len(sampled) == 16 and {row["adapter_version"] for row in sampled} == {step - 1}
        for row in sampled:
            question = row["prompt"][-12:].replace(" ", "")
            assert question in row["completion"].replace(" ", ""), (row["prompt"], row["completion"])
    (first, second) = rows(run, "metrics.jsonl")
    assert first["sampler_nan_count"] == 0 and first["sampler_k3"] > 0 and second["sync_seconds"]["stage"] > 0


def test_a_failed_sync_ends_both_processes(tmp_path, recipe_arguments, tiny_model_dir, replica):
    run = RunDir(tmp_path / "run")
    replica.before["activate"] = lambda body: replica.refuses.update(stage=(422, "no room for it"))
    done = launch(recipe_arguments(tiny_model_dir, run.path, server_keys(replica)))
    assert done.returncode != 0
    assert f"the replica at {replica.url} did not load adapter version 1: 422 no room for it" in done.stderr
    assert done.stderr.count("error: the replica at") == 1, "said once"


def test_replicas_that_cannot_be_woken_end_both_processes(tmp_path, recipe_arguments, tiny_model_dir, replica):
    run = RunDir(tmp_path / "run")
    replica.info["sleep_enabled"] = True
    replica.refuses["wake"] = (500, "no memory left on the card")
    keys = server_keys(replica) | {"server.sleep": "true"}
    done = launch(recipe_arguments(tiny_model_dir, run.path, keys))
    assert done.returncode != 0
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1], "the first step needs no waking"
    error = f"error: the replica at {replica.url} did not wake up: no memory left on the card."
    assert done.stderr.count(error) == 1, done.stderr[-3000:]
    assert f"{replica.url} may be left asleep: no memory left on the card." in done.stdout
