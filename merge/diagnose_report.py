"""diagnostics.json as Markdown and as a table in the terminal."""

from merge.diagnose_verdict import change_text, number, percent
from merge.tables import markdown_table

HEAD = ("format", "error before", "after", "change", "shuffled", "‖Δ‖/noise", "update kept", "KL(policy‖it)", "top-1")


def rows_of(result: dict) -> list[list[str]]:
    """One row per format, pooled over the layers; `-` marks what does not apply or was not requested."""
    rows = []
    for name, summary in result["summary"].items():
        compared, tokens = result["comparison"][name], result.get("tokens", {}).get(name)
        rows.append(
            [
                name,
                percent(summary["error"]["base"]),
                percent(summary["error"]["grpo"]),
                change_text(compared["rl"]),
                percent(summary["control_error"]),
                number(summary["snr"]),
                percent(summary["retained"], 1),
                f"{tokens['kl']:.2e}" if tokens else "-",
                f"{tokens['top1']:.3f}" if tokens else "-",
            ]
        )
    return rows


def markdown(result: dict, picture: str) -> str:
    """The report as Markdown: verdict, table, picture, breakdowns by module and by depth, how it was measured."""
    lines = ["# Effect of training on the weights, and how each format stores it", ""]
    lines += [f"- {line}" for line in result["verdict"]]
    lines += ["", "## All layers", "", *markdown_table(HEAD, rows_of(result)), ""]
    lines += [
        "Pooled: sums of squared norms over the layers. Error is ‖Q(W) − W‖/‖W‖ before training and "
        "‖Q(W+Δ) − (W+Δ)‖/‖W+Δ‖ after; change is of the layers that the adapter changes; shuffled is the error after "
        "an update of the same size with its rows and columns in another order; noise is ‖Q(W+Δ) − (W+Δ)‖; update "
        "kept is <Q(W+Δ) − Q(W), Δ>/<Δ, Δ>.",
        "",
        f"![per layer]({picture})",
        "",
    ]
    for key, title in (("by_module", "By module"), ("by_depth", "By depth")):
        lines += [f"## {title}", "", *_groups(result[key], list(result["summary"])), ""]
    lines += [f"Note: {note}" + "\n" for note in result["notes"]]
    used = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            *lines,
            f"Adapter v{result['adapter_version']} into the {result['into']} base, measured {result['date']} with "
            f"{used}.",
            "",
            f"Command: `{' '.join(result['command'])}`",
            "",
        ]
    )


def _groups(groups: dict[str, dict], formats: list[str]) -> list[str]:
    """Per group and format: error before → after, ‖Δ‖/noise, update kept."""

    def cell(found: dict) -> str:
        before, after = (percent(found["error"][policy]) for policy in ("base", "grpo"))
        return f"{before} → {after}; {number(found['snr'])}; {percent(found['retained'], 1)}"

    rows = [[name, *(cell(found[fmt]) for fmt in formats)] for name, found in groups.items()]
    return ["Error before → after; ‖Δ‖/noise; update kept.", "", *markdown_table(["", *formats], rows)]
