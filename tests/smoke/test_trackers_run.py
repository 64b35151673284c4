"""A run that reports to TensorBoard, Trackio and wandb without a network: each holds every number of metrics.jsonl
under its name, and the table of completions. In .venv-trackers, with the real packages."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.train.trackers import OF_THE_RUN
from tests import processes
from tests.conftest import ROOT
from tests.sandbox import side_environment

TRACKERS = ("tensorboard", "trackio", "wandb")


def numbers(line: dict, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif type(value) in (int, float):
            yield prefix + key, value


@pytest.fixture(scope="module")
def reported(tmp_path_factory, recipe_arguments, tiny_model_dir) -> tuple[Path, dict]:
    """(run directory, what the trackers hold)."""
    python = side_environment("trackers") / "bin/python"
    folder = tmp_path_factory.mktemp("trackers")
    keys = {"watch.report_to": "[tensorboard, trackio, wandb]", "train.max_steps": 2, "watch.completions_per_step": 3}
    keys |= {"watch.eval_every": 1, "watch.eval_problems": 2, "rollout.max_completion_length": 8}
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    environment |= {"PYTHONPATH": str(ROOT)}
    arguments = recipe_arguments(tiny_model_dir, folder / "run", keys)
    done = processes.run([python, "recipes/grpo_qlora.py", *arguments], cwd=ROOT, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    done = processes.run([python, "tests/smoke/read_trackers.py", folder / "run"], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "run", json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_holds_every_number_of_metrics_under_its_name(reported, tracker):
    run, held = reported
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        expected = {f"train/{key}": value for key, value in numbers(line) if key not in OF_THE_RUN}
        assert {"train/seconds/rollout", "train/peak_gib/update", "train/heldout_accuracy"} <= expected.keys()
        found = held[tracker]["steps"][str(line["step"])]
        assert expected.keys() - found.keys() == set()
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)  # float32


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_holds_the_table_of_completions(reported, tracker):
    run, held = reported
    rows = [json.loads(line) for line in (run / "completions/step-000001.jsonl").read_text().splitlines()]
    table = held[tracker]["completions"]
    assert [row["problem_id"] for row in table] == [row["problem_id"] for row in rows] and len(rows) == 3
    assert {"prompt", "completion", "advantage", "adapter_version", "reward math"} <= table[0].keys()


def test_files_of_trackers_are_in_the_run(reported):
    run, _ = reported
    assert list((run / "tensorboard").glob("events.*")) and list((run / "wandb").glob("offline-run-*"))
