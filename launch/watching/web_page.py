"""health.html (one run) and comparison.html (several): self-contained files that open without a network."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput
from kit.core.health import alerts
from kit.core.metrics_log import RECENT, MetricsLog, group, mean, progress, series
from kit.core.run_directory import RunDir
from launch.templates import render
from launch.watching import plot
from launch.watching.compare import common_step, compared
from launch.watching.page import curves_of, duration, how_it_ended, known, last_value, show, writer_of
from launch.watching.samples import Sample, latest_group

MOST_CHARACTERS = 4000  # of a completion; a longer one loses its middle
FURTHER = {
    "rollout tokens/s": "rollout_tokens_per_s",
    "update tokens/s": "update_tokens_per_s",
    "completion length": "completion_length",
}


def write(runs: Sequence[RunDir], logs: Sequence[MetricsLog], folder: Path) -> Path:
    """Write the page of one run, or the comparison of several, atomically into `folder`."""
    if len(runs) == 1:
        what = _method(logs[0].rows)
        final, title = folder / "health.html", f"{what} {runs[0].path.resolve().name}"
        values = _run(runs[0], logs[0])
    else:
        final, title = folder / "comparison.html", f"{len(runs)} runs compared"
        values = _comparison(runs, logs)
    filters: dict[str, Callable] = {"show": show, "shortened": _shortened, "rewards": _rewards}
    page = render(Path(__file__).with_name("page.html.j2"), {"title": title, **values}, filters, autoescape=True)
    with plot.replacing(final) as partial:
        partial.write_text(page, errors="replace")  # a completion may hold half a surrogate pair
    return final


def _run(run: RunDir, log: MetricsLog) -> dict[str, Any]:
    rows, state = log.rows, progress(log)
    step, total = state["step"], state["total_steps"]
    words = [f"step {step}" + (f" of {total}" if total else ""), state["state"]]
    if state["state"] == "running" and state["time_left_s"] is not None:
        words.append(f"{duration(state['time_left_s'])} left")
    words.append(f"last line {duration(state['since_last_line_s'])} before this page was written")
    panels = plot.panels(rows, run) | {"speed": plot.speed}
    return {
        "compared": None,
        "ending": how_it_ended(state) if state["error"] is not None else "",
        "failed": state["state"] == "failed",
        "state": ", ".join(words),
        "share": 100 * min(1.0, step / total) if total else 0,
        "facts": _facts(run),
        "alerts": alerts(rows, run),
        "pictures": _pictures({name: plot.run_panel(panel, rows) for name, panel in panels.items()}),
        "figures": _figures(rows),
        "answers": latest_group(run),
    }


def _method(rows: Sequence[dict]) -> str:
    if any("token_accuracy" in row for row in rows):
        return "Supervised fine-tuning"
    return "Distillation" if any(row.get("divergence") is not None for row in rows) else "GRPO run"


def _facts(run: RunDir) -> str:
    """Model, hardware and versions; empty if config.json has none."""
    try:
        recorded = run.facts()
    except BadInput:
        return ""
    config, machine = group(recorded, "config"), group(recorded, "machine")
    model, train, distill = group(config, "model"), group(config, "train"), group(config, "distill")
    loss = f"{distill.get('divergence')} to a teacher"
    if rows := group(config, "sft").get("rows"):
        loss = f"cross-entropy of {rows}"
    elif not (distill.get("teacher") or distill.get("teacher_adapter")):
        loss = train.get("loss") or train.get("loss_type")
    revision = recorded.get("git_revision")
    shown = [
        model.get("path") or model.get("id"),
        f"{loss}, learning rate {train.get('learning_rate')}" if "loss_type" in train else None,
        ", ".join(machine.get("gpus") or []) or (f"{machine['cores']} CPU cores" if "cores" in machine else None),
        *(f"{name} {version}" for name, version in group(recorded, "versions").items() if name in ("torch", "trl")),
        f"commit {revision[:12]}" if isinstance(revision, str) else None,
    ]
    return " · ".join(str(fact) for fact in shown if fact)


def _pictures(panels: dict[str, plot.Fill]) -> dict[str, str]:
    return {name: base64.b64encode(plot.svg(fill)).decode() for name, fill in panels.items()}


def _figures(rows: Sequence[dict]) -> tuple[list[str], list[tuple], int]:
    """Head and lines of the table of all curves, and the column where numbers begin."""
    lines = []
    for label, key in (
        curves_of(rows[-1]) | FURTHER | {f"peak GiB, {n}": f"peak_gib.{n}" for n in group(rows[-1], "peak_gib")}
    ).items():
        if found := known(rows, key):
            figures = (last_value(rows, key), mean(series(rows[-RECENT:], key)), min(found), max(found))
            lines.append((label, *map(writer_of(key), figures)))
    return ["", "last", f"mean of {RECENT}", "lowest", "highest"], [("td", line) for line in lines], 1


def _rewards(sample: Sample) -> str:
    return ", ".join(
        f"{function} {show(value) if isinstance(value, int | float) else 'unknown'}"
        for function, value in sample.rewards.items()
    )


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"


def _comparison(runs: Sequence[RunDir], logs: Sequence[MetricsLog]) -> dict[str, Any]:
    step, found = common_step(logs), compared(runs, logs)

    def panel(key: str, title: str) -> plot.Fill:
        def fill(axes: plot.Axes) -> None:
            plot.compare_panel(axes, runs, logs, key, title)
            if key == "reward":
                axes.legend(fontsize=8, framealpha=0.85)

        return fill

    keys = {f"reward at {step}": "reward", "now": "reward_now", "held-out": "heldout_accuracy", "KL": "kl"}
    keys |= {"entropy": "entropy", "truncated": "truncated_fraction", "s/step": "seconds.step"}
    keys = {title: key for title, key in keys.items() if any(run.at[key] is not None for run in found)}
    lines = []
    for run in found:
        fired = ", ".join(alert.name for alert in run.alerts)
        done = "–" if run.state["step"] is None else str(run.state["step"])
        figures = [writer_of(key)(run.at[key]) for key in keys.values()]
        lines.append(("td", (run.name, run.state["state"] + (f": {fired}" if fired else ""), done, *figures)))
    return {
        "compared": (["run", "state", "step", *keys], lines, 2),
        "step": step,
        "recent": RECENT,
        "pictures": _pictures({title: panel(key, title) for title, key in plot.compared_keys(logs).items()}),
    }
