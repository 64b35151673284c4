r"""Rewards "countdown" (reach a target with an expression of given numbers) and "arithmetic" (compute a value).

`python -m reward.make` writes problems for both.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from reward.answer import boxed_answer, tag_answer
from reward.arithmetic import evaluate
from reward.exact import MAX_ANSWER_CHARS, normalized, numbers_equal, plain_number
from reward.gold import checked_by, number_golds
from reward.pool import Verdict
from reward.score import Budget, Messages, Pool, Prompts, Rewards, score_pairs


def countdown(
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    *,
    pool: Pool = None,
    budget: Budget = None,
    use_all: bool = True,
    answer_tag: str = "<answer>",
    **_: Any,
) -> Rewards:
    r"""1.0 if the expression has the value `target` and uses `numbers`, each exactly once; 0.0 otherwise.

    `gold` is JSON: {"numbers": [3, 5, 7], "target": 22}. The expression is what the last `<answer>` contains, else
    the last `\boxed{}`. `use_all: false` allows leaving numbers out; none may be used more often than given. None,
    with reason "gold", for an invalid reference.
    """
    del pool  # exact fractions need no worker

    def decide(pairs: list[tuple[str | None, str]]) -> list[Verdict]:
        return [_verdict(answer, reference, use_all) for answer, reference in pairs]

    return score_pairs(_reader(answer_tag), prompts, completions, gold, budget, decide)


def _reader(tag: str) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        tagged = tag_answer(text, tag)
        return boxed_answer(text) if tagged is None else tagged

    return read


def _verdict(answer: str | None, gold: str, use_all: bool) -> Verdict:
    try:
        numbers, target = read_gold(gold)
    except ValueError:
        return Verdict(None, "gold")
    evaluated = evaluate(answer or "")
    if evaluated is None:
        return Verdict(False, "no expression")
    value, used = evaluated
    left_over = Counter(numbers)
    left_over.subtract(used)
    if min(left_over.values()) < 0 or (use_all and any(left_over.values())):
        return Verdict(False, "numbers")
    return Verdict(value == target, "exact")


def read_gold(gold: str) -> tuple[list[int], int]:
    """Parse the numbers and the target of a reference; `ValueError` says what is wrong with it."""
    try:
        problem = json.loads(gold)
    except ValueError:
        raise ValueError(f"the answer {gold[:60]!r} is not JSON") from None
    numbers, target = (problem.get("numbers"), problem.get("target")) if isinstance(problem, dict) else (None, None)
    if (
        not isinstance(numbers, list)
        or not 1 <= len(numbers) <= 20
        or not all(type(n) is int and n >= 0 for n in numbers)
    ):
        raise ValueError(f'the answer {gold[:60]!r} has no "numbers": a list of 1 to 20 whole numbers')
    if type(target) is not int:
        raise ValueError(f'the answer {gold[:60]!r} has no "target": a whole number')
    return numbers, target


def arithmetic(
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    *,
    pool: Pool = None,
    budget: Budget = None,
    answer_tag: str = "<answer>",
    **_: Any,
) -> Rewards:
    r"""1.0 if the answer is a literal number equal to `gold`; an expression does not count, since the question is one.

    The answer is the content of the last `<answer>`, else of the last `\boxed{}`.
    """
    del pool
    return score_pairs(_reader(answer_tag), prompts, completions, gold, budget, _number_verdicts)


def _number_verdicts(pairs: list[tuple[str | None, str]]) -> list[Verdict]:
    verdicts = []
    for answer, gold in pairs:
        reference, number = (plain_number(normalized(text)) for text in (gold, (answer or "")[:MAX_ANSWER_CHARS]))
        equal = number is not None and reference is not None and numbers_equal(number, reference)
        verdicts.append(Verdict(None, "gold") if reference is None else Verdict(equal, "exact"))
    return verdicts


countdown.check_golds = checked_by(read_gold)  # type: ignore[attr-defined]
arithmetic.check_golds = number_golds  # type: ignore[attr-defined]
