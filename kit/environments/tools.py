"""Tools: plain typed functions that the model calls by name, their schemas, and calls with a time limit.

A call of a plain function runs in a thread of its own, so that a slow one holds up its own episode only. Python cannot
end a thread: one that is out of time is abandoned and counted, and the run stops when `MOST_HUNG` of them still hang.
An async tool is cancelled.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kit.core.errors import BadInput, CheckFailed, KitError
from kit.environments.episode import UnknownEpisode

KEEPS_TIME = "keeps_time"  # attribute of a tool that ends by itself in time
MOST_HUNG = 64  # threads of calls that were abandoned and have not ended
Result = TypeVar("Result")
Tool = Callable[..., Any]

_abandoned: list[threading.Thread] = []


async def in_thread(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """The result of a call in a thread of its own; if cancelled, the thread is abandoned.

    Raises `CheckFailed` if `MOST_HUNG` abandoned ones still hang.
    """
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    if len(_abandoned) >= MOST_HUNG:
        raise CheckFailed(
            f"{len(_abandoned)} calls of tools or environments hang, far beyond environment.tool_timeout_s and "
            "environment.episode_timeout_s, and Python cannot end a thread. Put timeouts around what they wait for, "
            "or make them async."
        )
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(value)
        else:
            outcome.set_exception(error)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(*arguments, **named)
        except StopIteration as stopped:  # which a future cannot hold
            error = RuntimeError(f"StopIteration: {stopped}")
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, value, error)

    # Not a pool: its threads are joined at exit, and a hanging call would keep the run alive.
    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    try:
        return await outcome
    except asyncio.CancelledError:
        _abandoned.append(thread)
        raise


class ToolFailed(Exception):
    """A call without a result: `reason` for the counts, the text for the model."""

    def __init__(self, reason: str, text: str):
        self.reason = reason
        super().__init__(text)


def check_tool(function: Any, where: str) -> dict:
    """The JSON schema of a tool for the chat template, as transformers reads it from types and docstring.

    Raises `BadInput`, prefixed with `where`, that names the argument without a type or description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    name = getattr(function, "__name__", None)
    if name is None:
        raise BadInput(f"{where} is a {type(function).__name__} without a name, not a function.")
    for one in inspect.signature(function).parameters.values():
        if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise BadInput(f"{where}: the model calls {name} with named arguments, and {one} is none. Name it.")
        if one.annotation is one.empty:
            raise BadInput(
                f"{where}: the argument {one.name!r} of {name} has no type, which its schema needs. Annotate it, e.g. "
                f"{one.name}: int."
            )
    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise BadInput(
            f"{where}: {' '.join(str(error).split()).rstrip('.')}. A tool needs a type for every argument and a "
            f'docstring of Google\'s form: what it does, then "Args:" with a line "name: what it is" for each.'
        ) from None


async def call_tool(function: Tool, arguments: dict[str, Any], timeout_s: float) -> Any:
    """The result of a tool, plain or async; `ToolFailed` if the arguments do not fit, it raises, or it takes longer
    than `timeout_s`. A `KitError` or `UnknownEpisode` of the tool is passed on.

    A plain tool is timed in its thread: hundreds of episodes keep the event loop busy, and a result that was there in
    time may be noticed late.
    """
    name, started = function.__name__, time.monotonic()
    in_time: list[Any] = []  # the result of a plain tool

    def run() -> Any:
        value = function(**arguments)
        if time.monotonic() - started <= timeout_s:
            in_time.append(value)
        return value

    try:
        work: Awaitable = function(**arguments) if is_async(function) else in_thread(run)
        async with asyncio.timeout(None if getattr(function, KEEPS_TIME, False) else timeout_s) as limit:
            return await work
    except (KitError, ToolFailed, UnknownEpisode):
        raise
    except Exception as error:  # a user's tool may fail in any way
        if not _fits(function, arguments):
            raise ToolFailed("arguments", str(error)) from None
        if limit.expired():
            if in_time:
                return in_time[0]
            raise ToolFailed("timeout", f"{name} took longer than {timeout_s:g} s") from None
        raise ToolFailed("raised", str(error)) from error


def _fits(function: Tool, arguments: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


def is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)
