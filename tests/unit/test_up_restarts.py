"""`launch.up --restarts` with small programs in the place of vLLM and the recipe: what is started again, how often,
and what is left of it. The trainer's half: test_recovery.py. The real programs: tests/chaos/test_restarts.py."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kit.core.errors import BadInput, CheckFailed, MachineFailed, is_machine_fault
from kit.core.metrics_log import MetricsLog, progress
from kit.core.run_directory import RunDir
from kit.core.run_state import DONE, FAILED, INTERRUPTED, Restarted, _record_end, read_restarts, write_restarts
from kit.rollout.restart_requests import Request, ask_for_restart
from launch import up
from launch.replicas import Replicas
from launch.starting import jobs, restarts, stall
from launch.starting.restarts import KeptReplicas, Restarts, may_resume
from launch.watching.page import header
from tests.unit.test_server_wait import free_port
from tests.unit.test_up_processes import SERVES, TINY, left, port, stand_ins, until

__all__ = ["free_port", "left", "port", "stand_ins"]  # fixtures


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.1)
    monkeypatch.setattr(up, "FOLLOWED_S", 0.1)


def counted(folder: Path, name: str) -> str:
    """Lines of a program that make `n` the number of its start, from 1, and note its arguments and allowance."""
    return (
        "import os, signal, sys, time\n"
        f"with open({str(folder / name)!r}, 'a+') as file:\n"
        "    file.write(' '.join([*sys.argv[1:], os.environ.get('GRPO_KIT_RESTART_WAIT_S', 'none')]) + '\\n')\n"
        "    file.seek(0); n = len(file.readlines())\n"
    )


def starts(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


def step(folder: Path, number: int) -> str:
    """A line that makes a step."""
    row = f"""'{{"step": {number}, "total_steps": 9, "reward": 0.5, "time": %f}}\\n' % time.time()"""
    return f"open({str(folder / 'metrics.jsonl')!r}, 'a').write({row})\n"


# Records that it has answered. From then on `launch.up` counts it as ready, even if it reads the answer later.
ASKED = SERVES.replace(".encode())", ".encode()); open('../asked', 'w')")
# Dies once it serves, when the file `die` is there; the next start of it serves on.
DIES_WHEN_TOLD = """
import os, threading, time
def watch():
    while not os.path.exists("../die"): time.sleep(0.02)
    os.remove("../die"); os.kill(os.getpid(), 9)
