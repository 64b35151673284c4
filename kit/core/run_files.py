"""Read a JSON or JSON-lines file in one way: bounded, and checked against what its kind of file holds.

Covers the files of a run, what evaluation and merge leave beside it, and those of other programs, such as a model's
config.json (`file_kinds.py` has a schema for each). A run directory, a checkpoint or an adapter may come from
elsewhere, so nothing in a file is relied on before its schema holds. Every error is a `BadInput` of one sentence with
the file, the line, the key, the value found and the fix.
Checksums (`checksum.py`) are compared and taken out.
Not covered: content hashes (`run_directory.read_manifest`), safetensors (`checkpoint_files.py`), the user's YAML and
data.

A schema is a type, as `typing` writes it: a TypedDict, whose further keys are allowed and kept; a dataclass, any of
whose keys may be missing too; `dict[str, T]`; `list[T]`; `tuple[A, B]`, a list of two; a union; a Literal; `Any`. An
integer has 64 bits, a number is finite; `Annotated[int, Within(0, 9)]` narrows one. `PathText` has no NUL.
"""

import functools
import json
import math
import re
import stat
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from kit.core.checksum import KEY, without_checksum
from kit.core.errors import BadInput
from kit.core.one_line import one_line

MOST_BYTES = 1 << 28  # of a JSON file; base.json of a model of 100,000 tensors has 20 MB
MOST_LINE_BYTES = 1 << 25  # of a line of JSON lines
DEEPEST = 48  # objects and lists inside each other; what recurses over a value needs no check of its own
MOST_DIGITS = 300  # an integer of more is too large for a float
CHECKED = f'"{KEY}"'.encode()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class FileKind:
    """What a file holds, in words and as a schema, and how to get a good one."""

    what: str  # as in "base.json is not WHAT"
    schema: Any
    fix: str
    is_foreign: bool = False  # another program's writer, which may write NaN and Infinity


@dataclass(frozen=True)
class Within:
    """Limits of an integer or a number, both included."""

    low: float
    high: float


@dataclass(frozen=True)
class NoNul:
    """Text without NUL, which no path may hold."""


PathText = Annotated[str, NoNul()]


@dataclass(frozen=True)
class Fault:
    """Where in a value a schema does not hold, what was found there, and what was expected."""

    keys: tuple[str | int, ...]
    found: Any
    expected: str

    def __str__(self) -> str:
        where = one_line("".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)[:200], 80)
        subject = where.removeprefix(".") or "the content"
        if self.found is Ellipsis:
            return f"{subject} is missing, expected {self.expected}"
        return f"{subject} is {_shown(self.found)}, expected {self.expected}"


def read_object(path: Path, kind: FileKind) -> Any:
    """The content of a JSON file, which fits the schema of `kind`; `BadInput` otherwise, and if it cannot be read."""
    value = read_json(path, kind.is_foreign, kind.fix)
    if fault := find_fault(value, kind.schema):
        raise BadInput(f"{path} is not {kind.what}: {fault}. {kind.fix}")
    return value


def read_optional(path: Path, kind: FileKind) -> Any:
    """As `read_object`; {} if there is no such file."""
    return read_object(path, kind) if is_there(path) else {}


def read_lines(path: Path, kind: FileKind, may_be_growing: bool = False, first: FileKind | None = None) -> list[Any]:
    """The lines of a JSON-lines file, each of which fits the schema of `kind`; empty lines are skipped.

    If the file `may_be_growing`, or its writer may have been killed, text after the last newline is left out. The
    first line is of the kind `first` if that is given.
    """
    return [row for _, row in numbered_lines(path, kind, may_be_growing, first)]


