"""Terminal page of one run: its progress, its alerts, its curves, its phases and its answers.

Fits any width from 40 columns and, given a height, that many lines: essentials stay, explanations are cut first.
"""

import io
import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from kit.core.health import alerts
from kit.core.metrics_log import RECENT, MetricsLog, group, last_known, mean, number, phases, progress, series
from kit.core.one_line import one_line
from kit.core.run_directory import RunDir
from kit.core.run_state import read_restarts
from launch.watching.samples import latest_group
from launch.watching.shown import Text

TRENDS = {
    "reward": "reward",
    "held-out": "heldout_accuracy",
    "divergence": "divergence",
    "KL": "kl",
    "entropy": "entropy",
    "zero spread": "zero_spread_fraction",
    "no signal": "no_signal_fraction",
    "kept": "kept_fraction",
    "truncated": "truncated_fraction",
    "sampler k3": "sampler_k3",
    "eff. sample": "effective_sample_size",
    "clipped": "clip_fraction",
    "input clip": "quant_clip_fraction",
    "input peak": "quant_peak_ratio",
    "grad norm": "grad_norm",
    "step seconds": "seconds.step",
}
# Curves of supervised fine-tuning, whose lines have a token accuracy.
SUPERVISED = {
    "loss": "loss",
    "token acc.": "token_accuracy",
    "held-out loss": "heldout_loss",
    "held-out acc.": "heldout_token_accuracy",
    "grad norm": "grad_norm",
    "step seconds": "seconds.step",
}
# Curves that not every run has: shown once they have a value, `clip_fraction` once it is nonzero.
OPTIONAL: tuple[str, ...] = ("heldout_accuracy", "divergence", "sampler_k3", "effective_sample_size", "clip_fraction")
OPTIONAL += ("heldout_loss", "heldout_token_accuracy")
OPTIONAL += ("quant_clip_fraction", "quant_peak_ratio", "no_signal_fraction", "kept_fraction")
SHARES = {
    "zero_spread_fraction",
    "no_signal_fraction",
    "kept_fraction",
    "clip_fraction",
    "truncated_fraction",
    "heldout_accuracy",
}
SHARE_TOP = 0.2  # minimum share represented by the highest block
BLOCKS = "▁▂▃▄▅▆▇█"
# A color and a shade each, so that the bar can be read without color too.
PHASES = {
    "wake": ("magenta", "▚"),
    "sync": ("yellow", "▒"),
    "sleep": ("magenta", "▞"),
    "rollout": ("cyan", "█"),
    "reward": ("green", "▚"),
    "heldout": ("magenta", "▒"),
    "reference": ("cyan", "▞"),
    "teacher": ("cyan", "▒"),
    "update": ("blue", "▓"),
    "other": ("bright_black", "░"),
}
ORDER = {name: place for place, name in enumerate(PHASES)}
# Columns taken by a curve's label, last, mean and range, including padding; the sparkline gets the rest.
BESIDE_SPARKLINE, BESIDE_NARROW = 53, 34
LONGEST_ERROR = 400  # characters of the error that ended a run
NARROW = 70  # below this many columns the range is omitted


def show(value: float | None) -> str:
    """A number in at most seven characters; "–" for None."""
    if value is None or math.isnan(value):
        return "–" if value is None else "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.1e}"


def percent(value: float | None) -> str:
    """A share as "12.3%"; "–" for None."""
    return show(value) if value is None or not math.isfinite(value) else f"{value:.1%}"


def writer_of(key: str) -> Callable[[float | None], str]:
    """How a metric's value is written: a share in percent, anything else as a number."""
    return percent if key in SHARES or key == "effective_sample_size" else show


def known(rows: Sequence[dict], key: str) -> list[float]:
    """The finite values of a metric."""
    return [value for value in series(rows, key) if math.isfinite(value)]


def last_value(rows: Sequence[dict], key: str) -> float | None:
    """A metric at the last step; held-out accuracy where it was last measured."""
    return last_known(rows, key) if key == "heldout_accuracy" else number(rows[-1], key)


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


