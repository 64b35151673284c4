"""The trainer's half of the canary: the tokens to score, and their log-probs under the policy and the base."""

from typing import NamedTuple

import numpy as np

from kit.core.errors import CheckFailed
from kit.rollout.policy_view import PolicyView

MOST_PROMPT_TOKENS, MOST_TOKENS = 128, 256


class Scores(NamedTuple):
    """The canary's sequences, and the log-probs (len - 1,) of each by the policy and by the base."""

    sequences: list[list[int]]
    policy: list[np.ndarray]
    base: list[np.ndarray]


class CanaryScorer:
    """Score the first prompts of this process, each with a completion of the policy once there is one.

    An adapter acts on completions; a prompt alone hardly shows it. The sequences then stay the same until the end.
    `longest` is the context length of the replicas: scoring needs room for one more token than a sequence has.
    """

    def __init__(self, prompts: int, longest: int):
        self.prompts, self.most_tokens = prompts, min(MOST_TOKENS, longest - 1)
        self.sequences: list[list[int]] = []
        self._base: list[np.ndarray] | None = None
        self._rows: list[int] = []
        self._extended = False

    def choose(self, prompts: list[list[int]]) -> None:
        """Take the first distinct prompts of a generation, unless some were already taken."""
        if self.sequences or not self.prompts:
            return
        first: dict[tuple[int, ...], int] = {}
        for row, ids in enumerate(prompts):
            first.setdefault(tuple(ids), row)
        self._rows = [row for ids, row in first.items() if len(ids) > 1][: self.prompts]
        self.sequences = [self._end(prompts[row]) for row in self._rows]

    def extend(self, completions: list[list[int]], prompts: list[list[int]] | None = None) -> None:
        """Append, once, the completions of that same generation; `prompts` replace those taken, if it had others."""
        if self._extended or not self.sequences:
            return
        if prompts is not None:
            self.sequences = [self._end(prompts[row]) for row in self._rows]
        for row, ids in zip(self._rows, self.sequences, strict=True):
            ids += list(completions[row])[: self.most_tokens - len(ids)]
        self._extended, self._base = True, None

    def scores(self, policy: PolicyView) -> Scores | None:
        """The sequences with their log-probs by the policy and by the base, which never changes and is scored once;
        None if there are no sequences."""
        if not self.sequences:
            return None
        adapted = self._checked(policy.score(self.sequences))
        if self._base is None:
            self._base = self._checked(policy.score(self.sequences, is_adapted=False))
        return Scores(self.sequences, adapted, self._base)

    def _end(self, prompt: list[int]) -> list[int]:
        # The tokens nearest to the answer, and at least two: one token alone has no log-prob.
        return list(prompt)[-max(2, min(MOST_PROMPT_TOKENS, self.most_tokens // 2)) :]

    def _checked(self, scores: list[np.ndarray]) -> list[np.ndarray]:
        if bad := sum(int((~np.isfinite(one)).sum()) for one in scores):
            raise CheckFailed(
                f"the trainer's own log-probs of {bad} canary tokens are not finite: the adapter is spoiled. Start "
                "another run from the newest adapter (policy.init_adapter) with a lower train.learning_rate."
            )
        return scores
