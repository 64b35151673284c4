"""Steps shared by all reward functions: completion to answer, answer to verdict, verdict to number."""

from collections.abc import Callable

from reward.answer import judge, message_text, own_text
from reward.exact import DEFAULT, Policy
from reward.pool import UnknownBudget, Verdict, WorkerPool

Message = str | list[dict]


class Explanation:
    """Passed to a reward function in place of a budget: records its decisions and stops nothing."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.extracted: list[str | None] = []  # the judged answers, if the function reports them

    def record(self, verdicts: list[Verdict], examples: list[str], extracted: list[str | None] | None = None) -> None:
        """Record a batch; arguments as in `UnknownBudget.record`, plus the extracted answers."""
        self.verdicts += verdicts
        self.extracted += extracted or [None] * len(verdicts)


def own_texts(prompts: list[Message] | None, completions: list[Message]) -> list[str]:
    """The text of every completion without what it repeats from its prompt; `prompts` may be None."""
    if prompts is None:
        return [message_text(completion) for completion in completions]
    return [own_text(completion, prompt) for completion, prompt in zip(completions, prompts, strict=True)]


def score_answers(
    extract: Callable[[str], str | None],
    prompts: list[Message] | None,
    completions: list[Message],
    gold: list[str],
    pool: WorkerPool | None,
    budget: UnknownBudget | Explanation | None,
    policy: Policy = DEFAULT,
) -> list[float | None]:
    """1.0 for every completion whose extracted answer equals its gold, 0.0 otherwise, None if undecided.

    Undecided samples are counted in `budget`, which raises `CheckFailed` once it is spent.
    """
    predicted = [extract(text) for text in own_texts(prompts, completions)]
    pairs = list(zip(predicted, gold, strict=True))
    verdicts = judge(pairs, pool, policy)
    record(budget, verdicts, [f"answer {_short(a)} against {_short(g)}" for a, g in pairs], predicted)
    return [_reward(verdict) for verdict in verdicts]


def record(
    budget: UnknownBudget | Explanation | None,
    verdicts: list[Verdict],
    examples: list[str],
    extracted: list[str | None],
) -> None:
    """Report the verdicts to the budget, and to an `Explanation` also the answer extracted from each completion."""
    if isinstance(budget, Explanation):
        budget.record(verdicts, examples, extracted)
    elif budget is not None:
        budget.record(verdicts, examples)


def _reward(verdict: Verdict) -> float | None:
    return None if verdict.value is None else float(verdict.value)


def _short(text: str | None, limit: int = 80) -> str:
    return repr(text) if text is None or len(text) <= limit else f"{text[:limit]!r}… ({len(text):,} characters)"
