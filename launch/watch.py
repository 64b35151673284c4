"""Follow a run in the terminal: python -m launch.watch runs/<name>, or several side by side: runs/*

Shows what decides a GRPO run: its progress and time left, the health rules that fire, its curves, where the time of a
step goes, and the best, median and worst answer of one group. Exits when the run ends; Ctrl-C exits sooner. It only
reads the run directory, so it works beside a running trainer, after it, and over a network file system; it never
stops a run. Through a pipe it prints one line per step instead.

Exit code: 0; 2 for bad input; 1 with --fail_on_alert when a rule fires or the run failed.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser, run_command
from kit.core.health import alerts
from kit.core.metrics_log import ENDED, RECENT, MetricsLog, mean, number, open_run, progress, series
from kit.core.one_line import printable
from kit.core.run_directory import RunDir
from kit.core.run_state import read_restarts
from launch.watching.compare import common_step, frame_of_runs
from launch.watching.page import TRENDS, curves_of, frame, how_it_ended, show
from launch.watching.samples import latest_group

PIPE_COLUMNS = 80
# Fields of a step's line in a pipe, in this order; a distillation shows its divergence in place of the KL.
LINE = ("reward", "KL", "entropy", "zero spread", "clipped", "truncated", "grad norm", "step seconds")


def step_line(row: dict, total: int | None) -> str:
    """One step as one line with a fixed field order, for pipes."""
    if (own := curves_of(row)) is not TRENDS:
        shown = "  ".join(f"{label} {show(number(row, key))}" for label, key in own.items())
        return f"step {row['step']}{f'/{total}' if total else ''}  {shown}"
    labels = ("divergence" if label == "KL" and "divergence" in row else label for label in LINE)
    values = "  ".join(f"{label} {show(number(row, TRENDS[label]))}" for label in labels)
    return f"step {row['step']}{f'/{total}' if total else ''}  {values}"


def summary(run: RunDir, log: MetricsLog) -> dict:
    """State, last step, recent means, alerts and a group of answers as JSON-ready values; null for missing or
    non-finite ones."""
    last = {key: _finite(value) for key, value in log.rows[-1].items()} if log.rows else None
    group = latest_group(run)
    return {
        "run": str(run.path),
        **progress(log),
        "steps_logged": len(log.rows),
        "resumed_at": log.resumed_at,
        "restarts": [_finite(dataclasses.asdict(one)) for one in read_restarts(run)],
        "bad_lines": log.bad_lines,
        "last": last,
        "recent": {key: mean(series(log.rows[-RECENT:], key)) for key in curves_of(last or {}).values()},
        "alerts": [dataclasses.asdict(alert) for alert in alerts(log.rows, run)],
        "group": None if group is None else _finite(dataclasses.asdict(group)),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def follow(logs: Sequence[MetricsLog], draw: Callable[[int, int], RenderableType], console: Console, s: float) -> None:
    """Redraw until every run has ended."""
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            for log in logs:
                log.poll()
            # One line less than the terminal: a full screen would scroll when the cursor moves below it.
            live.update(draw(console.width, max(3, console.height - 1)), refresh=True)
            if all(progress(log)["state"] in ENDED for log in logs):
                return
            time.sleep(s)


def follow_lines(run: RunDir, log: MetricsLog, interval_s: float) -> None:
    """Print each new step as one line until the run ends, for pipes and log files."""
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
        if state["state"] in ENDED:
            if state["error"] is not None:
                print(printable(how_it_ended(state)), flush=True)
            return
        if not log.rows and not waited:
            print(f"waiting for the first step in {run.metrics_file}", flush=True)
            waited = True
        time.sleep(interval_s)


def parse() -> argparse.Namespace:
    parser = command_parser("launch.watch", __doc__)
    parser.add_argument("run", nargs="+", help="run directories, runs/<name>; among several, other paths are skipped")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print a JSON summary instead of a frame")
    parser.add_argument(
        "--fail_on_alert", action="store_true", help="with --once: exit 1 when a health rule fires or the run failed"
    )
    parser.add_argument("--plot", action="store_true", help="write health.png into the run directory and exit")
    parser.add_argument("--html", action="store_true", help="write health.html, a self-contained page, and exit")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for --plot and --html; several runs: default ."
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default 1)")
    arguments = parser.parse_args()
    for flag in ("json", "fail_on_alert"):
        if getattr(arguments, flag) and not arguments.once:
            parser.error(f"--{flag} needs --once: a run that is being followed has no single summary")
    if arguments.out and not (arguments.plot or arguments.html):
        parser.error("--out needs --plot or --html")
    if not 0.05 <= arguments.interval <= 3600:
        parser.error(f"--interval is {arguments.interval:g} s; choose 0.05 to 3600")
    return arguments


def open_runs(paths: Sequence[str]) -> list[RunDir]:
    """The runs at `paths`, without duplicates; if several are given, non-runs are named on stderr and skipped."""
    paths = list(dict.fromkeys(str(Path(path)) for path in paths))
    if len(paths) == 1:
        return [open_run(paths[0])]
    runs, left_out = [], []
    for path in paths:
        try:
            runs.append(open_run(path))
        except BadInput:
            left_out.append(path)
    if not runs:
        raise BadInput(f"none of {', '.join(paths[:5])}{' …' * (len(paths) > 5)} is a run directory (no config.json).")
    if left_out:
        print(f"not a run, skipped: {', '.join(left_out)}", file=sys.stderr)
    return runs


def write_pictures(arguments: argparse.Namespace, runs: list[RunDir], logs: list[MetricsLog]) -> list[Path]:
    """Write the files of --plot and --html; `BadInput` if there is no step to draw."""
    from launch.watching import plot, web_page  # matplotlib takes a second to import

    if not any(log.rows for log in logs):
        raise BadInput(f"{runs[0].metrics_file} has no complete step yet, so there is nothing to plot.")
    folder = arguments.out or (runs[0].path if len(runs) == 1 else Path())
    if not folder.is_dir():
        raise BadInput(f"--out: {folder} is not a directory.")
    written = []
    if arguments.plot:
        if len(runs) == 1:
            written.append(plot.draw(runs[0], logs[0].rows, folder))
        else:
            written.append(plot.draw_comparison(runs, logs, folder))
    if arguments.html:
        written.append(web_page.write(runs, logs, folder))
    return written


def main() -> int:
    arguments = parse()
    # A terminal whose encoding lacks block characters shows "?" instead of a traceback.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="replace")
    runs = open_runs(arguments.run)
    logs = [MetricsLog(run.metrics_file) for run in runs]
    for log in logs:
        log.poll()
    console = Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)

    def draw(width: int, height: int | None = None) -> RenderableType:
        if len(runs) == 1:
            return frame(runs[0], logs[0], width, height)
        return frame_of_runs(runs, logs, width, height)

    if arguments.json:
        found = [summary(run, log) for run, log in zip(runs, logs, strict=True)]
        value = found[0] if len(runs) == 1 else {"common_step": common_step(logs), "runs": found}
        print(json.dumps(value, indent=2, allow_nan=False))
    elif arguments.once:
        console.print(draw(console.width))
    if arguments.plot or arguments.html:
        for path in write_pictures(arguments, runs, logs):
            print(path, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.fail_on_alert and any(alerts(log.rows) or progress(log)["state"] == "failed" for log in logs):
        return CHECK_FAILED
    if arguments.once or arguments.plot or arguments.html:
        return DONE
    if len(runs) > 1 and not console.is_terminal:
        raise BadInput("several runs are followed in a terminal only. Through a pipe use --once, or name one run.")
    try:
        if console.is_terminal:
            follow(logs, draw, console, arguments.interval)
        else:
            follow_lines(runs[0], logs[0], arguments.interval)
    except KeyboardInterrupt:
        pass
    return DONE


if __name__ == "__main__":
    run_command(main)
