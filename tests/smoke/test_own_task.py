"""The notebook of OWN_TASK.md: every cell runs in order, each command of it by its own command line, in few steps."""

import json
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, run_here

NOTEBOOK = ROOT / "recipes" / "own_task.ipynb"
STEPS = "STEPS = 60"  # the one variable that a test changes


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_every_cell_of_the_notebook_runs_and_ends_with_a_gate(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo_qlora.py").touch()  # by which the notebook finds the checkout
    asked, run_process = [], subprocess.run

    def in_this_process(words: list[str], cwd=None, env=None, **more):
        """What `subprocess.run` does for the notebook, without a process that imports for 8 s."""
        if words[0] != sys.executable:
            return run_process(words, cwd=cwd, env=env, **more)
        assert words[1] == "-m" and env["PYTHONPATH"] == str(tmp_path)
        asked.append(shlex.join(words[2:]))
        few = ["--processes", "1"] if words[2] == "recipes.tiny_base" else []  # no fork of a process with threads
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.delitem(sys.modules, "my_rewards", raising=False)
            done = run_here(*words[2:], *few)
        return SimpleNamespace(returncode=done.code, stdout=done.out + done.err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", in_this_process)
    monkeypatch.setattr(sys, "path", [*sys.path])
    first, *rest = code_cells()
    assert STEPS in first
    namespace: dict = {}
    for cell in (first.replace(STEPS, "STEPS = 2"), *rest):
        exec(compile(cell, str(NOTEBOOK), "exec"), namespace)
    said = capsys.readouterr().out
    modules = [command.split()[0] for command in asked]
    assert modules == [
        *("recipes.tiny_base", "reward", "reward", "reward", "reward", "recipes.grpo_qlora", "recipes.grpo_qlora"),
        *("launch.watch", "merge", "eval", "eval"),
    ]
    assert "reward my_rewards:iso_date tried on 16 references (as it is)" in said
    assert "PAID 1 (reward): my_rewards:kind, several, every answer in a list" in said
    assert "done: 2 steps" in said
    run = tmp_path / "own-task" / "runs" / "dates"
    assert json.loads((run / "eval.json").read_text())["n"] == 50
    assert "promoted" in said.rpartition("eval gate")[2]


def test_a_cell_fails_when_its_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "grpo_qlora.py").touch()
    for cell in code_cells()[:2]:
        exec(compile(cell, str(NOTEBOOK), "exec"), namespace)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2, stdout="error: no\n"))
    with pytest.raises(RuntimeError, match="exit code 2: -m merge"):
        namespace["kit"]("-m merge")
    namespace["kit"]("-m merge", accepted=(0, 2))
