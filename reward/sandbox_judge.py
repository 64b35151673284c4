"""The judge of a sample: runs the hidden tests and asks the candidate for values. Never runs the model's code.

Every reply of the candidate is a plain value, the name of an exception, or the loss of the candidate, which fails the
sample whatever the tests catch. Standard library only: this file is loaded in the sandbox.
"""

import builtins
import contextlib
import json
import time
import types
from typing import Any

from . import sandbox_values as values
from .sandbox_pipe import read_frame, write_frame

MAX_REPLY_BYTES = 1 << 20  # limit on a candidate's reply


class CandidateLost(BaseException):
    """The candidate exited, ran out of time or broke the protocol: the sample fails, whatever the tests catch."""


class CandidateError(Exception):
    """The candidate raised something that is not one of Python's own exceptions."""


class BadTests(Exception):
    """The tests themselves cannot be run."""


class Proxy:
    """A function of the candidate as the tests see it: arguments and result travel as plain values."""

    def __init__(self, name: str, line: "Line"):
        self.__name__ = name
        self._line = line

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._line.call(self.__name__, arguments, keywords)


class Line:
    """The judge's end of the two pipes to the candidate."""

    def __init__(self, requests: int, replies: int):
        self.requests, self.replies = requests, replies
        self.deadline = float("inf")
        self.lost: str | None = None  # why the sample has failed for good

    def exchange(self, data: bytes) -> bytes:
        """Send one frame and return the candidate's next one; `CandidateLost` if there will be none."""
        if self.lost:
            raise CandidateLost
        try:
            write_frame(self.requests, data, self.deadline)
            return read_frame(self.replies, MAX_REPLY_BYTES, self.deadline)
        except TimeoutError:
            self.lost = "timeout"
        except (EOFError, OSError):
            self.lost = "died"
        except ValueError:
            self.lost = "output"
        raise CandidateLost

    def call(self, name: str, arguments: tuple, keywords: dict) -> Any:
        try:
            packed = values.encode((arguments, keywords)).decode()
        except values.NotPlain as error:
            raise BadTests(f"the tests call {name} with what is not a plain value ({error})") from None
        data = self.exchange(json.dumps([name, packed]).encode())
        try:
            if data[:1] == b"v":
                return values.decode(data[1:])
            kind, text = json.loads(data[1:])
            known = getattr(builtins, kind, None) if data[:1] == b"e" else None
        except (values.NotPlain, ValueError, TypeError, RecursionError, MemoryError):
            self.lost = "output"
            raise CandidateLost from None
        if kind in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            self.lost = "exit"
            raise CandidateLost
        # StopIteration would silently end a map() or a loop of the tests.
        if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, StopIteration):
            raised: Exception = CandidateError(f"{kind}: {text}")
            with contextlib.suppress(TypeError):  # UnicodeDecodeError wants five arguments
                raised = known(str(text))
            raise raised
        raise CandidateError(f"{kind}: {text}")


def run_tests(job: dict, line: Line) -> dict:
    """Return the verdict on a job: have the candidate load its code, then run the tests, or call `shown`."""
    total = len(job["tests"])
    failed = {"passed": 0, "total": total}
    try:
        program = {"prompt": job["prompt"], "code": job["code"]}
        answer = json.loads(line.exchange(json.dumps(program).encode()))
    except CandidateLost:
        return failed | {"reason": line.lost}
    except (ValueError, RecursionError):
        return failed | {"reason": "output"}
    if answer != ["ran"]:
        kind = str(answer[1]) if isinstance(answer, list) and len(answer) == 3 else "output"
        return failed | {"reason": "syntax" if kind in ("SyntaxError", "IndentationError", "TabError") else kind[:40]}
    if job["shown"]:
        return _show(job["shown"], line)
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        for text in (job["prompt"], job["setup"]):
            exec(compile(text, "setup.py", "exec"), namespace)
        namespace |= {name: Proxy(name, line) for name in job["names"]}
        compiled = [compile(test, "test.py", "exec") for test in job["tests"]]
    except Exception as error:
        return failed | {"reason": "gold", "error": f"{type(error).__name__}: {error}"}
    passed, first = 0, None
    for code in compiled:
        reason = _run_test(code, namespace, line)
        passed += reason is None
        first = first or reason
        if line.lost or reason == "gold":
            break
    return {"passed": passed, "total": total, "reason": first or "passed"}


def _show(name: str, line: Line) -> dict:
    """Return what the candidate's function `name` returns, as text, in a verdict that passes."""
    verdict = {"passed": 0, "total": 0}
    try:
        return verdict | {"reason": "passed", "shown": str(line.call(name, (), {}))}
    except CandidateLost:
        return verdict | {"reason": line.lost}
    except Exception as error:
        return verdict | {"reason": type(error).__name__, "error": str(error)[:300]}


def _run_test(code: types.CodeType, namespace: dict, line: Line) -> str | None:
    """Return None if the test passes, else the reason. A lost candidate fails even a test that catches everything."""
    try:
        exec(code, namespace)
    except CandidateLost:
        return line.lost
    except BadTests:
        return "gold"
    except AssertionError:
        return "wrong"
    except BaseException as error:
        return line.lost or type(error).__name__
    return line.lost or ("timeout" if time.monotonic() > line.deadline else None)
