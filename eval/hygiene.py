"""Whether a cell's accuracy can support a conclusion: parse rate, prompt leak, end of turn, truncation, undecided.

The limits are those of the gate (`eval.gate`) and, for undecided answers, `reward.max_unknown_fraction`; a
configuration that sets none gets their defaults.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval.record import Record
from kit.core.config.schema import Config, GateConfig, RewardConfig


@dataclass(frozen=True)
class Limits:
    """Limits on a cell's rates, and `margin`: the loss of gain below which a gain is said to survive."""

    min_parse_rate: float = GateConfig.min_parse_rate
    max_prompt_leak: float = GateConfig.max_prompt_leak
    min_end_of_turn_rate: float = GateConfig.min_end_of_turn_rate
    max_token_hit_rate: float = GateConfig.max_token_hit_rate
    max_undecided: float = RewardConfig.max_unknown_fraction
    margin: float = GateConfig.max_quantization_loss


# Key of a cell, its limit, whether the limit is a floor, what the rate is a share of.
RATES = (
    ("parse_rate", "min_parse_rate", True, "completions with a readable answer"),
    ("prompt_leak_rate", "max_prompt_leak", False, "completions that repeat the prompt"),
    ("end_of_turn_rate", "min_end_of_turn_rate", True, "completions ended by the stop token"),
    ("max_token_hit_rate", "max_token_hit_rate", False, "completions cut at the token limit"),
    ("undecided_rate", "max_undecided", False, "answers that could not be compared"),
)
UNDECIDED = "undecided_rate"


def limits_of(config: Config) -> Limits:
    """The limits that a run's configuration sets."""
    gate = asdict(config.eval.gate)
    names = ("min_parse_rate", "max_prompt_leak", "min_end_of_turn_rate", "max_token_hit_rate")
    margin, undecided = gate["max_quantization_loss"], config.reward.max_unknown_fraction
    return Limits(**{name: gate[name] for name in names}, max_undecided=undecided, margin=margin)


def rates(records: Sequence[Record]) -> dict[str, float]:
    """The rates of one cell over all its completions, fractions in 0..1."""
    n = len(records)
    return {
        "parse_rate": sum(record.parsed for record in records) / n,
        "prompt_leak_rate": sum(record.prompt_leak for record in records) / n,
        "end_of_turn_rate": sum(record.ended for record in records) / n,
        "max_token_hit_rate": sum(record.hit_max_tokens for record in records) / n,
        "undecided_rate": sum(record.correct is None for record in records) / n,
    }


def holds(value: float, limit: float, floor: bool) -> bool:
    """Whether a rate is within its limit, inclusive."""
    return value >= limit if floor else value <= limit


def findings(cell: dict[str, float], limits: Limits) -> list[dict[str, Any]]:
    """The rates of a cell that are out of range: [{"key", "value", "limit", "text"}]."""
    found = []
    for key, name, floor, what in RATES:
        value, limit = cell[key], getattr(limits, name)
        if not holds(value, limit, floor):
            bound = f"{'at least' if floor else 'at most'} {100 * limit:g} %"
            found.append({"key": key, "value": value, "limit": limit, "text": f"{100 * value:.1f} % {what} ({bound})"})
    return found


def well_formed(record: Record) -> bool:
    """Whether a completion gave a parseable answer and ended by itself."""
    return record.parsed and record.ended and not record.hit_max_tokens
