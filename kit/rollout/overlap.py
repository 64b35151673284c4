"""`rollout.overlap`: the servers generate the next batch while the update runs, one step off-policy.

    step k:  take batch k | write version k-1 | rewards, reference, update k -> version k
                       servers: sync version k-1 | batch k+1 from version k-1 ---------|
    step k+1: take batch k+1 (wait for what is left) | write version k | ...

Batch k+1 is sampled from version k-1 and used to update version k, a lag of one. The importance correction compares
the policy of step k+1 with the sampler's own log-probs, so it corrects for the lag as it does for the servers'
different numerics. The first step of a process, and of each pass over the data, has no batch generated ahead: it
generates as without overlap and has no lag. A checkpoint holds nothing of the batch in flight, the ledger only what a
step consumed.

The background thread only does HTTP, that of the sync too. The main thread takes what a sync needs of the policy, its
file before and its canary scores while the replicas load that, and does collective operations and tokenizing, in the
same order in every process.
Update k is made only once all replicas serve version k-1; a sync that fails ends the run before it. The thread is a
daemon, so it keeps no process alive.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Batches = tuple[list, Any]  # what transformers' `get_batch_samples` returns: a step's batches, and their items


class Ahead:
    """A batch generated in a background thread, after the sync of the version that samples it.

    `rows` are all processes' prompts, or the rows of their episodes; `version` is the adapter version that samples.
    `is_synced` says that the sync was waited for. After `take`, `hidden_s` is the number of seconds it was generated
    before anyone waited for it. Only the main process starts it.
    """

    def __init__(self, rows: list, version: int):
        self.rows, self.version, self.is_synced, self.hidden_s = rows, version, False, 0.0
        self._synced: Future[dict[str, Any]] = Future()
        self._samples: Future[Any] = Future()
        self._started = self._ended = 0.0

    def start(self, sync: Callable[[], dict[str, Any]], generate: Callable[[], Any]) -> None:
        """Run `sync`, then `generate`, in a background thread; they must bound their own time."""

        def run() -> None:
            try:
                self._synced.set_result(sync())
                self._started = time.perf_counter()
                samples = generate()
            except BaseException as error:  # re-raised in the thread that asks
                if not self._synced.done():
                    self._synced.set_exception(error)
                self._samples.set_exception(error)
            else:
                self._ended = time.perf_counter()
                self._samples.set_result(samples)

        threading.Thread(target=run, name="rollout-ahead", daemon=True).start()

    def synced(self) -> dict[str, Any]:
        """Wait for `sync`; return its figures or raise its error."""
        return self._synced.result()

    def take(self) -> Any:
        """Wait for `generate`; return its result or raise its error."""
        asked = time.perf_counter()
        samples = self._samples.result()
        self.hidden_s = max(0.0, min(asked, self._ended) - self._started)
        return samples


class Lookahead:
    """Draws the batches of the next optimizer step early, so that its prompts can be generated for.

    transformers 5.17 draws a step's batches through `get_batch_samples`; trl 1.16 generates for the first of them.
    """

    def __init__(self) -> None:
        self._drawn: tuple[Any, Batches] | None = None  # (iterator, the next step's)

    def draw(self, iterator: Any, draw: Callable[[], Batches], is_last: bool) -> Batches:
        """Return the step's batches; unless it `is_last`, also draw the next step's, if the pass over the data has
        any."""
        known, batches = self._drawn or (None, None)
        if known is not iterator:
            batches = draw()
        self._drawn = None
        if not is_last:
            following = draw()
            self._drawn = (iterator, following) if following[0] else None
        return batches

    def rows(self) -> list[dict]:
        """This process's rows of the next step; empty if there is none."""
        return self._drawn[1][0][0] if self._drawn else []
