"""Tests see the tracked files of their checkout and nothing of the environment that started them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import sandbox
from tests.conftest import ROOT

# What a user's shell may hold, and what would change the outcome of a test that saw it.
HOSTILE = {
    **{"HF_HOME": "/nonexistent", "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_mine"},
    **{"TRANSFORMERS_OFFLINE": "0", "WANDB_PROJECT": "mine", "WANDB_MODE": "online", "CUDA_VISIBLE_DEVICES": "7"},
    **{
        "VLLM_API_KEY": "mine",
        "VLLM_CPU_KVCACHE_SPACE": "400",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "OPENAI_API_KEY": "mine",
    },
    **{"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "false"},
    **{"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "SLURM_JOB_ID": "42"},
    **{"PYTORCH_ALLOC_CONF": "backend:nonsense", "OMP_NUM_THREADS": "64", "PYTHONWARNINGS": "error"},
    **{"TORCH_COMPILE_DISABLE": "0", "XDG_CACHE_HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent"},
    **{"http_proxy": "http://127.0.0.1:9", "REQUESTS_CA_BUNDLE": "/nonexistent", "GIT_DIR": "/nonexistent"},
    **{"TRITON_INTERPRET": "1", "RUN": "runs/mine", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONOPTIMIZE": "2"},
}
# Writes what a test process and a process that it starts see.
PROBE = """
import json, os, subprocess, sys
from pathlib import Path
import pytest, recipes
SEES = '''
import json, os
from pathlib import Path
there = [str(path) for path in map(Path, ("runs", "models", ".venv")) if path.exists()]
home = [str(path) for path in Path.home().rglob("*") if path.is_file()]
print(json.dumps({"there": there, "home": home, "cwd": os.getcwd(), "environment": dict(os.environ)}))
'''
@pytest.mark.parametrize("number", range(2))
def test_probe(number):
    child = subprocess.run([sys.executable, "-c", SEES], capture_output=True, text=True, check=True).stdout
    ours = subprocess.run([sys.executable, "-c", SEES], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    facts = {"child": json.loads(child), "at root": json.loads(ours), "recipes": recipes.__file__, "root": str(ROOT)}
    facts["mine"] = dict(os.environ)
    (OUT / f"{number}.json").write_text(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> tuple[Path, list[dict], subprocess.CompletedProcess]:
    """A user's checkout, what two test processes started in it saw, and what pytest printed."""
    folder = tmp_path_factory.mktemp("user")
    (checkout := folder / "checkout").mkdir()
    sandbox.make_copy(ROOT, checkout)
    for place in ("runs/tiny", "models/tiny-base", ".venv/bin", "home/.cache/huggingface/accelerate"):
        (checkout / place).mkdir(parents=True)
    (checkout / "runs/tiny/base.json").write_text('{"policy": "of another storage"}')
    (checkout / "models/tiny-base/config.json").write_text("{}")
    (checkout / "home/.cache/huggingface/accelerate/default_config.yaml").write_text("num_processes: 64\n")
    # As in a user's tree: not tracked, but not ignored either.
    root = "from tests.conftest import ROOT\n"
    probe = checkout / "tests" / "unit" / "test_probe.py"
    probe.write_text(f"from pathlib import Path\nOUT = Path({str(folder)!r})\n{root}{PROBE}")
    hostile = {**HOSTILE, "PYTHONPATH": str(ROOT), "HOME": str(checkout / "home"), "CI": "true"}
    words = [sys.executable, "-m", "pytest", "-q", "-n2", "--junitxml=report.xml", "-p", "no:cacheprovider"]
    inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        # From below the root, by a name that holds from there.
        [*words, "test_probe.py"],
        cwd=probe.parent,
        env={**inherited, **hostile},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return checkout, [json.loads((folder / f"{number}.json").read_text()) for number in range(2)], done


def test_no_process_of_a_test_sees_runs_models_or_the_environment_of_the_checkout(started):
    checkout, seen, _ = started
    for facts in seen:
        for process in ("child", "at root"):
            assert facts[process]["there"] == []
            assert not Path(facts[process]["cwd"]).is_relative_to(checkout)
        assert not Path(facts["recipes"]).is_relative_to(checkout)
    assert len({facts["root"] for facts in seen}) == 1, "the test processes use one copy"


def test_nothing_of_the_callers_environment_or_home_reaches_a_test(started):
    _, seen, _ = started
    for facts in seen:
        assert {name for name, value in HOSTILE.items() if facts["mine"].get(name) == value} == set()
        assert facts["mine"]["CI"] == "true" and facts["mine"]["OMP_NUM_THREADS"] == "1"
        assert facts["mine"]["PYTHONPATH"] == f"{facts['root']}/tests/start"
    assert [facts["child"]["home"] for facts in seen] == [[], []]


def test_the_copy_goes_with_the_session_and_its_reports_stay(started):
    checkout, seen, done = started
    assert not Path(seen[0]["root"]).exists()
    assert "2 passed" in done.stdout
    assert (checkout / "tests/unit/report.xml").read_text().count("<testcase") == 2


def test_this_process_runs_in_a_copy():
    assert sandbox.inside() and Path(os.environ[sandbox.CHECKOUT]) != ROOT
    assert Path.home() == ROOT.with_name("home")


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_what_is_copied(tmp_path, monkeypatch, with_git):
    files = ["Makefile", ".ci/run", ".gitignore", "tests/unit/recorded/run.jsonl", "new file.py", "kit/data/a.py"]
    ignored = [
        ".venv/bin/python",
        "runs/tiny/base.json",
        "models/a/config.json",
        "data/a.jsonl",
        "eval/__pycache__/a.pyc",
    ]
    for name in [*files, *ignored]:
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_text(name)
    (tmp_path / "from" / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    for name in (".venv-verl/.installed", ".venv-lm_eval/interrupted"):
        (tmp_path / "from" / name).parent.mkdir()
        (tmp_path / "from" / name).touch()
    if with_git:
        subprocess.run(["git", "init", "--quiet", tmp_path / "from"], check=True)
        subprocess.run(["git", "-C", tmp_path / "from", "add", "Makefile"], check=True)
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "to").mkdir()
    sandbox.make_copy(tmp_path / "from", tmp_path / "to")
    found = {str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert {name for name in found if not name.startswith(".git/")} == set(files)
    assert (tmp_path / "to" / ".venv-verl").resolve() == tmp_path / "from" / ".venv-verl"
    assert not (tmp_path / "to" / ".venv-lm_eval").exists()


def test_an_environment_in_the_making_is_linked_and_waited_for_until_its_maker_ends(tmp_path, monkeypatch):
    source, copy = tmp_path / "from", tmp_path / "to"
    (source / ".venv-verl").mkdir(parents=True)
    copy.mkdir()
    with subprocess.Popen(["sleep", "600"]) as maker:
        monkeypatch.setenv(sandbox.WAIT_FOR, str(maker.pid))
        sandbox.make_copy(source, copy)
        monkeypatch.setattr(sandbox, "ROOT", copy)
        happens = iter([(source / ".venv-verl" / ".installed").touch, maker.kill])
        monkeypatch.setattr(sandbox, "time", SimpleNamespace(sleep=lambda _: next(happens, maker.wait)()))
        assert sandbox.side_environment("verl").resolve() == source / ".venv-verl"
        assert not sandbox.has_environment("lm_eval"), "the maker ended without it"
    assert next(happens, None) is None