def sparkline(
    values: Sequence[float], width: int, is_share: bool = False, bounds: tuple[float, float] | None = None
) -> str:
    """The values as at most `width` block characters, each the mean of its steps; a gap where no value is known.

    Scaled from the lowest to the highest cell, or to `bounds`; a share from 0 to at least `SHARE_TOP`, so that noise
    near zero stays flat. A constant curve is drawn on the lowest block.
    """
    count = min(width, len(values))
    cells = [mean(values[i * len(values) // count : (i + 1) * len(values) // count]) for i in range(count)]
    drawn = [cell for cell in cells if cell is not None]
    low, high = bounds or (min(drawn, default=0.0), max(drawn, default=0.0))
    if is_share:
        low, high = min(0.0, low), max(SHARE_TOP, high)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    tops = ((min(max(cell, low), high) - low) * scale if cell is not None else None for cell in cells)
    return "".join(" " if top is None else BLOCKS[round(top)] for top in tops)


def held(values: Sequence[float]) -> list[float]:
    """Each value, or the previous one where it is missing: the curve of a metric measured every few steps."""
    found, last = [], math.nan
    for value in values:
        last = value if math.isfinite(value) else last
        found.append(last)
    return found


def how_it_ended(state: dict) -> str:
    """Where and when a run stopped or failed, and its last error."""
    where = "before its first step" if state["step"] is None else f"after step {state['step']}"
    when = "" if state["ended"] is None else f", {duration(max(0.0, time.time() - state['ended']))} ago"
    return f"{state['state']} {where}{when}: {state['error']}"


def _ending(state: dict) -> Text:
    said = how_it_ended(state)
    said = said if len(said) <= LONGEST_ERROR else f"{said[: LONGEST_ERROR - 2]} …"
    return Text(said, style="red" if state["state"] == "failed" else "yellow", overflow="fold")


def restarts_note(run: RunDir) -> list[Text]:
    """A line for what `launch.up` has started again, if anything."""
    if not (made := read_restarts(run)):
        return []
    text = Text(f"{len(made)} restart{'s' * (len(made) > 1)}, the last: {made[-1]}", no_wrap=True, overflow="ellipsis")
    text.stylize("yellow" if made[-1].seconds is None else "dim")
    return [text]


def header(run: RunDir, state: dict) -> Group:
    """Name, progress bar, time left, how long the log has been quiet, and restarts."""
    title = Text(str(run.path), style="bold", no_wrap=True, overflow="ellipsis")
    pid = state["trainer_pid"]
    if state["state"] in ("waiting", "restarting") and state["step"] is None:
        who = f" (process {pid} holds the run)" if pid else ""
        note = Text(f"waiting for the first step in {run.metrics_file}{who}", overflow="fold")
        return Group(title, note, *restarts_note(run))
    if state["error"] is not None and state["step"] is None:
        return Group(title, _ending(state))
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
    if state["error"] is not None:
        note = _ending(state)
    elif state["state"] == "silent":
        why = f"process {pid} still holds it, so a step is stuck" if pid else "the run has stopped, or a step is stuck"
        note = Text(f"no line for {age}: {why} (see {run.logs})", style="yellow")
    else:
        note = Text(f"last line {age} ago", style="dim")
    return Group(title, line, note, *restarts_note(run))


def curves_of(row: dict) -> dict[str, str]:
    """Label and key of the curves that a run with this line may have."""
    return SUPERVISED if "token_accuracy" in row else TRENDS


def _curves(rows: Sequence[dict]) -> dict[str, str]:
    """Label and key of this run's curves; a reward made of several functions is broken down below it."""
    parts, curves = group(rows[-1], "rewards"), {}
    for label, key in curves_of(rows[-1]).items():
        values = known(rows, key) if key in OPTIONAL else ()
        if key not in OPTIONAL or (any(values) if key == "clip_fraction" else values):
            curves[label] = key
        if key == "reward" and len(parts) > 1:
            curves |= {f"· {name}"[:14]: f"rewards.{name}" for name in parts}
    return curves


def trends(rows: Sequence[dict], width: int, most: int | None = None) -> Table:
    """One row per curve: last value, mean of recent steps, sparkline over the whole run, range."""
    is_wide = width >= NARROW
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column(f"mean {RECENT}", justify="right", no_wrap=True)
    table.add_column(f"steps {rows[0]['step']} to {rows[-1]['step']}", no_wrap=True)
    if is_wide:
        table.add_column("range", justify="right", style="dim", no_wrap=True)
    room = max(6, width - (BESIDE_SPARKLINE if is_wide else BESIDE_NARROW))
    for label, key in list(_curves(rows).items())[:most]:
        values, found, write = series(rows, key), known(rows, key), writer_of(key)
        curve = sparkline(held(values) if key == "heldout_accuracy" else values, room, key in SHARES)
        cells = [label, write(last_value(rows, key)), write(mean(values[-RECENT:])), Text(curve, style="cyan")]
        span = f"{write(min(found))} … {write(max(found))}" if found else ""
        table.add_row(*cells, *([span] if is_wide else []))
    return table


def phase_bar(rows: Sequence[dict], width: int) -> Group | None:
    """Where the time of recent steps went, as one bar with speed and memory below; None without times."""
    spent: dict[str, float] = {}
    for row in rows[-RECENT:]:
        for name, value in phases(row).items():
            spent[name] = spent.get(name, 0.0) + value
    whole = sum(spent.values())
    if not whole:
        return None
    room, bar, legend, done = max(10, width - 2), Text(" ", no_wrap=True), [], 0.0
    for name, value in sorted(spent.items(), key=lambda pair: (ORDER.get(pair[0], len(ORDER)), pair[0])):
        color, shade = PHASES.get(name, ("white", "░"))
        cells = round(room * (done + value) / whole) - round(room * done / whole)
        done += value
        bar.append(shade * cells, style=color)
        seconds = show(value / len(rows[-RECENT:]))
        legend.append(Text.assemble((shade * 2, color), f" {name} {seconds} s {value / whole:.0%}"))
    row, figures = rows[-1], []
    speed = {name: number(row, f"{name}_tokens_per_s") for name in ("rollout", "update")}
    if any(value is not None for value in speed.values()):
        figures.append("tokens/s " + "  ".join(f"{name} {show(value)}" for name, value in speed.items()))
    memory = row.get("peak_gib")
    keys = {name: f"peak_gib.{name}" for name in memory} if isinstance(memory, dict) else {"": "peak_gib"}
    if any(number(row, key) is not None for key in keys.values()):
        named = (f"{name} {show(number(row, key))}".strip() for name, key in keys.items())
        figures.append("peak GiB " + "  ".join(named))
    return Group(bar, *_flow(legend, width), *_flow([Text(figure) for figure in figures], width))


def _flow(parts: Sequence[Text], width: int) -> list[Text]:
    """The parts side by side; a part is broken over two lines only if it is longer than a line."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= width:
            lines[-1].append("   ").append_text(part)
        else:
            lines.append(Text(" ").append_text(part))
    return lines


def facts(row: dict) -> Table:
    """Further figures of the last step."""
    lines = {
        "sampler": {
            "p99 |Δlogp|": "sampler_delta_p99",
            "corrected": "corrected_token_fraction",
            "canary": "canary_delta",
        },
        "episodes": {
            "turns": "episode_turns",
            "calls": "tool_calls",
            "failed": "tool_failures",
            "unfinished": "unfinished_fraction",
        },
        "sync s": {part: f"sync_seconds.{part}" for part in group(row, "sync_seconds")},
        "update": {
            "loss": "loss",
            "learning rate": "learning_rate",
            "adapter": "adapter_version",
            "length": "completion_length",
            "masked": "masked_fraction",
        },
    }
    table = Table.grid(padding=(0, 1))
    for label, keys in lines.items():
        if any(number(row, key) is not None for key in keys.values()):
            parts = [f"{name} {show(number(row, key))}".strip() for name, key in keys.items()]
            table.add_row("", Text(label, style="dim"), Text("  ".join(parts)))
    return table


def samples(run: RunDir, width: int) -> Group | None:
    """Best, median and worst answer of one group of the newest completions, one line each; None if there are none."""
    found = latest_group(run)
    if found is None:
        return None
    title = Text(f" step {found.step}, one group of {len(found.samples)}: ", style="dim", no_wrap=True)
    title.append(one_line(found.prompt, max(10, width - title.cell_len - 1)), style="")
    table = Table.grid(padding=(0, 1))
    for name, sample in found.picks().items():
        paid = [value for value in sample.rewards.values() if isinstance(value, int | float)]
        reward = show(float(sum(paid))) if paid else "unknown"
        room = max(10, width - 2 - 8 - len(reward) - 2)
        text = Text(one_line(sample.text, room), no_wrap=True, overflow="ellipsis")
        table.add_row("", Text(name, style="dim"), Text(reward, style="green" if name == "best" else ""), text)
    return Group(title, table)


def health(rows: Sequence[dict], run: RunDir | None = None, is_brief: bool = False) -> Table | Text:
    """The rules that fire, each with its meaning and what to do, and with `run` its examples; brief: only their names
    and values."""
    found = alerts(rows, run)
    if not found:
        return Text(" health: no rule fires", style="green")
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=is_brief, overflow="ellipsis" if is_brief else "fold")
    for alert in found:
        color = "red" if alert.fault else "yellow"
        text = Text.assemble((f"{alert.value}. ", color), "" if is_brief else f"{alert.meaning} {alert.action}")
        table.add_row(Text(alert.name, style=f"bold {color}"), text)
        for example in alert.examples:
            table.add_row("", Text(example, style="dim"))
    return table


def notes(log: MetricsLog) -> Text | None:
    found = []
    if log.resumed_at:
        found.append(f"resumed at step {', '.join(map(str, log.resumed_at[-5:]))}")
    if log.bad_lines:
        found.append(f"{log.bad_lines} unreadable line{'s' * (log.bad_lines > 1)} skipped")
    return Text(f" {'; '.join(found)}", style="dim") if found else None


def frame(run: RunDir, log: MetricsLog, width: int, height: int | None = None) -> Group:
    """The whole page of a run right now, in at most `height` lines if that is given."""
    top = header(run, progress(log))
    if not log.rows:
        return Group(top)
    sections = {
        "health": health(log.rows, run),
        "trends": trends(log.rows, width),
        "phases": phase_bar(log.rows, width),
        "samples": samples(run, width),
        "facts": facts(log.rows[-1]),
        "notes": notes(log),
    }
    if height is not None:
        sections = _fitted(sections, log, width, height - _lines(top, width))
    parts: list[RenderableType] = [top]
    for name, section in sections.items():
        if section is not None:
            parts += [section] if name == "notes" else [Text(), section]
    return Group(*parts)


def _fitted(sections: dict, log: MetricsLog, width: int, room: int) -> dict:
    """The sections that fit into `room` lines, each with a blank line above it, in order of priority."""
    kept = dict.fromkeys(sections)
    curves = min(4, len(_curves(log.rows)))
    if 1 + _lines(sections["health"], width) > max(3, room - curves - 2):
        sections = sections | {"health": health(log.rows, is_brief=True)}
    for name, section in sections.items():
        if section is None:
            continue
        lines = _lines(section, width) + (name != "notes")
        if lines > room and name == "trends" and room > 2:
            section = trends(log.rows, width, most=room - 2)
            lines = room
        if lines <= room:
            kept[name] = section
            room -= lines
    return kept


def _lines(section: RenderableType, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(section, pad=False))
