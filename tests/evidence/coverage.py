"""How often the intervals of `eval` hold the truth, and how often its test finds an effect that is not there.

    python tests/evidence/coverage.py --runs 2000

Draws n problems whose chances of a right completion are Beta(a, b), k completions each, and counts; minutes on one CPU
core. Its output is a table in eval/MEASUREMENTS.md. Not covered: completions of one problem that depend on each other
beyond their common chance.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval import stats

SHAPES = {"spread": (2, 2), "nearly all right": (5, 0.5), "mostly wrong": (0.2, 4)}


def of_accuracy(n: int, k: int, shape: tuple[float, float], runs: int) -> tuple[float, float]:
    """Coverage of the cluster interval, and of the plain bootstrap over problems."""
    rng, truth, hits = np.random.default_rng(0), shape[0] / sum(shape), np.zeros(2)
    for _ in range(runs):
        shares = rng.binomial(k, rng.beta(*shape, n)) / k
        means = shares[rng.integers(0, n, (500, n))].mean(axis=1)
        intervals = stats.cluster_interval(shares, n * k), np.quantile(means, [0.025, 0.975])
        hits += [low <= truth <= high for low, high in intervals]
    return tuple(hits / runs)


def of_difference(n: int, k: int, shape: tuple[float, float], runs: int) -> tuple[float, float, float]:
    """Coverage of the paired and of the plain bootstrap where half the problems gain 10 points; false alarms."""
    rng, hits, alarms = np.random.default_rng(1), np.zeros(2), 0
    for run in range(runs):
        before = 0.9 * rng.beta(*shape, n)
        raised = before + 0.1 * (rng.random(n) < 0.5)
        changes = (rng.binomial(k, raised) - rng.binomial(k, before)) / k
        means = changes[rng.integers(0, n, (500, n))].mean(axis=1)
        intervals = stats.bootstrap_mean(changes, 1000, run), np.quantile(means, [0.025, 0.975])
        hits += [low <= 0.05 <= high for low, high in intervals]
        alarms += stats.sign_flip((rng.binomial(k, before) - rng.binomial(k, before)) / k) <= stats.ALPHA
    return *(hits / runs), alarms / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=2000, help="simulated evaluations per row")
    runs = parser.parse_args().runs
    print("| problems | completions | chances | accuracy | bootstrap | difference | plain | false alarms |")
    print("|---|---|---|---|---|---|---|---|")
    for n, k in ((20, 4), (50, 4), (300, 1), (300, 8)):
        for name, shape in SHAPES.items():
            rates = *of_accuracy(n, k, shape, runs), *of_difference(n, k, shape, runs)
            print(
                f"| {n} | {k} | {name} | " + " | ".join(f"{rate:.3f}".lstrip("0") for rate in rates) + " |", flush=True
            )


if __name__ == "__main__":
    main()
