"""`python -m reward attack --task math`: try to be paid without the answer.

Runs the built-in suite (reward/attacks) against the reward with its configured options and limits. An attempt may
earn 0 or stay undecided (masked in training). An honest control must earn 1, so a reward that pays nobody fails too.
Exit code 1 if an attempt is paid, a control is not, or the reward raises.

For a function of your own (`--task module:function`) the attempts are made from references: those of `--answers`, a
jsonl file with `gold` (or the configuration's answer column) and the columns that the function takes.
"""

import argparse
import importlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser
from reward import MODELS, REWARDS, function_options, is_own
from reward.answer import message_text
from reward.answer_forms import forms_for, written
from reward.attacks import Case
from reward.attacks.own import BUILT_IN, Reference
from reward.attacks.own import cases as own_cases
from reward.check import add_settings, read_rows, settings
from reward.explain import Judgement, Sample, explain, judges, shown
from reward.pool import WorkerPool

SUITES = ("reward.attacks.extraction", "reward.attacks.values", "reward.attacks.form", "reward.attacks.code")
PENALTIES = ("length", "repetition", "language")  # these only subtract: their best value is 0
QUICK_S = 1.0  # default limit per comparison (twice that per program) without a flag or --config
LISTED = 20  # failures printed in full
REFERENCES, OTHERS = 5, 3  # references that a user's function is attacked with, and wrong answers against each


@dataclass(frozen=True)
class Result:
    """A case as judged by one reward function; `error` is set if the function raised."""

    task: str
    case: Case
    judgement: Judgement
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether an attempt earned something, a control earned less than 1, or the function raised.

        For a penalty: an attempt escaped it, or a control did not. A user's function pays from `--paid_from` on.
        """
        reward = self.judgement.reward
        if self.error:
            return True
        if is_own(self.task):
            return (self.judgement.value is True) != self.case.pays
        if self.task in PENALTIES:
            return reward is None or (reward < 0.0) == self.case.pays
        return reward is None or reward < 1.0 if self.case.pays else reward is not None and reward > 0.0


def suite(task: str) -> list[Case]:
    """The cases of a reward function, by category."""
    cases = [case for name in SUITES for case in importlib.import_module(name).CASES if task in case.tasks]
    return sorted(cases, key=lambda case: case.category)


def suite_of_own(
    task: str, references: list[Reference], pool: WorkerPool, options: dict, paid_from: float, form: str | None
) -> list[Case]:
    """The cases of a user's function: each reference in the first form that the function pays, and attempts in it."""
    found = []
    golds = list(dict.fromkeys(reference.gold for reference in references))
    for reference in references:
        place = golds.index(reference.gold)
        others = [*golds[place + 1 :], *golds[:place]][:OTHERS] or ["something else"]
        forms = forms_for(message_text(reference.prompt), form)
        samples = [
            Sample(written(one, reference.gold), reference.gold, reference.prompt, reference.columns) for one in forms
        ]
        judged = explain(task, samples, pool, options, paid_from)
        paid = [one for one, judgement in zip(forms, judged, strict=True) if judgement.value]
        found += own_cases(task, reference, (paid or forms)[0], others)
    return sorted(found, key=lambda case: case.category)


