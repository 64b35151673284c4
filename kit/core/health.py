"""Health rules: plain thresholds on the metrics of a run, with what each means and what to do about it.

A rule only warns. Faults that must stop a run stop it in the trainer: a loss or gradient that is not finite, a sampler
that is not the policy, rewards that cannot be computed, a canary that fails.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kit.core.metrics_log import RECENT, group, mean, median, number, read_completions, series
from kit.core.one_line import one_line
from kit.core.run_directory import RunDir

# All thresholds are defined here. "Recent" covers the last RECENT steps, "before" as many steps before those.
# No paper gives a limit that holds for every model: if none is cited, the value is our default.

# Without intervention, entropy is spent early and the gain ends with it: on average 73 % of the entropy and 76 % of
# the gain within 200 steps (arXiv 2505.22617). A run that spent 90 % and has next to none left is past its gain.
ENTROPY_OF_START = 0.1  # recent entropy below this share of the first steps' …
ENTROPY_NATS = 0.05  # … and below this many nats per token, or …
ENTROPY_EARLY = 0.25  # … below this share of the first steps' within …
ENTROPY_EARLY_SHARE = 0.25  # … this share of the planned steps, while the reward has not moved up
REWARD_FALL = 0.5  # recent reward below its best ten steps by this share of its range so far; our default
# Optimizing an imperfect reward first helps and then hurts as the KL to the start grows (arXiv 2210.10760), with no
# limit that fits all: a ceiling and a pace, our defaults.
KL_NATS = 1.0  # recent KL to the reference above this many nats per token …
KL_DOUBLED_FROM_NATS = 0.1  # … or above this one and at least twice that of the steps before
# A group with equal rewards has no advantage and no gradient; DAPO drops it and samples more (arXiv 2503.14476).
ZERO_SPREAD = 0.95  # share of groups whose completions all got the same reward
KEPT = 0.25  # with dynamic sampling, share of the sampled groups that the run learns from; our default
REWARD_MOVED = 0.02  # a reward that changed by less than this share of its range so far is flat
# Truncated completions get a wrong reward, which makes training unstable (arXiv 2503.14476). Shares: our defaults.
TRUNCATED = 0.25  # share of completions that hit the token limit, or …
TRUNCATED_DOUBLED_FROM = 0.05  # … above this one and at least twice the usual one before
# verl's guide to rollout correction (docs/algo/rollout_corr.md) warns below an effective sample size of 0.3, marks 0.5
# as good, and warns above a KL of 0.1. At that KL this kit's trainer stops (rollout.max_sampler_k3), so warn earlier.
EFFECTIVE_SAMPLE = 0.5
SAMPLER_K3 = 0.01  # nats per token …
# … or above this one and at least three times the usual one before. NeMo RL (docs/adding-new-models.md) says to
# investigate ratios that are off by 1.05 on average at equal precision: a k3 of about 0.001.
SAMPLER_K3_TRIPLED_FROM = 0.001
CORRECTED = 0.1  # share of tokens that the importance correction caps or drops; our default
SPEED = 0.5  # recent tokens/s below this share of the median before; our default
UNKNOWN = 0.01  # share of completions whose reward could not be computed; our default
# A reward of 0 for everything teaches nothing from the first step on, so it is reported early; our default.
NEVER_PAID_STEPS = 5
EXAMPLES = 3  # completions shown with a reward that never moved
ENDS = 80  # characters of an example's completion and reference
# Functions that compare with a reference. The others look at the form, and some are rightly 0 in a healthy run.
JUDGES = ("math", "gsm8k_strict", "gsm8k_lenient", "code", "countdown", "arithmetic")
# Goodhart: the proxy climbs while what it stands for falls (arXiv 2210.10760). Means of HELDOUT_OVER measurements;
# with 64 problems the difference of two such means has a standard deviation of at most 0.05.
HELDOUT_OVER = 3
HELDOUT_RISE = 0.1  # rise of the held-out loss of supervised fine-tuning above its lowest, as a share; our default
HELDOUT_FALL = 0.1  # drop of the accuracy (0.1 is ten points) below its best mean


@dataclass(frozen=True)
class Alert:
    """A rule that fires: its name, the measured value and the limit, what it means, and what to do.

    `fault`: the run is broken and the trainer stops it; otherwise a warning. `examples` are completions of the run,
    one line each.
    """

    name: str
    value: str
    meaning: str
    action: str
    fault: bool = False
    examples: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The alert in one line."""
        return f"alert: {self.name}: {self.value}. {self.meaning} {self.action}"

    @property
    def lines(self) -> list[str]:
        """The alert and its examples."""
        return [self.text, *(f"  {example}" for example in self.examples)]


