"""Hostile input for the kit's commands, and what a command did with it. Cases run in this process, so that thousands
take a minute: `attempt` starts a module's `main` as its command line does and stops it before it starts a process."""

import argparse
import contextlib
import importlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import types
import typing
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from kit.core.errors import run_command

LONGEST_S, LONGEST_WAIT_S = 10, 120  # of the processor's time; of any, on a machine that does other things too
HUGE = "9" * 5000


class _Started(BaseException):
    """Raised where a command would start another process: its input was valid."""


@dataclass
class Ended:
    """How a command ended: its exit code, or None for `started`; what it wrote to standard error; new files."""

    code: int | None
    err: str
    seconds: float
    written: list[str]
    trace: str = ""

    @property
    def fault(self) -> str:
        """What is wrong with this end; empty if nothing is."""
        if self.trace:
            return self.trace
        if self.seconds > LONGEST_S:
            return f"computed for {self.seconds:.0f} s"
        if self.code not in (None, 0, 1, 2):
            return f"exit code {self.code}"
        if self.code == 2 and not self.err.strip():
            return "exit code 2 without a message"
        if self.code == 2 and self.written:
            return f"exit code 2, and wrote {self.written[0]}"
        if obeyed := sorted(filter(_is_obeyed, self.err)):
            return f"printed {obeyed[0]!r}"
        if len(self.err) > 20_000:
            return f"printed {len(self.err):,} characters"
        return ""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise `TimeoutError` in a command that computes for `LONGEST_S` or waits for `LONGEST_WAIT_S`."""

    def late(number: int, _: object) -> None:
        raise TimeoutError(f"{'computes' if number == signal.SIGPROF else 'waits'} too long")

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT_S)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_obeyed(one: str) -> bool:
    """Whether a terminal acts on a character instead of showing it."""
    is_control = unicodedata.category(one) in ("Cc", "Cs") and one not in "\n\t"
    return is_control or unicodedata.bidirectional(one) in (
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
        "PDI",
    )


def _listing(folder: Path) -> set[str]:
    return {str(Path(here, name)) for here, below, names in os.walk(folder) for name in (*below, *names)}


def attempt(folder: Path, module: str, *words: str) -> Ended:
    """`python -m module words` in `folder`; new files are removed if the input was valid."""
    main = importlib.import_module(module).main
    before = _listing(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(os, "execve", _start)
        patch.setattr(subprocess, "Popen", _start)
        patch.chdir(folder)
        ended = attempt_call(main)
    ended.written = sorted(_listing(folder) - before)
    for name in reversed(ended.written):
        with contextlib.suppress(OSError):
            os.rmdir(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
    return ended


def _start(*_: object, **__: object) -> None:
    raise _Started


def attempt_call(main: Callable[[], int | None]) -> Ended:
    """`main` as `run_command` runs it."""
    out, err, code, trace, began = io.StringIO(), io.StringIO(), None, "", time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with _limited():
                run_command(main)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except _Started:
            pass
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [one for one in frames if "site-packages" not in one.filename and "/lib/python" not in one.filename]
            trace = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].name}: {str(error)[:80]!r}"
    return Ended(code, err.getvalue(), time.process_time() - began, [], trace)


@dataclass
class Record:
    """Cases that were tried, by kind and exit code, and the shortest case of each fault."""

    tried: Counter = field(default_factory=Counter)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, kind: str, case: object, ended: Ended) -> None:
        self.tried[kind, {0: "valid", None: "valid", 1: "refused"}.get(ended.code, "bad input")] += 1
        if ended.fault:
            shown = repr(case)
            shown = shown if len(shown) < 400 else f"{shown[:300]} … {len(shown):,} characters"
            known = self.faults.get((kind, ended.fault))
            if known is None or len(shown) < len(known):
                self.faults[kind, ended.fault] = shown

    def report(self) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        lines = [f"{kind:<12} {end:<10} {count:>7,}" for (kind, end), count in sorted(self.tried.items())]
        lines += [f"{sum(self.tried.values()):,} cases, peak {peak:.2f} GiB, {len(self.faults)} faults"]
        return "\n".join(lines + [f"{kind}: {fault}\n    {case}" for (kind, fault), case in self.faults.items()])


# --- what is tried

# Texts that once ended a command of this kit, or of another, in a traceback or not at all.
KNOWN = ["", " ", "\0", "a\0b", "\ud800", "a\udcff", "x" * 300, "x" * 70_000, "/".join(["x" * 190] * 30)]
KNOWN += ["y/" * 3000, "/dev/zero", "/dev/null", "/proc/self/mem", "/", ".", "..", "loop", "loop/x", "fifo", "model"]
KNOWN += ["run.yaml", "run.yaml/x", "~nosuchuser/x", "~", "\u202egnp.exe", "\x1b[31mred", "a\rb", "a\tb", "a\nb"]
KNOWN += ["\u2028", "\ufeffx", "café", "cafe\u0301", "🙂", "nan", "inf", "-inf", ".inf", ".nan", "1e400", "1.0e+400"]
KNOWN += ["0b_", "0x" + "f" * 5000, HUGE, "[" * 3000, "{a: " * 500, "&a [*a]", "&a {<<: *a}", "*a", "{a: 1, a: 2}"]
KNOWN += ["%s", "%(x)s", "{}", "{answer", "{0}", "http://[", "http://x:99999999", "http://h:-1", "http://", "//"]
KNOWN += [
    "!!python/object:os.system x",
    "!!int x",
    "!!set {a}",
    "<<: 1",
    "? [a]",
    "'",
    '"',
    "2001-99-99",
    "2001-01-01",
]
KNOWN += ["=", "1:30", "module:", ":name", "a:b", "json:loads", "os:system", "null", "true", "[]", "[1,2]", "[a]"]
KNOWN += ["{a: b}", "-1", "0", "1", "2", "1.5", "99999999999", "1_000", "٣", "-", "--", "--x", "math", "nvfp4", "fp8"]
KNOWN += ["all-linear", "auto", "$(touch x)", "`id`", "; rm -rf x", "a b", "a'b", 'a"b', "a\\"]
TEXTS = st.one_of(st.sampled_from(KNOWN), st.text(max_size=12), st.integers().map(str), st.floats().map(str))
INTEGERS = st.sampled_from([0, 1, 2, 3, 8, 64, -1, 10**5, 2**31 - 1, 2**31, 2**63, 10**400]) | st.integers()
NUMBERS = st.sampled_from([float("inf"), float("nan"), -0.0, 5e-324, 1.8e308, 1e-9, 1.0, 0.5, 2]) | st.floats()
SCALARS = st.one_of(TEXTS, INTEGERS, NUMBERS, st.none(), st.booleans())
GROUPS = st.dictionaries(TEXTS | SCALARS, SCALARS | st.lists(SCALARS, max_size=2), max_size=2)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), GROUPS, st.lists(GROUPS, max_size=2))
JSON = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(TEXTS, SCALARS, max_size=2), st.just({}), st.just([[]])
)


def fitting(hint: Any, choices: tuple) -> st.SearchStrategy:
    """Values of a key's type, hostile ones among them, which get past the check of types."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if choices:
        one = st.sampled_from([*choices])
        return one | st.lists(one, max_size=3)
    if origin is list:
        return st.lists(fitting(options[0], ()), max_size=4)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(fitting(option, ()) for option in options))
    if origin is dict:
        return st.dictionaries(TEXTS, SCALARS | st.lists(SCALARS, max_size=2), max_size=2)
    return {int: INTEGERS, float: NUMBERS, bool: st.booleans(), str: TEXTS}.get(hint, st.none())


