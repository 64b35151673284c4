"""eval.json as Markdown, as a picture and as lines for the terminal; `python -m eval report --run …` redraws."""

import argparse
import os
from pathlib import Path
from typing import Any

from eval.compare import points
from recipes.parts.errors import DONE, BadInput
from recipes.parts.rundir import RunDir, read_json

COLORS = {"base": "#7f7f7f", "grpo": "#1f77b4"}


def main(argv: list[str]) -> int:
    """Redraw eval.md and eval.png from the run's eval.json."""
    parser = argparse.ArgumentParser(prog="python -m eval report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run directory, e.g. runs/tiny")
    parser.add_argument("--out", type=Path, help="folder that holds eval.json; default: the run directory")
    arguments = parser.parse_args(argv)
    run = RunDir.open(arguments.run)
    folder = arguments.out or run.path
    result = read_result(folder / "eval.json", run)
    write_report(result, folder)
    print(f"written: {folder / 'eval.md'}, {folder / 'eval.png'}")
    return DONE


def read_result(file: Path, run: RunDir) -> dict:
    """The content of an eval.json; `BadInput` names the command that makes it when it is missing or not one."""
    if not file.is_file():
        raise BadInput(f"{file} does not exist. Make it with: python -m eval --run {run.path}")
    result = read_json(file)
    if not isinstance(result, dict) or not {"matrix", "gain", "gain_survival", "conclusion"} <= set(result):
        raise BadInput(f"{file} is not the result of an evaluation. Make it with: python -m eval --run {run.path}")
    return result


def cell_line(policy: str, name: str, cell: dict) -> str:
    """One line of progress for a measured cell, in a fixed order."""
    low, high = cell["interval"]
    return (
        f"{policy:<4} {name:<5}  accuracy {points(cell['accuracy']):>5} [{points(low):>5}, {points(high):>5}]  "
        f"strict {_optional(cell['strict']):>5}  parsed {points(cell['parse_rate']):>5}  leak "
        f"{points(cell['prompt_leak_rate']):>5}  ended {points(cell['end_of_turn_rate']):>5}  cut "
        f"{cell['max_token_hits']:>4}  undecided {cell['undecided']:>3}  {cell['seconds']:.1f} s"
    )


def print_summary(result: dict) -> None:
    """Gains, survival and the conclusion, for the terminal."""
    for name, gain in result["gain"].items():
        print(f"gain {name:<5}  {_with_interval(gain)}  McNemar p {gain['mcnemar_p']:.2g}  +{gain['discordant'][0]} "
              f"-{gain['discordant'][1]}")  # fmt: skip
    for name, survival in result["gain_survival"].items():
        print(f"gain_survival_{name}  {_with_interval(survival)}")
    print(result["conclusion"], flush=True)


def write_report(result: dict, folder: Path) -> None:
    """eval.md and eval.png of a result, each replaced whole."""
    partial = folder / ".eval.md.partial"
    partial.write_text(markdown(result))
    os.replace(partial, folder / "eval.md")
    draw(result, folder / "eval.png")


def markdown(result: dict) -> str:
    """The report as Markdown: conclusion, matrix, gains, survival, and what it was measured with. Percent, points."""
    lines = [f"# Evaluation on {result['n']} held-out problems", "", *_bullets(result["conclusion"]), ""]
    lines += ["## Matrix", "", "Greedy decoding; accuracies and rates in percent, 95 % Wilson intervals.", ""]
    lines += _table(
        "policy|format|accuracy|interval|boxed only|parsed|prompt leak|ended|cut|undecided|tokens|s",
        [
            [policy, name, points(cell["accuracy"]), _pair(cell["interval"]), _optional(cell["strict"])]
            + [points(cell[rate]) for rate in ("parse_rate", "prompt_leak_rate", "end_of_turn_rate")]
            + [cell["max_token_hits"], cell["undecided"], f"{cell['mean_tokens']:.1f}", f"{cell['seconds']:.1f}"]
            for policy, row in result["matrix"].items()
            for name, cell in row.items()
        ],
    )
    lines += ["", "## Gain: GRPO minus base, same problems", "", "Points, 95 % paired bootstrap intervals.", ""]
    lines += _table(
        "format|gain|interval|McNemar p|gained|lost|detectable at 80 % power|problems",
        [
            [name, *_columns(gain), f"{gain['mcnemar_p']:.2g}", *gain["discordant"], detectable, gain["n"]]
            for name, gain in result["gain"].items()
            for detectable in [points(gain["minimum_detectable_effect"])]
        ],
    )
    if result["gain_survival"]:
        lines += ["", "## Survival: what the format does to the gain", ""]
        lines += ["Points, 95 % paired bootstrap intervals.", ""]
        lines += _table(
            "format|gain minus gain in bf16|interval|GRPO accuracy lost against bf16|interval",
            [
                [name, *_columns(survival), *_columns(result["quantization_loss"][name])]
                for name, survival in result["gain_survival"].items()
            ],
        )
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += ["", "![accuracy and gain survival](eval.png)", "", f"Measured {result['date']} with {used}.", ""]
    lines += [f"Adapter v{result['adapter_version']}, at most {result['max_new_tokens']} new tokens.", ""]
    lines += [f"Command: `{' '.join(result['command'])}`", ""]
    return "\n".join(lines)


