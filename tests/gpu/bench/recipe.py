"""recipes/grpo_qlora.py with a reward that random text can earn; everything else is the recipe as a user starts it."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import reward
from recipes.grpo_qlora import main
from recipes.parts.errors import run_command


def pay(completions: list, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """0 to 1 by the token ids, so that every group has a spread."""
    return [sum(ids) % 17 / 16 for ids in completion_ids]


if __name__ == "__main__":
    reward.reward_functions = lambda *arguments, **keys: ([pay], None)
    run_command(main)
