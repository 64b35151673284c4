"""One scored completion, as a row of a cell's file."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """One scored completion, number `sample` of its problem.

    `correct` accepts every answer form, `correct_strict` only a box (for code, a fenced block); None is undecided.
    `reward` is the value of a reward function, None without one; `text` is what was judged, None for `completion`.
    """

    problem_id: str
    completion: str
    tokens: int
    ended: bool
    hit_max_tokens: bool
    parsed: bool
    answer: str | None
    gold: str
    correct: bool | None
    correct_strict: bool | None
    prompt_leak: bool
    sample: int = 0
    reward: float | None = None
    text: str | None = None


def as_rows(records: Sequence[Record]) -> list[dict]:
    """The records as dictionaries, one line each of the cell's jsonl."""
    return [dataclasses.asdict(record) for record in records]
