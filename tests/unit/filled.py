"""Files that hold no more than a test is about, filled up with what their kind requires."""

import types
import typing
from typing import Annotated, Any, Literal

from kit.core.run_files import FileKind, find_fault

EMPTY = {int: 0, float: 0.0, bool: False, str: "", types.NoneType: None, Any: None}


def filled(kind: FileKind, value: Any) -> Any:
    """`value` with every key that the schema of `kind` requires and it lacks, at zero or empty."""
    found = _fill(value, kind.schema)
    assert find_fault(found, kind.schema) is None, str(find_fault(found, kind.schema))
    return found


def _fill(value: Any, hint: Any) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return _fill(value, options[0])
    if origin in (types.UnionType, typing.Union):
        objects = [option for option in options if typing.is_typeddict(option) or typing.get_origin(option) is dict]
        return _fill(value, objects[0]) if isinstance(value, dict) and objects else None if value is ... else value
    if typing.is_typeddict(hint):
        given = {} if value is ... else value
        hints = typing.get_type_hints(hint, include_extras=True)
        keys = [*given, *(key for key in hints if key in hint.__required_keys__ and key not in given)]
        return {key: _fill(given.get(key, ...), hints.get(key, Any)) for key in keys}
    if value is ...:
        if origin is tuple:
            return [_fill(..., option) for option in options]
        return options[0] if origin is Literal else {} if origin is dict else [] if origin is list else EMPTY[hint]
    if origin is dict and isinstance(value, dict):
        return {key: _fill(entry, options[1]) for key, entry in value.items()}
    return value
