"""Rewards: plain functions in TRL's signature, `f(prompts, completions, gold, **kwargs) -> list[float | None]`.

`REWARDS` holds the kit's own; any other is named `module:function` (own.py). `reward_functions(cfg.reward)` binds the
configured ones to their options, a worker pool and a budget. None means "could not be computed" and is masked by the
trainer; it is never turned into 0.0.

A function takes its options as keyword-only arguments with a type and a default, after `pool` and `budget`. It may be
async: the coroutines of a step run concurrently. Attributes of a function say more about it:

    executes_code    True: it runs the model's code
    group            True: it is called once for each group, with the group's completions and columns only
    check_options    called with all options; raises `ValueError` with what is wrong with them
    check_golds      called with all references of a data set; returns [(index, why)] for those that no completion can
                     match, and such rows are rejected when problems are read
    check_run        called with the run's configuration, the columns of its data and the options, before any weight is
                     loaded, also by a dry run; raises `BadInput`
    start            called with the options before a run loads its base: requests and weights; raises `BadInput`
    in_run           names of options that are paths, relative to the run's directory
"""

import asyncio
import difflib
import inspect
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.config.load import match_type, spell_type
from kit.core.errors import BadInput
from reward.code import code
from reward.countdown import arithmetic, countdown
from reward.format import boxed_format, think_format
from reward.gold import GoldCheck
from reward.gsm8k import gsm8k_lenient, gsm8k_strict
from reward.length import length
from reward.llm_judge import llm_judge
from reward.math import math as math_reward
from reward.own import (
    COLUMNS,
    FROM_TRL,
    MACHINERY,
    awaited,
    called,
    check_arguments,
    checked_rewards,
    imported,
    is_async,
    taken,
)
from reward.pool import UnknownBudget, Verdict, WorkerPool, shared_pool
from reward.reward_model import reward_model
from reward.text import language, repetition

if TYPE_CHECKING:
    from kit.core.config.schema import Config, RewardConfig

RewardFunction = Callable[..., Any]  # list[float | None], or an awaitable of one

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
    "llm_judge": llm_judge,
    "reward_model": reward_model,
}
MODELS = ("llm_judge", "reward_model")  # another model decides: neither form nor a comparison


