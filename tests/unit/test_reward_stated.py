r"""Form of reward "math": where "boxed", "stated" and "lenient" find an answer, and what they call equal."""

import time

import pytest

from reward.answer import answers_equal, judge
from reward.exact import Policy
from reward.math import math
from reward.pool import WorkerPool
from reward.stated import lenient_answer, reference_answer, stated_answer
from tests.unit.answer_cases import EQUAL
from tests.unit.near_misses import DIFFERENT
from tests.unit.stated_texts import NOT_AN_ANSWER, STATED, UNSTATED


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(workers=2, timeout_s=10.0)
    yield pool
    pool.close()


def paid(rows, form, pool):
    texts, golds = zip(*rows, strict=True)
    return [*zip(rows, math(None, [*texts], [*golds], pool=pool, form=form), strict=True)]


@pytest.mark.parametrize(
    ("rows", "form", "reward"),
    [
        (STATED, "stated", 1.0),
        (STATED, "lenient", 1.0),
        (UNSTATED, "stated", 0.0),
        (UNSTATED, "lenient", 1.0),
        (NOT_AN_ANSWER, "stated", 0.0),
        (NOT_AN_ANSWER, "lenient", 0.0),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else str(value),
)
def test_each_form_pays_the_texts_that_answer_in_it_and_no_others(pool, rows, form, reward):
    assert [row for row, found in paid(rows, form, pool) if found != reward] == []


def test_form_boxed_pays_the_last_box_alone(pool):
    boxed = [row for row, found in paid(STATED, "boxed", pool) if found == 1.0]
    assert all("boxed" in text for text, _ in boxed)
    assert (r"\boxed{7} is the answer. I am sure.", "7") in boxed and ("3 + 4 = 7\n#### 7", "7") not in boxed


def test_stated_is_the_default(pool):
    texts = ["The answer is $7$.", "so it is 7"]
    assert (
        math(None, texts, ["7", "7"], pool=pool) == math(None, texts, ["7", "7"], pool=pool, form="stated") == [1, 0]
    )


# Equal to "stated" and "lenient", and whether also to "boxed".
ALIKE = [
    ("0.0833333333333333", r"\frac{1}{12}", False),
    (r"\frac{1}{12}", "0.0833333333333333", False),
    ("0.333333", r"\frac13", False),
    ("0.666667", "2/3", False),
    ("0.666666", "2/3", False),
    ("33.333333%", r"\frac{100}{3}\%", False),
    ("(1, 0.33333333)", r"(1, \frac13)", False),
    ("1000,99", "1000.99", False),
    ("2,74 $", "2.74", False),
    ("0,5", "0.5", False),
    ("1.22", "1,22", False),
    ("0.111", "0,111", False),
    ("1 000", "1000", False),
    ("12 345 678", "12345678", False),
    (r"32,\! 349", "32349", True),
    (r"11,\! 111,\! 100", "11111100", True),
    ("14 {, }916", "14916", True),
    ("1,000.99€", "1000.99", True),
    ("1,000.99m²", "1000.99", True),
    ("7m³", "7", True),
    ("28 percentage", r"28\%", True),
    ("x >= 5", r"x \geq 5", True),
    ("x != 3", r"x \neq 3", True),
    ("7:32", "S_{MBCN}:S=7:32", True),
    ("11:21", "V_{1}:V_{2}=11:21", True),
    ("1", "A:B=1", True),
    (r"\frac{1}{\sqrt6}", r"\frac{NO}{BO}=\frac{1}{\sqrt6}", True),
    ("AB/CD = 2", "2", True),
    ("f(n) = 1 or f(n) = -1", "f(x)=1orf(x)=-1", True),
    ("x = 2", "2", True),
    ("2", "x = 2", True),
    (r"-5, \frac{14}{3}", r"x = -5,\ p = \frac{14}{3}", True),
    (r"1, 2", r"x_1 = 1,\quadx_2 = 2", True),
    ("(5,2),(7,2)", "p=5,q=2;p=7,q=2", True),
    ("p=7,q=2 and p=5,q=2", "p=5,q=2;p=7,q=2", True),
    ("(1,2),(3,4),(1,2)", "(3,4),(1,2)", True),
    ("2**(1/4)", r"\sqrt[4]{2}", True),
    (r"2^{\frac14}", "2**(1/4)", True),
    ("3**2", "9", True),
    ("14.0 + -1.0i", "14 - i", True),
    ("185\\", "185", True),
    (r"\frac{\sqrt3}{3}", r"\frac{\sqrt{3}}{3} \approx 0.577", False),
    (r"\frac13 \approx 1.3", "1/3", False),
    ("C", "C Cecile", False),
]

# Different to all forms.
UNLIKE = [
    ("0.33333", r"\frac13"),
    ("0.333334", r"\frac13"),
    ("0.3333333343", r"\frac13"),
    ("0.499999", r"\frac12"),
    ("0.500001", r"\frac12"),
    ("6.9999999999", "7"),
    ("-0.333333", r"\frac13"),
    ("33.333333", r"\frac{1}{3}\%"),
    ("0.333333 m", r"\frac13\text{ cm}"),
    ("1,000", "1.000"),
    ("2,740", "2.74"),
    ("1,2", "12"),
    ("1.2", "1,2"),
    ("1,5", "1.6"),
    ("22, 1", "1.22"),
    ("1 00", "100"),
    ("1 000 00", "100000"),
    ("0 123", "123"),
    ("1 000", "1"),
    ("32, 349", "32349"),
    ("7m²", r"7\text{ cm}^2"),
    ("7:32", "7:23"),
    ("7:32", "S:T=32:7"),
    ("12:00", "1:00"),
    ("1", "A+B=1"),
    (r"x/y = 2", "2"),
    ("f(2) = 5", "f(3) = 5"),
    (r"\frac{14}{3}, -5, 1", r"x = -5,\ p = \frac{14}{3}"),
    ("(2,5),(2,7)", "p=5,q=2;p=7,q=2"),
    ("p=5,q=2;p=7,q=3", "p=5,q=2;p=7,q=2"),
    ("(1,2),(1,2)", "(1,2),(3,4)"),
    ("1,1,2", "1,2"),
    ("2**(1/4)", r"\sqrt[3]{2}"),
    ("2**3", "6"),
    ("8 = 7", "7"),
    ("x = 8 = 7", "7"),
    ("x + 1 = 7", "7"),
    (r"\sqrt3 \approx 1.5", "1.5"),
    (r"4 \approx 5", "4"),
    ("C", "A Cecile"),
    ("D", "C Cecile"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\frac{1}{3 \cdot 2^{2006}}", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}"),
    (r"\frac{1}{60!}", "0"),
    ("0", r"\frac{1}{600!}"),
    ("0.0000001", "0.0000002"),
    (r"1 + \frac{1}{\mathrm{e}}", r"1 - \frac{1}{\mathrm{e}}"),
    (r"1, 3, 5, \ldots, 2n-1", r"1, 2, \ldots, n"),
]


@pytest.mark.parametrize("form", ["boxed", "stated", "lenient"])
def test_the_tables_hold_for_every_form(pool, form):
    pairs = [(predicted, gold) for predicted, gold, _ in ALIKE] + UNLIKE
    expected = [form != "boxed" or strict for *_, strict in ALIKE] + [False] * len(UNLIKE)
    found = [verdict.value for verdict in judge(pairs, pool, Policy(form=form))]
    assert [(pair, value) for pair, value, want in zip(pairs, found, expected, strict=True) if value is not want] == []


def test_only_lenient_leaves_the_arithmetic_before_the_last_equality_unchecked(pool):
    chains = [("x = 5+5+1 = 7 = 11", "x = 11"), ("2+3 = 6", "6"), (r"\frac{1}{2} \$ = \frac{10}{9}", r"\frac{10}{9}")]
    for form in ("boxed", "stated", "lenient"):
        assert [answers_equal(*pair, pool, Policy(form=form)) for pair in chains] == [form == "lenient"] * 3
    assert answers_equal("x = 5+5+1 = 11", "11", pool, Policy(form="stated"))


# What DIFFERENT holds that "stated" pays: a long decimal, a wrong rounding behind the exact value.
ROUNDED = {"\\sqrt2 \\approx 1.5", "0.\\overline{142857}", "1/3"}


def test_what_is_equal_to_form_boxed_is_equal_to_stated_and_no_more_than_roundings_are_added(pool):
    stated = Policy(form="stated")
    verdicts = judge(EQUAL, pool, stated)
    assert [pair for pair, verdict in zip(EQUAL, verdicts, strict=True) if verdict.value is not True] == []
    verdicts = judge(DIFFERENT, pool, stated)
    assert {pair[0] for pair, verdict in zip(DIFFERENT, verdicts, strict=True) if verdict.value} == ROUNDED


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
