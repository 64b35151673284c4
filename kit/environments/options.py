"""Options of a factory, checked against the arguments that it has."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from kit.core.config.field_types import match_type, spell_type
from kit.core.errors import BadInput, did_you_mean


def checked_options(factory: Callable, options: dict[str, Any], key: str = "environment.options") -> dict[str, Any]:
    """`options` converted to the types of the factory's arguments; `BadInput`, with the configuration's `key`, for an
    unknown or missing one and for a value of another type."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # of names that exist for type checkers only
        hints = {}
    parameters = inspect.signature(factory).parameters
    known = [one.name for one in parameters.values() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    checked = {}
    for name, value in options.items():
        if name not in known and not takes_any:
            has = f" There are {', '.join(known)}." if known else " It takes none."
            raise BadInput(f"{key}.{name}: unknown option.{did_you_mean(name, known, f'{key}.')}{has}")
        hint = hints.get(name, Any)
        matched, checked[name] = match_type(value, hint)
        if not matched:
            raise BadInput(f"{key}.{name} must be {spell_type(hint)}, it is {value!r:.60}.")
    if missing := [one for one in known if parameters[one].default is inspect.Parameter.empty and one not in checked]:
        raise BadInput(f"{key}.{missing[0]} must be set: it has no default.")
    return checked
