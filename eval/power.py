"""Power analysis: what a number of problems and completions can show, and how many an effect needs.

It depends on one quantity, the disagreement q: the mean over problems of (score after - score before)². With one
completion per problem it is the share of problems on which the two disagree; with k it is smaller, since the
randomness of the single completion averages out. Effects are differences of accuracies, fractions in 0..1.
"""

from math import ceil, sqrt

import numpy as np

from eval.stats import ALPHA, pseudo_change
from kit.core.errors import BadInput

POWER = 0.8


def minimum_detectable_effect(n: int, disagreement: float, alpha: float = ALPHA, samples: int = 1) -> float:
    """Smallest difference of accuracies that n paired problems show with `POWER` at two-sided `alpha`; at most 1.

    Solves n·d² = (z_{1-alpha/2}·sqrt(q) + z_{power}·sqrt(q - d²))² for d with q = `disagreement`, as seen when the
    effect is present (Miettinen 1968, Biometrics 24:339; Connor 1987, Biometrics 43:207; with the variance of means of
    `samples` completions Miller 2024, arXiv:2411.00640, section 5). A difference of d needs q >= d/samples, since a
    problem's score moves by at least 1/samples: if `disagreement` is smaller, the smallest q that allows d is used.
    """
    if n < 1 or samples < 1 or not 0 <= disagreement <= 1:
        raise BadInput(
            f"needs n >= 1, samples >= 1 and a disagreement in 0..1, got n = {n}, samples = {samples}, disagreement = "
            f"{disagreement}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):  # the number of problems that an effect needs falls as the effect grows
        middle = (low + high) / 2
        if _problems(middle, disagreement, alpha, samples) > n:
            low = middle
        else:
            high = middle
    return float(high)


def problems_needed(effect: float, disagreement: float, alpha: float = ALPHA, samples: int = 1) -> int:
    """How many paired problems with `samples` completions each show a difference of `effect` with `POWER`.

    The inverse of `minimum_detectable_effect`, rounded up. `BadInput` unless 0 < effect <= 1.
    """
    if not 0 < effect <= 1 or samples < 1 or not 0 <= disagreement <= 1:
        raise BadInput(
            f"needs an effect above 0 and at most 1, samples >= 1 and a disagreement in 0..1, got effect = {effect}, "
            f"samples = {samples}, disagreement = {disagreement}."
        )
    return max(1, ceil(_problems(effect, disagreement, alpha, samples) - 1e-9))


def _problems(effect: float, disagreement: float, alpha: float, samples: int) -> float:
    from scipy.special import ndtri

    spread = max(disagreement, effect / samples, effect**2)  # a mean of squares is at least the square of the mean
    root = ndtri(1 - alpha / 2) * sqrt(spread) + ndtri(POWER) * sqrt(spread - effect**2)
    return (root / effect) ** 2 if effect > 0 else float("inf")


def problems_to_decide(n: int, room: float, half_width: float) -> int | None:
    """How many problems narrow an interval until an estimate that is `room` within its limit is shown to be.

    The half width that n problems gave falls with their square root. None if the estimate is not within its limit, or
    is shown to be already.
    """
    return ceil(n * (half_width / room) ** 2) if 1e-9 < room < half_width else None


def seen_disagreement(differences: np.ndarray) -> float:
    """Disagreement of `differences` (n,), one per problem, including the two pseudo-problems of the interval.

    (Σd² + 2c²)/(n + 2), c from `stats.pseudo_change`: two policies that never disagreed are not assumed to never do
    so.
    """
    values = np.asarray(differences, dtype=np.float64)
    change = pseudo_change(values)
    return float(min((np.square(values).sum() + 2 * change**2) / (len(values) + 2), 1.0))


def split_disagreement(after: np.ndarray, before: np.ndarray) -> tuple[float, float] | None:
    """(between, within) of the completions' scores `after` and `before`, (n, k) with NaN where undecided, k >= 2.

    within: mean over problems of the variance of single differences, the randomness of one completion; between: mean
    of the squared true differences, mean d² - within/k, at least 0 (Miller 2024, section 3.2). With K completions the
    disagreement is about between + within/K: more completions help until only `between` is left.
    None if no problem has two decided completions on both sides.
    """
    single = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    decided = (~np.isnan(single)).sum(axis=1)
    single = single[decided >= 2]
    if len(single) == 0:
        return None
    decided = decided[decided >= 2]
    variance = np.nanvar(single, axis=1, ddof=1)
    between = np.mean(np.square(np.nanmean(single, axis=1)) - variance / decided)
    return float(max(between, 0.0)), float(variance.mean())