def draw(result: dict, file: Path) -> None:
    """A forest plot: accuracy of base and GRPO by format on the left, gain survival by format on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    formats = list(result["matrix"]["base"])
    height = 1.9 + 0.55 * len(formats)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, height), width_ratios=[3, 2], layout="constrained")
    for policy, shift in (("base", -0.13), ("grpo", 0.13)):
        cells = [result["matrix"][policy][name] for name in formats]
        _forest(left, [place + shift for place in range(len(formats))], [c["accuracy"] for c in cells],
                [c["interval"] for c in cells], COLORS[policy], policy)  # fmt: skip
    _rows(left, formats)
    left.set_xlabel("accuracy, % (95 % Wilson interval)")
    left.set_title(f"Held-out accuracy, {result['n']} problems", fontsize=11)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32 * 3.5 / height), ncols=2, frameon=False)
    survival = result["gain_survival"]
    right.axvline(0, color="black", linewidth=0.8)
    if survival:
        _forest(right, list(range(len(survival))), [s["difference"] for s in survival.values()],
                [s["interval"] for s in survival.values()], "#d62728", None)  # fmt: skip
        _rows(right, list(survival))
        widest = max(abs(100 * end) for s in survival.values() for end in s["interval"])
        right.set_xlim(-1.15 * widest, 1.15 * widest)
    else:
        right.text(0.5, 0.5, "not measured:\nneeds bf16 and another format", ha="center", transform=right.transAxes)
        right.set_yticks([])
    right.set_xlabel("gain minus gain in bf16, points (95 % paired bootstrap)")
    right.set_title("Does the gain survive the format?", fontsize=11)
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, dpi=130, format="png")
    pyplot.close(figure)
    os.replace(partial, file)


def _forest(
    axes: Any, places: list[float], middles: list[float], intervals: list, color: str, label: str | None
) -> None:
    middle = [100 * value for value in middles]
    # The bootstrap adds two pseudo-problems, so the estimate can lie just outside its own interval on few problems.
    below = [max(m - 100 * low, 0) for m, (low, _) in zip(middle, intervals, strict=True)]
    above = [max(100 * high - m, 0) for m, (_, high) in zip(middle, intervals, strict=True)]
    axes.errorbar(middle, places, xerr=[below, above], fmt="o", color=color, capsize=3, markersize=5, label=label)
    for value, place in zip(middle, places, strict=True):
        axes.annotate(
            f"{value:.1f}", (value, place), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8
        )


def _rows(axes: Any, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)


def _bullets(text: str) -> list[str]:
    return [f"- {line}" for line in text.splitlines()]


def _table(header: str, rows: list[list]) -> list[str]:
    names = header.split("|")
    return [f"| {' | '.join(map(str, row))} |" for row in [names, ["---"] * len(names), *rows]]


def _pair(interval: list[float]) -> str:
    return f"{points(interval[0])} to {points(interval[1])}"


def _columns(difference: dict) -> list[str]:
    return [points(difference["difference"], sign=True), _pair(difference["interval"])]


def _with_interval(difference: dict) -> str:
    low, high = difference["interval"]
    value = points(difference["difference"], sign=True)
    return f"{value:>6} points [{points(low)}, {points(high)}]"


def _optional(fraction: float | None) -> str:
    return "-" if fraction is None else points(fraction)
