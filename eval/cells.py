"""One cell of the matrix on disk: its completions and what they were measured with, so that they can be reused.

`<out>/eval/<policy>-<format>.jsonl` holds one completion per line; `<policy>-<format>.meta.json` beside it holds
everything that the completions depend on and the hash of the jsonl. The header is written last: without it, or with
another hash, the completions are measured again.
"""

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.record import Record, as_rows
from kit.core.errors import BadInput
from kit.core.file_kinds import CELL, RECORDS
from kit.core.run_directory import file_hash, write_record
from kit.core.run_files import read_lines, read_object


@dataclass(frozen=True)
class Cell:
    """The scored completions of a cell, problem by problem, and what generated them (`Answers` in backends.py)."""

    records: list[Record]
    engine: str
    dtype: str
    versions: dict[str, str]
    seconds: float
    reused: bool = False

    def facts(self) -> dict:
        """What the matrix records about the cell besides its accuracies."""
        found = {"engine": self.engine, "compute_dtype": self.dtype, "seconds": self.seconds}
        found |= {"engine_facts": self.versions} if self.versions else {}
        return found | ({"reused": True} if self.reused else {})


def records_file(folder: Path, policy: str, name: str) -> Path:
    return folder / f"{policy}-{name}.jsonl"


def meta_file(folder: Path, policy: str, name: str) -> Path:
    return folder / f"{policy}-{name}.meta.json"


def write_cell(folder: Path, policy: str, name: str, cell: Cell, identity: dict, version: int | None) -> None:
    """Write the records, each line with the adapter's version, and their header; each file is replaced atomically."""
    final, header = records_file(folder, policy, name), meta_file(folder, policy, name)
    partial = final.with_suffix(".partial")
    try:
        with open(partial, "w") as file:
            file.writelines(json.dumps({**row, "adapter_version": version}) + "\n" for row in as_rows(cell.records))
            file.flush()
            os.fsync(file.fileno())
        header.unlink(missing_ok=True)  # it describes the records that are about to be replaced
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)
    facts = {key: value for key, value in cell.facts().items() if key != "reused"}
    date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_record(header, {"identity": identity, **facts, "date": date, "records": file_hash(final)})


def read_cell(folder: Path, policy: str, name: str, identity: dict) -> tuple[Cell | None, str]:
    """Return the cell measured before with the same `identity`, or None and the reason why there is none."""
    final, header = records_file(folder, policy, name), meta_file(folder, policy, name)
    if not final.is_file() or not header.is_file():
        return None, "not measured before"
    try:
        meta = read_object(header, CELL)
    except BadInput:
        return None, f"{header.name} is incomplete"
    if other := differing(meta["identity"], json.loads(json.dumps(identity))):
        return None, f"measured with another {', '.join(other)}"
    if file_hash(final) != meta["records"]:
        return None, f"{final.name} does not match {header.name}"
    records = read_records(final)
    facts = (meta["engine"], meta["compute_dtype"], meta.get("engine_facts", {}), meta["seconds"])
    return Cell(records, *facts, reused=True), ""


def read_records(file: Path) -> list[Record]:
    """Read the records of a cell's jsonl; `BadInput` if they are not those of its header, or for an invalid line."""
    header = file.with_name(f"{file.stem}.meta.json")
    hashed = read_object(header, CELL)["records"]
    if not file.is_file():
        raise BadInput(f"{file} does not exist. Evaluate again.")
    if file_hash(file) != hashed:
        raise BadInput(f"{file} was damaged or edited: {header.name} records other content. Evaluate again.")
    names = {field.name for field in dataclasses.fields(Record)}
    rows = read_lines(file, RECORDS)
    return [Record(**{key: value for key, value in row.items() if key in names}) for row in rows]


def differing(before: dict, now: dict, prefix: str = "") -> Sequence[str]:
    """The dotted keys at which two nested dictionaries differ, in order."""
    found: list[str] = []
    for key in sorted({*before, *now}):
        one, other = before.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += differing(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(f"{prefix}{key}")
    return found
