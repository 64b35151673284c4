"""Steps shared by all reward functions: completion to answer, answer to verdict, verdict to number."""

from collections.abc import Callable, Sequence

from reward.answer import judge, message_text, own_text
from reward.exact import DEFAULT, Policy
from reward.pool import UnknownBudget, Verdict, WorkerPool

Message = str | list[dict]


class Explanation:
    """Passed to a reward function in place of a budget: records its decisions and stops nothing."""

    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.extracted: list[str | None] = []  # the judged answers, if the function reports them

    def record(self, verdicts: list[Verdict], examples: list[str], extracted: Sequence[str | None] = ()) -> None:
        """Record a batch; arguments as in `UnknownBudget.record`."""
        self.verdicts += verdicts
        self.extracted += extracted or [None] * len(verdicts)


# Arguments and result of a reward function.
Messages = list[Message]
Prompts = Messages | None
Pool = WorkerPool | None
Budget = UnknownBudget | Explanation | None
Rewards = list[float | None]


def own_texts(prompts: Prompts, completions: Messages) -> list[str]:
    """The text of every completion without what it repeats from its prompt; `prompts` may be None."""
    if prompts is None:
        return [message_text(completion) for completion in completions]
    return [own_text(completion, prompt) for completion, prompt in zip(completions, prompts, strict=True)]


def score_answers(
    extract: Callable[[str], str | None],
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    pool: Pool,
    budget: Budget,
    policy: Policy = DEFAULT,
) -> Rewards:
    """1.0 for every completion whose extracted answer equals its gold, 0.0 otherwise, None if undecided."""
    return score_pairs(extract, prompts, completions, gold, budget, lambda pairs: judge(pairs, pool, policy))


def score_pairs(
    extract: Callable[[str], str | None],
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    budget: Budget,
    decide: Callable[[list[tuple[str | None, str]]], list[Verdict]],
) -> Rewards:
    """1.0, 0.0 or None (undecided) for every completion, by the verdicts of `decide` on (extracted answer, gold).

    Undecided samples are counted in `budget`, which raises `CheckFailed` once it is spent.
    """
    predicted = [extract(text) for text in own_texts(prompts, completions)]
    pairs = list(zip(predicted, gold, strict=True))
    verdicts = decide(pairs)
    if budget is not None:
        budget.record(verdicts, [f"answer {_short(a)} against {_short(g)}" for a, g in pairs], predicted)
    return [None if verdict.value is None else float(verdict.value) for verdict in verdicts]


def _short(text: str | None, limit: int = 80) -> str:
    return repr(text) if text is None or len(text) <= limit else f"{text[:limit]!r}… ({len(text):,} characters)"
