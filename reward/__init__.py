"""Rewards: plain functions in TRL's signature, `f(prompts, completions, gold, **kwargs) -> list[float | None]`.

`REWARDS` holds the kit's own; any other is named `module:function` (own.py). `reward_functions(cfg.reward)` binds the
configured ones to their options, a worker pool and a budget. None means "could not be computed" and is masked by the
trainer; it is never turned into 0.0.

A function takes its options as keyword-only arguments with a type and a default, after `pool` and `budget`. One that
runs the model's code carries the attribute `executes_code = True`. One whose options constrain each other carries
`check_options`, which is called with all of them and raises `ValueError` with what is wrong. One that compares with
`gold` carries `check_golds`, which is called with all references of a data set and returns [(index, why)] for those
that no completion can match; such rows are rejected when problems are read.
"""

import difflib
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kit.core.config.load import match_type, spell_type
from kit.core.errors import BadInput
from reward.code import code
from reward.countdown import arithmetic, countdown
from reward.format import boxed_format, think_format
from reward.gold import GoldCheck
from reward.gsm8k import gsm8k_lenient, gsm8k_strict
from reward.length import length
from reward.math import math as math_reward
from reward.own import COLUMNS, FROM_TRL, called, check_arguments, checked_rewards, imported, taken
from reward.pool import UnknownBudget, Verdict, WorkerPool, shared_pool
from reward.text import language, repetition

if TYPE_CHECKING:
    from kit.core.config.schema import Config, RewardConfig

RewardFunction = Callable[..., list[float | None]]

REWARDS: dict[str, RewardFunction] = {
    "math": math_reward,
    "gsm8k_strict": gsm8k_strict,
    "gsm8k_lenient": gsm8k_lenient,
    "code": code,
    "countdown": countdown,
    "arithmetic": arithmetic,
    "boxed_format": boxed_format,
    "think_format": think_format,
    "length": length,
    "repetition": repetition,
    "language": language,
}
MACHINERY = ("pool", "budget")  # keyword-only, supplied by the kit; the rest, except what a run passes, are options


