"""Environments on openenv's own server: a module that .venv-openenv runs, with a name, a port and its sessions."""

import sys
import threading
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core import (
    Action,
    CallToolAction,
    CallToolObservation,
    EnvClient,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)
from openenv.core.client_types import StepResult
from openenv.core.env_server.mcp_environment import MCPEnvironment
from pydantic import Field

from recipes.environments import calculator

SESSIONS = 4


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="between 1 and 9")


class Answer(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    """The number is that of the column `number`, or drawn with `seed`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, number=None):
        self._state = State(step_count=0)
        self.number = number or 1 + seed % 9
        return Answer(hint=f"One of 1 to 9 (seed {seed}).")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == 0:
            raise ValueError("zero was never an option")
        if action.number < 0:
            time.sleep(-action.number)
        if action.number == self.number:
            return Answer(hint="right", done=True, reward=1.0)
        return Answer(hint="higher" if action.number < self.number else "lower", reward=-0.1)

    @property
    def state(self):
        return self._state


class GuessClient(EnvClient[Guess, Answer, State]):
    """A client as environments ship them, with actions and observations of their own types."""

    def _step_payload(self, action):
        return {"number": action.number}

    def _parse_result(self, payload):
        hint = payload["observation"]["hint"].upper()
        return StepResult(Answer(hint=hint), reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


class Arithmetic(GuessEnvironment):
    """recipes/environments/calculator.py, which earns nothing."""

    def reset(self, seed=None, **columns):
        return Answer()

    def step(self, action, timeout_s=None, **kwargs):
        return Answer(hint=calculator.Calculator().calculate(action.expression))


class Expression(Action):
    expression: str


class Unrewarded(GuessEnvironment):
    def step(self, action, timeout_s=None, **kwargs):
        return Answer(hint="over", done=True)


class Words(Action):
    words: str


class Echo(GuessEnvironment):
    """Says what it hears until it hears `end`."""

    def reset(self, seed=None, **columns):
        return Answer()

    def step(self, action, timeout_s=None, **kwargs):
        return Answer(hint=action.words[::-1], done=action.words == "end", reward=float(len(action.words)))


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("calculator")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @tools.tool
        def divide(a: int, b: int) -> float:
            """Divide a by b."""
            return a / b

        super().__init__(tools)
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=True, reward=0.0)

    @property
    def state(self):
        return self._state


KINDS = {
    "guess": (GuessEnvironment, Guess, Answer),
    "arithmetic": (Arithmetic, Expression, Answer),
    "unrewarded": (Unrewarded, Guess, Answer),
    "echo": (Echo, Words, Answer),
    "calculator": (Calculator, CallToolAction, CallToolObservation),
    "no_action": (GuessEnvironment, Action, Answer),
}


def serve(name: str, port: int, sessions: int = SESSIONS) -> uvicorn.Server:
    """A server of openenv in a thread, once it answers."""
    app = create_fastapi_app(*KINDS[name], max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
    threading.Event().wait()
