"""Dynamic sampling without a model: which groups are replaced, by which problems, on which process."""

import threading
from types import SimpleNamespace

import pytest
import torch

from kit.core.config.load import load_config
from kit.rollout.episodes import EpisodeResult
from kit.rollout.policy_view import Rollouts
from kit.train import resampling as module
from kit.train.resampling import Drawn, FreshProblems, Resampler, groups_to_draw
from tests.conftest import CONFIG

NAMES = [f"p{number}" for number in range(40)]
GROUP = 4


class Together:
    """Runs a function as each of some processes, whose gathers meet."""

    def __init__(self, processes: int, monkeypatch):
        self.count, self.barrier = processes, threading.Barrier(processes, timeout=20)
        self.mine, self.own = threading.local(), [[] for _ in range(processes)]
        monkeypatch.setattr(module, "gather_object", self.gather)

    def gather(self, values: list) -> list:
        self.own[self.mine.index] = list(values)
        self.barrier.wait()
        everything = [value for part in self.own for value in part]
        self.barrier.wait()
        return everything

    def run(self, work) -> list:
        found: list = [None] * self.count

        def one(index: int) -> None:
            self.mine.index = index
            try:
                found[index] = work(index)
            except BaseException as error:
                found[index] = error
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for value in found:
            if isinstance(value, BaseException) and not isinstance(value, threading.BrokenBarrierError):
                raise value
        return found


class Data:
    """A training set; `dataset[i]` is a row."""

    def __getitem__(self, key):
        return NAMES if key == "problem_id" else {"problem_id": NAMES[key], "prompt": [{"content": NAMES[key]}]}


def drawn_of(rows: list[dict], everywhere: list[dict], weak: set[str], start: int) -> Drawn:
    """Completions of rows, of all processes' rows those from `start`; groups of problems in `weak` have equal rewards.
    A token says which row of its group it is."""
    names = [row["problem_id"] for row in rows]
    ids = [[NAMES.index(name) + 100, place % GROUP] for place, name in enumerate(names, start)]
    episodes = [EpisodeResult(completion_ids=one, sampled=[1, 1], episode=object()) for one in ids]
    made = Rollouts(ids, [[-float(one[0])] * 2 for one in ids], 7, episodes=episodes)
    rewards = [[0.0 if row["problem_id"] in weak else place % GROUP] for place, row in enumerate(everywhere)]
    prompts = [row["prompt"] for row in rows]
    lengths = [[1] * NAMES.index(name) for name in names]
    said = [[{"role": "assistant", "content": name}] for name in names]
    return Drawn(names, prompts, lengths, made, [False] * len(rows), said, torch.tensor(rewards, dtype=torch.float))


def has_signal(drawn: Drawn) -> list[bool]:
    return [len(set(group.tolist())) > 1 for group in drawn.rewards.view(-1, GROUP)]


def resample(together: Together, weak: set[str], first: list[str], step: int = 3, **keys) -> list[tuple]:
    """(rows of each process, ledger, figures) after resampling a step that drew the problems `first`."""
    changes = {"group_size": GROUP, "resample_rounds": 3, **keys}
    config = load_config(CONFIG, [f"--rollout.{key}={value}" for key, value in changes.items()])

    def one(index: int) -> tuple:
        entries: list[dict] = []
        processes = SimpleNamespace(num_processes=together.count, process_index=index)
        resampler, data = Resampler(config, processes, Data()), Data()

        def rows_of(names: list[str]) -> tuple[list[dict], list[dict], int]:
            rows = [data[NAMES.index(name)] for name in names for _ in range(GROUP)]
            share = len(rows) // together.count
            assert share * together.count == len(rows), "every process has as many"
            return rows[index * share : (index + 1) * share], rows, index * share

        def draw(rows: list[dict]) -> Drawn:
            mine, everywhere, start = rows_of(entries[-1]["problem_ids"])
            assert [row["problem_id"] for row in rows] == [row["problem_id"] for row in mine]
            return drawn_of(rows, everywhere, weak, start)

        def ledger(step: int, problem_ids: list[str], **more) -> None:
            entries.append({"step": step, "problem_ids": problem_ids, **more})

        mine, everywhere, start = rows_of(first)
        found = resampler.run(step, drawn_of(mine, everywhere, weak, start), draw, has_signal, ledger)
        assert resampler.figures.pop("resample_seconds") > 0
        return found, entries, resampler.figures

    return together.run(one)


