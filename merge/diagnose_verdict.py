"""Summarize the layers' figures: sums over layers, how uniform a change is, and a verdict in words.

Works on the records of diagnostics.json alone, so that everything here can be recomputed from the file. Averages are
over squared norms, never over ratios: a large layer counts as large. Not covered: accuracy, which the evaluation
measures.
"""

import math
import re
from collections.abc import Callable, Iterable
from statistics import median

import numpy as np
from scipy.stats import binomtest

from merge.diagnose_layer import ratio

RESAMPLES, SEED = 10_000, 0
FEWEST_BLOCKS = 8  # fewest decoder layers to resample as blocks; below, linear layers are resampled
SMALL_CHANGE = 0.01  # of the error; a smaller change is called small whatever the test says
ON_GRID = 0.1  # if the error before is below this share of the error after, the base lies on the format's own grid
MODULES = ("q", "k", "v", "o", "gate", "up", "down")


def module_type(name: str) -> str:
    """`q` of model.layers.3.self_attn.q_proj; the last part of any other name."""
    return name.rpartition(".")[2].removesuffix("_proj")


def depth(name: str) -> int:
    """The index of the decoder layer that a module belongs to; -1 when its name holds no index."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else -1


def grouped(layers: list[dict], key: Callable[[str], str | int]) -> dict[str, list[dict]]:
    """{group: its layers}, module types in their usual order, depths ascending."""
    groups: dict = {}
    for layer in layers:
        groups.setdefault(key(layer["name"]), []).append(layer)
    order = {name: place for place, name in enumerate(MODULES)}
    names = sorted(groups, key=lambda g: (order.get(g, len(order)), g) if isinstance(g, str) else (g, ""))
    return {str(name): groups[name] for name in names}


def _squares(layer: dict, fmt: str, policy: str) -> tuple[float, float] | None:
    """(‖Q(W) − W‖², ‖W‖²) of a layer; None if the format's weights are unknown."""
    figures, size = layer["formats"][fmt], layer["weight_norm"]["base" if policy == "base" else "grpo"]
    error = figures["control_error"] if policy == "control" else figures["error"][policy]
    if error is None:
        return (0.0, 0.0) if size == 0 else None
    return (error * size) ** 2, size**2


def _root_ratio(pairs: Iterable[tuple[float, float] | None]) -> float | None:
    known = [pair for pair in pairs if pair is not None]
    return ratio(math.sqrt(sum(p[0] for p in known)), math.sqrt(sum(p[1] for p in known)))


def pool(layers: list[dict], fmt: str) -> dict:
    """Figures of several layers as if they were one tensor; snr and retained over the layers that have an update.

    For several layers, the shuffled update's error is divided by the norms after training, which are the same up to
    rounding.
    """
    changed = [layer for layer in layers if layer["update_norm"]]
    squares = [(layer["update_norm"] ** 2, _squares(layer, fmt, "grpo")) for layer in changed]
    noise = [(update, found[0]) for update, found in squares if found is not None]
    kept = [(layer["formats"][fmt]["retained"], layer["update_norm"] ** 2) for layer in changed]
    kept = [(share * size, size) for share, size in kept if share is not None]
    return {
        "error": {
            policy: _root_ratio(_squares(layer, fmt, policy) for layer in layers) for policy in ("base", "grpo")
        },
        "snr": _root_ratio(noise),
        "retained": ratio(sum(k[0] for k in kept), sum(k[1] for k in kept)),
        "control_error": _root_ratio(_squares(layer, fmt, "control") for layer in changed),
    }


def pool_weights(layers: list[dict]) -> dict:
    """Statistics of the layers' weights: relative update, median kurtosis, outlier shares over all weights."""
    sizes = [layer["weight_norm"]["base"] ** 2 for layer in layers]
    found = {
        "layers": len(layers),
        "changed_layers": sum(layer["update_norm"] > 0 for layer in layers),
        "relative_update": _root_ratio(zip((layer["update_norm"] ** 2 for layer in layers), sizes, strict=True)),
        "kurtosis_median": {},
    }
    for policy in ("base", "grpo"):
        known = [layer["kurtosis"][policy] for layer in layers if layer["kurtosis"][policy] is not None]
        found["kurtosis_median"][policy] = median(known) if known else None
    for key in ("outlier_fraction", "beyond_6_medians"):
        found[key] = {}
        for policy in ("base", "grpo"):
            counts = [(layer[key][policy], math.prod(layer["shape"])) for layer in layers]
            counts = [(share * size, size) for share, size in counts if share is not None]
            found[key][policy] = ratio(sum(c[0] for c in counts), sum(c[1] for c in counts))
    return found


