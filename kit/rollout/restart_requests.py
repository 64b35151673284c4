"""How a trainer asks `launch.up --restarts` to start a replica again: one small file per replica in the run's logs.

`launch.up` sees the end of a process, but not that one hangs or answers wrongly. The trainer does, writes a request
that names the process, and waits. `WAIT_S` in its environment says that somebody reads the requests, and how long it
may wait for a replica; without it a failed replica ends the run.
"""

import contextlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from kit.core.errors import BadInput
from kit.core.file_kinds import RESTART_REQUEST
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import read_object

WAIT_S = "GRPO_KIT_RESTART_WAIT_S"


@dataclass(frozen=True)
class Request:
    """A replica to start again: its process as its `info` names it, and why."""

    pid: int
    reason: str


def allowed_wait_s() -> float | None:
    """Seconds that this trainer may wait for a replica; 0: `launch.up` starts the trainer again too. None: nobody
    starts replicas again."""
    text = os.environ.get(WAIT_S)
    return float(text) if text else None


def ask_for_restart(run: RunDir, url: str, request: Request) -> None:
    """Ask for a restart of the replica at `url`; the same request twice is one."""
    run.logs.mkdir(parents=True, exist_ok=True)
    write_json(_file(run, url), asdict(request))


def take_request(run: RunDir, url: str) -> Request | None:
    """The pending request for a replica, which is removed; None if there is none."""
    file = _file(run, url)
    if not file.is_file():
        return None
    request = None
    with contextlib.suppress(BadInput):
        found = read_object(file, RESTART_REQUEST)
        request = Request(found["pid"], found["reason"])
    file.unlink(missing_ok=True)
    return request


def _file(run: RunDir, url: str) -> Path:
    from kit.rollout.replica import log_name  # imports requests, which --help need not wait for

    return run.logs / f"{log_name(url)}.restart"
