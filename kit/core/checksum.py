"""Checksums inside the kit's own JSON: `kit_checksum` in an object, and in each line of a jsonl file.

A damaged or hand-edited file is refused with its name instead of being read as something else. The checksum covers the
values, not the spacing: a file that another tool reformats still counts. A file without checksums, as earlier versions
wrote it, is read as it is. No secret is involved, so whoever edits a file can also write its new checksum.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.core.errors import BadInput

KEY = "kit_checksum"
PREFIX = "blake2b:"


def content_hash(value: Any, size: int = 16) -> str:
    """BLAKE2b of a JSON value, as hex: equal for equal values, whatever the order of keys and the spacing."""
    plain = json.loads(json.dumps(value))  # keys of Python that are no text become text before they are sorted
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def with_checksum(value: dict) -> dict:
    """`value` with the checksum of its other entries, last."""
    rest = {key: entry for key, entry in value.items() if key != KEY}
    return {**rest, KEY: PREFIX + content_hash(rest)}


def without_checksum(value: Any, place: str | Path) -> Any:
    """`value` as it was before `with_checksum`; raises a `BadInput` that names `place` if it was changed since.

    An object without a checksum, and whatever is no object, is returned unchanged. Damage to the key or to the prefix
    does not make a checksum disappear: the other one is still there.
    """
    if not isinstance(value, dict):
        return value
    marked = [
        key for key, entry in value.items() if key == KEY or (isinstance(entry, str) and entry.startswith(PREFIX))
    ]
    if not marked:
        return value
    rest = {key: entry for key, entry in value.items() if key != KEY}
    if marked != [KEY] or value[KEY] != PREFIX + content_hash(rest):
        raise BadInput(
            f"{place} was damaged or edited: its content does not match its {KEY}. Restore it from a copy, or make it "
            "again."
        )
    return rest


def line_of(value: dict) -> str:
    """An object as a line of a jsonl file, with its checksum, without the newline."""
    line = json.dumps(with_checksum(value), allow_nan=False, ensure_ascii=False)
    # Unicode line separators are legal inside a JSON string, but str.splitlines splits there.
    return line.translate({code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)})


def read_lines(file: Path, is_complete: bool = False) -> Iterator[dict]:
    """Yield the objects of a jsonl file of a run, without their checksums; none if the file does not exist.

    Raises a `BadInput` that names the first line that is damaged. A last line without its end, as a killed process or
    a full disk leaves it, is skipped unless the file `is_complete`: what it was about was not done.
    """
    try:
        data = Path(file).read_bytes()
    except FileNotFoundError:
        return
    *lines, last = data.split(b"\n")
    began = False  # an earlier version may have written the first lines, and none after a line with a checksum
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        stored = _object(line, f"{file}:{number}")
        row = without_checksum(stored, f"{file}:{number}")
        if began and row is stored:
            raise BadInput(f"{file}:{number} has no {KEY}, unlike the line before it. Restore the file from a copy.")
        began = row is not stored
        yield row
    if last and (is_complete or _is_whole(last)):
        raise BadInput(f"{file}:{len(lines) + 1} is damaged: its end is {last[-8:]!r}. Restore the file from a copy.")


def _object(line: bytes, place: str) -> dict:
    try:
        # Integers beyond a float's range become infinite instead of an error of their own.
        row = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place} is damaged: it is not JSON ({error}). Restore the file from a copy.") from None
    if not isinstance(row, dict):
        raise BadInput(f"{place} is damaged: it holds {str(row)[:40]!r}, not an object. Restore the file from a copy.")
    return row


def _is_whole(line: bytes) -> bool:
    """Whether text without a newline begins with a whole object: then what was its newline was damaged."""
    try:
        json.JSONDecoder().raw_decode(line.decode(errors="replace").lstrip())
    except (ValueError, RecursionError):
        return False
    return True
