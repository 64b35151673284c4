"""Several runs side by side: one table and small curves, at the last step that all of them have reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table

from kit.core.health import alerts
from kit.core.metrics_log import RECENT, MetricsLog, last_known, mean, median, progress, series
from kit.core.run_directory import RunDir
from launch.watching.page import duration, held, known, show, sparkline, writer_of
from launch.watching.shown import Text

CURVES = {"reward": "reward", "held-out": "heldout_accuracy", "KL": "kl", "entropy": "entropy"}
COLUMNS = {"now": "reward_now", "held-out": "heldout_accuracy", "KL": "kl", "entropy": "entropy"}
COLUMNS |= {"truncated": "truncated_fraction", "s/step": "seconds.step"}
# Terminal width below which a column is dropped; narrower terminals drop them in this order.
LEFT_OUT = {"s/step": 100, "entropy": 92, "truncated": 84, "now": 72, "held-out": 64, "KL": 52}
STATES = {"running": "green", "finished": "", "silent": "yellow", "restarting": "yellow", "waiting": "dim"}
STATES |= {"stopped": "yellow", "failed": "red"}


@dataclass(frozen=True)
class Compared:
    """A run's name, state, recent means up to the common step, and alerts over all of its steps."""

    name: str
    state: dict
    rows: Sequence[dict]
    at: dict[str, float | None]
    alerts: list


def common_step(logs: Sequence[MetricsLog]) -> int | None:
    """The last step reached by every run that has a step; None if none has one."""
    return min((log.rows[-1]["step"] for log in logs if log.rows), default=None)


def names(runs: Sequence[RunDir]) -> list[str]:
    """The directories' names, or their paths if two share a name."""
    short = [run.path.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.path) for run in runs]


def compared(runs: Sequence[RunDir], logs: Sequence[MetricsLog]) -> list[Compared]:
    """The runs, best recent reward at the common step first; runs without a step last."""
    step = common_step(logs)
    found = []
    for name, log in zip(names(runs), logs, strict=True):
        rows = [row for row in log.rows if row["step"] <= step] if step is not None else []
        recent = rows[-RECENT:]
        at = {key: mean(series(recent, key)) for key in ("reward", "kl", "entropy", "truncated_fraction")}
        at["heldout_accuracy"] = last_known(rows, "heldout_accuracy")
        at["seconds.step"] = median(series(log.rows[-RECENT:], "seconds.step"))
        at["reward_now"] = mean(series(log.rows[-RECENT:], "reward"))
        found.append(Compared(name, progress(log), log.rows, at, alerts(log.rows)))
    return sorted(found, key=lambda run: -math.inf if run.at["reward"] is None else run.at["reward"], reverse=True)


def table(runs: Sequence[Compared], step: int | None, width: int) -> Table:
    """One row per run; all columns except state, now, s/step and alerts cover the steps up to the common one."""
    shown = Table(box=None, padding=(0, 1), header_style="dim")
    is_narrow = width < 60
    shown.add_column("run", overflow="ellipsis", no_wrap=True, min_width=8, max_width=max(12, width - 60))
    shown.add_column("step", no_wrap=True, justify="right")
    if not is_narrow:
        shown.add_column("state", no_wrap=True)
    shown.add_column(f"reward @{step or '–'}", justify="right", no_wrap=True)
    columns = {name: key for name, key in COLUMNS.items() if width >= LEFT_OUT[name]}
    if all(run.at["heldout_accuracy"] is None for run in runs):
        columns.pop("held-out", None)
    for name in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("alerts", no_wrap=True, overflow="ellipsis", min_width=6)
    for place, run in enumerate(runs):
        state, total = run.state["state"], run.state["total_steps"]
        left = run.state["time_left_s"]
        words = f"{duration(left)} left" if state == "running" and left is not None else state
        done = "–" if run.state["step"] is None else f"{run.state['step']}" + (f"/{total}" if total else "")
        cells: list[Text | str] = [] if is_narrow else [Text(words, style=STATES[state])]
        cells.append(Text(show(run.at["reward"]), style="bold" if place == 0 else ""))
        cells += [writer_of(key)(run.at[key]) for key in columns.values()]
        color = "red" if any(alert.fault for alert in run.alerts) else "yellow"
        fired = str(len(run.alerts)) if is_narrow else ", ".join(alert.name for alert in run.alerts)
        cells.append(Text(fired if run.alerts else "–", style=color if run.alerts else "dim"))
        shown.add_row(Text(run.name), done, *cells)
    return shown


def curves(runs: Sequence[Compared], width: int) -> Table:
    """Reward, held-out, KL and entropy side by side, one run per row, with steps aligned across rows.

    All cells of a column share one scale, so heights are comparable down the column. The scale ignores the lowest and
    the highest two of a hundred values, which would flatten the rest.
    """
    values_of = {key: sorted(value for run in runs for value in known(run.rows, key)) for key in CURVES.values()}
    bounds = {key: (all_[len(all_) // 50], all_[-1 - len(all_) // 50]) for key, all_ in values_of.items() if all_}
    keys = {label: key for label, key in CURVES.items() if key in bounds}
    grid = Table(box=None, padding=(0, 1), header_style="dim")
    name_width = max(8, min(max(len(run.name) for run in runs), width // 4))
    grid.add_column("", no_wrap=True, overflow="ellipsis", max_width=name_width)
    if width < 60:
        keys = dict(list(keys.items())[:2])
    room = max(6, (width - name_width - 2) // max(1, len(keys)) - 2)
    last = max((run.rows[-1]["step"] for run in runs if run.rows), default=0)
    for label, key in keys.items():
        write = writer_of(key)
        title = f"{label} {write(bounds[key][0])} … {write(bounds[key][1])}"
        grid.add_column(title if len(title) <= room else label, no_wrap=True, overflow="ellipsis")
    for run in runs:
        by_step = {row["step"]: row for row in run.rows}
        cells = []
        for key in keys.values():
            values = series([by_step.get(step, {}) for step in range(1, last + 1)], key)
            end = run.rows[-1]["step"] if run.rows else 0
            values = held(values[:end]) + values[end:] if key == "heldout_accuracy" else values
            cells.append(Text(sparkline(values, room, bounds=bounds[key]), style="cyan"))
        grid.add_row(Text(run.name), *cells)
    return grid


def frame_of_runs(runs: Sequence[RunDir], logs: Sequence[MetricsLog], width: int, height: int | None = None) -> Group:
    """The current comparison; with a height, only the runs that fit, best first."""
    step, found = common_step(logs), compared(runs, logs)
    most = max(1, (height - 6) // 2) if height is not None else len(found)
    hidden, found = len(found) - most, found[:most]
    title = f"{len(runs)} runs, best reward first"
    title += f", at step {step} (the last that all have reached)" if step is not None else ""
    parts = [_line(title, "bold"), Text(), table(found, step, width), Text(), curves(found, width)]
    if hidden > 0:
        parts.append(_line(f" {hidden} more run{'s' * (hidden > 1)}: a taller terminal shows them"))
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
