"""One of two trainer processes is killed, stopped or fails: the other one ends too, within seconds, with the cause,
and a resume repeats the run that nothing happened to. But for the last test no launcher ends a process here."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from kit.core.progress import read_lines
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from kit.core.run_state import END
from tests import processes
from tests.chaos.test_kill import COMPARED, wait_for
from tests.conftest import ROOT
from tests.smoke.test_elastic import REWARD, sampled
from tests.smoke.test_two_processes import fake_replica, rows, server_keys
from tests.unit.test_up_processes import gone

STEPS = 4
STALL_S = 8
ENDS_WITHIN_S = 15  # FOUND_WITHIN_S or ALONE_S, and the end of an interpreter, on a loaded machine
KEYS = {"train.max_steps": STEPS, "train.save_steps": 2, "train.learning_rate": 1e-3, "train.keep_checkpoints": 2}
FAULTS = """
import os, time
from reward_by_length import stars

rank, calls = int(os.environ["RANK"]), []

def failing(prompts, completions, **columns):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        raise ValueError("the judge of this process is gone")
    return stars(prompts, completions)

def slow(prompts, completions, **columns):
    if rank == 0:
        time.sleep(8)
    return stars(prompts, completions)

def spoiled(inputs, settings):
    loss = -(inputs.logps * inputs.advantages[:, None] * inputs.mask).sum() / inputs.step_tokens
    calls.append(1)
    return loss * float("nan") if rank == 1 and len(calls) == 4 else loss  # two calls try it on two rows