@dataclass(frozen=True)
class Rule:
    """`measure` returns value and limit as text if the rule fires, None if all is well or data is missing."""

    name: str
    measure: Callable[[Sequence[dict]], str | None]
    meaning: str
    action: str
    fault: bool = False
    has_examples: bool = False


def _recent(rows: Sequence[dict], key: str) -> float | None:
    return mean(series(rows[-RECENT:], key)) if len(rows) >= RECENT else None


def _before(rows: Sequence[dict], key: str) -> float | None:
    return mean(series(rows[-2 * RECENT : -RECENT], key))


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
    if now < limit:
        return f"{now:.3g} < {limit:.3g} nats, start {start:.3g}"
    total, limit = number(rows[-1], "total_steps"), ENTROPY_EARLY * start
    if total and rows[-1]["step"] <= ENTROPY_EARLY_SHARE * total and now < limit and not _climbed(rows):
        return f"{now:.3g} < {limit:.3g} nats after {rows[-1]['step']} of {total:.0f} steps, reward not up"
    return None


def _climbed(rows: Sequence[dict]) -> bool:
    """Whether the recent reward exceeds that of the first steps by more than noise; False if unknown."""
    now, start = _recent(rows, "reward"), mean(series(rows[:RECENT], "reward"))
    return now is not None and start is not None and now - start > REWARD_MOVED * _reward_range(rows)


def _reward_range(rows: Sequence[dict]) -> float:
    known = [value for value in series(rows, "reward") if math.isfinite(value)]
    return max(known) - min(known) if known else 0.0


def _climb(
    key: str, ceiling: float, least: float, factor: float, unit: str, is_pace: bool = False
) -> Callable[[Sequence[dict]], str | None]:
    """Measure that fires above `ceiling`, and above `least` if the value is at least `factor` times its usual one.

    `is_pace`: a metric that climbs in a healthy run too is compared with the steps just before, so only a jump fires.
    Uses medians: estimates of a KL have single steps that are a hundred times the rest and mean nothing.
    """

    def measure(rows: Sequence[dict]) -> str | None:
        earlier = rows[-2 * RECENT : -RECENT] if is_pace else rows[:-RECENT]
        now, before = median(series(rows[-RECENT:], key)), median(series(earlier, key))
        if now is None or len(rows) < RECENT:
            return None
        if now > ceiling:
            return f"{_figure(now, unit)} > {_figure(ceiling, unit)}"
        if before is not None and now > least and now >= factor * before:
            when = f"in the {RECENT} steps before" if is_pace else "usually"
            return f"{_figure(now, unit)}, {_figure(before, unit)} {when}"
        return None

    return measure


