"""Two trainer processes (gloo, CPU): one run directory, groups split between them.

Resuming is not here: transformers 5.17 loads the optimizer of several CPU processes to `cpu:0`, which torch refuses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from recipes.parts.rundir import RunDir

ROOT = Path(__file__).parents[2]


def rows(run: RunDir, name: str) -> list[dict]:
    return [json.loads(line) for line in (run.path / name).read_text().splitlines()]


def test_two_processes_write_one_run(tmp_path, recipe_arguments, learning_model_dir):
    run = RunDir(tmp_path / "run")
    # 8 completions on each process: two groups of 4.
    keys = {"train.per_device_train_batch_size": 8, "train.max_steps": 2}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["recipes/grpo_qlora.py", *recipe_arguments(learning_model_dir, run.path, keys)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("base unchanged") == 1 and done.stdout.count("training problems:") == 1
    assert [row["step"] for row in rows(run, "metrics.jsonl")] == [1, 2]
    assert json.loads(run.config_file.read_text())["processes"] == 2
    # Sixteen completions of both processes: four groups of four.
    assert all(len(row["problem_ids"]) == 4 for row in rows(run, "ledger.jsonl"))
    sampled = rows(run, "completions/step-000002.jsonl")
    assert len(sampled) == 16 and len({row["problem_id"] for row in sampled}) == 4
    assert run.newest_adapter().name == "v000002"
