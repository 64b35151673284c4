"""A trainer that is stopped (SIGSTOP) in the middle of a run: `launch.up` ends the run, names it, and a resume repeats
the run that was never stopped."""

import os
import signal
import subprocess
import sys

import psutil
from safetensors.torch import load_file

from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from kit.core.run_state import last_end, trainer_pid
from tests import processes
from tests.chaos.test_kill import COMPARED, wait_for
from tests.conftest import ROOT
from tests.unit.test_up_processes import gone

STALL_S = 15  # a step takes one or two, on a loaded machine some more


def test_a_stopped_trainer_is_named_and_ended_and_its_run_resumed(
    tmp_path, tiny_run, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    run = RunDir(tmp_path / "run")
    keys = {"reward.request_timeout_s": 5, "launch.stall_s": STALL_S}
    words = [sys.executable, "-m", "launch.up", *recipe_arguments(learning_model_dir, run.path, keys)]
    pipe = subprocess.PIPE
    up = subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    wait_for(run.ledger_file, 4, up)
    family, trainer = psutil.Process(up.pid).children(recursive=True), trainer_pid(run)
    os.kill(trainer, signal.SIGSTOP)
    said, _ = processes.finish(up)
    assert up.returncode == 1 and gone(family), said
    (error,) = [line for line in said.splitlines() if line.startswith("error: trainer: no progress for ")]
    assert f"process {trainer}, rank 0 (" in error and "is stopped (SIGSTOP or a debugger)" in error
    assert f"(launch.stall_s {STALL_S})" in error and str(run.logs / "trainer.log") in error and "--resume" in error
    end = last_end(run)
    assert end.how == "failed" and f"process {trainer}, rank 0" in end.error
    resumed = recipe(recipe_arguments(learning_model_dir, run.path, keys | {"launch.stall_s": 0}, ("--resume",)))
    assert resumed.code == 0, resumed.err
    assert read_jsonl(run.ledger_file) == read_jsonl(tiny_run.ledger_file)
    for row, other in zip(read_jsonl(run.metrics_file), read_jsonl(tiny_run.metrics_file), strict=True):
        assert {key: row[key] for key in COMPARED} == {key: other[key] for key in COMPARED}
    mine, theirs = (load_file(at.newest_adapter() / "adapter_model.safetensors") for at in (run, tiny_run))
    assert all(tensor.equal(theirs[name]) for name, tensor in mine.items())
    assert read_json(run.base_file)["hash"] == read_json(tiny_run.base_file)["hash"]
