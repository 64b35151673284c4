"""Follow a run in the terminal: python -m launch.watch runs/<name>

Shows sparklines of what decides a GRPO run, its progress with the time left, its speed, and the health rules that
fire. Ends by itself at the last step; Ctrl-C ends it sooner. Reads metrics.jsonl only, so it works beside a running
trainer, after it, and over a network file system. Through a pipe it prints one line per step instead.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.health import alerts
from launch.metrics import RECENT, MetricsLog, mean, number, open_run, progress, series
from recipes.parts.errors import BadInput, run_command
from recipes.parts.rundir import RunDir

TRENDS = {
    "reward": "reward",
    "KL": "kl",
    "entropy": "entropy",
    "zero spread": "zero_spread_fraction",
    "clipped": "clip_fraction",
    "truncated": "truncated_fraction",
    "grad norm": "grad_norm",
    "step seconds": "seconds.step",
}
SHARES = {"zero_spread_fraction", "clip_fraction", "truncated_fraction"}
SHARE_TOP = 0.2  # least share that the highest block stands for
BLOCKS = "▁▂▃▄▅▆▇█"
PIPE_COLUMNS = 80
# Columns that a frame's label, last, recent and range take, paddings included; the sparkline gets the rest.
BESIDE_SPARKLINE = 53


def show(value: float | None) -> str:
    """A number in at most seven characters, "–" for none."""
    if value is None or math.isnan(value):
        return "–" if value is None else "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share as "12.3%", "–" for none."""
    return show(value) if value is None or not math.isfinite(value) else f"{value:.1%}"


def duration(seconds: float) -> str:
    """Seconds as "42 s", "3 min 05 s", "2 h 07 min" or "3 d 4 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def sparkline(values: Sequence[float], width: int, is_share: bool = False) -> str:
    """The values as block characters, at most `width` of them, each the mean of its steps; a gap where none is known.

    Scaled from the lowest to the highest cell; a share from 0 to at least `SHARE_TOP`, so that noise near zero stays
    flat. A curve that does not move is drawn on the lowest block.
    """
    count = min(width, len(values))
    cells = [mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    known = [cell for cell in cells if cell is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if is_share:
        low, high = min(0.0, low), max(SHARE_TOP, high)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if cell is None else BLOCKS[round((cell - low) * scale)] for cell in cells)


def header(run: RunDir, state: dict) -> Group:
    """Name, progress bar, time left, and how long the log has been quiet."""
    title = Text(str(run.path), style="bold", no_wrap=True, overflow="ellipsis")
    if state["state"] == "waiting":
        return Group(title, Text(f"waiting for the first step in {run.metrics_file}", overflow="fold"))
    step, total, age = state["step"], state["total_steps"], duration(state["since_last_line_s"])
    line = Table.grid(padding=(0, 1))
    cells = [Text(f"step {step}" + (f"/{total}" if total else ""))]
    if total:
        cells += [ProgressBar(total=total, completed=step, width=28), Text(f"{min(1.0, step / total):.0%}")]
    if state["state"] == "finished":
        cells.append(Text("finished", style="green"))
    elif state["time_left_s"] is not None:
        cells.append(Text(f"{duration(state['time_left_s'])} left"))
    line.add_row(*cells)
    if state["state"] == "silent":
        note = Text(f"no line for {age}: the run has stopped, or a step is stuck (see {run.logs})", style="yellow")
    else:
        note = Text(f"last line {age} ago", style="dim")
    return Group(title, line, note)


def trends(rows: Sequence[dict], width: int) -> Table:
    """One row per curve: last value, mean of the recent steps, sparkline over the whole run, range."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("")
    table.add_column("last", justify="right")
    table.add_column(f"mean {RECENT}", justify="right")
    table.add_column(f"steps {rows[0]['step']} to {rows[-1]['step']}", no_wrap=True)
    table.add_column("range", justify="right", style="dim")
    for label, key in TRENDS.items():
        values = series(rows, key)
        known = [value for value in values if math.isfinite(value)]
        is_share = key in SHARES
        write = percent if is_share else show
        span = f"{write(min(known))} … {write(max(known))}" if known else ""
        curve = sparkline(values, max(8, width - BESIDE_SPARKLINE), is_share)
        last, recent = write(number(rows[-1], key)), write(mean(values[-RECENT:]))
        table.add_row(label, last, recent, Text(curve, style="cyan"), span)
    return table


def facts(row: dict) -> Table:
    """Speed, time and memory by phase, and what the last step was made of."""
    memory = row.get("peak_gib")
    phases = [key for key in (row.get("seconds") or {}) if key != "step"]
    reward_names = row.get("rewards") or {}
    lines = {
        "tokens/s": {"rollout": "rollout_tokens_per_s", "update": "update_tokens_per_s"},
        "seconds": {phase: f"seconds.{phase}" for phase in phases},
        "peak GiB": {key: f"peak_gib.{key}" for key in memory} if isinstance(memory, dict) else {"": "peak_gib"},
        "rewards": {name: f"rewards.{name}" for name in reward_names} if len(reward_names) > 1 else {},
        "sampler": {
            "k3": "sampler_k3",
            "p99 |Δlogp|": "sampler_delta_p99",
            "effective sample": "effective_sample_size",
            "corrected": "corrected_token_fraction",
            "canary": "canary_delta",
        },
        "sync s": {part: f"sync_seconds.{part}" for part in row.get("sync_seconds") or {}},
        "update": {
            "loss": "loss",
            "learning rate": "learning_rate",
            "adapter": "adapter_version",
            "masked": "masked_fraction",
        },
    }
    table = Table.grid(padding=(0, 2, 0, 1))
    for label, keys in lines.items():
        parts = [f"{name} {show(number(row, key))}".strip() for name, key in keys.items()]
        if parts:
            table.add_row(Text(label, style="dim"), Text("  ".join(parts)))
    return table


