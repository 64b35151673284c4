"""Run one command, and end together with everything that it started.

`launch.up` puts this file, with its own process id, before the words of each of its commands, so that nothing stays
behind: neither when the command ends but leaves processes of its own, nor when the process with that id, the parent,
is killed outright. It exits with the command's exit code, or by the same signal. It imports nothing of the kit,
because it has to start at once.

SIGINT goes to every process of its group, as Ctrl-C in a terminal does. SIGTERM, which the kernel also sends when the
parent is gone, goes to the command alone, which ends its own workers; after `PATIENCE_S` everything left is killed.
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
PATIENCE_S = 15  # grace period for the command after SIGTERM
SWEEP_S = 2.0  # grace period for processes that outlive the command


def main() -> int:
    parent, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None).prctl
    # A descendant whose parent has ended is reparented to this process, which can then find it.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if os.getppid() != int(parent):  # the parent died before prctl took effect
        return 1

    def prepare() -> None:
        for number in (*numbers, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # a shell starts background jobs with SIGINT ignored
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    try:
        child = subprocess.Popen(command, preexec_fn=prepare)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent handles a closed terminal
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
    """The wait status of the command; also reaps orphans that end meanwhile."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def sweep() -> None:
    """End what is left; give up after a few tries on what the kernel cannot kill (a hanging driver)."""
    left = descendants()
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(left, SWEEP_S)
    for _ in range(5):  # including processes started meanwhile
        if not (left := descendants()):
            return
        kill_all()
        psutil.wait_procs(left, 1.0)


def end_like(status: int) -> int:
    """Return the command's exit code, or die by the signal that ended the command."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its own core, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
