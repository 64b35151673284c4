"""`python -m reward check FILE.jsonl --task math`: how a reward judges answers that you already know.

Rows are JSON objects with `gold` and either `prediction` (an answer, or a text that states one) or `completion` (model
output, read exactly as in training), and optionally `expected` (true or false) and `prompt`. The task may be a
function of your own, module:function; it gets the row's other fields as columns.
"""

import argparse
import contextlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.core.config.load import load_config
from kit.core.config.schema import RewardConfig
from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser
from kit.core.run_files import parse
from kit.core.user_files import open_file
from reward import REWARDS, function_options, is_own, reward_functions
from reward.answer import final_answer, message_text
from reward.answer_forms import BARE, forms_for, written
from reward.explain import Judgement, Sample, check_callable, explain, judges, shown
from reward.pool import WorkerPool
from reward.score import Message
from reward.stated import reference_answer

USED = ("gold", "prediction", "completion", "expected", "prompt")  # fields of a row that are no columns
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
    columns: dict[str, Any] = field(default_factory=dict)

    def sample(self, text: str | None = None) -> Sample:
        """The row for `explain`, with another `text` in place of its own."""
        return Sample(self.text if text is None else text, self.gold, self.prompt, self.columns)


def judge_rows(
    rows: list[Row],
    task: str,
    pool: WorkerPool,
    options: dict[str, Any],
    paid_from: float = 1.0,
    form: str | None = None,
) -> list[Judgement]:
    """Return a judgement for every row, in order.

    A completion is read as in training. A prediction is read in the task's most lenient form. If the task has the
    option `form` and `options` does not set it, that is the option's; otherwise the prediction is read in the task's
    form (a box, …) or from its last sentence, and failing that is itself the answer. A function of the user's gets a
    prediction in the usual forms until it pays one, or only in `form` (`reward.answer_form`).
    """
    if is_own(task):
        return _judged_by_own(rows, task, pool, options, paid_from, form)
    if "form" in function_options(task) and "form" not in options:
        kinds = {False: options | {"form": "lenient"}, True: options}
        of = {
            kind: iter(explain(task, [row.sample() for row in rows if row.is_completion is kind], pool, kinds[kind]))
            for kind in kinds
        }
        return [next(of[row.is_completion]) for row in rows]
    found = explain(task, [row.sample() for row in rows], pool, options)
    fenced = task == "code"
    bare = {
        index: CODE.format(row.text.strip()) if fenced else BOX.format(stated_answer(row.text))
        for index, (row, judgement) in enumerate(zip(rows, found, strict=True))
        if not row.is_completion and judgement.extracted is None and row.text.strip() and judgement.value is not True
        if not (fenced and "```" in row.text)
    }
    again = explain(task, [Sample(text, rows[index].gold) for index, text in bare.items()], pool, options)
    for index, judgement in zip(bare, again, strict=True):
        found[index] = judgement
    return found


def _judged_by_own(
    rows: list[Row], task: str, pool: WorkerPool, options: dict[str, Any], paid_from: float, form: str | None
) -> list[Judgement]:
    """The judgement of each row by a user's function: of a prediction that of its best form, the first of equals.

    `extracted` is the text that was judged.
    """
    tried = []
    for row in rows:
        forms = [BARE] if row.is_completion else forms_for(message_text(row.prompt), form)
        tried.append([written(one, row.text) for one in forms])
    best: list[Judgement | None] = [None] * len(rows)
    for place in range(max(map(len, tried))):
        left = [
            index
            for index, texts in enumerate(tried)
            if place < len(texts) and ((known := best[index]) is None or known.value is not True)
        ]
        samples = [rows[index].sample(tried[index][place]) for index in left]
        for index, one in zip(left, explain(task, samples, pool, options, paid_from), strict=True):
            known, reward = best[index], -math.inf if one.reward is None else one.reward
            if known is None or reward > (-math.inf if known.reward is None else known.reward):
                best[index] = replace(one, extracted=tried[index][place])
    return [one for one in best if one is not None]


def stated_answer(prediction: str) -> str:
    """The answer that a prediction states in a last sentence such as "The answer is 7.", else the whole prediction."""
    last_line = prediction.rstrip().rpartition("\n")[2][-LAST_SENTENCE:]
    stated = _STATES.split(last_line)
    return (stated[-1].rstrip(" .*") if len(stated) > 1 else "") or prediction.strip()


