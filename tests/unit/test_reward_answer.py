"""Extraction and comparison of answers, as tables; nothing in the exact part may start a worker."""

import time

import pytest

from reward import worker
from reward.answer import (
    answers_equal,
    boxed_answer,
    boxes,
    final_answer,
    hash_answer,
    last_number,
    message_text,
    own_text,
)
from reward.exact import MAX_ANSWER_CHARS, decide, gold_fault

EXTRACTED = [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"first \boxed{3}, and some words after it", "3"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\}}", r"\}"),
    (r"\boxed {5}", "5"),
    (r"\boxed 5", "5"),
    (r"is $\boxed 5$.", "5"),
    (r"\boxed 5. Done", "5"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{ \boxed{\boxed{7}} }", "7"),
    (r"\boxed{5} and then \boxed{6", "5"),
    (r"\boxed{ {5 }", None),
    (r"the set {1, 2 and \boxed{5}", "5"),
    (r"a stray } and \boxed{5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{  }", ""),
    (r"\boxedly{5}", None),
    (r"\fbox{5}", None),
    ("boxed{5}", None),
    ("#### 42", "42"),
    ("work\n#### -1,234.5 \nmore", "-1,234.5"),
    ("#### 1\n#### 2", "2"),
    ("#### \\$5", "\\$5"),
    ("##### 5", None),
    ("#### Conclusion", None),
    ("#### 7\n#### Conclusion", "7"),
    (r"#### 7 but \boxed{8}", "8"),
    ("the answer is 42", None),
    ("", None),
    ("#### ٤٢", "٤٢"),
]


@pytest.mark.parametrize(("text", "expected"), EXTRACTED)
def test_final_answer_is_the_last_balanced_box_else_the_last_hash(text, expected):
    assert final_answer(text) == expected


def test_boxed_and_hash_answers_do_not_mix():
    assert boxed_answer("#### 7") is None
    assert hash_answer(r"\boxed{7}") is None
    assert boxes(r"\boxed{1} \boxed 2 \boxed{\boxed{3}}") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is 12.", "12"),
        ("-3", "-3"),
        ("5-3", "3"),
        ("costs $1,234.50 now", "$1,234.50"),
        ("3/4 of it", "3/4"),
        ("none", None),
        ("", None),
        ("1,23", "23"),
        ("x=-7", "-7"),
        ("10.", "10"),
    ],
)
def test_last_number_keeps_sign_commas_and_currency(text, expected):
    assert last_number(text) == expected


UNITS = ["\\boxed{", "\\boxed", "\\boxed 5 ", "\\boxed{5}", "\\boxed{}", "{", "}", "\\", "#### ", "####", "#### 1"]
UNITS += ["-", "9", "1,", "$", "\n", "\\boxed{\n", "\\boxed{ \\boxed{1}"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_anything_is_searched_in_linear_time(unit):
    text = unit * (1_000_000 // len(unit))
    started = time.process_time()
    final_answer(text), last_number(text), own_text(text, [{"role": "user", "content": r"Use \boxed{}."}])
    assert time.process_time() - started < 5.0


def test_deeply_nested_boxes_cost_no_more_than_their_length():
    started = time.process_time()
    assert boxed_answer("\\boxed{" * 100_000 + "5" + "}" * 100_000) == "5"
    assert len(boxed_answer("\\boxed{" + "\\boxed{5} " * 100_000 + "}")) == 999_999
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [
        (None, "5"),
        ("9" * 1_000_000, "9"),
        ("1" + "0" * 1200, "5"),
        ("x" * 1_000_000, "x"),
        ("(" * 5000 + ")" * 5000, "x"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_no_answer_and_a_huge_one_are_wrong(predicted, gold):
    assert answers_equal(predicted, gold) is False


@pytest.mark.parametrize(
    ("predicted", "gold", "expected"),
    [
        # Exponents are bounded before a number is built.
        ("1e1000", "5", False),
        ("1e1001", "5", None),
        (r"1\times10^{10001}", "5", None),
        ("10^{10^{10}}", "5", None),
        # Exact far beyond floats.
        ("0.1" + "0" * 30 + "1", "0.1", False),
        ("123456789012345678901234567890", "123456789012345678901234567891", False),
        ("1/3", "33333333333333333333/100000000000000000000", False),
    ],
)
def test_numbers_are_exact_and_bounded(predicted, gold, expected):
    assert decide(predicted, gold) is expected


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        ("", "empty"),
        ("\u200b", "empty"),
        ("nan", "'nan'"),
        ("-inf", "'-inf'"),
        ("None", "'None'"),
        (r"\frac{1}{2", "unbalanced"),
        ("5}", "unbalanced"),
        ("9" * (MAX_ANSWER_CHARS + 1), "4,097 characters"),
        *((gold, None) for gold in ("42", "-1,000", r"\frac{1}{2}", r"\{1, 2\}", r"[0, 1)", "x^2", "(B)")),
    ],
)
def test_a_reference_that_cannot_be_one_is_named(gold, why):
    fault = gold_fault(gold)
    assert fault is None if why is None else why in fault


PROMPT = [
    {"role": "system", "content": "Solve the problem. Put the final answer in \\boxed{}."},
    {"role": "user", "content": "Example: 3+4?\n\nThe answer is \\boxed{7}.\n\nNow: what is 2+5?\n#### 7"},
]
ECHOES = [
    (PROMPT[1]["content"], None),
    (PROMPT[0]["content"] + "\n" + PROMPT[1]["content"], None),
    ("You asked: The answer is \\boxed{7}. I do not know.", None),
    ("Put the final answer in \\boxed{}. I will.", None),
    (PROMPT[1]["content"] + "\nIt is \\boxed{8}", "8"),
    ("\\boxed{7}", "7"),
    ("2+5=7, so\n#### 7", "7"),
    ("Thus the answer is \\boxed{7}.", "7"),
]


@pytest.mark.parametrize(("completion", "expected"), ECHOES)
@pytest.mark.parametrize("as_text", [False, True], ids=["messages", "text"])
def test_an_answer_echoed_from_the_prompt_is_not_the_models(completion, expected, as_text):
    prompt = "\n".join(message["content"] for message in PROMPT) if as_text else PROMPT
    said = completion if as_text else [{"role": "assistant", "content": completion}]
    assert final_answer(own_text(said, prompt)) == expected


@pytest.mark.parametrize(
    "completion", [None, "", [], [{"role": "assistant"}], [{"role": "assistant", "content": None}]]
)
def test_an_empty_completion_has_no_answer(completion):
    assert final_answer(own_text(completion, PROMPT)) is None
    assert final_answer(own_text(completion, None)) is None


def test_a_verdict_does_not_depend_on_sympys_random_numbers():
    from sympy.core.cache import clear_cache
    from sympy.core.random import seed

    verdicts = set()
    for number in range(120):  # math-verify alone finds the two equal for 4 of them
        clear_cache()
        seed(number)
        verdicts.add(worker.compare("5e", "5\\infty"))
    assert verdicts == {(False, "algebra")}


def test_only_what_the_model_wrote_is_its_answer():
    turns = [
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "name": "f", "content": "\\boxed{7}"},
        {"role": "assistant", "content": "\\boxed{8}"},
        {"role": "user", "content": "It is \\boxed{9}."},
    ]
    assert message_text(turns) == "Let me see.\n\n\\boxed{8}"
    assert message_text([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]) == "s\n\nq"
