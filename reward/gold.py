"""Checks of reference answers, one per kind of comparison: `check_golds(golds) -> [(index, why)]`.

A reward function that compares with `gold` carries its check as the attribute `check_golds`. The check names the
references that no completion can match, so that they are rejected when problems are read instead of paying 0 to every
answer.
"""

import json
from collections.abc import Callable

from reward import exact
from reward.answer import boxed_answer, check_golds, hash_answer, judge

GoldCheck = Callable[[list[str]], list[tuple[int, str]]]
# data.answer_format values that extract the answer from a worked solution: its mark, and the function that reads it.
MARKED = {"boxed": ("\\boxed", boxed_answer), "gsm8k": ("####", hash_answer)}


def math_golds(golds: list[str]) -> list[tuple[int, str]]:
    r"""References that math and gsm8k_* cannot compare with: unreadable text, JSON objects, and worked solutions that
    do not equal their own `\boxed{}` or `#### n`."""
    found = _worked_solutions(golds) | _objects(golds)
    left = [index for index in range(len(golds)) if index not in found]
    found |= {left[place]: why for place, why in check_golds([golds[index] for index in left])}
    return sorted(found.items())


def _worked_solutions(golds: list[str]) -> dict[int, str]:
    marked = []  # (index, answer in it, format that reads it)
    for index, gold in enumerate(golds):
        for form, (mark, read) in MARKED.items():
            # An answer longer than any valid one is not compared.
            if mark in gold and (answer := read(gold)) and gold.strip() != answer:
                marked.append((index, answer, form))
                break
    verdicts = judge([(answer, golds[index][: exact.MAX_ANSWER_CHARS]) for index, answer, _ in marked])
    return {
        index: f"the answer {golds[index][:60]!r} is a worked solution that ends in {answer[:40]!r}, and is compared "
        f"as a whole; set data.answer_format to {form}"
        for (index, answer, form), verdict in zip(marked, verdicts, strict=True)
        if verdict.value is not True
    }


def _objects(golds: list[str]) -> dict[int, str]:
    found = {}
    for index, gold in enumerate(golds):
        try:
            value = json.loads(gold) if gold.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found[index] = f"the answer {gold[:60]!r} is a JSON object, not an answer; name its column or remove it"
    return found


def number_golds(golds: list[str]) -> list[tuple[int, str]]:
    """References that are not a literal number."""
    return [
        (index, f"the answer {gold[:60]!r} is not a number")
        for index, gold in enumerate(golds)
        if exact.plain_number(exact.normalized(gold[: exact.MAX_ANSWER_CHARS])) is None
    ]


def checked_by(read: Callable[[str], object]) -> GoldCheck:
    """Build a reference check from `read`, which raises `ValueError` with what is wrong."""

    def check(golds: list[str]) -> list[tuple[int, str]]:
        found = []
        for index, gold in enumerate(golds):
            try:
                read(gold)
            except ValueError as error:
                found.append((index, str(error)))
            except RecursionError:
                found.append((index, f"the answer {gold[:60]!r} is nested too deeply"))
        return found

    return check
