"""`python -m reward attack --task math`: try to be paid without the answer.

Runs the built-in suite (reward/attacks) against the reward with its configured options and limits. An attempt may
earn 0 or stay undecided (masked in training). An honest control must earn 1, so a reward that pays nobody fails too.
Exit code 1 if an attempt is paid, a control is not, or the reward raises.
"""

import argparse
import importlib
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from kit.core.config.load import load_config
from kit.core.errors import CHECK_FAILED, DONE, BadInput, command_parser
from reward import MODELS, REWARDS, function_options, is_own
from reward.attacks import Case
from reward.check import Judgement, add_settings, explain, judges, settings, shown
from reward.pool import WorkerPool

SUITES = ("reward.attacks.extraction", "reward.attacks.values", "reward.attacks.form", "reward.attacks.code")
PENALTIES = ("length", "repetition", "language")  # these only subtract: their best value is 0
QUICK_S = 1.0  # default limit per comparison (twice that per program) without a flag or --config
LISTED = 20  # failures printed in full


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

        For a penalty: an attempt escaped it, or a control did not.
        """
        reward = self.judgement.reward
        if self.error:
            return True
        if self.task in PENALTIES:
            return reward is None or (reward < 0.0) == self.case.pays
        return reward is None or reward < 1.0 if self.case.pays else reward is not None and reward > 0.0


def suite(task: str) -> list[Case]:
    """The cases of a reward function, by category."""
    cases = [case for name in SUITES for case in importlib.import_module(name).CASES if task in case.tasks]
    return sorted(cases, key=lambda case: case.category)


def run(task: str, pool: WorkerPool, options: dict) -> tuple[list[Result], dict[tuple[str, str], float]]:
    """Results of a function's whole suite in order, and the seconds spent per category."""
    by_category = defaultdict(list)
    form = _form(task, options)
    for case in suite(task):
        if form is None or form in case.forms:
            by_category[case.category].append(case)
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    for category, cases in by_category.items():
        started = time.perf_counter()
        results += _judged(task, cases, pool, options)
        seconds[task, category] = time.perf_counter() - started
    return results, seconds


def _form(task: str, options: dict) -> str | None:
    """The answer form that a reward function reads; None if it has no such option."""
    known = function_options(task)
    if "form" not in known:
        return None
    # An answer in a tag of its own is read like a box.
    return "boxed" if options.get("answer_tag") is not None else options.get("form", known["form"][1])


def _judged(task: str, cases: list[Case], pool: WorkerPool, options: dict) -> list[Result]:
    try:
        found = explain(task, [(case.completion, case.gold, case.prompt) for case in cases], pool, options)
    except Exception as error:  # any exception of a reward function would end a run, so it is a finding
        if len(cases) == 1:
            return [Result(task, cases[0], Judgement(None, None, "error", None), f"{type(error).__name__}: {error}")]
        half = len(cases) // 2
        return _judged(task, cases[:half], pool, options) + _judged(task, cases[half:], pool, options)
    return [Result(task, case, judgement) for case, judgement in zip(cases, found, strict=True)]


def report(results: list[Result], seconds: dict[tuple[str, str], float]) -> str:
    """A table by function and category, followed by the failures."""
    lines = [
        f"{'reward':<15}{'category':<14}{'attempts':>9}{'paid':>6}{'undecided':>11}{'controls':>10}{'paid':>6}{'s':>7}"
    ]
    groups = defaultdict(list)
    for result in results:
        groups[result.task, result.case.category].append(result)
    for (task, category), group in groups.items():
        attempts = [result for result in group if not result.case.pays]
        controls = [result for result in group if result.case.pays]
        lines.append(
            f"{task:<15}{category:<14}{len(attempts):>9}{sum(r.failed for r in attempts):>6}"
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
        if own := [name for name in names if is_own(name) or name in MODELS]:
            print(f"skipped: {', '.join(own)} (the suite has no cases for it)")
        return [name for name in names if name in covered and name not in left_out]
    if arguments.task not in covered:
        raise BadInput(f"unknown task {arguments.task!r}. There are all, {', '.join(covered)}.")
    return [arguments.task]


def _settings(arguments: argparse.Namespace, task: str) -> tuple[WorkerPool, dict]:
    """Pool and options of a task; without a configuration the limits are short, as most of the cost is waiting."""
    if arguments.config or arguments.timeout_s is not None:
        return settings(arguments, task)
    pool, options = settings(argparse.Namespace(**{**vars(arguments), "timeout_s": QUICK_S}), task)
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
    add_settings(parser)
    arguments = parser.parse_args(argv)
    tasks = _tasks(arguments)
    if arguments.options and len(tasks) > 1:
        raise BadInput("--options belong to one task: name it with --task.")
    prepared = {task: _settings(arguments, task) for task in tasks}
    results: list[Result] = []
    seconds: dict[tuple[str, str], float] = {}
    for task, (pool, options) in prepared.items():
        try:
            found, taken = run(task, pool, options)
        finally:
            pool.close()
        results += found
        seconds.update(taken)
    print(report(results, seconds))
    weights = form_outweighs_answer(arguments.config) if arguments.config else None
    if weights:
        print(weights)
    return CHECK_FAILED if weights or not results or any(result.failed for result in results) else DONE
