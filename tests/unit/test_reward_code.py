"""The code reward: which code is judged, what passes, and that no attempt is paid or does harm, at any isolation."""

import dataclasses
import importlib
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config, DataConfig, RewardConfig
from kit.core.errors import BadInput, CheckFailed
from kit.data.problems import read_problems
from kit.environments.python_tool import python_tool
from kit.train.record import code_sandbox
from reward import REWARDS, check_run, reward_functions
from reward.attacks import code as attacks
from reward.code import extract_code
from reward.code_gold import gold_from_row, read_gold
from reward.sandbox import Isolation, Job, Outcome, Sandbox, enabling, shared_sandbox
from tests import processes

# Parts of the isolation that are left out, and the level that this gives where the machine allows everything.
LEVELS = {"full": (), "namespaces": ("seccomp",), "confined": ("mount",), "filter": ("mount", "net", "landlock")}
ADD = "def add(a, b):\n    return a + b"
TESTS = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0")


def job(code=ADD, tests=TESTS, names=("add",), **fields) -> Job:
    return Job(code, tests, names, **fields)


@pytest.fixture(scope="module", params=LEVELS)
def sandbox(request):
    made = Sandbox(2, timeout_s=1.0, isolation="any", refused=LEVELS[request.param])
    try:
        level = made.isolation().level
    except BadInput as error:
        pytest.skip(f"this machine: {error}")
    if level != request.param:
        made.close()
        pytest.skip(f"this machine allows {level}, not {request.param}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def strongest():
    made = Sandbox(2, timeout_s=1.0, isolation="any")
    yield made
    made.close()


def cases_as_jobs(cases):
    return [
        (case, Job(extract_code(case.completion, case.prompt), gold.tests, gold.names, gold.setup, gold.prompt))
        for case in cases
        if extract_code(case.completion, case.prompt) and (gold := read_gold(case.gold))
    ]


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found |= {int(child)} | descendants(int(child))
    except FileNotFoundError:
        pass
    return found


def wrong_verdicts(sandbox: Sandbox, cases) -> list[tuple[str, Outcome]]:
    """The cases whose verdict is not theirs, or that left something behind."""
    table = cases_as_jobs(cases)
    outcomes = sandbox.run([job for _, job in table])
    assert leftovers(sandbox) == []
    return [
        (case.name, outcome)
        for (case, _), outcome in zip(table, outcomes, strict=True)
        if not outcome.decided or (outcome.passed == outcome.total) != case.pays
    ]


def leftovers(sandbox: Sandbox) -> list[str]:
    """Processes under the fork servers and their directories."""
    left = [f"process {pid} of {server}" for server in sandbox.pids() for pid in descendants(server)]
    return left + [str(server.scratch) for server in sandbox._all if server.scratch.exists()]


def test_no_attempt_is_paid_and_every_honest_completion_is(strongest):
    started = time.perf_counter()
    assert sum(not case.pays for case in attacks.CASES) >= 180
    assert wrong_verdicts(strongest, attacks.CASES) == []
    assert time.perf_counter() - started < 600


# What a weaker isolation does not refuse: calls without the filter, files without namespaces and Landlock.
ALLOWED = {
    "namespaces": attacks.PROGRAMS[attacks.BY_CALL],
    "filter": ("the password file", "the root through a process"),
}
DAMAGE = {name for title, found in attacks.PROGRAMS.items() if title.startswith("damage") for name in found}


def test_no_attempt_is_paid_at_any_isolation(sandbox):  # without damage, which takes time
    level = sandbox.isolation().level
    if level == "full":
        return  # the test above
    left_out = DAMAGE | set(ALLOWED.get(level, ()))
    assert wrong_verdicts(sandbox, [case for case in attacks.CASES if case.name not in left_out]) == []


def test_the_filter_is_what_stops_system_calls(sandbox):
    """Without it some of them succeed, so the attempts are real; names those that then do."""
    if sandbox.isolation().level != "namespaces":
        return
    escapes = [case for case in attacks.CASES if case.name in attacks.PROGRAMS[attacks.BY_CALL]]
    outcomes = sandbox.run([job for _, job in cases_as_jobs(escapes)])
    assert sum(outcome.reason == "passed" for outcome in outcomes) >= 10


@pytest.mark.slow
def test_no_damage_is_done_or_paid_at_any_isolation(sandbox):
    if sandbox.isolation().level != "full":  # there among the others, above
        assert wrong_verdicts(sandbox, [case for case in attacks.CASES if case.name in DAMAGE]) == []


@pytest.mark.parametrize(
    ("refused", "lacking", "accepted"),
    [
        (("seccomp",), r"the system call filter \(seccomp\)", "confined"),
        (("mount",), "the namespaces mount", "confined"),
        (("mount", "net", "landlock"), "the namespaces ipc, mount, net, pid", "any"),
    ],
)
def test_a_machine_that_allows_less_runs_no_code_unless_told(refused, lacking, accepted):
    weak = Sandbox(1, timeout_s=1.0, refused=refused)
    with pytest.raises(BadInput, match=f"runs no code: it needs isolation 'full', and .*lacks {lacking}.*not wanted"):
        weak.run([job()])
    assert weak.pids() == [], "no server is left"
    told = Sandbox(1, timeout_s=1.0, isolation=accepted, refused=refused)
    try:
        assert told.run([job()])[0].reason == "passed"
    finally:
        told.close()


def test_file_rules_do_not_pass_for_nothing():
    with pytest.raises(BadInput, match=r"file rules \(landlock\).*environment.isolation"):
        Sandbox(1, isolation="confined", refused=("mount", "net", "landlock")).run([job()])


def test_a_weak_machine_is_refused_before_a_run_loads_its_base(monkeypatch):
    monkeypatch.setattr(Isolation, "level", "filter")
    for options, message in (({}, "isolation 'full'"), ({"isolation": "confined"}, "isolation 'confined'")):
        (bound,), _ = reward_functions(
            RewardConfig(
                functions=["code"], allow_code_execution=True, options={"code": options | {"timeout_s": 4.25}}
            )
        )
        with pytest.raises(BadInput, match=message):
            check_run([bound], None, [])
    with pytest.raises(BadInput, match="isolation 'full'"):
        python_tool(4.25)  # a sandbox that no other test has started
    with pytest.raises(BadInput, match="isolation is 'none', expected one of full, confined, any"):
        code_reward({"isolation": "none"})


@pytest.mark.parametrize(
    ("value", "command"), [("0", "sysctl user.max_user_namespaces=1000"), ("7", "--security-opt")]
)
def test_the_message_names_the_switch_that_forbids_namespaces(monkeypatch, tmp_path, value, command):
    (tmp_path / "switch").write_text(f"{value}\n")
    monkeypatch.setattr("reward.sandbox.SWITCHES", {str(tmp_path / "switch"): ("0", command)})
    assert command in enabling()


def test_files_of_this_machine_stay_as_they_are_and_unread(sandbox, tmp_path):
    victim = tmp_path / "tests.txt"
    victim.write_text("assert add(1, 2) == 3")
    for folder in (victim, *victim.parents[:3]):
        os.chmod(folder, 0o777)
    before = sorted(os.listdir(tmp_path)), victim.stat().st_mtime_ns
    code = f"""
import os, shutil
path = {str(victim)!r}
read = None
for attempt in (lambda: open(path, "w").write("x"), lambda: os.remove(path), lambda: os.chmod(path, 0),
                lambda: shutil.rmtree(os.path.dirname(path)), lambda: os.rename(path, path + "2"),
                lambda: open(os.path.dirname(path) + "/new", "w"), lambda: os.utime(path),
                lambda: os.truncate(path, 0), lambda: os.symlink(path, os.path.dirname(path) + "/link")):
    try: attempt()
    except OSError: pass
try: read = open(path).read()
except OSError: pass
def add(a, b): return (a + b) if read is None else read
"""
    (outcome,) = sandbox.run([job(code)])
    assert (sorted(os.listdir(tmp_path)), victim.stat().st_mtime_ns) == before
    assert victim.read_text() == "assert add(1, 2) == 3"
    if sandbox.isolation().level != "filter":
        assert outcome.reason == "passed", "the file could be read"


def test_nothing_outside_is_heard_of(sandbox):
    code = """
import os
def add(a, b):
    facts = []
    facts += [name for name in os.environ if name not in ("HOME", "TMPDIR", "LC_ALL")]
    try: facts.append(os.fork())
    except OSError: pass
    try: facts.append(os.read(0, 10) or None)
    except OSError: pass
    facts = [fact for fact in facts if fact is not None]
    return facts or a + b
"""
    (outcome,) = sandbox.run([job(code)])
    assert outcome.reason == "passed"


def test_a_killed_server_leaves_no_process_and_its_job_is_judged_again():
    sandbox = Sandbox(2, timeout_s=2.0, isolation="any")
    try:
        assert [outcome.reason for outcome in sandbox.run([job(), job()])] == ["passed"] * 2
        sleeping = job("import time\ndef add(a, b):\n    time.sleep(60)")
        outcomes, began = [], time.monotonic()
        thread = threading.Thread(target=lambda: outcomes.extend(sandbox.run([sleeping])))
        thread.start()
        busy = processes.wait_until(lambda: next((pid for pid in sandbox.pids() if len(descendants(pid)) == 2), None))
        below = descendants(busy)
        time.sleep(0.5)  # until both have asked for their death signal
        os.kill(busy, 9)
        # The job itself has eight seconds, and a loaded machine takes up to two to clear what was killed.
        while any(os.path.exists(f"/proc/{pid}") for pid in below) and time.monotonic() - began < 7.5:
            time.sleep(0.05)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in below)
        thread.join(60)
        assert [outcome.reason for outcome in outcomes] == ["timeout"]
        assert busy not in sandbox.pids()
    finally:
        sandbox.close()


