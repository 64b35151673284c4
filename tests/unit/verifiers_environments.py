"""Environments with real classes of the package verifiers, in .venv-verifiers."""

import asyncio
import time

import verifiers as vf
from datasets import Dataset

from recipes.environments.calculator import Calculator

CLEANED: list[str] = []
ROWS = [{"question": f"What is {number} plus {number}?", "answer": str(2 * number)} for number in (1, 2, 3)]


def right(completion, answer) -> float:
    return float(completion[-1]["content"].endswith(answer)) if completion else 0.0


def broken(completion) -> float:
    raise RuntimeError("the judge is down")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    if a == 13:
        raise ValueError("unlucky")
    if a == 99:
        time.sleep(5)
    return a + b


async def sleep(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


class Guess(vf.MultiTurnEnv):
    """The number is the answer; `higher` or `lower` until it is said."""

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    @vf.stop
    async def is_found(self, state) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        state["guesses"] += 1
        said = messages[-1].content
        if said == "raise":
            raise KeyError("no such thing")
        if said == "infra":
            raise vf.InfraError("the sandbox is gone")
        if said == "hang":
            await asyncio.sleep(60)
        if said == "end":
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return []
        return [{"role": "user", "content": "higher" if said < state["answer"] else "lower"}]


class Rewrites(Guess):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if len(messages) > 2:
            messages[0] = messages[0].model_copy(update={"content": "Be very brief."})
        return messages


def found(completion, answer, state, level=None) -> float:
    return float(completion[-1]["content"] == answer) - 0.1 * state["guesses"]


def group(completions) -> list[float]:
    return [0.0] * len(completions)


class Cleaned(Guess):
    @vf.cleanup
    async def note(self, state):
        CLEANED.append("state")


class Other(vf.Environment):
    async def rollout(self, input, client, model, sampling_args=None):
        raise AssertionError("refused before it plays")


GUESSING = {"guess": Guess, "rewrites": Rewrites, "cleaned": Cleaned}
FUNCTIONS = {"broken": broken, "group": group}


def load_environment(kind: str = "single"):
    common = {"dataset": Dataset.from_list(ROWS), "system_prompt": "Be brief."}
    if kind == "raises":
        raise ValueError("no such difficulty")
    if kind == "tool":
        return vf.ToolEnv(tools=[add, sleep], rubric=vf.Rubric(funcs=[right]), max_turns=4, **common)
    if kind == "calculator":
        form = {"error_formatter": lambda error: str({"error": str(error)})}
        return vf.ToolEnv(tools=[Calculator().calculate], **form, **common)
    if kind in GUESSING:
        return GUESSING[kind](rubric=vf.Rubric(funcs=[found]), **common)
    if kind == "several":
        return vf.EnvGroup(envs=[load_environment("guess"), load_environment("tool")], env_names=["guess", "tool"])
    if kind == "nothing":
        return Other(**common)
    if kind == "text":
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": "1 + 1 =", "answer": "2"}]))
    if kind == "sampling":
        common["sampling_args"] = {"stop": ["\n"], "temperature": 0.5}
    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[FUNCTIONS.get(kind, right)]), **common)