threading.Thread(target=watch, daemon=True).start()
"""
DIES_WHEN_TOLD += ASKED


def tell_it_to_die(folder: Path) -> str:
    """Lines of a trainer, once its server serves."""
    asked, die = str(folder / "asked"), str(folder / "die")
    return until(f"os.path.exists({asked!r})") + f"time.sleep(1)\nopen({die!r}, 'w')\n"


def test_a_server_that_dies_is_started_again_and_the_trainer_goes_on(stand_ins, tmp_path, port, capsys, left):
    """Keep it idle: it waits for as long as it is asked to."""
    server = counted(tmp_path, "servers") + DIES_WHEN_TOLD
    trainer = counted(tmp_path, "trainers") + until("SERVER()") + step(tmp_path, 1)
    trainer += tell_it_to_die(tmp_path) + until("not SERVER()") + until("SERVER()") + "time.sleep(3.5)"
    assert stand_ins(restarts=3, server=server, trainer=trainer) == 0
    assert len(starts(tmp_path, "servers")) == 2 and starts(tmp_path, "trainers") == ["360"]
    (one,) = read_restarts(RunDir(tmp_path))
    assert one.what == f"server http://127.0.0.1:{port}" and one.why.startswith("was killed by SIGKILL")
    assert one.step == 1 and one.seconds > 0 and one.pid == os.getpid()
    said = capsys.readouterr().out
    assert "restart 1 of 3 in 0.1 s" in said and re.search(r"restart 1 of 3: server .* after step 1, back after", said)
    assert left() == []


def asks(folder: Path, port: int, pid: str) -> str:
    """Lines of a trainer that ask for a restart of the server; `pid` is an expression."""
    file = folder / "logs" / f"server-{port}.log.restart"
    return f"import json\nopen({str(file)!r}, 'w').write(json.dumps({{'pid': {pid}, 'reason': 'it hangs'}}))\n"


def test_a_server_that_hangs_is_started_again_when_the_trainer_asks_for_its_process(stand_ins, tmp_path, port):
    pid = tmp_path / "pid"
    server = counted(tmp_path, "servers") + f"open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    server += f"if n == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{ASKED}"
    trainer = (
        until(f"os.path.exists({str(tmp_path / 'asked')!r})")
        + "time.sleep(3)\n"
        + f"pid = int(open({str(pid)!r}).read())\n"
    )
    trainer += asks(tmp_path, port, "pid") + until(f"int(open({str(pid)!r}).read() or pid) != pid and SERVER()")
    trainer += "time.sleep(1.5)\n"
    trainer += asks(tmp_path, port, "pid") + "time.sleep(1)"  # of the process that is gone: it is not meant any more
    assert stand_ins(restarts=3, server=server, trainer=trainer) == 0
    assert len(starts(tmp_path, "servers")) == 2
    (one,) = read_restarts(RunDir(tmp_path))
    assert one.why == "is not usable: it hangs" and one.seconds > 0


def test_a_server_that_fails_again_and_again_ends_the_run_with_the_first_and_the_last_cause(
    stand_ins, tmp_path, port, left
):
    server = counted(tmp_path, "servers") + "if n > 1: sys.exit(n)\n" + DIES_WHEN_TOLD
    trainer = tell_it_to_die(tmp_path) + "time.sleep(600)"
    with pytest.raises(CheckFailed) as failed:
        stand_ins(restarts=2, server=server, trainer=trainer)
    said, url = str(failed.value), f"server http://127.0.0.1:{port}"
    assert f"{url} ended with exit code 3, and --restarts 2 are used up." in said
    assert f"The first was {url} was killed by SIGKILL" in said and str(tmp_path / "logs") in said
    assert len(starts(tmp_path, "servers")) == 3 and left() == []
    assert [one.seconds for one in read_restarts(RunDir(tmp_path))] == [None, None]


def test_a_server_that_never_served_is_not_started_again(stand_ins, tmp_path):
    with pytest.raises(CheckFailed, match="ended with exit code 3"):
        stand_ins(
            restarts=5, server=counted(tmp_path, "servers") + "sys.exit(3)", trainer="import time; time.sleep(60)"
        )
    assert len(starts(tmp_path, "servers")) == 1 and read_restarts(RunDir(tmp_path)) == []


@pytest.mark.parametrize(
    ("made", "flags"),
    [([], ""), (["base.json"], "--overwrite"), (["base.json", "checkpoints/step-000001"], "--resume")],
)
def test_a_trainer_that_is_killed_continues_what_it_did(stand_ins, tmp_path, made, flags, capsys):
    trainer = counted(tmp_path, "trainers") + step(tmp_path, 1)
    for name in made:
        trainer += f"os.makedirs({str((tmp_path / name).parent)!r}, exist_ok=True)\n"
        trainer += f"open({str(tmp_path / name)!r}, 'w').write('{{}}')\n"
    trainer += "if n == 1: os.kill(os.getpid(), 9)\n" + step(tmp_path, 2) + "time.sleep(1)"
    assert stand_ins(restarts=1, trainer=trainer) == 0
    assert starts(tmp_path, "trainers") == ["none", f"{flags} none".strip()], "there is no server to wait for"
    (one,) = read_restarts(RunDir(tmp_path))
    assert one.what == "trainer" and "SIGKILL" in one.why and one.step == 1 and one.seconds > 0
    assert "trainer: back after" in capsys.readouterr().out


def test_a_trainer_that_stands_still_is_started_again(stand_ins, tmp_path, monkeypatch, left):
    monkeypatch.setattr(stall, "LOOK_S", 0.1)
    monkeypatch.setattr(stall, "GRACE_S", 0.0)
    monkeypatch.setattr(up, "StallWatch", lambda run, seconds: stall.StallWatch(run, 3.0))
    trainer = counted(tmp_path, "trainers") + "if n == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    assert stand_ins(restarts=1, trainer=trainer) == 0 and left() == []
    (one,) = read_restarts(RunDir(tmp_path))
    assert one.what == "trainer" and one.why.startswith("no progress for ") and "is stopped (SIGSTOP" in one.why


def test_a_request_that_comes_before_the_server_is_seen_to_be_back_is_kept(tmp_path):
    """The trainer may see it first, and find its canary off."""
    servers, run = Replicas([]), RunDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as process:
        one = SimpleNamespace(plan=SimpleNamespace(url="http://127.0.0.1:1", log=tmp_path / "log"), process=process)
        servers.running = [one]
        kept = KeptReplicas(servers, Restarts(run, 2, lambda text: None), 600, lambda *_: None)
        kept.failed[one.plan.url] = restarts._Down(None, 0.0, deadline=1e12, asked=1e12)  # it loads
        ask_for_restart(run, one.plan.url, Request(process.pid, "its canary is off"))
        kept.look()
        assert process.poll() is None
        del kept.failed[one.plan.url]
        kept.look()
        assert kept.failed[one.plan.url].restart.why == "is not usable: its canary is off"


def test_trainer_and_server_that_share_memory_are_started_again_together(stand_ins, tmp_path):
    """The server measures the free memory of its GPU while it loads, and a shared base dies with it."""
    order = tmp_path / "order"
    note = f"open({str(order)!r}, 'a').write(NAME + str(n) + ' ')\n"
    server = counted(tmp_path, "servers") + note.replace("NAME", "'server'") + DIES_WHEN_TOLD
    trainer = counted(tmp_path, "trainers") + "assert SERVER()\n" + note.replace("NAME", "'trainer'")
    trainer += f"if n == 1:\n    time.sleep(1); open({str(tmp_path / 'die')!r}, 'w')\n    time.sleep(600)\n"
    assert stand_ins(("0",), restarts=1, server=server, trainer=trainer) == 0
    assert order.read_text().split() == ["server1", "trainer1", "server2", "trainer2"]
    assert starts(tmp_path, "trainers") == ["0", "0"], "the trainer must not wait"
    (one,) = read_restarts(RunDir(tmp_path))
    assert one.what.startswith("server") and one.seconds > 0, "one fault is one restart"


@pytest.mark.parametrize("what", ["server", "trainer"])
def test_a_signal_during_the_delay_ends_everything_at_once(stand_ins, tmp_path, monkeypatch, left, what):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 600)
    monkeypatch.setattr(restarts, "LONGEST_DELAY_S", 600)
    server = DIES_WHEN_TOLD
    trainer = tell_it_to_die(tmp_path) + "time.sleep(600)"
    programs = {"server": server, "trainer": trainer}
    if what == "trainer":
        programs = {"trainer": "import os; os.kill(os.getpid(), 9)"}

    def interrupt() -> None:
        while not read_restarts(RunDir(tmp_path)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    assert stand_ins(restarts=1, **programs) == 130 and time.monotonic() - began < 300
    assert left() == []


@pytest.mark.parametrize(
    ("code", "how", "is_machine", "resumes"),
    [
        (-signal.SIGKILL, None, False, True),  # as the kernel does when memory runs out
        (-signal.SIGSEGV, None, False, True),
        (-signal.SIGBUS, None, False, True),
        (-signal.SIGABRT, None, False, True),  # NCCL's watchdog
        (-signal.SIGTERM, None, False, False),  # somebody's
        (-signal.SIGINT, INTERRUPTED, False, False),
        (2, FAILED, False, False),
        (1, FAILED, False, False),  # a NaN, a gate, a bound
        (1, FAILED, True, True),
        (1, DONE, False, False),
        (1, None, False, False),
    ],
)
def test_a_trainer_resumes_after_a_fault_of_the_machine_and_no_other(tmp_path, code, how, is_machine, resumes):
    if how is not None:
        _record_end(RunDir(tmp_path), how, "why", is_machine)
    assert may_resume(jobs.JobFailed("trainer", "trainer failed", code), RunDir(tmp_path)) is resumes


def error_named(name: str, text: str = "") -> Exception:
    return type(name, (RuntimeError,), {})(text)


@pytest.mark.parametrize(
    ("error", "is_machine"),
    [
        (OSError(28, "No space left on device"), True),
        (MachineFailed("saving step 4 failed"), True),
        (error_named("AcceleratorError", "CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: device lost"), True),
        (error_named("DistBackendError", "NCCL error: remote process exited"), True),
        (error_named("OutOfMemoryError", "CUDA error: out of memory"), False),
        (CheckFailed("loss not finite"), False),
        (CheckFailed("CUDA error"), False),
        (ValueError("a bug"), False),
        (OSError(2, "No such file"), False),
    ],
)
def test_faults_of_the_machine_are_told_from_those_of_the_run(error, is_machine):
    assert is_machine_fault(error) is is_machine


def test_the_delay_doubles_until_a_step_is_made_and_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 1.0)
    made, delays = Restarts(RunDir(tmp_path), 12, lambda text: None), []
    for number in range(12):
        if number == 8:
            (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        made.begin("trainer", "was killed")
        delays.append(made.delay_s)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2, 4, 8]
    with pytest.raises(CheckFailed, match="--restarts 12 are used up"):
        made.begin("trainer", "was killed")


def test_the_newest_step_is_known_without_keeping_those_before_it(tmp_path):
    made, metrics = Restarts(RunDir(tmp_path), 1, lambda text: None), tmp_path / "metrics.jsonl"
    assert made.step == 0
    for steps in (range(1, 2001), range(1990, 1995)):  # the second is a resumed trainer's
        with open(metrics, "a") as file:
            file.write("".join(f'{{"step": {step}, "time": {step}.5}}\n' for step in steps))
        assert made.step == steps[-1] and len(made._log.rows) == 1
    restart = Restarted("trainer", "was killed", 1994, 1994.25, 0)
    assert made.has_step_since(restart)
    assert not made.has_step_since(Restarted("trainer", "was killed", 1994, 1995.0, 0))


@pytest.mark.parametrize("number", [-1, 10_001, 10**30])
def test_a_number_of_restarts_that_makes_no_sense_is_refused(number):
    with pytest.raises(BadInput, match=r"--restarts \(-?\d+\) must be at least 0 and at most 10,000"):
        up.prepare(TINY, [], None, False, restarts=number)


def test_the_newest_step_is_known_without_the_lines_of_all_others(tmp_path):
    """launch.up grew by 26 MiB over 2,000 steps that kept them."""
    made, file = Restarts(RunDir(tmp_path), 1, lambda text: None), RunDir(tmp_path).metrics_file
    rows = [json.dumps({"step": number, "time": 0, "text": "x" * 10_000}) + "\n" for number in range(1, 1001)]
    file.write_text("".join(rows))
    tracemalloc.start()
    assert made.step == 1000
    with open(file, "a") as more:
        for number in range(1001, 1501):
            more.write(json.dumps({"step": number, "time": 0, "text": "x" * 10_000}) + "\n")
            more.flush()
            assert made.step == number
    with open(file, "w") as again:  # by a trainer that resumed
        again.writelines(rows[:900])
    assert made.step == 900
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20, "1,500 lines are 15 MB"


def test_restarts_of_an_earlier_start_stay_in_the_runs_file(tmp_path):
    run = RunDir(tmp_path)
    before = Restarted("trainer", "was killed", 3, 1.0, 7, 2.0)
    write_restarts(run, [before])
    facts = '{"what": "x", "why": "x", "step": %s, "time": 1, "pid": 1, "seconds": %s}\n'
    with open(run.restarts_file, "a") as file:  # of a run from elsewhere
        file.write(facts % ("Infinity", "null") + facts % ("1", "[]") + "[" * 100_000 + '\nnull\n{"what": "cut of')
    assert read_restarts(run) == [before]
    Restarts(run, 1, lambda text: None, read_restarts(run)).begin("trainer", "was killed")
    assert [one.seconds for one in read_restarts(run)] == [2.0, None]
    assert json.loads(run.restarts_file.read_text().splitlines()[0]) == before.__dict__


def test_a_run_between_two_trainers_is_restarting_as_long_as_its_launch_up_lives(tmp_path):
    run, log = RunDir(tmp_path), MetricsLog(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "total_steps": 9, "time": 1.0}\n')
    log.poll()
    _record_end(run, FAILED, "the disk is full", is_machine=True)
    assert progress(log)["state"] == "failed"
    write_restarts(run, [Restarted("trainer", "was killed", 3, 2.0, os.getpid())])
    assert progress(log)["state"] == "restarting" and progress(log)["error"] is None
    console = Console(width=100, file=StringIO())
    console.print(header(run, progress(log)))
    assert "1 restart, the last: trainer was killed, after step 3" in console.file.getvalue()
    for one in (
        Restarted("trainer", "was killed", 3, 2.0, os.getpid(), 5.0),
        Restarted("trainer", "x", 3, 2.0, 2**22),
    ):
        write_restarts(run, [one])
        assert progress(log)["state"] == "failed"
