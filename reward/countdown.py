r"""Rewards "countdown" (reach a target with an expression of given numbers) and "arithmetic" (compute a value).

`python -m reward.make` writes problems for both.
"""

import json
from collections import Counter
from typing import Any

from reward.answer import boxed_answer, tag_answer
from reward.arithmetic import evaluate
from reward.exact import MAX_ANSWER_CHARS, normalized, numbers_equal, plain_number
from reward.gold import checked_by, number_golds
from reward.pool import UnknownBudget, Verdict, WorkerPool
from reward.score import Explanation, Message, own_texts, record


def countdown(
    prompts: list[Message] | None,
    completions: list[Message],
    gold: list[str],
    *,
    pool: WorkerPool | None = None,
    budget: UnknownBudget | Explanation | None = None,
    use_all: bool = True,
    answer_tag: str = "<answer>",
    **_: Any,
) -> list[float | None]:
    r"""1.0 if the expression has the value `target` and uses `numbers`, each exactly once; 0.0 otherwise.

    `gold` is JSON: {"numbers": [3, 5, 7], "target": 22}. The expression is what the last `<answer>` contains, else
    the last `\boxed{}`. `use_all: false` allows leaving numbers out; none may be used more often than given. None,
    with reason "gold", for an invalid reference.
    """
    del pool  # exact fractions need no worker
    answers = [_answer(text, answer_tag) for text in own_texts(prompts, completions)]
    verdicts = [_verdict(answer, reference, use_all) for answer, reference in zip(answers, gold, strict=True)]
    examples = [
        f"answer {answer!r:.80} against {reference:.80}" for answer, reference in zip(answers, gold, strict=True)
    ]
    record(budget, verdicts, examples, answers)
    return [None if verdict.value is None else float(verdict.value) for verdict in verdicts]


def _answer(text: str, tag: str) -> str | None:
    tagged = tag_answer(text, tag)
    return boxed_answer(text) if tagged is None else tagged


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
    prompts: list[Message] | None,
    completions: list[Message],
    gold: list[str],
    *,
    pool: WorkerPool | None = None,
    budget: UnknownBudget | Explanation | None = None,
    answer_tag: str = "<answer>",
    **_: Any,
) -> list[float | None]:
    r"""1.0 if the answer is a literal number equal to `gold`; an expression does not count, since the question is one.

    The answer is the content of the last `<answer>`, else of the last `\boxed{}`.
    """
    del pool
    answers = [_answer(text, answer_tag) for text in own_texts(prompts, completions)]
    verdicts = [_number_verdict(answer, reference) for answer, reference in zip(answers, gold, strict=True)]
    examples = [
        f"answer {answer!r:.80} against {reference:.80}" for answer, reference in zip(answers, gold, strict=True)
    ]
    record(budget, verdicts, examples, answers)
    return [None if verdict.value is None else float(verdict.value) for verdict in verdicts]


def _number_verdict(answer: str | None, gold: str) -> Verdict:
    reference, number = (plain_number(normalized(text)) for text in (gold, (answer or "")[:MAX_ANSWER_CHARS]))
    if reference is None:
        return Verdict(None, "gold")
    return Verdict(number is not None and numbers_equal(number, reference), "exact")


countdown.check_golds = checked_by(read_gold)  # type: ignore[attr-defined]
arithmetic.check_golds = number_golds  # type: ignore[attr-defined]
