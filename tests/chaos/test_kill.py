"""`kill -9` in the middle of a run: the resumed run is the run that was never killed."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kit.core.progress import state_of
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.core.run_state import trainer_pid
from tests import processes

COMPARED = ("reward", "loss", "kl", "grad_norm", "entropy", "reward_std", "truncated_fraction", "completion_length")


def wait_for(path: Path, step: int, process: subprocess.Popen) -> None:
    """Return once a line of `path` is of `step`."""
    processes.wait_until(lambda: path.exists() and f'"step": {step},' in path.read_text(), process)


def damage_newer(run: RunDir) -> None:
    """Leave what crashes leave: a newer checkpoint that lost its end, one without a manifest, and staged files."""
    whole = run.newest_checkpoint()
    for step, name in ((1000, "optimizer.pt"), (1001, "manifest.json")):
        shutil.copytree(whole, run.checkpoints / f"step-{step:06d}")
        damaged = run.checkpoints / f"step-{step:06d}" / name
        damaged.write_bytes(damaged.read_bytes()[:-100])
    staged = run.checkpoints / ".staging" / "checkpoint-4"
    shutil.copytree(whole, staged, dirs_exist_ok=True)
    (staged / "trainer_state.json").write_text("{")
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 4, "total_st')


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory, launch, recipe, recipe_arguments, learning_model_dir):
    """(run, its metrics when it was killed, output of the resumed run): in step 4 `accelerate launch` is killed, and
    its trainer must not go on alone."""
    run = RunDir(tmp_path_factory.mktemp("killed") / "run")
    arguments = recipe_arguments(learning_model_dir, run.path)
    process = launch(arguments)
    wait_for(run.ledger_file, 4, process)
    trainer = trainer_pid(run)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    processes.wait_until(lambda: not state_of(trainer))
    process.communicate()
    before = run.metrics_file.read_text()
    damage_newer(run)
    resumed = recipe([*arguments, "--resume"])
    assert resumed.code == 0, f"{resumed.out}\n{resumed.err}"
    return run, before, resumed.out


def test_the_run_was_killed_after_a_checkpoint_and_before_its_end(killed_and_resumed):
    _, before, out = killed_and_resumed
    steps = [json.loads(line)["step"] for line in before.splitlines()]
    assert steps[:3] == [1, 2, 3] and len(steps) < 6
    assert "resuming from" in out and "step-000002 (step 2)" in out


def test_resumed_metrics_match_those_of_an_uninterrupted_run(killed_and_resumed, tiny_run, read_jsonl):
    run = killed_and_resumed[0]
    mine, theirs = read_jsonl(run.metrics_file), read_jsonl(tiny_run.metrics_file)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(mine, theirs, strict=True):
        for key in COMPARED:
            assert row[key] == pytest.approx(other[key], abs=1e-5, rel=1e-5), (row["step"], key)
    assert any(row["grad_norm"] > 0.01 for row in theirs)


def test_no_problem_is_skipped_or_repeated_across_the_kill(killed_and_resumed, tiny_run, read_jsonl):
    mine, theirs = read_jsonl(killed_and_resumed[0].ledger_file), read_jsonl(tiny_run.ledger_file)
    assert mine == theirs
    consumed = [problem for row in mine for problem in row["problem_ids"]]
    assert len(consumed) == len(set(consumed)) == 6 * 4


def test_the_final_adapter_is_that_of_an_uninterrupted_run(killed_and_resumed, tiny_run):
    run = killed_and_resumed[0]
    adapters = [read_manifest(at.newest_adapter(), "adapter", deep=True) for at in (run, tiny_run)]
    assert [adapter["version"] for adapter in adapters] == [6, 6]
    mine, theirs = (load_file(at.newest_adapter() / "adapter_model.safetensors") for at in (run, tiny_run))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (tensor - theirs[name]).abs().max().item() <= 1e-6, name
    assert read_json(run.base_file)["hash"] == read_json(tiny_run.base_file)["hash"]


def test_completions_after_the_kill_are_those_of_an_uninterrupted_run(killed_and_resumed, tiny_run):
    for name in ("step-000004.jsonl", "step-000006.jsonl"):
        mine, theirs = ((at.completions / name).read_text() for at in (killed_and_resumed[0], tiny_run))
        texts = [[json.loads(line)["completion"] for line in text.splitlines()] for text in (mine, theirs)]
        assert texts[0] == texts[1]


def test_damaged_newer_checkpoints_and_staged_files_are_gone(killed_and_resumed):
    run = killed_and_resumed[0]
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["step-000004", "step-000006"]


def test_resuming_a_finished_run_changes_nothing(tiny_run, tmp_path, recipe, recipe_arguments, learning_model_dir):
    run = RunDir(tmp_path / "copy")
    shutil.copytree(tiny_run.path, run.path)
    # Paths in the configuration differ by output_dir alone, which resuming may change.
    done = recipe(recipe_arguments(learning_model_dir, run.path, flags=("--resume",)))
    assert done.code == 0, done.err
    assert run.metrics_file.read_text() == tiny_run.metrics_file.read_text()
    assert run.ledger_file.read_text() == tiny_run.ledger_file.read_text()
    assert sorted(entry.name for entry in run.adapters.iterdir()) == ["v000002", "v000004", "v000006"]
    for version in (2, 4, 6):
        hashes = {read_manifest(at.adapter_dir(version))["tensor_hash"] for at in (run, tiny_run)}
        assert len(hashes) == 1


@pytest.fixture(scope="module")
def two_passes(tmp_path_factory, recipe, recipe_arguments, learning_model_dir):
    """(a run of 5 steps, two a pass over its 9 problems, with every checkpoint; its command line elsewhere)."""
    keys = {"data.max_train_problems": 9, "train.max_steps": 5, "train.save_steps": 1, "train.keep_checkpoints": 5}
    run = RunDir(tmp_path_factory.mktemp("passes") / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, done.err
    return run, lambda folder: recipe_arguments(learning_model_dir, folder, keys, ("--resume",))


@pytest.mark.parametrize("step", [2, 3])
def test_a_resume_in_a_later_pass_over_the_data_goes_on_in_the_order_of_that_pass(
    two_passes, tmp_path, recipe, read_jsonl, step
):
    whole, arguments = two_passes
    run = RunDir(shutil.copytree(whole.path, tmp_path / "run"))
    for checkpoint in sorted(run.checkpoints.iterdir())[step:]:
        shutil.rmtree(checkpoint)
    done = recipe(arguments(run.path))
    assert done.code == 0 and f"(step {step})" in done.out, done.err
    mine, theirs = read_jsonl(run.ledger_file), read_jsonl(whole.ledger_file)
    assert mine == theirs
    assert len({problem for row in mine[2:4] for problem in row["problem_ids"]}) == 8  # one pass
    assert mine[0]["problem_ids"] != mine[2]["problem_ids"]
    hashes = [read_manifest(at.newest_adapter())["tensor_hash"] for at in (run, whole)]
    assert hashes[0] == hashes[1]
