"""Plots of an evaluation: one function per plot, each returning a matplotlib Figure; `svg` and `png` write it.

A format has one color and one marker wherever it appears. The colors are those of Okabe and Ito (2008) and Tol (2021),
which readers with a color deficiency can tell apart. matplotlib is imported when something is drawn.
"""

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eval.compare import points
from eval.naming import name_of, policy_name
from kit.core.formats import FORMATS
from kit.core.metrics_log import SMOOTH, smooth, smoothing
from kit.core.one_line import printable
from kit.core.run_directory import naming

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICY_COLORS = {"base": "#7f7f7f", "grpo": "#1f77b4"}
OTHERS = (("#882255", "<"), ("#117733", ">"), ("#999933", "d"), ("#aa4499", "p"))
LONGEST_LABEL = 28
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "text.parse_math": False,  # a name may have dollar signs
    "svg.hashsalt": "report",
}


def look(name: str, names: Sequence[str] = ()) -> tuple[str, str]:
    """(color, marker) of a format; an unknown one gets those of its position among the unknown `names`."""
    if name in FORMATS:
        return FORMATS[name].color, FORMATS[name].marker
    unknown = [other for other in names if other not in FORMATS]
    return OTHERS[unknown.index(name) % len(OTHERS) if name in unknown else 0]


def order(names: Iterable[str]) -> list[str]:
    """Formats in the order of every table and legend: nf4, which is the policy, first, unknown ones last."""
    rank = {name: place for place, name in enumerate(FORMATS)} | {"nf4": -1}
    return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))


def _label(name: object) -> str:
    """A name as shown in a plot: one line, truncated to LONGEST_LABEL."""
    text = " ".join(printable(name).split())
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _figure(width: float, height: float) -> "Figure":
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def _panels(count: int, columns: int, width: float, height: float, **shared: bool) -> tuple["Figure", "np.ndarray"]:
    """A figure and its axes in rows of `columns`; those after the first `count` are hidden."""
    rows = math.ceil(count / columns)
    figure = _figure(width, height)
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    return figure, grid


