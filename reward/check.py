"""`python -m reward check FILE.jsonl --task math`: how a reward judges answers that you already know.

Rows are JSON objects with `gold` and either `prediction` (an answer, or a text that states one) or `completion` (model
output, read exactly as in training), and optionally `expected` (true or false) and `prompt`.
"""

import argparse
import contextlib
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.config.load import load_config
from kit.core.config.schema import RewardConfig
from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser
from reward import REWARDS, function_of, function_options, reward_functions
from reward.answer import final_answer
from reward.pool import WorkerPool
from reward.score import Explanation, Message
from reward.stated import reference_answer

SHOWN = 10  # maximum number of bad rows and disagreements listed
# Forms into which a bare answer is put for tasks that look for one.
CODE = "```python\n{}\n```"
STRUCTURED = ("code", "countdown")  # their reference is JSON
BOX = "\\boxed{{{}\n}}"  # the line break keeps a trailing backslash from escaping the brace


# "The final answer is 7." as the last sentence of a prediction; the stated part may be "7 or 8", not an answer.
_STATES = re.compile(r"(?:answer|solution|result)\s*(?:is|are|:|=)[\s:}*]*", re.IGNORECASE)
LAST_SENTENCE = 300  # only this many characters of the last line are read, to bound the cost


@dataclass(frozen=True)
class Row:
    """One row of the file: the reference, the text to judge, and the verdict the user expects."""

    line: int
    gold: str
    text: str
    is_completion: bool
    expected: bool | None = None
    prompt: Message | None = None

    @property
    def sample(self) -> tuple[Message, str, Message | None]:
        """Arguments of `explain`: completion, reference, prompt."""
        return self.text, self.gold, self.prompt


@dataclass(frozen=True)
class Judgement:
    """The verdict (True, False, or None for undecided), the extracted answer, and the rule that decided."""

    value: bool | None
    extracted: str | None
    rule: str
    reward: float | None


def judges(task: str) -> bool:
    """Whether a reward function compares with a reference (math, code, …) rather than only checking the form."""
    gold = inspect.signature(function_of(task)).parameters.get("gold")
    return gold is not None and gold.kind is gold.POSITIONAL_OR_KEYWORD


def explain(
    task: str, samples: Sequence[tuple[Message, str, Message | None]], pool: WorkerPool, options: dict[str, Any]
) -> list[Judgement]:
    """Return what the reward function `task` decides about every (completion, gold, prompt), and why.

    Undecided ones never raise.
    """
    if not samples:
        return []
    seen = Explanation()
    completions, golds, prompts = ([*column] for column in zip(*samples, strict=True))
    shown_prompts = [prompt or "" for prompt in prompts]
    rewards = REWARDS[task](shown_prompts, completions, gold=golds, pool=pool, budget=seen, **options)
    extracted = seen.extracted or [None] * len(rewards)
    reasons = [verdict.reason for verdict in seen.verdicts] or ["reward"] * len(rewards)
    if any(text is not None for text in extracted):
        reasons = ["no answer" if text is None else rule for text, rule in zip(extracted, reasons, strict=True)]
    return [
        Judgement(None if reward is None else reward >= 1.0, text, reason, reward)
        for reward, text, reason in zip(rewards, extracted, reasons, strict=True)
    ]


def judge_rows(rows: list[Row], task: str, pool: WorkerPool, options: dict[str, Any]) -> list[Judgement]:
    """Return a judgement for every row, in order.

    A completion is read as in training. A prediction is read in the task's most lenient form. If the task has the
    option `form` and `options` does not set it, that is the option's; otherwise the prediction is read in the task's
    form (a box, …) or from its last sentence, and failing that is itself the answer.
    """
    if "form" in function_options(task) and "form" not in options:
        kinds = {False: options | {"form": "lenient"}, True: options}
        of = {
            kind: iter(explain(task, [row.sample for row in rows if row.is_completion is kind], pool, kinds[kind]))
            for kind in kinds
        }
        return [next(of[row.is_completion]) for row in rows]
    found = explain(task, [row.sample for row in rows], pool, options)
    fenced = task == "code"
    bare = {
        index: CODE.format(row.text.strip()) if fenced else BOX.format(stated_answer(row.text))
        for index, (row, judgement) in enumerate(zip(rows, found, strict=True))
        if not row.is_completion and judgement.extracted is None and row.text.strip() and judgement.value is not True
        if not (fenced and "```" in row.text)
    }
    again = explain(task, [(text, rows[index].gold, None) for index, text in bare.items()], pool, options)
    for index, judgement in zip(bare, again, strict=True):
        found[index] = judgement
    return found


