"""Group rewards where groups span processes: each group is judged once, whole, and its rewards reach its rows."""

import pickle
import sys

import pytest
import torch

from kit.core.config.schema import RewardConfig
from kit.train import group_rewards
from kit.train.group_rewards import give_groups, take_rewards
from reward import reward_functions

MODULE = """
CALLS = []
def rank(completions, problem_id, level, environments=None):
    CALLS.append((completions, problem_id, level, environments))
    order = sorted(completions)
    return [None if one == "f" else float(order.index(one)) for one in completions]
rank.group = True
"""
TEXTS, SIZE = "lkjihgfedcba", 4  # three groups
ROWS = [{"prompt": "p", "problem_id": str(n // SIZE), "level": n, "gold": "1"} for n in range(len(TEXTS))]


@pytest.fixture
def reward(tmp_path, monkeypatch):
    (tmp_path / "kit_group_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "kit_group_rewards", raising=False)
    config = RewardConfig(functions=["kit_group_rewards:rank"], max_unknown_fraction=1.0)
    return lambda: reward_functions(config, ["level"], SIZE)[0][0]


@pytest.mark.parametrize("processes", [1, 2, 4, 6, 12])
def test_every_group_is_judged_once_by_the_process_that_has_its_first_row(reward, monkeypatch, processes):
    share, functions = len(TEXTS) // processes, [reward() for _ in range(processes)]
    monkeypatch.setattr(group_rewards, "gather_object", lambda mine: everyone if pickle.dumps(mine) else [])
    everyone = [
        {**row, "prompts": row["prompt"], "completions": text, "completion_ids": [1]}
        for row, text in zip(ROWS, TEXTS, strict=True)
    ]
    for process, function in enumerate(functions):
        part = slice(process * share, (process + 1) * share)
        prompts, texts = ["p"] * share, list(TEXTS[part])
        give_groups(
            [function],
            [row | {"environments": lambda: None} for row in ROWS[part]],
            prompts,
            texts,
            [[1]] * share,
            SIZE,
            process,
        )
        others = {"level": [-1] * share, "problem_id": ["-"] * share, "environments": [object()] * share}
        assert function(prompts=prompts, completions=texts, **others) == [0.0] * share
        assert len(function.found) == sum(n % SIZE == 0 for n in range(part.start, part.stop)) * SIZE
    assert sys.modules["kit_group_rewards"].CALLS == [
        (list(TEXTS[start : start + SIZE]), [str(start // SIZE)] * SIZE, list(range(start, start + SIZE)), None)
        for start in range(0, len(TEXTS), SIZE)
    ]
    found = [torch.nan if one is None else one for function in functions for one in function.found]
    monkeypatch.setattr(group_rewards, "gather_object", lambda mine: found)
    for function in functions:
        rewards = torch.zeros(len(TEXTS), 2)
        take_rewards([function], ["other", function.__name__], rewards)
        assert rewards[:, 0].tolist() == [0.0] * len(TEXTS)
        ranks = [None if rank != rank else rank for rank in rewards[:, 1].tolist()]
        assert ranks == [3.0, 2.0, 1.0, 0.0, 3.0, 2.0, None, 0.0, 3.0, 2.0, 1.0, 0.0]
        assert function.gathered is None, "the next step is judged anew"
