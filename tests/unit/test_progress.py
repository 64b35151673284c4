"""A trainer's process that stands still ends, by itself or from outside, and what it was doing is named."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.progress import Progress, all_lines, describe_others, launch_id, read_lines, stacks_file, state_of
from kit.core.run_directory import RunDir
from launch.starting import stall
from launch.starting.stall import StallWatch, StoodStill
from tests import processes
from tests.conftest import CONFIG, ROOT

SCRIPT = """
import os, sys, threading, time
from kit.core import progress
from kit.core.run_directory import RunDir

def wait_for_a_collective():
    threading.Event().wait()

def on_stall(reason):
    print("recorded:", reason, flush=True)

with progress.watched(RunDir(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), on_stall):
    print("loading", flush=True)
    {before}
    with progress.steps():
        print("training", flush=True)
        {within}
    print("after", flush=True)
    {after}
"""


@pytest.fixture
def trainer(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`trainer(within=code, before=…, after=…, stall_s=…, rank=…)`: a process that is watched as a trainer is."""
    started = []

    def start(within: str = "pass", before: str = "pass", after: str = "pass", stall_s: float = 2.0, rank: int = 0):
        words = [sys.executable, "-c", SCRIPT.format(within=within, before=before, after=after)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*words, str(tmp_path), str(rank), str(stall_s)], stdout=pipe, stderr=pipe, text=True, cwd=ROOT
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def said(process: subprocess.Popen, word: str) -> None:
    while (line := process.stdout.readline()) and line.strip() != word:
        pass
    assert line, f"ended before {word}: {process.stderr.read()}"


def test_a_step_without_progress_ends_the_process_with_what_it_waits_for(trainer, tmp_path):
    process = trainer("wait_for_a_collective()")
    out, err = process.communicate()
    assert process.returncode == 1
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"no progress for 2 s (launch.stall_s) in process {process.pid}, rank 0" in error
    assert "wait (threading.py:" in error and "called by wait_for_a_collective" in error and "--resume" in error
    assert f"recorded: {error.removeprefix('error: ')}" in out.splitlines()
    stacks = stacks_file(RunDir(tmp_path), 0)
    assert str(stacks) in error and "wait_for_a_collective" in stacks.read_text()


def test_progress_and_what_comes_before_and_after_the_steps_end_nothing(trainer, tmp_path):
    slow = "time.sleep(4)"
    process = trainer("[(time.sleep(0.5), progress.beat()) for _ in range(8)]", before=slow, after=slow)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert not list((tmp_path / "logs").iterdir()), "nothing is left of it"


def test_no_limit_with_0(trainer):
    process = trainer("time.sleep(4)", stall_s=0)
    assert process.wait(60) == 0


def test_a_process_that_was_stopped_and_goes_on_has_not_stood_still(trainer):
    # No beat in the seconds after it goes on. The sleep ends 10 s after the start, wherever the stop meets it.
    within = "time.sleep(max(0, began + 10 - time.time())); progress.beat()"
    process = trainer(within, before="began = time.time()", stall_s=6)
    said(process, "training")
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0, process.stderr.read()


def test_sigusr2_writes_the_stacks_and_ends_nothing(trainer, tmp_path):
    process = trainer("[(time.sleep(0.2), progress.beat()) for _ in range(20)]")
    said(process, "training")
    process.send_signal(signal.SIGUSR2)
    processes.wait_until(lambda: "<module>" in stacks_file(RunDir(tmp_path), 0).read_text(), process)
    assert process.wait(60) == 0


def test_a_process_that_waits_for_a_stopped_one_names_it(trainer, tmp_path):
    stopped = trainer("wait_for_a_collective()", rank=1, stall_s=900)
    said(stopped, "training")
    stopped.send_signal(signal.SIGSTOP)
    waiting = trainer("wait_for_a_collective()")
    _, err = waiting.communicate()
    assert f"Process {stopped.pid}, rank 1, is stopped (SIGSTOP or a debugger)" in err
    assert not describe_others(RunDir(tmp_path), 1), "this process is not another one"