def stated_answer(prediction: str) -> str:
    """The answer that a prediction states in a last sentence such as "The answer is 7.", else the whole prediction."""
    last_line = prediction.rstrip().rpartition("\n")[2][-LAST_SENTENCE:]
    stated = _STATES.split(last_line)
    return (stated[-1].rstrip(" .*") if len(stated) > 1 else "") or prediction.strip()


def read_rows(path: Path, task: str) -> list[Row]:
    """Read the rows of a jsonl file; `BadInput` lists the unusable lines before anything is scored."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}.") from None
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(number, json.loads(line.decode("utf-8-sig")), task))
        except (ValueError, RecursionError) as error:  # from JSON, UTF-8 or _row
            bad.append(f"\n  {path}:{number}: {error}")
    if bad:
        more = f"\n  … and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        raise BadInput(f"{len(bad):,} rows cannot be used, nothing was scored:{''.join(bad[:SHOWN])}{more}")
    if not rows:
        raise BadInput(f"{path} has no rows. One JSON object per line: {{'gold': '7', 'prediction': '7.0'}}.")
    return rows


def _row(number: int, value: Any, task: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    if "gold" not in value:
        raise ValueError(f"no gold; it has {', '.join(value) or 'nothing'}")
    given = [name for name in ("prediction", "completion") if name in value]
    if len(given) != 1:
        raise ValueError("both prediction and completion; give one" if given else "neither prediction nor completion")
    expected = value.get("expected")
    if expected not in (True, False, None):  # 0 and 1 are accepted
        raise ValueError(f"expected is {expected!r:.40}, not true or false")
    if not isinstance(value.get("prompt"), str | list | None):
        raise ValueError("prompt is neither text nor a list of messages")
    gold = value["gold"]
    if isinstance(gold, list | dict) and task in STRUCTURED:
        gold = json.dumps(gold)
    gold, text = _text("gold", gold), value[given[0]]
    if task not in STRUCTURED:
        # data.answer_format boxed and gsm8k do the same before a run
        gold = reference_answer(gold) if task == "math" else final_answer(gold) or gold
    return Row(
        line=number,
        gold=gold,
        text="" if text is None else _text(given[0], text),
        is_completion=given[0] == "completion",
        expected=None if expected is None else bool(expected),
        prompt=value.get("prompt"),
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not text or a number")
    return value


def settings(arguments: argparse.Namespace, task: str) -> tuple[WorkerPool, dict[str, Any]]:
    """The pool and the checked options of a task, from --config and the flags that override it."""
    given = load_config(arguments.config).reward if arguments.config else RewardConfig()
    options = dict(given.options.get(task) or {})
    if arguments.options:
        try:
            typed = json.loads(arguments.options)
        except json.JSONDecodeError as error:
            raise BadInput(f'--options is not JSON: {error}. Example: {{"ordered": false}}') from None
        if not isinstance(typed, dict):
            raise BadInput(f"--options must be a JSON object, it is {arguments.options[:60]}.")
        options |= typed
    (bound,), _ = reward_functions(
        RewardConfig(
            functions=[task],
            options={task: options},
            timeout_s=given.timeout_s if arguments.timeout_s is None else arguments.timeout_s,
            workers=given.workers if arguments.workers is None else arguments.workers,
            allow_code_execution=given.allow_code_execution or arguments.allow_code_execution,
        )
    )
    return WorkerPool(bound.workers, bound.timeout_s), bound.options


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `settings` reads."""
    parser.add_argument("--config", type=Path, help="YAML of a run; its reward group gives options and limits")
    parser.add_argument("--options", help="options of the task as JSON, e.g. '{\"ordered\": false}'")
    parser.add_argument("--timeout_s", type=float, help="wall-clock limit per answer (default: the configuration's)")
    parser.add_argument("--workers", type=int, help="worker processes (default: the configuration's)")
    parser.add_argument("--allow_code_execution", action="store_true", help="let the task run the model's code")


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("reward check", __doc__)
    parser.add_argument("file", type=Path, help="jsonl file of rows")
    parser.add_argument("--task", required=True, help=f"one of {', '.join(filter(judges, REWARDS))}")
    parser.add_argument("--json", action="store_true", help="print only one JSON object per row, in order")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a verdict differs from the expected one")
    add_settings(parser)
    arguments = parser.parse_args(argv)
    if arguments.task not in filter(judges, REWARDS):
        raise BadInput(f"unknown task {arguments.task!r}. There are {', '.join(filter(judges, REWARDS))}.")
    pool, options = settings(arguments, arguments.task)
    rows = read_rows(arguments.file, arguments.task)
    try:
        # The code sandbox prints how it isolates; with --json, stdout holds only the verdicts.
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            found = judge_rows(rows, arguments.task, pool, options)
    finally:
        pool.close()
    if arguments.json:
        for judgement in found:
            print(json.dumps({"verdict": judgement.value, "extracted": judgement.extracted, "rule": judgement.rule}))
    else:
        for row, judgement in zip(rows, found, strict=True):
            print(_line(row, judgement))
        print(_summary(rows, found))
    wrong = [row for row, judgement in zip(rows, found, strict=True) if _disagrees(row, judgement)]
    if wrong and arguments.strict:
        print(f"{len(wrong)} of {len(rows)} verdicts differ from the expected ones", file=sys.stderr)
        return CHECK_FAILED
    return DONE