def read_references(path: Path, config: Config | None) -> list[Reference]:
    """References of a jsonl file, spread evenly over it; `gold`, or the answer column of `config`, holds each."""
    column = config.data.answer_column if config else None
    asked = config.data.question_column if config else None

    def reference(number: int, value: Any, task: str) -> Reference:
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}, expected an object")
        name = next((one for one in ("gold", column) if one in value), None)
        if name is None:
            raise ValueError(f"no gold{f' and no {column}' if column else ''}; it has {', '.join(value) or 'nothing'}")
        gold, prompt = value[name], value.get("prompt", value.get(asked))
        gold = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)
        return Reference(gold, prompt if isinstance(prompt, str | list) else None, value)

    rows = read_rows(path, "", reference)
    return rows[:: max(1, len(rows) // REFERENCES)][:REFERENCES]


def run(
    task: str, pool: WorkerPool, options: dict, cases: Sequence[Case], paid_from: float = 1.0
) -> tuple[list[Result], dict[tuple[str, str], float]]:
    """Results of a function's cases in order, and the seconds spent per category."""
    by_category = defaultdict(list)
    form = _form(task, options)
    for case in cases:
        if form is None or form in case.forms:
            by_category[case.category].append(case)
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    for category, some in by_category.items():
        started = time.perf_counter()
        results += _judged(task, some, pool, options, paid_from)
        seconds[task, category] = time.perf_counter() - started
    return results, seconds


def _form(task: str, options: dict) -> str | None:
    """The answer form that a reward function reads; None if it has no such option."""
    known = function_options(task)
    if "form" not in known:
        return None
    # An answer in a tag of its own is read like a box.
    return "boxed" if options.get("answer_tag") is not None else options.get("form", known["form"][1])


def _judged(task: str, cases: list[Case], pool: WorkerPool, options: dict, paid_from: float) -> list[Result]:
    samples = [Sample(case.completion, case.gold, case.prompt, case.columns) for case in cases]
    try:
        found = explain(task, samples, pool, options, paid_from)
    except Exception as error:  # any exception of a reward function would end a run, so it is a finding
        if len(cases) == 1:
            return [Result(task, cases[0], Judgement(None, None, "error", None), f"{type(error).__name__}: {error}")]
        half = len(cases) // 2
        return [one for part in (cases[:half], cases[half:]) for one in _judged(task, part, pool, options, paid_from)]
    return [Result(task, case, judgement) for case, judgement in zip(cases, found, strict=True)]


def report(results: list[Result], seconds: dict[tuple[str, str], float]) -> str:
    """A table by function and category, followed by the failures."""
    wide = max([14, *(len(result.task) for result in results)]) + 1
    lines = [
        f"{'reward':<{wide}}{'category':<14}{'attempts':>9}{'paid':>6}{'undecided':>11}{'controls':>10}{'paid':>6}{'s':>7}"
    ]
    groups = defaultdict(list)
    for result in results:
        groups[result.task, result.case.category].append(result)
    for (task, category), group in groups.items():
        attempts = [result for result in group if not result.case.pays]
        controls = [result for result in group if result.case.pays]
        lines.append(
            f"{task:<{wide}}{category:<14}{len(attempts):>9}{sum(r.failed for r in attempts):>6}"
            f"{sum(r.judgement.reward is None for r in attempts):>11}{len(controls):>10}"
            f"{sum(not r.failed for r in controls):>6}{seconds[task, category]:>7.1f}"
        )
    failed = sorted((r for r in results if r.failed), key=lambda r: (not r.error, r.case.pays))
    lines += [_finding(result) for result in failed[:LISTED]]
    if len(failed) > LISTED:
        lines.append(f"… and {len(failed) - LISTED} more")
    tried = sum(not result.case.pays for result in results)
    paid = sum(not result.case.pays for result in failed)
    lines.append(
        f"{tried} attempts, {paid} paid; {len(results) - tried} controls, {len(failed) - paid} not paid; "
        f"{sum(seconds.values()):.1f} s"
    )
    return "\n".join(lines)


def _finding(result: Result) -> str:
    case, judgement = result.case, result.judgement
    if result.error:
        what = f"RAISED {result.error[:200]}"
    elif case.pays:
        what = f"NOT PAID ({judgement.rule})"
    else:
        what = f"PAID {judgement.reward:g} ({judgement.rule})"
    read = "" if judgement.extracted is None else f", read as {shown(judgement.extracted)}"
    where = f"{result.task}, {case.category}, {case.name}"
    return f"{what}: {where}: {shown(case.completion)} against {shown(case.gold)}{read}"


def form_outweighs_answer(config: Path) -> str | None:
    """Error text if a configuration's form rewards together pay as much as the answer; None otherwise."""
    given = load_config(config).reward
    weights = given.weights or [1.0] * len(given.functions)
    by_kind = {"answer": 0.0, "form": 0.0}
    for name, weight in zip(given.functions, weights, strict=True):
        by_kind["answer" if judges(name) or name in MODELS else "form"] += 0.0 if name in PENALTIES else weight
    if by_kind["answer"] > by_kind["form"]:
        return None
    return (
        f"WEIGHTS: form alone earns {by_kind['form']:g}, the correct answer {by_kind['answer']:g}. "
        "Give the answer more weight than everything that can be earned without it."
    )


def _tasks(arguments: argparse.Namespace) -> list[str]:
    """The functions to attack: the named one, those of the configuration, or all that are allowed to run."""
    covered = [name for name in REWARDS if suite(name)]
    if arguments.task == "all":
        names = load_config(arguments.config).reward.functions if arguments.config else covered
        left_out = [n for n in names if not arguments.config and _is_barred(n, arguments)]
        if left_out:
            print(f"skipped: {', '.join(left_out)} (runs the model's code; add --allow_code_execution)")
        if models := [name for name in names if name in MODELS]:
            print(f"skipped: {', '.join(models)} (the suite has no cases for it)")
        own = [name for name in names if is_own(name)]
        if own and not arguments.answers:
            print(f"skipped: {', '.join(own)} (name its references with --answers FILE.jsonl)")
            own = []
        return [*(name for name in names if name in covered and name not in left_out), *own]
    if arguments.task not in covered and not is_own(arguments.task):
        raise BadInput(f"unknown task {arguments.task!r}. There are all, {', '.join(covered)}, or module:function.")
    return [arguments.task]


def _settings(arguments: argparse.Namespace, task: str, columns: Sequence[str]) -> tuple[WorkerPool, dict]:
    """Pool and options of a task; without a configuration the limits are short, as most of the cost is waiting."""
    if arguments.config or arguments.timeout_s is not None:
        return settings(arguments, task, columns)
    pool, options = settings(argparse.Namespace(**{**vars(arguments), "timeout_s": QUICK_S}), task, columns)
    if "timeout_s" in function_options(task):
        options = {"timeout_s": 2 * QUICK_S} | options
    return pool, options


def _is_barred(name: str, arguments: argparse.Namespace) -> bool:
    return getattr(REWARDS[name], "executes_code", False) and not arguments.allow_code_execution


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("reward attack", __doc__)
    parser.add_argument(
        "--task", default="all", help="a reward function, or all (default): those of --config, else every one"
    )
    parser.add_argument("--answers", type=Path, help="jsonl file of references, for a function of your own")
    add_settings(parser)
    arguments = parser.parse_args(argv)
    tasks = _tasks(arguments)
    if arguments.options and len(tasks) > 1:
        raise BadInput("--options belong to one task: name it with --task.")
    config = load_config(arguments.config) if arguments.config else None
    references = [Reference(gold) for gold in BUILT_IN]
    if arguments.answers:
        references = read_references(arguments.answers, config)
    columns = tuple(dict.fromkeys(name for reference in references for name in reference.columns))
    prepared = {task: _settings(arguments, task, columns if is_own(task) else ()) for task in tasks}
    form = config.reward.answer_form if config else None
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    for task, (pool, options) in prepared.items():
        try:
            cases = suite(task)
            if is_own(task):
                cases = suite_of_own(task, references, pool, options, arguments.paid_from, form)
            found, taken = run(task, pool, options, cases, arguments.paid_from)
        finally:
            pool.close()
        results += found
        seconds.update(taken)
    print(report(results, seconds))
    weights = form_outweighs_answer(arguments.config) if arguments.config else None
    if weights:
        print(weights)
    return CHECK_FAILED if weights or not results or any(result.failed for result in results) else DONE
