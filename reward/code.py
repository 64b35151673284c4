"""Reward "code": the completion's Python code passes the hidden tests in `gold` (`reward.code_gold`).

The code runs in `reward.sandbox`, whose docstring says what that keeps out and what it does not. Nothing of the
completion is parsed or run in this process.

Which code: the last fenced block marked python, py or python3, else the last unmarked one; an unclosed fence runs to
the end. Without any fence, the whole text, if it is Python. Blocks that the prompt contains are not the model's. If
the prompt ends in a function's signature, code that is only its indented body continues it.
"""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reward.answer import message_text
from reward.code_gold import read_gold
from reward.gold import checked_by
from reward.pool import Verdict
from reward.sandbox import ISOLATIONS, MEMORY_MIB, Job, Outcome, isolation_level, shared_sandbox
from reward.score import Budget, Message, Messages, Pool, Prompts, Rewards

if TYPE_CHECKING:
    from kit.core.config.schema import Config

MAX_CODE_CHARS = 100_000
_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.MULTILINE)
_MARKS = ("python", "py", "python3")


def code(
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    *,
    pool: Pool = None,
    budget: Budget = None,
    partial: bool = False,
    timeout_s: float = 5.0,
    memory_mib: int = MEMORY_MIB,
    isolation: str = "full",
    **_: Any,
) -> Rewards:
    """1.0 if the completion's code passes all tests, else 0.0; None if the sandbox or the tests failed.

    `partial` instead pays the share of tests that pass (a HumanEval `check` is one test). Each completion gets
    `timeout_s` seconds of CPU time for all of its tests (rounded up), four times that in wall-clock time, and
    `memory_mib` of memory; exceeding a limit scores 0.0. `isolation` is the least that the machine must allow
    (`reward.sandbox.ISOLATIONS`). `pool` sets the number of workers.
    """
    shown = [None] * len(completions) if prompts is None else prompts
    blocks = [extract_code(completion, prompt) for completion, prompt in zip(completions, shown, strict=True)]
    asked = [_job(block, reference) for block, reference in zip(blocks, gold, strict=True)]
    jobs = [one for one in asked if isinstance(one, Job)]
    limits = pool.workers if pool else 2, timeout_s, memory_mib, isolation
    results = iter(shared_sandbox(*limits).run(jobs) if jobs else ())
    decided = [next(results) if isinstance(one, Job) else one for one in asked]
    rewards = [_pay(outcome, partial) for outcome in decided]
    verdicts = [
        Verdict(None if reward is None else reward == 1.0, outcome.reason)
        for reward, outcome in zip(rewards, decided, strict=True)
    ]
    if budget is not None:
        budget.record(verdicts, [outcome.error or "no message" for outcome in decided], blocks)
    return rewards


def _job(block: str | None, gold: str) -> Job | Outcome:
    """The job for the sandbox, or the outcome of a completion that needs none."""
    try:
        tests = read_gold(gold)
    except ValueError as error:
        return Outcome(0, 1, "gold", str(error))
    if not block or len(block) > MAX_CODE_CHARS:
        return Outcome(0, len(tests.tests), "too long" if block else "no code")
    return replace(tests, code=block)


def _check_options(partial: bool, timeout_s: float, memory_mib: int, isolation: str) -> None:
    if not 0 < timeout_s <= 600:
        raise ValueError(f"timeout_s is {timeout_s}, expected seconds above 0 and up to 600.")
    if memory_mib < 64:
        raise ValueError(f"memory_mib is {memory_mib}, and Python alone needs 64.")
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation is {isolation!r}, expected one of {', '.join(ISOLATIONS)}.")


def _check_run(config: "Config", columns: list[str], isolation: str = "full", **_: Any) -> None:
    """Raise `BadInput` if this machine allows less than `isolation`."""
    isolation_level(isolation)


code.executes_code = True  # type: ignore[attr-defined]
code.check_options = _check_options  # type: ignore[attr-defined]
code.check_run = _check_run  # type: ignore[attr-defined]
code.check_golds = checked_by(read_gold)  # type: ignore[attr-defined]


def _pay(outcome: Outcome, partial: bool) -> float | None:
    if not outcome.decided:
        return None
    return outcome.passed / outcome.total if partial else float(outcome.passed == outcome.total)


def extract_code(completion: Message, prompt: Message | None = None) -> str | None:
    """The code that a completion submits, or None if there is none. Not checked to be Python."""
    text, shown = message_text(completion), message_text(prompt)
    blocks = fenced_blocks(text)
    if not blocks:
        return None if not text.strip() or _squeezed(text) in _squeezed(shown) else text
    own = [(mark, body) for mark, body in blocks if body.strip() and _squeezed(body) not in _squeezed(shown)]
    marked = [body for mark, body in own if mark in _MARKS]
    return next(reversed(marked or [body for mark, body in own if not mark]), None)


def _squeezed(text: str) -> str:
    """The text without trailing spaces and outer blank lines, so that an echo is found whatever its line endings."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Every fenced block in order as (first word after the fence in lower case, content), by CommonMark's rules."""
    blocks, opened = [], None
    for fence in _FENCE.finditer(text):
        marker, info = fence[1], fence[2].strip()
        if opened is None:
            opened = (marker, info, fence.end() + 1)
        elif marker[0] == opened[0][0] and len(marker) >= len(opened[0]) and not info:
            blocks.append((opened[1], text[opened[2] : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[1], text[opened[2] :]))
    return [((info.split() or [""])[0].lower().strip("{}."), body) for info, body in blocks]
