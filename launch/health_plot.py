"""health.png: the curves of a run on one page, for a report or a glance after the fact."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a training machine has no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from launch.metrics import mean, series
from recipes.parts.rundir import RunDir

SMOOTH = 10  # steps of the running mean drawn over the raw values
LINE, FAINT = "#1f5aa6", "#b9cbe3"
# Distinguishable in gray and for the common color deficiencies.
COLORS = ("#1f5aa6", "#e08214", "#4d9221", "#8e7cc3", "#7f7f7f")
SHARES = {
    "zero spread": "zero_spread_fraction",
    "truncated": "truncated_fraction",
    "clipped": "clip_fraction",
    "masked": "masked_fraction",
}


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of each value and the SMOOTH - 1 before it, NaN where none of them is known."""
    means = (mean(values[max(0, end - SMOOTH) : end]) for end in range(1, len(values) + 1))
    return [math.nan if value is None else value for value in means]


def _curve(axes: Axes, steps: list[int], rows: Sequence[dict], key: str, title: str) -> None:
    values = series(rows, key)
    axes.plot(steps, values, color=FAINT, linewidth=1, marker="." if len(steps) < 3 else None)
    axes.plot(steps, smooth(values), color=LINE, linewidth=1.6)
    axes.set_title(title)
    if not any(math.isfinite(value) for value in values):
        _no_data(axes)


def _no_data(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="gray")


def _reward(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    reward, spread = series(rows, "reward"), series(rows, "reward_std")
    low = [a - b for a, b in zip(reward, spread, strict=True)]
    high = [a + b for a, b in zip(reward, spread, strict=True)]
    axes.fill_between(steps, low, high, color=FAINT, alpha=0.45, linewidth=0)
    _curve(axes, steps, rows, "reward", "reward (band: ± standard deviation)")


def _shares(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    for color, (label, key) in zip(COLORS, SHARES.items(), strict=False):
        values = series(rows, key)
        if any(math.isfinite(value) for value in values):
            axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.set_title(f"shares (mean of {SMOOTH} steps)")
    _legend(axes, "best")


def _seconds(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    names = dict.fromkeys(name for row in rows for name in (row.get("seconds") or {}) if name != "step")
    phases = {name: [0.0 if math.isnan(v) else v for v in series(rows, f"seconds.{name}")] for name in names}
    whole = series(rows, "seconds.step")
    if phases:
        spent = [sum(values) for values in zip(*phases.values(), strict=True)]
        phases["other"] = [max(0.0, b - a) if math.isfinite(b) else 0.0 for a, b in zip(spent, whole, strict=True)]
        axes.stackplot(steps, *phases.values(), labels=list(phases), colors=COLORS, step="mid", linewidth=0)
        # The first steps may compile or warm up; they are cut off at the top so that the rest can be read.
        tops = sorted(sum(values) for values in zip(*phases.values(), strict=True))
        axes.set_ylim(0, 1.4 * tops[int(0.95 * (len(tops) - 1))] or None)
    axes.set_title("seconds per step, by phase")
    _legend(axes, "upper right")


def _legend(axes: Axes, place: str) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.85, loc=place, ncols=2)
    else:
        _no_data(axes)


def draw(run: RunDir, rows: Sequence[dict]) -> Path:
    """Write `health.png` into the run directory, whole or not at all, and return its path."""
    steps = [row["step"] for row in rows]
    figure, grid = plt.subplots(3, 2, figsize=(11, 9), sharex=True, layout="constrained")
    _reward(grid[0, 0], steps, rows)
    _curve(grid[0, 1], steps, rows, "kl", "KL to the reference (nats a token)")
    _curve(grid[1, 0], steps, rows, "entropy", "entropy (nats a token)")
    _shares(grid[1, 1], steps, rows)
    _seconds(grid[2, 0], steps, rows)
    _curve(grid[2, 1], steps, rows, "grad_norm", "gradient norm")
    for axes in grid.flat:
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.suptitle(f"{run.path.name}: steps {steps[0]} to {steps[-1]}", fontsize=13)
    final = run.path / "health.png"
    partial = run.path / f".health.{os.getpid()}.png"
    try:
        figure.savefig(partial, dpi=110)
        os.replace(partial, final)
    finally:
        plt.close(figure)
        partial.unlink(missing_ok=True)
    return final
