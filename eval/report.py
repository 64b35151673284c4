"""eval.json as Markdown, as a picture and as lines for the terminal; `python -m eval report --run …` redraws."""

import argparse
import os
from pathlib import Path
from typing import Any

from eval.compare import p_value, points
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
        gained, lost = gain["discordant"]
        test = f"McNemar p {p_value(gain['mcnemar_p'])}, {gained} gained, {lost} lost"
        print(f"gain {name:<5}  {_with_interval(gain)}  {test}")
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
    temperature = result.get("temperature", 0)
    decoding = f"Sampled at temperature {temperature:g}, seed {result['seed']}" if temperature else "Greedy decoding"
    lines += ["## Matrix", "", f"{decoding}; accuracies and rates in percent, 95 % Wilson intervals.", ""]
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
            [name, *_columns(gain), p_value(gain["mcnemar_p"]), *gain["discordant"], detectable, gain["n"]]
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
    if "engine" in result:
        lines += [
            f"Engine: {result['engine']}, computing in {result['compute_dtype']}; fp8 and w4a16 weights are "
            "dequantized at load time.",
            "",
        ]
    lines += [f"Command: `{' '.join(result['command'])}`", ""]
    return "\n".join(lines)


def draw(result: dict, file: Path) -> None:
    """A forest plot: accuracy of base and GRPO by format on the left, gain survival by format on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    formats, survival = list(result["matrix"]["base"]), result["gain_survival"]
    height = 1.9 + 0.55 * len(formats)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, height), width_ratios=[3, 2], layout="constrained")
    for policy, shift in (("base", -0.16), ("grpo", 0.16)):
        cells = [result["matrix"][policy][name] for name in formats]
        points_at = [(place + shift, cell["accuracy"], cell["interval"]) for place, cell in enumerate(cells)]
        _forest(left, points_at, COLORS[policy], {"base": "base", "grpo": "GRPO"}[policy], sign=False)
    left.set_xlabel("accuracy, % (95 % Wilson interval)")
    left.set_title(f"Held-out accuracy, {result['n']} problems", fontsize=11)
    points_at = [(formats.index(name), found["difference"], found["interval"]) for name, found in survival.items()]
    right.axvline(0, color="black", linewidth=0.8)
    if survival:
        _forest(right, points_at, "#d62728", None, sign=True)
        where = (0, formats.index("bf16"))
        right.annotate("reference", where, ha="center", va="center", fontsize=8, backgroundcolor="white")
        widest = max(abs(100 * end) for _, _, interval in points_at for end in interval)
        right.set_xlim(-1.15 * widest, 1.15 * widest)
    else:
        right.text(0.5, 0.5, "not measured:\nneeds bf16 and another format", ha="center", transform=right.transAxes)
    right.set_xlabel("gain minus gain in bf16, points (95 % paired bootstrap)")
    right.set_title("Does the gain survive the format?", fontsize=11)
    for axes in (left, right):
        _rows(axes, formats)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, dpi=130, format="png")
    pyplot.close(figure)
    os.replace(partial, file)


def _forest(axes: Any, rows: list[tuple[float, float, list]], color: str, label: str | None, sign: bool) -> None:
    """Estimates with their intervals; `rows` are (place, estimate, interval) in fractions."""
    places, middles, intervals = zip(*rows, strict=True)
    # The bootstrap adds two pseudo-problems, so on few problems an estimate can lie outside its own interval.
    below = [100 * max(middle - low, 0) for middle, (low, _) in zip(middles, intervals, strict=True)]
    above = [100 * max(high - middle, 0) for middle, (_, high) in zip(middles, intervals, strict=True)]
    shown = [100 * middle for middle in middles]
    axes.errorbar(shown, places, xerr=[below, above], fmt="o", color=color, capsize=3, markersize=5, label=label)
    behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for place, middle in zip(places, middles, strict=True):
        axes.annotate(points(middle, sign=sign), (100 * middle, place), xytext=(0, 6), textcoords="offset points",
                      ha="center", fontsize=8, bbox=behind)  # fmt: skip


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
