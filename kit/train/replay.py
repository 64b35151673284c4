"""Replay: groups that still have no signal give their places to groups of earlier steps that had one.

    keep     after a step: its groups with signal, and the policy's log-probs of them before the update
    fill     in a later step: the newest kept groups take the places of groups without signal, each at most once

A replayed row has the old log-probs of the step that sampled it, so `train.epsilon` clips against the policy that
sampled it, as for every row; the sampler's log-probs and their correction are those of that step too. Rows are at most
`rollout.replay_steps` steps old. A row that is replayed is not kept again.

Every process holds the same groups and decides from the rewards of all of them. A checkpoint holds the kept groups, so
a resumed run repeats the uninterrupted one.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from kit.core.file_kinds import REPLAYED
from kit.core.run_files import read_object
from kit.rollout.policy_view import Processes
from kit.train.resampling import Drawn

FILE = "replay.json"  # in a checkpoint
KEYS = ("replayed_groups", "replay_lag", "no_signal_fraction")  # of metrics.jsonl
ROW = "row"  # entry of a batch: the row's place among those that this process drew
OLD = "replayed_logps"  # entry of a batch: (B, C), NaN for what this step sampled


@dataclass
class KeptGroup:
    """A group with signal: `rows` as `Drawn.row` gives them, and their `rewards`, one list per row."""

    step: int
    rows: list[dict[str, Any]]
    rewards: list[list[float | None]]

    @property
    def version(self) -> int:
        return min(row["versions"] for row in self.rows)


class Replay:
    """Kept groups, oldest first; `figures` are those of the last step (`KEYS`)."""

    def __init__(self, steps: int, group: int, processes: Processes):
        self.steps, self.group, self.processes = steps, group, processes
        self.kept: list[KeptGroup] = []
        self.figures: dict[str, float | None] = {}
        self._trained: tuple[int, Drawn, list[bool]] | None = None  # step, its rows, which groups to keep

    def fill(
        self, step: int, drawn: Drawn, signal: list[bool], names: list[str], ledger: Callable[..., None]
    ) -> Drawn:
        """The rows that the step trains on: `drawn`, whose groups over all processes are of the problems `names` and
        have `signal`, with kept groups in the places of those without."""
        self.kept = [one for one in self.kept if step - one.step <= self.steps]
        weak = [place for place, has in enumerate(signal) if not has]
        taken = list(zip(weak, reversed(self.kept), strict=False))
        self.kept = self.kept[: len(self.kept) - len(taken)]
        own = self.processes.process_index * len(drawn.problem_ids)
        rows, rewards = {}, drawn.rewards.clone()
        for place, kept in taken:
            for index, (row, values) in enumerate(zip(kept.rows, kept.rewards, strict=True), place * self.group):
                rewards[index] = torch.tensor([math.nan if value is None else value for value in values])
                if own <= index < own + len(drawn.problem_ids):
                    rows[index - own] = row
        if taken:
            replayed = [{"problem_id": one.rows[0]["problem_ids"], "step": one.step} for _, one in taken]
            ledger(step, [], replayed=replayed, replaces=[names[place] for place, _ in taken])
        lags = [step - 1 - one.version for _, one in taken]
        left = (len(weak) - len(taken)) / len(signal)
        self.figures = dict(zip(KEYS, (len(taken), max(lags, default=None), left), strict=True))
        drawn = drawn.with_rows(rows, rewards)
        self._trained = step, drawn, signal
        return drawn

    def add_entries(self, batch: dict[str, torch.Tensor], drawn: Drawn) -> None:
        """Add `ROW` (B,) and, if a row is replayed, `OLD` (B, C) to the inputs of the loss."""
        ids = batch["completion_ids"]
        batch[ROW] = torch.arange(len(ids), device=ids.device)
        batch[OLD] = torch.full(ids.shape, math.nan, dtype=torch.float32, device=ids.device)
        for index, logps in enumerate(drawn.old_logps):
            if logps is not None:
                batch[OLD][index, : len(logps)] = torch.tensor(logps, device=ids.device)

    def keep(self, parts: list[dict[str, torch.Tensor]] | None) -> None:
        """Keep the groups of the last step, whose rows `parts` have the log-probs from before its update. A no-op when
        that is done. Called by all processes together."""
        if self._trained is None:
            return
        (step, drawn, signal), self._trained = self._trained, None
        own, mine = self.processes.process_index * len(drawn.problem_ids), []
        for part in parts or ():
            for row, logps in zip(part[ROW].tolist(), part["old_per_token_logps"].tolist(), strict=True):
                if signal[(own + row) // self.group]:
                    found = drawn.row(row)
                    found["old_logps"] = logps[: len(found["token_ids"])]
                    mine.append((own + row, found))
        rows, rewards = dict(gather_object(mine)), drawn.rewards.tolist()
        for place, has in enumerate(signal):
            if has:
                places = range(place * self.group, (place + 1) * self.group)
                values = [[None if math.isnan(value) else value for value in rewards[index]] for index in places]
                self.kept.append(KeptGroup(step, [rows[index] for index in places], values))
        self.kept = self.kept[-len(signal) :]  # no step takes more

    def write(self, directory: Path) -> None:
        """Write the kept groups into the directory of a checkpoint."""
        (directory / FILE).write_text(json.dumps([asdict(one) for one in self.kept]))

    def read(self, checkpoint: Path) -> None:
        """Continue with the groups of a checkpoint; `BadInput` if it has none."""
        groups = read_object(checkpoint / FILE, REPLAYED)
        self.kept = [KeptGroup(one["step"], one["rows"], one["rewards"]) for one in groups]