def test_the_tests_are_not_in_the_memory_of_the_process_that_runs_the_code(strongest):
    secret, argument = "secret-of-the-tests-41b7", "argument-of-the-call-9c2e"
    earlier = [job(tests=(f"assert add(1, {n}) == {n + 1}  # {secret}",)) for n in range(4)]
    assert {outcome.reason for outcome in strongest.run(earlier)} == {"passed"}
    code = "import time\nkept = []\ndef add(a, b):\n    kept.append(a)\n    time.sleep(60)"
    tests = (f"assert add({argument!r}, 1) == {secret!r}",)
    thread = threading.Thread(target=strongest.run, args=([job(code, tests, setup=f"hidden = {secret!r}")],))
    thread.start()
    try:
        found = []
        deadline = time.monotonic() + 10
        while not any(argument.encode() in memory for memory in found) and time.monotonic() < deadline:
            for server in strongest.pids():
                for judge in descendants(server):
                    found += [memory_of(candidate) for candidate in descendants(judge)]
            time.sleep(0.02)
        seen = [memory for memory in found if argument.encode() in memory]
        if not seen:
            pytest.skip("reading another process's memory needs root")
        assert not any(secret.encode() in memory for memory in seen)
    finally:
        thread.join(30)


def memory_of(pid: int) -> bytes:
    parts = []
    try:
        with open(f"/proc/{pid}/mem", "rb") as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if " rw" in line:
                    memory.seek(low)
                    parts.append(memory.read(high - low))
    except (OSError, ValueError):
        pass
    return b"".join(parts)


