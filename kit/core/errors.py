"""The two ways a command of the kit can fail, their exit codes, and suggestions for misspelled names."""

import argparse
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

from kit.core.as_typed import name_commands_as_typed

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of torch, which this file does not import: the device is gone or unusable, another process or its link is.
DEVICE_ERRORS = {"AcceleratorError", "DistBackendError", "DistNetworkError", "DistStoreError"}
# By then a launcher has stopped the other processes of a run whose main process failed.
ALONE_S = 5.0
LONGEST_NAME = 200  # characters of a misspelled name that a nearest one is looked for
LONGEST_MESSAGE = 16_000


class KitError(Exception):
    """Base of every error the kit raises on purpose; the message is the whole report, no traceback is needed."""

    exit_code = CHECK_FAILED


class BadInput(KitError):
    """The user's input cannot work: a typo, a missing file, a mismatch. Raised before any weight is loaded."""

    exit_code = BAD_INPUT


class CheckFailed(KitError):
    """The input was valid but a check failed: a gate, a hash that changed, a NaN, a spent budget."""

    exit_code = CHECK_FAILED


class MachineFailed(CheckFailed):
    """The machine failed, not the run: no space, a lost device. From the newest checkpoint it may go on."""


class Followed(KitError):
    """Another process of the run failed first, with this exit code; who names the cause has done so already.
    `is_machine`: the machine failed it."""

    def __init__(self, text: str, exit_code: int, is_machine: bool):
        super().__init__(text)
        self.exit_code, self.is_machine = exit_code, is_machine


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a line that says what was interrupted and how to continue."""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """A sentence that suggests the nearest of `known`, preceded by `prefix`; empty if none is close."""
    if len(name) > LONGEST_NAME:
        return ""
    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{folded[near[0]]}?" if near else ""


def command_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for `python -m COMMAND` that prints `description` as it stands and takes no abbreviated flags."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit: 0 done, 1 a check failed, 2 bad input.

    A `KitError` or a full disk prints one message. If several processes fail alike, only the main one prints it; one
    that fails alone prints its own after `ALONE_S`.

    Ctrl-C prints one line and ends the process with SIGINT (130 in a shell), after Python's own shutdown.
    """
    # On some CPUs bitsandbytes asks for a package with its own kernel, which kit.weights.frozen_base turns off.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    name_commands_as_typed()
    try:
        check_words(sys.argv[1:])
        code = main()
    except KitError as error:
        if not isinstance(error, Followed):
            _tell(str(error))
        code = error.exit_code
    except KeyboardInterrupt as error:
        sys.excepthook = _excepthook
        raise KeyboardInterrupt(*error.args) from None  # for a subclass, Python 3.11 exits with 1
    except Exception as error:
        if reason := unusable_path(error):
            _tell(reason)
            code = BAD_INPUT
        elif (reason := full_disk(error)) is None:
            raise
        else:
            told = "Nothing half-written is taken for whole; free some space and start again."
            _tell(f"the disk is full: {reason}. {told}")
            code = CHECK_FAILED
    sys.exit(code or DONE)


def check_words(words: Iterable[str]) -> None:
    """Raise `BadInput` for an argument with bytes that are not UTF-8, or with characters that a terminal obeys:
    argparse prints arguments as they are. So too for one that is too long to print, and for what argparse misreads.
    """
    from kit.core.one_line import printable

    for number, word in enumerate(words, 1):
        if len(word) > LONGEST_MESSAGE:
            raise BadInput(
                f"argument {number} has {len(word):,} characters, more than {LONGEST_MESSAGE:,}: {word:.80} …. Write "
                "it in the YAML."
            )
        if word.startswith("--") and word.endswith("=--"):  # of which Python 3.11 makes an empty list
            raise BadInput(f"argument {number} ({word:.80}) has -- as its value. Name another.")
        if printable(word) != word:
            raise BadInput(
                f"argument {number} has a control character, or bytes that are not UTF-8: {word!r:.200}. Remove it, "
                'or write it in the YAML, between double quotes, as "\\r".'
            )


def unusable_path(error: BaseException) -> str | None:
    """The message for a path that no file system takes: too long, a loop of links, an unknown ~user; else None.

    Paths of a configuration are checked when it is read (`user_files.path_fault`); this is for those of flags.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return f"a path cannot be used: {error.strerror}: {error.filename!s:.200}. Name another."
    if isinstance(error, RuntimeError) and str(error).startswith(("Symlink loop", "Could not determine home")):
        return f"a path cannot be used: {error}. Name another."
    return None


def full_disk(error: BaseException) -> str | None:
    """The system's message if an exception reports a full disk (or an exceeded quota); None for any other.

    Errors from safetensors are not OSErrors, and those from pyarrow and PIL may lack errno: the number or the message
    is then in the text, or in the exception that they were raised from.
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


def is_machine_fault(error: BaseException) -> bool:
    """Whether the machine ended a run that may go on from its newest checkpoint: a full disk, or an error of the
    device or of its links. Not a lack of GPU memory, which comes back."""
    if isinstance(error, Followed):
        return error.is_machine
    if isinstance(error, KitError):
        return isinstance(error, MachineFailed)
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names:
        return False
    return bool(names & DEVICE_ERRORS) or "CUDA error" in str(error) or full_disk(error) is not None


def failure_of(error: BaseException) -> type[CheckFailed]:
    """The kind of failure to raise instead of `error`: the machine's or the run's."""
    return MachineFailed if is_machine_fault(error) else CheckFailed


def is_failed_torch_save(error: BaseException) -> bool:
    """Whether torch.save failed to write: it raises a RuntimeError without errno, as CUDA does too."""
    return isinstance(error, RuntimeError) and (
        "PytorchStreamWriter" in str(error) or "inline_container" in str(error)
    )


def _excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print one line for Ctrl-C, from the main process only; Python's traceback for anything else."""
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
    from kit.core.one_line import printable  # it may quote a file, a model or a server

    if len(message) > LONGEST_MESSAGE:
        message = f"{message[:LONGEST_MESSAGE]} … ({len(message):,} characters)"
    print(f"error: {printable(message)}", file=sys.stderr, flush=True)


def _is_command() -> bool:
    """Whether the running program is a file of this repository, not a test or another program that imports it."""
    started, root = getattr(sys.modules.get("__main__"), "__file__", None), Path(__file__).parents[2]
    if started is None and sys.argv[:1] == ["-m"]:  # python -m, which imports the package before its __main__
        words = sys.orig_argv
        started = root / words[words.index("-m") + 1].replace(".", "/")
    folders = Path(started).resolve().parents if started else ()
    return root in folders and root / "tests" not in folders and root / ".venv" not in folders


if _is_command():  # for Ctrl-C while a command is still importing
    sys.excepthook = _excepthook
