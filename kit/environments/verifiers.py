"""Environments of the package verifiers as episodes: SingleTurnEnv, MultiTurnEnv, ToolEnv and what derives from them.

    environment:
      factory: verifiers
      options: {id: my-env, args: {difficulty: hard}}

verifiers runs its own rollout, with its stop conditions, tools and rubric, and asks a client for each turn of the
model. The client here hands that question to the run, which samples, and gives back the turn: no request leaves the
process. `python -m recipes.verifiers_rows` writes an environment's own data set for `data.path`.

Written for the version in `VERSION`, the last with these classes: 0.4 has tasksets and harnesses instead.
"""

import asyncio
import contextvars
import functools
import importlib
import inspect
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.environments.episode import Message, UnknownEpisode
from kit.environments.event_loop import EventLoop
from kit.environments.options import checked_options
from kit.environments.tools import ToolFailed, call_tool
from reward.own import imported

VERSION = "0.3.1"
KEY = "environment.options"
# Sampling arguments that an environment may come with: the configuration's own hold. Any other would change the task.
OVERRIDDEN = ("n", "extra_body", "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed")

# The episode for which the code of an environment or a rubric runs.
_current: contextvars.ContextVar["VerifiersEpisode"] = contextvars.ContextVar("episode")


class VerifiersEnvironment:
    """One environment of verifiers, loaded and checked."""

    def __init__(self, settings: EnvironmentConfig, /, *, id: str, args: dict[str, Any] | None = None):
        """
        id: of the environment: its module, installed or in the directory where the run starts, has `load_environment`.
        args: keyword arguments of `load_environment`.
        """
        self.settings, self.name = settings, module_of(id)
        self.verifiers = load(id, args or {})
        self.loop = EventLoop("verifiers")
        self.client = _client_class()
        self.owns_reward = self.takes_tools = False
        for one in _members(self.verifiers):
            one.timeout_seconds = None  # it would count the time that the run takes to sample
            self.takes_tools |= bool(one.tool_defs)
            for name, tool in getattr(one, "tool_map", {}).items():
                one.tool_map[name] = _bounded(tool, settings)
            for rubric in _rubrics(one.rubric):
                self.owns_reward |= any(rubric.weights) and one.score_rollouts
                rubric.funcs[:] = [
                    _watched(function) if weight else function
                    for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
                ]

    def start(self, row: dict[str, Any]) -> "VerifiersEpisode":
        """Start a rollout on a row and wait for its first question."""
        episode = VerifiersEpisode(self, row)
        try:
            self.loop.wait(episode.ask_first())
        except BaseException:
            episode.close()
            raise
        return episode


