"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): replace groups without signal by fresh problems.

    draw     the step's problems, in the order of the run; complete, reward
    round    as many fresh problems as groups have no signal; a fresh group with signal takes the place of one without
    train    after `rollout.resample_rounds` rounds, or `rollout.resample_budget` completions: what still has no signal
             is trained on as without dynamic sampling, with advantages of 0

A group has signal if one of its completions has an advantage other than 0 and is in the loss: not if all rewards are
equal or unknown, or with `train.mask_truncated` if those that differ are truncated. Every process decides from the
rewards of all of them. Rounds are divided evenly over the processes, wherever the groups without signal are, and the
rows of a fresh group then move to the place that it takes.

Fresh problems come from an order of their own that is a function of `run.seed` and the step, without the problems that
the step has drawn. So no checkpoint needs more state, and a resumed run repeats the uninterrupted one. Such a problem
still has its turn in the order of the run.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from kit.core.config.schema import Config
from kit.rollout.policy_view import Processes, Rollouts

MADE = ("token_ids", "logps", "experts", "episodes")  # what `Rollouts` has of each row
# Keys of metrics.jsonl.
KEYS: tuple[str, ...] = (
    "resample_rounds",
    "resampled_groups",
    "kept_fraction",
    "no_signal_fraction",
    "resample_seconds",
)
KEYS += ("dropped_tokens",)


@dataclass(frozen=True)
class Drawn:
    """Completed and rewarded rows of this process, and the `rewards` (N, functions) of all processes' rows."""

    problem_ids: list[str]
    prompts: list[list[dict]]
    prompt_ids: list[list[int]]
    made: Rollouts
    is_truncated: list[bool]
    completions: list[list[dict]]
    rewards: torch.Tensor
    versions: list[int] = field(default_factory=list)  # of the adapter that sampled each row
    # The policy's log-probs of a replayed row (`replay.py`), None for a row of this step.
    old_logps: list[list[float] | None] = field(default_factory=list)

    def row(self, index: int) -> dict[str, Any]:
        """A row as plain data, which another process can take."""
        made = self.made
        return {
            "problem_ids": self.problem_ids[index],
            "prompts": self.prompts[index],
            "prompt_ids": self.prompt_ids[index],
            "is_truncated": self.is_truncated[index],
            "completions": self.completions[index],
            **({"versions": self.versions[index], "old_logps": self.old_logps[index]} if self.versions else {}),
            "token_ids": made.token_ids[index],
            "logps": made.logps and made.logps[index],
            "experts": made.experts and made.experts[index],
            "episodes": made.episodes and replace(made.episodes[index], episode=None),
        }

    def with_rows(self, rows: dict[int, dict[str, Any]], rewards: torch.Tensor) -> "Drawn":
        """Return a copy with these rows (`row` of a `Drawn`, by index) in place of its own."""

        def changed(name: str, own: list | None) -> list | None:
            return own and [rows[index][name] if index in rows else value for index, value in enumerate(own)]

        names = ("problem_ids", "prompts", "prompt_ids", "is_truncated", "completions", "versions", "old_logps")
        of_made: dict[str, Any] = {name: changed(name, getattr(self.made, name)) for name in MADE}
        of_rows: dict[str, Any] = {name: changed(name, getattr(self, name)) for name in names}
        return replace(self, **of_rows, made=replace(self.made, **of_made), rewards=rewards)


class FreshProblems:
    """The problems of a training set in the order in which those of a step are replaced, without the step's own."""

    def __init__(self, problem_ids: Sequence[str], drawn: Sequence[str], seed: int, step: int, in_order: bool):
        """`in_order`: the run goes through the problems in their order (`data.order: easy_first`), so those next to
        the step's come first, not random ones."""
        own = set(drawn)
        if in_order:
            places = [place for place, name in enumerate(problem_ids) if name in own]
            middle = sum(places) / len(places)
            order = sorted(range(len(problem_ids)), key=lambda place: abs(place - middle))
        else:
            # torch's generator on a CPU takes 32 bits of a seed.
            digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            order = torch.randperm(len(problem_ids), generator=draw).tolist()
        self._left = [place for place in order if problem_ids[place] not in own]

    def __len__(self) -> int:
        return len(self._left)

    def take(self, count: int) -> list[int]:
        """The next `count` problems, as indices of the training set."""
        taken, self._left = self._left[:count], self._left[count:]
        return taken