def _list_formats(axes: "Axes", names: Sequence[str]) -> None:
    """Label the vertical axis with formats, the first one on top."""
    axes.set_yticks(range(len(names)), list(map(_label, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)


def svg(figure: "Figure") -> bytes:
    """The figure as SVG with its text as outlines; the same bytes for the same data."""
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def png(figure: "Figure", file: Path) -> None:
    """Write the figure as PNG atomically."""
    partial = file.with_name(f".{file.name}.partial")
    with naming(file):
        figure.savefig(partial, dpi=130, format="png")
    os.replace(partial, file)


def matrix(result: dict) -> "Figure":
    """A forest plot: accuracy of base and trained policy by format, and gain survival by format."""
    formats, survival = list(result["matrix"]["base"]), result["gain_survival"]
    figure = _figure(11, 1.9 + 0.55 * len(formats))
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for policy, shift in (("base", -0.16), ("grpo", 0.16)):
        cells = [result["matrix"][policy][name] for name in formats]
        rows = [(place + shift, cell["accuracy"], cell["interval"]) for place, cell in enumerate(cells)]
        _forest(left, rows, POLICY_COLORS[policy], policy_name(policy, name_of(result)), sign=False)
    left.set_xlabel("accuracy, % (95 % interval)")
    left.set_title(f"Held-out accuracy, {result['n']} problems")
    right.axvline(0, color="black", linewidth=0.8)
    if survival:
        rows = [(formats.index(name), found["difference"], found["interval"]) for name, found in survival.items()]
        _forest(right, rows, "#d55e00", None, sign=True)
        where = (0, formats.index("bf16"))
        right.annotate("reference", where, ha="center", va="center", fontsize=8, backgroundcolor="white")
        widest = max(abs(100 * end) for _, _, interval in rows for end in interval)
        right.set_xlim(-1.15 * widest, 1.15 * widest)
    else:
        right.text(0.5, 0.5, "not measured:\nneeds bf16 and another format", ha="center", transform=right.transAxes)
    right.set_xlabel("gain minus gain in bf16, points (95 % paired bootstrap)")
    right.set_title("Does the gain survive the format?")
    for axes in (left, right):
        _list_formats(axes, formats)
        axes.grid(axis="x")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def _forest(axes: "Axes", rows: list[tuple[float, float, list]], color: str, label: str | None, sign: bool) -> None:
    """Plot estimates with their intervals; `rows` are (place, estimate, interval) in fractions."""
    places, middles, intervals = zip(*rows, strict=True)
    # The bootstrap adds two pseudo-problems, so on few problems an estimate can lie outside its own interval.
    below = [100 * max(middle - low, 0) for middle, (low, _) in zip(middles, intervals, strict=True)]
    above = [100 * max(high - middle, 0) for middle, (_, high) in zip(middles, intervals, strict=True)]
    shown = [100 * middle for middle in middles]
    axes.errorbar(shown, places, xerr=[below, above], fmt="o", color=color, capsize=3, markersize=5, label=label)
    behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for place, middle in zip(places, middles, strict=True):
        axes.annotate(points(middle, sign=sign), (100 * middle, place), xytext=(0, 6), textcoords="offset points",
                      ha="center", fontsize=8, bbox=behind)  # fmt: skip


def training(steps: Sequence[int], curves: Mapping[str, tuple[str, str, Sequence[float]]]) -> "Figure":
    """Draw one panel per curve: each step pale, the smoothed values solid.

    `curves` is {title: (key, unit, one value per step, NaN if unknown)}.
    """
    columns = min(3, len(curves))
    figure, grid = _panels(len(curves), columns, 3.7 * columns, 2.7 * math.ceil(len(curves) / columns), sharex=True)
    for axes, (title, (key, unit, values)) in zip(grid.flat, curves.items(), strict=False):
        kind = smoothing(key)
        marker = "." if len(steps) < 3 else None
        axes.plot(steps, values, color="#b9cbe3", linewidth=1, marker=marker, label="each step")
        axes.plot(steps, smooth(values, kind), color="#0072b2", linewidth=1.8, label=f"{kind} of {SMOOTH} steps")
        axes.set(title=title, ylabel=unit)
        axes.legend(fontsize=8)
        axes.grid()
        if not any(map(math.isfinite, values)):
            axes.text(0.5, 0.5, "not logged", ha="center", color="gray", transform=axes.transAxes)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    return figure


def reward_curves(panels: dict[str, dict[str, tuple[int, list[Sequence[float]]]]]) -> "Figure":
    """Draw one panel per format: each seed's running mean pale, the mean over the seeds solid.

    `panels` is {format: {line: (steps before its first, rewards per step by seed)}}. The mean ends with the shortest
    seed.
    """
    figure = _figure(3.7 * len(panels), 3.1)
    grid = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    colors = ("#404040", "#0072b2", "#d55e00")
    for axes, (name, lines) in zip(grid, panels.items(), strict=True):
        for color, (label, (before, seeds)) in zip(colors, lines.items(), strict=False):
            means = [smooth(rewards) for rewards in seeds]
            for mean in means:
                axes.plot(range(before + 1, before + 1 + len(mean)), mean, color=color, linewidth=0.8, alpha=0.35)
            shared = [sum(values) / len(values) for values in zip(*means, strict=False)]
            axes.plot(range(before + 1, before + 1 + len(shared)), shared, color=color, linewidth=1.8, label=label)
        axes.set(title=_label(name), xlabel="step")
        axes.grid()
    grid[0].set_ylabel(f"reward, mean of {SMOOTH} steps")
    grid[-1].legend(loc="lower right")
    return figure


def layer_maps(layers: Sequence[dict], formats: Sequence[str], key: str, label: str) -> "Figure":
    """Draw a heatmap per format of one figure of every layer: blocks of the model across, kinds of layers down.

    Shares run from 0 to 1; `snr` is drawn as log10, since it spans decades, blue above the noise and red below it.
    """
    from matplotlib.colors import CenteredNorm, Normalize

    kinds, blocks, places = _grid(layers)
    columns = min(2 if len(blocks) > 12 else 3, len(formats))
    height = 1.1 + math.ceil(len(formats) / columns) * (0.75 + 0.24 * len(kinds))
    figure, grid = _panels(len(formats), columns, 11, height)
    scale = math.log10 if key == "snr" else float
    tables = {name: _table(layers, places, len(kinds), len(blocks), name, key, scale) for name in formats}
    known = [value for table in tables.values() for row in table for value in row if math.isfinite(value)]
    if key == "snr":
        colors, norm = "RdBu", CenteredNorm(0.0, max([0.3, *map(abs, known)]))
    else:
        colors, norm = "cividis", Normalize(min([0.0, *known]), max([1.0, *known]))
    shown = None
    for axes, name in zip(grid.flat, formats, strict=False):
        shown = axes.imshow(tables[name], aspect="auto", cmap=colors, norm=norm)
        axes.set_title(_label(name))
        axes.set_yticks(range(len(kinds)), list(map(_label, kinds)), fontsize=8)
        every = max(1, math.ceil(len(blocks) / 12))
        axes.set_xticks(range(0, len(blocks), every), [str(block) for block in blocks[::every]])
        axes.set_xlabel("block")
    figure.colorbar(shown, ax=list(grid.flat), label=label, shrink=0.9)
    return figure


def _grid(layers: Sequence[dict]) -> tuple[list[str], list[int | str], dict[str, tuple[int, int]]]:
    """(kinds, blocks, {layer name: (row, column)}) from names such as model.layers.3.self_attn.q_proj."""
    split = {}
    for layer in layers:
        name = str(layer["name"]).removesuffix(".weight")
        number = re.search(r"\.(\d+)\.", name)
        split[layer["name"]] = (name.rpartition(".")[2], int(number[1]) if number else -1)
    kinds = list(dict.fromkeys(kind for kind, _ in split.values()))
    blocks = sorted({block for _, block in split.values()})
    places = {name: (kinds.index(kind), blocks.index(block)) for name, (kind, block) in split.items()}
    return kinds, ["–" if block < 0 else block for block in blocks], places


def _table(
    layers: Sequence[dict], places: dict, height: int, width: int, name: str, key: str, scale: Callable[[float], float]
) -> list[list[float]]:
    table = [[math.nan] * width for _ in range(height)]
    for layer in layers:
        if (value := figure_of(layer, name, key)) is not None:
            row, column = places[layer["name"]]
            table[row][column] = scale(value)
    return table


def figure_of(layer: dict, name: str, key: str) -> float | None:
    """A figure of a layer in a format; None if it is unknown, or an snr of 0, which has no logarithm."""
    value = ((layer.get("formats") or {}).get(name) or {}).get(key)
    known = isinstance(value, int | float) and math.isfinite(value) and (key != "snr" or value > 0)
    return value if known else None


def layer_profile(layers: Sequence[dict], trained: str) -> "Figure":
    """How much each layer changed, and its tails before and after: relative update, kurtosis, share of outliers."""
    kinds, blocks, places = _grid(layers)
    figure = _figure(11, 3.1)
    left, middle, right = figure.subplots(1, 3)
    cycle = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#404040", "#332288"]
    for number, kind in enumerate(kinds):
        own = [layer for layer in layers if kinds[places[layer["name"]][0]] == kind]
        along = [places[layer["name"]][1] for layer in own]
        style = {"color": cycle[number % len(cycle)], "marker": "osD^vPX*"[number % 8], "markersize": 4}
        left.plot(
            along, [_percent(layer.get("relative_update")) for layer in own], label=_label(kind), linewidth=1, **style
        )
    left.set(title="Update relative to the weights", xlabel="block", ylabel="‖ΔW‖ / ‖W‖, %")
    for axes, key, factor in ((middle, "kurtosis", 1), (right, "outlier_fraction", 100)):
        pairs = [(layer.get(key) or {}) for layer in layers]
        pairs = [(factor * pair["base"], factor * pair["grpo"]) for pair in pairs if {"base", "grpo"} <= set(pair)]
        if pairs:
            before, after = zip(*pairs, strict=True)
            axes.scatter(before, after, s=14, color="#0072b2", alpha=0.7)
            ends = [min(before + after), max(before + after)]
            axes.plot(ends, ends, color="gray", linewidth=0.8, linestyle="--")
    middle.set(title="Kurtosis of the weights", xlabel="base", ylabel=trained)
    right.set(title="Outliers of the weights", xlabel="base, %", ylabel=f"{trained}, %")
    for axes in (left, middle, right):
        axes.grid()
    every = max(1, math.ceil(len(blocks) / 8))
    left.set_xticks(range(0, len(blocks), every), [str(block) for block in blocks[::every]])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=min(8, len(kinds)), fontsize=8)
    return figure


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def distances(rows: dict[str, tuple[float | None, float | None]]) -> "Figure":
    """Next-token KL to the policy (log axis) and agreement on the most likely token, {format: (KL, top-1)}."""
    from matplotlib.ticker import FuncFormatter

    names = order(list(rows))
    figure = _figure(9, 1.2 + 0.38 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    for place, name in enumerate(names):
        color, marker = look(name, names)
        kl, top1 = rows[name]
        if kl is not None and kl > 0:
            left.plot(kl, place, color=color, marker=marker, markersize=7, linestyle="")
        if top1 is not None:
            right.plot(100 * top1, place, color=color, marker=marker, markersize=7, linestyle="")
    left.set_xscale("log")
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    left.minorticks_off()
    left.set(xlabel="KL(policy ‖ checkpoint), nats per token", title="Distance to the policy")
    right.set(xlabel="same likeliest token, %", title="Top-1 agreement")
    _list_formats(left, names)
    for axes in (left, right):
        axes.grid(axis="x")
    return figure


def serving(formats: dict[str, dict]) -> "Figure":
    """Throughput, latency (median, and p95 dashed) and time to first token against the number of requests."""
    names = order(list(formats))
    figure = _figure(11, 3.7)
    panels = figure.subplots(1, 3)
    for name in names:
        color, marker = look(name, names)
        rows = formats[name]["batches"]
        batches = [row["batch"] for row in rows]
        style = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.5}
        panels[0].plot(batches, [row["tokens_per_s"] for row in rows], label=_label(name), **style)
        for axes, key in ((panels[1], "latency"), (panels[2], "ttft")):
            axes.plot(batches, [row[f"{key}_p50_s"] for row in rows], **style)
            axes.plot(batches, [row[f"{key}_p95_s"] for row in rows], color=color, linewidth=1, linestyle="--")
    panels[0].set(title="Throughput", ylabel="output tokens per second")
    panels[1].set(title="Latency of a request", ylabel="seconds (solid p50, dashed p95)")
    panels[2].set(title="Time to the first token", ylabel="seconds (solid p50, dashed p95)")
    ticks = sorted({row["batch"] for found in formats.values() for row in found["batches"]})
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("concurrent requests")
        axes.grid()
        _plain_ticks(axes)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(8, len(names)))
    return figure