@pytest.mark.parametrize(
    ("code", "tests", "reason"),
    [
        ("def add(a, b): return (a, [b, {1: {2}}])", ("assert add(1, 2) == (1, [2, {1: {2}}])",), "passed"),
        ("def add(a, b): return [a, b]", ("assert add(1, 2) == (1, 2)",), "wrong"),
        ("def add(a, b): return 10 ** 400 + a", ("assert add(1, 2) == 10 ** 400 + 1",), "passed"),
        ("def add(a, b): return 0.1 + 0.2", ("assert add(1, 2) == 0.1 + 0.2",), "passed"),
        ("def add(a, b): return float('nan')", ("assert add(1, 2) != add(1, 2)",), "passed"),
        ("def add(a, b): return '\\ud800\\U0001f600'", ("assert add(1, 2) == '\\ud800\\U0001f600'",), "passed"),
        ("def add(a, b): return b'\\x00\\xff'", ("assert add(1, 2) == b'\\x00\\xff'",), "passed"),
        ("from collections import Counter\ndef add(a, b): return Counter('aab')",
         ("assert add(1, 2) == {'a': 2, 'b': 1}",), "passed"),
        ("def add(a, b): return map(str, [a, b])", ("assert list(add(1, 2)) == ['1', '2']",), "passed"),
        ("def add(a, b): return map(str, [a, b])", ("assert add(1, 2) == ['1', '2']",), "wrong"),
        ("def add(a, b): return {a: b}.keys()", ("assert add(1, 2) == {1}",), "passed"),
        ("def add(a, b): return range(a, b)", ("assert add(1, 2) == range(1, 2)",), "passed"),
        ("from fractions import *\ndef add(a, b): return Fraction(a, b)", ("assert add(1, 2) == 0.5",), "passed"),
        ("def add(a, b): return a.pop()", ("x = [1, 2]\nassert add(x, 0) == 2",), "passed"),
        ("def add(*a, **k): return [a, k]", ("assert add(1, *[2], x=3) == [(1, 2), {'x': 3}]",), "passed"),
        ("n = []\ndef add(a):\n    n.append(a)\n    return n", ("assert add(0)", "assert add(1) == [0, 1]"), "passed"),
        ("def add(a, b): raise ValueError('no')", ("assert add(1, 2) == 3",), "ValueError"),
        ("def add(a, b): return a / 0", ("try: add(1, 2)\nexcept ArithmeticError: pass\nelse: 1 / 0",), "passed"),
        ("def add(a) return", TESTS, "syntax"),
        ("import numpy\n" + ADD, TESTS, "ModuleNotFoundError"),
        ("", TESTS, "KeyError"),
    ],
)  # fmt: skip
def test_values_pass_between_the_processes_as_they_are(strongest, code, tests, reason):
    assert strongest.run([job(code, tests)])[0].reason == reason


