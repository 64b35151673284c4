"""Whether a cell's accuracy can support a conclusion: parse rate, prompt leak, end of turn, truncation, undecided.

The limits are those of the gate (`eval.gate`) and, for undecided answers, `reward.max_unknown_fraction`; a
configuration that sets none gets their defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Rate:
    """One rule on the completions of a cell: the share of those for which `counts` holds, and its limit."""

    key: str  # in a cell of eval.json
    name: str  # in the gate's table
    what: str  # in a sentence, after the percentage
    limit: str  # field of `Limits`; a minimum or a maximum by its name
    counts: Callable[[Record], bool]

    @property
    def is_floor(self) -> bool:
        return self.limit.startswith("min_")

    def holds(self, value: float, limit: float) -> bool:
        """Whether a rate is within its limit, inclusive."""
        return value >= limit if self.is_floor else value <= limit


UNDECIDED = "undecided_rate"
RATES = (
    Rate("parse_rate", "parse rate", "completions with a readable answer", "min_parse_rate", lambda one: one.parsed),
    Rate(
        "prompt_leak_rate",
        "prompt leak",
        "completions that repeat the prompt",
        "max_prompt_leak",
        lambda one: one.prompt_leak,
    ),
    Rate(
        "end_of_turn_rate",
        "ended by the stop token",
        "completions ended by the stop token",
        "min_end_of_turn_rate",
        lambda one: one.ended,
    ),
    Rate(
        "max_token_hit_rate",
        "truncated at the token limit",
        "completions truncated at the token limit",
        "max_token_hit_rate",
        lambda one: one.hit_max_tokens,
    ),
    Rate(
        UNDECIDED,
        "answers undecided",
        "answers that could not be compared",
        "max_undecided",
        lambda one: one.correct is None,
    ),
)


def limits_of(config: Config) -> Limits:
    """The limits that a run's configuration sets."""
    gate = config.eval.gate
    return Limits(
        gate.min_parse_rate,
        gate.max_prompt_leak,
        gate.min_end_of_turn_rate,
        gate.max_token_hit_rate,
        max_undecided=config.reward.max_unknown_fraction,
        margin=gate.max_quantization_loss,
    )


def rates(records: Sequence[Record]) -> dict[str, float]:
    """The rates of one cell over all its completions, fractions in 0..1."""
    return {rate.key: sum(map(rate.counts, records)) / len(records) for rate in RATES}


def findings(cell: dict[str, float], limits: Limits) -> list[dict]:
    """The measured rates of a cell that are out of range: [{"key", "value", "limit", "text"}]."""
    found = []
    for rate in RATES:
        value, limit = cell.get(rate.key), getattr(limits, rate.limit)
        if value is not None and not rate.holds(value, limit):
            bound = f"{'at least' if rate.is_floor else 'at most'} {100 * limit:g} %"
            text = f"{100 * value:.1f} % {rate.what} ({bound})"
            found.append({"key": rate.key, "value": value, "limit": limit, "text": text})
    return found


def well_formed(record: Record) -> bool:
    """Whether a completion gave a parseable answer and ended by itself."""
    return record.parsed and record.ended and not record.hit_max_tokens