class VerifiersEpisode:
    """One rollout. `instance` is its `State`, for reward functions."""

    def __init__(self, environment: VerifiersEnvironment, row: dict[str, Any]):
        self._environment, self._row = environment, row
        self.prompt: list[Message] = []
        self.tools: list[dict] | None = None
        self.instance: Any = None
        self.tool_calls, self.failures = 0, Counter[str]()
        self.doomed: Exception | None = None  # what a tool ended the episode with
        self.unscored: str | None = None  # what a reward function raised
        self._asked: list[Message] = []  # the conversation so far
        self._questions: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()
        self._turn: asyncio.Future[Any] | None = None  # the answer to the last question
        self._rollout: asyncio.Task | None = None

    # On the loop of the run

    async def respond(self, reply: Message) -> list[Message]:
        """What the environment says to the model's turn; [] when the rollout has ended."""
        known = {tool["function"]["name"] for tool in self.tools or ()}
        for call in reply.get("tool_calls") or []:
            self.tool_calls += 1
            if call.get("function", call)["name"] not in known:
                self.failures["unknown_tool"] += 1
        return await self._environment.loop.join(self._answer(reply))

    async def cut_off(self, reply: Message) -> None:
        """End the rollout with a turn that a limit cut off."""
        await self._environment.loop.join(self._end_with(reply))

    async def reward(self) -> float | None:
        """The weighted sum of the rubric. Unknown if a reward function raised, which verifiers counts as 0."""
        await self._environment.loop.join(self._score())
        if self.unscored is not None:
            raise UnknownEpisode("reward_raised", self.unscored)
        return self.instance["reward"]

    def close(self) -> None:
        """End the rollout, if a limit has not, and let the environment and its rubric clean up."""
        self._environment.loop.start(self._clean_up())

    # On the loop of verifiers

    async def ask_first(self) -> None:
        """Start the rollout; its first question is the prompt."""
        environment = self._environment
        _current.set(self)
        row = {"example_id": 0, "answer": self._row.get("gold", "")} | self._row
        self._rollout = asyncio.ensure_future(
            environment.verifiers.rollout(
                {key: value for key, value in row.items() if value is not None}, environment.client(self), "policy", {}
            )
        )
        question = await self._next(environment.settings.episode_timeout_s)
        if question is None:
            raise UnknownEpisode("ended", f"{environment.name} ended before the first turn")
        self.prompt = self._asked = _plain(question[0])
        self.tools = [_schema(tool) for tool in question[1] or ()] or None
        if self.tools and not environment.takes_tools:
            raise CheckFailed(
                f"{environment.name} has no tools, and a row of its data brings some (info.tool_defs). Give the "
                "environment its tool_defs, so the chat template can be checked before the run."
            )

    async def question(self, messages: Any, tools: Any, state: Any) -> Any:
        """The model's turn, for the rollout's client."""
        self.instance = state
        self._turn = asyncio.get_running_loop().create_future()
        self._questions.put_nowait((messages, tools))
        return await self._turn

    async def _next(self, timeout_s: float) -> tuple[Any, Any] | None:
        """The rollout's next question, None when it has ended."""
        question = asyncio.ensure_future(self._questions.get())
        try:
            done, _ = await asyncio.wait({question, self._rollout}, timeout=timeout_s, return_when="FIRST_COMPLETED")
        finally:
            question.cancel()
        if self.doomed is not None:
            raise self.doomed
        if question in done:
            return question.result()
        name = self._environment.name
        if not done:
            self.failures["timeout"] += 1
            raise UnknownEpisode("timeout", f"{name} took longer than {timeout_s:g} s between two turns")
        try:
            self.instance = self._rollout.result()
            error = self.instance["error"]
        except KitError:
            raise
        except Exception as raised:  # the environment's code may fail in any way
            error = raised
        if error is not None:
            self.failures["raised"] += 1
            raise UnknownEpisode("raised", f"{name}: {_said(error)}") from error
        return None

    async def _answer(self, reply: Message) -> list[Message]:
        """Give a turn to the rollout; the new messages of its next question, [] when it has ended."""
        calls, said = len(reply.get("tool_calls") or []), len(self._asked)
        self._turn.set_result(_response(reply, said, is_cut=False))
        # A tool has its own limit, which comes first.
        question = await self._next(self._environment.settings.tool_timeout_s * max(calls, 1) + 1.0)
        if question is None:
            return []
        messages = _plain(question[0])
        if messages[:said] != self._asked or messages[said : said + 1] != _plain(
            [_response(reply, said, False).message]
        ):
            raise CheckFailed(
                f"{self._environment.name} rewrites earlier messages (verifiers' get_prompt_messages), and a run can "
                "only append to the tokens that the model has seen."
            )
        if [_schema(tool) for tool in question[1] or ()] != (self.tools or []):
            raise CheckFailed(
                f"{self._environment.name} changes its tools between turns, and a run can only append to the tokens "
                "that the model has seen."
            )
        self._asked = messages
        return messages[said + 1 :]

    async def _end_with(self, reply: Message) -> None:
        # The flag by which verifiers itself stops when the context is full.
        self.instance["prompt_too_long"] = self.instance["is_truncated"] = True
        self._turn.set_result(_response(reply, len(self._asked), is_cut=True))
        await self._next(self._environment.settings.tool_timeout_s)

    async def _score(self) -> None:
        _current.set(self)
        if not self._rollout.done():  # a limit ended the episode, with a question open
            self._turn.set_exception(importlib.import_module("verifiers.errors").OverlongPromptError())
            await self._next(self._environment.settings.tool_timeout_s)
        await self._environment.verifiers.rubric.score_rollout(self.instance)

    async def _clean_up(self) -> None:
        if self._rollout is not None and not self._rollout.done():
            self._rollout.cancel()
            await asyncio.wait({self._rollout})
        if self.instance is not None:
            await self._environment.verifiers.rubric.cleanup(self.instance)


def load(id: str, args: dict[str, Any]) -> Any:
    """The environment `id` of verifiers; `BadInput` if it cannot be loaded or no run can train on its kind."""
    package = _package()
    function = imported(f"{module_of(id)}:load_environment", f"{KEY}.id")
    args = checked_options(function, args, f"{KEY}.args")
    with _own_signals():
        try:
            found = package.load_environment(id, **args)
        except Exception as error:  # the environment's code may fail in any way
            raise BadInput(f"{KEY}.id: {id!r} cannot be loaded: {_said(error)}") from error
    kinds = (package.MultiTurnEnv, package.EnvGroup)
    for one in _members(found) if isinstance(found, kinds) else [found]:
        if not isinstance(one, package.MultiTurnEnv):
            raise BadInput(
                f"{KEY}.id: {id!r} is a {type(one).__module__}.{type(one).__name__}. A run can train on what derives "
                "from verifiers' MultiTurnEnv (SingleTurnEnv, ToolEnv, StatefulToolEnv) and on groups of them."
            )
        if one.requires_group_rollouts or one.provides_advantages:
            raise BadInput(
                f"{KEY}.id: the rubric of {id!r} scores whole groups, and here each episode is scored by itself. "
                "Move such a score to reward.functions, which see all completions."
            )
        if other := sorted({*one.sampling_args} - {*OVERRIDDEN}):
            raise BadInput(
                f"{KEY}.id: {id!r} asks for the sampling argument {other[0]!r}, which turns are not sampled with here."
            )
    return found


