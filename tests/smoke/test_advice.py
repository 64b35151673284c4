"""Commands that messages print are run as they are printed, on a copy of the small run."""

import shlex
import shutil
from types import SimpleNamespace

import pytest

from kit.core.config.load import config_from_dict
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from launch import up
from tests.conftest import run_here
from tests.unit.advice import commands

FEW = {"formats": ["bf16", "fp8"], "max_problems": 6, "max_new_tokens": 4, "bootstrap_samples": 100}


@pytest.fixture
def run(tiny_run, tmp_path) -> RunDir:
    """The finished run, evaluated on few problems in two formats."""
    copy = RunDir(shutil.copytree(tiny_run.path, tmp_path / "a run"))
    known = read_json(copy.config_file)
    known["config"]["eval"] |= FEW
    known["config"]["eval"]["gate"]["format"] = "bf16"  # the formats of the evaluation are more than the gate's
    write_json(copy.config_file, known)
    return copy


def execute(line: str) -> tuple[int, str]:
    """The exit code of a `python -m …`, and what it printed."""
    python, option, *words = shlex.split(line)
    assert (python, option) == ("python", "-m"), line
    done = run_here(*words)
    return done.code, done.out + done.err


def test_what_launch_up_prints_at_its_end_merges_evaluates_and_gates(run):
    start = SimpleNamespace(run=run, config=config_from_dict(run.config()), log=lambda name: run.logs / f"{name}.log")
    printed = commands(up.summary(start))
    assert [line.split()[2:4] for line in printed] == [["merge", "--run"], ["eval", "--run"], ["eval", "gate"]]
    for line in printed:
        code, said = execute(line)
        # Six problems show no gain: the gate judges all rules and says no.
        assert code == 0 or (line is printed[-1] and code == 1 and "not promoted: " in said), f"{line}\n{said}"
    # After a resume the same checkpoints are made again, of the newer adapter.
    assert execute(f"{up.judging_commands(run, start.config)[0]} --dry_run")[0] == 0
    # A checkpoint that was removed is named with a command that makes it beside the other policy's.
    shutil.rmtree(run.merged / "grpo" / "bf16")
    code, said = execute(printed[-1])
    (make,) = commands(said)
    assert code == 2 and execute(f"{make} --dry_run")[0] == 0, said
    shutil.rmtree(run.merged / "base" / "fp8")
    code, said = execute(printed[1])
    (make,) = commands(said)
    assert code == 2 and execute(f"{make} --dry_run")[0] == 0, said
