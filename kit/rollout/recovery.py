"""Take a failed replica back: wait until it answers again or was started again, and sync it before it serves.

Only under `launch.up --restarts`, which starts the process (`restart_requests.py`). A replica counts as another one
when the pid in its `info` changes. Requests go on at the other replicas meanwhile (`dispatch.py`); a sync, which is
one of all replicas or none, waits.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from kit.core.errors import CheckFailed
from kit.core.one_line import printable
from kit.core.progress import beat
from kit.core.run_directory import RunDir
from kit.rollout.protocol import Info
from kit.rollout.replica import CONTINUE, PROBE_TIMEOUT_S, Hangs, Replica, ReplicaError
from kit.rollout.restart_requests import Request, ask_for_restart

PATIENCE_S = 30.0  # for a replica that gave no answer once: its connection may have been lost
POLL_S = 1.0


class ReplicasFailed(CheckFailed):
    """Replicas that failed, by URL; `errors` says how."""

    def __init__(self, text: str, errors: dict[str, ReplicaError]):
        super().__init__(text)
        self.errors = errors


class Recovery:
    """Brings failed replicas back, each in a thread of its own; thread-safe.

    `wait_s` bounds the wait for one replica. `restore` makes a process that was started again serve what the others
    serve, checked by the canary; it raises `ReplicaError`. `pids` are the known processes by URL.
    """

    def __init__(self, replicas: list[Replica], run: RunDir, wait_s: float, restore: Callable[[Replica], None]):
        self.replicas = {replica.url: replica for replica in replicas}
        self.run, self.wait_s, self.restore = run, wait_s, restore
        self.pids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._running: dict[str, Future[None]] = {}

    def know(self, infos: dict[str, Info]) -> None:
        """Remember the processes that answer now."""
        self.pids = {url: info["pid"] for url, info in infos.items()}

    def start(self, replica: Replica, error: ReplicaError, is_final: bool = False) -> "Future[None]":
        """Begin to bring a replica back after `error`, unless that is under way. The future raises `CheckFailed` if it
        does not come back. `is_final`: only another process can help."""
        with self._lock:
            running = self._running.get(replica.url)
            if running is not None and not running.done():
                return running
            future: Future[None] = Future()
            self._running[replica.url] = future

        def work() -> None:
            try:
                self._bring_back(replica, error, is_final or isinstance(error, Hangs))
            except BaseException as failed:
                future.set_exception(failed)
            else:
                future.set_result(None)

        # Not a pool: its threads are joined at exit, and a hanging request would keep the run alive.
        threading.Thread(target=work, name="recovery", daemon=True).start()
        return future

    def bring_back(self, failed: ReplicasFailed, is_final: bool) -> None:
        """Bring all replicas of `failed` back; raises it if one works and refuses."""
        if any(error.is_refusal and not error.is_conflict for error in failed.errors.values()):
            raise failed
        pending = [
            self.start(self.replicas[url], error, not error.is_conflict and (is_final or not error.retry))
            for url, error in failed.errors.items()
        ]
        for one in pending:
            one.result()

    def settle(self) -> None:
        """Wait for the replicas that are being brought back."""
        for one in [*self._running.values()]:
            one.result()

    def _bring_back(self, replica: Replica, error: ReplicaError, is_final: bool) -> None:
        url, ends = replica.url, time.monotonic() + self.wait_s
        began = time.monotonic()
        print(printable(error), flush=True)
        while True:
            known = self.pids.get(url)
            info = None if is_final else self._answer(replica, time.monotonic() + PATIENCE_S)
            if info is not None and info["pid"] == known:
                if error.is_conflict:
                    raise CheckFailed(f"{error} {CONTINUE}")
                return  # it works: the connection was lost
            if info is None:
                ask_for_restart(self.run, url, Request(known or 0, error.text))
                print(f"{url}: waiting until launch.up has started it again", flush=True)
                info = self._answer(replica, ends, other_than=known)
            if info is None:
                raise CheckFailed(
                    f"the rollout server at {url} was not back within {self.wait_s:g} s: {error}. Continue with "
                    "--resume."
                )
            self.pids[url] = info["pid"]
            try:
                self.restore(replica)
            except ReplicaError as failed:
                if failed.is_refusal:
                    raise CheckFailed(f"{failed} {CONTINUE}") from None
                print(printable(failed), flush=True)
                error, is_final = failed, True
            else:
                print(f"{url}: serves again after {time.monotonic() - began:.0f} s", flush=True)
                return

    def _answer(self, replica: Replica, ends: float, other_than: int | None = None) -> Info | None:
        """The replica's info once it answers, as another process than `other_than`; None at `ends`."""
        while time.monotonic() < ends:
            beat()
            try:
                info = replica.info(timeout_s=PROBE_TIMEOUT_S)
                if info["pid"] != other_than:
                    return info
            except ReplicaError:
                pass  # refused, hanging or loading
            time.sleep(POLL_S)
        return None
