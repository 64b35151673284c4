"""OpenEnv environments as episodes: one session on an environment server for each.

    environment:
      factory: openenv
      options: {url: "http://127.0.0.1:8000"}

The fields of the environment's action become one tool, an MCP environment's tools become tools of their own, and with
`action: text` the model's text is the action. Needs the package openenv, written for the version in `VERSION`.
"""

import asyncio
import hashlib
import importlib
import inspect
import json
import os
import re
import typing
from collections import Counter
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx

from kit.core.config.schema import EnvironmentConfig
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.environments.episode import Message, UnknownEpisode
from kit.environments.event_loop import EventLoop
from reward.own import imported

VERSION = "0.10.0"
CONNECT_S = 10.0  # longest wait for the server's pages, and for a session while it has none free
CLOSE_S = 5.0  # longest wait for the server to take note that a session is over
OWN_FIELDS = ("metadata", "done", "reward")  # of every action and observation: not for the model
LOCAL = ("localhost", "127.0.0.1", "::1")
KEY = "environment.options"


class OpenEnvironment:
    """The environment behind one server, after checking that the server answers and what its actions are."""

    def __init__(
        self,
        settings: EnvironmentConfig,
        /,
        *,
        url: str,
        client: str | None = None,
        action: Literal["tool", "text"] = "tool",
        field: str | None = None,
        tool: str = "step",
        observation: list[str] | None = None,
        reward: Literal["sum", "last"] = "sum",
        token_env: str | None = None,
    ):
        """
        url: of the server, http or ws.
        client: module:Class, the environment's own `EnvClient`, for actions and observations that it converts; null:
            the generic one, which sends and receives the fields as they are.
        action: `tool`, or `text` for a model that acts by what it writes.
        field: of the action, for the text; null: the only one that must be given.
        tool: name of the tool, unless the environment has tools of its own.
        observation: fields that the model reads; null: all.
        reward: the sum of an episode's rewards, or the last.
        token_env: environment variable whose value is sent as a bearer token, for a private server.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.netloc:
            raise BadInput(f"{KEY}.url is {url!r}, not an address such as http://127.0.0.1:8000.")
        if action == "tool" and field is not None:
            raise BadInput(f"{KEY}.field is {field!r}, which only `action: text` uses. Set {KEY}.action: text.")
        self.url, self.headers, self.settings = url.rstrip("/"), _authorization(token_env), settings
        self.observed, self.reward_of = observation, reward
        self._package = _package()
        self._client, self._action_type = _client_class(client, self._package)
        self.action_schema = self._read_action_schema()
        self.loop = EventLoop("openenv")
        # An MCP environment has one action, the call of a tool.
        self.is_mcp = {"tool_name", "arguments"} <= self.action_schema["properties"].keys()
        self.text_field, self.tools = None, None
        if action == "text":
            self.text_field = self._field_of_text(field)
        elif self.is_mcp:
            self.tools = self._list_tools()
        else:
            self.tools = [_function(tool, self.action_schema.get("description"), _without_own(self.action_schema))]
        self.name, self.owns_reward, self.takes_tools = "openenv", True, self.tools is not None

    def start(self, row: dict[str, Any]) -> "OpenEnvEpisode":
        """Open a session and reset it with the columns of `row`.

        Without a column `seed` it gets one from the problem, so the episodes of a group begin alike.
        """
        columns = {key: value for key, value in row.items() if key != "prompt" and _is_json(value)}
        columns.setdefault("seed", _seed(row))
        try:
            client, result = self.loop.wait(self._open(columns))
        except KitError:
            raise
        except RuntimeError as error:  # openenv's, for an error that the server reports
            raise UnknownEpisode("reset", f"{self.url} could not reset: {_reported(error)[1]}") from error
        except Exception as error:  # those of websockets share no base with OSError
            raise UnknownEpisode("unreachable", f"{self.url} opened no session: {_said(error)}") from error
        try:
            return OpenEnvEpisode(self, client, row["prompt"], result)
        except BaseException:
            self.loop.start(_ended(client))
            raise

    async def _open(self, columns: dict[str, Any]) -> tuple[Any, Any]:
        """A connected client and the result of a reset with `columns`.

        While the server has no free session it is asked again: those that were just closed may still be counted.
        """
        deadline = asyncio.get_running_loop().time() + CONNECT_S
        while True:
            client = self._new_client()
            try:
                await client.connect()
                result = await client.reset(**columns)
            except BaseException as error:
                await client.close()
                code, told = _reported(error)
                if code != "CAPACITY_REACHED":
                    raise
                if asyncio.get_running_loop().time() > deadline:
                    raise CheckFailed(
                        f"{self.url} has no free session for an episode: {told} All episodes of a step are "
                        "open at once. Start the server with a larger max_concurrent_envs, which its environment "
                        "must support, or take fewer completions a step."
                    ) from None
            else:
                return _kept_to_its_session(client), result
            await asyncio.sleep(0.1)

    def _new_client(self) -> Any:
        """A client for one session. An environment's own class may take fewer arguments than openenv's."""
        wanted = {
            "connect_timeout_s": CONNECT_S,
            "message_timeout_s": self.settings.tool_timeout_s,
            "headers": self.headers,
        }
        known = inspect.signature(self._client).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            wanted = {key: value for key, value in wanted.items() if key in known}
        return self._client(base_url=self.url, **wanted)

    def _read_action_schema(self) -> dict[str, Any]:
        """The JSON schema of the action, from the server; `BadInput` if it is down or the action has no fields."""
        parts = urlsplit(self.url)
        base = urlunsplit(parts._replace(scheme=parts.scheme.replace("ws", "http")))
        try:
            direct = parts.hostname in LOCAL  # not through the proxy of HTTP_PROXY
            with httpx.Client(timeout=CONNECT_S, headers=self.headers, trust_env=not direct) as pages:
                health = pages.get(f"{base}/health").raise_for_status().json()
                schema = pages.get(f"{base}/schema").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise BadInput(
                f"{KEY}.url: no OpenEnv server answers at {self.url} ({_said(error)}). Start it before the run, for "
                "example with `uvicorn server.app:app --port 8000` in the environment's folder."
            ) from None
        if not isinstance(health, dict) or health.get("status") != "healthy":
            raise BadInput(f"{KEY}.url: the server at {self.url} is not healthy, it answers {health!r:.100}.")
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict) or not action.get("properties", {}).keys() - {*OWN_FIELDS}:
            raise BadInput(
                f"{KEY}.url: the action of the environment at {self.url} has no fields, so there is nothing the model "
                "could do. Pass its own Action class to openenv's create_app."
            )
        return action

    def _field_of_text(self, field: str | None) -> str:
        """Name of the action's field that takes the model's text."""
        fields = _without_own(self.action_schema)
        if field is None:
            if len(fields["required"]) != 1:
                raise BadInput(
                    f"{KEY}.field: `action: text` gives the model's text to one field, and the action at {self.url} "
                    f"requires {', '.join(fields['required']) or 'none'} of {', '.join(fields['properties'])}. "
                    "Name one, or use `action: tool`."
                )
            field = fields["required"][0]
        if field not in fields["properties"]:
            raise BadInput(
                f"{KEY}.field: the action at {self.url} has no field {field!r}, it has "
                f"{', '.join(fields['properties'])}."
            )
        if missing := [name for name in fields["required"] if name != field]:
            raise BadInput(
                f"{KEY}.field: the action at {self.url} also requires {', '.join(missing)}, which a text does not "
                "give. Use `action: tool`."
            )
        return field

    def _list_tools(self) -> list[dict]:
        """The tools of an MCP environment, as schemas for a chat template."""

        async def listed() -> list[dict]:
            client = self._new_client()
            try:
                await client.connect()
                result = await client.step(self._package.core.ListToolsAction())
                return _as_dict(result.observation).get("tools") or []
            finally:
                await client.close()

        try:
            found = self.loop.wait(listed())
        except Exception as error:  # openenv's and those of websockets
            raise BadInput(f"{KEY}.url: the environment at {self.url} lists no tools: {_said(error)}") from None
        if not found:
            raise BadInput(f"{KEY}.url: the MCP environment at {self.url} has no tools.")
        return [_function(one["name"], one.get("description"), one["input_schema"]) for one in map(_as_dict, found)]

    def action_of(self, name: str, arguments: dict[str, Any]) -> Any:
        """The action of a call; pydantic's `ValidationError` if the client's type refuses the arguments."""
        if self.is_mcp:
            return self._package.core.CallToolAction(tool_name=name, arguments=arguments)
        return arguments if self._action_type is None else self._action_type.model_validate(arguments)

    def refusal(self, arguments: dict[str, Any], told: str) -> str:
        """Why the server refused an action, from the schema: its answer, `told`, does not say."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        found = best_match(Draft202012Validator(self.action_schema).iter_errors(arguments))
        return told if found is None else found.message

    def text_of(self, observation: Any) -> str:
        """What the model reads of an observation: its text, or its fields as JSON if there are several."""
        fields = _as_dict(observation)
        if self.is_mcp and "tool_name" in fields:
            return _mcp_text(fields)
        if self.observed is None:
            fields = {key: value for key, value in fields.items() if key not in OWN_FIELDS}
        elif missing := [key for key in self.observed if key not in fields]:
            raise BadInput(
                f"{KEY}.observation names {missing[0]!r}, and the observation has {', '.join(fields) or 'no fields'}."
            )
        else:
            fields = {key: fields[key] for key in self.observed}
        return _text(next(iter(fields.values()))) if len(fields) == 1 else _text(fields or None)


