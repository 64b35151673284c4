"""Read the configuration's YAML, match its values to the fields' annotated types, and spell out those types.

Imports no torch.
"""

import types
import typing
from typing import Any, Literal

import yaml


class StrictLoader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys in a group; PyYAML silently keeps the last one."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Read a group as PyYAML does; raise `yaml.YAMLError` with the line of a duplicate key."""
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(str(key.value))
        return node


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
