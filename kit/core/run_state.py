"""Lock a run directory, record how its last trainer ended, and replace an old run by a new one.

Needs only the standard library, so any tool that looks at a run can import it. A training process holds the
directory's lock for as long as it lives and records its identity in the lock file; when it ends, it leaves `end.json`.
A killed process leaves nothing and is recognized by a lock file that names a process which is gone.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

from kit.core.errors import BAD_INPUT, BadInput, KitError, is_machine_fault
from kit.core.file_kinds import END as ENDED
from kit.core.file_kinds import LOCK as HELD
from kit.core.file_kinds import RESTARTS
from kit.core.run_directory import RunDir, write_json
from kit.core.run_files import opened, parse_line, read_object

LOCK = ".lock"
END = "end.json"
REPLACED = ".replaced"  # holds the old run until the new one has its base
LOCKS = Path("/proc/locks")
DONE, FAILED, INTERRUPTED, KILLED = "done", "failed", "interrupted", "killed"
LONGEST_ERROR = 2000  # characters
# Files that are safe to lose: a new start writes them again, or they only record why a start failed.
WORTHLESS: tuple[str, ...] = (
    "config.json",
    "base.json",
    "data.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "completions",
    "not_finite",
)
WORTHLESS += ("sync", "restarts.jsonl", END)
# Servers that are already running, and launch.up, write here; another start appends. A judge's replies stay valid.
STAYS = (LOCK, REPLACED, "logs", "judge")


@dataclass(frozen=True)
class End:
    """How the last process that trained in a run ended: done, failed, interrupted or killed, with its error;
    `is_machine`: the machine failed it, so it may go on from its newest checkpoint."""

    how: str
    error: str
    time: float | None = None
    is_machine: bool = False


@dataclass
class Restarted:
    """Something that `launch.up --restarts` started again; `seconds` from its failure until it worked, None if it does
    not yet, or never did."""

    what: str  # "trainer", or "server" and its URL
    why: str
    step: int  # the newest step by then
    time: float  # of the failure
    pid: int  # of the `launch.up`
    seconds: float | None = None

    def __str__(self) -> str:
        end = "" if self.seconds is None else f", back after {self.seconds:.0f} s"
        return f"{self.what} {self.why}, after step {self.step}{end}"


def lock_run(run: RunDir) -> IO:
    """Lock other trainers out of the run directory while the returned file is open; the file names this process."""
    run.path.mkdir(parents=True, exist_ok=True)
    file = open(run.path / LOCK, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BadInput(
            f"{run.path} is being trained in by another process. Wait until it ends, or use another run.name."
        ) from None
    file.truncate(0)
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}, file)
    file.flush()
    return file


def _began(pid: int) -> int | None:
    """Start time of a process on this machine, in kernel ticks; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def trainer_pid(run: RunDir) -> int | None:
    """Pid of the process on this machine that trains in the run, by the lock it holds there; None if there is none.

    Only reads: taking the lock, even for a moment, could turn away a starting trainer. Blind to other machines and to
    processes that the kernel hides from a container.
    """
    try:
        status = os.stat(run.path / LOCK)
        held = LOCKS.read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    holders = (fields[4] for line in held if len(fields := line.split()) > 5 and fields[5] == place)
    return next((int(pid) for pid in holders if pid.isdigit() and pid != "0"), None)


def last_end(run: RunDir) -> End | None:
    """How the run's last trainer ended; None while one is running, and if unknown.

    Unknown means before the first start, or a process on another machine that left no `end.json`.
    """
    if trainer_pid(run) is not None:
        return None
    with contextlib.suppress(BadInput):
        found = read_object(run.path / END, ENDED)
        return End(found["how"], found["error"], found["time"], found.get("is_machine", False))
    try:
        holder = read_object(run.path / LOCK, HELD)
    except BadInput:
        return None
    host, pid, began = (holder[key] for key in ("host", "pid", "began"))
    if host != socket.gethostname() or began is None or _began(pid) == began:
        return None
    return End(
        KILLED,
        f"process {pid} is gone and left no error: it was killed, as the kernel does when memory runs out, or the "
        f"machine went down. The end of {run.logs} may say more",
    )


@contextlib.contextmanager
def trains_in(run: RunDir) -> Iterator[None]:
    """Lock the run directory for the block and leave `end.json` in it; raises `BadInput` if another process holds it.

    With `run.replaces` the old run is set aside until `drop_replaced`, and restored if the start fails before that.
    """
    with lock_run(run):
        if run.base_file.exists():
            drop_replaced(run)  # left by an earlier start that was killed while deleting
        before = (run.path / END).read_bytes() if (run.path / END).is_file() else None
        if run.replaces:
            _set_aside(run)
        (run.path / END).unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            if run.replaces and _restored(run):
                pass
            elif getattr(error, "exit_code", None) == BAD_INPUT and before is not None:
                # A refused start changes nothing.
                (run.path / END).write_bytes(before)
            else:
                how = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
                _record_end(run, how, describe_error(error), is_machine_fault(error))
            raise
        _record_end(run, DONE, "")


