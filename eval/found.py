"""The files of a run's directory, read once for the report, and the formatting of their values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval import plots
from eval.artifacts import artifact_hash
from eval.compare import p_value, points
from eval.naming import trained_name
from kit.core.metrics_log import MetricsLog
from kit.core.run_directory import MANIFEST, RunDir, read_json

NONE = "–"


@dataclass
class Found:
    """Content of a run's directory, read once; None or empty for missing files."""

    run: RunDir
    config: dict
    rows: list[dict]
    result: dict | None
    diagnostics: dict | None
    serving: dict | None
    endpoint: dict | None
    lm_eval: dict | None
    manifests: dict[tuple[str, str, str], dict] = field(default_factory=dict)  # by (into, policy, format)
    tasks: dict[str, dict] = field(default_factory=dict)  # eval.json of other tasks, by task
    folder: Path = Path()

    @property
    def trained(self) -> str:
        """Display name of the run's trained policy."""
        return trained_name(self.config.get("config") or {})

    @property
    def remade(self) -> list[tuple[str, str]]:
        """(policy, format) of the checkpoints that differ from those measured in eval.json."""
        matrix = (self.result or {}).get("matrix") or {}
        cells = {(policy, name): cell for policy, row in matrix.items() for name, cell in row.items()}
        now = {key: self.manifests.get(("dequantized", *key)) for key in cells}
        measured = {key: cell.get("artifact_hash") for key, cell in cells.items()}
        return [key for key, old in measured.items() if old and now[key] and artifact_hash(now[key]) != old]

    @property
    def formats(self) -> list[str]:
        """The formats that were measured, merged or served, in the order of every table."""
        names = {name for _, _, name in self.manifests} | set(
            ((self.result or {}).get("matrix") or {}).get("base", {})
        )
        return plots.order(list(names | set((self.serving or {}).get("formats", {}))))


def find(run: RunDir, folder: Path, result: dict | None) -> Found:
    """Read everything that a report can show; files in `folder` take precedence over those in the run directory."""
    log = MetricsLog(run.metrics_file)
    log.poll()
    manifests = {}
    for into, top in (("dequantized", run.merged), ("original", run.path / "merged-original")):
        for file in sorted(top.glob(f"*/*/{MANIFEST}")):
            manifests[into, file.parent.parent.name, file.parent.name] = read_json(file)
    optional = {}
    for name in ("diagnostics", "serving", "endpoint", "lm_eval"):
        files = [place / f"{name}.json" for place in (folder, run.path)]
        file = next((file for file in files if file.is_file()), None)
        optional[name] = read_json(file) if file else None
    tasks = {file.parent.name.removeprefix("eval-"): read_json(file) for file in run.path.glob("eval-*/eval.json")}
    tasks = dict(sorted(tasks.items()))
    return Found(
        run, read_json(run.config_file), log.rows, result, **optional, manifests=manifests, tasks=tasks, folder=folder
    )


def number(value: Any, digits: str = ".4g") -> str:
    return format(value, digits) if isinstance(value, int | float) and not isinstance(value, bool) else NONE


def share(value: float | None, sign: bool = False) -> str:
    return NONE if value is None else points(value, sign=sign)


def pair(interval: Sequence[float] | None) -> str:
    return NONE if not interval else f"{points(interval[0])} to {points(interval[1])}"


def rank(key: tuple[str, str, str]) -> tuple:
    into, policy, name = key
    return (into, policy, plots.order([*plots.FORMATS, name]).index(name))


def p_values(difference: dict) -> list[str]:
    """[p, p adjusted for all formats] of a difference, with a dash for what was not computed."""
    own = difference.get("mcnemar_p") if difference.get("p") is None else difference["p"]
    return [NONE if value is None else p_value(value) for value in (own, difference.get("holm_p"))]
