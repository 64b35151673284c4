"""Checksums inside the kit's own JSON: `kit_checksum` in an object, and in each line of a jsonl file.

A damaged or hand-edited file is refused with its name instead of being read as something else. The checksum covers the
values, not the spacing: a file that another tool reformats still counts. A file without checksums, as earlier versions
wrote it, is read as it is. No secret is involved, so whoever edits a file can also write its new checksum.
"""

import hashlib
import json
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