def _plain_ticks(axes: "Axes") -> None:
    """Label 1, 2 and 5 of every decade on a logarithmic axis, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def memory(formats: dict[str, dict]) -> "Figure":
    """Weights and KV cache on the device, and the checkpoint on disk, in GiB by format."""
    names = order(list(formats))
    figure = _figure(9, 1.3 + 0.5 * len(names))
    axes = figure.subplots()
    for place, name in enumerate(names):
        found = formats[name]
        weights, cache = found.get("weights_gib") or 0.0, found.get("kv_cache_gib") or 0.0
        axes.barh(place - 0.17, weights, 0.34, color=look(name, names)[0])
        axes.barh(place - 0.17, cache, 0.34, left=weights, color="#d9d9d9", edgecolor="#999999", linewidth=0.5)
        disk = found["bytes"] / 2**30
        axes.barh(place + 0.17, disk, 0.2, color="white", edgecolor=look(name, names)[0], hatch="////", linewidth=1)
        axes.annotate(f" {disk:.3g}", (disk, place + 0.17), va="center", fontsize=8)
        label = " + ".join(
            "–" if found.get(key) is None else f"{found[key]:.2f}" for key in ("weights_gib", "kv_cache_gib")
        )
        axes.annotate(f" {label}", (weights + cache, place - 0.17), va="center", fontsize=8)
    _list_formats(axes, names)
    axes.margins(x=0.12)
    axes.set_xlabel("GiB (full: weights, pale: KV cache, hatched: files on disk; – is not logged by vLLM)")
    axes.grid(axis="x")
    return figure


def several_samples(curves: dict[str, dict[str, dict[int, float]]], trained: str) -> "Figure":
    """pass@k against k, one panel per format, base and trained policy: {format: {policy: {k: share}}}."""
    names = order(list(curves))
    columns = min(4, len(names))
    height = 2.6 * math.ceil(len(names) / columns) + 0.3
    figure, grid = _panels(len(names), columns, 2.75 * columns, height, sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        for policy, found in curves[name].items():
            ks = sorted(found)
            style = {"color": POLICY_COLORS[policy], "marker": "s" if policy == "base" else "o", "markersize": 4}
            axes.plot(ks, [100 * found[k] for k in ks], label=policy_name(policy, trained), **style)
            axes.set_xticks(ks)
        axes.set(title=_label(name), xlabel="k")
        axes.grid()
    for axes in grid[:, 0]:
        axes.set_ylabel("pass@k, %")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
