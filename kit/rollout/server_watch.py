"""End a training whose frozen base lies in the memory of a server, once that server has ended."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

from kit.core.errors import BadInput, CheckFailed
from kit.rollout.replica import CONTINUE

# Sent by this process to itself. SIGUSR1 is Slurm's (launch/slurm/job.sh), SIGUSR2 writes stacks (core/progress.py).
SIGNAL = signal.SIGRTMIN + 7
_exits = contextlib.ExitStack()


def watch(pid: int, url: str) -> None:
    """Raise `CheckFailed` in the main thread as soon as process `pid` of the server at `url` ends, until `unwatch`.

    Python runs the handler between two bytecodes: kernels that were launched before it run to their end. `BadInput` if
    the process is gone already. Called in the main thread.
    """
    _exits.enter_context(_watching(pid, url))


def unwatch() -> None:
    """Let the server end from now on: this process no longer reads its memory. A no-op if none is watched."""
    _exits.close()


@contextlib.contextmanager
def _watching(pid: int, url: str) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise CheckFailed(
            f"the server at {url} has ended (process {pid}), and with it the memory of the base that this trainer "
            f"maps (server.share_base). Start it again (python -m launch.server --config ...). {CONTINUE}"
        )

    def wait() -> None:
        ended = select.select([process, closing], [], [])[0]
        if closing not in ended:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise BadInput(f"the process {pid} that holds the base of {url} is not here: {error.strerror}.") from None
    closing, close = os.pipe()
    before = signal.signal(SIGNAL, stop)
    thread = threading.Thread(target=wait, name=f"watch-{pid}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(close, b".")
        thread.join()
        signal.signal(SIGNAL, before)
        for fd in (process, closing, close):
            os.close(fd)
