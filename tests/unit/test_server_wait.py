"""Waiting for replicas and ending them, with small programs in the place of vLLM."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import write_json
from launch import server
from launch.replicas import Replicas, Stopped, members, started_at, stop_groups
from launch.vllm_command import Plan
from tests import processes

ANSWERS = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(STATUS); self.end_headers(); self.wfile.write(json.dumps(ANSWER).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
HANGS = """
import socket, sys, time
silent = socket.socket(); silent.bind(("127.0.0.1", int(sys.argv[1]))); silent.listen(); time.sleep(600)
"""
REFUSES = "import time; print('loading', flush=True); time.sleep(600)"
FAILS_IN_A_WORKER = """
print("(APIServer pid=6) WARNING 11-21 14:15:47 [system_utils.py:249] Found ulimit of 20000. This can cause fd limit "
      "errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n")
print("(Worker pid=7) ERROR 11-21 [executor.py:3] ValueError: no common block size", flush=True)
for number in range(300): print("noise of the others", number, flush=True)
raise RuntimeError("Engine core initialization failed")
"""
DIES = "import sys; print('no kernel image', flush=True); sys.exit(3)"
# A worker that ignores SIGTERM, and says so once it does, and a server that does not wait for it.
WITH_A_WORKER = """
import subprocess, sys, time
worker = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ignores', flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker])
time.sleep(600)
"""


def answers(status: int, answer: dict) -> str:
    return ANSWERS.replace("STATUS", str(status)).replace("ANSWER", repr(answer))


@dataclass(frozen=True)
class Program(Plan):
    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code, str(self.port)]


@pytest.fixture
def plan(tmp_path, free_port):
    def make(code: str, number: int = 0) -> Program:
        port = free_port()
        log = tmp_path / "logs" / f"server-{port}.log"
        return Program(f"http://127.0.0.1:{port}", "127.0.0.1", port, None, {}, {}, log, code)

    return make


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


def accept(plan: Plan, info: dict) -> None:
    assert info["pid"] == 5


def wait(plans: list[Plan], seconds: float) -> None:
    with Replicas(plans) as replicas:
        replicas.start()
        replicas.wait_ready(seconds, accept)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (REFUSES, "Connection refused"),
        (HANGS, "no answer within"),
        (answers(503, {"error": "loading weights"}), r"loading weights \(503\)"),
    ],
)
def test_a_server_that_never_gets_ready_ends_at_the_deadline_with_the_reason_and_its_log(plan, code, reason):
    replica, started = plan(code), time.monotonic()
    # Long enough for Python to start under load: until then every one of them refuses.
    with pytest.raises(CheckFailed, match=rf"(?s){replica.url} was not ready within 5 s.*{reason}.*{replica.log}"):
        wait([replica], 5)
    assert 5 <= time.monotonic() - started < 60


def test_one_deadline_holds_for_all_replicas(plan):
    started = time.monotonic()
    with pytest.raises(CheckFailed, match="within 5 s"):
        wait([plan(HANGS) for _ in range(4)], 5)
    assert time.monotonic() - started < 19, "a deadline for each of them would take 20 s"


def test_a_server_that_dies_ends_the_wait_at_once_with_its_exit_code_and_last_words(plan):
    dying, started = plan(DIES), time.monotonic()
    with pytest.raises(CheckFailed, match=rf"(?s){dying.url} ended with exit code 3.*no kernel image"):
        wait([plan(HANGS), dying], 120)
    assert time.monotonic() - started < 100


def test_the_first_error_is_told_though_others_follow_it(plan):
    failing = plan(FAILS_IN_A_WORKER)
    failing.log.parent.mkdir()
    failing.log.write_text("==== an earlier start\nOSError: of yesterday\n")
    with pytest.raises(CheckFailed) as failed:
        wait([failing], 120)
    assert "The first error in it: ValueError: no common block size\n" in str(failed.value)
    assert "RuntimeError: Engine core" in str(failed.value) and "yesterday" not in str(failed.value)


@pytest.mark.parametrize(("status", "reason"), [(404, "answered 404"), (401, "answered 401"), (500, "no such copy")])
def test_an_answer_that_will_not_change_ends_the_wait_at_once(plan, status, reason):
    started = time.monotonic()
    with pytest.raises(CheckFailed, match=reason):
        wait([plan(answers(status, {"error": "no such copy"}))], 120)
    assert time.monotonic() - started < 100


def test_a_replica_that_dies_later_ends_the_others(plan):
    with Replicas([plan(answers(200, {"pid": 5})), plan(answers(200, {"pid": 5}))]) as replicas:
        replicas.start()
        replicas.wait_ready(30, accept)
        first, second = replicas.running
        assert members(first.process.pid) and members(second.process.pid) and len(replicas.serving) == 2
        os.kill(second.process.pid, signal.SIGKILL)
        with pytest.raises(CheckFailed, match=f"{second.plan.url} was killed by SIGKILL"):
            replicas.watch()
    assert not members(first.process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_and_every_process(plan, number):
    handlers = signal.getsignal(number)
    with pytest.raises(Stopped), Replicas([plan(HANGS)]) as replicas:
        replicas.start()
        os.kill(os.getpid(), number)
        replicas.wait_ready(60, accept)
    assert not members(replicas.running[0].process.pid)
    assert signal.getsignal(number) == handlers


@pytest.fixture
def with_a_worker():
    """A server whose worker ignores SIGTERM by now."""
    words, pipe = [sys.executable, "-c", WITH_A_WORKER], subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "ignores\n"
        assert len(members(process.pid)) == 2
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("is_killed", [False, True])
def test_workers_that_ignore_the_signal_or_outlive_their_server_are_ended(with_a_worker, is_killed):
    if is_killed:
        with_a_worker.kill()
        with_a_worker.wait()
    assert stop_groups([with_a_worker.pid], patience_s=1) == []
    assert members(with_a_worker.pid) == []


LAUNCHER = """
import sys
from pathlib import Path
from tests.unit.test_server_wait import HANGS, Program
from launch import server
from launch.replicas import Replicas
plan = Program("u", "127.0.0.1", int(sys.argv[1]), None, {}, {}, Path(sys.argv[2]), HANGS)
with Replicas([plan], detach=sys.argv[3] == "detach") as replicas:
    replicas.start()
    print(replicas.running[0].process.pid, flush=True)
    if sys.argv[3] == "detach":
        replicas.leave_running()
    else:
        sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["foreground", "detach"])
