"""User-defined reward functions, named `module:function`: import, check the arguments, call, check the result.

Nothing has to be registered: the module is also looked up in the directory where the command was started.
"""

import asyncio
import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from kit.core import own_code
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.core.progress import beat

# Arguments that a run passes to every reward by name; TRL adds `trainer_state`, `log_extra` and `log_metric`.
COLUMNS = ("prompts", "completions", "gold", "problem_id", "completion_ids")
FROM_TRL = ("trainer_state", "log_extra", "log_metric")
MACHINERY = ("pool", "budget")  # keyword-only, supplied by the kit; the rest, except what a run passes, are options
# Columns of the data with these names do not reach rewards: the run passes something else by them.
RESERVED = frozenset((*COLUMNS, *FROM_TRL, *MACHINERY, "prompt", "completion", "environments"))
MOST = 1e18  # in magnitude; a larger reward, squared for the spread of a group, overflows float32
NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFailed(CheckFailed):
    """A user's reward function raised an exception, which is the error's cause."""


def called(name: str, function: Callable, arguments: dict[str, Any]) -> Any:
    """Call the function and return its result; `RewardFailed` names the reward and the exception."""
    try:
        return function(**arguments)
    except KitError:
        raise
    except Exception as error:  # a user's function may fail in any way
        raise _failed(name, error) from error


async def awaited(name: str, function: Callable[..., Awaitable], arguments: dict[str, Any], limit_s: float) -> Any:
    """Result of an async function, or None after `limit_s` seconds; errors as in `called`.

    A late call is cancelled and not waited for, since it may catch the cancellation.
    """
    task = asyncio.ensure_future(function(**arguments))
    done, _ = await asyncio.wait({task}, timeout=limit_s)
    beat()
    if not done:
        task.cancel()
        return None
    try:
        found = task.result()
    except KitError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        raise _failed(name, error) from error
    if found is None:
        raise CheckFailed(f"reward {name!r} returned None, not a list with one number or None for each completion.")
    return found


def _failed(name: str, error: BaseException) -> RewardFailed:
    said = " ".join(str(error).split())
    return RewardFailed(f"reward {name!r} raised {type(error).__name__}: {said[:300] or 'no message'}.")


def is_async(function: Callable) -> bool:
    """Whether a call of the function, or of an instance with `__call__`, returns a coroutine."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def imported(name: str, key: str, may_be_async: bool = False, kinds: tuple[type, ...] = ()) -> Any:
    """Import the function of `module:function`, or an instance of one of `kinds`; `BadInput`, prefixed with the
    configuration's `key`, if only a run directory names it, there is none, or it is async and may not be."""
    own_code.check(name, key)
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may fail in any way on import
        raise BadInput(f"{key} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if isinstance(function, kinds):
        return function
    if not callable(function):
        raise BadInput(f"{key} {name!r} is a {type(function).__name__}, not a function.")
    if is_async(function) and not may_be_async:
        raise BadInput(f"{key} {name!r} is async, but it is called without await. Wrap it with asyncio.run.")
    return function


def imported_taking(name: str, key: str, count: int, takes: str) -> Any:
    """Import the function of `module:function` that is called with `count` positional arguments, which `takes` names;
    `BadInput` if there is none or it cannot be called so."""
    if not all(name.partition(":")):
        raise BadInput(f"{key} is {name!r}. Name a function as module:function.")
    function = imported(name, key)
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise BadInput(f"{key} {name!r} must take {takes}: {error}.") from None
    return function


def source_hash(function: Callable) -> str:
    """BLAKE2b-64 of the file that defines the function; "" if there is none (a class instance, compiled code)."""
    try:
        source = Path(inspect.getsourcefile(function)).read_bytes()
    except (TypeError, OSError):
        return ""
    return hashlib.blake2b(source, digest_size=8).hexdigest()


def check_arguments(name: str, function: Callable, key: str, columns: Sequence[str], options: Sequence[str]) -> None:
    """Raise `BadInput` unless the function can be called with `columns` and `options` by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        raise BadInput(f"{key} {name} has positional-only arguments; a reward is called with named ones.")
    needed = [one.name for one in parameters if one.kind in NAMED and one.default is one.empty]
    if unknown := [one for one in needed if one not in columns and one not in options]:
        raise BadInput(f"{key} {name} needs an argument {unknown[0]!r}; a reward gets {', '.join(columns)}.")


def taken(function: Callable, values: dict[str, Any]) -> dict[str, Any]:
    """The `values` that the function accepts by name; all of them if it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return values
    return {key: value for key, value in values.items() if key in parameters}


def checked_rewards(name: str, found: Any, count: int) -> list[float | None]:
    """Convert a function's result for `count` completions to numbers, with None for unknown ones (None or NaN);
    `CheckFailed` unless each is None or one number of magnitude at most `MOST`."""
    if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        raise CheckFailed(
            f"reward {name!r} returned a {type(found).__name__}, not a list with one number or None for each of "
            f"{count} completions."
        )
    rewards: list[float | None] = []
    for place, one in enumerate(found):
        try:
            number = math.nan if one is None else float(one)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several numbers
            number = None
        if number is None or isinstance(one, str | bytes):
            raise CheckFailed(f"reward {name!r} returned {one!r:.60} for completion {place}, not a number or None.")
        if abs(number) > MOST:  # false for NaN
            raise CheckFailed(
                f"reward {name!r} returned {number:g} for completion {place}; a reward is at most {MOST:g} in size. "
                "Return None for a completion whose reward could not be computed."
            )
        rewards.append(None if math.isnan(number) else number)
    if len(rewards) != count:
        raise CheckFailed(f"reward {name!r} returned {len(rewards)} rewards for {count} completions.")
    return rewards