def _disagrees(row: Row, judgement: Judgement) -> bool:
    return row.expected is not None and judgement.value is not row.expected


def _verdict(value: bool | None) -> str:
    return {True: "paid", False: "not paid", None: "undecided"}[value]


def _line(row: Row, judgement: Judgement) -> str:
    read = "no answer" if judgement.extracted is None else shown(judgement.extracted)
    mark = "  <- expected " + _verdict(row.expected) if _disagrees(row, judgement) else ""
    return f"line {row.line}: {_verdict(judgement.value)} ({judgement.rule})  {read} against {shown(row.gold)}{mark}"


def shown(text: str, limit: int = 60) -> str:
    """A text on one line, truncated to `limit` characters."""
    text = " ".join(text.split())
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}… ({len(text):,} characters)"


def _summary(rows: list[Row], found: list[Judgement]) -> str:
    rules = Counter((_verdict(judgement.value), judgement.rule) for judgement in found)
    values = Counter(judgement.value for judgement in found)
    lines = [
        f"\n{len(rows)} rows: {values[True]} paid, {values[False]} not paid, {values[None]} undecided",
        "by rule: " + ", ".join(f"{verdict} by {rule} {count}" for (verdict, rule), count in rules.most_common()),
    ]
    known = [(row, judgement) for row, judgement in zip(rows, found, strict=True) if row.expected is not None]
    if not known:
        return "\n".join(lines)
    wrong = [(row, judgement) for row, judgement in known if _disagrees(row, judgement)]
    lines.append(f"agreement: {len(known) - len(wrong)} of {len(known)} ({1 - len(wrong) / len(known):.1%})")
    lines.append(f"{'':>19}{'paid':>10}{'not paid':>10}{'undecided':>11}")
    table = Counter((row.expected, judgement.value) for row, judgement in known)
    for expected in (True, False):
        counts = [table[expected, value] for value in (True, False, None)]
        lines.append(f"expected {_verdict(expected):>10}{counts[0]:>10}{counts[1]:>10}{counts[2]:>11}")
    lines += [_line(row, judgement) for row, judgement in wrong[:SHOWN]]
    if len(wrong) > SHOWN:
        lines.append(f"… and {len(wrong) - SHOWN} more disagreements")
    return "\n".join(lines)
