"""Results for people: lines for the terminal, and eval.md and eval.png after an evaluation."""

import os
from pathlib import Path

from eval import plots
from eval.compare import points
from eval.found import p_values
from eval.naming import name_of, policy_name
from eval.result import column, engines


def cell_line(policy: str, name: str, cell: dict) -> str:
    """One progress line for a measured cell, in a fixed order."""
    low, high = cell["interval"]
    return (
        f"{policy:<4} {name:<5}  accuracy {points(cell['accuracy']):>5} [{points(low):>5}, {points(high):>5}]  "
        f"strict {_optional(cell['strict']):>5}  parsed {points(cell['parse_rate']):>5}  leak "
        f"{points(cell['prompt_leak_rate']):>5}  ended {points(cell['end_of_turn_rate']):>5}  cut "
        f"{cell['max_token_hits']:>4}  undecided {cell['undecided']:>3}  {cell['seconds']:.1f} s"
    )


def print_summary(result: dict) -> None:
    """Print gains, survival and the conclusion."""
    for name, gain in result["gain"].items():
        gained, lost = gain["discordant"]
        value, adjusted = p_values(gain)
        test = f"{gain.get('test', 'McNemar')} p {value}, adjusted {adjusted}, {gained} gained, {lost} lost"
        print(f"gain {name:<9}  {_with_interval(gain)}  {test}")
    for name, survival in result["gain_survival"].items():
        print(f"survival {name:<9}  {_with_interval(survival)}")
    print(result["conclusion"], flush=True)


def write_report(result: dict, folder: Path) -> None:
    """Write eval.md and eval.png of a result, each replaced atomically."""
    write_whole(folder / "eval.md", markdown(result))
    plots.png(plots.matrix(result), folder / "eval.png")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically, through a partial one."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def markdown(result: dict) -> str:
    """The report as Markdown, in percent and points: conclusion, matrix, gains, survival, measurement settings."""
    lines = [f"# Evaluation on {result['n']} held-out problems", "", *_bullets(result["conclusion"]), ""]
    temperature = result.get("temperature", 0)
    decoding = f"Sampled at temperature {temperature:g}, seed {result['seed']}" if temperature else "Greedy decoding"
    lines += ["## Matrix", "", f"{decoding}; accuracies and rates in percent, 95 % Wilson intervals.", ""]
    trained = name_of(result)
    labels = {name: column(result, name) for name in result["matrix"]["grpo"]}
    lines += _table(
        "policy|format|accuracy|interval|boxed only|parsed|prompt leak|ended|cut|undecided|tokens|s",
        [
            [
                policy_name(policy, trained),
                labels[name],
                points(cell["accuracy"]),
                _pair(cell["interval"]),
                _optional(cell["strict"]),
            ]
            + [points(cell[rate]) for rate in ("parse_rate", "prompt_leak_rate", "end_of_turn_rate")]
            + [cell["max_token_hits"], cell["undecided"], f"{cell['mean_tokens']:.1f}", f"{cell['seconds']:.1f}"]
            for policy, row in result["matrix"].items()
            for name, cell in row.items()
        ],
    )
    lines += ["", f"## Gain: {trained} minus base, same problems", "", "Points, 95 % paired bootstrap intervals.", ""]
    lines += _table(
        "format|gain|interval|p|adjusted p|gained|lost|detectable at 80 % power|problems",
        [
            [labels[name], *_columns(gain), *p_values(gain), *gain["discordant"], detectable, gain["n"]]
            for name, gain in result["gain"].items()
            for detectable in [points(gain["minimum_detectable_effect"])]
        ],
    )
    lines += _several(result["gain"], trained)
    if result["gain_survival"]:
        lines += ["", "## Survival: what the format does to the gain", ""]
        lines += ["Points, 95 % paired bootstrap intervals.", ""]
        lines += _table(
            f"format|gain minus gain in bf16|interval|{trained} accuracy lost against bf16|interval",
            [
                [labels[name], *_columns(survival), *_columns(result["quantization_loss"][name])]
                for name, survival in result["gain_survival"].items()
            ],
        )
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines += ["", "![accuracy and gain survival](eval.png)", "", f"Measured {result['date']} with {used}.", ""]
    lines += [f"Adapter v{result['adapter_version']}, at most {result['max_new_tokens']} new tokens.", ""]
    lines += [f"Engine: {engines(result['matrix'])}.", ""]
    lines += [f"Command: `{' '.join(result['command'])}`", ""]
    return "\n".join(lines)


def _several(gains: dict, trained: str) -> list[str]:
    """pass@k and maj@k if there are several completions per problem, else nothing."""
    rows = []
    for name, gain in gains.items():
        measured = {f"pass@{k}": found for k, found in (gain.get("pass_at_k") or {}).items()}
        if votes := gain.get("maj_at_k"):
            measured[f"maj@{votes['k']}"] = votes
        rows += [
            [name, label, points(found["base"]), points(found["grpo"]), *_columns(found)]
            for label, found in measured.items()
            if found
        ]
    if not rows:
        return []
    title = ["", "## Several completions a problem", "", "Percent of problems, points, 95 % paired bootstrap.", ""]
    return [*title, *_table(f"format||base|{trained}|difference|interval", rows)]


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
