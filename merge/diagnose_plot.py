"""Draw diagnostics.png: per format, heatmaps of ‖Δ‖/noise and of the update kept over the layers, and the errors."""

from pathlib import Path
from typing import Any

import numpy as np

from kit.core.run_directory import naming
from merge.diagnose_verdict import change_text, depth, grouped, module_type, percent, pool

MOST_MODULES = 12  # rows of a heatmap; with more kinds of modules, the most frequent are kept
ANNOTATED = 60  # cells of a heatmap, above which the numbers in them would be unreadable
SNR_REACH = 20.0  # the color scale ends at this factor above and below 1, so that no format washes out the others
GREY = "0.88"  # cells without a value


def draw(result: dict, file: Path) -> None:
    """Draw the content of a diagnostics.json, replacing `file` atomically."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import CenteredNorm, LogNorm

    formats = list(result["summary"])
    cells = _cells(result["layers"], formats)
    kinds, depths = cells["kinds"], cells["depths"]
    height = max(1.8, 0.2 * len(kinds) + 0.75)
    width = 4.6 + min(2.4, 0.07 * len(depths))
    figure, axes = pyplot.subplots(
        len(formats),
        3,
        figsize=(2 * width + 0.5, height * len(formats) + 1.1),
        squeeze=False,
        layout="constrained",
        width_ratios=[width - 1.3, width - 1.3, 3.2],
    )
    for row, fmt in zip(axes, formats, strict=True):
        _heatmap(row[0], cells["snr"][fmt], cells, "RdBu", LogNorm(1 / SNR_REACH, SNR_REACH), extend="both")
        _heatmap(row[1], cells["retained"][fmt], cells, "RdBu", CenteredNorm(0.5, 0.5), extend="both")
        _scatter(row[2], result, fmt)
        summary = result["summary"][fmt]
        snr = "-" if summary["snr"] is None else f"{summary['snr']:.3g}"
        row[0].set_title(f"{fmt}: update / noise, all layers {snr}", fontsize=10, loc="left")
        row[1].set_title(f"{fmt}: update kept, all layers {percent(summary['retained'], 1)}", fontsize=10, loc="left")
    for panel in axes[-1][:2]:
        panel.set_xlabel("decoder layer")
    axes[-1][2].set_xlabel("error before training, %")
    update = percent(result["weights"]["relative_update"])
    figure.suptitle(
        f"Update {update} of the weights, into the {result['into']} base. Blue: above the noise, kept. Red: below the "
        "noise, lost.",
        fontsize=11,
    )
    handles, labels = axes[0][2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), frameon=False, fontsize=9)
    partial = file.with_name(f".{file.name}.partial")
    try:
        with naming(file):
            figure.savefig(partial, dpi=110, format="png")
        partial.replace(file)
    finally:
        pyplot.close(figure)
        partial.unlink(missing_ok=True)


def _cells(layers: list[dict], formats: list[str]) -> dict[str, Any]:
    """Figures per format as (module types, depths) arrays, NaN if there is none; experts of a cell are pooled."""
    by_kind = grouped(layers, module_type)
    kept = sorted(by_kind, key=lambda kind: -len(by_kind[kind]))[:MOST_MODULES]
    kinds = [kind for kind in by_kind if kind in kept]
    depths = sorted({depth(layer["name"]) for layer in layers})
    shape = (len(kinds), len(depths))
    cells: dict[str, Any] = {"kinds": kinds, "depths": depths}
    for key in ("snr", "retained"):
        cells[key] = {fmt: np.full(shape, np.nan) for fmt in formats}
    for row, kind in enumerate(kinds):
        for place, members in grouped(by_kind[kind], depth).items():
            for fmt in formats:
                figures = pool(members, fmt)
                for key in ("snr", "retained"):
                    if figures[key] is not None:
                        cells[key][fmt][row, depths.index(int(place))] = figures[key]
    return cells


def _heatmap(axes: Any, values: np.ndarray, cells: dict, colors: str, norm: Any, extend: str = "neither") -> None:
    import matplotlib

    kinds, depths = cells["kinds"], cells["depths"]
    palette = matplotlib.colormaps[colors].with_extremes(bad=GREY)
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=palette, norm=norm, interpolation="nearest")
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    step = max(1, len(depths) // 12)
    axes.set_xticks(range(0, len(depths), step), [str(d) for d in depths[::step]], fontsize=8)
    axes.figure.colorbar(image, ax=axes, pad=0.01, extend=extend).ax.tick_params(labelsize=7)
    if values.size <= ANNOTATED:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                dark = abs(float(norm(value)) - 0.5) > 0.3
                axes.text(
                    column,
                    row,
                    _short(value),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "black",
                )


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 9.95 else f"{value:.1f}" if abs(value) >= 0.995 else f"{value:.2f}"


def _scatter(axes: Any, result: dict, fmt: str) -> None:
    """Plot the error after against the error before, one point per layer, with the line of no change."""
    import matplotlib

    by_kind = grouped([layer for layer in result["layers"] if layer["update_norm"]], module_type)
    every = []
    for place, (kind, members) in enumerate(by_kind.items()):
        pairs = [layer["formats"][fmt]["error"] for layer in members]
        points = [(100 * p["base"], 100 * p["grpo"]) for p in pairs if None not in p.values()]
        every += points
        color = matplotlib.colormaps["tab10"](place % 10)
        axes.scatter(*zip(*points, strict=True), s=14, color=color, label=kind, alpha=0.8) if points else None
    if not every:
        axes.text(0.5, 0.5, "not known", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([]), axes.set_yticks([])
        return
    low, high = np.min(every), np.max(every)
    margin = 0.08 * (high - low) or 0.05 * high or 1.0
    axes.plot([low - margin, high + margin], [low - margin, high + margin], color="black", linewidth=0.8, zorder=0)
    axes.set(xlim=(low - margin, high + margin), ylim=(low - margin, high + margin))
    axes.tick_params(labelsize=8)
    axes.set_ylabel("error after, %", fontsize=9)
    found = result["comparison"][fmt]["rl"]
    axes.set_title(f"{fmt}: error {change_text(found)} by training", fontsize=10, loc="left")
