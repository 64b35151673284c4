"""Starting and ending the processes of a run, with small programs in the place of vLLM, the recipe and merge. What a
configuration becomes: test_up.py. The real programs: tests/smoke/test_up.py."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.plan.placement import Placement
from launch import up
from launch.starting import jobs, leash
from launch.starting.trainer_command import CPU, Command, read_launcher
from launch.starting.view import Status, StepLines, View
from tests import processes
from tests.unit.test_server_wait import Program, answers, free_port

ROOT = Path(__file__).parents[2]
TINY = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
__all__ = ["free_port"]  # a fixture
SERVES = answers(200, {"pid": 5})
STEPS = "import time\nfor n in range(1, 4): print(f'step {n}/3 reward 0.5', flush=True); time.sleep(0.1)\n"
SLEEPS = "import time; print('step 1/3 reward 0.5', flush=True); time.sleep(600)"
NOTES = """
import time
print("step 1/3 reward 0.5", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted while the server lives:", SERVER(), flush=True)
"""
# A worker with a session of its own that no signal but SIGKILL ends.
WITH_WORKER = (
    """
import subprocess, sys
worker = "import signal, time\\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\\nprint('deaf', flush=True)\\n"
worker = subprocess.Popen([sys.executable, "-c", worker + "time.sleep(600)"], start_new_session=True, stdout=-1)
worker.stdout.readline()
"""
    + NOTES
)
STUBBORN = "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n" + WITH_WORKER


def server_lives(port: int) -> str:
    """A program's expression: whether something listens there."""
    return f"(lambda: __import__('socket').socket().connect_ex(('127.0.0.1', {port})) == 0)"


def start_of(folder: Path, port: int, programs: dict[str, str], gpus: tuple[str, ...] = ()) -> up.Start:
    """A start of stand-ins: code for `check`, `base`, `server`, `trainer`; the last one is always there. Trainer and
    server share `gpus`."""

    def made(name: str) -> Command | None:
        code = programs.get(name)
        return code and Command([sys.executable, "-c", code.replace("SERVER", server_lives(port))], {})

    config = load_config(TINY, [f"--run.output_dir={folder}", "--rollout.server_wait_s=60"])
    url, log = f"http://127.0.0.1:{port}", folder / "logs" / f"server-{port}.log"
    servers = [Program(url, "127.0.0.1", port, None, {}, {}, log, programs["server"])] if "server" in programs else []

    class Start(up.Start):
        check = made("check")

    places = (read_launcher(str(ROOT / CPU)), Placement(gpus, gpus, is_machine_without=not gpus), None)
    return Start(config, ["--config", TINY], False, *places, RunDir(folder), made("base"), made("trainer"), servers)


def run(folder: Path, port: int, programs: dict[str, str], gpus: tuple[str, ...] = (), restarts: int = 0) -> int:
    """As a command of its own would run it; used by the tests and, in another process, by `DRIVER`."""
    up.check_answer, up.server_plans = lambda *_: None, lambda *_: start.servers
    start = start_of(folder, port, programs, gpus)
    start.restarts = restarts
    return up.Up(start).run()


DRIVER = """
import json, sys
from pathlib import Path
from launch.starting import jobs
from kit.core.errors import run_command
from tests.unit.test_up_processes import run
folder, port, programs, jobs.STOP_S = json.loads(sys.argv[1])
run_command(lambda: run(Path(folder), port, programs))
"""


@pytest.fixture
def port(free_port) -> int:
    return free_port()


@pytest.fixture
def stand_ins(tmp_path, port, monkeypatch):
    """`stand_ins(server=code, …)` runs them in this process: exit code, or the error it ends with."""
    for name in ("check_answer", "server_plans"):
        monkeypatch.setattr(up, name, getattr(up, name))  # restored after `run` replaces them

    def make(gpus: tuple[str, ...] = (), restarts: int = 0, **programs: str) -> int:
        return run(tmp_path, port, programs, gpus, restarts)

    return make


@pytest.fixture
def left():
    """`left()`: the processes below this one that the test started; other tests keep reward workers alive."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    return lambda: [one for one in psutil.Process().children(recursive=True) if one.pid not in before]


def note(path: Path, name: str) -> str:
    return f"open({str(path)!r}, 'a').write('{name} ')\n"


def until(condition: str) -> str:
    return f"import os, time\nwhile not ({condition}): time.sleep(0.05)\n"


def test_everything_starts_in_order_and_is_gone_at_the_end(stand_ins, tmp_path, capsys, left):
    """The trainer starts while the server loads: this server waits for it."""
    order = tmp_path / "order"
    serves = until(f"'trainer' in open({str(order)!r}).read()") + note(order, "server") + SERVES
    trainer = note(order, "trainer") + until("SERVER()") + STEPS
    code = stand_ins(check=note(order, "check"), base=note(order, "base"), server=serves, trainer=trainer)
    assert code == 0 and order.read_text().split() == ["check", "base", "trainer", "server"]
    assert left() == []
    said = capsys.readouterr().out
    for part in ("check: done", "base: done", "ready after", "step 1/3 reward 0.5", "step 3/3", "trainer: done"):
        assert part in said, said
    assert said.count("step 2/3") == 1
    assert {log.name.split("-")[0] for log in (tmp_path / "logs").iterdir()} == {
        *("check.log", "base.log", "server", "trainer.log")
    }


def test_servers_and_trainer_share_a_key_that_no_command_line_shows_and_that_ends_with_them(
    stand_ins, tmp_path, monkeypatch
):
    """A file of this user alone holds it while they run; every start has another; the user's own comes first."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    file, seen = tmp_path / "logs" / "server.key", tmp_path / "seen"
    tells = f"""
import os
words = open("/proc/self/cmdline").read()
key, held = os.environ["VLLM_API_KEY"], {str(file)!r}
held = (open(held).read().strip(), oct(os.stat(held).st_mode & 0o777)) if os.path.exists(held) else None
print(key, held == (key, "0o600"), key in words, file=open({str(seen)!r}, "a"))
"""
    for _ in range(2):
        assert stand_ins(server=tells + SERVES, trainer=tells + until("SERVER()") + STEPS) == 0
        assert not file.exists() and "VLLM_API_KEY" not in os.environ
    monkeypatch.setenv("VLLM_API_KEY", "the-users")
    assert stand_ins(server=tells + SERVES, trainer=tells + until("SERVER()") + STEPS) == 0
    rows = [line.split() for line in seen.read_text().splitlines()]
    keys = [key for key, *_ in rows]
    assert len(set(keys)) == 3 and keys[:1] * 2 == keys[:2] and keys[2:3] * 2 == keys[2:4]
    assert {tuple(row[1:]) for row in rows[:4]} == {("True", "False")} and min(map(len, keys[:4])) >= 32
    assert rows[4:] == [["the-users", "False", "False"]] * 2
    assert not any(keys[0] in log.read_text() for log in (tmp_path / "logs").iterdir())


def test_on_shared_gpus_the_trainer_starts_once_the_server_answers(stand_ins):
    """vLLM measures the free memory of its GPU while it loads."""
    assert stand_ins(("0",), server=f"import time; time.sleep(1)\n{SERVES}", trainer="assert SERVER()") == 0


@pytest.mark.parametrize("failing", ["check", "base"])
def test_a_step_that_fails_keeps_what_follows_from_starting(stand_ins, tmp_path, failing):
    programs = {name: note(tmp_path / "order", name) for name in ("check", "base", "server", "trainer")}
    programs[failing] += "import sys; sys.exit('error: no such model')"
    with pytest.raises(jobs.JobFailed, match=rf"(?s){failing} ended with exit code 1. no such model.*{failing}.log"):
        stand_ins(**programs)
    assert "server" not in (tmp_path / "order").read_text()


@pytest.mark.parametrize(
    ("end", "exit_code", "told"),
    [
        ("print('error: bad key'); sys.exit(2)", 2, "trainer: bad key"),
        ("print('RuntimeError: x'); sys.exit(1)", 1, "ended with exit code 1. The first error in it: RuntimeError: x"),
        ("os.kill(os.getpid(), 9)", 1, "trainer was killed by SIGKILL (the kernel does so if the machine"),
    ],
)
def test_a_trainer_that_dies_ends_the_servers_with_its_reason_and_code(
    stand_ins, tmp_path, end, exit_code, told, monkeypatch, left
):
    monkeypatch.setattr(up, "FOLLOWED_S", 0.1)
    with pytest.raises(jobs.JobFailed) as failed:
        stand_ins(server=SERVES, trainer=f"import os, sys; print('last words', flush=True); {end}")
    assert failed.value.exit_code == exit_code and told in str(failed.value)
    assert str(tmp_path / "logs" / "trainer.log") in str(failed.value)
    assert left() == []


DIES_LATER = "import os, threading; threading.Timer(1.5, lambda: os._exit(3)).start()\n" + SERVES


@pytest.mark.parametrize(
    ("server", "trainer"),
    [
        (DIES_LATER, NOTES),
        # While the trainer loads; its own end, of whatever kind, does not hide the server's.
        (until("os.path.exists('../noted')") + "os._exit(3)", "open(NOTED, 'w'); import time; time.sleep(600)"),
        ("import time; time.sleep(1); import os; os._exit(3)", "import sys; sys.exit('error: no answer')"),
    ],
)
def test_a_server_that_dies_ends_the_trainer(stand_ins, tmp_path, port, left, monkeypatch, server, trainer):
    monkeypatch.setattr(up, "FOLLOWED_S", 0.0)
    began = time.monotonic()
    with pytest.raises(CheckFailed, match=rf"the server at http://127.0.0.1:{port} ended with exit code 3") as failed:
        stand_ins(server=server, trainer=trainer.replace("NOTED", repr(str(tmp_path / "noted"))))
    assert failed.value.exit_code == 1 and time.monotonic() - began < 100
    assert left() == []


def test_a_server_that_dies_behind_a_failing_trainer_is_named_as_the_cause(stand_ins, monkeypatch):
    """Requests fail while a server is still on its way down."""
    monkeypatch.setattr(up, "FOLLOWED_S", 10.0)
    trainer = until("SERVER()") + "import sys; time.sleep(1); sys.exit('error: no answer')"
    with pytest.raises(CheckFailed, match=r"(?s)ended with exit code 3.*trainer ended with exit code 1. no answer"):
        stand_ins(server=DIES_LATER.replace("1.5", "3.5"), trainer=trainer)


@contextlib.contextmanager
def driven(folder: Path, port: int, programs: dict[str, str], stop_s: float = 10, **how) -> Iterator[subprocess.Popen]:
    """`up` in a process of its own, at work on its first step."""
    import json

    words = [sys.executable, "-c", DRIVER, json.dumps([str(folder), port, programs, stop_s])]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
    process = subprocess.Popen(words, cwd=ROOT, **how)
    family = []
    try:
        log = folder / "logs" / "trainer.log"
        processes.wait_until(lambda: log.exists() and re.search(r"^step 1/3", log.read_text(), re.M), process)
        process.family = family = psutil.Process(process.pid).children(recursive=True)
        yield process
    finally:
        for one in [process, *family]:
            with contextlib.suppress(psutil.Error):
                one.kill()
        processes.finish(process)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def gone(family: list[psutil.Process], within_s: float = 5.0) -> bool:
    """Whether all of them have ended, as zombies have that nobody collects; the last of them may just be ending."""
    ends = time.monotonic() + within_s
    while any(map(lives, family)):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("number", "trainer", "count"),
    [(signal.SIGINT, WITH_WORKER, 5), (signal.SIGTERM, NOTES, 4), (signal.SIGHUP, NOTES, 4)],
)
def test_a_signal_ends_the_trainer_then_the_servers_and_every_descendant(tmp_path, port, number, trainer, count):
    with driven(tmp_path, port, {"server": SERVES, "trainer": until("SERVER()") + trainer}) as process:
        assert len(process.family) == count, "two leashes, server, trainer, and its worker"
        process.send_signal(number)
        said, _ = processes.finish(process)
        assert process.returncode == 128 + number
        assert gone(process.family)
    assert f"stopped by {number.name}; all processes have ended" in said
    assert "interrupted while the server lives: True" in (tmp_path / "logs" / "trainer.log").read_text()


