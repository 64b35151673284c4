"""Rewards that judge a whole group, in a step whose groups span processes.

Each group is judged once, by the process that has its first row: its rows are gathered before the reward functions
are called and its rewards afterwards, both in the main thread, because async functions run in another one.
"""

from collections.abc import Sequence

import torch
from accelerate.utils import gather_object

from reward import BoundReward

STAY = ("prompt", "environments")  # entries of a row that are not gathered


def give_groups(
    functions: Sequence[BoundReward],
    rows: list[dict],
    prompts: list,
    completions: list,
    token_ids: list[list[int]],
    size: int,
    process: int,
) -> None:
    """Give `functions` the rows of the groups of `size` that begin in this process; called by all processes with
    equally many rows, which follow each other in the order of the processes. Instances of environments stay where they
    are."""
    mine = [
        {
            **{key: row[key] for key in row if key not in STAY},
            "prompts": prompt,
            "completions": completion,
            "completion_ids": ids,
        }
        for row, prompt, completion, ids in zip(rows, prompts, completions, token_ids, strict=True)
    ]
    everyone = gather_object(mine)
    begin = process * len(rows)
    starts = [start for start in range(0, len(everyone), size) if begin <= start < begin + len(rows)]
    judged = [row for start in starts for row in everyone[start : start + size]]
    columns = {key: [row[key] for row in judged] for key in mine[0]}
    for function in functions:
        function.gathered = columns


def take_rewards(functions: Sequence[BoundReward], names: list[str], rewards: torch.Tensor) -> None:
    """Write the rewards of all groups into the functions' columns of `rewards` (N, functions), NaN for unknown."""
    for function in functions:
        found = gather_object([torch.nan if reward is None else reward for reward in function.found])
        column = names.index(function.__name__)
        rewards[:, column] = torch.tensor(found, dtype=rewards.dtype, device=rewards.device)
        function.gathered = None