class BoundReward:
    """A reward function bound to its options, its worker settings and its own budget for undecided samples.

    TRL logs it by `__name__`. It is picklable: the worker processes belong to the process-wide pool.
    """

    def __init__(
        self, name: str, workers: int, timeout_s: float, max_unknown_fraction: float, options: dict | None = None
    ):
        self.__name__ = name
        self.workers, self.timeout_s = workers, timeout_s
        self.options = options or {}
        self.budget = UnknownBudget(name, max_unknown_fraction)

    @property
    def unknown_counts(self) -> Counter[str]:
        """Number of samples that could not be computed so far, by reason."""
        return self.budget.counts

    def __call__(
        self, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        pool = shared_pool(self.workers, self.timeout_s)
        # A data set column named like an option must not override the configured value.
        arguments = {**columns, **self.options, "pool": pool, "budget": self.budget}
        if is_own(self.__name__):
            return self._call_own({"prompts": prompts, "completions": completions, **arguments})
        return REWARDS[self.__name__](prompts, completions, **arguments)

    def _call_own(self, arguments: dict[str, Any]) -> list[float | None]:
        """Checked result of a user's function; unknown samples are counted here unless it takes `budget` itself."""
        function, completions = function_of(self.__name__), arguments["completions"]
        found = called(self.__name__, function, taken(function, arguments))
        rewards = checked_rewards(self.__name__, found, len(completions))
        if "budget" not in inspect.signature(function).parameters:
            verdicts = [Verdict(None if reward is None else True, "none") for reward in rewards]
            self.budget.record(verdicts, [f"completion {str(one)[:200]}" for one in completions])
        return rewards


def is_own(name: str) -> bool:
    """Whether a reward is user-defined (`module:function`) rather than one of `REWARDS`."""
    return ":" in name


def function_of(name: str) -> RewardFunction:
    """Return the reward function for a configured name; `BadInput` if a user's function cannot be imported."""
    return imported(name, "reward.functions") if is_own(name) else REWARDS[name]


def gold_checks(names: Iterable[str]) -> dict[str, GoldCheck]:
    """{reward function: its reference check} for those that have one; each distinct check once."""
    found: dict[str, GoldCheck] = {}
    for name in names:
        check = getattr(function_of(name), "check_golds", None)
        if check is not None and check not in found.values():
            found[name] = check
    return found


def heldout_gold_checks(config: "Config") -> dict[str, GoldCheck]:
    """`gold_checks` of the functions that judge a configuration's held-out problems: `eval.reward` if it is the kit's;
    if unset and `data.answer_format` is any, the training rewards, since nothing else has parsed those references."""
    if config.eval.reward is not None:
        return gold_checks([config.eval.reward] if config.eval.reward in REWARDS else [])
    if config.data.answer_format != "any":
        return {}
    return gold_checks(name for name in config.reward.functions if name in REWARDS)


def reward_functions(reward: "RewardConfig") -> tuple[list[BoundReward], list[float]]:
    """The configured reward functions and their weights, for TRL's `reward_funcs` and `reward_weights`.

    Starts no process. Raises `BadInput` for an unknown or repeated name, weights that do not match the functions, an
    unknown option or a wrong option value, and a function that runs code while `allow_code_execution` is off.
    """
    if not reward.functions:
        raise BadInput(f"reward.functions is empty: name at least one of {', '.join(REWARDS)}.")
    for name in reward.functions:
        if is_own(name):
            known = (*COLUMNS, *FROM_TRL, *MACHINERY)
            check_arguments(name, function_of(name), "reward.functions", known, [*function_options(name)])
        elif name not in REWARDS:
            raise BadInput(f"reward.functions: unknown reward {name!r}.{_nearest(name, REWARDS)} Or module:function.")
    if len(set(reward.functions)) != len(reward.functions):
        raise BadInput(
            f"reward.functions names a reward twice: {', '.join(reward.functions)}. Use its weight instead."
        )
    weights = [1.0] * len(reward.functions) if reward.weights is None else [float(w) for w in reward.weights]
    if len(weights) != len(reward.functions):
        raise BadInput(
            f"reward.weights has {len(weights)} values for {len(reward.functions)} reward.functions "
            f"({', '.join(reward.functions)}). Give one weight per function."
        )
    WorkerPool(reward.workers, reward.timeout_s)  # refuses impossible limits
    for name in reward.functions:
        if getattr(function_of(name), "executes_code", False) and not reward.allow_code_execution:
            raise BadInput(
                f"reward {name!r} runs code that the model wrote. Set reward.allow_code_execution to true to let it, "
                "after reading in reward/README.md what the sandbox protects against."
            )
    options = checked_options(reward.options, reward.functions)
    functions = [
        BoundReward(name, reward.workers, reward.timeout_s, reward.max_unknown_fraction, options[name])
        for name in reward.functions
    ]
    return functions, weights


def function_options(name: str) -> dict[str, tuple[Any, Any]]:
    """Options of a reward function: name to (type, default); the default is `inspect.Parameter.empty` if missing."""
    function = function_of(name)
    hints = typing.get_type_hints(function) if inspect.isfunction(function) else {}
    return {
        key: (hints.get(key, Any), parameter.default)
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and key not in (*MACHINERY, *COLUMNS, *FROM_TRL)
    }


def checked_options(values: dict[str, Any], functions: list[str]) -> dict[str, dict[str, Any]]:
    """Every function's given options, converted to their types; `BadInput` gives the error and nearest valid name."""
    for name in values:
        if name not in functions:
            if name in REWARDS:
                raise BadInput(
                    f"reward.options.{name}: {name!r} is not in reward.functions, which are {', '.join(functions)}. "
                    f"Remove its options, on the command line with --reward.options '{{}}', or add {name!r}."
                )
            raise BadInput(f"reward.options.{name}: {name!r} is not a reward function.{_nearest(name, functions)}")
    return {name: _options_of(name, values.get(name)) for name in functions}


def _options_of(name: str, given: Any) -> dict[str, Any]:
    known, checked = function_options(name), {}
    if not isinstance(given, dict | None):
        raise BadInput(f"reward.options.{name} must be a group of options, it is {given!r:.60}.")
    for key, value in (given or {}).items():
        where = f"reward.options.{name}.{key}"
        if key not in known:
            hint = _nearest(key, known) if known else f" {name!r} has no options."
            raise BadInput(f"{where}: unknown option.{hint}")
        matched, checked[key] = match_type(value, known[key][0])
        if not matched:
            raise BadInput(f"{where} must be {spell_type(known[key][0])}, it is {value!r:.60}.")
    values = {key: default for key, (_, default) in known.items()} | checked
    if missing := [key for key, value in values.items() if value is inspect.Parameter.empty]:
        raise BadInput(f"reward.options.{name}.{missing[0]} must be set: it has no default.")
    check = getattr(function_of(name), "check_options", None)
    if check:
        try:
            check(**values)
        except ValueError as error:
            raise BadInput(f"reward.options.{name}: {error}") from None
    return checked


def _nearest(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} There are {', '.join(known)}."
