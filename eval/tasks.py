r"""Tasks: which problems are asked, with what prompt, and what makes a completion right.

A run is evaluated on its own data group. `task_values` replaces that group with a known task for an evaluation on
other problems (transfer); `scoring_of` defines how a configuration's completions are judged:

- final answers (gsm8k, svamp, math500): `eval.score.MATH`;
- code (mbpp, humaneval): all hidden tests pass in the sandbox of `reward.code`. Parsed if a fenced code block was
  found, or if text without one is Python; strict counts only fenced blocks;
- `eval.reward`, a name in `reward/` or `module:function` with TRL's signature: right at or above
  `eval.reward_threshold`;
- `eval.reward: environment`, the reward of the run's environment, by the same threshold. It is the default where the
  environment has one and `data.answer_format` is any.

Imports no torch. The model's code runs only in the sandbox, and only with `reward.allow_code_execution`.
"""

import asyncio
import copy
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.score import MATH, Answered, Judgement, Scoring
from kit.core import own_code
from kit.core.config.load import resolve
from kit.core.config.schema import Config, DataConfig
from kit.core.errors import BadInput, CheckFailed, did_you_mean
from kit.data.problems import CODE_FORMATS, TEXT_FORMATS, first_row, reward_columns

if TYPE_CHECKING:
    from reward.pool import WorkerPool
    from reward.score import Explanation

_STATEMENT = re.compile(r"^[ \t]*(?:async def|def|class|return|import|from)\b|\blambda\b", re.MULTILINE)
ENVIRONMENT = "environment"  # as eval.reward
BOX = "\nPut the final answer in \\boxed{}."
MATH_FORMATS = (*TEXT_FORMATS, "countdown")


@dataclass(frozen=True)
class Task:
    """A known problem set: its columns (the first pair that a file has), reference form, instruction and hub place."""

    columns: tuple[tuple[str, str], ...]
    answer_format: str
    prompt_suffix: str
    id: str | None = None
    config: str | None = None
    split: str = "test"


TASKS = {
    "gsm8k": Task((("question", "answer"),), "gsm8k", BOX, "openai/gsm8k", "main"),
    "svamp": Task((("Body+Question", "Answer"), ("question", "answer")), "plain", BOX, "ChilleD/SVAMP"),
    "math500": Task((("problem", "answer"), ("question", "answer")), "plain", BOX, "HuggingFaceH4/MATH-500"),
    "mbpp": Task(
        (("prompt", "test_list"), ("text", "test_list")),
        "mbpp",
        "\nAnswer with one Python code block.",
        "google-research-datasets/mbpp",
        "sanitized",
    ),
    "humaneval": Task(
        (("prompt", "test"),),
        "humaneval",
        "\n\nComplete this function. Answer with one Python code block that holds the whole function.",
        "openai/openai_humaneval",
    ),
    # Any problems, described by eval.reward and, if the columns have other names, by data.question_column.
    "jsonl": Task((("question", "answer"), ("problem", "answer"), ("prompt", "gold")), "any", ""),
}


def task_values(values: dict, task: str, path: str | Path | None = None) -> dict:
    """Return the nested values of a run's configuration with the data group of `task`, to be resolved with overrides.

    `path` is a file, or a folder with `test.jsonl` (.json, .parquet, .jsonl.gz); without it the task's hub id is used.
    The system message and the arguments of the chat template stay the run's, and so does its instruction if its own
    answers are of the same kind: a policy is asked in the words it was trained with. `BadInput` for an unknown task,
    or one with nothing to read.
    """
    if task not in TASKS:
        hint = did_you_mean(task, TASKS, cutoff=0.4)
        raise BadInput(f"unknown task {task!r}.{hint} There are {', '.join(TASKS)}.")
    known, own = TASKS[task], values.get("data") or {}
    if path is None and known.id is None:
        raise BadInput(f"task {task} has no problems of its own: name a file with --data.")
    data = {"eval_split": known.split, "answer_format": known.answer_format, "prompt_suffix": known.prompt_suffix}
    kept = ("system_prompt", "chat_template_kwargs", "max_bad_fraction")
    data |= {key: own[key] for key in kept if key in own}
    if known.answer_format in MATH_FORMATS and own.get("answer_format", "plain") in MATH_FORMATS:
        data["prompt_suffix"] = own.get("prompt_suffix") or ""
    data |= {"id": known.id, "config": known.config} if path is None else {"eval_path": str(path)}
    question, answer = known.columns[0] if path is None else _columns(known, data)
    return {**copy.deepcopy(values), "data": {**data, "question_column": question, "answer_column": answer}}


