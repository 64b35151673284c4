"""The commands check and attack of the reward room (and the start of audit): what they print, how they end."""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from kit.core.errors import BadInput
from reward import REWARDS, attack, check
from reward.__main__ import main
from reward.attacks import Case
from reward.attacks import code as code_cases
from tests import processes

ROOT = Path(__file__).parents[2]
ROWS = [
    # gold, prediction or completion, expected, extracted, rule, verdict
    ({"gold": "7", "prediction": "7.0", "expected": True}, True, "7.0", "exact"),
    ({"gold": "7", "prediction": 7, "expected": 1}, True, "7", "exact"),
    ({"gold": 7, "prediction": r"so \boxed{8}", "expected": False}, False, "8", "exact"),
    ({"gold": r"$\boxed{7}$", "prediction": "7"}, True, "7", "exact"),
    ({"gold": "7", "prediction": "2 + 5. The final answer is $7$."}, True, "7", "exact"),
    ({"gold": "7", "prediction": "Answer: 7"}, True, "7", "exact"),
    ({"gold": "7", "prediction": "The answer is 8, no, the answer is 7"}, True, "7", "exact"),
    ({"gold": "7", "prediction": "The answer is not 7"}, False, None, "no answer"),
    ({"gold": "7", "prediction": "The answer is 7 or 8"}, False, "7 or 8", None),
    ({"gold": "7", "prediction": "The answer is 7.\nOr 8"}, False, None, "no answer"),
    ({"gold": "7", "prediction": "so 3 + 4 = 7."}, True, "7", "exact"),
    ({"gold": "The answer is $x = 7$.", "prediction": "7"}, True, "7", "exact"),
    ({"gold": r"\boxed{1} and \boxed{2}", "prediction": r"$\{2, 1\}$"}, True, r"\{2, 1\}", "exact"),
    ({"gold": "$1$ and $2$", "prediction": "2, 1"}, True, "2, 1", "exact"),
    ({"gold": "7", "completion": "so 3 + 4 = 7."}, False, None, "no answer"),
    ({"gold": "7", "completion": "the answer is 7"}, True, "7", "exact"),
    ({"gold": "7", "completion": r"so \boxed{7}"}, True, "7", "exact"),
    ({"gold": "7", "prediction": None}, False, None, "no answer"),
    ({"gold": "7", "prediction": "a\\"}, False, "a\\", None),
    ({"gold": r"\sqrt{8}", "prediction": r"2\sqrt{2}"}, True, r"2\sqrt{2}", None),
    ({"gold": "7", "prediction": "10^{10^{10}}", "expected": False}, None, "10^{10^{10}}", "timeout"),
    (
        {"gold": "7", "completion": r"3+4? It is \boxed{7}.", "prompt": r"3+4? It is \boxed{7}."},
        False,
        None,
        "no answer",
    ),
    ({"gold": "été", "prediction": r"\text{été}"}, True, r"\text{été}", "exact"),
]

ROW = ['{"gold": "7", "prediction": "7"}']


@pytest.fixture
def write(tmp_path):
    def make(rows):
        file = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    return make


def test_json_prints_one_object_a_row_in_order_and_nothing_else(write, capsys):
    file = write([row for row, *_ in ROWS])
    assert main(["check", file, "--task", "math", "--json", "--timeout_s", "3"]) == 0
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert printed.err == ""
    assert all(set(row) == {"verdict", "extracted", "rule"} for row in found)
    assert [(row["verdict"], row["extracted"]) for row in found] == [(value, text) for _, value, text, _ in ROWS]
    assert all(row["rule"] == rule for row, (*_, rule) in zip(found, ROWS, strict=True) if rule)


def test_text_shows_verdicts_counts_and_disagreements_and_strict_ends_with_one(write, capsys):
    rows = [
        {"gold": "7", "prediction": "7", "expected": True},
        {"gold": "7", "prediction": "8", "expected": True},
        {"gold": "7", "prediction": "9", "expected": False},
        {"gold": "7", "prediction": "9"},
    ]
    file = write(rows)
    assert main(["check", file, "--task", "gsm8k_strict"]) == 0
    out = capsys.readouterr().out
    assert "line 1: paid (exact)  '7' against '7'\n" in out
    assert "line 2: not paid (exact)  '8' against '7'  <- expected paid" in out
    assert "4 rows: 1 paid, 3 not paid, 0 undecided" in out
    assert "agreement: 2 of 3 (66.7%)" in out
    table = [line.split()[-3:] for line in out.splitlines() if line.startswith("expected")]
    assert table == [["1", "1", "0"], ["0", "1", "0"]]
    assert main(["check", file, "--task", "gsm8k_strict", "--strict"]) == 1
    assert main(["check", write(rows[2:]), "--task", "gsm8k_strict", "--strict"]) == 0


