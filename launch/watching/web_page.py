"""health.html (one run) and comparison.html (several): self-contained files that open without a network."""

import base64
import html
import os
from collections.abc import Sequence
from pathlib import Path

from kit.core.errors import BadInput
from kit.core.health import alerts
from kit.core.metrics_log import RECENT, MetricsLog, group, last_known, mean, number, progress, series
from kit.core.run_directory import RunDir, read_json
from launch.watching import plot
from launch.watching.compare import Compared, common_step, compared
from launch.watching.page import SHARES, TRENDS, duration, how_it_ended, percent, show
from launch.watching.samples import latest_group

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff; margin: 0 auto; max-width: 1180px;
       padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 8px; } p { margin: 4px 0; }
.dim { color: #5b6b7a; }
.bar { height: 8px; background: #e6ebf0; border-radius: 4px; margin: 10px 0; } .bar div { height: 8px;
       background: #1f5aa6; border-radius: 4px; }
.alert { border-left: 4px solid #e08214; background: #fdf4e7; padding: 8px 12px; margin: 8px 0; }
.fault { border-color: #b2182b; background: #fbeaec; } .fine { border-color: #4d9221; background: #eef6e8; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 8px; }
.curves img { width: 100%; }
.wide { overflow-x: auto; } table { border-collapse: collapse; } td, th { padding: 3px 12px 3px 0; text-align: left;
       border-bottom: 1px solid #e6ebf0; vertical-align: top; } th { color: #5b6b7a; font-weight: 500; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f9; padding: 8px 12px; margin: 4px 0 12px;
      max-height: 20em; overflow-y: auto; }
"""
MOST_CHARACTERS = 4000  # of a completion; a longer one loses its middle


def write(runs: Sequence[RunDir], logs: Sequence[MetricsLog], folder: Path) -> Path:
    """Write the page of one run, or the comparison of several, atomically into `folder`."""
    if len(runs) == 1:
        what = "Distillation" if any(row.get("divergence") is not None for row in logs[0].rows) else "GRPO run"
        final, title = folder / "health.html", f"{what} {runs[0].path.resolve().name}"
        body = _run(runs[0], logs[0])
    else:
        final, title = folder / "comparison.html", f"{len(runs)} runs compared"
        body = _comparison(runs, logs)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body><h1>{_text(title)}</h1>\n{body}\n"
        "</body></html>\n"
    )
    partial = final.with_name(f".{final.stem}.{os.getpid()}.html")
    try:
        partial.write_text(page, errors="replace")  # a completion may hold half a surrogate pair
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)
    return final


def _text(value: object) -> str:
    return html.escape(str(value))


def _run(run: RunDir, log: MetricsLog) -> str:
    rows = log.rows
    found = [(name, plot.svg(plot.run_panel(panel, rows))) for name, panel in _panels(rows, run).items()]
    return "\n".join(
        [
            _state(progress(log)),
            _facts(run),
            "<h2>Health</h2>",
            _alerts(rows),
            "<h2>Curves</h2>",
            _pictures(found),
            "<h2>Figures</h2>",
            _figures(rows),
            _samples(run),
        ]
    )


def _panels(rows: Sequence[dict], run: RunDir) -> dict[str, plot.Panel]:
    return plot.panels(rows, run) | {"speed": plot.speed}


def _state(state: dict) -> str:
    step, total = state["step"], state["total_steps"]
    words = [f"step {step}" + (f" of {total}" if total else ""), state["state"]]
    if state["state"] == "running" and state["time_left_s"] is not None:
        words.append(f"{duration(state['time_left_s'])} left")
    words.append(f"last line {duration(state['since_last_line_s'])} before this page was written")
    share = 100 * min(1.0, step / total) if total else 0
    error = ""
    if state["error"] is not None:
        fault = " fault" * (state["state"] == "failed")
        error = f'<div class="alert{fault}">{_text(how_it_ended(state))}</div>'
    bar = f'<div class="bar"><div style="width:{share:.1f}%"></div></div>'
    return f'{error}<p class="dim">{_text(", ".join(words))}</p>{bar}'


def _facts(run: RunDir) -> str:
    """Model, hardware and versions; empty if config.json has none."""
    try:
        known = read_json(run.config_file)
    except BadInput:
        return ""
    config, machine = group(known, "config"), group(known, "machine")
    model, train, distill = group(config, "model"), group(config, "train"), group(config, "distill")
    loss = f"{distill.get('divergence')} to a teacher"
    if not (distill.get("teacher") or distill.get("teacher_adapter")):
        loss = train.get("loss") or train.get("loss_type")
    revision = known.get("git_revision") if isinstance(known, dict) else None
    shown = [
        model.get("path") or model.get("id"),
        f"{loss}, learning rate {train.get('learning_rate')}" if "loss_type" in train else None,
        ", ".join(machine.get("gpus") or []) or (f"{machine['cores']} CPU cores" if "cores" in machine else None),
        *(f"{name} {version}" for name, version in group(known, "versions").items() if name in ("torch", "trl")),
        f"commit {revision[:12]}" if isinstance(revision, str) else None,
    ]
    return f'<p class="dim">{_text(" · ".join(str(fact) for fact in shown if fact))}</p>'


def _alerts(rows: Sequence[dict]) -> str:
    found = alerts(rows)
    if not found:
        return '<div class="alert fine">No rule fires.</div>'
    return "\n".join(
        f'<div class="alert{" fault" * alert.fault}"><b>{_text(alert.name)}</b>: {_text(alert.value)}.<br>'
        f"{_text(alert.meaning)} {_text(alert.action)}</div>"
        for alert in found
    )


def _pictures(found: Sequence[tuple[str, bytes]]) -> str:
    images = (
        f'<img alt="{_text(name)}" src="data:image/svg+xml;base64,{base64.b64encode(picture).decode()}">'
        for name, picture in found
    )
    return f'<div class="curves">{"".join(images)}</div>'


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], numbers_from: int = 1) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        made = (
            f"<{tag}{' class=n' if place >= numbers_from else ''}>{_text(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    return f'<div class="wide"><table>{line(head, "th")}{"".join(line(cells, "td") for cells in lines)}</table></div>'


def _figures(rows: Sequence[dict]) -> str:
    keys = TRENDS | {
        "rollout tokens/s": "rollout_tokens_per_s",
        "update tokens/s": "update_tokens_per_s",
        "completion length": "completion_length",
    }
    keys |= {f"peak GiB, {name}": f"peak_gib.{name}" for name in group(rows[-1], "peak_gib")}
    lines = []
    for label, key in keys.items():
        known = [value for value in series(rows, key) if value == value]
        if not known:
            continue
        form = percent if key in SHARES or key == "effective_sample_size" else show
        recent = mean(series(rows[-RECENT:], key))
        last = last_known(rows, key) if key == "heldout_accuracy" else number(rows[-1], key)
        lines.append((label, form(last), form(recent), form(min(known)), form(max(known))))
    return _table(("", "last", f"mean of {RECENT}", "lowest", "highest"), lines)


def _samples(run: RunDir) -> str:
    found = latest_group(run)
    if found is None:
        return ""
    parts = [f"<h2>Answers at step {found.step}</h2><pre>{_text(_shortened(found.prompt))}</pre>"]
    for name, sample in found.picks().items():
        rewards = ", ".join(
            f"{function} {show(value) if isinstance(value, int | float) else 'unknown'}"
            for function, value in sample.rewards.items()
        )
        parts.append(f"<p><b>{name}</b> {_text(rewards)}, advantage {show(sample.advantage)}</p>")
        parts.append(f"<pre>{_text(_shortened(sample.text))}</pre>")
    return "\n".join(parts)


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"


def _comparison(runs: Sequence[RunDir], logs: Sequence[MetricsLog]) -> str:
    step, found = common_step(logs), compared(runs, logs)

    def panel(key: str, title: str) -> bytes:
        def fill(axes: object) -> None:
            plot.compare_panel(axes, runs, logs, key, title)
            if key == "reward":
                axes.legend(fontsize=8, framealpha=0.85)

        return plot.svg(fill)

    pictures = [(title, panel(key, title)) for title, key in plot.compared_keys(logs).items()]
    return "\n".join(
        [
            f'<p class="dim">Best reward first; figures are means of the {RECENT} steps up to step {step}, the last '
            "that all have reached.</p>",
            _compared_table(found, step),
            "<h2>Curves</h2>",
            _pictures(pictures),
        ]
    )


def _compared_table(found: Sequence[Compared], step: int | None) -> str:
    keys = {f"reward at {step}": "reward", "now": "reward_now", "held-out": "heldout_accuracy", "KL": "kl"}
    keys |= {"entropy": "entropy", "truncated": "truncated_fraction", "s/step": "seconds.step"}
    keys = {title: key for title, key in keys.items() if any(run.at[key] is not None for run in found)}
    head, lines = ("run", "state", "step", *keys), []
    for run in found:
        figures = [(percent if key in SHARES else show)(run.at[key]) for key in keys.values()]
        done = "–" if run.state["step"] is None else str(run.state["step"])
        fired = ", ".join(alert.name for alert in run.alerts)
        lines.append((run.name, run.state["state"] + (f": {fired}" if fired else ""), done, *figures))
    return _table(head, lines, numbers_from=2)
