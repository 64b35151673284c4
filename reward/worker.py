"""The program of the reward workers: a fork server and the workers that it forks.

`reward.pool` runs it as a separate script; it imports math-verify and this package, not torch or the training script.
The server reads "fork" (with a socket for the new worker), "kill <pid>" and "stop" on its stdin, which is a socket. A
worker reads [predicted, gold, policy] as JSON lines and writes {"value": …, "reason": …} lines. The server ends with
its parent (its socket closes, or its parent id changes) and takes the workers with it. A worker whose server is gone
is ended by the same watch, and by a CPU limit that the kernel enforces and that is moved forward before every pair
(for a worker inside one long C call, which no thread can stop). Memory is limited too, so that a tower of powers fails
here and does not exhaust the machine.
"""

import contextlib
import gc
import json
import logging
import math
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # last: the kit's folders must not shadow a library

from reward import exact

MEMORY_BYTES = 4 << 30  # address space, of which Python and sympy map about 0.3 GiB
NEAR = 1e-5  # relative; math-verify's six decimals are finer for numbers above 0.1
CPU_GRACE_S = 1  # a single thread uses no more CPU than wall time, so the parent's clock always strikes first


def leave_with_parent(parent: int) -> None:
    """Exit within a second of the parent's death."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def limit_cpu(seconds: float) -> None:
    """Have the kernel end this process after `seconds` plus a grace of further CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + CPU_GRACE_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def limit_memory() -> None:
    """Cap the address space; a lower existing cap stays."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


@lru_cache(maxsize=2048)
def parsed(text: str) -> tuple:
    """Parse an answer with math-verify's LaTeX parser; empty if it cannot be parsed.

    The parser's own timeouts are off (they are signals), and so is its search for numbers in prose, which would pay
    `5 or 6`.
    """
    from math_verify import LatexExtractionConfig, parse

    text = text.replace("\\cr ", "\\\\")
    return tuple(parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))


def math_verify_equal(predicted: str, gold: str) -> bool | None:
    """Whether math-verify finds the two equal; None if the reference itself cannot be parsed.

    sympy compares expressions at random points: seeded, so that a pair's verdict does not depend on the pairs before.
    """
    from math_verify import verify
    from sympy.core.random import seed

    seed(0)

    reference = parsed(gold)
    if not reference:
        return None
    answer = parsed(predicted)
    if not answer or not verify([*reference], [*answer], timeout_seconds=None, raise_on_error=True):
        return False
    return not apart(reference[0], answer[0])


def apart(one: Any, other: Any) -> bool:
    """Whether two numbers differ by more than a rounding of their size, or only one is infinite: math-verify compares
    decimal places, so it takes both 1/2004! and 1/2006! for 0, and by chance 5e for infinity."""
    if not (getattr(one, "is_number", False) and getattr(other, "is_number", False)):
        return False
    a, b = one.doit().evalf(20), other.doit().evalf(20)
    if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
        return {a.is_infinite, b.is_infinite} == {True, False}
    return bool(abs(a - b) > NEAR * max(abs(a), abs(b)))


def compare(predicted: str | None, gold: str, policy: str = "") -> tuple[bool | None, str]:
    """Verdict on a pair of prepared answers, and what decided it; without a prediction, whether the gold parses."""
    if predicted is None:
        return (True, "algebra") if parsed(gold) else (None, "gold")
    asked = set()

    def symbolic(one: str, other: str) -> bool | None:
        asked.add((one, other))
        return math_verify_equal(one, other)

    value = exact.compare(predicted, gold, exact.Policy(**json.loads(policy or "{}")), symbolic)
    if value is None and (predicted, gold) not in asked:
        value = math_verify_equal(predicted, gold)
    return value, "gold" if value is None else "algebra"


def serve(channel: socket.socket, timeout_s: float) -> None:
    """Main loop of a worker: one reply per line read, until the socket closes."""
    threading.Thread(target=leave_with_parent, args=(os.getppid(),), daemon=True).start()
    limit_memory()
    lines, replies = channel.makefile("r"), channel.makefile("w")

    def reply(**fields: object) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    for line in lines:
        predicted, gold, policy = json.loads(line)
        limit_cpu(timeout_s)
        try:
            value, reason = compare(predicted, gold, *([policy] if policy else []))
        except MemoryError:
            reply(value=None, reason="memory", leaving=True)
            return
        except RecursionError:
            value, reason = None, "recursion"
        except Exception as error:  # sympy may raise anything on hostile input; the type is the reason
            value, reason = None, type(error).__name__
        reply(value=value, reason=reason)


class Server:
    """Fork workers on request, and end them."""

    def __init__(self, control: socket.socket, parent: int, timeout_s: float):
        self.control, self.parent, self.timeout_s = control, parent, timeout_s
        self.children: set[int] = set()

    def run(self) -> None:
        """Serve the parent until it stops or is gone; then end all workers."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            while os.getppid() == self.parent:
                if selector.select(timeout=1.0) and not self.answer():
                    break
                self.reap()
        for child in [*self.children]:
            self.kill(child)

    def answer(self) -> bool:
        """Handle one request; return False if no more are to be handled."""
        try:
            request, descriptors, *_ = socket.recv_fds(self.control, 64, 1)
        except OSError:
            return False
        word, _, number = request.decode().strip().partition(" ")
        if word == "fork":
            self.control.sendall(f"{self.fork(descriptors[0])}\n".encode())
        elif word == "kill":
            self.kill(int(number))
            self.control.sendall(b"done\n")
        return word in ("fork", "kill")

    def fork(self, descriptor: int) -> int:
        """Fork a worker that serves the socket `descriptor`; return its pid."""
        child = os.fork()
        if child:
            os.close(descriptor)
            self.children.add(child)
            return child
        code = 1
        try:
            self.control.close()
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            serve(socket.socket(fileno=descriptor), self.timeout_s)
            code = 0
        finally:
            os._exit(code)

    def reap(self) -> None:
        for child in [*self.children]:
            if os.waitpid(child, os.WNOHANG)[0]:
                self.children.discard(child)

    def kill(self, child: int) -> None:
        """End a worker and reap it; no-op if it is known to have ended already."""
        if child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.children.discard(child)


def main() -> None:
    parent, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    control = socket.socket(fileno=os.dup(0))
    import math_verify  # noqa: F401  (imported once here: forked workers inherit it)

    parsed("1"), math_verify_equal("x^2+1", "x+1")  # build the parser's tables
    parsed.cache_clear()
    logging.disable(logging.WARNING)
    gc.freeze()
    control.sendall(b"ready\n")
    Server(control, parent, timeout_s).run()


if __name__ == "__main__":
    main()