@pytest.mark.parametrize(
    ("task", "rows", "verdicts"),
    [
        ("gsm8k_strict", [{"gold": "42", "completion": "#### 42"}, {"gold": "42", "completion": "it is 42"}], [1, 0]),
        ("gsm8k_lenient", [{"gold": "#### 42", "completion": "it is 42"}, {"gold": "42", "prediction": "41"}], [1, 0]),
        (
            "countdown",
            [
                {"gold": {"numbers": [3, 5, 7], "target": 22}, "prediction": "3*5+7"},
                {"gold": '{"numbers": [3, 5, 7], "target": 22}', "completion": "<answer>3+5+7</answer>"},
            ],
            [1, 0],
        ),
    ],
)
def test_every_task_is_checked(write, capsys, task, rows, verdicts):
    assert main(["check", write(rows), "--task", task, "--json"]) == 0
    found = [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()]
    assert found == [bool(value) for value in verdicts]


def test_code_is_checked_only_when_it_may_run(write, capsys):
    gold = {"tests": ["assert add(1, 2) == 3"]}
    bodies = ("return a + b", "return a - b")
    rows = [{"gold": gold, "prediction": f"def add(a, b):\n    {body}"} for body in bodies]
    rows.append({"gold": gold, "completion": "```python\ndef add(a, b): return a + b\n```"})
    file = write(rows)
    with pytest.raises(BadInput, match="allow_code_execution"):
        main(["check", file, "--task", "code", "--json"])
    assert main(["check", file, "--task", "code", "--json", "--allow_code_execution"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()]
    assert [json.loads(line)["verdict"] for line in lines] == [True, False, True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "rows.jsonl:2: "),
        ("[1]", "rows.jsonl:2: a JSON list, expected an object"),
        ('{"prediction": "7"}', "rows.jsonl:2: no gold; it has prediction"),
        ('{"gold": "7"}', "rows.jsonl:2: neither prediction nor completion"),
        ('{"gold": "7", "prediction": "7", "completion": "7"}', "both prediction and completion"),
        ('{"gold": ["7"], "prediction": "7"}', 'gold is ["7"], not text or a number'),
        ('{"gold": "7", "prediction": true}', "prediction is true, not text"),
        ('{"gold": "7", "prediction": "7", "expected": "yes"}', "expected is 'yes', not true or false"),
        ('{"gold": "7", "prediction": "7", "prompt": 5}', "prompt is neither"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_scored(write, monkeypatch, capsys, line, message):
    monkeypatch.setattr(check, "explain", lambda *_: pytest.fail("scored"))
    with pytest.raises(BadInput) as error:
        main(["check", write([*ROW, line]), "--task", "math", "--json"])
    assert message in str(error.value)
    assert "nothing was scored" in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        (ROW, ["--task", "maths"], "unknown task 'maths'. There are math"),
        (ROW, ["--task", "boxed_format"], "unknown task 'boxed_format'"),
        (ROW, ["--task", "math", "--options", "{"], "--options is not JSON"),
        (ROW, ["--task", "math", "--options", "[]"], "must be a JSON object"),
        (ROW, ["--task", "math", "--options", '{"orderd": true}'], "Did you mean 'ordered'?"),
        (ROW, ["--task", "math", "--workers", "0"], "reward.workers (0)"),
        (ROW, ["--task", "math", "--config", "none.yaml"], "no config file at none.yaml"),
        ([], ["--task", "math"], "has no rows"),
        (None, ["--task", "math"], "no file at"),
    ],
)
def test_a_wrong_flag_or_file_is_bad_input(write, rows, flags, message):
    with pytest.raises(BadInput) as error:
        main(["check", "none.jsonl" if rows is None else write(rows), *flags])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True, True, True]),  # a bare prediction is read leniently unless the form is given
        ({"ordered": True}, [False, True, True]),
        ({"form": "boxed"}, [True, False, False]),
    ],
)
def test_options_change_verdicts(write, capsys, options, expected):
    rows = [("1, 2", "2, 1"), ("7", "so 3 + 4 = 7."), ("1/3", "0.333333")]
    file = write([{"gold": gold, "prediction": prediction} for gold, prediction in rows])
    assert main(["check", file, "--task", "math", "--json", "--options", json.dumps(options)]) == 0
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == expected


