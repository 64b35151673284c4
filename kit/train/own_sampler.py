"""`rollout.backend: in_process`: the policy in this process generates, by TRL's own generation."""

import contextlib
from collections.abc import Callable

from kit.core.config.schema import Config
from kit.policy.kept_weights import Room, keeping_weights
from kit.rollout.noise import facts, noise_of, noisy
from kit.rollout.policy_view import PolicyView, Report, Rollouts
from kit.train.trained_policy import TrainedPolicy

# (token ids of prompts, completions per prompt) -> token ids of completions
Generate = Callable[[list[list[int]], int], list[list[int]]]


class OwnSampler:
    """A `Sampler` that generates with the trained policy itself, for `rows` prompts at a time."""

    def __init__(
        self, config: Config, own: TrainedPolicy, generate: Generate, rows: int, say: Callable[[str], None] | None
    ):
        self.config, self.own, self._generate, self.rows, self._say = config, own, generate, max(1, rows), say
        self._is_kept: bool | None = None  # what was last printed about rollout.keep_weights

    def generate(self, policy: PolicyView, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        """Complete prompts with the adapter's current version and its noise."""
        rollout, noise, made = self.config.rollout, noise_of(self.config, policy.version), []
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
            for start in range(0, len(prompt_ids), self.rows):
                made += self._generate(prompt_ids[start : start + self.rows], group or rollout.group_size)
        return Rollouts(made, None, policy.version, Report(facts(noise), {}))

    def close(self) -> None:
        pass
