"""The worker pool: hangs, crashes, replacement, budgets, threads, forks and orphans."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kit.core.errors import BadInput, CheckFailed
from reward.exact import prepared
from reward.pool import WORKER, UnknownBudget, Verdict, WorkerPool, _Worker
from tests import processes
from tests.unit import answer_cases as cases

ROOT = Path(__file__).parents[2]
TOWER = ("10^{10^{10}}", "5")
SOUND_S = 20.0  # timeout of comparisons that do not hang; a loaded machine may stall them for seconds

# The real worker with a comparison that misbehaves on request.
HOSTILE = f"""
import importlib.util, os, time
spec = importlib.util.spec_from_file_location("worker", {str(WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
real = worker.compare

def compare(predicted, gold):
    if predicted == "sleep":
        time.sleep(3600)
    if predicted == "crash":
        os.kill(os.getpid(), 11)
    if predicted == "exit":
        os._exit(0)
    if predicted == "memory":
        bytearray(8 << 30)
    if predicted == "deep":
        deep = lambda: deep()
        deep()
    if predicted == "raise":
        raise TypeError("no")
    if predicted == "print":
        print("noise on stdout")
        return True, "algebra"
    return real(predicted, gold)

worker.compare = compare
worker.main()
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Makes pools of misbehaving workers and closes them; a comparison that does not sleep has at least `SOUND_S`."""
    script = tmp_path / "hostile.py"
    script.write_text(HOSTILE)
    pools, send = [], _Worker.send

    def send_patiently(worker, task, timeout_s):
        send(worker, task, timeout_s if task[0] == "sleep" else max(timeout_s, SOUND_S))

    monkeypatch.setattr(_Worker, "send", send_patiently)

    def make(workers=2, timeout_s=0.5):
        pools.append(WorkerPool(workers, timeout_s, [sys.executable, "-P", str(script)]))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(workers=2, timeout_s=SOUND_S)
    yield pool
    pool.close()


def alive(pid: int) -> bool:
    try:  # it may end between any two looks at it
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids):
    processes.wait_until(lambda: not any(alive(pid) for pid in pids))
    return True


HERE = [(pair, True) for pair in cases.EQUAL] + [(pair, False) for pair in cases.DIFFERENT]
HERE += [
    ((answer, "5"), False) for answer in ("]}{[", "\x00", "__import__('os').system('touch /tmp/paid')", "1e99999")
]


def test_a_worker_decides_alike_what_needs_none(pool):
    verdicts = pool.compare([(prepared(predicted), prepared(gold)) for (predicted, gold), _ in HERE])
    assert [pair for (pair, expected), found in zip(HERE, verdicts, strict=True) if found.value is not expected] == []


def test_an_unparseable_reference_is_undecided_and_says_so(pool):
    assert pool.compare([("5", "]{{{")]) == [Verdict(None, "gold")]


def test_verdicts_are_the_same_for_one_and_two_workers(pool):
    pairs = (cases.EQUAL_THERE + cases.DIFFERENT_THERE) * 2
    single = WorkerPool(workers=1, timeout_s=SOUND_S)
    try:
        assert single.compare(pairs) == pool.compare(pairs) == pool.compare(pairs[::-1])[::-1]
    finally:
        single.close()


def test_a_tower_of_powers_is_undecided_within_the_limit_and_its_worker_is_replaced():
    pool = WorkerPool(workers=1, timeout_s=SOUND_S)
    try:
        assert pool.compare([("1+1", "2")])[0].value is True
        first = pool.pids()
        pool.timeout_s, started = 1.0, time.monotonic()
        assert pool.compare([TOWER]) == [Verdict(None, "timeout")]
        assert 1.0 <= time.monotonic() - started
        assert not any(map(alive, first))  # killed, not left to its own CPU limit
        pool.timeout_s = SOUND_S
        assert pool.compare([("1+1", "2")])[0].value is True
        assert pool.pids() != first
        assert pool.counts == {"algebra": 2, "timeout": 1}
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("sleep", "timeout"),
        ("crash", "crash"),
        ("exit", "crash"),
        ("memory", "memory"),
        ("deep", "recursion"),
        ("raise", "TypeError"),
    ],
)
def test_a_misbehaving_comparison_costs_only_its_own_sample(hostile, request_, reason):
    pool = hostile(workers=1, timeout_s=1.0)
    verdicts = pool.compare([("1+1", "2"), (request_, "5"), ("print", "4")])  # the last prints on stdout
    assert verdicts == [Verdict(True, "algebra"), Verdict(None, reason), Verdict(True, "algebra")]
    assert pool.counts[reason] == 1


def test_hangs_are_spread_over_the_workers(hostile):
    pool = hostile(workers=2, timeout_s=0.5)
    pool.compare([("1+1", "2"), ("1+2", "3")])
    started = time.monotonic()
    verdicts = pool.compare([("sleep", str(number)) for number in range(4)])
    assert [verdict.reason for verdict in verdicts] == ["timeout"] * 4
    assert time.monotonic() - started < 60  # two limits in a row, plus the start of the replacements


def test_a_replacement_is_forked_and_imports_nothing(hostile):
    pool = hostile(workers=1, timeout_s=0.3)
    assert pool.compare([("print", "5")])[0].value is True
    server, first = pool._server.process.pid, pool.pids()
    taken = sum(psutil.Process(server).cpu_times()[2:4])
    for number in range(5):
        assert pool.compare([("sleep", str(number)), ("print", "5")]) == [
            Verdict(None, "timeout"),
            Verdict(True, "algebra"),
        ]
    # CPU time of children that ended: importing sympy five times takes longer.
    assert sum(psutil.Process(server).cpu_times()[2:4]) - taken < 2
    assert pool._server.process.pid == server and pool.pids() != first


def test_a_server_that_is_killed_is_started_again_and_ends_with_its_pool(hostile):
    pool = hostile(workers=2, timeout_s=5.0)
    pool.compare([("print", "5"), ("print", "6")])
    workers, server = pool.pids(), pool._server.process
    server.kill()
    server.wait()
    assert wait_gone(workers)  # each watches its server
    assert pool.compare([("print", "7")]) == [Verdict(True, "algebra")]
    assert pool._server.process.pid != server.pid
    everyone = [*pool.pids(), pool._server.process.pid]
    pool.close()
    assert wait_gone(everyone)


def test_tasks_in_flight_when_the_server_dies_are_undecided_and_the_rest_goes_on(hostile):
    pool = hostile(workers=2, timeout_s=5.0)
    pool.compare([("print", "5"), ("print", "6")])
    threading.Timer(0.5, pool._server.process.kill).start()
    verdicts = pool.compare([("sleep", "1"), ("sleep", "2"), ("print", "7")])
    assert [verdict.value for verdict in verdicts] == [None, None, True]


def test_equal_pairs_of_a_batch_are_compared_once(hostile):
    pool = hostile(workers=1, timeout_s=0.5)
    started = time.monotonic()
    assert pool.compare([("sleep", "5")] * 50) == [Verdict(None, "timeout")] * 50
    assert time.monotonic() - started < 20  # one by one they would take 25 s
    assert pool.counts["timeout"] == 50


def test_a_batch_is_compared_under_its_policy(monkeypatch):
    pool = WorkerPool()
    monkeypatch.setattr(pool, "_run", lambda tasks: {task: Verdict(task[2] == "lenient", "exact") for task in tasks})
    pairs = [("a", "b"), ("a", "b"), (None, "c")]
    assert [one.value for policy in ("", "lenient") for one in pool.compare(pairs, policy)] == [False] * 3 + [True] * 3


def test_a_worker_that_died_while_idle_costs_no_sample(hostile):
    pool = hostile(workers=1)
    pool.compare([("1+1", "2")])
    (worker,) = pool._live
    os.kill(worker.pid, signal.SIGKILL)
    processes.wait_until(worker.is_dead)
    assert pool.compare([("2+2", "4")]) == [Verdict(True, "algebra")]


def test_it_works_off_the_main_thread_and_from_several_threads(pool):
    results = {}

    def score(number):
        results[number] = pool.compare([(f"{number}+1", str(number + 1)), ("x", str(number))])

    threads = [threading.Thread(target=score, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: [Verdict(True, "algebra"), Verdict(False, "algebra")] for n in range(6)}
    # The starting thread has ended; its workers have not.
    assert pool.compare([("7+1", "8")])[0].value is True


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([sys.executable, "-c", "raise SystemExit('no module math_verify')"], "no module math_verify"),
        (["/nowhere/no-python"], "No such file or directory"),
    ],
)
def test_workers_that_cannot_start_are_bad_input_with_their_output(command, message):
    pool = WorkerPool(1, 1.0, command)
    with pytest.raises(BadInput, match=rf"do not start \(3 attempts\).*Install math-verify(.|\n)*{message}"):
        pool.compare([("x+1", "1+x")])
    assert pool.pids() == []


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: WorkerPool(0, 1.0), "workers"),
        (lambda: WorkerPool(-1, 1.0), "workers"),
        (lambda: WorkerPool(1, 0.0), "timeout_s"),
        (lambda: UnknownBudget("math", -0.1), "max_unknown_fraction"),
        (lambda: UnknownBudget("math", 1.1), "max_unknown_fraction"),
    ],
)
def test_impossible_settings_are_bad_input(make, key):
    with pytest.raises(BadInput, match=rf"reward\.{key}"):
        make()


# A parent prints the pids of its workers and server, then is busy with a power that holds the interpreter lock (one
# worker idle), with a worker asleep, or exits.
TWO_WORKERS = "pool = WorkerPool(2, 3.0)\nwhile len(pool.pids()) < 2: pool.compare([('1+1', '2'), ('1+2', '3')])"
ONE_HOSTILE = "pool = WorkerPool(1, 600.0, [sys.executable, '-P', 'hostile.py'])\npool.compare([('1+1', '2')])"
SHARED = "pool = shared_pool()\nwhile not pool.pids(): answers_equal('\\\\sqrt{3+2\\\\sqrt{2}}', '1+\\\\sqrt{2}')"


@pytest.mark.parametrize(
    ("start", "then", "pids"),
    [
        (TWO_WORKERS, f"pool.compare([{TOWER!r}])", 3),
        (ONE_HOSTILE, "pool.compare([('sleep', '5')])", 2),
        (SHARED, "", 2),
    ],
    ids=["power", "asleep", "exit"],
)
def test_workers_and_their_server_end_with_their_parent(tmp_path, start, then, pids):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    imports = "import sys\nfrom reward.answer import answers_equal\nfrom reward.pool import WorkerPool, shared_pool"
    code = f"{imports}\n{start}\nprint(*pool.pids(), pool._server.process.pid, flush=True)\n{then}"
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    found = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(found) == pids
    if then:
        time.sleep(0.5)
        assert all(alive(pid) for pid in found)
        parent.kill()
    assert parent.wait(60) == (-signal.SIGKILL if then else 0)
    assert wait_gone(found)


def test_a_forked_child_starts_workers_of_its_own(pool):
    pool.compare([("1+1", "2")])
    parents_workers = set(pool.pids())
    held, release = threading.Event(), threading.Event()

    def another_thread_scores():
        with pool._lock:  # which exists in the parent only: the child must not wait for it
            held.set()
            release.wait(60)

    thread = threading.Thread(target=another_thread_scores)
    thread.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fine = pool.compare([("1+2", "3")])[0].value is True and not parents_workers & set(pool.pids())
            pool.close()
            code = 0 if fine else 2
        finally:
            os._exit(code)
    release.set()
    thread.join(10)
    try:
        ended = processes.wait_until(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert pool.compare([("2+2", "4")])[0].value is True
    assert parents_workers == set(pool.pids())


UNKNOWN, KNOWN = Verdict(None, "timeout"), Verdict(True, "exact")


def record(budget, unknown, known):
    budget.record([UNKNOWN] * unknown + [KNOWN] * known, ["answer 'A'"] * unknown + ["fine"] * known)


def test_a_spent_budget_stops_with_reasons_and_examples():
    budget = UnknownBudget("math", 0.02)
    record(budget, 5, 95)  # 5 of the 256 that the fraction is taken of at least
    with pytest.raises(CheckFailed, match=r"6 of the last 101 samples \(timeout 6\)") as error:
        record(budget, 1, 0)
    assert "timeout: answer 'A'" in str(error.value) and "2.00%" in str(error.value)
    assert budget.counts == {"timeout": 6}


def test_a_budget_within_its_fraction_never_stops():
    budget = UnknownBudget("math", 0.02)
    for _ in range(100):
        record(budget, 1, 49)
    assert budget.counts == {"timeout": 100}


def test_a_budget_forgets_what_left_its_window():
    budget = UnknownBudget("math", 0.02, window=300)
    for _ in range(5):
        record(budget, 5, 300)  # 25 in 300 would be over the budget, 5 in 300 is not
    assert budget.counts == {"timeout": 25}


def test_wrong_answers_are_known_ones_and_a_budget_of_zero_stops_at_the_first_unknown():
    budget = UnknownBudget("math", 0.0)
    budget.record([Verdict(False, "exact")] * 1000, ["answer 'A'"] * 1000)
    assert not budget.counts
    with pytest.raises(CheckFailed):
        record(budget, 1, 1000)


def test_a_budget_can_be_pickled_with_its_counts():
    budget = UnknownBudget("math", 0.5)
    record(budget, 2, 8)
    assert pickle.loads(pickle.dumps(budget)).counts == budget.counts
