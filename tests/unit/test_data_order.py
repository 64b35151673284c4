"""A resumed run goes on in the pass over the data in which it stopped, on the problems it was started on."""

import json

import pytest
import torch

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.train import data_order
from kit.train.data_order import check_problems, passes_made, record_problems, skip_passes


class Sampler:
    """As trl's: the order of a pass is drawn from the sampler's own generator when the pass begins."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(50, generator=self.generator).tolist()


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
def test_a_resumed_run_draws_the_orders_that_follow_those_of_its_whole_passes(passes):
    without_end = Sampler()
    orders = [list(without_end) for _ in range(passes + 2)]
    skip_passes(resumed := Sampler(), passes)
    assert [list(resumed), list(resumed)] == orders[passes:]


@pytest.mark.parametrize(
    ("epoch", "passes"), [(0.0, 0), (0.4, 0), (0.98, 0), (1.0, 1), (1.5, 1), (1.9999, 1), (2.0, 2), (7.51, 7)]
)
def test_only_whole_passes_over_the_data_count(tmp_path, epoch, passes):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"epoch": epoch, "global_step": 9}))
    assert passes_made(tmp_path) == passes


IDS = [f"problem-{number}" for number in range(12)]


def dataset(ids: list[str]) -> dict:
    return {"problem_id": ids}


@pytest.mark.parametrize(
    "others",
    [
        IDS[:-1],
        [*IDS, "problem-12"],
        [*IDS[:-1], "problem-99"],
        ["problem-99", *IDS[1:]],
        IDS[::-1],
        [IDS[1], IDS[0], *IDS[2:]],
        [IDS[0], IDS[0], *IDS[2:]],
        [*IDS[:-2], IDS[-2] + IDS[-1], ""],
    ],
    ids=["one less", "one more", "another last", "another first", "reversed", "two swapped", "one twice", "joined"],
)
def test_a_run_is_not_resumed_on_other_problems_nor_on_these_in_another_order(tmp_path, others):
    run = RunDir(tmp_path)
    check_problems(run, dataset(others))  # nothing is recorded of a new run
    record_problems(run, dataset(IDS))
    check_problems(run, dataset(list(IDS)))
    with pytest.raises(BadInput, match=rf"\b12\b.*\b{len(others)}\b"):
        check_problems(run, dataset(others))


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_records_the_problems(tmp_path, monkeypatch, main):
    monkeypatch.setattr(data_order, "is_main_process", lambda: main)
    record_problems(RunDir(tmp_path), dataset(IDS))
    assert (tmp_path / "data.json").exists() == main
