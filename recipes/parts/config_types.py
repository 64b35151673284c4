"""Values matched to the annotated types of the configuration's fields, and those types in words. Imports no torch."""

import types
import typing
from typing import Any, Literal


def match_type(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether `value` is of the annotated type, and the value as that type (int to float, "1e-4" to float)."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in options), value
    if origin in (types.UnionType, typing.Union):
        return next((result for option in options if (result := match_type(value, option))[0]), (False, value))
    if origin is list:
        results = [match_type(entry, options[0]) for entry in value] if isinstance(value, list) else [(False, value)]
        return all(ok for ok, _ in results), [entry for _, entry in results]
    if origin is dict:
        return isinstance(value, dict), value
    if hint is types.NoneType:
        return value is None, None
    if hint is float and isinstance(value, str | int) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-4 (no dot) as a string.
        try:
            return True, float(value)
        except ValueError:
            return False, value
    return type(value) is hint, value


def spell_type(hint: Any) -> str:
    """An annotated type in the words of an error message."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, options))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(spell_type(option) for option in options)
    if origin is list:
        return f"a list of {spell_type(options[0])}"
    if origin is dict:
        return "a group of keys"
    return {str: "text", int: "an integer", float: "a number", bool: "true or false", types.NoneType: "null"}[hint]
