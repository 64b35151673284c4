"""Runs one command and ends together with everything that the command started.

`launch.up` puts this file, with its own process id, before the words of each of its commands, so that nothing stays
behind: not when the command ends and leaves processes of its own, and not when the process with that id, the parent,
is killed outright. It ends with the command's exit code, or by the same signal. Imports nothing of the kit: it has to
start at once.

SIGINT goes to every process of its group, as Ctrl-C in a terminal. SIGTERM, also sent by the kernel when the parent is
gone, goes to the command alone, whose workers are its own to end; after `PATIENCE_S` everything left is killed.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 15  # what the command gets after SIGTERM
SWEEP_S = 2.0  # what processes that outlived the command get


def main() -> int:
    parent, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None).prctl
    # A descendant whose own parent has ended becomes a child of this process, where it is found.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if os.getppid() != int(parent):  # it was killed before the kernel knew what to send
        return 1

    def prepare() -> None:
        for number in (*numbers, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # a shell ignores SIGINT in what it starts in the background
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    try:
        child = subprocess.Popen(command, preexec_fn=prepare)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal is the parent's to answer
    signal.signal(signal.SIGINT, lambda *_: pass_on_interrupt())
    signal.signal(signal.SIGTERM, lambda *_: ask_to_end(child.pid))
    signal.signal(signal.SIGALRM, lambda *_: kill_all())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    status = wait(child.pid)
    sweep()
    return end_like(status)


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def pass_on_interrupt() -> None:
    for process in descendants():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == os.getpgid(0):
                process.send_signal(signal.SIGINT)


def ask_to_end(pid: int) -> None:
    signal.alarm(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def kill_all() -> None:
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            process.kill()


def wait(pid: int) -> int:
    """The wait status of the command; orphans that end meanwhile are collected too."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def sweep() -> None:
    """End what is left; what the kernel does not let go of (a driver that hangs) is left after a few tries."""
    left = descendants()
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, SWEEP_S)
    for _ in range(5):  # those included that started meanwhile
        if not (left := descendants()):
            return
        kill_all()
        psutil.wait_procs(left, 1.0)


def end_like(status: int) -> int:
    """The command's exit code; does not return when a signal ended the command."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its core, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
