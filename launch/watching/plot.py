"""Curves of a run as pictures: health.png, comparison.png of several runs, and the panels of the HTML page."""

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a training machine has no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kit.core.errors import BadInput
from kit.core.health import JUDGES
from kit.core.metrics_log import SMOOTH, MetricsLog, group, phases, series, smooth, smoothing
from kit.core.run_directory import RunDir, naming
from launch.watching.compare import names
from launch.watching.page import known

LINE, FAINT, SECOND = "#1f5aa6", "#b9cbe3", "#e08214"
# Distinguishable in grayscale and with common color vision deficiencies.
COLORS = ("#1f5aa6", "#e08214", "#4d9221", "#8e7cc3", "#7f7f7f", "#d6604d", "#35978f", "#b8860b")
SHARES = {
    "zero spread": "zero_spread_fraction",
    "no signal": "no_signal_fraction",
    "kept": "kept_fraction",
    "truncated": "truncated_fraction",
    "clipped": "clip_fraction",
    "masked": "masked_fraction",
}
COMPARED = {
    "reward": "reward",
    "held-out accuracy": "heldout_accuracy",
    "KL to the reference (nats a token)": "kl",
    "divergence from the teacher (nats a token)": "divergence",
    "entropy (nats a token)": "entropy",
    "truncated (share)": "truncated_fraction",
    "seconds per step": "seconds.step",
}

# Smallest and largest value of the kit's reward functions.
RANGES = dict.fromkeys((*JUDGES, "boxed_format", "think_format", "llm_judge"), (0.0, 1.0))
RANGES |= dict.fromkeys(("length", "repetition", "language"), (-1.0, 0.0))

Panel = Callable[[Axes, list[int], Sequence[dict]], None]
Fill = Callable[[Axes], None]


def _line(axes: Axes, steps: list[int], rows: Sequence[dict], key: str, title: str) -> None:
    values, kind = series(rows, key), smoothing(key)
    axes.plot(steps, values, color=FAINT, linewidth=1, marker="." if len(steps) < 3 else None, label="each step")
    axes.plot(steps, smooth(values, kind), color=LINE, linewidth=1.6, label=f"{kind} of {SMOOTH} steps")
    axes.set_title(title)
    _cut(axes, [values])
    if known(rows, key):
        axes.legend(fontsize=8, framealpha=0.85, loc="best")
    else:
        _no_data(axes)