def numbered_lines(
    path: Path, kind: FileKind, may_be_growing: bool = False, first: FileKind | None = None
) -> Iterator[tuple[int, Any]]:
    """As `read_lines`, one by one, each with its number in the file."""
    with opened(path, kind.fix) as file:
        number, began = 0, False
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MOST_LINE_BYTES:
                raise BadInput(f"{place} is longer than {MOST_LINE_BYTES >> 20} MiB. {kind.fix}")
            if line.isspace():
                continue
            if may_be_growing and not line.endswith(b"\n"):
                if _is_whole(line):  # then its newline was damaged
                    raise BadInput(f"{place} is damaged: its end is {line[-8:]!r}. {kind.fix}")
                continue
            try:
                row = parse_line(line, first or kind, place)
            except ValueError as error:
                raise BadInput(f"{place} {error}. {kind.fix}") from None
            # An earlier version may have written the first lines, and none after a line with a checksum.
            if began and CHECKED not in line:
                raise BadInput(f"{place} has no {KEY}, unlike the line before it. {kind.fix}")
            began, first = CHECKED in line, None
            yield number, row


def parse_line(line: bytes, kind: FileKind, place: str = "a line") -> Any:
    """The value of one line without its checksum; `ValueError` with what is wrong, from the verb on; `BadInput` that
    names the `place` if the checksum is another."""
    try:
        value = parse(line, kind.is_foreign)
    except ValueError as error:
        raise ValueError(f"is damaged: it is not JSON ({error})") from None
    value = without_checksum(value, place)
    if fault := find_fault(value, kind.schema):
        raise ValueError(f"is not {kind.what}: {fault}")
    return value


def _is_whole(line: bytes) -> bool:
    """Whether text without a newline begins with a whole object."""
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace").lstrip())
    except (ValueError, RecursionError):
        return False
    return True


def read_json(path: Path, is_foreign: bool = True, fix: str = "") -> Any:
    """Parse a JSON file of any content, without its checksum; `BadInput` that names it if it is missing, too large,
    not JSON, or not what was written."""
    with opened(path, fix) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path} is larger than {MOST_BYTES >> 20} MiB. {fix}".rstrip())
    try:
        value = parse(data, is_foreign)
    except ValueError as error:
        raise BadInput(f"{path} is not JSON: {error}. {fix}".rstrip()) from None
    return without_checksum(value, path)


def is_there(path: Path) -> bool:
    """Whether there is something at `path`, which `opened` then reads or refuses; False for a name too long to be."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def is_directory(path: Path) -> bool:
    """Whether there is a directory at `path`; False for a name that cannot be."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


class opened:
    """Open a regular file for reading; any OSError, also while it is read, becomes a `BadInput` that names it."""

    def __init__(self, path: Path, fix: str = ""):
        self.path, self.fix = path, fix

    def __enter__(self) -> BinaryIO:
        try:
            if not stat.S_ISREG(Path(self.path).stat().st_mode):  # a pipe or a device would be waited for
                raise BadInput(f"{self.path} is not a file. {self.fix}".rstrip())
            self.file = open(self.path, "rb")
        except (OSError, ValueError) as error:
            raise self._named(error) from None
        return self.file

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.file.close()
        if isinstance(error, OSError):
            raise self._named(error) from None

    def _named(self, error: OSError | ValueError) -> BadInput:
        if isinstance(error, FileNotFoundError):
            return BadInput(f"{self.path} does not exist. {self.fix}".rstrip())
        reason = error.strerror if isinstance(error, OSError) else str(error)
        shown = one_line(str(self.path), 300)
        return BadInput(f"{shown} cannot be read: {reason}. {self.fix}".rstrip())


def parse(data: bytes, is_foreign: bool = False) -> Any:
    """The value of a JSON text in UTF-8, at most `DEEPEST` deep; `ValueError` with the reason if there is none.

    Refuses what JSON or a later reader cannot hold: NaN and Infinity unless the writer `is_foreign`, integers of more
    than `MOST_DIGITS` digits, half of a surrogate pair.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_int=_integer, parse_constant=None if is_foreign else _constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    if data.count(b"{") + data.count(b"[") > DEEPEST:
        _check_depth(value)
    if _SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _constant(word: str) -> None:
    raise ValueError(f"it has {word}, which JSON has no number for")


def _check_depth(value: Any) -> None:
    """Raise `ValueError` for more than `DEEPEST` levels; goes through them one by one, without recursion."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]


