"""Match a configuration's values to the fields' annotated types, and spell out those types.

Imports no torch.
"""

import math
import types
import typing
from typing import Any, Literal

from kit.core.yaml_files import INTEGERS

MOST_TEXT = 100_000  # characters of one value
COUNTS = 2**31  # no key counts further, and what the plan adds up stays within 64 bits


def unkept(value: Any) -> str:
    """Why a value cannot be kept in config.json, as the end of a sentence; empty if it can."""
    if isinstance(value, dict | list):
        held = [one for pair in value.items() for one in pair] if isinstance(value, dict) else value
        why = next(filter(None, map(unkept, held)), "")
        return why and why.replace("is ", "holds ", 1)
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}, which JSON cannot carry"
    if type(value) is int and not -INTEGERS < value < INTEGERS:
        return f"is an integer of {value.bit_length():,} bits, more than 63"
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"is a text of {len(value):,} characters, more than {MOST_TEXT:,}"
    if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        return f"is {value!r:.60}, which has a NUL or a byte that is not UTF-8"
    return ""


def match_type(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether `value` matches the annotated type, and the value converted to it (int to float, "1e-4" to float)."""
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
        return isinstance(value, dict) and all(isinstance(key, str) for key in value), value
    if hint is types.NoneType:
        return value is None, None
    if hint is float and isinstance(value, str | int) and not isinstance(value, bool):
        # YAML 1.1 reads 1e-4 (no dot) as a string.
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return False, value
        return True, number
    return type(value) is hint, value


def literals(hint: Any) -> tuple:
    """The values of the Literal in an annotated type; empty if it has none."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(value for option in typing.get_args(hint) for value in literals(option))


def spell_type(hint: Any) -> str:
    """An annotated type in the words of an error message."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, options))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(spell_type(option) for option in options)
    if origin is list:
        return f"a list of {spell_type(options[0])}".replace("of one of", "of any of")
    if origin is dict:
        return "a group of keys"
    words = {str: "text", int: "an integer", float: "a number", bool: "true or false", types.NoneType: "null"}
    return words.get(hint, "a group of keys" if hint is dict else getattr(hint, "__name__", str(hint)))
