"""The program of a reward worker: reads [predicted, gold] as JSON lines, writes {"value": …, "reason": …} lines.

Run by `reward.pool` as a script of its own; imports math-verify and nothing else of the kit. Three things end it when
its parent is gone: the pipe closes (idle worker), the parent's id changes (sleeping worker), and a CPU limit that the
kernel enforces and that is moved ahead before every pair (a worker inside one long C call, which no thread can stop).
Memory is limited too, so that a tower of powers fails here and not in the machine.
"""

import json
import logging
import math
import os
import resource
import sys
import threading
import time

MEMORY_BYTES = 4 << 30  # address space, of which Python and sympy map about 0.3 GiB
CPU_GRACE_S = 1  # a single thread uses no more CPU than wall time, so the parent's clock always strikes first


def leave_with_parent(parent: int) -> None:
    """Exit within a second of the parent's death."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def limit_cpu(seconds: float) -> None:
    """Let the kernel end this process `seconds` plus a grace of CPU time from now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + CPU_GRACE_S
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def limit_memory() -> None:
    """Cap the address space, or leave a lower cap as it is."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


def parsed(text: str) -> list:
    """What math-verify's LaTeX parser makes of an answer, [] when it makes nothing of it.

    Its own timeouts are off (they are signals), and so is its search for numbers in prose, which would pay `5 or 6`.
    """
    from math_verify import LatexExtractionConfig, parse

    return parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)


def compare(predicted: str, gold: str) -> tuple[bool | None, str]:
    """Whether math-verify finds the two equal; None when the reference itself cannot be parsed."""
    from math_verify import verify

    reference = parsed(gold)
    if not reference:
        return None, "gold"
    answer = parsed(predicted)
    if not answer:
        return False, "unparsed"
    return bool(verify(reference, answer, timeout_seconds=None, raise_on_error=True)), "algebra"


def main() -> None:
    parent, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land between the replies
    threading.Thread(target=leave_with_parent, args=(parent,), daemon=True).start()
    limit_memory()
    import math_verify  # noqa: F401  (before "ready", so that the first pair is not charged for it)

    logging.disable(logging.WARNING)

    def reply(**fields: object) -> None:
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    reply(ready=True)
    for line in sys.stdin:
        predicted, gold = json.loads(line)
        limit_cpu(timeout_s)
        try:
            value, reason = compare(predicted, gold)
        except MemoryError:
            reply(value=None, reason="memory", leaving=True)
            return
        except RecursionError:
            value, reason = None, "recursion"
        except Exception as error:  # sympy raises anything at all on hostile input; the type is the reason
            value, reason = None, type(error).__name__
        reply(value=value, reason=reason)


if __name__ == "__main__":
    main()
