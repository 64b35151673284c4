"""From the records of all cells to what they show: gains, whether they survive a format, and a conclusion."""

from collections.abc import Sequence

import numpy as np

from eval import stats
from eval.score import Record
from recipes.parts.errors import CheckFailed

MANY_CUT = 0.1  # a share of cut completions above this is named in the conclusion
Records = dict[tuple[str, str], Sequence[Record]]


def compare(records: Records, formats: Sequence[str], reference: str, samples: int, seed: int = 0) -> dict:
    """{"gain", "gain_survival", "gain_survival_<format>", "quantization_loss", "minimum_detectable_effect"}.

    `records` holds one list per (policy, format), of the same problems in the same order. All differences are on the
    problems decided in every cell involved (`n`). `reference` is the format whose disagreement between base and GRPO
    the minimum detectable effect is computed with.
    """
    gain = {name: _gain(records, name, samples, seed) for name in formats}
    result: dict = {"gain": gain, "gain_survival": {}, "quantization_loss": {}}
    if "bf16" in formats:
        for name in formats:
            if name == "bf16":
                continue
            cells = [("base", name), ("grpo", name), ("base", "bf16"), ("grpo", "bf16")]
            columns = decided_scores(records, cells)
            result["gain_survival"][name] = {
                **stats.gain_survival(*columns, samples, seed),
                "n": len(columns[0]),
            }
            result[f"gain_survival_{name}"] = result["gain_survival"][name]["difference"]
            bf16, quantized = decided_scores(records, [("grpo", "bf16"), ("grpo", name)])
            result["quantization_loss"][name] = {
                **stats.paired_difference(bf16, quantized, samples, seed),
                "n": len(bf16),
            }
    result["minimum_detectable_effect"] = gain[reference]["minimum_detectable_effect"]
    return result


def decided_scores(records: Records, cells: Sequence[tuple[str, str]]) -> list[np.ndarray]:
    """One 0/1 array per cell over the problems whose answer could be compared in all of `cells`."""
    rows = zip(*([record.correct for record in records[cell]] for cell in cells), strict=True)
    kept = [row for row in rows if None not in row]
    if not kept:
        raise CheckFailed(f"no problem has a decided answer in all of {cells}; there is nothing to compare.")
    return list(np.array(kept, dtype=np.float64).T)


def _gain(records: Records, name: str, samples: int, seed: int) -> dict:
    base, grpo = decided_scores(records, [("base", name), ("grpo", name)])
    gained, lost = stats.discordant(grpo, base)
    return {
        **stats.paired_difference(grpo, base, samples, seed),
        "n": len(base),
        "mcnemar_p": stats.mcnemar(gained, lost),
        "discordant": [gained, lost],
        "minimum_detectable_effect": stats.minimum_detectable_effect(len(base), (gained + lost) / len(base)),
    }


def conclude(comparison: dict, formats: Sequence[str], matrix: dict) -> str:
    """What the intervals allow to say, one sentence a line; a difference counts as shown when its interval excludes 0.

    An interval that holds 0 is never called "no change": what it rules out is said instead. Cells whose completions
    were often cut or whose answers could not all be compared are named.
    """
    lines = [_gain_sentence(name, comparison["gain"][name]) for name in formats]
    survival = comparison["gain_survival"]
    if not survival:
        lines.append("Whether the gain survives a format was not measured: that needs bf16 beside another format.")
    elif not comparison["gain"]["bf16"]["interval"][0] > 0:
        lines.append("No gain is shown in bf16, so there is no gain whose survival could be judged.")
    else:
        lines += [_survival_sentence(name, survival[name]) for name in survival]
    cells = [(policy, name, cell) for policy, row in matrix.items() for name, cell in row.items()]
    return "\n".join(lines + [caution for place in cells for caution in _cautions(*place)])


def _cautions(policy: str, name: str, cell: dict) -> list[str]:
    """What makes a cell's accuracy mean less than it says."""
    where, found = f"of {policy} in {name}", []
    if (cut := cell["max_token_hits"] / cell["n"]) > MANY_CUT:
        found.append(f"Caution: {points(cut)} % of the completions {where} were cut at the token limit.")
    if cell["undecided"]:
        found.append(f"Caution: {cell['undecided']} of {cell['n']} answers {where} could not be compared, left out.")
    return found


def _gain_sentence(name: str, gain: dict) -> str:
    low, high = gain["interval"]
    if low <= 0 <= high:
        return (
            f"No difference between GRPO and base is shown in {name}: "
            f"{points(gain['difference'], sign=True)} points of {gain['n']} held-out problems "
            f"({_interval(low, high)}). With so many problems and so much disagreement, a difference of "
            f"{points(gain['minimum_detectable_effect'])} points is found four times in five."
        )
    more, ends = ("more", (low, high)) if low > 0 else ("fewer", (-high, -low))
    return (
        f"In {name}, GRPO answers {points(abs(gain['difference']))} points {more} of the {gain['n']} held-out "
        f"problems than the base ({_interval(*ends)}, McNemar p = {p_value(gain['mcnemar_p'])})."
    )


def _survival_sentence(name: str, survival: dict) -> str:
    (low, high), change = survival["interval"], points(survival["difference"], sign=True)
    if high < 0:
        return (
            f"Part of the gain is lost in {name}: it differs from bf16's by {change} points ({_interval(low, high)})."
        )
    if low > 0:
        return f"The gain is larger in {name} than in bf16: by {change} points ({_interval(low, high)})."
    return (
        f"No loss of gain is shown in {name}: its gain differs from bf16's by {change} points "
        f"({_interval(low, high)}), so at that confidence no more than {points(-low)} points are lost."
    )


def _interval(low: float, high: float) -> str:
    return f"95 % interval {points(low)} to {points(high)}"


def p_value(p: float) -> str:
    """A p-value in three digits, so that 0.0501 does not read as 0.05."""
    return f"{p:.3g}"


def points(value: float, sign: bool = False) -> str:
    """A fraction as percentage points with one decimal; never "-0.0"."""
    shown = f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return shown.replace("-0.0", "0.0") if shown == "-0.0" else shown
