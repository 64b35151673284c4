"""The ledger of a run, `ledger.jsonl`: which problems each step was given, in order.

The manifest of every checkpoint and adapter has the number and the hash of the ledger's lines up to its step. A ledger
from which lines were removed, or that belongs to another run, is refused when a run resumes and by the gate, which
looks for held-out problems in it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.checksum import content_hash
from kit.core.errors import BadInput
from kit.core.file_kinds import LEDGER
from kit.core.run_files import is_there, read_lines


@dataclass(frozen=True)
class Entry:
    """A line: the problems that a step drew, and everything else that the line says."""

    step: int
    problem_ids: list[str]
    line: dict[str, Any]


def read_ledger(file: Path) -> list[Entry]:
    """The entries of a ledger in order; empty if there is none. `BadInput` names a line that is damaged or no entry.

    A truncated last line, as a full disk leaves it, belongs to a step that was not taken.
    """
    rows = read_lines(file, LEDGER, may_be_growing=True) if is_there(file) else []
    return [Entry(row["step"], row["problem_ids"], row) for row in rows]


def ledger_facts(file: Path, step: int) -> dict[str, Any]:
    """What the manifest of an artifact of `step` records: {"lines", "blake2b"} of the ledger up to that step."""
    lines = [entry.line for entry in read_ledger(file) if entry.step <= step]
    return {"lines": len(lines), "blake2b": content_hash(lines)}


def check_ledger(file: Path, manifest: dict, artifact: Path) -> None:
    """Raise `BadInput` unless a ledger is, up to its step, the one that the manifest of `artifact` records. A no-op
    for a manifest of an earlier version, which records none."""
    recorded = manifest.get("ledger")
    if recorded is None:
        return
    if (found := ledger_facts(file, manifest["step"])) != recorded:
        raise BadInput(
            f"{file} is not the ledger that {artifact} was written with: it has {found['lines']} lines up to step "
            f"{manifest['step']}, and {recorded['lines']} were recorded"
            f"{'' if found['lines'] != recorded['lines'] else ' with other content'}. Restore it; without it nothing "
            "shows which problems were trained on."
        )