def test_a_process_that_waits_for_one_that_gets_on_has_not_stood_still(trainer):
    """As other processes do while the main one samples or judges for all; both end once nothing gets on."""
    works = trainer("[(time.sleep(0.5), progress.beat()) for _ in range(16)]; wait_for_a_collective()", stall_s=3)
    said(works, "training")
    began = time.monotonic()
    waits = trainer("wait_for_a_collective()", rank=1, stall_s=3)
    _, err = waits.communicate()
    assert waits.returncode == 1 and time.monotonic() - began > 8, err
    assert works.wait(60) == 1


def test_the_furthest_behind_of_several_is_named_and_writes_its_stacks(trainer, tmp_path):
    hangs = trainer("time.sleep(100)", rank=1, stall_s=900)
    said(hangs, "training")
    waits = trainer("time.sleep(1); progress.beat(); wait_for_a_collective()")
    _, err = waits.communicate()
    assert f"Process {hangs.pid}, rank 1, is the one that is the furthest behind" in err
    stacks = stacks_file(RunDir(tmp_path), 1)
    assert str(stacks) in err and "<module>" in stacks.read_text()


def watch(tmp_path: Path, monkeypatch, stall_s: float = 2.0) -> StallWatch:
    for name, value in (("LOOK_S", 0.1), ("GRACE_S", 1.0)):
        monkeypatch.setattr(stall, name, value)
    return StallWatch(RunDir(tmp_path), stall_s)


def found(watch: StallWatch, pid: int, limit_s: float = 60.0) -> str:
    """The message of a watch that finds a job standing still."""
    deadline = time.monotonic() + limit_s
    with pytest.raises(StoodStill) as caught:
        while time.monotonic() < deadline:
            watch.check("trainer", pid)
            time.sleep(0.1)
    return str(caught.value)


def test_a_process_that_is_killed_at_any_moment_leaves_its_whole_line(tmp_path):
    """Without its line nobody names it as the cause: the others would end with an error about a connection."""
    progress, ended = Progress(RunDir(tmp_path), 0, 0, print), threading.Event()
    progress.start()

    def write() -> None:
        while not ended.is_set():
            progress.write()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [[line.pid for line in all_lines(RunDir(tmp_path))] for _ in range(500)]
    finally:
        ended.set()
        writer.join()
        progress.stop()
    assert found == [[os.getpid()]] * 500 and not list((tmp_path / "logs").iterdir())


def test_a_stopped_trainer_is_found_from_outside(trainer, tmp_path, monkeypatch):
    process = trainer("[(time.sleep(0.2), progress.beat()) for _ in range(200)]")
    said(process, "training")
    outside = watch(tmp_path, monkeypatch)
    for _ in range(20):
        outside.check("trainer", process.pid)
        time.sleep(0.2)
    process.send_signal(signal.SIGSTOP)
    message = found(outside, process.pid)
    assert f"process {process.pid}, rank 0 (" in message and "is stopped (SIGSTOP or a debugger)" in message
    assert message.startswith("trainer: no progress for ") and "(launch.stall_s 2)" in message


def test_from_outside_too_a_beat_of_one_is_progress_of_all(tmp_path, monkeypatch):
    """But one that does not even write its line has stopped, whatever the others do."""
    outside, logs = watch(tmp_path, monkeypatch), tmp_path / "logs"
    first, second = (subprocess.Popen(["sh", "-c", "sleep 100 & wait"]) for _ in range(2))
    monkeypatch.setattr(stall, "_tree", lambda pid: [psutil.Process(one.pid) for one in (first, second)])
    logs.mkdir()

    def look(until_s: float, writes: bool) -> None:
        ends = time.monotonic() + until_s
        while time.monotonic() < ends:
            (logs / "progress-0").write_text(f"{first.pid} {time.time()} 1 {launch_id()}\n")
            if writes:
                (logs / "progress-1").write_text(f"{second.pid} 5.0 1 {launch_id()}\n")
            outside.check("trainer", first.pid)
            time.sleep(0.1)

    try:
        look(6, writes=True)
        with pytest.raises(StoodStill, match=f"process {second.pid}, rank 1, is the one that is the furthest behind"):
            look(60, writes=False)
    finally:
        for process in (first, second):
            for one in [*psutil.Process(process.pid).children(), process]:
                one.kill()
            process.wait()