def test_a_trainer_that_does_not_listen_is_killed_after_its_time(tmp_path, port):
    with driven(tmp_path, port, {"trainer": STUBBORN}, stop_s=1) as process:
        process.send_signal(signal.SIGINT)
        processes.finish(process)
        assert process.returncode == 130 and gone(process.family)


def test_a_second_interrupt_kills_at_once(tmp_path, port):
    with driven(tmp_path, port, {"server": SERVES, "trainer": STUBBORN}, stop_s=600) as process:
        process.send_signal(signal.SIGINT)
        while "asked to end" not in (line := process.stdout.readline()):  # else a stalled one gets both as one
            assert line, "ended"
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        processes.finish(process)
        assert process.returncode == 130 and gone(process.family)


def test_nothing_stays_when_up_itself_is_killed_outright(tmp_path, port):
    with driven(tmp_path, port, {"server": SERVES, "trainer": WITH_WORKER}) as process:
        process.kill()
        processes.wait_until(lambda: gone(process.family))
        assert gone(process.family)


def test_a_leash_killed_outright_takes_its_command_along(tmp_path, port):
    with driven(tmp_path, port, {"trainer": SLEEPS}) as process:
        held = next(one for one in process.family if SLEEPS in one.cmdline() and "leash.py" in " ".join(one.cmdline()))
        held.kill()
        said, _ = processes.finish(process)
        assert process.returncode == 1 and "trainer was killed by SIGKILL" in said
        processes.wait_until(lambda: gone(process.family))