def read_rows(path: Path, task: str, make: Callable[[int, Any, str], Any] | None = None) -> list:
    """Read the rows of a jsonl file; `BadInput` lists the unusable lines before anything is scored.

    `make` turns (line, value, task) into a row, or raises `ValueError` with what is wrong; the default is `check`'s.
    """
    with open_file(path) as file:
        lines = file.read().split(b"\n")
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((make or _row)(number, parse(line, is_foreign=True), task))
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
    if isinstance(gold, list | dict) and (task in STRUCTURED or is_own(task)):
        gold = json.dumps(gold, ensure_ascii=False)
    gold, text = _text("gold", gold), value[given[0]]
    if task not in STRUCTURED and not is_own(task):
        # data.answer_format boxed and gsm8k do the same before a run
        gold = reference_answer(gold) if task == "math" else final_answer(gold) or gold
    return Row(
        line=number,
        gold=gold,
        text="" if text is None else _text(given[0], text),
        is_completion=given[0] == "completion",
        expected=None if expected is None else bool(expected),
        prompt=value.get("prompt"),
        columns={name: one for name, one in value.items() if name not in USED},
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not text or a number")
    return value


def settings(
    arguments: argparse.Namespace, task: str, columns: Sequence[str] = ()
) -> tuple[WorkerPool, dict[str, Any]]:
    """The pool and the checked options of a task, from --config and the flags that override it; `columns` are those
    that a user's function may take."""
    given = load_config(arguments.config).reward if arguments.config else RewardConfig()
    options = dict(given.options.get(task) or {})
    if arguments.options:
        try:
            typed = parse(arguments.options.encode())
        except ValueError as error:
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
        ),
        columns,
    )
    if is_own(task):
        check_callable(task, columns)
    return WorkerPool(bound.workers, bound.timeout_s), bound.options


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `settings` reads."""
    parser.add_argument("--config", type=Path, help="YAML of a run; its reward group gives options and limits")
    parser.add_argument("--options", help="options of the task as JSON, e.g. '{\"ordered\": false}'")
    parser.add_argument("--timeout_s", type=float, help="wall-clock limit per answer (default: the configuration's)")
    parser.add_argument("--workers", type=int, help="worker processes (default: the configuration's)")
    parser.add_argument(
        "--paid_from", type=float, default=1.0, help="lowest reward of an own function that counts as paid (default 1)"
    )
    parser.add_argument("--allow_code_execution", action="store_true", help="let the task run the model's code")


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("reward check", __doc__)
    parser.add_argument("file", type=Path, help="jsonl file of rows")
    names = ", ".join(filter(judges, REWARDS))
    parser.add_argument("--task", required=True, help=f"module:function, or one of {names}")
    parser.add_argument("--json", action="store_true", help="print only one JSON object per row, in order")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a verdict differs from the expected one")
    add_settings(parser)
    arguments = parser.parse_args(argv)
    if not is_own(arguments.task) and arguments.task not in filter(judges, REWARDS):
        raise BadInput(f"unknown task {arguments.task!r}. There are {names}, or module:function.")
    rows = read_rows(arguments.file, arguments.task)
    columns = tuple(dict.fromkeys(name for row in rows for name in row.columns))
    pool, options = settings(arguments, arguments.task, columns if is_own(arguments.task) else ())
    form = load_config(arguments.config).reward.answer_form if arguments.config else None
    try:
        # The code sandbox prints how it isolates; with --json, stdout holds only the verdicts.
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            found = judge_rows(rows, arguments.task, pool, options, arguments.paid_from, form)
    finally:
        pool.close()
    if arguments.json:
        for judgement in found:
            facts = {"verdict": judgement.value, "extracted": judgement.extracted, "rule": judgement.rule}
            print(json.dumps(facts | ({"reward": judgement.reward} if is_own(arguments.task) else {})))
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
    rule = f"reward {judgement.reward:g}" if judgement.rule == "reward" else judgement.rule
    return f"line {row.line}: {_verdict(judgement.value)} ({rule})  {read} against {shown(row.gold)}{mark}"


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
