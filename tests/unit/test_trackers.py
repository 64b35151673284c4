"""Trackers of watch.report_to: refused before weights load where they are missing, fed by TRL where they are not."""

import importlib.util
import json
import math
import os
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.train.trackers import PLACES, figures, prepare_trackers, send_completions
from kit.train.trainer import trainer_arguments
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
def Table(dataframe): return {"columns": list(dataframe.columns), "rows": len(dataframe)}
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
    places.delenv("WANDB_DIR")
    prepare_trackers(config_of("wandb"), RunDir(tmp_path))
    assert os.environ["WANDB_DIR"] == str(tmp_path), "wandb adds its name"


class Writer:
    """Stands in for tensorboard's SummaryWriter, which is not installed here."""

    made: ClassVar[list["Writer"]] = []

    def __init__(self, log_dir: str):
        self.log_dir, self.scalars, self.texts = log_dir, {}, {}
        self.made.append(self)

    def add_scalar(self, tag, value, step):
        assert tag == "train/epoch" or step not in self.scalars.get(tag, {}), "one point a step"
        self.scalars.setdefault(tag, {})
        self.scalars[tag][step] = value

    def add_text(self, tag, text, step=None):
        self.texts[tag, step] = text

    def flush(self): ...

    def close(self): ...


@pytest.fixture(scope="module")
def tracked(build_trainer, recipe_arguments, tiny_model_dir, tmp_path_factory):
    """(lines of a run's metrics, its completions, what trackio got, what tensorboard got)."""
    folder = tmp_path_factory.mktemp("tracked")
    log = folder / "log.jsonl"
    (folder / "trackio.py").write_text(f"FILE = {str(log)!r}\n{TRACKIO}")
    (folder / "tensorboard.py").write_text("")
    keys = {"watch.report_to": "[trackio, tensorboard]", "watch.eval_every": 1, "watch.eval_problems": 2}
    keys |= {"train.max_steps": 2, "watch.completions_per_step": 3}
    with pytest.MonkeyPatch.context() as patch:
        for variable in PLACES.values():
            patch.setenv(variable, str(folder / variable))
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "trackio", raising=False)
        # trl's profiler imports it with trl, where it is installed.
        patch.setattr("trl.extras.profiling.trackio", importlib.import_module("trackio"), raising=False)
        patch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: True)
        patch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
        trainer = build_trainer(recipe_arguments(tiny_model_dir, folder / "run", keys))
        trainer.train_run(resume=False)
    for name in ("trackio", "tensorboard"):
        sys.modules.pop(name, None)
    completions = (trainer.run.completions / "step-000001.jsonl").read_text().splitlines()
    read = [[json.loads(line) for line in lines] for lines in (completions, log.read_text().splitlines())]
    return [json.loads(line) for line in trainer.run.metrics_file.read_text().splitlines()], *read, Writer.made.pop()


def test_trl_feeds_a_tracker_with_every_step(tracked):
    rows, _, written, _ = tracked
    assert written[0] == {"init": ["huggingface", "tiny"]} and written[-1] == {"finish": True}
    steps = [values for values in written if "train/reward" in values]
    for key in ("reward", "kl", "entropy", "heldout_accuracy"):
        assert [values[f"train/{key}"] for values in steps] == [row[key] for row in rows], key


def test_a_tracker_gets_each_number_of_a_metrics_line_once_under_its_name(tracked):
    rows, _, _, writer = tracked
    assert writer.log_dir.endswith("TENSORBOARD_LOGGING_DIR")
    for step, row in enumerate(rows, 1):
        for group in ("seconds", "peak_gib"):
            for name, value in row[group].items():
                assert writer.scalars[f"train/{group}/{name}"][step] == value
        for key in ("adapter_version", "policy_lag", "completion_tokens", "masked_fraction", "zero_spread_fraction"):
            assert writer.scalars[f"train/{key}"][step] == row[key], key
    assert not any(name in tag for tag in writer.scalars for name in ("total_steps", "sampler", "canary", "None"))


def test_a_tracker_gets_a_table_of_the_sampled_completions(tracked):
    _, completions, written, writer = tracked
    assert len(completions) == 3
    text = writer.texts["completions", 1]
    names = "problem_id | prompt | completion | gold | advantage | adapter_version | reward math"
    assert text.splitlines()[0] == f"| {names} |" and len(text.splitlines()) == 2 + 3
    assert all(one["problem_id"] in text for one in completions)
    (table,) = [values["completions"] for values in written if "completions" in values][:1]
    assert table == {"columns": names.split(" | "), "rows": 3}


def test_what_is_null_or_sent_already_is_left_out_and_names_are_those_of_the_file():
    record = {"step": 1, "time": 2.0, "kl": 0.5, "loss": None, "grad_norm": math.nan, "sampler_k3": 0.1}
    record |= {"canary_delta": 0.2, "quant_clip_fraction": 0.0, "sync_seconds": {"write": 1.5}, "noise_seed": 7}
    record |= {"unknown_rewards": {"math": {"timeout": 2}}, "rewards": {"math": None}, "sampler_ess": 0.9}
    expected = {"canary_delta": 0.2, "quant_clip_fraction": 0.0, "sync_seconds/write": 1.5, "noise_seed": 7}
    expected |= {"unknown_rewards/math/timeout": 2, "sampler_ess": 0.9}
    assert figures(record, {"kl": 0.5, "sampler_k3": 0.1}) == expected


def test_wandb_gets_the_completions_as_a_table_at_the_step(monkeypatch):
    logged = []
    wandb = SimpleNamespace(run=object(), log=logged.append, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    row = {"prompt": "a|b", "completion": "c\nd", "rewards": {"math": 1.0}, "advantage": None}
    send_completions(["wandb"], [], 4, [row])
    columns = ["prompt", "completion", "advantage", "reward math"]
    assert logged == [{"completions": (columns, [["a|b", "c\nd", None, 1.0]]), "train/global_step": 4}]
    episode = {**row, "prompt": [{"role": "user", "content": "é"}], "turns": [{"role": "tool", "content": "é"}]}
    send_completions(["wandb"], [], 5, [row, episode])
    columns, (first, second) = logged[1]["completions"]
    assert columns[-1] == "turns" and first[-1] is None, "a column for what only some rows have"
    assert second[0] == "é" and second[-1] == '[{"role": "tool", "content": "é"}]'
    writer = Writer("x")
    send_completions(["tensorboard"], [SimpleNamespace(tb_writer=writer)], 4, [row])
    assert writer.texts["completions", 4].splitlines()[2] == r"| a\|b | c<br>d | None | 1 |"