def flags_of(module: str, *words: str) -> list[argparse.Action]:
    """The arguments that a command's parser takes, those of its subcommand included."""

    class Seen(BaseException):
        pass

    def seen(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Seen(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words])
        patch.setattr(argparse.ArgumentParser, "parse_known_args", seen)
        try:
            importlib.import_module(module).main()
        except Seen as found:
            actions = found.args[0]._actions
    below = [one for one in actions if isinstance(one, argparse._SubParsersAction)]
    actions = [*actions, *(found for one in below for found in one.choices[words[0]]._actions)]
    return [one for one in actions if one not in below and not isinstance(one, argparse._HelpAction)]


def with_flag(action: argparse.Action, texts: list[str]) -> list[str]:
    """The words that give a flag these texts; a switch gets none, or one that it does not take."""
    if not action.option_strings:
        return texts[:1]
    flag = action.option_strings[-1]
    if action.nargs == 0:
        return [flag] if texts[0] else [f"{flag}={texts[0]}"]
    return [flag, *texts] if action.nargs in ("+", "*") else [f"{flag}={texts[0]}"]


DAMAGED = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\r\n",
    b"\t",
    b"\x1b[2J",
    b'"',
    b"{",
    b"[",
    b"}",
    b"]",
    b",",
]
DAMAGED += [
    b":",
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"null",
    b"9" * 5000,
    b"[" * 3000,
    b"-",
    b"#",
    b"&a [*a]",
    b"---",
    b"\xe2\x80\xae",
]
# (place from 0 to 1, length of what is replaced, by what, how many times) of one change of a file
CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1), st.integers(0, 40), st.sampled_from(DAMAGED) | st.binary(max_size=6), st.integers(1, 3)
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, changes: list) -> bytes:
    """A file's content after `CHANGES`."""
    for place, length, by, times in changes:
        at = int(place * len(content))
        content = content[:at] + by * times + content[at + length :]
    return content


def replaced(value: Any, data: st.DataObject) -> Any:
    """A copy of a JSON value in which one value, at any depth, is a hostile one."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 9)):
        keys = [*value] if isinstance(value, dict) else range(len(value))
        chosen = data.draw(st.sampled_from(keys))
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        made = {key: replaced(one, data) if key == chosen else one for key, one in pairs}
        return made if isinstance(value, dict) else [*made.values()]
    return data.draw(JSON)
