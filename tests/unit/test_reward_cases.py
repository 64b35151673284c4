"""Recall and false positives of the comparison over two tables of answer pairs, and what it does at a run's start."""

import json
import time

import pytest

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput
from kit.data.problems import load_problems
from reward.answer import answers_equal, check_golds, judge
from reward.exact import Policy, decide
from reward.pool import WorkerPool
from tests.unit.answer_cases import EQUAL
from tests.unit.near_misses import DIFFERENT


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(workers=2, timeout_s=10.0)
    yield pool
    pool.close()


def test_the_tables_are_large_and_hold_no_pair_twice():
    assert len(EQUAL) >= 250 and len(DIFFERENT) >= 100
    assert len({*EQUAL, *DIFFERENT}) == len(EQUAL) + len(DIFFERENT)


def test_every_equal_pair_is_equal(pool):
    verdicts = judge(EQUAL, pool)
    assert [pair for pair, verdict in zip(EQUAL, verdicts, strict=True) if verdict.value is not True] == []


def test_no_different_pair_is_equal(pool):
    verdicts = judge(DIFFERENT, pool)
    assert [pair for pair, verdict in zip(DIFFERENT, verdicts, strict=True) if verdict.value is not False] == []


def test_the_verdict_does_not_depend_on_where_it_is_reached(pool):
    # What this process decides alone, a worker decides alike.
    decided = [(pair, decide(*pair)) for pair in (*EQUAL, *DIFFERENT)]
    assert sum(value is None for _, value in decided) < 60
    swapped = judge([(gold, gold) for _, gold in EQUAL], pool)
    assert [pair for pair, verdict in zip(EQUAL, swapped, strict=True) if verdict.value is not True] == []


def test_verdicts_do_not_depend_on_the_workers_or_the_order(pool):
    hard = [pair for pair in (*EQUAL, *DIFFERENT) if decide(*pair) is None]
    single = WorkerPool(workers=1, timeout_s=10.0)
    try:
        assert len(hard) > 20
        assert judge(hard, single) == judge(hard, pool) == judge(hard[::-1], pool)[::-1]
    finally:
        single.close()


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
    ],
)
def test_the_options_change_what_they_say(pool, predicted, gold, policy, expected):
    assert answers_equal(predicted, gold, pool, Policy(**policy)) is expected


def test_a_gold_that_nothing_can_be_compared_with_is_found_before_the_run(pool):
    golds = ["5", "x+", r"\frac{1}{2", r"\int_0^1 x\,dx", "(1,2)", "Monday", "", "5, x+", r"\sum_{n=1}^{3} n"]
    assert [index for index, _ in check_golds(golds, pool)] == [1, 2, 6, 7]


def test_the_golds_of_the_table_are_readable(pool):
    golds = [gold for _, gold in EQUAL if gold != r"A\cup B"]  # sets without elements: only the same text equals it
    assert check_golds(golds, pool) == []


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


def test_countdown_references_are_checked_when_they_are_loaded(tmp_path):
    file = tmp_path / "train.jsonl"
    rows = [{"question": "Q", "answer": '{"numbers": [1, 2], "target": 3}'}, {"question": "P", "answer": "3"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"train\.jsonl:2: the answer '3' has no \"numbers\""):
        load_problems(DataConfig(path=str(file), answer_format="countdown"), "train")