def health(rows: Sequence[dict]) -> Table | Text:
    """The rules that fire, each with its meaning and what to do."""
    found = alerts(rows)
    if not found:
        return Text(" health: no rule fires", style="green")
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(style="bold red", no_wrap=True)
    table.add_column()
    for alert in found:
        table.add_row(alert.name, Text.assemble((f"{alert.value}. ", "red"), f"{alert.meaning} {alert.action}"))
    return table


def frame(run: RunDir, log: MetricsLog, width: int) -> Group:
    """The whole picture of a run at this moment."""
    parts: list = [header(run, progress(log))]
    if log.rows:
        # A short terminal cuts from below, so the alerts stand above the figures.
        parts += [Text(), trends(log.rows, width), Text(), health(log.rows), Text(), facts(log.rows[-1])]
    notes = []
    if log.resumed_at:
        notes.append(f"resumed at step {', '.join(map(str, log.resumed_at[-5:]))}")
    if log.bad_lines:
        notes.append(f"{log.bad_lines} unreadable line{'s' * (log.bad_lines > 1)} skipped")
    return Group(*parts, Text(f" {'; '.join(notes)}", style="dim") if notes else Text())


def step_line(row: dict, total: int | None) -> str:
    """One step as one line, in a fixed order, for pipes."""
    values = "  ".join(f"{label} {show(number(row, key))}" for label, key in TRENDS.items())
    return f"step {row['step']}{f'/{total}' if total else ''}  {values}"


def summary(run: RunDir, log: MetricsLog) -> dict:
    """State, last step, recent means and alerts, ready for JSON: null where a value is missing or not finite."""
    recent = {label: mean(series(log.rows[-RECENT:], key)) for label, key in TRENDS.items()}
    last = {key: _finite(value) for key, value in log.rows[-1].items()} if log.rows else None
    return {
        "run": str(run.path),
        **progress(log),
        "steps_logged": len(log.rows),
        "resumed_at": log.resumed_at,
        "bad_lines": log.bad_lines,
        "last": last,
        "recent": {TRENDS[label]: value for label, value in recent.items()},
        "alerts": [dataclasses.asdict(alert) for alert in alerts(log.rows)],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def follow(run: RunDir, log: MetricsLog, console: Console, interval_s: float) -> None:
    """Redraw until the last step is there."""
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            log.poll()
            live.update(frame(run, log, console.width), refresh=True)
            if progress(log)["state"] == "finished":
                return
            time.sleep(interval_s)


def follow_lines(run: RunDir, log: MetricsLog, interval_s: float) -> None:
    """Print each new step as one line until the last step is there, for pipes and log files."""
    printed, resumes, waited = -1, 0, False
    while True:
        log.poll()
        printed = min([printed, *(step - 1 for step in log.resumed_at[resumes:])])
        resumes = len(log.resumed_at)
        state = progress(log)
        for row in log.rows:
            if row["step"] > printed:
                print(step_line(row, state["total_steps"]), flush=True)
                printed = row["step"]
        if not log.rows and not waited:
            print(f"waiting for the first step in {run.metrics_file}", flush=True)
            waited = True
        if state["state"] == "finished":
            return
        time.sleep(interval_s)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.watch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", help="run directory, runs/<name>")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print a JSON summary instead of a frame")
    parser.add_argument("--plot", action="store_true", help="write health.png into the run directory and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)")
    arguments = parser.parse_args()
    if arguments.json and not arguments.once:
        parser.error("--json needs --once: a run that is being followed has no single summary")
    if not 0.05 <= arguments.interval <= 3600:
        parser.error(f"--interval is {arguments.interval:g} s; choose 0.05 to 3600")
    return arguments


def main() -> int:
    arguments = parse()
    # A terminal whose encoding has no block characters shows "?" instead of ending with a traceback.
    sys.stdout.reconfigure(errors="replace")
    run = open_run(arguments.run)
    log = MetricsLog(run.metrics_file)
    log.poll()
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
    if arguments.json:
        print(json.dumps(summary(run, log), indent=2, allow_nan=False))
    elif arguments.once:
        console.print(frame(run, log, console.width))
    if arguments.plot:
        from launch.health_plot import draw  # matplotlib takes a second to import

        if not log.rows:
            raise BadInput(f"{run.metrics_file} has no complete step yet, so there is nothing to plot.")
        path = draw(run, log.rows)
        print(path, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.once or arguments.plot:
        return 0
    try:
        if console.is_terminal:
            follow(run, log, console, arguments.interval)
        else:
            follow_lines(run, log, arguments.interval)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    run_command(main)
