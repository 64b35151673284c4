"""Health rules: plain thresholds on the metrics of a run, with what each means and what to do about it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.metrics import RECENT, mean, number, series

# The only place where a threshold stands. "Recent" is the mean over the last RECENT steps.
ENTROPY_OF_START = 0.1  # recent entropy below this share of the first steps' …
ENTROPY_NATS = 0.05  # … and below this many nats a token
KL_NATS = 1.0  # recent KL to the reference above this many nats a token …
KL_DOUBLED_FROM_NATS = 0.1  # … or above this one and at least twice that of the steps before
ZERO_SPREAD = 0.95  # share of groups whose completions all got the same reward
TRUNCATED = 0.25  # share of completions that hit the token limit
CORRECTED = 0.1  # share of tokens that the importance correction caps or drops


@dataclass(frozen=True)
class Alert:
    """One rule that fires: its name, the measured value beside the limit, the meaning, and what to do."""

    name: str
    value: str
    meaning: str
    action: str


@dataclass(frozen=True)
class Rule:
    """`measure` returns value and limit as text when the rule fires, None when all is well or data is missing."""

    name: str
    measure: Callable[[Sequence[dict]], str | None]
    meaning: str
    action: str


def _recent(rows: Sequence[dict], key: str) -> float | None:
    return mean(series(rows[-RECENT:], key)) if len(rows) >= RECENT else None


def _loss_not_finite(rows: Sequence[dict]) -> str | None:
    recent = rows[-RECENT:]
    losses = (number(row, "loss") for row in recent)
    bad = sum(value is None or not math.isfinite(value) for value in losses)
    return f"{bad} of the last {len(recent)} steps" if bad else None


def _entropy_collapse(rows: Sequence[dict]) -> str | None:
    now, start = _recent(rows, "entropy"), mean(series(rows[:RECENT], "entropy"))
    if len(rows) < 2 * RECENT or now is None or start is None:
        return None
    limit = min(ENTROPY_NATS, ENTROPY_OF_START * start)
    return f"{now:.3g} < {limit:.3g} nats, start {start:.3g}" if now < limit else None


def _kl_climb(rows: Sequence[dict]) -> str | None:
    now, before = _recent(rows, "kl"), mean(series(rows[-2 * RECENT : -RECENT], "kl"))
    if now is None:
        return None
    if now > KL_NATS:
        return f"{now:.3g} > {KL_NATS:g} nats"
    if before is not None and now > KL_DOUBLED_FROM_NATS and now > 2 * before:
        return f"{now:.3g} nats, {before:.3g} in the {RECENT} steps before"
    return None


def _share_above(key: str, limit: float) -> Callable[[Sequence[dict]], str | None]:
    def measure(rows: Sequence[dict]) -> str | None:
        now = _recent(rows, key)
        return f"{now:.0%} > {limit:.0%}" if now is not None and now > limit else None

    return measure


RULES = (
    Rule(
        "loss not finite",
        _loss_not_finite,
        "The update was NaN, infinite or not computed; the adapter may be spoiled.",
        "Stop; resume from the last checkpoint with a lower learning rate.",
    ),
    Rule(
        "entropy collapse",
        _entropy_collapse,
        "The policy gives one answer per prompt and has stopped exploring.",
        "Raise temperature or beta, lower the learning rate, or stop here if the reward is high enough.",
    ),
    Rule(
        "KL climbing",
        _kl_climb,
        "The policy is leaving the reference model fast.",
        "Lower the learning rate or raise beta; read completions/ for reward hacking.",
    ),
    Rule(
        "zero spread",
        _share_above("zero_spread_fraction", ZERO_SPREAD),
        "Nearly every group got one reward: no advantage, nothing is learned.",
        "Reward near its top: solved, stop. Near its bottom: easier problems, larger groups, check the reward.",
    ),
    Rule(
        "truncation",
        _share_above("truncated_fraction", TRUNCATED),
        "Completions hit the token limit before they end.",
        "Raise rollout.max_completion_length; check that the stop token is the chat template's.",
    ),
    Rule(
        "sampler mismatch",
        _share_above("corrected_token_fraction", CORRECTED),
        "The server's log-probs are so far from the policy's that the correction cuts much of the loss.",
        "A sequence correction on long completions: use token_truncate. Else server.weights bf16, and compare "
        "sampler_k3 and canary_delta.",
    ),
)


def alerts(rows: Sequence[dict]) -> list[Alert]:
    """The rules that fire on these steps, in the order of `RULES`."""
    found = ((rule, rule.measure(rows)) for rule in RULES if rows)
    return [Alert(rule.name, value, rule.meaning, rule.action) for rule, value in found if value is not None]