def test_a_closed_terminal_ends_everything(tmp_path, port):
    ours, theirs = pty.openpty()
    how = {"stdout": theirs, "stderr": theirs, "stdin": theirs, "text": False, "start_new_session": True}

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with driven(tmp_path, port, {"trainer": NOTES}, preexec_fn=take_terminal, **how) as process:
        os.close(theirs)
        os.close(ours)
        processes.finish(process)
        assert process.returncode == 128 + signal.SIGHUP
        assert gone(process.family)


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), 15)", -15)],
)
def test_a_leash_ends_as_its_command_does(program, code):
    words = [sys.executable, "-c", f"import os; {program}"]
    assert processes.run([*jobs.leash(), *words]).returncode == code


def test_a_leash_ends_what_its_command_leaves_behind_and_refuses_a_parent_that_is_gone(tmp_path):
    daemon = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.setsid()\n"
    daemon = f"{daemon}open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    leaves = (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {daemon!r}])\n"
        f"while not os.path.exists({str(tmp_path / 'pid')!r}): time.sleep(0.05)"
    )
    done = processes.run([*jobs.leash(), sys.executable, "-c", leaves])
    assert done.returncode == 0 and not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    words = [sys.executable, leash.__file__, "1", sys.executable, "-c", "print('started')"]
    done = processes.run(words)
    assert (done.returncode, done.stdout) == (1, "")