class BoundReward:
    """A reward function bound to its options, its worker settings and its own budget for undecided samples.

    TRL logs it by `__name__`. It is picklable: the worker processes belong to the process-wide pool.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        timeout_s: float,
        max_unknown_fraction: float,
        options: dict | None = None,
        columns: Collection[str] = (),
        group_size: int = 1,
        request_timeout_s: float = 60.0,
    ):
        self.__name__ = name
        self.workers, self.timeout_s, self.request_timeout_s = workers, timeout_s, request_timeout_s
        self.options = options or {}
        self.budget = UnknownBudget(name, max_unknown_fraction)
        self.group_size = group_size
        # A data set column named like an option must not override the configured or default value.
        self.hidden = frozenset(function_options(name, columns))
        # Where a step's groups span processes: rows of whole groups to judge instead of the given ones, their rewards.
        self.gathered: dict[str, list] | None = None
        self.found: list[float | None] = []

    @property
    def unknown_counts(self) -> Counter[str]:
        """Number of samples that could not be computed so far, by reason."""
        return self.budget.counts

    @property
    def is_group(self) -> bool:
        """Whether the function judges the completions of one group at a time."""
        return getattr(function_of(self.__name__), "group", False)

    def __call__(
        self, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        function, rewards = function_of(self.__name__), []
        for part, arguments in self._calls({"prompts": prompts, "completions": completions, **columns}):
            own = is_own(self.__name__)
            found = called(self.__name__, function, arguments) if own else function(**arguments)
            rewards += self._checked(part, found)
        return self._given(rewards, completions)

    def _given(self, rewards: list[float | None], completions: list | None) -> list[float | None]:
        """The rewards of the given completions; 0.0, to be replaced, if gathered rows were judged."""
        if self.gathered is None:
            return rewards
        self.found = rewards
        return [0.0] * len(completions or ())

    def _calls(self, rows: dict[str, Any]) -> list[tuple[list, dict[str, Any]]]:
        """(completions, arguments) of the calls that judge these rows: one, or one for each group."""
        if self.gathered is not None:
            rows = {key: value for key, value in rows.items() if key in FROM_TRL} | self.gathered
        count, parts = len(rows["completions"]), [rows]
        if self.is_group:
            parts = [
                {
                    key: value[start : start + self.group_size] if key not in FROM_TRL and value is not None else value
                    for key, value in rows.items()
                }
                for start in range(0, count, self.group_size)
            ]
        supplied = {**self.options, "pool": shared_pool(self.workers, self.timeout_s), "budget": self.budget}
        function = function_of(self.__name__)
        return [
            (part["completions"], taken(function, {k: v for k, v in part.items() if k not in self.hidden} | supplied))
            for part in parts
        ]

    def _checked(self, completions: list, found: Any) -> list[float | None]:
        """Checked result of a user's function; unknown samples are counted here unless it takes `budget` itself."""
        if not is_own(self.__name__):
            return found
        rewards = checked_rewards(self.__name__, found, len(completions))
        if "budget" not in inspect.signature(function_of(self.__name__)).parameters:
            self._count(completions, ["none" if reward is None else "" for reward in rewards])
        return rewards

    def _count(self, completions: list, reasons: list[str]) -> None:
        """Count the samples that have a reason for being unknown."""
        verdicts = [Verdict(None if reason else True, reason) for reason in reasons]
        self.budget.record(verdicts, [f"completion {str(one)[:200]}" for one in completions])


class AsyncReward(BoundReward):
    """A bound async function: TRL awaits those of a step together, and this one's groups run concurrently.

    A call of a user's function that takes longer than `request_timeout_s` leaves its completions unknown ("late").
    """

    async def __call__(  # type: ignore[override]
        self, prompts: list | None = None, completions: list | None = None, **columns: Any
    ) -> list[float | None]:
        calls = self._calls({"prompts": prompts, "completions": completions, **columns})
        parts = await asyncio.gather(*(self._call(*call) for call in calls))
        return self._given([reward for part in parts for reward in part], completions)

    async def _call(self, completions: list, arguments: dict[str, Any]) -> list[float | None]:
        function = function_of(self.__name__)
        if not is_own(self.__name__):
            return await function(**arguments)
        found = await awaited(self.__name__, function, arguments, self.request_timeout_s)
        if found is None:
            self._count(completions, ["late"] * len(completions))
            return [None] * len(completions)
        return self._checked(completions, found)


def completed(found: Any) -> Any:
    """The result of a reward function, run to its end if it is async; for commands that have no event loop."""
    if not inspect.isawaitable(found):
        return found

    async def run() -> Any:
        return await found

    return asyncio.run(run())


def is_own(name: str) -> bool:
    """Whether a reward is user-defined (`module:function`) rather than one of `REWARDS`."""
    return ":" in name


def function_of(name: str) -> RewardFunction:
    """Return the reward function for a configured name; `BadInput` if a user's function cannot be imported."""
    return imported(name, "reward.functions", may_be_async=True) if is_own(name) else REWARDS[name]


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