@pytest.mark.parametrize(("processes", "first"), [(1, 4), (2, 4), (2, 3), (4, 3), (8, 4)])
def test_groups_without_signal_are_replaced_wherever_they_are(monkeypatch, processes, first):
    """With three groups of four on two processes, or four groups on eight, a group is on several of them."""
    names = NAMES[:first]
    weak = {names[0], names[2], *NAMES[10:20]}
    found = resample(Together(processes, monkeypatch), weak, names, resample_rounds=9)
    entries, figures = found[0][1:]
    rounds, outcome = entries[:-1], entries[-1]
    assert all(one[1:] == (entries, figures) for one in found), "every process decides the same"
    assert rounds[0]["replaces"] == [names[0], names[2]] and rounds[0]["round"] == 1
    fresh = [name for entry in rounds for name in entry["problem_ids"]]
    assert len(set(fresh)) == len(fresh) and not {*fresh} & {*names}
    trained = [name for drawn, *_ in found for name in drawn.problem_ids][::GROUP]
    assert trained == outcome["kept"] and not {*trained} & weak and outcome["without_signal"] == []
    assert trained[1] == names[1] and trained[3:] == names[3:], "the others stay where they were"
    assert {*outcome["dropped"]} == {*names, *fresh} - {*trained}
    total = first + len(fresh)
    wanted = (len(rounds), len(fresh), first / total, 0.0)
    assert tuple(figures.values()) == pytest.approx(wanted)
    rewards = found[0][0].rewards
    for drawn, *_ in found:
        assert torch.equal(drawn.rewards, rewards)
    assert rewards[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0] * first
    for process, (drawn, *_) in enumerate(found):
        for place, name in enumerate(drawn.problem_ids):
            number = NAMES.index(name)
            row = process * len(drawn.problem_ids) + place
            assert drawn.made.token_ids[place] == [number + 100, row % GROUP], "a whole row moved, in its order"
            assert drawn.made.logps[place] == [-float(number + 100)] * 2 and len(drawn.prompt_ids[place]) == number
            assert drawn.completions[place][0]["content"] == drawn.prompts[place][0]["content"] == name
            episode = drawn.made.episodes[place]
            assert episode.completion_ids == drawn.made.token_ids[place]
            assert (episode.episode is None) == (name not in names), "a live environment stays in its process"


def test_what_has_signal_is_not_touched_and_the_ledger_says_so(monkeypatch):
    ((drawn, entries, figures),) = resample(Together(1, monkeypatch), set(), NAMES[:4])
    assert entries == [{"step": 3, "problem_ids": [], "kept": NAMES[:4], "without_signal": [], "dropped": []}]
    assert figures == {"resample_rounds": 0, "resampled_groups": 0, "kept_fraction": 1.0, "no_signal_fraction": 0.0}
    assert drawn.problem_ids[::GROUP] == NAMES[:4]


@pytest.mark.parametrize(
    ("keys", "rounds", "fresh"),
    [
        ({"resample_rounds": 2}, 2, 8),
        ({"resample_rounds": 20}, 9, 36),  # every other problem has been drawn
        ({"resample_rounds": 20, "resample_budget": 24}, 2, 6),
        ({"resample_rounds": 20, "resample_budget": 7}, 1, 1),
    ],
)
def test_rounds_budget_and_data_bound_what_is_drawn_and_the_rest_is_trained_on_as_it_is(
    monkeypatch, keys, rounds, fresh
):
    ((drawn, entries, figures),) = resample(Together(1, monkeypatch), {*NAMES}, NAMES[:4], **keys)
    assert (figures["resample_rounds"], figures["resampled_groups"], figures["no_signal_fraction"]) == (
        rounds,
        fresh,
        1,
    )
    assert drawn.problem_ids[::GROUP] == NAMES[:4] == entries[-1]["without_signal"] and not entries[-1]["kept"]
    assert len(entries[-1]["dropped"]) == fresh == len({*entries[-1]["dropped"]}) and figures["kept_fraction"] == 0


@pytest.mark.parametrize(
    ("weak", "processes", "group", "most", "wanted"),
    [
        *((3, 1, 8, 99, 3), (3, 2, 8, 99, 3), (3, 16, 8, 99, 4), (1, 8, 4, 99, 2), (1, 3, 8, 99, 3)),
        *((5, 1, 8, 4, 4), (5, 16, 8, 3, 2), (1, 16, 8, 1, 0), (1, 1, 8, 0, 0)),
    ],
)
def test_a_round_gives_every_process_as_many_rows(weak, processes, group, most, wanted):
    found = groups_to_draw(weak, processes, group, most)
    assert found == wanted and found * group % processes == 0


def test_fresh_problems_are_a_function_of_seed_and_step_alone():
    def order(seed: int = 0, step: int = 5, own: list[str] = NAMES[:4]) -> list[int]:
        fresh = FreshProblems(NAMES, own, seed, step, in_order=False)
        return [*fresh.take(3), *fresh.take(len(fresh))]

    assert order() == order() and sorted(order()) == [*range(4, 40)]
    assert len({tuple(order(seed, step)) for seed in (0, 1) for step in (5, 6)}) == 4
    assert [place for place in order(own=NAMES[:2]) if place > 3] == order()


def test_fresh_problems_of_a_curriculum_are_the_steps_neighbours():
    fresh = FreshProblems(NAMES, NAMES[20:24], 0, 5, in_order=True)
    assert fresh.take(4) == [19, 24, 18, 25]
