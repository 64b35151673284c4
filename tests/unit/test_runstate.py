"""How a run ended is written where it trained, and a new run takes its place without losing it half-way."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.core.config.load import load_config, to_dict
from kit.core.config.run_checks import check_run_directory
from kit.core.errors import BadInput, CheckFailed
from kit.core.metrics_log import progress
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from kit.core.run_state import (
    REPLACED,
    continuing_flags,
    describe_overwrite,
    drop_replaced,
    last_end,
    lock_run,
    trains_in,
)
from launch.watch import main as watch
from tests.unit.metric_rows import log_of, make_run, rows_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"


def config_of(folder: Path, **changes):
    keys = {"run.output_dir": folder} | changes
    return load_config(TINY, [f"--{key}={value}" for key, value in keys.items()])


def started(folder: Path, checkpoint: bool = False) -> RunDir:
    """A run that has begun: with its base, two steps of metrics and, if asked, a checkpoint and an adapter."""
    run = RunDir(make_run(folder, rows_of(2)))
    write_json(run.config_file, {"config": to_dict(config_of(folder))})
    write_json(run.base_file, {"hash": "old"})
    run.logs.mkdir()
    (run.logs / "trainer.log").write_text("old\n")
    if checkpoint:
        (run.checkpoints / "step-000002").mkdir(parents=True)
        (run.adapter_dir(2)).mkdir(parents=True)
        (run.merged / "grpo" / "fp8").mkdir(parents=True)
        (run.path / "notes.txt").write_text("mine")
    return run


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def shown(run: RunDir, monkeypatch, capsys, *flags: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["watch", str(run.path), *flags])
    code = watch()
    return code, " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize(
    ("error", "state", "told"),
    [
        (CheckFailed("the canary of :8000 failed"), "failed", "the canary of :8000 failed"),
        (RuntimeError("boom"), "failed", "RuntimeError: boom"),
        (KeyboardInterrupt(), "stopped", "stopped by Ctrl-C"),
    ],
)
def test_a_run_that_ended_is_shown_ended_with_its_last_error(tmp_path, monkeypatch, capsys, error, state, told, rows):
    run = RunDir(make_run(tmp_path / "run", rows and rows_of(rows)))
    with pytest.raises(type(error)), trains_in(run):
        raise error
    where = f"{state} after step 3" if rows else f"{state} before its first step"
    for flags in (["--once"], []):  # followed through a pipe, the command ends by itself
        code, page = shown(run, monkeypatch, capsys, *flags)
        assert code == 0 and where in page and told in page and "waiting" not in page
    code, text = shown(run, monkeypatch, capsys, "--once", "--json", "--fail_on_alert")
    found = json.loads(text)
    assert (found["state"], found["error"]) == (state, told) and code == (state == "failed")
    if rows:
        monkeypatch.setattr(sys, "argv", ["watch", str(run.path), "--html"])
        assert watch() == 0 and told in (run.path / "health.html").read_text()
    with trains_in(run):  # a new start takes the word back
        assert last_end(run) is None and progress(log_of(run.path))["state"] in ("waiting", "running")
    assert progress(log_of(run.path))["error"] is None


def test_a_killed_run_is_known_by_a_lock_whose_process_is_gone(tmp_path):
    run = RunDir(make_run(tmp_path / "run", rows_of(3)))
    code = (
        "import sys, time; from kit.core.run_state import trains_in; from kit.core.run_directory import RunDir\n"
        "with trains_in(RunDir(sys.argv[1])):\n    print('in', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    assert progress(log_of(run.path))["state"] == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    state = progress(log_of(run.path))
    assert state["state"] == "failed" and f"process {process.pid} is gone and left no error" in state["error"]
    holder = json.loads((run.path / ".lock").read_text())
    for other in ({"host": "elsewhere"}, {"began": None}, {"pid": "x"}):  # what cannot be known is not said
        (run.path / ".lock").write_text(json.dumps(holder | other))
        assert last_end(run) is None
    # The number of a dead process may be that of another one today.
    (run.path / ".lock").write_text(json.dumps(holder | {"pid": os.getpid()}))
    assert "is gone" in last_end(run).error
    (run.path / ".lock").write_text("")
    assert last_end(run) is None


def test_a_run_that_died_before_its_first_checkpoint_says_why_and_starts_anew_with_overwrite(tmp_path, capsys):
    run = started(tmp_path / "run")
    with pytest.raises(CheckFailed), trains_in(run):
        raise CheckFailed("the disk is full.")
    with pytest.raises(BadInput, match=r"cannot be resumed: the disk is full\. Start over with --overwrite"):
        check_run_directory(config_of(run.path), False, 1)
    assert continuing_flags(run) == ["--overwrite"]
    again = check_run_directory(config_of(run.path), False, 1, overwrite=True)
    assert capsys.readouterr().out == "", "nothing is lost that was worth keeping"
    with trains_in(again):
        assert contents(run.path / REPLACED).keys() >= {"base.json", "metrics.jsonl"}
        assert not run.base_file.exists() and (run.logs / "trainer.log").read_text() == "old\n"
        write_json(run.base_file, {"hash": "new"})
        drop_replaced(again)
    assert contents(run.path).keys() == {"base.json", "end.json", "logs/trainer.log"}
    assert read_json(run.base_file)["hash"] == "new"


def test_overwrite_names_what_it_deletes(tmp_path, capsys):
    run = started(tmp_path / "run", checkpoint=True)
    assert check_run_directory(config_of(run.path), False, 1, overwrite=True).replaces
    said = capsys.readouterr().out
    assert said == (
        f"--overwrite deletes from {run.path}: adapters (v000002), checkpoints (step-000002), merged (grpo/fp8), "
        "notes.txt\n"
    )
    assert describe_overwrite(RunDir(tmp_path / "none")) == ""


def test_a_run_is_not_overwritten_while_it_trains_or_when_the_new_one_starts_from_it(tmp_path):
    run = started(tmp_path / "run", checkpoint=True)
    with lock_run(run):
        for flags in ({}, {"overwrite": True}):
            with pytest.raises(BadInput, match=rf"is being trained in by process {os.getpid()}"):
                check_run_directory(config_of(run.path), False, 1, **flags)
    adapter = config_of(run.path, **{"policy.init_adapter": run.adapter_dir(2)})
    with pytest.raises(BadInput, match=r"would delete .*v000002, which policy\.init_adapter names"):
        check_run_directory(adapter, False, 1, overwrite=True)
    with pytest.raises(BadInput, match="--resume continues a run and --overwrite starts it anew"):
        check_run_directory(config_of(run.path), True, 1, overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="is not a run directory"):
        check_run_directory(config_of(tmp_path / "mine"), False, 1, overwrite=True)
    assert run.adapter_dir(2).is_dir()


@pytest.mark.parametrize("error", [BadInput("no server answers"), KeyboardInterrupt(), RuntimeError("no memory")])
def test_an_overwriting_start_that_fails_before_its_base_is_loaded_gives_the_old_run_back(tmp_path, error):
    run = started(tmp_path / "run", checkpoint=True)
    with trains_in(run):
        pass
    before = contents(run.path)
    again = check_run_directory(config_of(run.path), False, 1, overwrite=True)
    with pytest.raises(type(error)), trains_in(again):
        write_json(run.config_file, {"config": "new"})
        (run.path / "data.json").write_text("new")
        raise error
    assert contents(run.path) == before and run.adapter_dir(2).is_dir() and not (run.path / REPLACED).exists()


def test_an_overwriting_start_that_is_killed_loses_nothing_and_can_be_repeated(tmp_path):
    run = started(tmp_path / "run", checkpoint=True)
    before = contents(run.path)
    again = check_run_directory(config_of(run.path), False, 1, overwrite=True)
    code = (
        "import os, sys; from kit.core.run_state import trains_in; from kit.core.run_directory import RunDir\n"
        "run = RunDir(sys.argv[1]); run.replaces = True\n"
        "renames = [0]; rename = os.rename\n"
        "def counted(*arguments):\n"
        "    renames[0] += 1\n"
        "    if renames[0] > int(sys.argv[2]): os._exit(9)\n"
        "    rename(*arguments)\n"
        "os.rename = counted\n"
        "with trains_in(run):\n    run.config_file.write_text('new'); os._exit(9)\n"
    )
    for after in (3, 99):
        done = subprocess.run([sys.executable, "-c", code, str(run.path), str(after)], cwd=ROOT)
        assert done.returncode == 9 and not run.base_file.exists()
        with pytest.raises(BadInput, match=r"was killed .*; the previous run is in .*\.replaced.* mv "):
            check_run_directory(config_of(run.path), True, 1)
        assert check_run_directory(config_of(run.path), False, 1, overwrite=True).replaces
    with pytest.raises(RuntimeError), trains_in(again):
        raise RuntimeError
    assert contents(run.path) == before


def test_a_start_that_is_refused_leaves_the_word_of_the_last_one(tmp_path):
    run = started(tmp_path / "run", checkpoint=True)
    with trains_in(run):
        pass
    with pytest.raises(BadInput), trains_in(run):
        raise BadInput("another base")
    assert last_end(run).how == "done"
    drop_replaced(run)
