"""Environments by TRL's contract (trl 1.16, `GRPOTrainer(environment_factory=…, tools=[…])`), unchanged.

An environment is a class with `reset(**columns) -> str | None`, whose text is appended to the prompt's last message,
and public methods, which the model may call as tools. `get_reward() -> float | None`, plain or async, makes it a
reward. Instances are made once and reset for the next episode. A dict of factories is chosen from by the data's column
`environment`. Tools of `environment.tools` are plain functions that every episode has.

Two things are the kit's: a call has a time limit, and one that raises or is out of time may make the episode unknown
(`environment.on_tool_error`) where TRL lets the model read the error.
"""

import asyncio
import inspect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.environments.episode import Message, UnknownEpisode
from kit.environments.tools import Tool, ToolFailed, call_tool, check_tool, in_thread, is_async
from reward.own import RewardFailed, taken

NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NOT_TOOLS = ("reset", "get_reward")
COLUMN = "environment"  # of the data, which names the factory of a row if there are several


class TrlEnvironment:
    """An `Environment` of TRL factories by name (None: the only one; empty: tools alone) and of `tools`.

    Makes one instance of each, and raises `BadInput` for one that is no environment.
    """

    def __init__(
        self, factories: Mapping[str | None, Callable[[], Any]], tools: list[Tool], limits: EnvironmentConfig
    ):
        self.factories, self.limits = factories, limits
        self.tools = {tool.__name__: tool for tool in tools}
        schemas = [check_tool(tool, f"environment.tools {tool.__name__}") for tool in tools]
        self._schemas: dict[str | None, list[dict]] = {} if factories else {None: schemas}
        self._idle: defaultdict[str | None, list[Any]] = defaultdict(list)
        self._lock = threading.Lock()
        kinds, owners = [], []
        for name, factory in factories.items():
            instance = _made(factory, name)
            where = type(instance).__name__
            _check_reset(instance, where)
            methods = methods_of(instance)
            if twice := sorted(set(methods) & set(self.tools)):
                raise BadInput(f"environment.tools names {twice[0]!r}, which is a method of {where} too. Rename one.")
            self._schemas[name] = schemas + [check_tool(one, f"environment {where}") for one in methods.values()]
            self._idle[name].append(instance)
            kinds.append(where)
            owners.append(callable(getattr(type(instance), "get_reward", None)))
        if any(owners) and not all(owners):
            raise BadInput(
                f"environment: some of {', '.join(kinds)} have get_reward and some do not, so their rewards would not "
                "be comparable. Give all of them one, or none."
            )
        self.owns_reward = any(owners)
        self.takes_tools = any(self._schemas.values())
        self.name = kinds[0] if len({*kinds}) == 1 else COLUMN if kinds else "tools"

    def start(self, row: dict[str, Any]) -> "TrlEpisode":
        """Take an idle instance, or make one, and reset it with the columns that its `reset` takes."""
        if not self.factories:
            return TrlEpisode(self, None, row["prompt"], self._schemas[None])
        name = row.get(COLUMN) if None not in self.factories else None
        if name not in self.factories:
            raise BadInput(f"the data's column {COLUMN} is {name!r}; there are {', '.join(map(str, self.factories))}.")
        with self._lock:
            instance = self._idle[name].pop() if self._idle[name] else None
        if instance is None:
            instance = self.factories[name]()
        columns = row if None in self.factories else {key: value for key, value in row.items() if key != COLUMN}
        observation = _reset(instance, columns)
        prompt = appended(row["prompt"], observation, type(instance).__name__)
        return TrlEpisode(self, instance, prompt, self._schemas[name], name)

    def give_back(self, name: str | None, instance: Any) -> None:
        """Keep an instance for another episode."""
        with self._lock:
            self._idle[name].append(instance)


