"""Statistics of a paired comparison: intervals, tests, and what a number of problems can show at all.

Covers: proportions of independent problems, and differences of policies or formats *on the same problems*. Does not
cover: several samples a problem (they are not independent), corrections for looking at many formats at once.
Accuracies, differences and intervals are fractions in 0..1, not percent.
"""

from math import sqrt

import numpy as np
from scipy.stats import binomtest, norm

from recipes.parts.errors import BadInput

Interval = tuple[float, float]
CONFIDENCE = 0.95


def wilson(successes: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson score interval of `successes` out of `total`.

    Unlike p ± z·sqrt(p(1-p)/n) it stays in 0..1 and has a width at 0 and at `total` (Wilson 1927; Brown, Cai and
    DasGupta 2001 recommend it). `BadInput` when `total` is 0.
    """
    if total < 1:
        raise BadInput("an interval needs at least one decided problem, there are none.")
    interval = binomtest(successes, total).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_mean(values: np.ndarray, samples: int, seed: int, confidence: float = CONFIDENCE) -> Interval:
    """Percentile bootstrap interval of the mean of `values` (n,), differences of 0/1 scores on n problems.

    One pseudo-problem of +1 and one of -1 are added before resampling (the adjustment Bonett and Price 2012 give for
    paired proportions). Without it, two policies that never disagree on 50 problems get the interval [0, 0], as if
    50 problems could show that they never will; with it the width there is about that of the rule of three.

    Resampling n problems with replacement only matters through how often each distinct value is drawn, so the counts
    are drawn from the multinomial directly: the same distribution, and 10,000 samples take milliseconds.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise BadInput(f"a bootstrap needs a list of at least one value, got shape {values.shape}.")
    padded = np.concatenate([values, [1.0, -1.0]])
    distinct, counts = np.unique(padded, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(padded), counts / len(padded), size=samples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn @ distinct / len(padded), [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(after: np.ndarray, before: np.ndarray, samples: int, seed: int) -> dict:
    """{"difference": mean(after) - mean(before), "interval": [low, high]} over the same problems, (n,) scores each."""
    after, before = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    if after.shape != before.shape:
        raise BadInput(f"a paired difference needs the same problems on both sides: {len(after)} and {len(before)}.")
    change = after - before
    return {"difference": float(change.mean()), "interval": list(bootstrap_mean(change, samples, seed))}


def gain_survival(
    base: np.ndarray, grpo: np.ndarray, base_bf16: np.ndarray, grpo_bf16: np.ndarray, samples: int, seed: int
) -> dict:
    """Gain in a format minus gain in bf16, per problem: {"difference", "interval"}; negative when gain was lost.

    All four are 0/1 scores (n,) on the same problems in the same order. Resampling problems, not cells, keeps what
    the four cells have in common out of the width.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in (grpo, base, grpo_bf16, base_bf16)]
    if len({column.shape for column in columns}) != 1:
        raise BadInput(f"gain survival needs the same problems in all four cells: {[len(c) for c in columns]}.")
    grpo, base, grpo_bf16, base_bf16 = columns
    return paired_difference(grpo - base, grpo_bf16 - base_bf16, samples, seed)


def discordant(after: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """(gained, lost): problems right only `after`, and problems right only `before`."""
    after, before = np.asarray(after, dtype=bool), np.asarray(before, dtype=bool)
    return int((after & ~before).sum()), int((before & ~after).sum())


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p-value: under no effect, gained ~ Binomial(gained + lost, 1/2) (McNemar 1947).

    1.0 when the two never disagree: no disagreement is no evidence either way.
    """
    if gained + lost == 0:
        return 1.0
    return float(binomtest(gained, gained + lost, 0.5).pvalue)


def minimum_detectable_effect(n: int, discordant_rate: float, power: float = 0.8, alpha: float = 0.05) -> float:
    """Smallest difference of accuracies that n paired problems show with `power` at two-sided `alpha`.

    Solves n·d² = (z_{1-alpha/2}·sqrt(q) + z_{power}·sqrt(q - d²))² for d, where q is the share of problems on which
    the two disagree (Miettinen 1968; Connor 1987). A difference of d needs q >= d, so where `discordant_rate` is
    smaller than the solution, q = d is used: the least disagreement that makes such a difference. At most 1.
    """
    if n < 1 or not 0 <= discordant_rate <= 1:
        raise BadInput(f"needs n >= 1 and a rate in 0..1, got n = {n}, discordant_rate = {discordant_rate}.")
    za, zb, q = norm.ppf(1 - alpha / 2), norm.ppf(power), discordant_rate
    root = za**2 * n * q - (n + zb**2) * (za**2 - zb**2) * q
    effect = (za * sqrt(n * q) + sqrt(max(root, 0.0))) / (n + zb**2)
    if effect >= q:  # with q = d the equation reads n·d = (za + zb·sqrt(1 - d))²
        effect = _fixed_point(n, za, zb)
    return float(min(effect, 1.0))


def _fixed_point(n: int, za: float, zb: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if n * middle < (za + zb * sqrt(1 - middle)) ** 2:
            low = middle
        else:
            high = middle
    return high
