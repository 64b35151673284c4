r"""Rewards "gsm8k_strict" and "gsm8k_lenient": GSM8K's numeric answers, with and without their required form.

They differ by the cost of the form; report them side by side and never one as the other.
"""

from typing import Any

from reward.answer import final_answer, last_number
from reward.gold import math_golds
from reward.score import Budget, Messages, Pool, Prompts, Rewards, score_answers


def gsm8k_strict(
    prompts: Prompts, completions: Messages, gold: list[str], *, pool: Pool = None, budget: Budget = None, **_: Any
) -> Rewards:
    r"""1.0 if the last `\boxed{}`, or without one the last `#### n`, equals `gold`; 0.0 otherwise."""
    return score_answers(final_answer, prompts, completions, gold, pool, budget)


def gsm8k_lenient(
    prompts: Prompts, completions: Messages, gold: list[str], *, pool: Pool = None, budget: Budget = None, **_: Any
) -> Rewards:
    """Like `gsm8k_strict`, but a completion with neither form is judged by its last number."""
    return score_answers(_answer_or_last_number, prompts, completions, gold, pool, budget)


def _answer_or_last_number(text: str) -> str | None:
    answer = final_answer(text)
    return last_number(text) if answer is None else answer


gsm8k_strict.check_golds = gsm8k_lenient.check_golds = math_golds  # type: ignore[attr-defined]
