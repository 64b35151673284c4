"""The comparison over tables of answers, and where the forms "boxed", "stated" and "lenient" find an answer."""

import json
import time

import pytest

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput
from kit.data.problems import load_problems
from reward.answer import answers_equal, check_golds, judge
from reward.exact import Policy, decide
from reward.math import math
from reward.pool import WorkerPool
from reward.stated import lenient_answer, reference_answer, stated_answer
from tests.unit import answer_cases as cases

FORMS = ("boxed", "stated", "lenient")


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(workers=2, timeout_s=10.0)
    yield pool
    pool.close()


def test_the_tables_are_large_and_hold_no_pair_twice():
    assert len(cases.EQUAL) >= 500 and len(cases.DIFFERENT) >= 450
    tables = [*cases.EQUAL, *cases.DIFFERENT, *cases.ROUNDED, *cases.CHAINED]
    assert len({*tables}) == len(tables)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_finds_equal_what_is_equal_to_it_and_nothing_else(pool, form):
    tables = {True: cases.EQUAL, False: cases.DIFFERENT}
    tables[form != "boxed"] = tables[form != "boxed"] + cases.ROUNDED
    tables[form == "lenient"] = tables[form == "lenient"] + cases.CHAINED
    for expected, pairs in tables.items():
        verdicts = judge(pairs, pool, Policy(form=form))
        assert [pair for pair, found in zip(pairs, verdicts, strict=True) if found.value is not expected] == []


def test_numbers_words_and_most_formulas_need_no_worker():
    for expected, pairs in ((True, cases.EQUAL_HERE), (False, cases.DIFFERENT_HERE)):
        assert [pair for pair in pairs if decide(*pair) is not expected] == []
    assert [pair for pair in (*cases.EQUAL_THERE, *cases.DIFFERENT_THERE) if decide(*pair) is not None] == []


def test_every_reference_equals_itself_and_is_readable(pool):
    golds = [gold for _, gold in cases.EQUAL]
    assert {verdict.value for verdict in judge([(gold, gold) for gold in golds], pool)} == {True}
    # Sets without elements: only the same text equals it.
    assert check_golds([gold for gold in golds if gold != r"A\cup B"], pool) == []


@pytest.mark.parametrize(
    ("predicted", "gold", "policy", "expected"),
    [
        ("0.333", r"\frac13", {}, False),
        ("0.333", r"\frac13", {"tolerance": 0.01}, True),
        ("3.14", r"\pi", {"tolerance": 0.01}, True),
        ("3.3", r"\pi", {"tolerance": 0.01}, False),
        ("102", "100", {"tolerance": 0.01}, False),
        ("2, 1", "1, 2", {}, True),
        ("2, 1", "1, 2", {"ordered": True}, False),
        ("1, 2", "1, 2", {"ordered": True}, True),
        (r"2\pm1", "1, 3", {"ordered": True}, True),
        ("5", "5 cm", {}, True),
        ("5", "5 cm", {"units": "required"}, False),
        ("5 cm", "5 cm", {"units": "required"}, True),
        (r"2\sqrt3", r"2\sqrt3\text{ cm}", {"units": "required"}, False),
        (r"2\sqrt3 \text{ cm}", r"2\sqrt3\text{ cm}", {"units": "required"}, True),
        ("1", "1, 2", {}, False),
        ("1", "1, 2", {"several": "any"}, True),
        ("3", "1, 2", {"several": "any"}, False),
        ("٤٢", "42", {}, True),
        ("٤٢", "42", {"unicode_digits": False}, False),
        ("x = 5+5+1 = 11", "x = 11", {"form": "stated"}, True),
        ("x = 5+5+1 = 7 = 11", "x = 11", {"form": "stated"}, False),
        ("x = 5+5+1 = 7 = 11", "x = 11", {"form": "lenient"}, True),
    ],
)
def test_the_options_change_what_they_say(pool, predicted, gold, policy, expected):
    assert answers_equal(predicted, gold, pool, Policy(**policy)) is expected


