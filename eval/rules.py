"""The gate's rules: each compares one figure of an evaluation with its limit and says whether the data show it."""

import dataclasses
import math
from dataclasses import dataclass

from eval.artifacts import POLICIES
from eval.hygiene import RATES, UNDECIDED, holds, limits_of
from kit.core.config.schema import Config

PASS, FAIL, NOT_SHOWN = "pass", "FAIL", "NOT SHOWN"
NAMES = {
    "parse_rate": "parse rate",
    "prompt_leak_rate": "prompt leak",
    "end_of_turn_rate": "ended by the stop token",
    "max_token_hit_rate": "cut at the token limit",
    "undecided_rate": "answers undecided",
}


@dataclass(frozen=True)
class Rule:
    """One rule as the table shows it."""

    name: str
    limit: str
    measured: str
    verdict: str


def judge(config: Config, result: dict, manifest: dict) -> list[Rule]:
    """Every rule of the gate with its limit, what was measured, and the verdict."""
    gate = config.eval.gate
    gain = result["gain"][gate.format]
    rules = [_above(f"gain in {gate.format}", gate.min_gain, gain)]
    if gate.format != "bf16":
        lost_gain = _negated(result["gain_survival"][gate.format])
        loss = result["quantization_loss"][gate.format]
        rules.append(_at_most("accuracy lost against bf16", gate.max_quantization_loss, loss))
        rules.append(_at_most("gain lost against bf16", gate.max_quantization_loss, lost_gain))
    if gate.min_problems is not None:
        enough = PASS if gain["n"] >= gate.min_problems else FAIL
        rules.append(Rule("problems compared", f">= {gate.min_problems}", str(gain["n"]), enough))
    kl = (manifest.get("verify") or {}).get("mean_kl")
    why = "not measured (merged with --skip_verify)"
    return [
        *rules,
        *(_hygiene(config, result, *rate[:3]) for rate in RATES),
        _rate("KL(policy || artifact), nats", kl, gate.max_policy_kl, False, why),
    ]


def _hygiene(config: Config, result: dict, key: str, limit: str, floor: bool) -> Rule:
    """One rate in the worst of the cells that the verdict rests on: GRPO's two, or all four for undecided answers."""
    name, bound = config.eval.gate.format, getattr(limits_of(config), limit)
    cells = [
        (policy, used)
        for policy in (POLICIES if key == UNDECIDED else ("grpo",))
        for used in dict.fromkeys((name, "bf16"))
    ]
    values = {cell: result["matrix"][cell[0]][cell[1]].get(key) for cell in cells}
    if absent := [cell for cell, value in values.items() if value is None]:
        return _rate(
            NAMES[key], None, bound, floor, f"not measured ({absent[0][0]} in {absent[0][1]}): evaluate again"
        )
    own = values["grpo", name]
    # The deployed cell is shown unless only another one misses the limit.
    worst = ("grpo", name)
    if holds(own, bound, floor):
        worst = (min if floor else max)(cells, key=lambda cell: values[cell])
        worst = ("grpo", name) if values[worst] == own else worst
    rule = _rate(NAMES[key], values[worst], bound, floor)
    where = "" if worst == ("grpo", name) else f" ({worst[0]} in {worst[1]})"
    return dataclasses.replace(rule, measured=rule.measured + where)


def _above(name: str, limit: float, found: dict) -> Rule:
    """Rule that `found["difference"]` is shown to be above `limit`: the lower end of its interval is."""
    low = found["interval"][0]
    verdict = PASS if low > limit else NOT_SHOWN if found["difference"] > limit else FAIL
    shown = _more_problems(found, found["difference"] - limit, found["difference"] - low, verdict)
    return Rule(name, f"> {limit:g}, lower end", shown, verdict)


def _at_most(name: str, limit: float, found: dict) -> Rule:
    """Rule that `found["difference"]` is shown to be at most `limit`: the upper end of its interval is."""
    high = found["interval"][1]
    verdict = PASS if high <= limit else NOT_SHOWN if found["difference"] <= limit else FAIL
    shown = _more_problems(found, limit - found["difference"], high - found["difference"], verdict)
    return Rule(name, f"<= {limit:g}, upper end", shown, verdict)


def _rate(name: str, value: float | None, limit: float, floor: bool, absent: str = "not measured") -> Rule:
    shown = f"{'>=' if floor else '<='} {limit:g}"
    if value is None:
        return Rule(name, shown, absent, FAIL)
    return Rule(name, shown, f"{value:.4g}", PASS if holds(value, limit, floor) else FAIL)


def _more_problems(found: dict, room: float, half_width: float, verdict: str) -> str:
    """The estimate and interval; if only the interval is too wide, also how many problems would narrow it enough."""
    low, high = found["interval"]
    shown = f"{found['difference']:+.4f} [{low:+.4f}, {high:+.4f}]"
    if verdict == NOT_SHOWN and room > 0:  # the width of an interval falls with the square root of the problems
        shown += f"; about {math.ceil(found['n'] * (half_width / room) ** 2)} problems instead of {found['n']} decide"
    return shown


def _negated(difference: dict) -> dict:
    low, high = difference["interval"]
    return {**difference, "difference": 0.0 - difference["difference"], "interval": [0.0 - high, 0.0 - low]}
