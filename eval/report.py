"""What was measured, for people: lines for the terminal, eval.md and eval.png after an evaluation, and with
`python -m eval report --run …` one page over everything that lies in the run's directory, report.html and report.md.
"""

import argparse
import os
from pathlib import Path

from eval import plots
from eval.artifacts import eval_command
from eval.compare import points
from eval.found import p_values
from eval.naming import GRPO, name_of, policy_name, trained_name
from recipes.parts.errors import DONE, BadInput
from recipes.parts.rundir import RunDir, publish, read_json
from recipes.parts.stored_base import CALLED

PICTURES = "report-pictures"  # report.md's, replaced whole


def main(argv: list[str]) -> int:
    """Write report.html and report.md from what is there, and eval.md and eval.png when there is an eval.json."""
    parser = argparse.ArgumentParser(prog="python -m eval report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run directory, e.g. runs/tiny")
    parser.add_argument("--out", type=Path, help="folder that holds eval.json; default: the run directory")
    arguments = parser.parse_args(argv)
    run = RunDir.open(arguments.run)
    folder = arguments.out or run.path
    if not folder.is_dir():
        raise BadInput(f"{folder} does not exist. --out names the folder that holds eval.json.")
    result = read_result(folder / "eval.json", run) if (folder / "eval.json").is_file() else None
    if result is not None:
        write_report(result, folder)
    missing = write_page(run, folder, result)
    print(f"written: {folder / 'report.html'}, report.md{', eval.md, eval.png' if result is not None else ''}")
    for what, command in missing:
        print(f"not in it: {what} Make it with: {command}")
    return DONE


def write_page(run: RunDir, folder: Path, result: dict | None) -> list[tuple[str, str]]:
    """report.html, report.md and its pictures, each replaced whole; what is missing and the command that makes it."""
    from eval.document import Document, Missing, to_html, to_markdown
    from eval.found import find
    from eval.sections import sections

    found = find(run, folder, result)
    made = sections(found)
    name = ((found.config.get("config") or {}).get("run") or {}).get("name") or run.path.resolve().name
    what = "GRPO run" if found.trained == GRPO else "Distillation"
    document = Document(f"{what} {name}: did the gain survive?", f"From the files in {run.path}", made)
    pictures = document.pictures()
    with publish(folder / PICTURES, overwrite=True) as partial:
        for picture in pictures:
            (partial / f"{picture.name}.svg").write_bytes(picture.svg)
    _replace(folder / "report.md", to_markdown(document, PICTURES))
    _replace(folder / "report.html", to_html(document))
    blocks = [block for section in made for block in section.blocks]
    return [(block.what, block.command) for block in blocks if isinstance(block, Missing)]


def read_result(file: Path, run: RunDir) -> dict:
    """The content of an eval.json; `BadInput` names the command that makes it when it is missing or not one."""
    if not file.is_file():
        raise BadInput(f"{file} does not exist. Make it with: {eval_command(run)}")
    result = read_json(file)
    if not isinstance(result, dict) or not {"matrix", "gain", "gain_survival", "conclusion"} <= set(result):
        raise BadInput(f"{file} is not the result of an evaluation. Make it with: {eval_command(run)}")
    result.setdefault("trained_policy", trained_name(run.config()))
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
        value, adjusted = p_values(gain)
        test = f"{gain.get('test', 'McNemar')} p {value}, adjusted {adjusted}, {gained} gained, {lost} lost"
        print(f"gain {name:<9}  {_with_interval(gain)}  {test}")
    for name, survival in result["gain_survival"].items():
        print(f"survival {name:<9}  {_with_interval(survival)}")
    print(result["conclusion"], flush=True)


def write_report(result: dict, folder: Path) -> None:
    """eval.md and eval.png of a result, each replaced whole."""
    _replace(folder / "eval.md", markdown(result))
    plots.png(plots.matrix(result), folder / "eval.png")


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def markdown(result: dict) -> str:
    """The report as Markdown: conclusion, matrix, gains, survival, and what it was measured with. Percent, points."""
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


def engines(matrix: dict) -> str:
    """Which engine computed which format in which dtype; the formats are named where there are several."""
    found: dict[str, list[str]] = {}
    for row in matrix.values():
        for name, cell in row.items():
            text = f"{cell.get('engine', 'unknown')}, computing in {cell.get('compute_dtype', 'unknown')}"
            if cell.get("engine") == "transformers":
                text += ", quantized weights dequantized as they load"
            if name not in found.setdefault(text, []):
                found[text].append(name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in found.items())


def column(result: dict, name: str) -> str:
    """A format's name, and of a run that was trained for one what the column is of it."""
    own, storage = result.get("trained_for"), result.get("base_storage", "nf4")
    if own is None and name == "nf4" and storage != "nf4":
        return f"nf4 (policy on its {CALLED[storage]} base)"
    if own is None or name not in ("nf4", "bf16", own):
        return name
    what = {"nf4": f"policy with the numbers of {own}", "bf16": "no quantizers"}
    return f"{name} ({what.get(name, 'trained for')})"


def _several(gains: dict, trained: str) -> list[str]:
    """pass@k and maj@k when there are several completions a problem, else nothing."""
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
