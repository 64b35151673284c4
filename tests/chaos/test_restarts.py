"""`launch.up --restarts`: processes are killed and stopped in the middle of a run, and the run is the one that nobody
disturbed."""

import os
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.core.run_state import read_restarts, trainer_pid
from kit.rollout.replica import Replica
from tests import processes
from tests.chaos.test_kill import COMPARED, wait_for
from tests.conftest import ROOT


def start_up(arguments: list[str], restarts: int) -> subprocess.Popen:
    words = [sys.executable, "-m", "launch.up", *arguments, "--restarts", str(restarts)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_killed_trainer_goes_on_by_itself_and_its_run_is_the_calm_one_bit_for_bit(
    tmp_path, tiny_run, recipe_arguments, learning_model_dir, read_jsonl
):
    run = RunDir(tmp_path / "run")
    up = start_up(recipe_arguments(learning_model_dir, run.path, {"reward.request_timeout_s": 5}), 2)
    for step in (1, 4):  # before the first checkpoint, and behind one
        wait_for(run.ledger_file, step, up)
        os.kill(trainer := trainer_pid(run), signal.SIGKILL)
        processes.wait_until(lambda: trainer_pid(run) not in (None, trainer), up)
    said, _ = processes.finish(up)
    assert up.returncode == 0, said
    assert read_jsonl(run.ledger_file) == read_jsonl(tiny_run.ledger_file)
    for row, other in zip(read_jsonl(run.metrics_file), read_jsonl(tiny_run.metrics_file), strict=True):
        assert {key: row[key] for key in COMPARED} == {key: other[key] for key in COMPARED}
    mine, theirs = (load_file(at.newest_adapter() / "adapter_model.safetensors") for at in (run, tiny_run))
    assert mine.keys() == theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in mine.items())
    restarts = read_restarts(run)
    assert [one.step for one in restarts] == [0, 3]
    assert all(one.what == "trainer" and "SIGKILL" in one.why and one.seconds > 0 for one in restarts)
    assert all(f"restart {number} of 2: trainer was killed by SIGKILL" in said for number in (1, 2))


def generating(run: RunDir, version: int) -> bool:
    """Whether the server was asked for completions of a version: its canary is behind it."""
    for file in run.path.glob("sync/*/canary.json"):
        try:
            return read_json(file)["version"] == version
        except BadInput:  # replaced meanwhile
            return False
    return False


@pytest.mark.slow
def test_a_server_that_is_killed_or_stopped_while_it_generates_comes_back_and_no_problem_is_lost(
    tmp_path, tiny_run, recipe_arguments, learning_model_dir, read_jsonl, monkeypatch
):
    monkeypatch.setenv("VLLM_API_KEY", "of-this-test")  # asked from here too
    run, url = RunDir(tmp_path / "run"), f"http://127.0.0.1:{processes.free_port()}"
    keys = {
        "model.dtype": "bfloat16",
        "rollout.backend": "server",
        "rollout.server_urls": f"['{url}']",
        "rollout.server_wait_s": 600,
        "server.base": tmp_path / "base",
        "server.max_num_seqs": 16,
        "server.enforce_eager": "true",
        "server.kv_cache_gib": 1,
    }
    up = start_up(recipe_arguments(learning_model_dir, run.path, keys), 3)
    killed = {}
    for version, number in ((1, signal.SIGKILL), (3, signal.SIGSTOP)):
        # Asked a version earlier: on a loaded machine the answer takes longer than a version's completions.
        processes.wait_until(lambda: generating(run, version - 1), up)  # noqa: B023
        killed[version] = Replica(url, 60).info()["pid"]
        processes.wait_until(lambda: generating(run, version), up)  # noqa: B023
        os.kill(killed[version], number)
    said, _ = processes.finish(up)
    assert up.returncode == 0, said
    # Sampled by a server, the completions are others; the problems, and what is counted, are the same.
    assert read_jsonl(run.ledger_file) == read_jsonl(tiny_run.ledger_file)
    rows, calm = read_jsonl(run.metrics_file), read_jsonl(tiny_run.metrics_file)
    assert [row["step"] for row in rows] == [row["step"] for row in calm]
    assert all(row["policy_lag"] == 0 and row["canary_delta"] < 0.1 for row in rows)
    assert read_manifest(run.newest_adapter(), "adapter", deep=True)["version"] == len(calm)
    dead, hung = read_restarts(run)
    assert dead.what == hung.what == f"server {url}" and (dead.step, hung.step) == (1, 3)
    assert "killed by SIGKILL" in dead.why and "takes requests and answers none" in hung.why
    assert dead.seconds and hung.seconds
    log = (run.logs / "trainer.log").read_text()
    assert log.count("serves again after") == 2
