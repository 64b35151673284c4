"""`python -m launch.doctor` as a user types it, with real imports, kernels, one token from vLLM and a sum."""

import json
import os
import sys

import pytest

from launch.doctor import CHECKS
from tests import processes

# 19 s on two cores that do nothing else.
pytestmark = pytest.mark.slow
# What depends on the kit and its environment; the others say something about the machine.
OURS = ("python", "packages", "conflicts", "config", "hub", "model", "torch", "imports", "bitsandbytes", "nccl")
OURS += ("vllm",)


def test_every_check_of_a_small_run_answers_and_what_the_kit_brings_works(tiny_model_dir, tmp_path):
    keys = [f"--model.path={tiny_model_dir}", f"--data.path={tiny_model_dir}", f"--run.output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "launch.doctor", "--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", *keys]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "0"}
    done = processes.run([*command, "--json", "--logs", str(tmp_path)], env=environment)
    answer = json.loads(done.stdout)
    rows = answer["checks"]
    assert list(dict.fromkeys(row["name"] for row in rows)) == list(CHECKS), done.stdout
    assert [row for row in rows if row["name"] in OURS and row["status"] != "ok"] == [], done.stdout
    assert all(row["found"] and (row["status"] in ("ok", "skip")) == (not row["fix"]) for row in rows)
    failed = any(row["status"] == "fail" for row in rows)
    assert (done.returncode, answer["ok"]) == (int(failed), not failed)
    assert "fp8_per_channel" in next(row["found"] for row in rows if row["name"] == "vllm")
    assert not (tmp_path / "run").exists(), "a check writes nothing into the run directory"