def task_config(config: Config, task: str, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """`config` with the data group of `task` and the overrides of a command line; see `task_values`."""
    values = task_values(dataclasses.asdict(config), task, path)
    return resolve(values, list(overrides), f"task {task}")


def _columns(task: Task, data: dict) -> tuple[str, str]:
    """The first pair of columns that the file has, else the first pair, which loading then reports as missing."""
    row = first_row(DataConfig(**data), "eval")
    found = (pair for pair in task.columns if {*pair[0].split("+"), pair[1]} <= set(row))
    return next(found, task.columns[0])


def scoring_of(config: Config, owns_reward: bool = False) -> Scoring:
    """How a configuration's completions are judged, checked before any weight is loaded. `owns_reward`: its
    environment has a reward.

    `BadInput` if the reward is unknown or cannot be imported or called, or if code would run that
    `reward.allow_code_execution` does not allow or that this machine cannot confine.
    """
    settings, form = config.eval, config.data.answer_format
    if not math.isfinite(settings.reward_threshold):
        raise BadInput(f"eval.reward_threshold ({settings.reward_threshold}) must be a number.")
    name = settings.reward
    if name == ENVIRONMENT or (name is None and form == "any" and owns_reward):
        if not owns_reward:
            raise BadInput(f"eval.reward is {ENVIRONMENT}, and the run has no environment with a reward of its own.")
        return Scoring(ENVIRONMENT, partial(judge_by_reward, _environment_rewards, settings.reward_threshold))
    if name is None:
        if form in TEXT_FORMATS:
            return MATH
        if form == "any":
            raise BadInput(
                "data.answer_format any does not define when an answer is correct. Name a reward: --eval.reward "
                "module:function, or one of reward/README.md."
            )
        name = "countdown" if form == "countdown" else "code"
    if ":" in name:
        from reward.own import imported, source_hash

        function = imported(name, "eval.reward", may_be_async=True)
        _check_code(config, name, function)
        _check_arguments(config, name, function)
        called = custom(name, function, config.reward.request_timeout_s)
        judge = partial(judge_by_reward, called, settings.reward_threshold)
        return Scoring(name, judge, version=source_hash(function))
    options = _named_options(config, name)
    if name == "code":
        if form not in CODE_FORMATS:
            raise BadInput(
                f"eval.reward code reads tests as references, and data.answer_format is {form}. Use one of "
                f"{', '.join(CODE_FORMATS)}."
            )
        judge = partial(judge_code, {**options, "partial": False})
        return Scoring("code", judge, quotes_question=form == "humaneval")
    from reward import REWARDS

    def named(answers: Sequence[Answered], pool: "WorkerPool") -> tuple[list, list | None]:
        rewards, seen = _explained(REWARDS[name], options, answers, pool)
        return rewards, seen.extracted or None

    return Scoring(name, partial(judge_by_reward, named, settings.reward_threshold))


def _named_options(config: Config, name: str) -> dict:
    """Return the checked options of a reward of the kit; `BadInput` unless it may and can run here."""
    from reward import MODELS, REWARDS, BoundReward, check_run, checked_options, placed_options, start

    if name not in REWARDS:
        hint = did_you_mean(name, REWARDS, cutoff=0.4)
        raise BadInput(
            f"eval.reward: unknown reward {name!r}.{hint} There are {', '.join(REWARDS)}, or module:function."
        )
    if "completion_ids" in inspect.signature(REWARDS[name]).parameters:
        raise BadInput(f"eval.reward {name} counts a run's tokens and does not judge answers. Use another reward.")
    _check_code(config, name, REWARDS[name])
    given = {key: value for key, value in config.reward.options.items() if key == name}
    own_code.check_service(name, given.get(name) or {}, "eval.reward")
    options = checked_options(given, [name])[name]
    options |= placed_options(name, options, None)
    if name in MODELS:
        bound = [BoundReward(name, config.reward.workers, config.reward.timeout_s, 1.0, options)]
        check_run(bound, config, reward_columns(config.data, "eval"))
        start(bound)
    if name == "code":
        from reward.sandbox import shared_sandbox

        limits = {key: options[key] for key in ("timeout_s", "memory_mib", "isolation") if key in options}
        shared_sandbox(config.reward.workers, **limits).isolation()  # refused here if too little confines the code
    return options


def _check_code(config: Config, name: str, function: Callable) -> None:
    if getattr(function, "executes_code", False) and not config.reward.allow_code_execution:
        raise BadInput(
            f"{name} runs code that the model wrote. Allow it with --allow_code_execution, or in the run's YAML with "
            "reward.allow_code_execution: true. reward/README.md describes what the sandbox blocks."
        )
    if getattr(function, "executes_code", False):
        own_code.check_consent("reward.allow_code_execution")


COLUMNS = ("prompts", "completions", "gold", "problem_id")
Reward = Callable[[Sequence[Answered], "WorkerPool"], tuple[list, list | None]]


def _check_arguments(config: Config, name: str, function: Callable) -> None:
    """Raise `BadInput` unless a run's columns and those of the problems are all that the function needs."""
    from reward.own import check_arguments

    if getattr(function, "group", False):
        raise BadInput(f"eval.reward {name} judges the completions of a group together, and here there are no groups.")
    columns = (*COLUMNS, "environments") if config.environment.factory else COLUMNS
    try:
        check_arguments(name, function, "eval.reward", columns, ())
    except BadInput:  # reads the problems only if it must
        check_arguments(name, function, "eval.reward", (*columns, *reward_columns(config.data, "eval")), ())


def custom(name: str, function: Callable, limit_s: float = math.inf) -> Reward:
    """Wrap `function` to be called as TRL would in a run, with what it takes by name; an async one that takes longer
    than `limit_s` leaves its completions undecided."""
    from reward.own import awaited, is_async, taken

    def call(answers: Sequence[Answered], pool: "WorkerPool") -> tuple[list, None]:
        known = {
            **own_columns(answers),
            "prompts": [answer.conversation for answer in answers],
            "completions": [answer.messages for answer in answers],
            "gold": [answer.problem.gold for answer in answers],
            "problem_id": [answer.problem.id for answer in answers],
        }
        if any(answer.episode for answer in answers):
            played = [answer.episode and answer.episode.episode for answer in answers]
            known["environments"] = [one and one.instance for one in played]
        try:
            if is_async(function):
                found = asyncio.run(awaited(name, function, taken(function, known), limit_s))
                return [None] * len(answers) if found is None else list(found), None
            return list(function(**taken(function, known))), None
        except Exception as error:  # whatever the user's function raises, the cell has no value
            raise CheckFailed(f"eval.reward {name} failed: {type(error).__name__}: {error}") from error

    return call


def own_columns(answers: Sequence[Answered], hidden: Collection[str] = ()) -> dict[str, list]:
    """Columns of the answered problems by their own names, without `hidden` ones."""
    from reward.own import RESERVED

    names = dict.fromkeys(name for answer in answers for name in answer.problem.columns)
    kept = [name for name in names if name not in RESERVED and name not in hidden]
    return {name: [answer.problem.columns.get(name) for answer in answers] for name in kept}


def _environment_rewards(answers: Sequence[Answered], pool: "WorkerPool") -> tuple[list, None]:
    return [answer.episode.reward for answer in answers], None


def _explained(
    function: Callable, options: dict, answers: Sequence[Answered], pool: "WorkerPool"
) -> tuple[list, "Explanation"]:
    """The rewards of a function of `reward/` and what it explains about them."""
    from reward import completed
    from reward.score import Explanation

    seen = Explanation()
    rewards = function(
        [answer.conversation for answer in answers],
        [answer.text for answer in answers],
        gold=[answer.problem.gold for answer in answers],
        pool=pool,
        budget=seen,
        **own_columns(answers, hidden=inspect.signature(function).parameters),
        **options,
    )
    return completed(rewards), seen


def judge_by_reward(
    call: Reward, threshold: float, answers: Sequence[Answered], pool: "WorkerPool"
) -> list[Judgement]:
    """Judge right at or above `threshold`; a reward of None (or NaN) is undecided. `CheckFailed` for non-rewards."""
    rewards, extracted = call(answers, pool)
    if len(rewards) != len(answers):
        raise CheckFailed(f"the reward returned {len(rewards)} values for {len(answers)} completions.")
    texts = extracted or [answer.text if answer.text.strip() else None for answer in answers]
    judged = []
    for text, value in zip(texts, map(_reward, rewards), strict=True):
        right = None if value is None else value >= threshold
        judged.append(Judgement(text, text is not None, right, right, reward=value))
    return judged


def _reward(value: Any) -> float | None:
    """A reward as a float; numpy's and torch's numbers are accepted, NaN becomes None."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise CheckFailed(f"the reward returned {value!r:.80}, expected a number or None.") from None
    return None if math.isnan(number) else number


def judge_code(options: dict, answers: Sequence[Answered], pool: "WorkerPool") -> list[Judgement]:
    """Judge right if all hidden tests pass; identical completions of a problem are run once."""
    from reward.code import code, fenced_blocks

    distinct = list({(answer.problem.id, answer.text): answer for answer in answers}.values())
    rewards, seen = _explained(code, options, distinct, pool)
    judged = {}
    for answer, reward, block, verdict in zip(distinct, rewards, seen.extracted, seen.verdicts, strict=True):
        fenced = bool(fenced_blocks(answer.text))
        # Without a fence the whole text was tried: "Yes" and "42" are valid Python but no programs.
        tried = verdict.reason not in ("syntax", "too long") and _STATEMENT.search(answer.text) is not None
        parsed = block is not None and (fenced or tried)
        right = None if reward is None else reward >= 1.0
        strict = right if fenced else False
        judged[answer.problem.id, answer.text] = Judgement(block if parsed else None, parsed, right, strict, reward)
    return [judged[answer.problem.id, answer.text] for answer in answers]
