"""Measured pass rates of training problems: the file of `python -m recipes.pass_rates`, filter and order by it.

The first line has the facts of the measurement, every other one a problem:

    {"facts": {"base_hash": …, "model": …, "rollout": {…}, "data": {…}, "reward": {…}, "samples": 8, …}}
    {"problem_id": "e8b9eb097510d5f6", "pass_rate": 0.625, "known": 8, "mean_reward": 0.625}

`pass_rate` is null if no completion could be judged. Every line also has its checksum. Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.errors import BadInput
from kit.core.file_kinds import MEASUREMENT, PASS_RATES
from kit.core.run_files import read_lines
from kit.data.problems import Problem

if TYPE_CHECKING:
    from kit.core.config.schema import Config

# Keys of the configuration that decide how often a problem is solved; those of TASK decide what solving it means.
SAMPLING: tuple[str, ...] = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_completion_length")
SAMPLING += ("data.system_prompt", "data.prompt_suffix", "data.chat_template_kwargs", "policy.init_adapter")
SAMPLING += ("rollout.stop",)
TASK: tuple[str, ...] = ("reward.functions", "reward.weights", "reward.options")
TASK += ("environment.factory", "environment.options", "environment.tools", "environment.max_turns")
COMMAND = "python -m recipes.pass_rates --config …"
MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class PassRates:
    """A measurement: its facts, and the share of right answers by problem id; None if none could be judged."""

    facts: dict[str, Any]
    rates: dict[str, float | None]


def settings_of(config: "Config", keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of a configuration's keys, as JSON has them."""
    from kit.core.config.load import to_dict

    values, found = to_dict(config), {}
    for key in keys:
        group, name = key.split(".")
        found[key] = values[group][name]
    return json.loads(json.dumps(found))


def read_pass_rates(path: str | Path) -> PassRates:
    """Read a file of pass rates; raises `BadInput` that names the line that is not one of it."""
    file = Path(path).expanduser()
    try:
        rows = read_lines(file, PASS_RATES, first=MEASUREMENT)
    except BadInput as error:
        raise BadInput(f"data.pass_rates: {error}") from None
    if not rows:
        raise BadInput(f"data.pass_rates: {file} is empty. {MEASUREMENT.fix}")
    return PassRates(rows[0]["facts"], {one["problem_id"]: one["pass_rate"] for one in rows[1:]})


def select(problems: list[Problem], config: "Config") -> tuple[list[Problem], list[str]]:
    """The problems between `data.min_pass_rate` and `max_pass_rate`, in the order of `data.order`; and lines to print.

    Raises `BadInput` if a problem was not measured, or was rewarded by other rules; other sampling is a warning.
    """
    data = config.data
    if data.pass_rates is None:
        return problems, []
    measured = read_pass_rates(data.pass_rates)
    if differ := _differences(measured.facts, config, TASK):
        raise BadInput(
            f"data.pass_rates: {data.pass_rates} was measured with another task: {differ[0]}. Measure it again with "
            f"{COMMAND}"
        )
    if missing := [problem for problem in problems if problem.id not in measured.rates]:
        named = ", ".join(problem.source for problem in missing[:3])
        raise BadInput(
            f"data.pass_rates: {len(missing):,} of {len(problems):,} training problems are not in {data.pass_rates}: "
            f"{named}{', …' if len(missing) > 3 else ''}. Measure them with {COMMAND}, or lower "
            "data.max_train_problems."
        )
    low, high = data.min_pass_rate, data.max_pass_rate
    is_filtered = low > 0 or high < 1
    kept = [one for one in problems if not is_filtered or _is_within(measured.rates[one.id], low, high)]
    unknown = sum(measured.rates[problem.id] is None for problem in problems)
    said = [
        f"pass rates: {len(kept):,} of {len(problems):,} problems kept ({low:g} to {high:g}), {unknown:,} not known "
        f"({'left out' if is_filtered else 'kept'})"
    ]
    if data.order == "easy_first":
        rates = measured.rates
        kept.sort(key=lambda problem: (rates[problem.id] is None, -(rates[problem.id] or 0.0)))
    if differ := _differences(measured.facts, config, SAMPLING):
        said.append(f"WARNING: {data.pass_rates} was measured with other settings: {'; '.join(differ)}.")
    return kept, said


def describe_other_base(config: "Config", base_hash: str) -> str:
    """A warning if the pass rates were measured with another base; empty if not."""
    if config.data.pass_rates is None:
        return ""
    facts = read_pass_rates(config.data.pass_rates).facts
    if (measured := str(facts.get("base_hash"))) == base_hash:
        return ""
    return (
        f"WARNING: {config.data.pass_rates} was measured with another base ({facts.get('model')}, {measured:.12}; the "
        f"run's is {base_hash:.12}): problems may be easier or harder than it says."
    )


def _is_within(rate: float | None, low: float, high: float) -> bool:
    return rate is not None and low <= rate <= high


def _differences(facts: Mapping[str, Any], config: "Config", keys: tuple[str, ...]) -> list[str]:
    now, before = settings_of(config, keys), facts.get("settings") or {}
    changed = [key for key in keys if key in before and before[key] != now[key]]
    return [f"{key} was {before[key]!r:.60}, is {now[key]!r:.60}" for key in changed]