def _figure(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{value:.3g}{unit}"


def _zero_spread(rows: Sequence[dict]) -> str | None:
    share = _recent(rows, "no_signal_fraction")  # after rollout.resample_rounds
    if share is None:
        share = _recent(rows, "zero_spread_fraction")
    now, before = _recent(rows, "reward"), _before(rows, "reward")
    if share is None or share <= ZERO_SPREAD:
        return None
    if now is None or before is None:
        return f"{share:.0%} > {ZERO_SPREAD:.0%}"
    if abs(now - before) > max(REWARD_MOVED * _reward_range(rows), REWARD_MOVED * abs(before)):
        return None  # the few groups that teach still move the reward
    return f"{share:.0%} > {ZERO_SPREAD:.0%}, reward flat at {now:.3g}"


def _sampled_in_vain(rows: Sequence[dict]) -> str | None:
    kept = _recent(rows, "kept_fraction")
    return f"{kept:.0%} of the sampled groups kept < {KEPT:.0%}" if kept is not None and kept < KEPT else None


def _reward_falls(rows: Sequence[dict]) -> str | None:
    rewards = series(rows, "reward")
    windows = [mean(rewards[end - RECENT : end]) for end in range(RECENT, len(rewards) + 1)]
    known = [(value, place + RECENT) for place, value in enumerate(windows) if value is not None]
    if len(rows) < 2 * RECENT or not known or windows[-1] is None:
        return None
    (best, place), now = max(known), windows[-1]
    if best - now <= REWARD_FALL * _reward_range(rows):
        return None
    return f"{best:.3g} at step {rows[place - 1]['step']} → {now:.3g}"


def _mismatch(rows: Sequence[dict]) -> str | None:
    share, cut = _recent(rows, "effective_sample_size"), _recent(rows, "corrected_token_fraction")
    if found := _climb("sampler_k3", SAMPLER_K3, SAMPLER_K3_TRIPLED_FROM, 3.0, " nats")(rows):
        return f"k3 {found}"
    if share is not None and share < EFFECTIVE_SAMPLE:
        return f"effective sample {share:.0%} < {EFFECTIVE_SAMPLE:.0%}"
    return f"{cut:.0%} of the tokens corrected > {CORRECTED:.0%}" if cut is not None and cut > CORRECTED else None


def _slow(rows: Sequence[dict]) -> str | None:
    for phase in ("rollout", "update"):
        key = f"{phase}_tokens_per_s"
        now, earlier = _recent(rows, key), [value for value in series(rows[:-RECENT], key) if math.isfinite(value)]
        if now is None or len(earlier) < RECENT:
            continue
        usual = sorted(earlier)[len(earlier) // 2]
        if now < SPEED * usual:
            return f"{phase} {now:,.0f} tokens/s, usually {usual:,.0f}"
    return None


def _unknown(rows: Sequence[dict]) -> str | None:
    now = _recent(rows, "masked_fraction")
    return f"{now:.1%} > {UNKNOWN:.0%}" if now is not None and now > UNKNOWN else None


def _heldout_falls(rows: Sequence[dict]) -> str | None:
    known = [(row["step"], value) for row in rows if math.isfinite(value := series([row], "heldout_accuracy")[0])]
    if len(known) < 2 * HELDOUT_OVER:
        return None
    means = [
        (known[end - 1][0], sum(value for _, value in known[end - HELDOUT_OVER : end]) / HELDOUT_OVER)
        for end in range(HELDOUT_OVER, len(known) + 1)
    ]
    (_, now), (peak_step, best) = means[-1], max(means[:-HELDOUT_OVER], key=lambda pair: pair[1])
    reward, then = _recent(rows, "reward"), _recent([row for row in rows if row["step"] <= peak_step], "reward")
    if now > best - HELDOUT_FALL or reward is None or then is None or reward <= then:
        return None
    return f"held-out {best:.1%} at step {peak_step} → {now:.1%}, reward {then:.3g} → {reward:.3g}"


def _heldout_loss_rises(rows: Sequence[dict]) -> str | None:
    known = [(row["step"], value) for row in rows if math.isfinite(value := series([row], "heldout_loss")[0])]
    if len(known) < 2:
        return None
    (step, best), (_, now) = min(known, key=lambda pair: pair[1]), known[-1]
    if now <= (1 + HELDOUT_RISE) * best:
        return None
    return f"held-out loss {best:.3g} at step {step} → {now:.3g} nats per token"


def _never_paid(rows: Sequence[dict]) -> str | None:
    """Fires if the whole reward, one of the functions that compare with a reference, or one of the user's is 0 in
    every step."""
    names = group(rows[-1], "rewards")
    parts = [name for name in names if name in JUDGES or ":" in name] if len(names) > 1 else []
    for key in ("reward", *parts):
        # By its whole name: that of a user's module may have dots.
        values = series(rows, key) if key == "reward" else [group(row, "rewards").get(key) for row in rows]
        known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
        spread = [value for value in series(rows, "reward_std") if value > 0] if key == "reward" else []
        if len(known) >= NEVER_PAID_STEPS and not any(known) and not spread:
            return f"{key if key == 'reward' else f'rewards.{key}'} is 0 in all {len(known)} steps"
    return None


def _never_changed(rows: Sequence[dict]) -> str | None:
    """Fires if every completion since the beginning got one reward, which is not 0."""
    known = [value for value in series(rows, "reward") if math.isfinite(value)]
    spread = [value for value in series(rows, "reward_std") if value > 0]
    if len(known) < NEVER_PAID_STEPS or not known[0] or len(set(known)) > 1 or spread:
        return None
    return f"reward is {known[0]:g} in all {len(known)} steps"


RULES = (
    Rule(
        "loss not finite",
        _loss_not_finite,
        "The update was NaN, infinite or not computed; the adapter may be spoiled.",
        "The trainer stops by itself. Start another run from the newest adapter (policy.init_adapter) with a lower "
        "train.learning_rate.",
        fault=True,
    ),
    Rule(
        "never paid",
        _never_paid,
        "No answer was paid since the run began: nothing is learned. Either the model solves none of the problems, or "
        "right answers are not read.",
        "Read completions/; put answers that look right into a file and try the reward on them with python -m reward "
        "check. When it is right: easier problems, or a base that solves some. A penalty that never applied is fine.",
        has_examples=True,
    ),
    Rule(
        "never changed",
        _never_changed,
        "Every completion since the run began got the same reward: nothing is learned.",
        "Either the base solves every problem, or the reward does not read the completion: try it with python -m "
        "reward attack.",
        has_examples=True,
    ),
    Rule(
        "reward falls",
        _reward_falls,
        "Most of the reward is gone again: the updates are too large, or what is rewarded changed.",
        "Go back to the adapter before the fall (policy.init_adapter) with a lower train.learning_rate or a higher "
        "train.beta.",
    ),
    Rule(
        "held-out falls",
        _heldout_falls,
        "The reward climbs while held-out accuracy falls: the reward is gamed, or problems are learned by heart.",
        "Read completions/, run python -m reward audit; go back to the adapter before the fall, raise train.beta.",
    ),
    Rule(
        "held-out loss rises",
        _heldout_loss_rises,
        "The rows are learned by heart: what the policy says of others gets worse.",
        "Take the adapter of the step with the lowest held-out loss; fewer passes over the data, a lower "
        "train.learning_rate or policy.lora_rank, or more rows.",
    ),
    Rule(
        "entropy collapse",
        _entropy_collapse,
        "The policy gives one answer per prompt and has stopped exploring.",
        "Raise rollout.temperature or train.epsilon_high (DAPO: 0.28), lower train.learning_rate, or stop here if the "
        "reward is high enough.",
    ),
    Rule(
        "KL climbing",
        _climb("kl", KL_NATS, KL_DOUBLED_FROM_NATS, 2.0, " nats", is_pace=True),
        "The policy is leaving the reference model fast.",
        "Lower train.learning_rate or raise train.beta; read completions/ for reward hacking.",
    ),
    Rule(
        "no spread",
        _zero_spread,
        "Nearly every group got one reward and the reward stands still: no advantage, nothing is learned.",
        "Reward near its top: solved, stop. Near its bottom: easier problems, larger groups, check the reward. In "
        "between: rollout.resample_rounds replaces such groups.",
    ),
    Rule(
        "sampled in vain",
        _sampled_in_vain,
        "Dynamic sampling drops most of what it samples: the problems are too easy or too hard for the policy.",
        "Reward near its top: solved, stop. Else measure pass rates (python -m recipes.pass_rates) and leave out what "
        "is always or never solved (data.min_pass_rate, data.max_pass_rate), or set rollout.resample_budget.",
    ),
    Rule(
        "truncation",
        _climb("truncated_fraction", TRUNCATED, TRUNCATED_DOUBLED_FROM, 2.0, "%"),
        "Completions hit the token limit before they end, so their reward says little.",
        "Raise rollout.max_completion_length, set train.mask_truncated; check that the stop token is the chat "
        "template's.",
    ),
    Rule(
        "sampler mismatch",
        _mismatch,
        "The server's log-probs drift from the policy's: the correction cuts the loss, and beyond "
        "rollout.max_sampler_k3 the trainer stops.",
        "Compare canary_delta: a jump there is a replica that missed an adapter, restart it. Else server.weights "
        "bf16; a sequence correction on long completions: use token_truncate; with rollout.overlap, whose lag of one "
        "update counts too, a lower train.learning_rate.",
    ),
    Rule(
        "unknown rewards",
        _unknown,
        "Rewards that could not be computed are masked; beyond reward.max_unknown_fraction the trainer stops.",
        "unknown_rewards in metrics.jsonl counts the reasons: raise reward.timeout_s, or fix the reward.",
    ),
    Rule(
        "throughput drop",
        _slow,
        "Tokens per second fell to less than half.",
        "Look at the phases: another job on the card, a slow or dead replica (logs/server-*.log), a full disk.",
    ),
)


def alerts(rows: Sequence[dict], run: RunDir | None = None) -> list[Alert]:
    """The rules that fire on these steps, in the order of `RULES`; with the run's directory, examples for those that
    have some."""
    found = ((rule, rule.measure(rows)) for rule in RULES if rows)
    return [
        Alert(
            *(rule.name, value, rule.meaning, rule.action, rule.fault),
            tuple(_examples(run)) if run is not None and rule.has_examples else (),
        )
        for rule, value in found
        if value
    ]


def _examples(run: RunDir) -> Iterator[str]:
    """Completions of different problems from the newest file that has some: problem, end, reference and rewards."""
    for file in sorted(run.completions.glob("step-*.jsonl"), reverse=True):
        rows: dict[str, dict] = {}
        for row in read_completions(file):
            rows.setdefault(str(row.get("problem_id")), row)
        if rows:
            yield from map(_example, list(rows.values())[:EXAMPLES])
            return


def _example(row: dict) -> str:
    rewards = ", ".join(f"{name} {value}" for name, value in group(row, "rewards").items())
    text, gold = one_line(row["completion"][-ENDS:], ENDS), row.get("gold")
    against = "" if gold is None else f" against {one_line(str(gold), ENDS)!r}"
    return f"{row.get('problem_id')}: {text!r}{against}: {rewards}"