class OpenEnvEpisode:
    """One session. For reward functions: `observation` is the last one, `rewards` are those of the steps, `done` is
    what the server said last."""

    def __init__(self, environment: OpenEnvironment, client: Any, prompt: list[Message], first: Any):
        self._environment, self._client = environment, client
        self.tools, self.instance = environment.tools, self
        self.tool_calls, self.failures = 0, Counter[str]()
        self.observation, self.done = first.observation, bool(first.done)
        self.rewards: list[float] = []
        text = environment.text_of(first.observation)
        self.prompt = _with_observation(prompt, text) if text else prompt

    async def respond(self, reply: Message) -> list[Message]:
        """Take the steps of the model's turn; [] if it asks for none or the environment is done."""
        messages: list[Message] = []
        if self._environment.text_field is not None:
            text = await self._step("", {self._environment.text_field: reply.get("content") or ""})
            messages.append({"role": "user", "content": text})
        for call in reply.get("tool_calls") or [] if self.tools else []:
            if not self.done:
                function = call.get("function", call)
                name, arguments = function["name"], function["arguments"]
                messages.append({"role": "tool", "name": name, "content": await self._call(name, arguments)})
        return [] if self.done else messages

    async def cut_off(self, reply: Message) -> None:
        """Nothing: half a turn is no action."""

    async def reward(self) -> float | None:
        """The sum of the steps' rewards, or the last.

        0.0 if the episode was cut off before it earned one; None if the environment ended it and gave none.
        """
        if not self.rewards:
            return None if self.done else 0.0
        return sum(self.rewards) if self._environment.reward_of == "sum" else self.rewards[-1]

    def close(self) -> None:
        """End the session; the server has a new one free when this returns."""
        try:
            self._environment.loop.wait(_ended(self._client), CLOSE_S)
        except (OSError, RuntimeError):  # it is gone already
            pass

    async def _call(self, name: str, arguments: Any) -> str:
        self.tool_calls += 1
        known = [tool["function"]["name"] for tool in self.tools]
        if name not in known:
            self.failures["unknown_tool"] += 1
            return _error(f"there is no tool {name!r}, there are {', '.join(known)}")
        if not isinstance(arguments, dict):
            self.failures["arguments"] += 1
            return _error("the arguments are not a JSON object")
        return await self._step(name, arguments)

    async def _step(self, name: str, arguments: dict[str, Any]) -> str:
        """What the model reads of one step.

        A refused action and an environment that raises leave the session as it was. One that does not answer in time,
        or is lost, takes the state of the episode with it.
        """
        import pydantic

        environment, settings = self._environment, self._environment.settings
        try:
            result = await environment.loop.join(self._stepped(name, arguments))
        except pydantic.ValidationError as error:
            return self._failed("arguments", _said(error))
        except TimeoutError as error:
            self.failures["timeout"] += 1
            raise UnknownEpisode("timeout", f"a step took longer than {settings.tool_timeout_s:g} s") from error
        except RuntimeError as error:  # openenv's, for an error that the server reports
            code, told = _reported(error)
            if code == "VALIDATION_ERROR":
                return self._failed("arguments", environment.refusal(arguments, told))
            return self._failed("raised", told)
        except Exception as error:  # a lost connection: openenv's, or one of websockets'
            self.failures["lost"] += 1
            raise UnknownEpisode("lost", f"{environment.url} lost the session: {_said(error)}") from error
        self.observation, self.done = result.observation, bool(result.done)
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        if environment.is_mcp and (failed := _as_dict(result.observation).get("error")):
            reason = "arguments" if failed["error_type"] in ("invalid_args", "tool_not_found") else "raised"
            return self._failed(reason, failed["message"])
        return environment.text_of(result.observation)

    async def _stepped(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self._client.step(self._environment.action_of(name, arguments))

    def _failed(self, reason: str, text: str) -> str:
        """Count a failed call; the text is what the model reads, unless `environment.on_tool_error` forbids."""
        self.failures[reason] += 1
        if reason == "raised" and self._environment.settings.on_tool_error == "unknown":
            raise UnknownEpisode(reason, text)
        return _error(text)


def _package() -> ModuleType:
    """The package openenv, with its `core` imported."""
    try:
        package = importlib.import_module("openenv")
        importlib.import_module("openenv.core")
    except ImportError as error:
        raise BadInput(
            f"environment.factory: openenv needs the package openenv {VERSION} ({error}). `make openenv` creates an "
            "environment that has it beside everything a run needs: start the run with .venv-openenv/bin/python."
        ) from None
    return package


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise BadInput(f"{KEY}.token_env is {variable!r}, and that environment variable is not set.")
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _client_class(name: str | None, package: ModuleType) -> tuple[type, Any]:
    """A subclass of openenv's `EnvClient` and the type of its actions, None for plain fields."""
    if name is None:
        return package.core.GenericEnvClient, None
    found = imported(name, f"{KEY}.client")
    if not isinstance(found, type) or not issubclass(found, package.core.EnvClient):
        raise BadInput(f"{KEY}.client: {name!r} is no subclass of openenv's EnvClient.")
    for base in (base for one in found.__mro__ for base in getattr(one, "__orig_bases__", ())):
        action = next(iter(typing.get_args(base)), None)
        if isinstance(action, type) and issubclass(action, package.core.Action):
            return found, action
    return found, None


def _kept_to_its_session(client: Any) -> Any:
    """Make a connected client raise once its connection is lost.

    openenv's (0.10.0, `EnvClient._ensure_connected`) opens another session, which was never reset, and steps there.
    """
    opened = client._ws

    async def ensure() -> None:
        if client._ws is not opened or opened.close_code is not None:
            raise ConnectionError("the connection was closed")

    client._ensure_connected = ensure
    return client


async def _ended(client: Any) -> None:
    await client.close()  # which must be called on the loop


def _without_own(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an action without the fields that every action has."""
    fields = {name: value for name, value in schema["properties"].items() if name not in OWN_FIELDS}
    required = [name for name in schema.get("required", []) if name in fields]
    kept = {key: value for key, value in schema.items() if key == "$defs"}
    return {"type": "object", "properties": fields, "required": required, **kept}


def _function(name: str, description: str | None, parameters: dict[str, Any]) -> dict:
    about = " ".join((description or name).split())
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _with_observation(prompt: list[Message], text: str) -> list[Message]:
    """The prompt with the first observation behind its last message."""
    last = prompt[-1]
    return [*prompt[:-1], last | {"content": f"{last['content']}\n\n{text}" if last["content"] else text}]


def _mcp_text(observation: dict[str, Any]) -> str:
    """The result of an MCP tool, as its client returns it: its data, or the text of its content."""
    result = observation.get("result")
    if not isinstance(result, dict):
        return _text(result)
    if result.get("data") is not None:
        return _text(result["data"])
    parts = result.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
        return "\n".join(part["text"] for part in parts)
    return _text(result)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _as_dict(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else dict(vars(value))


def _seed(row: dict[str, Any]) -> int:
    """31 bits that are the same for all episodes on a problem."""
    problem = json.dumps(row.get("problem_id") or row["prompt"], default=str)
    return int.from_bytes(hashlib.blake2b(problem.encode(), digest_size=4).digest(), "big") >> 1


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _error(text: str) -> str:
    """What the model reads of a failed call, as TRL writes it."""
    return str({"error": text})


def _reported(error: BaseException) -> tuple[str, str]:
    """Code and message of an error that the server reports, as openenv's client words it; "" for any other."""
    found = re.fullmatch(r"Server error: (.*) \(code: (\w+)\)", " ".join(str(error).split()))
    return (found[2], found[1][:300]) if found else ("", _said(error))


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
