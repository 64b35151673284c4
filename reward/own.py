"""A reward function of the user's, named `module:function`: found, its arguments checked, called, its answer checked.

Nothing of it is entered anywhere: the module is looked for in the directory where the command was started, too.
"""

import hashlib
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput, CheckFailed, KitError

# What a run gives every reward by name; TRL's `trainer_state`, `log_extra` and `log_metric` come with them.
COLUMNS = ("prompts", "completions", "gold", "problem_id", "completion_ids")
FROM_TRL = ("trainer_state", "log_extra", "log_metric")
MOST = 1e18  # in size; the square of a larger reward, in the spread of a group, overflows float32
NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFailed(CheckFailed):
    """A reward function of the user's raised an exception, which is the error's cause."""


def called(name: str, function: Callable, arguments: dict[str, Any]) -> Any:
    """What the function returns; `RewardFailed` names the reward and what it raised."""
    try:
        return function(**arguments)
    except KitError:
        raise
    except Exception as error:  # a function of the user's may fail in any way
        said = " ".join(str(error).split())
        raise RewardFailed(f"reward {name!r} raised {type(error).__name__}: {said[:300] or 'no message'}.") from error


def imported(name: str, key: str) -> Callable:
    """The function of `module:function`; `BadInput`, which begins with the configuration's `key`, when there is none
    or when it is async."""
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user's may fail in any way while it is imported
        raise BadInput(f"{key} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise BadInput(f"{key} {name!r} is a {type(function).__name__}, not a function.")
    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        raise BadInput(f"{key} {name!r} is async, and it is called and not awaited. Wrap it with asyncio.run.")
    return function


def source_hash(function: Callable) -> str:
    """BLAKE2b-64 of the file that defines the function, "" where there is none (a class instance, compiled code)."""
    try:
        source = Path(inspect.getsourcefile(function)).read_bytes()
    except (TypeError, OSError):
        return ""
    return hashlib.blake2b(source, digest_size=8).hexdigest()


def check_arguments(name: str, function: Callable, key: str, columns: Sequence[str], options: Sequence[str]) -> None:
    """`BadInput` unless the function can be called with `columns` and `options` by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        raise BadInput(f"{key} {name} has positional-only arguments; a reward is called with named ones.")
    needed = [one.name for one in parameters if one.kind in NAMED and one.default is one.empty]
    if unknown := [one for one in needed if one not in columns and one not in options]:
        raise BadInput(f"{key} {name} needs an argument {unknown[0]!r}; a reward gets {', '.join(columns)}.")


def taken(function: Callable, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that the function takes by name, all where it has `**kwargs`."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return values
    return {key: value for key, value in values.items() if key in parameters}


def checked_rewards(name: str, found: Any, count: int) -> list[float | None]:
    """What a function gave for `count` completions as numbers, with None for those that it could not compute (None or
    NaN); `CheckFailed` when that is not one number of at most `MOST`, or None, each."""
    if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
        raise CheckFailed(
            f"reward {name!r} gave a {type(found).__name__}, and not a list with one number or None for each of "
            f"{count} completions."
        )
    rewards: list[float | None] = []
    for place, one in enumerate(found):
        try:
            number = math.nan if one is None else float(one)
        except (TypeError, ValueError, RuntimeError):  # the last one of a tensor with several numbers
            number = None
        if number is None or isinstance(one, str | bytes):
            raise CheckFailed(f"reward {name!r} gave {one!r:.60} for completion {place}, no number or None.")
        if abs(number) > MOST:  # NaN is not
            raise CheckFailed(
                f"reward {name!r} gave {number:g} for completion {place}; a reward is at most {MOST:g} in size. "
                "Return None for a completion whose reward could not be computed."
            )
        rewards.append(None if math.isnan(number) else number)
    if len(rewards) != count:
        raise CheckFailed(f"reward {name!r} gave {len(rewards)} rewards for {count} completions.")
    return rewards
