"""Replay without a model: which kept group takes which place, and what its rows bring along."""

import math
from types import SimpleNamespace

import pytest
import torch

from kit.core.errors import BadInput
from kit.rollout.policy_view import Rollouts
from kit.train import replay as module
from kit.train import resampling
from kit.train.replay import OLD, ROW, Replay
from kit.train.resampling import Drawn
from tests.unit.test_resampling import GROUP, NAMES, Together


def drawn_of(step: int, names: list[str], index: int, count: int) -> Drawn:
    """This process's part of a step's rows, one group for each name. A token says the step and the row's place."""
    every = [(name, place) for place, name in enumerate(name for name in names for _ in range(GROUP))]
    share = len(every) // count
    mine = every[index * share : (index + 1) * share]
    ids = [[step, place] for _, place in mine]
    made = Rollouts(ids, [[-float(step), -float(place)] for _, place in mine], step - 1)
    said = [[{"role": "assistant", "content": name}] for name, _ in mine]
    rewards = torch.tensor([[float(step), math.nan if place % GROUP == 3 else place] for _, place in every])
    facts = [name for name, _ in mine], [[{"content": name}] for name, _ in mine], [[1]] * len(mine), made
    return Drawn(*facts, [False] * len(mine), said, rewards, [step - 1] * len(mine), [None] * len(mine))


def parts_of(batch: dict) -> list[dict]:
    """A batch as the step leaves it: shuffled, in two parts, with the policy's log-probs."""
    order = torch.arange(len(batch[ROW])).flip(0)
    ids = batch["completion_ids"]
    batch = {**batch, "old_per_token_logps": torch.where(batch[OLD].isnan(), -ids / 8.0, batch[OLD])}
    return [{key: value[rows] for key, value in batch.items()} for rows in order.chunk(2)]


def run(together: Together, steps: list[tuple[int, list[str], list[bool]]], replay_steps: int) -> list:
    """(drawn, batch, ledger entries, figures) of each process's last step; a step is (number, problems, signal)."""

    def one(index: int) -> tuple:
        replay = Replay(replay_steps, GROUP, SimpleNamespace(num_processes=together.count, process_index=index))
        parts, entries = None, []
        for step, names, signal in steps:
            replay.keep(parts)
            replay.keep(parts)  # a checkpoint was written in between
            entries = []
            first = drawn_of(step, names, index, together.count)
            drawn = replay.fill(step, first, signal, names, lambda *one, **more: entries.append((*one, more)))  # noqa: B023
            batch = {"completion_ids": torch.tensor(drawn.made.token_ids)}
            replay.add_entries(batch, drawn)
            parts = parts_of(batch)
        return drawn, batch, entries, dict(replay.figures), replay

    return together.run(one)


@pytest.fixture(params=[1, 2, 4])
def together(request, monkeypatch):
    """Two groups of four on one process, on two, and on four, where each group is on two of them."""
    found = Together(request.param, monkeypatch)
    monkeypatch.setattr(module, "gather_object", found.gather)
    monkeypatch.setattr(resampling, "gather_object", found.gather)
    return found


def test_the_newest_kept_group_takes_the_place_with_all_that_it_was_sampled_with(together):
    steps = [(5, NAMES[:2], [True, True]), (6, NAMES[2:4], [False, True]), (7, NAMES[4:6], [True, False])]
    found = run(together, steps, 4)
    rows = [row for drawn, *_ in found for row in zip(drawn.problem_ids, drawn.made.token_ids, strict=True)]
    assert [name for name, _ in rows] == [NAMES[4]] * GROUP + [NAMES[3]] * GROUP
    assert [ids for _, ids in rows] == [[7, place] for place in range(4)] + [[6, place] for place in range(4, 8)]
    versions = [version for drawn, *_ in found for version in drawn.versions]
    assert versions == [6] * GROUP + [5] * GROUP
    old = torch.cat([batch[OLD] for _, batch, *_ in found])
    assert old[:GROUP].isnan().all(), "what the step sampled gets its old log-probs in the step"
    assert torch.equal(old[GROUP:], torch.tensor([[-6 / 8, -place / 8] for place in range(4, 8)]))
    sampler = [logps for drawn, *_ in found for logps in drawn.made.logps][GROUP:]
    assert sampler == [[-6.0, -float(place)] for place in range(4, 8)]
    for drawn, _, entries, figures, replay in found:
        assert entries == [(7, [], {"replayed": [{"problem_id": NAMES[3], "step": 6}], "replaces": [NAMES[5]]})]
        assert figures == {"replayed_groups": 1, "replay_lag": 1, "no_signal_fraction": 0.0}
        assert [one.rows[0]["problem_ids"] for one in replay.kept] == [NAMES[0]], "the newest of step 5 went in step 6"
        assert drawn.rewards[GROUP:, 0].tolist() == [6.0] * GROUP
        assert drawn.rewards[:, 1].isnan().tolist() == ([False] * 3 + [True]) * 2, "an unknown reward stays unknown"


def test_a_group_is_replayed_once_and_is_not_kept_again(together):
    steps = [(1, NAMES[:2], [False, True]), (2, NAMES[2:4], [False, False]), (3, NAMES[4:6], [False, False])]
    for drawn, _, entries, figures, replay in run(together, steps, 9):
        assert not entries and figures == {"replayed_groups": 0, "replay_lag": None, "no_signal_fraction": 1.0}
        assert {*drawn.problem_ids} <= {*NAMES[4:6]} and not replay.kept


def test_a_group_is_at_most_so_many_steps_old(together):
    steps = [(1, NAMES[:2], [True, True]), (2, NAMES[2:4], [True, True]), (4, NAMES[4:6], [False, False])]
    for *_, figures, _ in run(together, steps, 2):
        assert figures["replayed_groups"] == 2 and figures["replay_lag"] == 2
    steps[-1] = (5, *steps[-1][1:])
    for *_, figures, _ in run(together, steps, 2):
        assert figures["replayed_groups"] == 0


def test_no_more_groups_are_kept_than_a_step_has(together):
    steps = [(step, NAMES[:2], [True, True]) for step in range(1, 5)]
    for *_, replay in run(together, steps, 9):
        assert [one.step for one in replay.kept] == [3, 3]


def test_a_checkpoint_holds_the_groups_to_the_bit(together, tmp_path):
    found = run(together, [(1, NAMES[:2], [True, True]), (2, NAMES[2:4], [True, False])], 4)
    for index, (*_, replay) in enumerate(found):
        folder = tmp_path / str(index)
        folder.mkdir()
        replay.kept[0].rows[0]["old_logps"] = [torch.tensor(-1.1e-7).item(), torch.tensor(-0.1).item()]
        replay.write(folder)
        again = Replay(4, GROUP, replay.processes)
        again.read(folder)
        assert again.kept == replay.kept and again.kept
    for content in ("", "{", "[1]", '[{"step": 1}]'):
        (folder / module.FILE).write_text(content)
        with pytest.raises(BadInput, match="another checkpoint"):
            again.read(folder)