@pytest.mark.parametrize(
    ("rows", "paying"),
    [(cases.STATED, ("stated", "lenient")), (cases.UNSTATED, ("lenient",)), (cases.NOT_AN_ANSWER, ())],
    ids=["stated", "unstated", "no answer"],
)
def test_each_form_pays_the_texts_that_answer_in_it_and_no_others(pool, rows, paying):
    texts, golds = map(list, zip(*rows, strict=True))
    for form in ("stated", "lenient"):
        rewards = math(None, texts, golds, pool=pool, form=form)
        assert [row for row, found in zip(rows, rewards, strict=True) if found != (form in paying)] == []
    assert math(None, texts, golds, pool=pool) == [float("stated" in paying)] * len(rows)  # the default


def test_form_boxed_pays_the_last_box_alone(pool):
    texts, golds = map(list, zip(*cases.STATED, strict=True))
    rewards = math(None, texts, golds, pool=pool, form="boxed")
    boxed = [text for text, found in zip(texts, rewards, strict=True) if found == 1.0]
    assert all("boxed" in text for text in boxed)
    assert r"\boxed{7} is the answer. I am sure." in boxed


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", "7"),
        ("x = 7", "x = 7"),
        ("5 apples", "5 apples"),
        (r"\text{The solution is acidic.}", r"\text{The solution is acidic.}"),
        ("$7$", "7"),
        ("$1$ and $2$ and $3$", "1 and 2 and 3"),
        (r"so $x = \boxed{7}$.", "7"),
        (r"\boxed{1} papers and \boxed{2} bins", "1, 2"),
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"first \boxed{1}. Then \boxed{2}", "2"),
        (r"\\boxed{840}", "840"),
        (r"\boxed{W = 1 \text{ and } W = 2", r"W = 1 \text{ and } W = 2"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("We add. The final answer is $28 \\%$. I hope it is correct. Note: it is not that easy.", r"28 \%"),
        ("Alina, and the answer is\n(C) Cecile", "(C) Cecile"),
    ],
)
def test_a_reference_may_be_a_worked_solution_or_a_sentence(gold, answer):
    assert reference_answer(gold) == answer
    assert reference_answer(answer) == answer


UNITS = [
    "\\boxed{",
    "\\boxed{5}",
    "{",
    "\\",
    "$",
    "$ 7 $ ",
    "$1$ and ",
    "\\(",
    "\\[ 7",
    "The answer is ",
    "answer of ",
]
UNITS += ["<think>", "</think>", "<answer>", "#### 1", "1 2 ", "7 or ", "word ", "答案：", "\n", "1,", "not ", "="]


@pytest.mark.parametrize("unit", UNITS)
def test_half_a_megabyte_of_anything_is_read_in_linear_time(unit):
    text = unit * (500_000 // len(unit))
    started = time.process_time()
    stated_answer(text), lenient_answer(text), reference_answer(text)
    assert time.process_time() - started < 10.0


def test_a_gold_that_nothing_can_be_compared_with_is_found_before_the_run(pool):
    golds = ["5", "x+", r"\frac{1}{2", r"\int_0^1 x\,dx", "(1,2)", "Monday", "", "5, x+", r"\sum_{n=1}^{3} n"]
    assert [index for index, _ in check_golds(golds, pool)] == [1, 2, 6, 7]


def test_ten_thousand_plain_golds_are_checked_without_a_worker_in_seconds():
    golds = [rf"\frac{{{n}}}{{7}}" if n % 2 else rf"x^2+{n}\sqrt{{3}}" for n in range(10_000)]
    started = time.process_time()
    assert check_golds(golds, pool=None) == []
    assert time.process_time() - started < 5.0


def test_a_file_with_golds_that_cannot_be_parsed_does_not_load(tmp_path):
    file = tmp_path / "train.jsonl"
    golds = ["5", "x+", r"\frac{1}{2}", "5, x+", r"y = 2x + 1"]
    file.write_text("".join(json.dumps({"question": f"Q{i}", "answer": gold}) + "\n" for i, gold in enumerate(golds)))
    with pytest.raises(BadInput, match=r"train\.jsonl:2: the answer 'x\+' cannot be parsed(.|\n)*train\.jsonl:4"):
        load_problems(DataConfig(path=str(file)), "train")
    assert [p.gold for p in load_problems(DataConfig(path=str(file), max_bad_fraction=0.4), "train")] == golds[::2]
