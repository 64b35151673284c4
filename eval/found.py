"""The files of a run's directory, read once for the report, and the formatting of their values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval import plots
from eval.artifacts import artifact_hash
from eval.compare import p_value, points
from eval.naming import trained_name
from kit.core import file_kinds
from kit.core.metrics_log import MetricsLog
from kit.core.run_directory import MANIFEST, RunDir
from kit.core.run_files import is_there, read_object

NONE = "–"
OPTIONAL = {  # <name>.json
    "diagnostics": file_kinds.DIAGNOSTICS,
    "serving": file_kinds.SERVING,
    "endpoint": file_kinds.ENDPOINT,
    "lm_eval": file_kinds.LM_EVAL,
}


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

    def group(self, name: str) -> dict:
        """A group of the run's configuration; {} if it is missing."""
        return (self.config.get("config") or {}).get(name) or {}

    @property
    def gate_format(self) -> str | None:
        """The format that the configuration names for the gate."""
        return (self.group("eval").get("gate") or {}).get("format")

    @property
    def trained(self) -> str:
        """Display name of the run's trained policy."""
        return trained_name(self.config.get("config") or {})

    @property
    def cells(self) -> dict[tuple[str, str], dict]:
        """The measured cells by (policy, format)."""
        return cells_of(self.result or {})

    @property
    def remade(self) -> list[tuple[str, str]]:
        """(policy, format) of the checkpoints that differ from those measured in eval.json."""
        measured = {key: cell.get("artifact_hash") for key, cell in self.cells.items()}
        now = {key: self.manifests.get(("dequantized", *key)) for key in measured}
        return [key for key, old in measured.items() if old and now[key] and artifact_hash(now[key]) != old]


def cells_of(result: dict) -> dict[tuple[str, str], dict]:
    """The cells of an eval.json by (policy, format)."""
    return {(policy, name): cell for policy, row in result.get("matrix", {}).items() for name, cell in row.items()}


def find(run: RunDir, folder: Path, result: dict | None) -> Found:
    """Read everything that a report can show; files in `folder` take precedence over those in the run directory."""
    log = MetricsLog(run.metrics_file)
    log.poll()
    if log.bad_lines:
        run.metrics()  # names the damaged line
    manifests = {}
    for into, top in (("dequantized", run.merged), ("original", run.path / "merged-original")):
        for file in sorted(top.glob(f"*/*/{MANIFEST}")):
            manifests[into, file.parent.parent.name, file.parent.name] = read_object(file, file_kinds.MANIFEST)
    optional = {}
    for name, kind in OPTIONAL.items():
        files = [place / f"{name}.json" for place in (folder, run.path)]
        optional[name] = next((read_object(file, kind) for file in files if is_there(file)), None)
    files = sorted(run.path.glob("eval-*/eval.json"))
    tasks = {file.parent.name.removeprefix("eval-"): read_object(file, file_kinds.EVALUATION) for file in files}
    return Found(run, run.facts(), log.rows, result, **optional, manifests=manifests, tasks=tasks, folder=folder)


def number(value: object, digits: str = ".4g") -> str:
    return format(value, digits) if isinstance(value, int | float) and not isinstance(value, bool) else NONE


def share(value: float | None) -> str:
    return NONE if value is None else points(value)


def pair(interval: Sequence[float] | None) -> str:
    return NONE if not interval else f"{points(interval[0])} to {points(interval[1])}"


def change(found: dict | None) -> list[str]:
    """[difference, interval] in points, dashes for a missing one."""
    return [points(found["difference"], sign=True), pair(found["interval"])] if found else [NONE, NONE]


def p_values(difference: dict) -> list[str]:
    """[p, p adjusted for all formats] of a difference, with a dash for what was not computed."""
    own = difference.get("mcnemar_p") if difference.get("p") is None else difference["p"]
    return [NONE if value is None else p_value(value) for value in (own, difference.get("holm_p"))]


def rank(key: tuple[str, str, str]) -> tuple:
    into, policy, name = key
    return (into, policy, plots.order([*plots.FORMATS, name]).index(name))
