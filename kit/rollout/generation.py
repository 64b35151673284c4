"""Generate requests to the replicas: what is asked for a group or a turn, and which answers are accepted.

A group is one request of n completions. A turn of an episode is one of its own, sent when its episode needs it; vLLM
computes only what its prefix cache lacks, so the turns of a group go to one replica (`dispatch.py`). Every answer must
be of the version that was asked for.
"""

import asyncio
import contextlib
import functools
import math
import queue
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from kit.core.config.schema import RolloutConfig
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.policy.stop_texts import StopTexts
from kit.rollout.dispatch import Ask, Dispatcher, GenerationFailed, Requests
from kit.rollout.episodes import Turn
from kit.rollout.protocol import Sampling
from kit.rollout.recovery import Recovery
from kit.rollout.replica import Replica, ReplicaError, Sample
from kit.rollout.sync import restart_hint


class Generation:
    """Requests of one adapter version, the one that `session` serves on all replicas.

    `at_once[i]` is the number of completions that replica i generates at once. With `recovery`, replicas that fail are
    waited for. `stop_texts`, of replicas that draft tokens, are searched here too: vLLM accepts several tokens at once
    and returns those behind a stop text (vllm#47616).
    """

    def __init__(
        self,
        replicas: list[Replica],
        at_once: list[int],
        rollout: RolloutConfig,
        run: RunDir,
        session: str,
        version: int,
        stop: list[int],
        recovery: Recovery | None = None,
        stop_texts: StopTexts | None = None,
    ):
        self.replicas, self.at_once, self.rollout, self.run = replicas, at_once, rollout, run
        self.recovery, self.stop_texts = recovery, stop_texts
        self.session, self.version, self.stop = session, version, [*stop]
        self.name = f"{session}-v{version}"

    def groups(self, prompts: list[list[int]], n: int) -> list[list[Sample]]:
        """Return `n` completions of each prompt; `CheckFailed` if a replica fails for good."""
        with self._failure_named():
            return self._dispatcher(n).run(prompts, self._ask(n, self.rollout.max_completion_length), self.name)

    @contextlib.contextmanager
    def stream(self, prompts: list[list[int]], n: int, processes: int) -> Iterator["GroupStream"]:
        """Request `n` completions of each prompt, and hand out those that are there until the block ends. Each of
        `processes` has equally many prompts, one process after the other."""
        with self._dispatcher(n).open(self.name) as requests:
            futures = requests.submit_all(prompts, self._ask(n, self.rollout.max_completion_length))
            yield GroupStream(self, futures, processes)

    @contextlib.contextmanager
    def turns(self, group: int) -> Iterator["ServerTurns"]:
        """Sample turns of episodes until the block ends; `group` of them in a row share a prompt. A failure of a
        replica ends the block with `CheckFailed`."""
        with self._failure_named(), self._dispatcher(1).open(self.name) as requests:
            yield ServerTurns(self, requests, group)

    def _dispatcher(self, n: int) -> Dispatcher:
        capacity, rollout = [max(1.0, most / n) for most in self.at_once], self.rollout
        limits = rollout.retries, rollout.max_in_flight, rollout.request_timeout_s
        return Dispatcher(self.replicas, capacity, *limits, self.recovery.start if self.recovery else None)

    def _ask(self, n: int, max_tokens: int) -> Ask:
        rollout, has_experts = self.rollout, self.rollout.routing != "own"
        sampling: Sampling = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
        }

        def ask(replica: Replica, request_id: str, prompt: list[int]) -> list[Sample]:
            version, samples = replica.generate(
                request_id,
                prompt,
                **sampling,
                stop_token_ids=self.stop,
                stop=rollout.stop,
                session=self.session,
                version=self.version,
                routing=has_experts,
            )
            if version != self.version:
                reason = f"it sampled from adapter version {version}, version {self.version} was asked for"
                raise ReplicaError(replica.url, "generate", reason, retry=False)
            lengths = [(len(sample.token_ids), len(sample.logprobs)) for sample in samples]
            if len(samples) != n or any(not 0 < ids == logps <= max_tokens for ids, logps in lengths):
                reason = f"{len(samples)} samples for n = {n}, of (token ids, log-probs) {lengths[:8]}"
                raise ReplicaError(
                    replica.url, "generate", f"the answer is not what was asked for: {reason}", retry=False
                )
            if has_experts and (fault := experts_fault(samples, len(prompt))):
                raise ReplicaError(replica.url, "generate", fault, retry=False)
            return self._ended(prompt, samples)

        return ask

    def _ended(self, prompt: list[int], samples: list[Sample]) -> list[Sample]:
        """The samples of a prompt through the token that completes a stop text."""
        if not self.stop_texts:
            return samples
        lengths = [self.stop_texts.length(prompt, one.token_ids.tolist()) for one in samples]
        return [
            replace(one, token_ids=one.token_ids[:length], logprobs=one.logprobs[:length])
            for one, length in zip(samples, lengths, strict=True)
        ]

    @contextlib.contextmanager
    def _failure_named(self) -> Iterator[None]:
        try:
            yield
        except GenerationFailed as failed:
            url = failed.errors[-1].url
            raise CheckFailed(
                f"the rollout server at {url} failed on a prompt of {failed.prompt_tokens} tokens, attempt "
                f"{len(failed.errors)} of at most {1 + self.rollout.retries}: {failed}. "
                + restart_hint(self.run, {error.url for error in failed.errors})
            ) from None