def test_a_body_continues_the_signature_that_the_prompt_ends_with(strongest):
    prompt = "def half(x):\n    return x / 2\n\ndef add(a, b):\n    '''Sum.'''\n"
    bodies = [
        "    return a + b\n",
        "\n    c = half(2 * a)\n    return c + b\n",
        ADD,
        "return a + b",
        "    return a - b",
    ]
    outcomes = strongest.run([job(body, prompt=prompt) for body in bodies])
    assert [outcome.reason for outcome in outcomes] == ["passed", "passed", "passed", "syntax", "wrong"]


def test_the_setup_is_out_of_the_completions_reach(strongest):
    tests = ("assert add(2, 3) == reference(2, 3)",)
    programs = (ADD, "def add(a, b): return reference(a, b)")
    outcomes = strongest.run([job(code, tests, setup="def reference(a, b): return a + b") for code in programs])
    assert [outcome.reason for outcome in outcomes] == ["passed", "NameError"]


def test_verdicts_do_not_depend_on_the_number_of_workers_or_the_order():
    jobs = [job(f"def add(a, b): return a + b + {n % 3}") for n in range(24)]
    results = []
    for workers, order in ((1, 1), (3, 1), (2, -1)):
        sandbox = Sandbox(workers, timeout_s=2.0)
        results.append([outcome.reason for outcome in sandbox.run(jobs[::order])][::order])
        sandbox.close()
        assert sandbox.pids() == []
    assert results[0] == results[1] == results[2] == ["passed", "wrong", "wrong"] * 8


def test_hidden_tests_that_hang_on_a_value_end_with_the_sample(strongest):
    tests = ("while add(1, 1) == 2: pass",)
    started = time.perf_counter()
    assert strongest.run([job(tests=tests), job("def add(a, b): return 3", tests)])[0].reason == "timeout"
    assert time.perf_counter() - started < 100