def test_a_launcher_killed_outright_takes_its_replicas_along_and_a_detached_one_leaves_them(tmp_path, free_port, mode):
    words = [sys.executable, "-c", LAUNCHER, str(free_port()), str(tmp_path / "s.log"), mode]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=root)
    group = int(launcher.stdout.readline())
    if mode == "foreground":
        launcher.kill()
    launcher.wait()
    if mode == "foreground":
        with contextlib.suppress(AssertionError):
            processes.wait_until(lambda: not members(group))
    lives = bool(members(group))
    stop_groups([group], patience_s=5)
    assert lives == (mode == "detach")


def test_a_start_time_tells_a_process_from_its_successor():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first = started_at(process.pid)
    assert first is not None and started_at(process.pid) == first
    process.communicate(b"\n")
    assert started_at(process.pid) is None


@pytest.mark.parametrize("name", ["VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"])
def test_development_routes_and_pickle_are_off_whatever_the_shell_says(plan, monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, "1")
    code = f"import os; open({str(tmp_path / 'env')!r}, 'w').write(os.environ.get({name!r}, 'off'))"
    with pytest.raises(CheckFailed, match="exit code 0"):
        wait([plan(code)], 30)
    assert (tmp_path / "env").read_text() == "off"


def test_stop_ends_what_a_detached_start_left_and_nothing_else(tmp_path, capsys, monkeypatch):
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, other = (subprocess.Popen(sleeper, start_new_session=True) for _ in range(2))
    # The number of a process of ours that ended belongs to somebody else by now.
    listed = [(ours.pid, started_at(ours.pid)), (other.pid, started_at(other.pid) - 1)]
    file = tmp_path / "run" / "logs" / "server.json"
    file.parent.mkdir(parents=True)
    rows = [{"url": f"u{pid}", "pid": pid, "started_at": since, "log": "l"} for pid, since in listed]
    write_json(file, {"replicas": rows})
    (tmp_path / "run.yaml").write_text(
        f"{{run: {{name: x, output_dir: {tmp_path}/run}}, model: {{id: m}}, train: {{max_steps: 1}}}}"
    )
    monkeypatch.setattr(sys, "argv", ["server", "stop", "--config", str(tmp_path / "run.yaml")])
    assert server.main() == 0
    assert members(ours.pid) == [] and members(other.pid) == [other.pid]
    assert f"u{other.pid} (pid {other.pid}) has ended already" in capsys.readouterr().out
    other.kill()
    for process in (ours, other):
        process.wait()
    with pytest.raises(BadInput, match="no detached replica"):
        server.main()
