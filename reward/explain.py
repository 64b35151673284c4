"""What a reward function decides about completions, and why: for `check`, `attack` and the trial on references."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reward import REWARDS, function_of, function_options, is_own
from reward.own import (
    FROM_TRL,
    MACHINERY,
    awaited,
    called,
    check_arguments,
    checked_rewards,
    is_async,
    taken,
)
from reward.pool import WorkerPool
from reward.score import Explanation, Message

REQUEST_S = 60.0  # default limit of one call of an async function, as reward.request_timeout_s
# Arguments that exist only in a run: token ids of the policy, the trainer's state.
FROM_A_RUN = ("completion_ids", "trainer_state")


@dataclass(frozen=True)
class Sample:
    """A completion to judge: its reference, its prompt, and the other columns of its row."""

    completion: Message
    gold: str
    prompt: Message | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Judgement:
    """The verdict (True, False, or None for undecided), the extracted answer, the rule that decided, the reward."""

    value: bool | None
    extracted: str | None
    rule: str
    reward: float | None


def judges(task: str) -> bool:
    """Whether a reward function compares with a reference (math, code, …) rather than only checking the form."""
    gold = inspect.signature(function_of(task)).parameters.get("gold")
    return gold is not None and gold.kind is gold.POSITIONAL_OR_KEYWORD


def explain(
    task: str,
    samples: Sequence[Sample],
    pool: WorkerPool,
    options: dict[str, Any],
    paid_from: float = 1.0,
    limit_s: float = REQUEST_S,
) -> list[Judgement]:
    """Return what the reward function `task` decides about every sample, and why; a reward of at least `paid_from` is
    paid.

    A sample that cannot be decided does not raise. For a user's function, the rule is "reward"; it is "none" or "late"
    if the reward is unknown.
    """
    if not samples:
        return []
    seen = Explanation()
    if is_own(task):
        rewards = _own_rewards(task, samples, pool, options, seen, limit_s)
        unknown = "late" if rewards is None else "none"
        return [
            Judgement(None if one is None else one >= paid_from, None, unknown if one is None else "reward", one)
            for one in rewards or [None] * len(samples)
        ]
    prompts = [sample.prompt or "" for sample in samples]
    golds = [sample.gold for sample in samples]
    completions = [sample.completion for sample in samples]
    rewards = REWARDS[task](prompts, completions, gold=golds, pool=pool, budget=seen, **options)
    extracted = seen.extracted or [None] * len(rewards)
    reasons = [verdict.reason for verdict in seen.verdicts] or ["reward"] * len(rewards)
    if any(text is not None for text in extracted):
        reasons = ["no answer" if text is None else rule for text, rule in zip(extracted, reasons, strict=True)]
    return [
        Judgement(None if reward is None else reward >= paid_from, text, reason, reward)
        for reward, text, reason in zip(rewards, extracted, reasons, strict=True)
    ]


def check_callable(task: str, columns: Sequence[str]) -> None:
    """Raise `BadInput` if a user's function needs an argument that only a run has, or that is none of `columns`."""
    known = ("prompts", "completions", "gold", "problem_id", *MACHINERY, *_silent(), *columns)
    check_arguments(task, function_of(task), "reward", known, [*function_options(task, columns)])


def _own_rewards(
    task: str, samples: Sequence[Sample], pool: WorkerPool, options: dict, seen: Explanation, limit_s: float
) -> list[float | None] | None:
    """A user's function called as in a run, with chat messages; None if it is async and late."""
    function = function_of(task)
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    values: dict[str, Any] = {name: [sample.columns.get(name) for sample in samples] for name in columns}
    hidden = function_options(task, columns.keys() - options.keys())
    values = {name: value for name, value in values.items() if name not in hidden}
    values |= {
        "prompts": [_messages(sample.prompt or "", "user") for sample in samples],
        "completions": [_messages(sample.completion, "assistant") for sample in samples],
        "gold": [sample.gold for sample in samples],
        "problem_id": [str(place) for place in range(len(samples))],
    }
    arguments = taken(function, values | _silent() | options | {"pool": pool, "budget": seen})
    if not is_async(function):
        return checked_rewards(task, called(task, function, arguments), len(samples))
    found = asyncio.run(awaited(task, function, arguments, limit_s))
    return None if found is None else checked_rewards(task, found, len(samples))


def _silent() -> dict[str, Any]:
    """TRL's arguments for logging, as functions that do nothing."""
    return {name: lambda *_, **__: None for name in FROM_TRL if name not in FROM_A_RUN}


def _messages(text: Message, role: str) -> list[dict]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def shown(text: str, limit: int = 60) -> str:
    """A text on one line, truncated to `limit` characters."""
    text = " ".join(text.split())
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text):,} characters)"
