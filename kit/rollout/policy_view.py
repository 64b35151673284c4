"""What samplers see of the policy in training, and what they hand back. Both sides of a step import this file."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kit.rollout.adapter_file import AdapterFile
    from kit.rollout.episodes import EpisodeResult


class Processes(Protocol):
    """The processes of a run, as accelerate's `Accelerator` has them."""

    is_main_process: bool
    process_index: int
    num_processes: int
    device: "torch.device"

    def wait_for_everyone(self) -> None: ...


class PolicyView(Protocol):
    """The policy between two updates.

    If the base is split over processes (`is_split`), all of them call `score` and `adapter` together; `adapter` is
    None in those that are not the main one.
    """

    processes: Processes
    is_split: bool
    stop_token_ids: list[int]

    @property
    def version(self) -> int:
        """Number of updates made."""

    def score(self, sequences: list[list[int]], is_adapted: bool = True) -> "list[np.ndarray]":
        """Log-probs (len - 1,) of every token after the first, at temperature 1, with the adapter on or off."""

    def adapter(self) -> "AdapterFile | None":
        """The adapter as a file that can be written for every version."""


class Report(NamedTuple):
    """A sampler's addition to the step's line of metrics.jsonl: figures, and seconds by phase."""

    figures: dict[str, Any]
    seconds: dict[str, float]


@dataclass
class Rollouts:
    """Completions of this process's prompts, in order; `logps` of the sampler, None if the policy itself sampled."""

    token_ids: list[list[int]]
    logps: list[list[float]] | None
    version: int  # adapter version that sampled
    report: Report = field(default_factory=lambda: Report({}, {}))
    # Experts that the sampler took, (T, L, k) int16 for the T tokens before a completion's last; None: not asked for.
    experts: "list[np.ndarray] | None" = None
    # The episodes whose turns and answers the completions are (`EpisodeResult.sampled` has which token is whose).
    episodes: "list[EpisodeResult] | None" = None


class Sampler(Protocol):
    """A source of completions: replicas, or the policy in this process."""

    def generate(self, policy: PolicyView, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        """Complete this process's prompts; called by all processes together. A prompt stands `group` (default
        `rollout.group_size`) times in a row."""

    def close(self) -> None:
        """Release what it holds; called once by the main process, however the run ends."""


class AheadSampler(Sampler, Protocol):
    """A sampler that can generate while the update runs (`rollout.overlap`)."""

    def begin(self, policy: PolicyView, prompt_ids: list[list[int]]) -> Report:
        """Start to sync the policy and then to generate; the next `generate` must be for the same prompts and takes
        the result."""

    def settle(self, policy: PolicyView) -> Report:
        """Wait for that sync, before the policy changes; return its figures. A no-op once it was waited for."""


class StreamedRows(NamedTuple):
    """Completions of this process's rows at `places`, whole groups in ascending order; a step's last has all that
    were missing."""

    places: list[int]
    rollouts: Rollouts
    is_last: bool


class StreamSampler(Sampler, Protocol):
    """A sampler that hands out groups while it generates others (`rollout.stream_groups`)."""

    def stream(self, policy: PolicyView, prompt_ids: list[list[int]], least: int) -> Iterator[StreamedRows]:
        """Complete this process's prompts, each `rollout.group_size` times in a row; yield `least` groups or more as
        soon as every process has them, equally many in each. The last report covers them all."""


class EpisodeSampler(Sampler, Protocol):
    """A sampler that also runs episodes of an environment."""

    def run_episodes(
        self, policy: PolicyView, rows: list[dict], group: int | None = None
    ) -> "tuple[list[EpisodeResult], Report]":
        """Run an episode on each of this process's rows (`Environment.start`), in order; called by all processes
        together. `group` (default `rollout.group_size`) rows in a row are alike."""

    def begin_episodes(self, policy: PolicyView, rows: list[dict]) -> Report:
        """Start the episodes (`rollout.overlap`); the next `run_episodes` must be for the same rows and takes their
        results."""
