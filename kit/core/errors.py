"""The two ways a command of the kit ends badly, the exit code of each, and the valid name for a misspelled one."""

import contextlib
import difflib
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# By then a launcher has ended the other processes of a run whose main one failed.
ALONE_S = 5.0


class KitError(Exception):
    """Base of every error the kit raises on purpose; the message is the whole report, no traceback is needed."""

    exit_code = CHECK_FAILED


class BadInput(KitError):
    """The user's input cannot work: a typo, a missing file, a mismatch. Raised before any weight is loaded."""

    exit_code = BAD_INPUT


class CheckFailed(KitError):
    """The input was fine and a check said no: a gate, a hash that changed, a NaN, a spent budget."""

    exit_code = CHECK_FAILED


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a line that says what it stopped and how to go on."""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """A sentence that names the nearest of `known`, with `prefix` before it; nothing when none is near."""
    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{folded[near[0]]}?" if near else ""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit: 0 done, 1 a check said no, 2 bad input.

    A `KitError` and a full disk print one message; of several processes that fail alike, the main one prints it, and
    one that fails alone its own, after `ALONE_S`.
    Ctrl-C prints one line and ends the process by SIGINT (130 in a shell), after what Python does at its exit.
    """
    # On some CPUs bitsandbytes asks for a package with a kernel of its own, which kit.weights.frozen_base turns off.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        code = main()
    except KitError as error:
        _tell(str(error))
        code = error.exit_code
    except KeyboardInterrupt as error:
        sys.excepthook = _excepthook
        raise KeyboardInterrupt(*error.args) from None  # for a subclass, Python 3.11 exits with 1
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        _tell(f"the disk is full: {reason}. Nothing half-written is taken for whole; free some space and start again.")
        code = CHECK_FAILED
    sys.exit(code or DONE)


def full_disk(error: BaseException) -> str | None:
    """The system's words for the full disk (or spent quota) that an exception reports; None for any other.

    safetensors' errors are no OSError, and those of pyarrow and PIL may lack errno: the number or the words stand in
    the text, or with the exception that it was raised from.
    """
    for one in filter(None, (error, error.__cause__, error.__context__)):
        if isinstance(one, OSError) and one.errno in DISK_FULL:
            return str(one)
        if is_failed_torch_save(one):
            return "torch.save could not write its file"
        for number in DISK_FULL:
            if f"os error {number})" in str(one) or os.strerror(number) in str(one):
                return " ".join(str(one).split())
    return None


def is_failed_torch_save(error: BaseException) -> bool:
    """Whether torch.save could not write: a RuntimeError without errno, as CUDA raises too."""
    return isinstance(error, RuntimeError) and (
        "PytorchStreamWriter" in str(error) or "inline_container" in str(error)
    )


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """One line for Ctrl-C, by the main process; Python's traceback for anything else."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait for exit handlers
    if os.environ.get("RANK", "0") == "0":
        print(str(error) or "interrupted", file=sys.stderr, flush=True)


def _tell(message: str) -> None:
    if (rank := os.environ.get("RANK", "0")) != "0":
        time.sleep(ALONE_S)
        message = f"process {rank}: {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)


def _is_command() -> bool:
    """Whether the running program is a file of this repository, not a test or another program that imports it."""
    started, root = getattr(sys.modules.get("__main__"), "__file__", None), Path(__file__).parents[2]
    if started is None and sys.argv[:1] == ["-m"]:  # python -m, which imports the package before its __main__
        words = sys.orig_argv
        started = root / words[words.index("-m") + 1].replace(".", "/")
    folders = Path(started).resolve().parents if started else ()
    return root in folders and root / "tests" not in folders and root / ".venv" not in folders


if _is_command():  # Ctrl-C while a command still imports
    sys.excepthook = _excepthook