def groups_to_draw(weak: int, processes: int, group: int, most: int) -> int:
    """Number of groups to draw in place of `weak` ones, at most `most`. Their rows divide evenly over the processes,
    so there may be more than are weak."""
    unit = processes // math.gcd(processes, group)
    return min(-(-weak // unit) * unit, most // unit * unit)


def move_groups(drawn: Drawn, fresh: Drawn, moves: list[tuple[int, int]], group: int, process: int) -> Drawn:
    """`drawn` with groups of `fresh` in the places of its own: (place, group of `fresh`) over all processes, in each
    of which a group has `group` rows. Called by all processes together."""
    source = {new * group + offset: place * group + offset for place, new in moves for offset in range(group)}
    start = process * len(fresh.problem_ids)
    mine = [
        (source[start + index], fresh.row(index)) for index in range(len(fresh.problem_ids)) if start + index in source
    ]
    own = process * len(drawn.problem_ids)
    rows = {place - own: row for place, row in gather_object(mine) if own <= place < own + len(drawn.problem_ids)}
    rewards = drawn.rewards.clone()
    for index, place in source.items():
        rewards[place] = fresh.rewards[index]
    return drawn.with_rows(rows, rewards)


class Resampler:
    """Replaces a step's groups without signal; `figures` are those of the last step (`KEYS`, without the tokens)."""

    def __init__(self, config: Config, processes: Processes, dataset: Dataset):
        self.config, self.processes, self.dataset = config, processes, dataset
        self._names: list[str] = list(dataset["problem_id"])
        self.figures: dict[str, float] = {}

    def run(
        self,
        step: int,
        drawn: Drawn,
        draw: Callable[[list[dict]], Drawn],
        has_signal: Callable[[Drawn], list[bool]],
        ledger: Callable[..., None],
    ) -> Drawn:
        """The rows that the step trains on. `draw` completes and rewards rows of the data, `has_signal` judges the
        groups of all processes, `ledger` records problem ids before a round and the outcome after the last.

        Called by all processes together.
        """
        began, rollout, group = time.perf_counter(), self.config.rollout, self.config.rollout.group_size
        processes, process = self.processes.num_processes, self.processes.process_index
        names = gather_object(drawn.problem_ids)[::group]  # of the groups that are trained on
        every, signal, rounds = list(names), has_signal(drawn), 0
        fresh = self._fresh(names, step)
        budget = math.inf if rollout.resample_budget is None else rollout.resample_budget
        while rounds < rollout.resample_rounds and not all(signal):
            weak = [place for place, has in enumerate(signal) if not has]
            most = min(len(fresh), int(min(budget, len(self._names) * group)) // group)
            if not (count := groups_to_draw(len(weak), processes, group, most)):
                break
            rounds, budget = rounds + 1, budget - count * group
            taken = fresh.take(count)
            new = [self._names[index] for index in taken]
            ledger(step, new, round=rounds, replaces=[names[place] for place in weak])
            rows = [self.dataset[index] for index in taken for _ in range(group)]
            share = len(rows) // processes
            found = draw(rows[process * share : (process + 1) * share])
            moves = list(zip(weak, (place for place, has in enumerate(has_signal(found)) if has), strict=False))
            drawn = move_groups(drawn, found, moves, group, process)
            for place, source in moves:
                names[place], signal[place] = new[source], True
            every += new
        flat = [name for name, has in zip(names, signal, strict=True) if not has]
        kept = [name for name, has in zip(names, signal, strict=True) if has]
        dropped = [name for name in every if name not in {*names}]
        ledger(step, [], kept=kept, without_signal=flat, dropped=dropped)
        figures = rounds, len(every) - len(names), len(kept) / len(every), len(flat) / len(names)
        self.figures = dict(zip(KEYS, (*figures, round(time.perf_counter() - began, 4)), strict=False))
        return drawn

    def _fresh(self, names: list[str], step: int) -> FreshProblems:
        return FreshProblems(self._names, names, self.config.run.seed, step, self.config.data.order != "shuffled")
