"""Output of `launch.up`: in a terminal a page with every process and the run's curves, through a pipe one line per
event and step."""

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from kit.core.metrics_log import MetricsLog
from kit.core.run_directory import RunDir
from launch.watching.page import frame
from launch.watching.shown import Text

REDRAW_S = 0.5
STEP = re.compile(r"step \d+/\d+ ")
COLOURS = {"starting": "yellow", "running": "green", "serving": "green", "ending": "yellow", "ended": "dim"}


@dataclass(frozen=True)
class Status:
    """One row of the page."""

    name: str
    state: str
    pid: int
    gpus: tuple[str, ...]
    seconds: float
    log: Path


class View:
    """Live view, used as a context manager. Unwritable output, such as a closed terminal, never raises."""

    def __init__(self, run: RunDir, statuses: Callable[[], list[Status]], console: Console):
        self.run, self.statuses = run, statuses
        self.console = console
        self.metrics = MetricsLog(run.metrics_file)
        self._steps: StepLines | None = None
        self._live: Live | None = None
        self._drawn = 0.0

    def __enter__(self) -> "View":
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            with contextlib.suppress(OSError):
                self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            with contextlib.suppress(OSError):
                self._live.stop()

    def say(self, text: str) -> None:
        """Print an event: above the page, or as a line with the time."""
        with contextlib.suppress(OSError):
            # soft_wrap: do not fold lines of a log file
            self.console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)
            self.console.file.flush()

    def follow_steps(self, log: Path) -> None:
        """Show steps that are written to the trainer's log from now on."""
        self._steps = StepLines(log)

    def update(self, at_once: bool = False) -> None:
        """Draw what is new, at most every `REDRAW_S`."""
        if time.monotonic() - self._drawn < REDRAW_S and not at_once:
            return
        self._drawn = time.monotonic()
        if self._live:
            with contextlib.suppress(OSError):
                self._live.update(self.page(), refresh=True)
        elif self._steps:
            for line in self._steps.new():
                self.say(line)

    def page(self) -> Group:
        """Every process, and below it the run as `launch.watch` shows it."""
        self.metrics.poll()
        statuses, width = self.statuses(), self.console.width
        room = self.console.height - len(statuses) - 3  # the table header, a blank line, the cursor's line
        return Group(process_table(statuses, width), Text(), frame(self.run, self.metrics, width, max(3, room)))


def process_table(statuses: list[Status], width: int) -> Table:
    """One row per process; the remaining width shows the last line of its log."""
    table = Table(box=None, padding=(0, 1), header_style="dim", width=width)
    for name, justify in (("", "left"), ("state", "left"), ("pid", "right"), ("GPU", "left"), ("for", "right")):
        table.add_column(name, justify=justify, no_wrap=True)
    table.add_column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in statuses:
        state = Text(one.state, style=COLOURS.get(one.state, ""))
        line = Text(last_line(one.log), style="dim")
        table.add_row(
            one.name, state, str(one.pid), ",".join(one.gpus) or "–", str(timedelta(seconds=int(one.seconds))), line
        )
    return table


def last_line(log: Path) -> str:
    """The last non-blank line of a log."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")
    return ""


class StepLines:
    """Step lines as they are appended to a log, each once and complete."""

    def __init__(self, log: Path):
        self.log, self._rest = log, b""
        self._offset = log.stat().st_size if log.exists() else 0

    def new(self) -> list[str]:
        try:
            with open(self.log, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [text for line in lines if STEP.match(text := line.decode(errors="replace"))]
