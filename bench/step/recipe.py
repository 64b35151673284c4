"""recipes/grpo_qlora.py (grpo_qat.py with policy.quant_cfg) as a user starts it, but with a reward that random text
can earn."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import reward
from kit.core.errors import run_command
from recipes import grpo_qat, grpo_qlora


def pay(completions: list, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """0 to 1 by the token ids, so that every group has a spread."""
    return [sum(ids) % 17 / 16 for ids in completion_ids]


if __name__ == "__main__":
    reward.reward_functions = lambda *arguments, **keys: ([pay], [1.0])
    quantized = any(word.startswith("--policy.quant_cfg=") for word in sys.argv)
    run_command((grpo_qat if quantized else grpo_qlora).main)
