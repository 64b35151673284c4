"""Of several processes of a run that end together, one names the first cause."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kit.core.progress import MACHINE, read_lines
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_json
from kit.core.run_state import END
from tests import processes
from tests.conftest import ROOT

SCRIPT = """
import os, signal, sys, threading, time
from kit.core import errors, first_cause, progress
from kit.core.run_directory import RunDir

first_cause.LOOK_S, first_cause.LEFT_S = 0.2, float(sys.argv[3])
run, rank = RunDir(sys.argv[1]), int(sys.argv[2])
os.environ["RANK"] = sys.argv[2]
errors.ALONE_S = 0.5

def main():
    with progress.watched(run, rank, 0, print), first_cause.first_cause(run, rank, 2):
        print("training", flush=True)
        {within}

errors.run_command(main)
"""
FOREVER = "threading.Event().wait()"
# What a collective raises once the other process is gone.
COLLECTIVE = """
        while any(line.rank != rank for line in progress.read_lines(run)): time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
"""


@pytest.fixture
def rank(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`rank(number, code)`: a process of a run of two, once it trains."""
    started = []

    def start(number: int, within: str, left_s: float = 100.0) -> subprocess.Popen:
        words = [sys.executable, "-c", SCRIPT.format(within=within), str(tmp_path), str(number), str(left_s)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(process)
        assert process.stdout.readline().strip() == "training", process.stderr.read()
        # Its line is there for as long as it lives.
        assert number in [line.rank for line in read_lines(RunDir(tmp_path))]
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def test_a_process_whose_collective_fails_names_the_one_that_was_killed(rank, tmp_path):
    killed, other = rank(1, FOREVER), rank(0, COLLECTIVE)
    kill(killed)
    _, err = other.communicate()
    cause = f"process {killed.pid}, rank 1, is gone and left no error: it was killed"
    assert other.returncode == 1 and err.startswith(f"error: {cause}") and len(err.splitlines()) == 1
    assert read_json(tmp_path / END)["error"].startswith(cause)


def test_sigterm_after_a_kill_names_it_too(rank, tmp_path):
    killed, other = rank(0, FOREVER), rank(1, FOREVER)
    kill(killed)
    other.terminate()
    _, err = other.communicate()
    assert other.returncode == -signal.SIGTERM and f"error: process {killed.pid}, rank 0, is gone" in err
    assert f"process {killed.pid}, rank 0" in read_json(tmp_path / END)["error"]


def test_sigterm_alone_ends_all_and_nothing_is_a_cause(rank, tmp_path):
    both = [rank(number, FOREVER) for number in (0, 1)]
    for process in both:
        process.terminate()
        assert process.communicate()[1] == "" and process.returncode == -signal.SIGTERM
        time.sleep(0.5)
    assert not (tmp_path / END).exists() and not list((tmp_path / "logs").glob("progress-*"))


def test_a_collective_that_does_not_notice_a_kill_holds_the_others_for_a_while_only(rank):
    killed, other = rank(1, FOREVER), rank(0, FOREVER, left_s=1.0)
    kill(killed)
    _, err = processes.finish(other, still_s=20)
    assert other.returncode == 1 and f"error: process {killed.pid}, rank 1, is gone" in err


@pytest.mark.parametrize(
    ("within", "code", "cause"),
    [
        ("raise errors.BadInput('no such column')", 2, "no such column"),
        ("raise errors.CheckFailed('spent')", 1, "spent"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
    ],
)
def test_an_error_of_one_is_the_other_s_with_its_exit_code_and_is_printed_by_itself(
    rank, tmp_path, within, code, cause
):
    failing = rank(1, f"time.sleep(1); {within}")
    other = rank(0, COLLECTIVE)
    said = [process.communicate()[1] for process in (failing, other)]
    assert failing.returncode == other.returncode == code and said[1] == ""
    printed = said[0].splitlines()
    assert [line for line in printed if line.endswith(cause)] == printed[-1:]
    # A refused start changes nothing.
    assert (tmp_path / END).exists() == (code != 2)
    assert code == 2 or read_json(tmp_path / END)["error"] == cause


def test_what_an_earlier_run_left_is_no_cause(rank, tmp_path):
    (tmp_path / "logs").mkdir()
    left = {"pid": 1, "launch": f"{MACHINE}/1/", "time": 5.0, "error": "old", "exit_code": 1, "is_machine": False}
    write_json(tmp_path / "logs/failed-1.json", left)
    (tmp_path / "logs/progress-2").write_text(f"999999 5.0 1 {MACHINE}/1/\n")
    alone = rank(0, "raise RuntimeError('mine')", left_s=0.0)
    _, err = alone.communicate()
    assert "RuntimeError: mine" in err and read_json(tmp_path / END)["error"] == "RuntimeError: mine"


def test_a_forked_child_s_sigterm_is_its_own(rank):
    forks = "pid = os.fork() or (time.sleep(20), os._exit(0)); os.kill(pid, signal.SIGTERM); "
    forks += "print(os.WTERMSIG(os.waitpid(pid, 0)[1]), flush=True); time.sleep(1)"
    parent = rank(0, forks)
    out, err = parent.communicate()
    assert parent.returncode == 0 and out == f"{int(signal.SIGTERM)}\n", err


def test_a_run_of_one_process_keeps_its_signals(tmp_path):
    code = "import signal\nfrom kit.core.first_cause import first_cause\nfrom kit.core.run_directory import RunDir\n"
    code += f"with first_cause(RunDir({str(tmp_path)!r}), 0, 1): assert signal.getsignal(15) == signal.SIG_DFL"
    assert processes.run([sys.executable, "-c", code]).returncode == 0
