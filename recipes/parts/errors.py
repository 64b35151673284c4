"""The two ways a command of the kit ends badly, the exit code of each, and the valid name for a misspelled one."""

import difflib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable

DONE, CHECK_FAILED, BAD_INPUT = 0, 1, 2
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


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """A sentence that names the nearest of `known`, with `prefix` before it; nothing when none is near."""
    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{folded[near[0]]}?" if near else ""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit: 0 done, 1 a check said no, 2 bad input.

    A `KitError` and a full disk print one message; of several processes that fail alike, the main one prints it, and
    one that fails alone its own, after `ALONE_S`.
    Ctrl-C ends the process by SIGINT, as Python does, without the stack of what happened to be running.
    """
    # On some CPUs bitsandbytes asks for a package with a kernel of its own, which merge.base turns off.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        code = main()
    except KitError as error:
        _tell(str(error))
        code = error.exit_code
    except KeyboardInterrupt as error:
        raise error.with_traceback(None) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _tell(f"the disk is full: {error}. Nothing half-written is taken for whole; free some space and start again.")
        code = CHECK_FAILED
    sys.exit(code or DONE)


def _tell(message: str) -> None:
    if (rank := os.environ.get("RANK", "0")) != "0":
        time.sleep(ALONE_S)
        message = f"process {rank}: {message}"
    print(f"error: {message}", file=sys.stderr, flush=True)