def statuses(folder: Path) -> list[Status]:
    log = folder / "server.log"
    log.write_text("INFO loading\nINFO weights of " + "x" * 200 + "\n\n")
    return [
        Status("server 8000", "serving", 4711, ("0",), 3671.5, log),
        Status("trainer", "running", 4712, ("1", "2"), 5, folder / "none"),
    ]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 45), (200, 24)])
def test_the_page_fits_any_terminal_and_shows_every_process_and_the_runs_curves(tmp_path, width, height):
    row = '{"step": %d, "total_steps": 30, "reward": 0.5, "kl": 0.1, "time": 1.0, "seconds": {"step": 1.0}}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(row % step for step in range(1, 31)))
    console = Console(width=width, height=height, file=StringIO(), force_terminal=True, color_system=None)
    console.print(View(RunDir(tmp_path), lambda: statuses(tmp_path), console).page())
    lines = console.file.getvalue().splitlines()
    assert 10 < len(lines) < height and all(len(line) <= width for line in lines)
    assert "server 8000" in lines[1] and "1:01:11" in lines[1] and "INFO weights of xx" in lines[1]
    assert "trainer" in lines[2] and "1,2" in lines[2] and "step 30/30" in console.file.getvalue()


def test_in_a_terminal_events_stand_above_the_page(tmp_path):
    console = Console(width=100, file=StringIO(), force_terminal=True, color_system=None)
    with View(RunDir(tmp_path), lambda: statuses(tmp_path), console) as view:
        view.say("server: ready")
        view.update()
    text = console.file.getvalue()
    assert text.index("server: ready") < text.rindex("4712")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_output_that_is_gone_does_not_end_the_run(tmp_path, is_terminal):
    tried = []

    class Gone(StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(5, "Input/output error")

    log = tmp_path / "trainer.log"
    with View(RunDir(tmp_path), lambda: [], Console(width=100, file=Gone(), force_terminal=is_terminal)) as view:
        view.follow_steps(log)
        view.say("server: ready")
        said = len(tried)
        log.write_text("step 1/9 reward 0.5\n")
        view.update(at_once=True)
        assert 0 < said < len(tried), "the event and then the step, or the page, were to be written"
        assert is_terminal or "step 1/9 reward 0.5" in tried[-1]


def test_steps_are_told_once_and_whole(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("step 1/9 of an earlier start\n")
    steps = StepLines(log)
    assert steps.new() == []
    with open(log, "a") as file:
        file.write("step      8 problems x 8\nstep 2/9 rew")
        file.flush()
        assert steps.new() == []
        file.write("ard 1\nstep 3/9 reward 2\nwarning: x\n")
        file.flush()
        assert steps.new() == ["step 2/9 reward 1", "step 3/9 reward 2"]
    assert steps.new() == []