def find_fault(value: Any, hint: Any) -> Fault | None:
    """The first place where a parsed value does not fit a schema; None if it fits everywhere."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None
    if origin is Annotated:
        return _beyond(value, options[0], options[1])
    if origin in (types.UnionType, typing.Union):
        faults = [fault for option in options if (fault := find_fault(value, option))]
        deepest = max(faults, key=lambda fault: len(fault.keys), default=None)
        if len(faults) < len(options):
            return None
        return deepest if deepest and deepest.keys else Fault((), value, spell(hint))
    if origin is Literal:
        fits = any(value == choice and type(value) is type(choice) for choice in options)
        return None if fits else Fault((), value, spell(hint))
    if origin is tuple:
        return _in_tuple(value, hint, options)
    if origin is list or hint is list:
        return _within(value, list, hint, enumerate(value) if isinstance(value, list) else (), options or (Any,))
    if origin is dict or hint is dict:
        return _within(value, dict, hint, value.items() if isinstance(value, dict) else (), options[1:] or (Any,))
    if typing.is_typeddict(hint) or is_dataclass(hint):
        return _in_object(value, hint)
    holds = {
        str: lambda: type(value) is str,
        int: lambda: type(value) is int and -(2**63) <= value < 2**63,
        float: lambda: type(value) in (int, float) and math.isfinite(value),
        bool: lambda: type(value) is bool,
        types.NoneType: lambda: value is None,
    }
    return None if holds[hint]() else Fault((), value, spell(hint))


def _beyond(value: Any, hint: Any, limit: Any) -> Fault | None:
    if fault := find_fault(value, hint):
        return fault
    if isinstance(limit, NoNul):
        return Fault((), value, "text without NUL") if "\0" in value else None
    if limit.low <= value <= limit.high:
        return None
    return Fault((), value, f"{spell(hint)} from {limit.low:,} to {limit.high:,}")


def _within(value: Any, kind: type, hint: Any, entries: Any, options: tuple) -> Fault | None:
    if not isinstance(value, kind):
        return Fault((), value, spell(hint))
    if options[0] is Any:
        return None
    for key, entry in entries:
        if fault := find_fault(entry, options[0]):
            return Fault((key, *fault.keys), fault.found, fault.expected)
    return None


def _in_tuple(value: Any, hint: Any, options: tuple) -> Fault | None:
    if not isinstance(value, list) or len(value) != len(options):
        return Fault((), value, spell(hint))
    for place, (entry, option) in enumerate(zip(value, options, strict=True)):
        if fault := find_fault(entry, option):
            return Fault((place, *fault.keys), fault.found, fault.expected)
    return None


def _in_object(value: Any, schema: Any) -> Fault | None:
    if not isinstance(value, dict):
        return Fault((), value, spell(schema))
    for key, hint in _hints(schema).items():
        if key in value:
            if fault := find_fault(value[key], hint):
                return Fault((key, *fault.keys), fault.found, fault.expected)
        elif key in getattr(schema, "__required_keys__", ()):
            return Fault((key,), Ellipsis, spell(hint))
    return None


@functools.cache
def _hints(schema: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(schema, include_extras=True)
    wrappers = (typing.Required, typing.NotRequired)
    return {
        key: typing.get_args(hint)[0] if typing.get_origin(hint) in wrappers else hint for key, hint in hints.items()
    }


def spell(hint: Any) -> str:
    """A schema in the words of an error message."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return spell(options[0])
    if origin is Literal:
        return " or ".join(map(repr, options))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(spell(option) for option in options))
    if origin is tuple:
        return f"a list of {len(options)}"
    if origin is list or hint is list:
        return "a list"
    words = {str: "text", int: "an integer", float: "a number", bool: "true or false", types.NoneType: "null"}
    return words.get(hint, "anything" if hint is Any else "an object")


def _shown(value: Any) -> str:
    return one_line(f"{value!r:.60}", 60)
