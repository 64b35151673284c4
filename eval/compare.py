"""Compare the records of all cells: gains, whether they survive a format, and a conclusion.

Comparisons are paired by problem: a problem's score in a cell is the share of right ones among its decided
completions, and only problems decided in every cell involved count (`n`). A verdict follows from the interval, the
test and the hygiene of the cells; the conclusion states the verdicts in sentences and nothing beyond them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from eval import power, stats
from eval.hygiene import UNDECIDED, Limits, findings, rates, well_formed
from eval.naming import GRPO, in_sentence, policy_name
from eval.record import Record
from eval.samples import by_problem, majority_scores, pass_at_k_scores, powers, problem_means, score_table
from kit.core.errors import BadInput, CheckFailed

Cell = tuple[str, str]
Records = Mapping[Cell, Sequence[Record]]
# Verdicts on a gain, and on its survival in a format.
GAIN, LOSS, NOT_SHOWN, REFUSED = "gain", "loss", "not shown", "refused"
SURVIVES, PARTLY_LOST, LARGER, NO_GAIN = "survives", "partly lost", "larger", "no gain to lose"
SMALLEST_PLANNED = 0.01  # plan problems for an effect of at least one point


def compare(
    records: Records, formats: Sequence[str], reference: str, samples: int, seed: int = 0, limits: Limits | None = None
) -> dict:
    """Return {"gain", "gain_survival", "quantization_loss", "hygiene", …}; README.md lists all keys.

    `records` holds one list per (policy, format), of the same problems in the same order with equally many completions
    each. The minimum detectable effect uses the disagreement between base and GRPO in the format `reference`;
    `samples` is the number of bootstrap resamples. `BadInput` if a cell's problems differ from those of the first,
    `CheckFailed` if no problem is decided in the cells of a comparison.
    """
    limits = limits or Limits()
    completions = _check_same_problems(records)
    gain = {name: _gain(records, name, samples, seed, len(formats)) for name in formats}
    _adjust(gain.values())
    result: dict = {"samples_per_problem": completions, "reference": reference, "gain": gain}
    result |= {"gain_survival": {}, "quantization_loss": {}, "hygiene": _hygiene(records, formats, limits)}
    for name in _beside_bf16(formats):
        cells = [("base", name), ("grpo", name), ("base", "bf16"), ("grpo", "bf16")]
        base, grpo, base_bf16, grpo_bf16 = decided_scores(records, cells)
        result["gain_survival"][name] = _difference(grpo - base, grpo_bf16 - base_bf16, samples, seed)
        grpo_bf16, grpo = decided_scores(records, [("grpo", "bf16"), ("grpo", name)])
        result["quantization_loss"][name] = _difference(grpo_bf16, grpo, samples, seed)
    _adjust(result["gain_survival"].values())
    _adjust(result["quantization_loss"].values())
    _judge(result, limits)
    result["minimum_detectable_effect"] = gain[reference]["minimum_detectable_effect"]
    return result


def _beside_bf16(formats: Sequence[str]) -> list[str]:
    """The formats whose survival can be judged: all but bf16, if bf16 is there."""
    return [name for name in formats if name != "bf16"] if "bf16" in formats else []


def _check_same_problems(records: Records) -> int:
    """Return the completions per problem; `BadInput` if a cell has other problems or another number of completions."""
    first, shape = None, None
    for cell, found in records.items():
        seen = [group[0].problem_id for group in by_problem(found)]
        sizes = (len(seen), len(found) // max(len(seen), 1))
        if first is None:
            first, shape, ids = cell, sizes, seen
        elif sizes != shape or seen != ids:
            raise BadInput(
                f"the records of {_cell(cell)} do not match those of {_cell(first)} in problems, order and number of "
                f"completions: {sizes[0]} problems of {sizes[1]} against {shape[0]} of {shape[1]}. Evaluate again."
            )
    return shape[1] if shape else 1


def _decided(records: Records, cells: Sequence[Cell]) -> np.ndarray:
    """(problems,) bool: decided in all of `cells`; `CheckFailed` when none is."""
    means = np.array([problem_means(score_table(records[cell])) for cell in cells])
    kept = ~np.isnan(means).any(axis=0)
    if not kept.any():
        names = ", ".join(map(_cell, cells))
        raise CheckFailed(f"no problem has a decided answer in all of {names}; there is nothing to compare.")
    return kept


def decided_scores(records: Records, cells: Sequence[Cell]) -> list[np.ndarray]:
    """One array (n,) of scores per cell, over the problems with a decided completion in all of `cells`."""
    kept = _decided(records, cells)
    return [problem_means(score_table(records[cell]))[kept] for cell in cells]


def _difference(after: np.ndarray, before: np.ndarray, samples: int, seed: int) -> dict:
    found = stats.paired_difference(after, before, samples, seed)
    return {**found, "n": len(after), "p": stats.sign_flip(after - before, seed)}


def _gain(records: Records, name: str, samples: int, seed: int, comparisons: int) -> dict:
    cells = [("base", name), ("grpo", name)]
    kept = _decided(records, cells)
    tables = [score_table(records[cell])[kept] for cell in cells]
    base, grpo = (problem_means(table) for table in tables)
    found = _difference(grpo, base, samples, seed)
    gained, lost = stats.discordant(grpo, base)
    completions, disagreement = tables[0].shape[1], power.seen_disagreement(grpo - base)
    # With several formats a difference is shown when its adjusted p-value is small: plan for that.
    planning = {"alpha": stats.ALPHA / comparisons, "samples": completions}
    effect = max(abs(found["difference"]), SMALLEST_PLANNED)
    needed = power.problems_needed(effect, disagreement, **planning)
    found |= {
        "test": "McNemar" if completions == 1 else "sign-flip",
        "mcnemar_p": stats.mcnemar(gained, lost) if completions == 1 else None,
        "discordant": [gained, lost],
        "disagreement": disagreement,
        "minimum_detectable_effect": power.minimum_detectable_effect(found["n"], disagreement, **planning),
        "needed_problems": {"effect": effect, "problems": needed, "samples": completions},
        "base_form": _base_form(records[cells[0]], kept, grpo, samples, seed),
    }
    if completions > 1:
        found |= _over_completions(records, cells, tables, samples, seed)
    return found


def _base_form(base: Sequence[Record], kept: np.ndarray, grpo: np.ndarray, samples: int, seed: int) -> dict:
    """How much of a gain is on completions where the base was unparseable or did not end by itself.

    {"share" of such completions, "gain_there", "elsewhere": {"difference", "interval"}}; the two parts add up to the
    gain. On such completions better answers cannot be separated from better form or stopping; elsewhere they can.
    """
    groups = [group for group, keep in zip(by_problem(base), kept, strict=True) if keep]
    parts = np.zeros((2, len(groups)))  # on malformed completions, on the others
    malformed = [[not well_formed(record) for record in group] for group in groups]
    for place, (group, bad) in enumerate(zip(groups, malformed, strict=True)):
        decided = [
            (record.correct, flag) for record, flag in zip(group, bad, strict=True) if record.correct is not None
        ]
        for correct, flag in decided:
            parts[0 if flag else 1, place] += (grpo[place] - correct) / len(decided)
    return {
        "share": float(np.mean(malformed)),
        "gain_there": float(parts[0].mean()),
        "elsewhere": stats.paired_difference(parts[1], np.zeros(len(groups)), samples, seed),
    }


def _over_completions(
    records: Records, cells: Sequence[Cell], tables: Sequence[np.ndarray], samples: int, seed: int
) -> dict:
    """Figures that need several completions: differences in pass@k and maj@k, and the components of the variance."""
    completions, found = tables[0].shape[1], {}
    for k in powers(completions):
        base, grpo = (pass_at_k_scores(table, k) for table in tables)
        found[str(k)] = _estimate(base, grpo, samples, seed)
    base, grpo = (majority_scores(records[cell]) for cell in cells)
    votes = _estimate(base, grpo, samples, seed)
    parts = power.split_disagreement(tables[1], tables[0])
    return {
        "pass_at_k": found,
        "maj_at_k": {"k": completions, **votes} if votes else None,
        "variance": dict(zip(("between_problems", "within_problems"), parts, strict=True)) if parts else None,
    }


def _estimate(base: np.ndarray, grpo: np.ndarray, samples: int, seed: int) -> dict | None:
    kept = ~np.isnan(base) & ~np.isnan(grpo)
    if not kept.any():
        return None
    found = stats.paired_difference(grpo[kept], base[kept], samples, seed)
    return {"base": float(base[kept].mean()), "grpo": float(grpo[kept].mean()), **found, "n": int(kept.sum())}


def _adjust(found: Iterable[dict]) -> None:
    """Add the Holm-adjusted p-value to every comparison of a family."""
    found = list(found)
    for one, adjusted in zip(found, stats.holm([one["p"] for one in found]), strict=True):
        one |= {"holm_p": adjusted, "comparisons": len(found)}


def _hygiene(records: Records, formats: Sequence[str], limits: Limits) -> dict:
    """{"limits", "cells": {policy: {format: findings}}, "refused": {"gain", "gain_survival": {format: [texts]}}}.

    A GRPO cell out of range blocks the conclusions drawn from it. A base often hits the token limit or gives no
    readable answer, which GRPO is meant to change: such findings block nothing, and `base_form` reports them
    separately. Base answers that could not be compared do block conclusions, because the measurement itself failed.
    """
    cells: dict = {"base": {}, "grpo": {}}
    undecided: dict = {"base": {}, "grpo": {}}
    for (policy, name), found in records.items():
        cells[policy][name] = findings(rates(found), limits)
        undecided[policy][name] = [sum(one.correct is None for one in found), len(found)]

    def refusals(name: str) -> list[str]:
        stopping = [("grpo", finding) for finding in cells["grpo"][name]]
        stopping += [("base", finding) for finding in cells["base"][name] if finding["key"] == UNDECIDED]
        return [f"{_cell((policy, name))} has {finding['text']}" for policy, finding in stopping]

    of_gain = {name: refusals(name) for name in formats}
    of_survival = {name: of_gain[name] + of_gain["bf16"] for name in _beside_bf16(formats)}
    refused = {"gain": of_gain, "gain_survival": of_survival}
    return {
        "limits": asdict(limits),
        "cells": cells,
        "undecided": undecided,
        "refused": {of: {name: texts for name, texts in found.items() if texts} for of, found in refused.items()},
    }


def _judge(result: dict, limits: Limits) -> None:
    """Set "verdict" in every gain and survival, and "needed_problems" in survivals that more problems would decide."""
    refused = result["hygiene"]["refused"]
    for name, gain in result["gain"].items():
        gain["verdict"] = REFUSED if name in refused["gain"] else {1: GAIN, -1: LOSS, 0: NOT_SHOWN}[direction(gain)]
    for name, survival in result["gain_survival"].items():
        gains = result["gain"]["bf16"], result["gain"][name]
        survival["margin"] = limits.margin
        survival["verdict"] = REFUSED if name in refused["gain_survival"] else _survival(survival, *gains)
        survival["needed_problems"] = None
        if survival["verdict"] == NOT_SHOWN:
            room, half = survival["difference"] + limits.margin, survival["difference"] - survival["interval"][0]
            survival["needed_problems"] = power.problems_to_decide(survival["n"], room, half)


def direction(found: dict) -> int:
    """1 above zero, -1 below, 0 not shown: the interval must exclude 0 and the adjusted p-value be at most 0.05."""
    low, high = found["interval"]
    if found["holm_p"] > stats.ALPHA or low <= 0 <= high:
        return 0
    return 1 if low > 0 else -1


def _survival(survival: dict, bf16: dict, gain: dict) -> str:
    """Verdict on a gain's survival: a non-inferiority test with `margin` as the tolerated loss.

    Survival requires the lower end above -margin, a margin smaller than the gain (otherwise all of it could be lost),
    and a gain shown in the format itself.
    """
    if bf16["verdict"] != GAIN:
        return NO_GAIN
    if way := direction(survival):
        return LARGER if way > 0 else PARTLY_LOST
    margin = survival["margin"]
    kept = survival["interval"][0] > -margin and margin < bf16["difference"] and gain["verdict"] == GAIN
    return SURVIVES if kept else NOT_SHOWN


def _cell(cell: Cell) -> str:
    return f"{cell[0]} in {cell[1]}"


def conclude(comparison: dict, formats: Sequence[str], trained: str = GRPO) -> str:
    """State the verdicts of `compare` in sentences, one per line, in points and with their intervals.

    A difference whose interval contains 0 is never called "no change", and a gain "survives" only above the margin.
    `trained` is the display name of the trained policy.
    """
    hygiene, survival, gains = (comparison[key] for key in ("hygiene", "gain_survival", "gain"))
    refused = hygiene["refused"]["gain"]
    lines = [_gain_sentence(name, gains[name], refused.get(name), in_sentence(trained)) for name in formats]
    noted = [(name, form_note(hygiene["cells"]["base"].get(name, ()), gains[name])) for name in formats]
    if cautions := [f"Caution: the {name} base {note}" for name, note in noted if note]:
        lines += cautions
        lines.append(
            "Where the base gave no readable answer or did not stop, a gain in form cannot be distinguished from a "
            "gain in solving."
        )
    if not survival:
        lines.append("Survival of the gain was not measured: that needs bf16 and another format.")
    elif gains["bf16"]["verdict"] == REFUSED:
        lines.append("No conclusion on the survival of the gain: the gain in bf16, its reference, is refused.")
    elif gains["bf16"]["verdict"] != GAIN:
        lines.append("No gain is shown in bf16, so its survival in other formats cannot be judged.")
    else:
        lines += [_survival_sentence(name, found, gains[name], gains["bf16"]) for name, found in survival.items()]
    lines += [
        f"{count} of {total} answers of {policy_name(policy, trained)} in {name} could not be compared and are "
        "excluded."
        for policy, row in hygiene["undecided"].items()
        for name, (count, total) in row.items()
        if count
    ]
    completions = comparison["samples_per_problem"]
    if completions > 1:
        reference = comparison["reference"]
        lines.append(_pass_sentence(reference, gains[reference], completions, trained))
    if len(formats) > 1:
        lines.append(
            f"{len(formats)} formats are compared: a difference counts as shown if its interval excludes 0 and its "
            f"p-value, adjusted for all of them (Holm), is at most {stats.ALPHA:g}. Each interval covers 95 % by "
            "itself."
        )
    return "\n".join(lines)


def _gain_sentence(name: str, gain: dict, refused: list[str] | None, who: str) -> str:
    if gain["verdict"] == REFUSED:
        return f"No conclusion on the gain in {name}: {'; '.join(refused)}."
    if gain["verdict"] in (GAIN, LOSS):
        more, found = ("more", gain) if gain["verdict"] == GAIN else ("fewer", stats.negated(gain))
        return (
            f"In {name}, {who} answers {points(found['difference'])} points {more} of the {gain['n']:,} held-out "
            f"problems than the base ({_interval(found)}, {_test(gain)})."
        )
    neither = "a gain" if gain["difference"] >= 0 else "a gain or a loss"
    needed = gain["needed_problems"]
    return (
        f"No evidence of {neither} in {name} at n = {gain['n']:,} problems: {_change(gain)} points "
        f"({_interval(gain)}, {_test(gain)}). About {_count(needed['problems'])} problems would detect "
        f"{points(needed['effect'])} points; {gain['n']:,} detect {points(gain['minimum_detectable_effect'])}."
    )


def form_note(base: Sequence[dict], gain: dict) -> str | None:
    """How much of a gain is where the base was truncated or unparseable; None if `base`, its findings, has no such."""
    shaped, form = [finding["text"] for finding in base if finding["key"] != UNDECIDED], gain.get("base_form")
    if not shaped or not form or gain.get("verdict") == REFUSED:
        return None
    elsewhere = form["elsewhere"]
    unshown = gain.get("verdict") == GAIN and elsewhere["interval"][0] <= 0
    return (
        f"has {'; '.join(shaped)}. Problems where it gave no readable answer or did not stop contribute "
        f"{points(form['gain_there'], sign=True)} points to the difference, the others {_change(elsewhere)} "
        f"({_interval(elsewhere)}){'; no gain beyond form is shown' if unshown else ''}."
    )


def _survival_sentence(name: str, survival: dict, gain: dict, bf16: dict) -> str:
    low, margin = survival["interval"][0], survival["margin"]
    allowed, evidence = f"{100 * margin:g} points", f"{_interval(survival)}, {_test(survival)}"
    differs = f"it differs from bf16's by {_change(survival)} points ({evidence})"
    match survival["verdict"]:
        case "refused":
            return f"No conclusion on the survival of the gain in {name}: its gain is refused."
        case "partly lost":
            rest = f"; no more than {allowed} are lost" if low > -margin else ""
            rest = rest if gain["verdict"] == GAIN else f"; no gain over the base is shown in {name}"
            return f"Part of the gain is lost in {name}: {differs}{rest}."
        case "larger":
            return f"The gain is larger in {name} than in bf16: by {_change(survival)} points ({evidence})."
        case "survives":
            return f"The gain survives {name} to within {allowed}: {differs}."
    if low <= -margin:
        why = f"the loss can be more than {allowed}"
    elif margin >= bf16["difference"]:
        why = (
            f"no more than {points(max(-low, 0.0))} are lost, but the margin of {allowed} is no smaller than the gain "
            f"in bf16, {points(bf16['difference'])}"
        )
    else:
        why = "no gain over the base is shown there"
    needed = survival["needed_problems"]
    decide = f" About {_count(needed)} problems would decide." if needed else ""
    return f"Whether the gain survives {name} is not shown either way: {differs}; {why}.{decide}"


def _pass_sentence(name: str, gain: dict, completions: int, trained: str) -> str:
    found = gain["pass_at_k"][str(completions)]
    if found is None:
        return f"pass@{completions} in {name} was not measured: no problem has {completions} decided completions."
    return (
        f"pass@{completions} in {name}: {points(found['base'])} % base, {points(found['grpo'])} % {trained}, "
        f"{_change(found)} points ({_interval(found)})."
    )


def _test(found: dict) -> str:
    """The p-value of a comparison, plus the adjusted one if several were made."""
    name = "McNemar " if found.get("test") == "McNemar" else ""
    adjusted = f", {p_value(found['holm_p'])} adjusted for {found['comparisons']}" if found["comparisons"] > 1 else ""
    return f"{name}p = {p_value(found['p'])}{adjusted}"


def _change(found: dict) -> str:
    return points(found["difference"], sign=True)


def _interval(found: dict) -> str:
    low, high = found["interval"]
    return f"95 % interval {points(low)} to {points(high)}"


def _count(problems: int) -> str:
    """A number of problems rounded to three digits, since it is based on an estimated spread."""
    return f"{max(round(problems, 3 - len(str(problems))), 1):,}"


def p_value(p: float | None) -> str:
    """A p-value with three digits, so that 0.0501 does not read as 0.05; "-" if there is none."""
    return "-" if p is None else f"{p:.3g}"


def points(value: float, sign: bool = False) -> str:
    """A fraction as percentage points with one decimal; never "-0.0"."""
    shown = f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return shown.replace("-0.0", "0.0") if shown == "-0.0" else shown