def test_a_trainer_that_runs_and_gets_nowhere_is_found_with_its_stacks(trainer, tmp_path, monkeypatch):
    process = trainer("wait_for_a_collective()", stall_s=900)
    said(process, "training")
    message = found(watch(tmp_path, monkeypatch), process.pid)
    stacks = stacks_file(RunDir(tmp_path), 0)
    assert f"process {process.pid}, rank 0, is the one that is the furthest behind" in message
    assert message.endswith(f"Stacks: {stacks}.") and "wait_for_a_collective" in stacks.read_text()


def test_neither_another_clock_nor_a_late_look_is_a_stall(trainer, tmp_path, monkeypatch):
    """The wall clock may step between a line and a look; `launch.up` itself may be stopped for an hour."""
    behind = "real = time.time; time.time = lambda: real() - 3600"
    process = trainer("[(time.sleep(0.2), progress.beat()) for _ in range(200)]", before=behind)
    said(process, "training")
    outside, ends = watch(tmp_path, monkeypatch), time.monotonic() + 4
    while time.monotonic() < ends:
        outside.check("trainer", process.pid)
        time.sleep(0.1)
    process.send_signal(signal.SIGSTOP)  # its line stays the same from here on
    for late_s in (0, 3600):
        time.sleep(0.2)
        outside._looked -= late_s
        outside.check("trainer", process.pid)


def test_a_job_that_uses_no_processor_time_is_found_and_one_that_does_is_not(tmp_path, monkeypatch):
    """A job without lines: a trainer that loads its libraries, or a launcher that never notices the trainer's end."""
    outside = watch(tmp_path, monkeypatch)
    busy = subprocess.Popen([sys.executable, "-c", "import time; e = time.time() + 6\nwhile time.time() < e: pass"])
    while busy.poll() is None:
        outside.check("base", busy.pid)
        time.sleep(0.1)
    idle = subprocess.Popen(["sh", "-c", "sleep 100 & wait"])
    try:
        assert "use no processor time" in found(outside, idle.pid)
    finally:
        for process in [*psutil.Process(idle.pid).children(), idle]:
            process.kill()
        idle.wait()


def test_another_run_s_lines_and_those_of_the_dead_are_not_progress(trainer, tmp_path, monkeypatch):
    process = trainer("time.sleep(100)", stall_s=0)
    said(process, "training")
    (line,) = read_lines(RunDir(tmp_path))
    assert (line.pid, line.rank, line.trains) == (process.pid, 0, True)
    sleeping = subprocess.Popen(["sleep", "100"])
    try:
        assert "use no processor time" in found(watch(tmp_path, monkeypatch), sleeping.pid), "not in its tree"
    finally:
        sleeping.kill()
        sleeping.wait()
    process.kill()
    process.wait()
    assert not read_lines(RunDir(tmp_path)) and not state_of(process.pid)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--launch.stall_s=60"], "launch.stall_s (60) is not above reward.request_timeout_s (60)"),
        (
            ["--launch.stall_s=600", "--rollout.backend=server"],
            "launch.stall_s (600) is not above rollout.request_timeout_s (600)",
        ),
        (["--launch.stall_s=-1"], "launch.stall_s (-1.0) must be 0 or more"),
    ],
)
def test_a_limit_below_what_a_run_may_wait_for_is_refused(changes, said):
    with pytest.raises(BadInput) as caught:
        check_config(load_config(CONFIG, changes), 1)
    assert said in str(caught.value)


def test_a_trainer_ends_with_the_launcher_that_started_it(tmp_path):
    """`accelerate` in the words of the parent; a trainer that a shell started goes on."""
    child = "import os, time\nfrom kit.core.progress import end_with_launcher\nend_with_launcher()\n"
    child += "print(os.getpid(), flush=True)\ntime.sleep(100)"
    parent = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
    for name, ends in (("accelerate", True), ("sh", False)):
        process = subprocess.Popen(
            [sys.executable, "-c", parent, child, name], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        pid = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            if ends:
                processes.wait_until(lambda: not state_of(pid), still_s=20)  # noqa: B023
            else:
                time.sleep(1)
                assert state_of(pid)
        finally:
            if state_of(pid):
                os.kill(pid, signal.SIGKILL)