"""
SEEDS = range(1, 1 + int(os.environ.get("RANK_SEEDS", "1")))  # of kills at a random moment of step 3


@dataclass
class Runs:
    folder: Path
    names: list[str]  # in the order of the plan

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / name)

    def ends(self, name: str) -> dict[str, dict]:
        return json.loads((self.folder / f"{self.names.index(name)}.json").read_text())

    def said(self, name: str) -> list[str]:
        number = self.names.index(name)
        return [(self.folder / f"{number}-{rank}.txt").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, recipe_arguments, learning_model_dir) -> Runs:
    """`whole`; runs with a kill and, as `…-resumed`, what they became; runs with a fault in one process."""
    folder, plan, names = tmp_path_factory.mktemp("ranks"), [], []
    (folder / "reward_by_length.py").write_text(REWARD)
    (folder / "faults.py").write_text(FAULTS)
    replica = fake_replica(learning_model_dir)

    def noted(what: str, then):
        def answer(body):
            served = replica.served[1] if replica.served else -1
            (folder / f"{what}-{served}").write_text(what)
            time.sleep(0.1)
            return then(body)

        return answer

    replica.before |= {"generate": noted("generate", sampled), "stage": noted("stage", lambda body: None)}
    served = server_keys(replica) | KEYS | {"rollout.correction": "none", "reward.options": "{}"}
    served |= {"reward.functions": "[reward_by_length:stars]"}

    def add(name: str, changes: dict | None = None, kill: dict | None = None, resumed: str = "") -> None:
        flags = ("--resume",) if resumed else ()
        keys = served | (changes or {})
        run: dict = {"processes": 2, "arguments": recipe_arguments(learning_model_dir, folder / name, keys, flags)}
        if resumed:
            run["copy"] = [str(folder / resumed), str(folder / name)]
        if kill:
            run["kill"] = kill
        names.append(name)
        plan.append(run)

    def killed(name: str, rank: int, file: str, text: str, delay_s: float = 0.0) -> None:
        file = str(folder / file.format(run=name))
        add(name, kill={"rank": rank, "file": file, "text": text, "delay_s": delay_s})
        add(f"{name}-resumed", resumed=name)

    add("whole")
    killed("generation", 0, "generate-2", "generate")
    killed("sync", 1, "stage-2", "stage")
    killed("saving", 1, "{run}/checkpoints/.staging/checkpoint-4/trainer_state.json", "{")
    for seed in SEEDS:
        draw = random.Random(seed)
        killed(f"seed-{seed}", draw.randrange(2), "{run}/ledger.jsonl", '"step": 3,', draw.uniform(0, 1.0))
    stop = {"rank": 1, "file": str(folder / "stopped/ledger.jsonl"), "text": '"step": 3,', "signal": signal.SIGSTOP}
    limits = {"reward.request_timeout_s": 2, "reward.timeout_s": 2, "rollout.request_timeout_s": 7}
    add("stopped", {"launch.stall_s": STALL_S, **limits}, kill=stop)
    add("failing", {"reward.functions": "[faults:failing]"}, kill={"rank": None})
    add("spoiled", {"train.loss": "faults:spoiled"}, kill={"rank": None})
    add("slow", {"reward.functions": "[faults:slow]", "train.trl": "{ddp_timeout: 4}", "train.max_steps": 2})
    (folder / "plan.json").write_text(json.dumps(plan))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "tests.ranks", str(folder / "plan.json")]
    try:
        done = processes.run(words, env=os.environ | {"PYTHONPATH": path})
    finally:
        replica.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    return Runs(folder, names)


KILLED = ["generation", "sync", "saving", *(f"seed-{seed}" for seed in SEEDS)]


def errors(said: list[str]) -> list[str]:
    return [line for text in said for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("name", KILLED)
def test_when_one_process_is_killed_the_other_ends_at_once_and_names_it_once(runs, name):
    ends = runs.ends(name)
    (dead,) = [rank for rank, end in ends.items() if end["code"] == -signal.SIGKILL]
    (other,) = [end for rank, end in ends.items() if rank != dead]
    assert other["code"] == 1 and other["seconds"] < ENDS_WITHIN_S
    (error,) = errors(runs.said(name))
    assert f", rank {dead}, is gone and left no error: it was killed" in error and "--resume" in error
    end = read_json(runs.run(name).path / END)
    assert end["how"] == "failed" and end["error"] == error.removeprefix("error: ")


@pytest.mark.parametrize("name", KILLED)
def test_a_resume_repeats_the_run_that_was_not_killed(runs, name):
    whole, resumed = runs.run("whole"), runs.run(f"{name}-resumed")
    assert rows(resumed, "ledger.jsonl") == rows(whole, "ledger.jsonl")
    for row, other in zip(rows(resumed, "metrics.jsonl"), rows(whole, "metrics.jsonl"), strict=True):
        assert {key: row[key] for key in COMPARED} == {key: other[key] for key in COMPARED}
    mine, theirs = (load_file(run.newest_adapter() / "adapter_model.safetensors") for run in (resumed, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert min(row["grad_norm"] for row in rows(whole, "metrics.jsonl")) > 0


def test_a_stopped_process_ends_the_run_of_the_one_that_waits_for_it(runs):
    end = runs.ends("stopped")["0"]
    assert end["code"] == 1 and end["seconds"] < STALL_S + ENDS_WITHIN_S
    (error,) = errors(runs.said("stopped"))
    assert f"no progress for {STALL_S} s (launch.stall_s)" in error
    assert ", rank 1, is stopped (SIGSTOP or a debugger)" in error
    assert read_json(runs.run("stopped").path / END)["error"] == error.removeprefix("error: ")


def test_a_reward_that_fails_in_one_process_is_the_cause_in_both(runs):
    ends = runs.ends("failing")
    assert {end["code"] for end in ends.values()} == {1}
    (error,) = errors(runs.said("failing"))
    assert error.startswith("error: process 1: step 3: ") and "ValueError: the judge of this process is gone" in error
    end = read_json(runs.run("failing").path / END)
    assert "rank 1: step 3: " in end["error"] and "the judge of this process is gone" in end["error"]


def test_a_loss_that_is_not_finite_in_one_process_ends_both_before_the_update(runs):
    assert {end["code"] for end in runs.ends("spoiled").values()} == {1}
    found = errors(runs.said("spoiled"))
    assert found and all("not finite" in error for error in found)
    assert "not finite" in read_json(runs.run("spoiled").path / END)["error"]


def test_a_process_may_wait_for_another_for_longer_than_the_groups_own_limit(runs):
    assert {end["code"] for end in runs.ends("slow").values()} == {0}
    assert [row["seconds"]["reward"] >= 8 for row in rows(runs.run("slow"), "metrics.jsonl")] == [True, True]


def test_up_names_the_process_that_was_killed(tmp_path, recipe_arguments, learning_model_dir):
    (tmp_path / "cpu.yaml").write_text("{distributed_type: MULTI_CPU, use_cpu: true, num_processes: 2}\n")
    run = RunDir(tmp_path / "run")
    keys = {"train.per_device_train_batch_size": 8, "train.max_steps": 50, "train.save_steps": 1}
    arguments = recipe_arguments(learning_model_dir, run.path, keys)
    words = [sys.executable, "-m", "launch.up", *arguments, "--launcher", str(tmp_path / "cpu.yaml")]
    up = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(run.ledger_file, 3, up)
    family = psutil.Process(up.pid).children(recursive=True)
    (dead,) = [line.pid for line in read_lines(run) if line.rank == 1]
    os.kill(dead, signal.SIGKILL)
    said, _ = processes.finish(up)
    assert up.returncode == 1 and gone(family), said
    cause = f"process {dead}, rank 1, is gone and left no error: it was killed"
    (error,) = [line for line in said.splitlines() if line.startswith("error: trainer was killed by SIGKILL")]
    assert f"). {cause}" in error, said
    assert read_json(run.path / END)["error"].startswith(cause)
    assert (run.logs / "trainer.log").read_text().count(f"error: {cause}") == 1
