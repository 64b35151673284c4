"""`rollout.backend: in_process`: the policy in this process generates, by TRL's own generation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kit.core.config.schema import Config
from kit.policy.kept_weights import Room, keeping_weights
from kit.rollout.episodes import EpisodeResult, EpisodeRunner, TurnAsk
from kit.rollout.noise import facts, noise_of, noisy
from kit.rollout.policy_view import PolicyView, Report, Rollouts
from kit.train.trained_policy import TrainedPolicy

# (token ids of prompts, completions per prompt, longest completion) -> token ids of completions
Generate = Callable[[list[list[int]], int, int], list[list[int]]]


class OwnSampler:
    """A `Sampler` that generates with the trained policy itself, for `rows` prompts at a time.

    With `episodes`, also an `EpisodeSampler`.
    """

    def __init__(
        self,
        config: Config,
        own: TrainedPolicy,
        generate: Generate,
        rows: int,
        say: Callable[[str], None] | None,
        episodes: EpisodeRunner | None = None,
    ):
        self.episodes = episodes
        self.config, self.own, self._generate, self.rows, self._say = config, own, generate, max(1, rows), say
        self._is_kept: bool | None = None  # what was last printed about rollout.keep_weights

    def generate(self, policy: PolicyView, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        """Complete prompts with the adapter's current version and its noise."""
        rollout, made = self.config.rollout, []
        with self._ready(policy) as noise:
            for start in range(0, len(prompt_ids), self.rows):
                part = prompt_ids[start : start + self.rows]
                made += self._generate(part, group or rollout.group_size, rollout.max_completion_length)
        return Rollouts(made, None, policy.version, Report(noise, {}))

    def run_episodes(
        self, policy: PolicyView, rows: list[dict], group: int | None = None
    ) -> tuple[list[EpisodeResult], Report]:
        """Run an episode on each row, turn by turn in lockstep.

        Each turn computes its whole prefix again; servers keep theirs (vLLM's prefix cache).
        """
        with self._ready(policy) as noise:
            results = self.episodes.sample_here(rows, self._turns, policy.version, policy.stop_token_ids)
        return results, Report(noise, {})

    def _turns(self, asks: list[TurnAsk]) -> list[list[int]]:
        """The turns that episodes wait for."""
        made: list[list[int]] = []
        for start in range(0, len(asks), self.rows):
            part = asks[start : start + self.rows]
            turns = self._generate([ask.prompt_ids for ask in part], 1, max(ask.max_tokens for ask in part))
            made += [turn[: ask.max_tokens] for turn, ask in zip(turns, part, strict=True)]
        return made

    @contextlib.contextmanager
    def _ready(self, policy: PolicyView) -> Iterator[dict[str, Any]]:
        """Prepare the policy's weights for the block; yields the noise on them, for the metrics."""
        rollout, noise = self.config.rollout, noise_of(self.config, policy.version)
        tokens = rollout.max_prompt_length + rollout.max_completion_length
        train = self.config.train
        rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        model = self.own.unwrapped
        kept: contextlib.AbstractContextManager[Room | None] = contextlib.nullcontext()
        if not policy.is_split:
            kept = keeping_weights(model, rollout.keep_weights, rows, tokens)
        with kept as room, noisy(model, noise):
            if self._say and room and room.is_kept != self._is_kept:
                self._is_kept = room.is_kept
                self._say(str(room))
            yield facts(noise)

    def close(self) -> None:
        pass
