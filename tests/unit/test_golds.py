"""References that a reward function cannot compare with are refused when problems are read, whatever their form."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eval.problems import held_out
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.data.problems import load_problems, read_problems
from kit.train.setup import load_data
from reward import REWARDS, gold_checks, heldout_gold_checks
from reward.gold import math_golds
from tests.conftest import CONFIG

COUNTDOWN = '{"numbers": [1, 3], "target": 4}'
TESTS = '{"tests": ["assert add(1, 2) == 3"]}'
GOOD = {
    **dict.fromkeys(("math", "gsm8k_strict", "gsm8k_lenient"), "4"),
    **{"countdown": COUNTDOWN, "arithmetic": "-4", "code": TESTS},
}
BAD = [
    ("math", COUNTDOWN, "is a JSON object"),
    ("math", {"value": 5}, "is a JSON object"),
    ("math", "She has 2 + 2 = 4 apples.\n#### 4", "a worked solution that ends in '4'.*data.answer_format to gsm8k"),
    ("math", r"We get $x=3$, so \boxed{3}.", "a worked solution that ends in '3'.*data.answer_format to boxed"),
    ("math", "word " * 2000 + r"\boxed{3}", "a worked solution that ends in '3'"),
    ("math", r"\frac{1", "unbalanced braces"),
    ("math", None, "null"),
    ("gsm8k_strict", "#### 4", "data.answer_format to gsm8k"),
    ("gsm8k_lenient", TESTS, "is a JSON object"),
    ("countdown", "4", 'has no "numbers"'),
    ("countdown", "[" * 100_000, "nested too deeply"),
    ("arithmetic", "four", "is not a number"),
    ("arithmetic", "", "is not a number"),
    ("code", "4", "the tests are a JSON int"),
    ("code", '{"tests": []}', "expected a list of statements"),
]


def problems_file(folder: Path, answers: list, name: str = "train") -> Path:
    rows = [json.dumps({"question": f"{name} {number}?", "answer": answer}) for number, answer in enumerate(answers)]
    (file := folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return file


def config(folder: Path, reward: str, *overrides: str) -> Config:
    keys = [f"--data.path={folder}", "--data.answer_format=any", f"--reward.functions=[{reward}]", *overrides]
    return load_config(CONFIG, keys)


def test_every_reward_that_compares_with_the_reference_checks_it():
    import inspect

    compares = {name for name, one in REWARDS.items() if "gold" in inspect.signature(one).parameters}
    assert compares == set(GOOD) == {name for name in REWARDS if gold_checks([name])}


@pytest.mark.parametrize(("reward", "answer", "why"), BAD, ids=lambda value: repr(value)[:30])
def test_a_reference_that_no_answer_can_match_is_a_bad_row(tmp_path, reward, answer, why):
    file = problems_file(tmp_path, [*[GOOD[reward]] * 4, answer])
    data, checks = config(tmp_path, reward).data, gold_checks([reward])
    with pytest.raises(BadInput, match=rf"(?s)1 of 5 rows.*{file}:5: reward {reward}: .*{why}"):
        load_problems(data, "train", checks)
    data.max_bad_fraction = 0.2
    problems, report = read_problems(data, "train", checks)
    assert len(problems) == 4 and [place for place, _ in report.bad] == [f"{file}:5"]
    assert len(load_problems(data, "train")) == 5, "for a reward without a check the column is taken as it is"


@pytest.mark.parametrize(
    "gold", ["4", r"\boxed{4}", r"$\boxed{5}$ cm", "x = 4", "[1, 2]", r"\{1, 2\}", "Paris", "{1, 2}"]
)
def test_a_reference_that_an_answer_can_match_is_kept(gold):
    assert math_golds([gold]) == []


def test_a_worked_solution_is_refused_in_a_plain_column_too(tmp_path):
    problems_file(tmp_path, [r"Hence $x=3$, so \boxed{3}."])
    data = config(tmp_path, "math", "--data.answer_format=plain").data
    with pytest.raises(BadInput, match=r"train.jsonl:1: the answer .* is a worked solution"):
        load_problems(data, "train")
    data.answer_format = "boxed"
    assert [problem.gold for problem in load_problems(data, "train")] == ["3"]
    data.answer_format = "countdown"
    with pytest.raises(BadInput, match=r"train.jsonl:1: the answer .* is not JSON"):
        load_problems(data, "train")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_run_refuses_references_of_either_split(tmp_path, split):
    for name in ("train", "heldout"):
        problems_file(tmp_path, [COUNTDOWN if name == split else "4"] * 8, name)
    tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": [1]})
    with pytest.raises(BadInput, match=f"(?s){split}.jsonl:1: reward math: .*JSON object"):
        load_data(config(tmp_path, "math"), tokenizer, 1)


def test_held_out_references_are_checked_by_what_judges_them(tmp_path):
    problems_file(tmp_path, ["4", "5", "6"])
    problems_file(tmp_path, ["Paris", "7"], "heldout")
    assert list(heldout_gold_checks(config(tmp_path, "math"))) == ["math"]
    assert list(heldout_gold_checks(config(tmp_path, "math", "--eval.reward=countdown"))) == ["countdown"]
    assert heldout_gold_checks(config(tmp_path, "arithmetic", "--data.answer_format=plain")) == {}
    data = config(tmp_path, "math").data
    assert len(held_out(data, 10)) == 2
    with pytest.raises(BadInput, match="reward arithmetic: the answer 'Paris' is not a number"):
        held_out(data, 10, reward="arithmetic")
    assert len(held_out(data, 10, reward="elsewhere:reward")) == 2, "an own judge may not be importable here"


def test_an_own_reward_may_check_references(tmp_path, monkeypatch):
    (tmp_path / "own_golds.py").write_text(
        "def judge(completions, gold, **_):\n    return [0.0] * len(gold)\n"
        "def broken(completions, **_):\n    return [0.0] * len(completions)\n"
        "judge.check_golds = lambda golds: [(i, 'not even') for i, g in enumerate(golds) if int(g) % 2]\n"
        "broken.check_golds = lambda golds: [(7, 'beyond')]\n"
    )
    monkeypatch.chdir(tmp_path)
    problems_file(tmp_path, ["2", "3", "4"])
    data = config(tmp_path, "math").data
    with pytest.raises(BadInput, match=r"train.jsonl:2: reward own_golds:judge: not even"):
        load_problems(data, "train", gold_checks(["own_golds:judge"]))
    with pytest.raises(BadInput, match="'own_golds:broken': its check_golds failed: IndexError: index 7 of 3"):
        load_problems(data, "train", gold_checks(["own_golds:broken"]))
    sys.modules.pop("own_golds")