def describe_error(error: BaseException) -> str:
    """One text for `end.json`: the message of an error of the kit, else with the error's type."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    text = str(error) if isinstance(error, KitError) else f"{type(error).__name__}: {error}"
    return text.strip()[:LONGEST_ERROR]


def record_standstill(run: RunDir, error: str) -> None:
    """Leave `end.json` for a trainer that stands still and cannot do so itself any more."""
    record_failure(run, error, is_machine=True)


def record_failure(run: RunDir, error: str, is_machine: bool) -> None:
    """Leave `end.json` for a run of which this process, or another one of it, is the cause of the end."""
    _record_end(run, FAILED, error[:LONGEST_ERROR], is_machine)


def _record_end(run: RunDir, how: str, error: str, is_machine: bool = False) -> None:
    with contextlib.suppress(OSError):  # a full disk is often what ended it
        write_json(run.path / END, asdict(End(how, error, time.time(), is_machine)))


def read_restarts(run: RunDir) -> list[Restarted]:
    """The lines of `restarts.jsonl`; those that are none are skipped."""
    found, names = [], [item.name for item in fields(Restarted)]
    with contextlib.suppress(BadInput), opened(run.restarts_file) as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                row = parse_line(line, RESTARTS)
                found.append(Restarted(**{key: row[key] for key in names if key in row}))
    return found


def is_restarting(run: RunDir) -> bool:
    """Whether a `launch.up` on this machine is starting something of the run again."""
    return any(one.seconds is None and _began(one.pid) is not None for one in read_restarts(run)[-1:])


def write_restarts(run: RunDir, restarts: list[Restarted]) -> None:
    """Replace `restarts.jsonl`: what was started again gets its seconds later."""
    temporary = run.restarts_file.with_name(f".{run.restarts_file.name}.tmp")
    with contextlib.suppress(OSError):  # a full disk must not end what `--restarts` keeps alive
        temporary.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in restarts))
        os.replace(temporary, run.restarts_file)


def continuing_flags(run: RunDir) -> list[str]:
    """Flags for a recipe whose run may already have begun: resume from a checkpoint, or start anew without one."""
    if any(run.checkpoints.glob("step-*")):
        return ["--resume"]
    return ["--overwrite"] if run.base_file.exists() else []


def replaced_by_overwrite(run: RunDir) -> list[Path]:
    """Entries of the run directory that a new run replaces."""
    return sorted(entry for entry in run.path.iterdir() if entry.name not in STAYS) if run.path.is_dir() else []


def describe_overwrite(run: RunDir) -> str:
    """One line naming what `--overwrite` deletes that was worth making; empty if nothing was."""
    names = [entry.name for entry in replaced_by_overwrite(run) if entry.name not in WORTHLESS]
    counted = {
        "checkpoints": [entry.name for entry in sorted(run.checkpoints.glob("step-*"))],
        "adapters": [entry.name for entry in sorted(run.adapters.glob("v[0-9]*"))],
        "merged": [str(entry.relative_to(run.merged)) for entry in sorted(run.merged.glob("*/*"))],
    }
    said = []
    for name in names:
        inside = counted.get(name)
        if inside is None:
            said.append(name)
        elif inside:
            said.append(f"{name} ({inside[0]} to {inside[-1]})" if len(inside) > 1 else f"{name} ({inside[0]})")
    return f"--overwrite deletes from {run.path}: {', '.join(said)}" if said else ""


def _remove(entry: Path) -> None:
    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _set_aside(run: RunDir) -> None:
    """Move the old run aside, base.json first: without it the directory holds no run, even if this is interrupted."""
    aside = run.path / REPLACED
    aside.mkdir(exist_ok=True)
    for entry in sorted(replaced_by_overwrite(run), key=lambda entry: entry.name != "base.json"):
        if (aside / entry.name).exists():  # left by a start that was killed before its base was loaded
            _remove(entry)
        else:
            entry.rename(aside / entry.name)


def _restored(run: RunDir) -> bool:
    """Put the old run back, base.json last, and return True; return False if the new one already has its base."""
    aside = run.path / REPLACED
    if run.base_file.exists() or not aside.is_dir():
        return False
    for entry in replaced_by_overwrite(run):
        if (aside / entry.name).exists() or entry.name in WORTHLESS:
            _remove(entry)
    for entry in sorted(aside.iterdir(), key=lambda entry: entry.name == "base.json"):
        entry.rename(run.path / entry.name)
    aside.rmdir()
    return True


def drop_replaced(run: RunDir) -> None:
    """Delete the old run: the new one has its own base by now."""
    shutil.rmtree(run.path / REPLACED, ignore_errors=True)
