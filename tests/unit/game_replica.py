"""The guessing game on a stand-in replica: what it plays depends on the tokens before a turn and on nothing else."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from tests.unit.fake_replica import FakeReplica

GROUP, TURNS = 4, 4
# Configuration of a run that plays the game; a step has 4 groups.
KEYS: dict[str, Any] = {
    "environment": "recipes.environments.guess:GuessNumber",
    "environment.max_turns": TURNS,
    "data.answer_format": "any",
    "data.system_prompt": "null",
    "reward.functions": "[]",
    "reward.options": "{}",
    "rollout.backend": "server",
    "rollout.group_size": GROUP,
    "rollout.max_prompt_length": 64,
    "rollout.max_completion_length": 160,
    "rollout.canary_prompts": 0,
    "rollout.max_sampler_k3": 1e6,
    "rollout.server_wait_s": 20,
    "server.base": "/none",
    "watch.completions_every": 1,
}


def make_game_model(folder: Path) -> Path:
    """A model of recipes/tiny_tools.py that was not trained."""
    from recipes.tiny_tools import main

    size = "--task guess --steps 0 --hidden 64 --layers 1 --problems 100 --heldout 20 --processes 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_tools.py", "--out", str(folder), *size.split()])
        main()
    return folder


class GameReplica(FakeReplica):
    """Guesses a number by the tokens of a context; the completions of a prompt start with a number each. `turns`
    counts the contexts that it was asked to go on from."""

    def __init__(self, model: Path):
        from kit.weights.frozen_base import hash_base, load_nf4

        self.names = AutoTokenizer.from_pretrained(model)
        base = hash_base(load_nf4(model, dtype="float32", double_quantization=True, device="cpu"))
        facts = {"tokenizer_hash": tokenizer_hash(self.names), "vocab_size": len(self.names)}
        super().__init__(base_hash=base["hash"], **facts)
        self.turns: Counter[tuple[int, ...]] = Counter()
        self.one_at_a_time = threading.Lock()
        self.before["generate"] = self.play

    def play(self, body: dict) -> dict:
        ids = tuple(decode_ids(body["token_ids"]).tolist())
        with self.one_at_a_time:  # a fast tokenizer is not made for several threads
            turn = self.go_on(ids)
        sample = {
            "token_ids": encode_ids(turn),
            "logprobs": encode_floats([-5.78] * len(turn)),
            "finish_reason": "stop",
        }
        return {"version": body["version"], "samples": [sample]}

    def go_on(self, ids: tuple[int, ...]) -> list[int]:
        """Token ids of the turn after these."""
        number = self.turns[ids]
        self.turns[ids] += 1
        text = self.names.decode(ids)
        is_first = "<|im_start|>tool" not in text
        guess = 1 + (sum(ids) + (number % GROUP if is_first else 0)) % 10
        said = f'<tool_call>{{"name": "guess", "arguments": {{"number": {guess}}}}}</tool_call>'
        turn = self.names.encode("Found." if "found" in text else said, add_special_tokens=False)
        return [*turn, self.names.eos_token_id]