def compare_errors(layers: list[dict], fmt: str, policies: tuple[str, str]) -> dict | None:
    """How the error of `policies[1]` differs from that of `policies[0]`, paired by layer; None if none is known.

    `change` is the relative change of the pooled error; `interval` is its 95 % percentile bootstrap over `unit`;
    `larger` and `smaller` count layers; `sign_test_p` is the exact two-sided test for equal counts (ties excluded).
    Both treat the units as independent, which layers trained by one loss are not: they show how uniform a change is
    over this model, not what another run would show.
    """
    rows = []
    for layer in layers:
        pair = [_squares(layer, fmt, policy) for policy in policies]
        if layer["update_norm"] and None not in pair and pair[0][1] and pair[1][1]:
            rows.append((depth(layer["name"]), *pair[0], *pair[1]))
    if not rows or not sum(row[1] for row in rows):
        return None
    table = np.array(rows)  # (layers, 5): depth, error² and size² before, error² and size² after
    shares = table[:, 3] / table[:, 4] - table[:, 1] / table[:, 2]
    larger, smaller = int((shares > 0).sum()), int((shares < 0).sum())
    depths = np.unique(table[:, 0])
    blocks = table[:, 1:]
    unit = "linear layer"
    if len(depths) >= FEWEST_BLOCKS:
        unit, blocks = "decoder layer", np.stack([table[table[:, 0] == d, 1:].sum(0) for d in depths])
    return {
        "change": float(_change(blocks.sum(0))),
        "interval": _bootstrap(blocks),
        "unit": unit,
        "units": len(blocks),
        "larger": larger,
        "smaller": smaller,
        "layers": len(rows),
        "sign_test_p": float(binomtest(larger, larger + smaller).pvalue) if larger + smaller else None,
    }


def _change(sums: np.ndarray) -> np.ndarray:
    """Relative change of the pooled error of sums (..., 4) as in `compare_errors`."""
    return np.sqrt((sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])) - 1


def _bootstrap(blocks: np.ndarray) -> list[float] | None:
    """95 % percentile interval of the change, blocks (n, 4) drawn with replacement; None when n is 1."""
    count = len(blocks)
    if count < 2:
        return None
    drawn = np.random.default_rng(SEED).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = _change(drawn @ blocks)
    changes = changes[np.isfinite(changes)]
    return [float(end) for end in np.quantile(changes, [0.025, 0.975])] if len(changes) else None


def summarize(layers: list[dict], formats: list[str]) -> dict:
    """The parts of diagnostics.json that are derived from its `layers`."""
    compared = {
        fmt: {
            "rl": compare_errors(layers, fmt, ("base", "grpo")),
            "rl_against_shuffled": compare_errors(layers, fmt, ("control", "grpo")),
            "layers_above_noise": sum((layer["formats"][fmt]["snr"] or 0) > 1 for layer in layers),
        }
        for fmt in formats
    }
    return {
        "weights": pool_weights(layers),
        "summary": {fmt: pool(layers, fmt) for fmt in formats},
        "by_module": {
            name: {fmt: pool(members, fmt) for fmt in formats}
            for name, members in grouped(layers, module_type).items()
        },
        "by_depth": {
            name: {fmt: pool(members, fmt) for fmt in formats} for name, members in grouped(layers, depth).items()
        },
        "comparison": compared,
    }