FENCES = [
    ("```python\na = 1\n```", "a = 1"),
    ("```py\na = 1\n```\n```python3\nb = 2\n```", "b = 2"),
    ("```\na = 1\n```", "a = 1"),
    ("```python\na = 1\n```\n```\noutput\n```", "a = 1"),
    ("```Python title=x\na = 1\n```", "a = 1"),
    ("~~~python\na = 1\n~~~", "a = 1"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
    ("```python\na = 1", "a = 1"),
    ("```python\n```", None),
    ("```js\na = 1\n```", None),
    ("a = 1", "a = 1"),
    ("", None),
    ("   \n", None),
    (None, None),
    ([{"role": "assistant", "content": "```python\na = 1\n```"}], "a = 1"),
    ("text ```python a = 1``` text", "text ```python a = 1``` text"),
    ("```python\r\na = 1\r\n```\r\n", "a = 1"),
    ("```" * 100_000, None),
    ("```python\na\n" * 2 + "```", "a\n```python\na"),
    ("```python\na\n```\n" * 50_000, "a"),
]


def test_the_last_block_of_the_completions_own_is_judged():
    started = time.process_time()
    found = [extract_code(text) for text, _ in FENCES]
    assert [code and code.strip() for code in found] == [code for _, code in FENCES]
    assert time.process_time() - started < 5


def test_a_block_of_the_prompt_is_not_the_completions():
    prompt = [{"role": "user", "content": f"Fix it:\n```python\n{ADD}\n```"}]
    assert extract_code(f"```python\n{ADD}\n```", prompt) is None
    assert extract_code(f"```python\nx = 1\n```\nfor\n```python\n{ADD}  \n```", prompt).strip() == "x = 1"
    assert extract_code(ADD, prompt) is None


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("7", "a JSON int"),
        ("not json", "not JSON"),
        ("{}", "either 'tests'"),
        ('{"tests": []}', "expected a list"),
        ('{"tests": ["assert f(1) =="]}', "SyntaxError"),
        ('{"tests": ["assert 1 == 1"]}', "nothing that a completion would define"),
        ('{"tests": ["assert f(1) == 1"], "entry": "f"}', "unknown key 'entry'"),
        ('{"tests": ["assert g(1) == 1"], "setup": "def g(x): return x", "entry_point": "f"}', "never use f"),
        ('{"tests": ["assert f(1) == math.pi"]}', "module math without importing"),
        ('{"test": "def check(candidate): pass"}', "entry_point does not say"),
        ('{"tests": ["assert f(1)"], "names": ["f; import os"]}', "names of the tested functions"),
    ],
)
def test_tests_that_cannot_be_run_are_found_when_they_are_read(gold, message):
    with pytest.raises(ValueError, match=message):
        read_gold(gold)
    assert gold_from_row({"answer": gold}, "code", "answer")[0] is None


def test_mbpp_and_humaneval_rows_become_problems(tmp_path):
    mbpp = {
        "prompt": "Sum a list.",
        "code": "def sum(x): return x[0]",
        "test_list": ["assert sum([1]) == sys.maxsize"],
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(mbpp) + "\n")
    config = DataConfig(
        path=str(tmp_path / "train.jsonl"), answer_format="mbpp", question_column="prompt", answer_column="test_list"
    )
    (problem,), _ = read_problems(config, "train")
    assert problem.question == "Sum a list.\n\nYour code is tested like this:\nassert sum([1]) == sys.maxsize"
    assert read_gold(problem.gold).names == ("sum",) and "import sys" in read_gold(problem.gold).setup
    human = {
        "prompt": "def f(x):\n    '''One.'''\n",
        "entry_point": "f",
        "test": "def check(c):\n    assert c(1) == 1\n",
    }
    gold, error = gold_from_row(human, "humaneval", "test")
    assert error == "" and read_gold(gold).tests == ("check(f)",)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "x", "test_list": ["assert"]}) + "\n")
    with pytest.raises(BadInput, match="SyntaxError in the tests"):
        read_problems(
            DataConfig(path=str(tmp_path / "bad.jsonl"), answer_format="mbpp", question_column="prompt",
                       answer_column="test_list"), "train"
        )  # fmt: skip