def reward_functions(
    reward: "RewardConfig",
    columns: Collection[str] = (),
    group_size: int | None = None,
    folder: Path | None = None,
    may_be_empty: bool = False,
) -> tuple[list[BoundReward], list[float]]:
    """The configured reward functions and their weights, for TRL's `reward_funcs` and `reward_weights`.

    `columns` are those of the data, which functions may take by name, `group_size` the completions of a problem (None:
    there are no groups), `folder` the run's directory; `may_be_empty`: an environment has a reward. Starts no process.
    Raises `BadInput` for an unknown or repeated name, weights that do not match the functions, an unknown option or a
    wrong option value, an argument that is no column, and a function that runs code while `allow_code_execution` is
    off.
    """
    if not reward.functions and not may_be_empty:
        raise BadInput(f"reward.functions is empty: name at least one of {', '.join(REWARDS)}.")
    for name in reward.functions:
        if is_own(name):
            known = tuple(dict.fromkeys((*COLUMNS, *FROM_TRL, *MACHINERY, *columns)))
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
        if getattr(function_of(name), "group", False) and group_size is None:
            raise BadInput(
                f"reward {name!r} judges the completions of a group together, and here there are no groups."
            )
    options = checked_options(reward.options, reward.functions, columns)
    for name, values in options.items():
        values |= placed_options(name, values, folder)
    functions = [
        (AsyncReward if is_async(function_of(name)) else BoundReward)(
            *(name, reward.workers, reward.timeout_s, reward.max_unknown_fraction, options[name]),
            columns=set(columns) - options[name].keys(),
            group_size=group_size or 1,
            request_timeout_s=reward.request_timeout_s,
        )
        for name in reward.functions
    ]
    return functions, weights


def function_options(name: str, columns: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Options of a reward function: name to (type, default); the default is `inspect.Parameter.empty` if missing.

    A keyword-only argument without a default that is one of the data's `columns` is no option but that column.
    """
    function = function_of(name)
    hints = typing.get_type_hints(function) if inspect.isfunction(function) else {}
    return {
        key: (hints.get(key, Any), parameter.default)
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        and key not in (*MACHINERY, *COLUMNS, *FROM_TRL)
        and not (parameter.default is inspect.Parameter.empty and key in columns)
    }


def check_run(functions: Iterable[Callable], config: "Config", columns: Collection[str]) -> None:
    """Raise `BadInput` for what a bound function's own check of the run's configuration finds; loads nothing."""
    for one in _bound(functions):
        if (check := getattr(function_of(one.__name__), "check_run", None)) is not None:
            check(config, [name for name in columns if name not in one.hidden], **one.options)


def start(functions: Iterable[Callable]) -> None:
    """Let bound functions ask their servers and load their models, before a run loads its base; raises `BadInput`."""
    for one in _bound(functions):
        if (begin := getattr(function_of(one.__name__), "start", None)) is not None:
            begin(**one.options)


def _bound(functions: Iterable[Callable]) -> list[BoundReward]:
    return [one for one in functions if isinstance(one, BoundReward)]


def placed_options(name: str, options: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The options of a function that are paths below the run's directory `folder`; None without one."""
    known, placed = function_options(name), {}
    for key in getattr(function_of(name), "in_run", ()):
        value = options.get(key, known[key][1])
        if value is not None and not Path(value).is_absolute():
            value = str(folder / value) if folder else None
        placed[key] = value
    return placed


def checked_options(
    values: dict[str, Any], functions: list[str], columns: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Every function's given options, converted to their types; `BadInput` gives the error and nearest valid name."""
    for name in values:
        if name not in functions:
            if name in REWARDS:
                raise BadInput(
                    f"reward.options.{name}: {name!r} is not in reward.functions, which are {', '.join(functions)}. "
                    f"Remove its options, on the command line with --reward.options '{{}}', or add {name!r}."
                )
            raise BadInput(f"reward.options.{name}: {name!r} is not a reward function.{_nearest(name, functions)}")
    return {name: _options_of(name, values.get(name), columns) for name in functions}


def _options_of(name: str, given: Any, columns: Collection[str]) -> dict[str, Any]:
    if not isinstance(given, dict | None):
        raise BadInput(f"reward.options.{name} must be a group of options, it is {given!r:.60}.")
    known, checked = function_options(name, set(columns) - (given or {}).keys()), {}
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
