"""Test doubles for episodes: a small tokenizer with tools, TRL environments, and a sampler with scripted turns."""

import asyncio
import functools
import random
import threading
import time
from typing import Any

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.environments.load import load_environment
from kit.rollout.episode_tokens import EpisodeTokens
from kit.rollout.episodes import EpisodeResult, EpisodeRunner, Turn
from tests.conftest import CONFIG

PROMPT = [{"role": "user", "content": "What is 2+3?"}]


@functools.cache
def _tokenizer() -> Any:
    from recipes.tiny_tools import make_sums, make_tokenizer, show_sum

    rng = random.Random(0)
    return make_tokenizer([show_sum(row, rng) for row in make_sums(60, False, rng)], 4096)


def tokenizer(template: str | None = None) -> Any:
    """The tokenizer of recipes/tiny_tools.py, with its own chat template or TRL's of a family."""
    import copy

    import trl.chat_template_utils as templates

    made = copy.deepcopy(_tokenizer())
    if template is not None:
        made.chat_template = getattr(templates, f"{template}_chat_template")
        made.response_template = None
    return made


class Counter:
    """Counts in its own episode."""

    def __init__(self, start: int = 0):
        self.start, self.resets = start, 0

    def reset(self, gold: str = "0", **columns: Any) -> str | None:
        self.count, self.resets, self.gold = self.start, self.resets + 1, gold
        return f" Count to {gold}." if gold != "0" else None

    def add(self, number: int) -> int:
        """
        Adds to the count.

        Args:
            number: What to add.
        """
        self.count += number
        return self.count

    def fail(self) -> str:
        """Raises an error."""
        raise ValueError("no such thing")

    async def wait(self, seconds: float) -> str:
        """
        Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    def hang(self, seconds: float) -> str:
        """
        Blocks.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "done"


class PaidCounter(Counter):
    def get_reward(self) -> float | None:
        return None if self.count < 0 else float(self.count)


class LatePaidCounter(Counter):
    async def get_reward(self) -> float:
        await asyncio.sleep(self.count)
        return 1.0


def double(number: int) -> int:
    """
    Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def untyped(number) -> int:
    """
    Doubles a number.

    Args:
        number: The number.
    """
    return 2 * number


def undocumented(number: int) -> int:
    return 2 * number


def undescribed(number: int) -> int:
    """Doubles a number."""
    return 2 * number


BOTH = {"counter": Counter, "paid": Counter}
MIXED = {"counter": Counter, "paid": PaidCounter}
NUMBER = 5


class NoReset:
    def act(self) -> str:
        """Acts."""
        return ""


class Broken:
    def __init__(self):
        raise RuntimeError("no licence")


class Needy:
    def reset(self, secret: str) -> None: ...


class CountingCalculator:
    """A calculator that pays for each call, as `recipes.environments.calculator` does not."""

    def reset(self, **columns: Any) -> None:
        self.calls = 0

    def calculate(self, expression: str) -> str:
        """
        Works out an expression.

        Args:
            expression: Whole numbers joined by +, - and *.
        """
        from recipes.environments.calculator import Calculator

        self.calls += 1
        return Calculator().calculate(expression)

    def get_reward(self) -> float:
        return float(self.calls)


class NoisyCalculator(CountingCalculator):
    """One whose first observation differs from episode to episode of a group."""

    made = 0

    def reset(self, **columns: Any) -> str:
        super().reset()
        NoisyCalculator.made += 1
        return "?" * (NoisyCalculator.made % 3)


class Unknowable(CountingCalculator):
    def calculate(self, expression: str) -> str:
        """
        Works out an expression.

        Args:
            expression: The expression.
        """
        raise OSError("the calculator is broken")


HERE = __name__


def config(**keys: Any) -> Config:
    """The tiny configuration with keys of `environment`; those with `__` are of other groups."""
    given = [(key.replace("__", "."), value) for key, value in keys.items()]
    return load_config(CONFIG, [f"--{key if '.' in key else f'environment.{key}'}={value}" for key, value in given])


def runner(of: Any = None, **keys: Any) -> EpisodeRunner:
    """The runner of a configuration, with `of` as its tokenizer."""
    made = config(**{"rollout__max_prompt_length": 4000, "rollout__max_completion_length": 2000} | keys)
    environment = load_environment(made)
    tokens = EpisodeTokens(of or tokenizer(), made.data.chat_template_kwargs, environment.takes_tools)
    return EpisodeRunner(environment, tokens, made)


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Script:
    """A `TurnSampler` that says the texts of each episode, turn by turn; a text without `<|im_end|>` never stops."""

    def __init__(self, of: Any, texts: list[list[str]], version: int = 3, has_logps: bool = False):
        self.of, self.texts, self.version, self.has_logps = of, texts, version, has_logps
        self.asked: list[tuple[int, int, int]] = []  # episode, tokens before, most
        self.left: list[int] = []
        self.said = [0] * len(texts)

    def ids(self, episode: int, most: int) -> list[int]:
        text = self.texts[episode][self.said[episode]]
        self.said[episode] += 1
        return self.of(text, add_special_tokens=False)["input_ids"][:most]

    async def turn(self, episode: int, prompt_ids: list[int], max_tokens: int) -> Turn:
        assert threading.current_thread().name == "episodes"
        self.asked.append((episode, len(prompt_ids), max_tokens))
        ids = self.ids(episode, max_tokens)
        logps = [-0.25 - number for number in range(len(ids))] if self.has_logps else None
        return Turn(ids, logps, self.version + self.said[episode] - 1)

    def leave(self, episode: int) -> None:
        self.left.append(episode)


def play(made: EpisodeRunner, texts: list[list[str]], rows: list[dict] | None = None, **keys: Any) -> list[Any]:
    """The results of an episode for each list of texts."""
    script = Script(made.tokens.tokenizer, texts, **keys)
    rows = rows or [{"prompt": PROMPT, "gold": "0"} for _ in texts]
    results: list[EpisodeResult] = made.submit(rows, script, [made.tokens.tokenizer.eos_token_id]).result(30)
    assert sorted(script.left) == list(range(len(texts)))
    return results