class GroupStream:
    """Groups in the order in which they finish, equally many of each process at a time."""

    def __init__(self, generation: Generation, futures: "list[Future[list[Sample]]]", processes: int):
        self._generation, self._futures = generation, futures
        self.size = len(futures) // processes  # groups of a process
        self._finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ready: list[list[int]] = [[] for _ in range(processes)]  # finished and not taken, first come first
        self.taken = 0  # groups of each process
        self.ended = math.inf  # when the last group finished, of `time.perf_counter`
        for number, future in enumerate(futures):
            future.add_done_callback(functools.partial(self._note, number))

    def _note(self, number: int, _: "Future[list[Sample]]") -> None:
        if all(future.done() for future in self._futures):
            self.ended = time.perf_counter()
        self._finished.put(number)

    def take(self, least: int) -> list[list[tuple[int, list[Sample]]]]:
        """Wait until `least` groups of every process, or all that it lacks, are there. Return as many of each process
        as every process has: by process, (number within its groups, samples). `CheckFailed` if a replica fails for
        good."""
        wanted = min(least, self.size - self.taken)
        with self._generation._failure_named():
            while min(map(len, self._ready)) < wanted or not self._finished.empty():
                number = self._finished.get()
                self._futures[number].result()
                self._ready[number // self.size].append(number)
            count = min(map(len, self._ready))
            parts = [[mine.pop(0) for _ in range(count)] for mine in self._ready]
            self.taken += count
            return [[(one % self.size, self._futures[one].result()) for one in part] for part in parts]


class ServerTurns:
    """A `TurnSampler` on the replicas: each turn is a request of its own."""

    def __init__(self, generation: Generation, requests: Requests, group: int):
        self._generation, self._requests, self._group = generation, requests, group

    async def turn(self, episode: int, prompt_ids: list[int], max_tokens: int) -> Turn:
        """The turn that follows `prompt_ids`. Other episodes go on while it is generated."""
        ask = self._generation._ask(1, max_tokens)
        request = self._requests.submit(prompt_ids, ask, home=episode // self._group)
        (sample,) = await asyncio.wrap_future(request)
        return Turn(sample.token_ids.tolist(), sample.logprobs.tolist(), self._generation.version)

    def leave(self, episode: int) -> None:
        pass


def experts_fault(samples: list[Sample], prompt_tokens: int) -> str | None:
    """Explain why the experts of samples of a prompt cannot be compared or replayed; None if they can."""
    for sample in samples:
        if sample.experts is None:
            return (
                "the answer has no experts, which rollout.routing asks for. Start the server with this configuration"
            )
        if len(sample.experts) != (wanted := prompt_tokens + len(sample.token_ids) - 1):
            return f"the answer has experts of {len(sample.experts)} tokens, the model read {wanted}"
    return None