def percent(value: float | None, digits: int = 2, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:{'+' if sign else ''}.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def change_text(found: dict | None) -> str:
    """The relative change of an error; as a factor if a percentage would be unreadable."""
    if found is None:
        return "-"
    return percent(found["change"], sign=True) if abs(found["change"]) < 10 else f"x {found['change'] + 1:.0f}"


def _interval(ends: list[float] | None) -> str:
    return "" if ends is None else f" [{percent(ends[0], sign=True)}, {percent(ends[1], sign=True)}]"


def _uniform(found: dict) -> bool:
    """Whether a change has one direction over the layers, by both the interval and the sign test."""
    ends, p = found["interval"], found["sign_test_p"]
    return ends is not None and ends[0] * ends[1] > 0 and p is not None and p < 0.05


def error_verdict(fmt: str, summary: dict, comparison: dict) -> str:
    """One or two sentences on whether training changes how cleanly the layers go into this format."""
    error, found, control = summary["error"], comparison["rl"], comparison["rl_against_shuffled"]
    if found is None:
        if None in error.values():
            return f"{fmt}: not known, the weights of the base or of the policy in this format are missing."
        return f"{fmt}: nothing to compare, the weights before training fit the format exactly."
    numbers = f"error {percent(error['base'])} before training, {percent(error['grpo'])} after"
    if error["base"] < ON_GRID * error["grpo"]:
        return (
            f"{fmt}: {numbers}. This says nothing about training: the weights before it are on this grid already, and "
            "any update moves them off it."
        )
    counts = f"larger in {found['larger']} of {found['layers']} layers, sign test p {number(found['sign_test_p'], 2)}"
    text = f"{fmt}: {numbers}: {percent(found['change'], sign=True)}{_interval(found['interval'])}, {counts}. "
    if not _uniform(found):
        return text + "No evidence of a change that the layers share."
    direction = "less" if found["change"] > 0 else "more"
    if abs(found["change"]) < SMALL_CHANGE:
        return text + f"It quantizes {direction} cleanly, by under {percent(SMALL_CHANGE, 0)} of the error: small."
    text += f"It quantizes {direction} cleanly."
    if control is None:
        return text
    against = f"{percent(control['change'], sign=True)}{_interval(control['interval'])}"
    if _uniform(control) and abs(control["change"]) >= SMALL_CHANGE:
        return text + f" A shuffled update of the same size does not do the same (training against it: {against})."
    return (
        text + f" So does a shuffled update of the same size (training against it: {against}): its size explains it."
    )


def noise_verdict(fmt: str, summary: dict, comparison: dict, changed: int) -> str:
    """One sentence on whether the update is above the format's noise and whether it is kept."""
    snr, kept = summary["snr"], summary["retained"]
    if snr is None:
        return f"{fmt}: the signal-to-noise ratio is unknown, or the noise is zero."
    side = "above" if snr > 1 else "below"
    text = (
        f"{fmt}: the update is {side} the quantization noise (‖Δ‖/noise {number(snr)}; above 1 in "
        f"{comparison['layers_above_noise']} of {changed} layers)"
    )
    if kept is None:
        return text + "."
    text += f" and {percent(kept, 1)} of it is kept"
    if snr <= 1 and 0.9 <= kept <= 1.1:
        return text + ": the noise is larger than the update, but not directed against it."
    if kept < 0.5:
        return text + ": most of what was learned is rounded away."
    return text + "."


def verdict(result: dict) -> list[str]:
    """Verdict of a diagnostics.json, one statement per item; never more than the numbers show."""
    weights = result["weights"]
    if not weights["changed_layers"]:
        return [
            f"The adapter changes none of the {weights['layers']} layers, so there is nothing to say about training."
        ]
    kurtosis, outliers = weights["kurtosis_median"], weights["outlier_fraction"]
    lines = [
        f"The update is {percent(weights['relative_update'])} of the weights (‖Δ‖/‖W‖); it changes "
        f"{weights['changed_layers']} of {weights['layers']} layers. Before and after training the median excess "
        f"kurtosis of a layer is {number(kurtosis['base'])} and {number(kurtosis['grpo'])}, the share of weights "
        f"beyond 6 standard deviations {percent(outliers['base'], 4)} and {percent(outliers['grpo'], 4)}."
    ]
    for fmt, summary in result["summary"].items():
        lines.append(error_verdict(fmt, summary, result["comparison"][fmt]))
        lines.append(noise_verdict(fmt, summary, result["comparison"][fmt], weights["changed_layers"]))
    if result["into"] == "dequantized" and result.get("base_storage", "nf4") == "nf4":
        lines.append(
            "The weights before training are dequantized NF4, 16 values per block, which other formats fit better or "
            "worse than smooth weights; any update smooths them. --into original measures without that effect."
        )
    lines.append(
        "One run, one adapter. Layers of one model are not independent, so tests and intervals show how uniform a "
        f"change is over its layers, not what another run would show; {len(result['summary'])} formats, no "
        "correction for multiple comparisons. Weight error is not accuracy: the evaluation measures that."
    )
    return lines