class TrlEpisode:
    """An `Episode` on one instance, which it has for itself."""

    def __init__(
        self,
        environment: TrlEnvironment,
        instance: Any,
        prompt: list[Message],
        tools: list[dict],
        name: str | None = None,
    ):
        self.environment, self.instance, self.prompt, self.name = environment, instance, prompt, name
        self.tools = tools or None
        self.tool_calls, self.failures = 0, Counter[str]()
        self._functions = environment.tools | ({} if instance is None else methods_of(instance))
        self._is_idle = True  # no call was abandoned in the instance

    async def respond(self, reply: Message) -> list[Message]:
        """The results of the turn's calls: those of plain tools one after another, then those of async ones, as TRL
        orders them."""
        plain, waiting = [], []
        for call in reply.get("tool_calls") or []:
            self.tool_calls += 1
            if call.get("type", "function") != "function":
                self.failures["unsupported"] += 1
                name = call.get("name", "unknown")
                plain.append(_result(name, {"error": f"Unsupported tool call type: {call['type']}"}))
                continue
            called = call.get("function", call)
            if is_async(self._functions.get(called["name"])):
                waiting.append(called)
            else:
                plain.append(await self._call(called))
        return plain + await asyncio.gather(*map(self._call, waiting))

    async def _call(self, called: dict) -> Message:
        name, limits = called["name"], self.environment.limits
        try:
            if name not in self._functions:
                raise ToolFailed("unknown_tool", f"Tool {name} not found.")
            if not isinstance(called["arguments"], dict):
                raise ToolFailed("arguments", f"{name}() takes named arguments, not {called['arguments']!r:.60}")
            return _result(name, await call_tool(self._functions[name], called["arguments"], limits.tool_timeout_s))
        except ToolFailed as error:
            self.failures[error.reason] += 1
            if error.reason == "timeout" and not is_async(self._functions[name]):
                self._is_idle = False
            if limits.on_tool_error == "unknown" and error.reason in ("raised", "timeout", "killed"):
                raise UnknownEpisode(f"tool_{error.reason}", str(error)) from error
            return _result(name, {"error": str(error)})
        except asyncio.CancelledError:
            self._is_idle = False
            raise

    async def cut_off(self, reply: Message) -> None:
        """Nothing: TRL's environments see the calls of whole turns only."""

    async def reward(self) -> float | None:
        """What `get_reward` returns; `RewardFailed` if it raises or returns no number."""
        function, name = self.instance.get_reward, type(self.instance).__name__
        try:
            found = await (function() if is_async(function) else in_thread(function))
        except asyncio.CancelledError:
            self._is_idle = False
            raise
        except (KitError, UnknownEpisode):
            raise
        except Exception as error:  # a user's environment may fail in any way
            raise RewardFailed(f"get_reward of {name} raised {type(error).__name__}: {error}.") from error
        try:
            return None if found is None else float(found)
        except (TypeError, ValueError):
            raise CheckFailed(f"get_reward of {name} returned {found!r:.60}, not a number or None.") from None

    def close(self) -> None:
        if self.instance is not None and self._is_idle:
            self.environment.give_back(self.name, self.instance)


def methods_of(instance: Any) -> dict[str, Tool]:
    """The public methods that the model may call, by name."""
    # Inspect the class: inspecting the instance would evaluate its properties.
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return {name: getattr(instance, name) for name in names if name not in NOT_TOOLS and not name.startswith("_")}


def appended(prompt: list[Message], observation: Any, who: str) -> list[Message]:
    """The prompt with the text of the first observation at the end of its last message."""
    if observation is None:
        return prompt
    if not isinstance(observation, str):
        raise CheckFailed(f"reset of {who} returned {observation!r:.60}; it must be text or None.")
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]


def _made(factory: Callable[[], Any], name: str | None) -> Any:
    try:
        return factory()
    except KitError:
        raise
    except Exception as error:
        which = f" {name!r}" if name else ""
        raise BadInput(f"environment.factory{which} raised {type(error).__name__}: {error}") from error


def _check_reset(instance: Any, where: str) -> None:
    reset = getattr(type(instance), "reset", None)
    if not inspect.isfunction(reset):
        raise BadInput(
            f"environment.factory makes a {where} without a method reset, so it is no environment. Define "
            "reset(self, **columns), which returns the first observation or None."
        )
    if is_async(reset):
        raise BadInput(f"reset of {where} is async, and TRL calls it without await. Make it a plain method.")


def _reset(instance: Any, columns: dict[str, Any]) -> Any:
    """Call `reset` with the columns that it takes."""
    parameters = inspect.signature(instance.reset).parameters.values()
    needed = [one.name for one in parameters if one.kind in NAMED and one.default is one.empty]
    who = type(instance).__name__
    if missing := [name for name in needed if name not in columns]:
        raise BadInput(f"reset of {who} needs an argument {missing[0]!r}; the data has {', '.join(columns)}.")
    try:
        return instance.reset(**taken(instance.reset, columns))
    except (KitError, UnknownEpisode):
        raise
    except Exception as error:
        raise UnknownEpisode("reset", f"reset of {who} raised {type(error).__name__}: {error}") from error


def _result(name: str, value: Any) -> Message:
    """A tool's result as a message, as TRL writes it; blocks of text are joined."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and one.get("type") == "text" for one in value):
        value = "".join(one["text"] for one in value)
    return {"role": "tool", "name": name, "content": str(value)}
