"""A remerge under tensor parallelism: two workers, each with its shard of the base and of the adapter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("remerge_two_workers.py")


@pytest.mark.slow
def test_two_workers_serve_what_a_fresh_load_of_the_merged_checkpoint_serves(tmp_path):
    # Wide enough that half of every layer is whole blocks of 64.
    size = ("--hidden", "128", "--layers", "2", "--problems", "200", "--heldout", "40", "--steps", "0")
    make = [sys.executable, "recipes/tiny_base.py", "--out", str(tmp_path / "model"), *size]
    assert subprocess.run(make, cwd=ROOT, capture_output=True).returncode == 0
    keys = ["--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", f"--model.path={tmp_path / 'model'}"]
    base = [sys.executable, "-m", "merge", "base", *keys, "--model.dtype=bfloat16", "--out", str(tmp_path / "base")]
    done = subprocess.run(base, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCORES ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    scores = json.loads(lines[-1][7:])
    assert scores["remerged"] == scores["fresh"]
    assert scores["base again"] == scores["base"] != scores["fresh"]