def code_reward(options: dict | None = None, allow: bool = True, **fields):
    config = RewardConfig(functions=["code"], allow_code_execution=allow, options={"code": options or {}}, **fields)
    return reward_functions(config)[0][0]


def test_code_is_not_run_unless_the_configuration_says_so():
    for options, allow, message in (
        ({}, False, "allow_code_execution"),
        ({"partal": 1}, True, "Did you mean 'partial'"),
        ({"timeout_s": 0.0}, True, "timeout_s is 0"),
        ({"memory_mib": 63}, True, "memory_mib is 63"),
    ):
        with pytest.raises(BadInput, match=message):
            code_reward(options, allow)


def test_all_or_nothing_unless_partial():
    gold = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 0) == 1"]})
    for options, expected in (({}, 0.0), ({"partial": True}, 2 / 3)):
        function = code_reward(options)
        assert function(prompts=None, completions=[f"```python\n{ADD}\n```"], gold=[gold]) == [pytest.approx(expected)]


def test_what_could_not_be_judged_is_none_and_counted():
    broken = json.dumps({"tests": ["assert add(1, 2) == 3"], "setup": "raise OSError('no such file')"})
    right = json.dumps({"tests": ["assert add(1, 2) == 3"]})
    function = code_reward(max_unknown_fraction=0.01)
    completion = f"```python\n{ADD}\n```"
    assert function(prompts=None, completions=[completion] * 2, gold=[broken, right]) == [None, 1.0]
    assert function.unknown_counts == {"gold": 1}
    with pytest.raises(CheckFailed, match="no such file"):
        function(prompts=None, completions=[completion] * 3, gold=[broken] * 3)


def test_every_completion_gets_its_own_outcome(monkeypatch):
    def run(jobs):
        return [Outcome(int("right" in job.code), 1, "tests") for job in jobs]

    monkeypatch.setattr(importlib.import_module("reward.code"), "shared_sandbox", lambda *_: SimpleNamespace(run=run))
    gold = json.dumps({"tests": ["assert f() == 3"]})
    completions = [f"```python\n{text}\n```" for text in ("", "wrong", "right", "right", "wrong")]
    golds = [gold, gold, gold, "no JSON", gold]
    assert REWARDS["code"](None, completions, golds) == [0.0, 0.0, 1.0, None, 0.0]


def test_a_sandbox_that_breaks_gives_none(monkeypatch):
    def broken(self, job, backstop_s):
        raise EOFError

    monkeypatch.setattr("reward.sandbox._Server.judge", broken)
    gold = json.dumps({"tests": ["assert add(1, 2) == 3"]})
    assert REWARDS["code"](None, [ADD], [gold]) == [None]


def test_a_runs_record_says_what_stands_around_the_code():
    fields = {"run": {"name": "x"}, "model": {"id": "x"}, "train": {"max_steps": 1}}
    groups = {field.name: {} for field in dataclasses.fields(Config)} | fields
    config = config_from_dict(groups)
    assert code_sandbox(config) is None
    config.reward.functions = ["math", "code"]
    record = code_sandbox(config)
    assert set(record) == {"level", "parts", "missing"} and json.dumps(record)
    assert record["level"] in ("full", "namespaces", "confined", "filter")


def test_the_isolation_in_force_is_printed_once(monkeypatch, capsys):
    monkeypatch.setattr("reward.sandbox._announced", False)
    first, second = shared_sandbox(1, 2.0).isolation(), shared_sandbox(1, 2.0).isolation()
    assert capsys.readouterr().out.count("code sandbox: isolation") == 1
    assert first == second and first.level in ("full", "namespaces", "confined", "filter")
    assert "can read the files" in Isolation(("seccomp",)).describe()
    assert "can read the files" not in Isolation(("landlock", "seccomp")).describe()
