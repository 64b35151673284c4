r"""Reward "math": the last `\boxed{}` equals the reference answer."""

from typing import Any

from reward.answer import boxed_answer
from reward.pool import UnknownBudget, WorkerPool
from reward.score import Message, score_answers


def math(
    prompts: list[Message] | None,
    completions: list[Message],
    gold: list[str],
    *,
    pool: WorkerPool | None = None,
    budget: UnknownBudget | None = None,
    **_: Any,
) -> list[float | None]:
    r"""1.0 when the last balanced `\boxed{}` equals `gold`, else 0.0 (also without a box); None when undecided.

    An answer outside a box is not paid, so the form is learned with the content.
    """
    return score_answers(boxed_answer, prompts, completions, gold, pool, budget)
