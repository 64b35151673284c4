"""Rewards: plain functions in TRL's signature, `f(prompts, completions, gold, **kwargs) -> list[float | None]`.

`REWARDS` names them; `reward_functions(cfg.reward)` binds the configured ones to a worker pool and a budget.
None means "could not be computed" and is masked by the trainer; it is never turned into 0.0.
"""

import difflib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recipes.parts.errors import BadInput
from reward.format import boxed_format
from reward.gsm8k import gsm8k_lenient, gsm8k_strict
from reward.math import math as math_reward
from reward.pool import UnknownBudget, shared_pool

if TYPE_CHECKING:
    from recipes.parts.config import RewardConfig

RewardFunction = Callable[..., list[float | None]]

REWARDS: dict[str, RewardFunction] = {
    "math": math_reward,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_lenient": gsm8k_lenient,
    "boxed_format": boxed_format,
}


class BoundReward:
    """A reward function with its worker settings and its own budget for undecided samples.

    TRL logs it by `__name__`. It can be pickled: the processes belong to the process-wide pool, not to it.
    """

    def __init__(self, name: str, workers: int, timeout_s: float, max_unknown_fraction: float):
        self.__name__ = name
        self.workers, self.timeout_s = workers, timeout_s
        self.budget = UnknownBudget(name, max_unknown_fraction)

    @property
    def unknown_counts(self) -> Counter[str]:
        """Samples that could not be computed so far, by reason."""
        return self.budget.counts

    def __call__(
        self, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        pool = shared_pool(self.workers, self.timeout_s)
        return REWARDS[self.__name__](prompts, completions, pool=pool, budget=self.budget, **columns)


def reward_functions(reward: "RewardConfig") -> tuple[list[BoundReward], list[float]]:
    """The configured reward functions and their weights, for TRL's `reward_funcs` and `reward_weights`.

    Starts no process. Raises `BadInput` for an unknown or repeated name, or weights that do not match the functions.
    """
    if not reward.functions:
        raise BadInput(f"reward.functions is empty: name at least one of {', '.join(REWARDS)}.")
    for name in reward.functions:
        if name not in REWARDS:
            near = difflib.get_close_matches(str(name), REWARDS, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise BadInput(f"reward.functions: unknown reward {name!r}.{hint} There are {', '.join(REWARDS)}.")
    if len(set(reward.functions)) != len(reward.functions):
        raise BadInput(
            f"reward.functions names a reward twice: {', '.join(reward.functions)}. Use its weight instead."
        )
    weights = [1.0] * len(reward.functions) if reward.weights is None else [float(w) for w in reward.weights]
    if len(weights) != len(reward.functions):
        raise BadInput(
            f"reward.weights has {len(weights)} values for {len(reward.functions)} reward.functions "
            f"({', '.join(reward.functions)}). Give one weight per function."
        )
    if reward.workers < 1 or reward.timeout_s <= 0:
        raise BadInput(
            f"reward.workers ({reward.workers}) must be at least 1 and reward.timeout_s ({reward.timeout_s}) above 0."
        )
    functions = [
        BoundReward(name, reward.workers, reward.timeout_s, reward.max_unknown_fraction) for name in reward.functions
    ]
    return functions, weights