def _cut(axes: Axes, curves: Sequence[Sequence[float]]) -> None:
    """Cap the axis above the 98th percentile if single outliers would flatten the rest; note the highest value."""
    drawn = sorted(value for values in curves for value in values if math.isfinite(value))
    if len(drawn) < 20:
        return
    low, high = drawn[0], drawn[math.ceil(0.98 * len(drawn)) - 1]
    if drawn[-1] - low > 3 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.25 * (high - low))
        axes.text(
            *(0.99, 0.97, f"highest value {drawn[-1]:.3g}"),
            **{"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 8, "color": "gray"},
        )


def _no_data(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="gray")


def points(rows: Sequence[dict], key: str) -> list[tuple[int, float]]:
    """(step, value) where a metric has one."""
    steps = (row["step"] for row in rows)
    return [pair for pair in zip(steps, series(rows, key), strict=True) if math.isfinite(pair[1])]


def reward_range(run: RunDir) -> tuple[float, float]:
    """The smallest and largest possible weighted sum of the run's reward functions; infinite if one of them is not
    the kit's."""
    try:
        reward = group(run.config(), "reward")
        names = reward["functions"]
        pairs = list(zip(names, reward.get("weights") or [1.0] * len(names), strict=True))
        ends = [(weight * RANGES[name][0], weight * RANGES[name][1]) for name, weight in pairs]
    except (BadInput, KeyError, TypeError, ValueError):
        return -math.inf, math.inf
    return sum(min(pair) for pair in ends), sum(max(pair) for pair in ends)


def _reward(
    axes: Axes, steps: list[int], rows: Sequence[dict], limits: tuple[float, float] = (-math.inf, math.inf)
) -> None:
    reward, spread = series(rows, "reward"), series(rows, "reward_std")
    # For rewards of 0 and 1, mean plus deviation can exceed 1, where no reward can be.
    low = [max(a - b, limits[0]) for a, b in zip(reward, spread, strict=True)]
    high = [min(a + b, limits[1]) for a, b in zip(reward, spread, strict=True)]
    axes.fill_between(steps, low, high, color=FAINT, alpha=0.45, linewidth=0, label="± standard deviation of a step")
    _line(axes, steps, rows, "reward", "reward")
    if heldout := points(rows, "heldout_accuracy"):
        axes.plot(*zip(*heldout, strict=True), "o-", color=SECOND, markersize=4, label="held-out accuracy")
        axes.set_title("reward and held-out accuracy")
        axes.legend(fontsize=8, framealpha=0.85, loc="best")


def _entropy(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    _line(axes, steps, rows, "entropy", "entropy (nats a token)")
    axes.set_ylim(bottom=0)


def _curve(key: str, title: str) -> Panel:
    return partial(_line, key=key, title=title)


def _parts(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    found = dict.fromkeys(name for row in rows for name in group(row, "rewards"))
    for color, name in zip(COLORS, found, strict=False):
        axes.plot(steps, smooth(series(rows, f"rewards.{name}")), color=color, linewidth=1.6, label=name)
    axes.set_title(f"reward by function (mean of {SMOOTH} steps)")
    _legend(axes, "best")


def speed(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    for color, name in zip(COLORS, ("rollout", "update"), strict=False):
        values = series(rows, f"{name}_tokens_per_s")
        if known(rows, f"{name}_tokens_per_s"):
            axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=name)
    axes.set_ylim(bottom=0)
    axes.set_title(f"tokens per second (mean of {SMOOTH} steps)")
    _legend(axes, "best")


def _shares(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    for color, (label, key) in zip(COLORS, SHARES.items(), strict=False):
        values = series(rows, key)
        is_always_shown = key in ("zero_spread_fraction", "truncated_fraction")
        if any(math.isfinite(value) and (value > 0 or is_always_shown) for value in values):
            axes.plot(steps, smooth(values), color=color, linewidth=1.6, label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.set_title(f"shares (mean of {SMOOTH} steps)")
    _legend(axes, "best")


def _seconds(axes: Axes, steps: list[int], rows: Sequence[dict]) -> None:
    spent = [phases(row) for row in rows]
    found = dict.fromkeys(name for one in spent for name in one)
    if found:
        stack = [[one.get(name, 0.0) for one in spent] for name in found]
        axes.stackplot(steps, *stack, labels=list(found), colors=COLORS, step="mid", linewidth=0)
        # The first steps may compile or warm up; they are cut off at the top so that the rest stays readable.
        tops = sorted(map(sum, zip(*stack, strict=True)))
        axes.set_ylim(0, 1.4 * tops[int(0.95 * (len(tops) - 1))] or None)
    axes.set_title("seconds per step, by phase")
    _legend(axes, "upper right")


def _legend(axes: Axes, place: str) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, framealpha=0.85, loc=place, ncols=2)
    else:
        _no_data(axes)


def panels(rows: Sequence[dict], run: RunDir) -> dict[str, Panel]:
    """The panels of one run by name, in reading order, an even number; teacher, sampler and per-reward panels only if
    there is data."""
    if known(rows, "divergence"):
        second = {"divergence": _curve("divergence", "divergence from the teacher (nats a token)")}
    else:
        second = {"kl": _curve("kl", "KL to the reference (nats a token)")}
    found: dict[str, Panel] = {"reward": partial(_reward, limits=reward_range(run)), **second}
    found |= {"entropy": _entropy, "shares": _shares}
    found |= {"seconds": _seconds, "gradient": _curve("grad_norm", "gradient norm")}
    has_parts = any(len(group(row, "rewards")) > 1 for row in rows)
    has_sampler = bool(known(rows, "sampler_k3"))
    if has_parts or has_sampler:
        mismatch = _curve("sampler_k3", "sampler against trainer: k3 (nats a token)")
        found |= {"mismatch": mismatch} if has_sampler else {"speed": speed}
        found |= {"parts": _parts} if has_parts else {"speed": speed}
    return found


def _style(axes: Axes) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw(run: RunDir, rows: Sequence[dict], folder: Path | None = None) -> Path:
    """Write `health.png` atomically into the run directory (or `folder`) and return its path."""
    steps, found = [row["step"] for row in rows], panels(rows, run)
    lines = len(found) // 2
    figure, grid = plt.subplots(lines, 2, figsize=(11, 3 * lines), sharex=True, layout="constrained")
    for axes, panel in zip(grid.flat, found.values(), strict=True):
        panel(axes, steps, rows)
        _style(axes)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.suptitle(f"{run.path.resolve().name}: steps {steps[0]} to {steps[-1]}", fontsize=13)
    return _save(figure, (folder or run.path) / "health.png")


def draw_comparison(runs: Sequence[RunDir], logs: Sequence[MetricsLog], folder: Path) -> Path:
    """Write `comparison.png` into `folder`: the curves of several runs over the same steps."""
    keys = compared_keys(logs)
    lines = math.ceil(len(keys) / 2)
    figure, grid = plt.subplots(lines, 2, figsize=(11, 3 * lines + 0.4), squeeze=False, layout="constrained")
    for axes, (title, key) in zip(grid.flat, keys.items(), strict=False):
        compare_panel(axes, runs, logs, key, title)
    for axes in grid.flat[len(keys) :]:
        axes.axis("off")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), frameon=False)
    return _save(figure, folder / "comparison.png")


def compared_keys(logs: Sequence[MetricsLog]) -> dict[str, str]:
    """Title and key of the curves for which at least one run has values."""
    return {title: key for title, key in COMPARED.items() if any(known(log.rows, key) for log in logs)}


def compare_panel(axes: Axes, runs: Sequence[RunDir], logs: Sequence[MetricsLog], key: str, title: str) -> None:
    """One curve per run, smoothed where every step has a value; a run keeps its color in all panels."""
    drawn = []
    for place, (name, log) in enumerate(zip(names(runs), logs, strict=True)):
        measured = points(log.rows, key)
        steps, values = [step for step, _ in measured], [value for _, value in measured]
        is_sparse = key == "heldout_accuracy"
        if not is_sparse:
            values = smooth(values, smoothing(key))
        look = {"color": COLORS[place % len(COLORS)], "linestyle": ("-", "--", ":")[place // len(COLORS) % 3]}
        axes.plot(steps, values, linewidth=1.6, label=name, marker="o" if is_sparse else None, markersize=3, **look)
        drawn.append(values)
    _cut(axes, drawn)
    if key in SHARES.values():
        axes.set_ylim(0, max(0.2, *(value for values in drawn for value in values if value == value), 0.0) * 1.05)
    axes.set_title(title if key == "heldout_accuracy" else f"{title}, {smoothing(key)} of {SMOOTH} steps")
    axes.set_xlabel("step")
    _style(axes)


def svg(fill: Fill) -> bytes:
    """One panel as SVG with text kept as text; identical bytes for identical data."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "health", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(5.6, 3), layout="constrained")
        try:
            fill(axes)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        finally:
            plt.close(figure)
    return buffer.getvalue()


def run_panel(panel: Panel, rows: Sequence[dict]) -> Fill:
    """The fill function for `svg` that draws one panel of one run."""

    def fill(axes: Axes) -> None:
        panel(axes, [row["step"] for row in rows], rows)
        axes.set_xlabel("step")
        _style(axes)

    return fill


def _save(figure: Figure, final: Path) -> Path:
    try:
        with replacing(final) as partial_file:
            figure.savefig(partial_file, dpi=110)
    finally:
        plt.close(figure)
    return final


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `final` at the end of the block."""
    partial_file = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        with naming(final):
            yield partial_file
        os.replace(partial_file, final)
    finally:
        partial_file.unlink(missing_ok=True)