def test_the_suite_has_at_least_150_attempts_of_every_kind_and_controls():
    cases = {case for name in REWARDS for case in attack.suite(name)}
    attempts = Counter(case.category for case in cases if not case.pays)
    assert attempts.total() >= 300
    assert set(attempts) == {
        *("extraction", "comparison", "cost", "unicode", "prompt echo", "format", "countdown", "code", "penalty")
    }
    assert len(code_cases.CASES) >= 50
    tasks = {task for case in cases for task in case.tasks}
    for task in tasks:
        kinds = {case.pays for case in attack.suite(task)}
        assert kinds == {True, False}, task
    # A count of tokens: nothing to read, nothing to trick. Another model: nothing that a suite could foresee.
    assert set(REWARDS) - tasks == {"length", *attack.MODELS}


@pytest.mark.parametrize("task", [name for name in REWARDS if name not in ("math", "code", "length", *attack.MODELS)])
def test_no_attempt_is_paid_and_every_control_is(task, capsys):
    assert main(["attack", "--task", task]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("form", ["boxed", "lenient"])
def test_no_form_of_the_math_reward_pays_an_attempt_outside_the_comparison(monkeypatch, form, capsys):
    cases = [case for case in attack.suite("math") if case.category in ("extraction", "prompt echo", "unicode")]
    monkeypatch.setattr(attack, "suite", lambda task: cases)
    assert main(["attack", "--task", "math", "--options", json.dumps({"form": form})]) == 0, capsys.readouterr().out


def test_the_math_reward_pays_no_attempt_and_ends(capsys):
    started = time.perf_counter()
    assert main(["attack", "--task", "math"]) == 0, capsys.readouterr().out
    assert time.perf_counter() - started < 400
    assert " 0 paid; " in capsys.readouterr().out


def planted(value):
    def reward(prompts, completions, gold, *, pool=None, budget=None, **_):
        if value == "raise" and any("surrogate" in text or "\x00" in text for text in completions):
            raise ValueError("null byte")
        if value == "substring":
            return [float(reference in text) for text, reference in zip(completions, gold, strict=True)]
        return [0.0 if value == "raise" else value for _ in completions]

    return reward


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (1.0, "PAID 1 ("),  # pays everybody
        (0.1, "PAID 0.1 ("),  # pays everybody a little
        (0.0, "NOT PAID ("),  # pays nobody
        (None, "NOT PAID ("),  # decides nothing
        ("substring", "PAID 1 ("),  # what many kits ship
        ("raise", "RAISED ValueError: null byte"),
    ],
)
def test_a_broken_reward_fails_the_attack(monkeypatch, capsys, value, told):
    monkeypatch.setitem(REWARDS, "math", planted(value))
    attempts = [Case("unicode", name, name, "7") for name in ("a", "\x00", *(f"{n} 7" for n in range(25)))]
    monkeypatch.setattr(attack, "suite", lambda task: [*attempts, Case("unicode", "right", "7", "7", pays=True)])
    assert main(["attack", "--task", "math"]) == 1
    out = capsys.readouterr().out
    assert told in out
    if value == "raise":  # narrowed down to its case
        assert out.count("RAISED") == 1 and "27 attempts, 1 paid" in out
    assert ("… and 7 more" in out) is (value == 1.0)


def config(tmp_path, functions, weights=None):
    file = tmp_path / "run.yaml"
    source = (ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml").read_text()
    values = yaml.safe_load(source)
    values["reward"] = {"functions": functions, "weights": weights, "timeout_s": 1.0}
    file.write_text(yaml.safe_dump(values))
    return str(file)


def test_the_configured_rewards_are_attacked_and_their_weights_looked_at(tmp_path, capsys):
    functions = ["gsm8k_strict", "boxed_format"]
    assert main(["attack", "--config", config(tmp_path, functions, [1.0, 0.2])]) == 0
    out = capsys.readouterr().out
    assert {line.split()[0] for line in out.splitlines()[1:-1]} == set(functions)
    assert main(["attack", "--config", config(tmp_path, functions, [0.5, 0.5])]) == 1
    assert "WEIGHTS: form alone earns 0.5, the correct answer 0.5" in capsys.readouterr().out


def test_an_unknown_task_and_options_for_many_are_bad_input():
    with pytest.raises(BadInput, match="unknown task 'maths'"):
        main(["attack", "--task", "maths"])
    with pytest.raises(BadInput, match="name it with --task"):
        main(["attack", "--options", '{"ordered": true}'])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--help"], 0, "check FILE.jsonl --task math"),
        (["check", "--help"], 0, "--strict"),
        (["attack", "--help"], 0, "--config"),
        (["audit", "--help"], 0, "--json"),
        ([], 2, "the following arguments are required: command"),
        (["chek"], 2, "invalid choice: 'chek'"),
        (["check", "none.jsonl", "--task", "math"], 2, "error: no file at none.jsonl"),
        (["audit", "none"], 2, "error: no run directory at none"),
    ],
)
def test_the_command_line(arguments, code, told):
    command = [sys.executable, "-m", "reward", *arguments]
    done = processes.run(command)
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
