"""Results for people: lines for the terminal, and eval.md and eval.png after an evaluation."""

import os
from pathlib import Path

from eval import plots
from eval.compare import points
from eval.document import Bullets, Commands, Document, Picture, Section, Text, to_markdown
from eval.found import change, p_values, pair
from eval.naming import name_of
from eval.sections import accuracy, samples


def cell_line(policy: str, name: str, cell: dict) -> str:
    """One progress line for a measured cell, in a fixed order."""
    low, high = cell["interval"]
    strict = "-" if cell["strict"] is None else points(cell["strict"])
    return (
        f"{policy:<4} {name:<5}  accuracy {points(cell['accuracy']):>5} [{points(low):>5}, {points(high):>5}]  "
        f"strict {strict:>5}  parsed {points(cell['parse_rate']):>5}  leak "
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


def _with_interval(difference: dict) -> str:
    return f"{change(difference)[0]:>6} points [{pair(difference['interval']).replace(' to ', ', ')}]"


def write_report(result: dict, folder: Path) -> None:
    """Write eval.md and eval.png of a result, each replaced atomically."""
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    facts = f"Adapter v{result['adapter_version']}, measured {result['date']} with {used}."
    parts = [
        Section("Conclusion", [Bullets(result["conclusion"].splitlines())]),
        accuracy(result, Picture("eval.png", b"", "accuracy and gain survival")),
        samples(result),
        Section("How it was measured", [Text(facts), Commands([" ".join(result["command"])])]),
    ]
    title = f"Evaluation on {result['n']} held-out problems"
    document = Document(title, f"{name_of(result)} against its base", [part for part in parts if part])
    write_whole(folder / "eval.md", to_markdown(document))
    plots.png(plots.matrix(result), folder / "eval.png")


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically, through a partial one."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)