def rows(environment: Any, split: str) -> Iterator[dict[str, Any]]:
    """The rows of an environment's data set, `train` or `eval`: prompt as messages, answer, and its other columns."""
    found = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
    yield from found if found is not None else ()


def _package() -> ModuleType:
    """The package verifiers."""
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise BadInput(
            f"environment.factory: verifiers needs the package verifiers {VERSION} ({error}). `make verifiers` "
            "creates an environment that has it beside everything a run needs: start the run with "
            ".venv-verifiers/bin/python."
        ) from None
    if not hasattr(package, "MultiTurnEnv"):
        raise BadInput(
            f"environment.factory: verifiers {package.__version__} has no MultiTurnEnv. Install {VERSION}, the last "
            "version with these environments; a run cannot train on the tasksets of 0.4."
        )
    return package


def module_of(id: str) -> str:
    """The module of an environment, as verifiers names it."""
    return id.replace("-", "_").split("/")[-1]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the process's handlers: every environment of verifiers installs its own for SIGINT and SIGTERM."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _members(environment: Any) -> list[Any]:
    """The environments of a group, however deep, or the environment itself."""
    children = getattr(environment, "envs", None)
    return [environment] if children is None else [one for child in children for one in _members(child)]


def _rubrics(rubric: Any) -> list[Any]:
    """The rubrics of a group, however deep, or the rubric itself."""
    children = getattr(rubric, "rubrics", None)
    return [rubric] if children is None else [one for child in children for one in _rubrics(child)]


def _bounded(tool: Callable, settings: EnvironmentConfig) -> Callable:
    """A tool with a time limit, in a thread if it is a plain function; what fails is counted."""

    @functools.wraps(tool)
    async def call(**arguments: Any) -> Any:
        episode = _current.get()
        try:
            return await call_tool(tool, arguments, settings.tool_timeout_s)
        except ToolFailed as error:
            episode.failures[error.reason] += 1
            if settings.on_tool_error == "unknown" and error.reason != "arguments":
                episode.doomed = UnknownEpisode(error.reason, str(error))
            raise
        except KitError as error:  # which the environment would turn into an answer
            episode.doomed = error
            raise

    return call


def _watched(function: Callable) -> Callable:
    """A reward function whose exceptions are noted: verifiers counts them as 0."""

    @functools.wraps(function)
    async def score(*arguments: Any, **named: Any) -> float:
        try:
            value = function(*arguments, **named)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _current.get().unscored = f"{function.__name__} raised {_said(error)}"
            raise

    return score


def _client_class() -> Callable[[VerifiersEpisode], Any]:
    """A client of verifiers that asks an episode for the turns."""

    client: Any = importlib.import_module("verifiers.clients").Client

    class RunClient(client):
        def __init__(self, episode: VerifiersEpisode):
            super().__init__(None)
            self.episode = episode

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **named: Any
        ) -> Any:
            return await self.episode.question(prompt, tools, named["state"])

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            return response

        async def close(self) -> None:
            return None

    return RunClient


def _response(reply: Message, place: int, is_cut: bool) -> Any:
    """A turn of the model as verifiers has it. `place` is the number of its message, for the names of its calls."""
    types = importlib.import_module("verifiers.types")
    functions = [call.get("function", call) for call in reply.get("tool_calls") or []]
    calls = [
        types.ToolCall(id=f"call_{place}_{number}", name=one["name"], arguments=json.dumps(one["arguments"]))
        for number, one in enumerate(functions)
    ]
    message = types.ResponseMessage(
        content=reply.get("content") or "",
        reasoning_content=reply.get("reasoning_content") or reply.get("thinking"),
        tool_calls=calls or None,
        finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        is_truncated=is_cut,
    )
    return types.Response(id=f"turn_{place}", created=0, model="policy", message=message)


def _plain(messages: list[Any]) -> list[Message]:
    """Messages of verifiers as a chat template takes them."""
    names = {call.id: call.name for message in messages for call in getattr(message, "tool_calls", None) or ()}
    plain = []
    for message in messages:
        one: Message = {"role": message.role, "content": _text(message)}
        if message.role == "tool":
            one["name"] = names.get(message.tool_call_id, message.tool_call_id)
        if getattr(message, "reasoning_content", None):
            one["reasoning_content"] = message.reasoning_content
        if calls := getattr(message, "tool_calls", None):
            one["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in calls
            ]
        plain.append(one)
    return plain


def _text(message: Any) -> str:
    """The text of a message; `CheckFailed` if it has anything else."""
    if message.role == "text":
        raise CheckFailed("a prompt of verifiers is plain text, and episodes are conversations: use chat messages.")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in message.content]
    if other := [part.get("type") for part in parts if part.get("type") != "text"]:
        raise CheckFailed(f"a message of verifiers has a part of type {other[0]!r}; only text can be rendered.")
    return "\n".join(part["text"] for part in parts)


def _schema(tool: Any) -> dict:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _said(error: BaseException) -> str:
    cause = f" ({_said(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{cause}"
