"""Statistics of a comparison on the same problems: intervals of accuracies and differences, tests, corrections.

Covers: accuracies of n problems with one or several completions each, and differences of policies or formats *on the
same problems*. With several completions the problem stays the unit: every function that takes an array takes one value
per problem, the mean over its completions, since completions of one problem are not independent. Power analysis is in
`power.py`, estimators over the completions of a problem are in `samples.py`. Accuracies, differences and intervals are
fractions in 0..1, not percent.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from kit.core.errors import BadInput

Interval = tuple[float, float]
CONFIDENCE = 0.95
ALPHA = 0.05
_FINEST = 840  # largest common denominator tried for differences: 1..8 completions divide it
_MOST_STEPS = 10**8  # limit for the exact distribution: about half a second
_FLIPS = 20_000


def wilson(successes: float, total: float) -> Interval:
    """Wilson score interval of `successes` out of `total`; both may be fractional (an effective sample size).

    Unlike p ± z·sqrt(p(1-p)/n) it stays in 0..1 and has a nonzero width at 0 and at `total` (Wilson 1927, JASA 22:209;
    Brown, Cai and DasGupta 2001, Statistical Science 16:101, recommend it). `BadInput` if `total` is 0.
    """
    if not total > 0:
        raise BadInput("an interval needs at least one decided problem, there are none.")
    from scipy.special import ndtri  # imported late here and below: scipy takes seconds, and --help does not need it

    z, share = float(ndtri((1 + CONFIDENCE) / 2)), successes / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * sqrt(max(share * (1 - share), 0.0) / total + z**2 / (4 * total**2))
    return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))


def cluster_interval(shares: np.ndarray, completions: int) -> Interval:
    """Interval of the mean of `shares` (n,), each in 0..1: the share of right completions of one problem.

    The cluster-robust variance of the mean, Var(shares)/n (Liang and Zeger 1986, Biometrika 73:13; for evaluations
    Miller 2024, arXiv:2411.00640, section 2.2), is turned into an effective number of independent completions,
    n·p(1-p)/Var(shares), at most `completions`, corrected with Student's t for few problems, and that into a Wilson
    interval (Korn and Graubard 1998, Survey Methodology 24:193). With one completion per problem (`completions` = n)
    it is the Wilson interval of n. If all are right or all wrong, every problem counts once.
    """
    shares = np.asarray(shares, dtype=np.float64)
    n = len(shares)
    if n == 0:
        raise BadInput("an interval needs at least one decided problem, there are none.")
    share, variance = float(shares.mean()), float(shares.var())
    if completions <= n:
        return wilson(n * share, n)
    effective = float(n)
    if 0 < share < 1:
        effective = completions if variance == 0 else min(completions, n * share * (1 - share) / variance)
    if n > 1:
        from scipy.special import ndtri, stdtrit

        tail = (1 + CONFIDENCE) / 2
        effective *= float(ndtri(tail) / stdtrit(n - 1, tail)) ** 2
    return wilson(effective * share, effective)


def pseudo_change(values: np.ndarray) -> float:
    """The size c of the two pseudo-problems, +c and -c, that `bootstrap_mean` adds: (Σd² + 1)/(Σ|d| + 1), in 0..1.

    It is the size of a typical change, with one change of a whole problem counted besides those seen: 1 if every
    change is of a whole problem, as with one completion each, and if none was seen.
    """
    values = np.abs(np.asarray(values, dtype=np.float64))
    return float(min((np.square(values).sum() + 1) / (values.sum() + 1), 1.0))


def bootstrap_mean(values: np.ndarray, samples: int, seed: int) -> Interval:
    """Percentile bootstrap interval of the mean of `values` (n,), differences of scores on n problems.

    Problems are resampled, each with all its completions (the cluster bootstrap: Davison and Hinkley 1997, section
    3.8). One pseudo-problem of +c and one of -c are added before resampling (`pseudo_change`; c = 1 is the adjustment
    that Bonett and Price 2012, J. Educ. Behav. Stat. 37:479, give for paired proportions). Without it, two policies
    that never disagree on 50 problems get the interval [0, 0], as if 50 problems could show that they never will;
    with it the width there is about that of the rule of three.

    Resampling n problems with replacement only matters through how often each distinct value is drawn, so the counts
    are drawn from the multinomial directly: the same distribution, and 10,000 samples take milliseconds.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise BadInput(f"a bootstrap needs a list of at least one value, got shape {values.shape}.")
    change = pseudo_change(values)
    padded = np.concatenate([values, [change, -change]])
    distinct, counts = np.unique(padded, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(padded), counts / len(padded), size=samples)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn @ distinct / len(padded), [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(after: np.ndarray, before: np.ndarray, samples: int, seed: int) -> dict:
    """{"difference": mean(after) - mean(before), "interval": [low, high]} over the same problems, (n,) scores each."""
    after, before = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    if after.shape != before.shape:
        raise BadInput(f"a paired difference needs the same problems on both sides: {len(after)} and {len(before)}.")
    change = after - before
    return {"difference": float(change.mean()), "interval": list(bootstrap_mean(change, samples, seed))}


def runs_interval(values: Sequence[float]) -> Interval:
    """Student's t interval of the mean of a few runs' values, (n,), n at least 2: spread over runs, not problems."""
    if len(values) < 2:
        raise BadInput(f"an interval over runs needs at least two, there are {len(values)}.")
    from scipy.special import stdtrit

    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / sqrt(len(values))
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
    return mean - half, mean + half


def negated(found: dict) -> dict:
    """A difference, as of `paired_difference`, with the other sign."""
    low, high = found["interval"]
    return {**found, "difference": 0.0 - found["difference"], "interval": [0.0 - high, 0.0 - low]}


def discordant(after: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """(gained, lost): problems with a higher score `after`, and problems with a higher score `before`.

    With one completion each: right only `after`, and right only `before`.
    """
    after, before = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    return int((after > before).sum()), int((after < before).sum())


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided McNemar p-value: under no effect, gained ~ Binomial(gained + lost, 1/2).

    McNemar 1947, Psychometrika 12:153. 1.0 if the two never disagree: no disagreement is no evidence either way.
    """
    if gained + lost == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost, 0.5).pvalue)


def sign_flip(differences: np.ndarray, seed: int = 0) -> float:
    """Two-sided p-value of `differences` (n,), one per problem, under both signs being equally likely.

    The paired permutation test (Fisher 1935; Good 2005, section 3.2), with the problem as the unit, so completions of
    one problem may depend on each other. Under "both policies answer each problem equally well" the two can be swapped
    problem by problem, and the test is exact; under "equal on average" it is exact in the limit of many problems
    (Janssen 1997, Stat. Probab. Lett. 36:9). If the differences lie on a grid, as shares of equally many completions
    do, it covers all 2^n signs exactly, through the distribution of the sum built problem by problem; else it uses
    `_FLIPS` random draws, the observed one counted among them (Phipson and Smyth 2010). With one completion each it is
    McNemar's exact test.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[np.abs(values) > 1e-12]  # a zero stays zero, whatever its sign
    if len(values) == 0:
        return 1.0
    sizes, observed = np.abs(values), float(values.sum())
    grid = _on_grid(values)
    if grid is not None and len(grid) * (2 * int(np.abs(grid).sum()) + 1) <= _MOST_STEPS:
        return _exact_sign_flip(np.abs(grid), abs(int(grid.sum())))
    rng, hits, left = np.random.default_rng(seed), 0, _FLIPS
    while left:
        block = min(left, 1000)
        signs = rng.integers(0, 2, (block, len(sizes))) * 2 - 1
        hits += int((np.abs(signs @ sizes) >= abs(observed) - 1e-9).sum())
        left -= block
    return (hits + 1) / (_FLIPS + 1)


def _on_grid(values: np.ndarray) -> np.ndarray | None:
    """The values as whole multiples of 1/m with the smallest m up to 840, or None if there is none."""
    for denominator in range(1, _FINEST + 1):
        scaled = values * denominator
        whole = np.rint(scaled)
        if np.abs(scaled - whole).max() < 1e-7:
            return whole.astype(np.int64)
    return None


def _exact_sign_flip(sizes: np.ndarray, observed: int) -> float:
    reach = int(sizes.sum())
    chance = np.zeros(2 * reach + 1)  # probability of every sum from -reach to +reach
    chance[reach] = 1.0
    for size in sizes:
        spread = np.zeros_like(chance)
        spread[size:] += 0.5 * chance[: len(chance) - size]
        spread[: len(chance) - size] += 0.5 * chance[size:]
        chance = spread
    sums = np.arange(-reach, reach + 1)
    return float(min(chance[np.abs(sums) >= observed].sum(), 1.0))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: rejecting those at or below α keeps the family-wise error at α.

    Holm 1979, Scand. J. Stat. 6:65. The smallest of m is multiplied by m, the next by m-1, …, never less than the one
    before and at most 1. Valid under any dependence between the tests.
    """
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = running
    return adjusted
