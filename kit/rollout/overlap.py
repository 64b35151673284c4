"""`rollout.overlap`: the servers generate the next batch while the update runs, one step off-policy.

    step k:  take batch k | sync version k-1, ask for batch k+1 | rewards, reference, update k -> version k
                                  servers: batch k+1 from version k-1 ------------------------|
    step k+1: take batch k+1 (wait for what is left) | sync version k, ask for batch k+2 | ...

Batch k+1 is sampled from version k-1 and used to update version k, a lag of one. The importance correction compares
the policy of step k+1 with the sampler's own log-probs, so it corrects for the lag as it does for the servers'
different numerics. The first step of a process, and of each pass over the data, has no batch generated ahead: it
generates as without overlap and has no lag. A checkpoint holds nothing of the batch in flight, the ledger only what a
step consumed.

The background thread only does HTTP: collective operations, tokenizing, the sync and its canary stay on the main
thread, in the same order in every process. It is a daemon, so it keeps no process alive.
"""

import copy
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the methods and attributes of the class that it stands before
    from trl import GRPOTrainer as Trainer
else:
    Trainer = object


class Ahead:
    """A batch generated in a background thread.

    `prompts` are the token ids of all processes, `version` is the adapter version that samples. After `take`,
    `hidden_s` is the number of seconds it was generated before anyone waited for it. Only the main process starts it.
    """

    def __init__(self, prompts: list[list[int]]):
        self.prompts, self.version, self.hidden_s = prompts, None, 0.0
        self._samples: Any = None
        self._error: BaseException | None = None
        self._started = self._ended = 0.0

    def start(self, generate: Callable[[], Any]) -> None:
        """Run `generate` in a background thread; it must bound its own time."""

        def run() -> None:
            try:
                self._samples = generate()
            except BaseException as error:  # re-raised in the thread that takes it
                self._error = error
            self._ended = time.perf_counter()

        self._started = time.perf_counter()
        self._thread = threading.Thread(target=run, name="rollout-ahead", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Wait for `generate`; return its result or raise its error."""
        asked = time.perf_counter()
        self._thread.join()
        self.hidden_s = min(asked, self._ended) - self._started
        if self._error is not None:
            raise self._error
        return self._samples


class OverlappedRollouts(Trainer):
    """Part of `PolicyTrainer` that draws the next batch early and generates it during the update.

    Written for transformers 5.17, whose loop draws the batches of one optimizer step through `get_batch_samples`, and
    for trl 1.16, which generates for the first of them and makes prompt ids with `_tokenize_prompts`.
    """

    _lookahead: tuple[Any, tuple] | None = None  # (iterator, get_batch_samples' result for the next step)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple:
        """Return the step's batches; with overlap, also draw the next step's, if the pass over the data has any."""
        if not self.config.rollout.overlap:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        iterator, drawn = self._lookahead or (None, None)
        if iterator is not epoch_iterator:
            drawn = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._lookahead = None
        if self.state.global_step + 1 < self.state.max_steps:
            following = super().get_batch_samples(epoch_iterator, num_batches, device)
            self._lookahead = (epoch_iterator, following) if following[0] else None
        return drawn

    def _generate(self, prompts: list) -> tuple:
        output = super()._generate(prompts)
        if self.config.rollout.overlap:
            self._rollout_version = self.rollout.versions[0]
            self._seconds["rollout_hidden"] += self.rollout.hidden_s
            try:
                self.rollout.begin(self, self._next_prompt_ids())
            finally:
                self._sampler |= self.rollout.report
        return output

    def _next_prompt_ids(self) -> list[list[int]]:
        """Token ids of this process's prompts of the next step, as trl will make them; empty if there is none."""
        if self._lookahead is None:
            return []
        rows = self._lookahead[1][0][0]
        return self._tokenize_prompts(copy.deepcopy([row["prompt"] for row in rows]))[0]
