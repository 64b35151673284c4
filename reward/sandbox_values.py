"""Plain values as JSON text and back: the only values that pass between a tested program and its judge.

`decode` builds only objects of the types listed here, whatever bytes it is given, so equality, hashing, iteration
and membership are Python's own, and a range has no more items than a list. `encode` reduces subclasses to the plain
content of their base (a Counter to a dict, a namedtuple to a tuple, an IntEnum to an int), so a patched `__eq__` does
not travel. Any other object becomes an `Opaque`, which is true or false and equals nothing. Standard library only:
this file is also loaded in the sandbox.
"""

import collections
import datetime
import decimal
import fractions
import itertools
import json
from collections.abc import Iterator
from typing import Any

MAX_ITEMS = 200_000  # of one value, over all levels
MAX_DEPTH = 60
_JSON_INT = 1 << 53

_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "fs": frozenset, "q": collections.deque}
_DATES: dict[str, Any] = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
_EMPTY: tuple[Iterator, ...] = (
    iter([]),
    iter(()),
    iter(set()),
    iter({}),
    iter(""),
    iter(range(0)),
    reversed([]),
    (_ for _ in ()),
)
_ITERATORS = (
    *map(type, _EMPTY), map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice, itertools.takewhile,
    itertools.accumulate, itertools.product, itertools.permutations, itertools.combinations,
)  # fmt: skip
_NOTHING: dict = {}
_KEYS, _VALUES, _ITEMS = type(_NOTHING.keys()), type(_NOTHING.values()), type(_NOTHING.items())


class NotPlain(Exception):
    """A value without a plain form, or bytes that do not encode one."""


class Opaque:
    """Stand-in for an object that cannot travel, like a `re.Match`: its truth is known, and it equals only itself."""

    __slots__ = ("kind", "truth")

    def __init__(self, kind: str, truth: bool):
        self.kind, self.truth = kind, truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<a {self.kind} of the tested program>"


def encode(value: Any) -> bytes:
    """Encode a value as JSON text; `NotPlain` if it is too large or too deep, `TypeError` for an `Opaque`."""
    return json.dumps(_pack(value, 0, [0])).encode()


def decode(data: bytes) -> Any:
    """Decode JSON text made by `encode`; `NotPlain` for anything else, never an object of another type."""
    try:
        return _unpack(json.loads(data), 0)
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
        raise NotPlain(f"not a plain value: {type(error).__name__}") from None


def _pack(value: Any, depth: int, count: list[int]) -> Any:
    count[0] += 1
    if depth > MAX_DEPTH or count[0] > MAX_ITEMS:
        raise NotPlain("the value is nested too deeply or has too many items")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__add__(value, 0)
        return number if -_JSON_INT < number < _JSON_INT else ["i", hex(number)]
    if isinstance(value, float):
        return float.__float__(value)
    for tag, base in _COLLECTIONS.items():
        if isinstance(value, base):
            return [tag, *(_pack(item, depth + 1, count) for item in base.__iter__(value))]
    if isinstance(value, dict):
        return ["d", *([_pack(k, depth + 1, count), _pack(v, depth + 1, count)] for k, v in dict.items(value))]
    if isinstance(value, complex):
        return ["c", value.real, value.imag]
    if isinstance(value, bytes | bytearray):
        return ["b" if isinstance(value, bytes) else "ba", bytes(value).decode("latin-1")]
    if type(value) is range:
        _check_range(value)
        return ["r", *(_pack(part, depth, count) for part in (value.start, value.stop, value.step))]
    return _pack_rare(value, depth, count)


def _check_range(value: range) -> range:
    """The range; `NotPlain` if it has more items than a list may have: one that contains every number would pass any
    test that asks whether it contains the right one."""
    if len(value[: MAX_ITEMS + 1]) > MAX_ITEMS:
        raise NotPlain("the range has too many items")
    return value


def _pack_rare(value: Any, depth: int, count: list[int]) -> Any:
    if type(value) in (_KEYS, _VALUES, _ITEMS) or isinstance(value, _ITERATORS):
        tag = "k" if type(value) is _KEYS else "it"
        return [tag, *(_pack(item, depth + 1, count) for item in itertools.islice(value, MAX_ITEMS))]
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return ["dec" if isinstance(value, decimal.Decimal) else "frac", str(value)]
    if isinstance(value, datetime.timedelta):
        return ["delta", value.days, value.seconds, value.microseconds]
    for tag, kind in _DATES.items():
        if type(value) is kind:
            return [tag, value.isoformat()]
    if value is Ellipsis:
        return ["..."]
    if type(value) is Opaque:
        raise TypeError(f"{value!r} cannot be handed back to it")
    return ["o", str(type(value).__name__)[:80], True if value else False]


def _unpack(data: Any, depth: int) -> Any:
    if data is None or type(data) in (bool, int, float, str):
        return data
    if depth > MAX_DEPTH or type(data) is not list or not data or type(data[0]) is not str:
        raise NotPlain("not a plain value")
    tag, parts = data[0], data[1:]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_unpack(part, depth + 1) for part in parts)
    if tag == "d":
        return {_unpack(key, depth + 1): _unpack(value, depth + 1) for key, value in parts}
    if tag == "r":
        return _check_range(range(*(_unpack(part, depth + 1) for part in parts)))
    if tag == "c":
        return complex(float(parts[0]), float(parts[1]))
    if tag == "delta":
        return datetime.timedelta(*(int(part) for part in parts[:3]))
    if tag == "...":
        return Ellipsis
    if tag == "o":
        return Opaque(str(parts[0])[:80], parts[1] is True)
    if len(parts) != 1 or type(parts[0]) is not str:
        raise NotPlain("not a plain value")
    return _unpack_text(tag, parts[0])


_CONTAINERS: dict[str, Any] = _COLLECTIONS | {
    "it": lambda parts: iter(list(parts)),
    "k": lambda parts: dict.fromkeys(parts).keys(),
}


def _unpack_text(tag: str, text: str) -> Any:
    if tag == "i":
        return int(text, 16)
    if tag in ("b", "ba"):
        content = text.encode("latin-1")
        return content if tag == "b" else bytearray(content)
    if tag in _DATES:
        return _DATES[tag].fromisoformat(text)
    if tag == "dec":
        return decimal.Decimal(text)
    if tag == "frac":
        numerator, _, denominator = text.partition("/")
        return fractions.Fraction(int(numerator), int(denominator or 1))
    raise NotPlain(f"no plain value is tagged {tag!r:.20}")
