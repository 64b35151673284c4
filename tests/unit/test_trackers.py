"""Trackers of watch.report_to: refused before weights load where they are missing, fed by TRL where they are not."""

import importlib.util
import json
import os
import sys

import pytest

from recipes.parts.config import load_config
from recipes.parts.errors import BadInput
from recipes.parts.rundir import RunDir
from recipes.parts.trackers import PLACES, prepare_trackers
from recipes.parts.trainer import trainer_arguments
from tests.conftest import CONFIG

# What transformers' TrackioCallback calls; every log goes to a file.
TRACKIO = """
import json, types
context_vars = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: None))
class Config(dict):
    def update(self, values, allow_val_change=False): pass
config = Config()
def init(**settings): write({"init": [settings["project"], settings["name"]]})
def log(values, step=None): write(values)
def finish(): write({"finish": True})
def write(value):
    with open(FILE, "a") as file:
        file.write(json.dumps(value) + "\\n")
"""


def config_of(*trackers: str):
    return load_config(CONFIG, [f"--watch.report_to=[{', '.join(trackers)}]"])


@pytest.fixture
def places(monkeypatch):
    for variable in PLACES.values():
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_what_is_not_installed_is_refused_with_the_command(tmp_path, places):
    places.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="names trackio, wandb, not installed here: pip install trackio wandb"):
        trainer_arguments(config_of("trackio", "wandb"), RunDir(tmp_path))
    assert trainer_arguments(config_of(), RunDir(tmp_path)).report_to == []


def test_files_go_into_the_run_unless_the_user_says_otherwise(tmp_path, places):
    places.setattr(importlib.util, "find_spec", lambda name: object())
    places.setenv("WANDB_DIR", "elsewhere")
    # Set by the code under test; set here first, so that it is taken back afterwards.
    places.setenv("TENSORBOARD_LOGGING_DIR", "x")
    places.delenv("TENSORBOARD_LOGGING_DIR")
    assert prepare_trackers(config_of("tensorboard", "wandb"), RunDir(tmp_path)) == ["tensorboard", "wandb"]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")
    assert os.environ["WANDB_DIR"] == "elsewhere"


def test_trl_feeds_a_tracker_with_every_step(build_trainer, recipe_arguments, tiny_model_dir, tmp_path, places):
    log = tmp_path / "log.jsonl"
    (tmp_path / "trackio.py").write_text(f"FILE = {str(log)!r}\n{TRACKIO}")
    places.syspath_prepend(tmp_path)
    places.delitem(sys.modules, "trackio", raising=False)
    # trl's profiler imports it with trl, where it is installed.
    places.setattr("trl.extras.profiling.trackio", importlib.import_module("trackio"), raising=False)
    keys = {"watch.report_to": "[trackio]", "watch.eval_every": 1, "watch.eval_problems": 2, "train.max_steps": 2}
    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run", keys))
    try:
        trainer.train_run(resume=False)
    finally:
        sys.modules.pop("trackio", None)
    written = [json.loads(line) for line in log.read_text().splitlines()]
    assert written[0] == {"init": ["huggingface", "tiny"]} and written[-1] == {"finish": True}
    steps = [values for values in written if "train/reward" in values]
    rows = [json.loads(line) for line in trainer.run.metrics_file.read_text().splitlines()]
    for key in ("reward", "kl", "entropy", "heldout_accuracy"):
        assert [values[f"train/{key}"] for values in steps] == [row[key] for row in rows], key
