"""Output of real_clock.py: figures of each run, the table, and the picture of reward against seconds."""

import importlib.util
import itertools
import statistics
from pathlib import Path
from typing import Any

from eval.plots import STYLE, png, svg
from kit.core.metrics_log import SMOOTH, smooth
from kit.core.run_directory import write_json

ENDS = 10  # steps at each end of a run
# Names in the picture; colors of Okabe and Ito (2008), distinguishable in gray and with a color deficiency.
LOOKS = {
    "stock_bf16": ("stock TRL, BF16, vLLM on the same card", "#404040"),
    "stock_nf4": ("stock TRL, NF4, generates in process", "#cc79a7"),
    "kit": ("this kit, NF4, FP8 server on the same card", "#0072b2"),
    "kit+overlap": ("this kit, NF4, FP8 server, overlapped", "#d55e00"),
}
OTHERS = ("#009e73", "#e69f00", "#56b4e9", "#332288")


def looks(sides: list[str]) -> dict[str, tuple[str, str]]:
    """(name, color) of every side."""
    others = [side for side in sides if side not in LOOKS]
    return {side: LOOKS.get(side) or (side, OTHERS[others.index(side) % len(OTHERS)]) for side in sides}


def figures(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run's steps for its table row; a step's `seconds` count from the start of its process."""
    rewards = [one["reward"] for one in steps if one["reward"] is not None]
    between = [late["seconds"] - early["seconds"] for early, late in itertools.pairwise(steps)]
    ends = min(ENDS, max(1, len(rewards) // 2))
    peaks = [one["peak_gib"] for one in steps if one["peak_gib"] is not None]
    return {
        "steps": len(steps),
        "first_step_s": steps[0]["seconds"] if steps else None,
        "done_s": steps[-1]["seconds"] if steps else None,
        "median_step_s": statistics.median(between) if between else None,
        "reward_first": statistics.mean(rewards[:ends]) if rewards else None,
        "reward_last": statistics.mean(rewards[-ends:]) if rewards else None,
        "trainer_gib": max(peaks) if peaks else None,
    }


def table(runs: list[dict[str, Any]]) -> None:
    """Print one line per run: seconds from its start, rewards at both ends, memory."""
    width = max(len(run["side"]) for run in runs)
    ends = f"reward, {ENDS} steps"
    print(f"\n{'side':<{width}} seed steps  1st step s    all s  median step s  {ends:>16}  trainer GiB  card GiB")
    for run in runs:
        if not run["steps"]:
            print(f"{run['side']:<{width}} {run['seed']:>4}  {run['error'].splitlines()[-1][:140]}")
            continue
        values = [_number(run[name], 1) for name in ("first_step_s", "done_s")]
        step, reward = _number(run["median_step_s"], 2), f"{run['reward_first']:.3f} -> {run['reward_last']:.3f}"
        gib = [_number(run[name], 1) for name in ("trainer_gib", "card_gib")]
        note = f"  cut: {run['error'].splitlines()[0][:100]}" if run["error"] else ""
        print(
            f"{run['side']:<{width}} {run['seed']:>4} {run['steps']:>5}  {values[0]:>10} {values[1]:>8}  {step:>13}  "
            f"{reward:>16}  {gib[0]:>11}  {gib[1]:>8}{note}"
        )


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def picture(runs: list[dict[str, Any]], title: str) -> Any:
    """The figure: smoothed reward of every run against the seconds since its process started."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    drawn, marks = [run for run in runs if run["steps"]], []
    for side, (named, color) in looks(list(dict.fromkeys(run["side"] for run in drawn))).items():
        for place, run in enumerate(run for run in drawn if run["side"] == side):
            seconds = [one["seconds"] for one in run["rows"]]
            rewards = smooth([float("nan") if one["reward"] is None else one["reward"] for one in run["rows"]])
            name = None if place else named
            axes.plot(seconds, rewards, color=color, linewidth=1.7, alpha=0.9 if place == 0 else 0.5, label=name)
            axes.plot(seconds[-1], rewards[-1], "o" if not run["error"] else "x", color=color, markersize=6)
            if place == 0:
                marks.append((seconds[-1], rewards[-1], f"{run['steps']} steps, {seconds[-1]:.0f} s", color))
    for place, (x, y, text, color) in enumerate(sorted(marks)):
        # End points may be close together: the texts alternate between three heights.
        where = {"xytext": (7, (8, -4, -16)[place % 3]), "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(text, (x, y), fontsize=8, color=color, **where)
    axes.set_xlim(0, 1.14 * max(run["done_s"] for run in drawn))  # room for the last text
    axes.grid(True)
    axes.set_xlabel("seconds since the start of the process, loading and server included")
    axes.set_ylabel(f"mean training reward (mean of {SMOOTH} steps)")
    axes.set_title(title)
    axes.legend(loc="best", fontsize=8.5)
    return figure


def write(out: Path, head: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Write `out` (JSON) and, once a run has a step, the pictures beside it as png and svg. A host without matplotlib
    draws none; `real_clock.py --sides --earlier` draws them elsewhere."""
    write_json(out, head | {"runs": runs})
    if any(run["steps"] for run in runs) and importlib.util.find_spec("matplotlib"):
        figure = picture(runs, head["title"])
        png(figure, out.with_suffix(".png"))
        out.with_suffix(".svg").write_bytes(svg(figure))
