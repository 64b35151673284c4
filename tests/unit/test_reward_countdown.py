"""Countdown: the evaluator, the reward and the generator."""

import json
import time
from fractions import Fraction

import pytest

from kit.core.errors import BadInput
from reward import REWARDS
from reward.arithmetic import evaluate
from reward.countdown import read_gold
from reward.make import problems, write

GOLD = json.dumps({"numbers": [3, 5, 7], "target": 22})

VALUES = [
    ("3 + 5*7", 38),
    ("(3 + 5) × 7", 56),
    ("7 ÷ 2", Fraction(7, 2)),
    ("7 − 2 − 1", 4),
    ("8/4/2", 1),
    (r"3 \times 5 + 7", 22),
    (r"\frac{6}{4}", Fraction(3, 2)),
    (r"\frac{3+5}{\frac{1}{2}}", 16),
    (r"\left(3+5\right)\cdot 7", 56),
    ("$3*5$", 15),
    ("3*5 = 15", 15),
    ("3*5 = 16", None),
    ("3*5 = 15 = 15", None),
    ("1/0", None),
    ("1/(2-2)", None),
    ("", None),
    ("3 5", None),
    ("3+", None),
    ("-3+5", None),
    ("3--5", None),
    ("+3", None),
    ("2**3", None),
    ("2^3", None),
    ("3//2", None),
    ("3.5", None),
    ("(3", None),
    ("3)", None),
    ("()", None),
    ("abs(3)", None),
    ("__import__('os')", None),
    ("1" * 13, None),
    ("((" * 300 + "1" + "))" * 300, None),
    ("(" * 60 + "1" + ")" * 60, None),
    ("٣+٥", None),
    ("1+" * 1_000_000 + "1", None),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=lambda v: repr(v)[:20])
def test_the_evaluator_is_exact_and_knows_nothing_else(text, value):
    started = time.process_time()
    result = evaluate(text)
    assert (result and result[0]) == value
    assert time.process_time() - started < 1.0


PAID = [r"\boxed{3*5+7}", "<answer>(3 * 5) + 7</answer>", "<answer>3 * 5 + 7 = 22</answer>"]
PAID += [r"<answer>\boxed{7+3\times5}</answer>"]
UNPAID = [r"\boxed{3+5+7}", r"\boxed{22}", r"\boxed{3*5+7+7-7}", r"\boxed{15+7}", r"\boxed{3*7+1}", "3*5+7", ""]
UNPAID += [r"\boxed{3*5+7} or \boxed{1}", "<answer>3*5+7</answer> no <answer>3+5</answer>"]


@pytest.mark.parametrize("use_all", [True, False])
def test_countdown_pays_an_expression_of_the_numbers_with_the_target_as_its_value(use_all):
    golds = [GOLD] * len(PAID + UNPAID)
    rewards = REWARDS["countdown"](None, PAID + UNPAID, golds, use_all=use_all)
    assert rewards == [1.0] * len(PAID) + [0.0] * len(UNPAID)


def test_a_value_between_whole_numbers_is_not_rounded_to_the_target():
    gold = json.dumps({"numbers": [2, 3, 7], "target": 10})
    near = [r"\boxed{7*3/2}", r"\boxed{7*2-3}", r"\boxed{7+3*2-3}"]
    assert REWARDS["countdown"](None, near, [gold] * 3) == [0.0] * 3
    assert REWARDS["countdown"](None, [r"\boxed{7*2-3}"], [gold.replace("10", "11")]) == [1.0]


def test_numbers_may_be_left_out_by_option_only():
    gold = json.dumps({"numbers": [3, 5, 7, 7], "target": 22})
    assert REWARDS["countdown"](None, [r"\boxed{3*5+7}"], [gold]) == [0.0]
    assert REWARDS["countdown"](None, [r"\boxed{3*5+7}"], [gold], use_all=False) == [1.0]


def test_an_example_of_the_prompt_is_not_the_models():
    prompt = "Example: <answer>3*5+7</answer>\n\nUse 3, 5, 7 for 22."
    assert REWARDS["countdown"]([prompt], [f"{prompt}\nHm."], [GOLD]) == [0.0]


@pytest.mark.parametrize(
    "gold", ["", "7", "{}", '{"numbers": [1]}', '{"numbers": [], "target": 1}', '{"numbers": [1.5], "target": 1}', "["]
)
def test_a_reference_that_is_none_is_named_at_load_time_and_masked_at_run_time(gold):
    with pytest.raises(ValueError, match="the answer"):
        read_gold(gold)
    assert REWARDS["countdown"](None, [r"\boxed{1}"], [gold]) == [None]


def test_every_generated_problem_is_solved_by_its_solution_and_no_numbers_occur_twice():
    made = list(problems(2000, [3, 4, 5], 50, seed=3))
    assert len(made) == 2000 == len({tuple(sorted(numbers)) for numbers, *_ in made})
    golds = [json.dumps({"numbers": numbers, "target": target}) for numbers, target, _ in made]
    assert REWARDS["countdown"](None, [rf"\boxed{{{solution}}}" for *_, solution in made], golds) == [1.0] * 2000
    assert made == list(problems(2000, [3, 4, 5], 50, seed=3)) != list(problems(2000, [3, 4, 5], 50, seed=4))


def test_more_problems_than_there_are_is_bad_input():
    with pytest.raises(BadInput, match="of 100 problems"):
        list(problems(100, [2], 3, seed=0))


@pytest.mark.parametrize("task", ["countdown", "arithmetic"])
def test_the_files_load_as_problems_and_the_held_out_numbers_are_new(tmp_path, task):
    write(task, tmp_path, 50, 10, [3], 20, seed=1)
    parts = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test")]
    train, test = ([json.loads(line)["question"] for line in part] for part in parts)
    assert (len(train), len(test)) == (50, 10) and not {*train} & {*test}


def test_arithmetic_pays_a_number_and_not_the_question_again():
    completions = {r"\boxed{75}": 1, "<answer>75</answer>": 1, r"\boxed{75.0}": 1, r"\boxed{28+10+37}": 0}
    completions |= {r"\boxed{74}": 0, "75": 0, "": 0}
    assert REWARDS["arithmetic"](None, [*completions], ["75"] * len(completions)) == [*completions.values()]
