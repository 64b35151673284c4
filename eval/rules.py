"""The gate's rules: each compares one figure of an evaluation with its limit and says whether the data show it."""

from dataclasses import dataclass

from eval.artifacts import POLICIES
from eval.hygiene import RATES, UNDECIDED, Rate, limits_of
from eval.power import problems_to_decide
from eval.stats import negated
from kit.core.config.schema import Config

PASS, FAIL, NOT_SHOWN = "pass", "FAIL", "NOT SHOWN"


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
    rules = [_difference(f"gain in {gate.format}", ">", gate.min_gain, gain)]
    if gate.format != "bf16":
        lost_gain = negated(result["gain_survival"][gate.format])
        lost_accuracy = result["quantization_loss"][gate.format]
        rules.append(_difference("accuracy lost against bf16", "<=", gate.max_quantization_loss, lost_accuracy))
        rules.append(_difference("gain lost against bf16", "<=", gate.max_quantization_loss, lost_gain))
    if gate.min_problems is not None:
        enough = PASS if gain["n"] >= gate.min_problems else FAIL
        rules.append(Rule("problems compared", f">= {gate.min_problems}", str(gain["n"]), enough))
    rules += [_hygiene(config, result, rate) for rate in RATES]
    name, limit = "KL(policy || artifact), nats", f"<= {gate.max_policy_kl:g}"
    kl = (manifest.get("verify") or {}).get("mean_kl")
    if kl is None:
        return [*rules, Rule(name, limit, "not measured (merged with --skip_verify)", FAIL)]
    return [*rules, Rule(name, limit, f"{kl:.4g}", PASS if kl <= gate.max_policy_kl else FAIL)]


def _difference(name: str, sign: str, limit: float, found: dict) -> Rule:
    """Rule that a difference is shown to be above `limit` (">") or at most that ("<="), by the end of its interval."""
    value, (low, high) = found["difference"], found["interval"]
    if sign == ">":
        side, end, passes, seems = "lower", low, low > limit, value > limit
    else:
        side, end, passes, seems = "upper", high, high <= limit, value <= limit
    verdict = PASS if passes else NOT_SHOWN if seems else FAIL
    shown = f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"
    needed = problems_to_decide(found["n"], abs(limit - value), abs(end - value)) if verdict == NOT_SHOWN else None
    if needed:
        shown += f"; about {needed} problems instead of {found['n']} would decide"
    return Rule(name, f"{sign} {limit:g}, {side} end", shown, verdict)


def _hygiene(config: Config, result: dict, rate: Rate) -> Rule:
    """One rate in the worst of the cells that the verdict rests on: GRPO's two, or all four for undecided answers."""
    own, bound = ("grpo", config.eval.gate.format), getattr(limits_of(config), rate.limit)
    limit = f"{'>=' if rate.is_floor else '<='} {bound:g}"
    policies = POLICIES if rate.key == UNDECIDED else ("grpo",)
    cells = [(policy, used) for policy in policies for used in dict.fromkeys((own[1], "bf16"))]
    values = {cell: result["matrix"][cell[0]][cell[1]].get(rate.key) for cell in cells}
    if absent := [cell for cell, value in values.items() if value is None]:
        where = " in ".join(absent[0])
        return Rule(rate.name, limit, f"not measured ({where}): evaluate again", FAIL)
    # The deployed cell is shown unless only another one misses the limit.
    worst = own
    if rate.holds(values[own], bound):
        worst = (min if rate.is_floor else max)(cells, key=lambda cell: values[cell])
    worst = own if values[worst] == values[own] else worst
    where = "" if worst == own else f" ({' in '.join(worst)})"
    verdict = PASS if rate.holds(values[worst], bound) else FAIL
    return Rule(rate.name, limit, f"{values[worst]:.4g}{where}", verdict)
