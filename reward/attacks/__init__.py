"""Built-in adversarial suite of `python -m reward attack`: attempts to be paid without the answer, and controls.

A case is an attempt (`pays=False`) or an honest completion that must be paid (`pays=True`), so that a reward that
pays nobody fails as well. There is one file of cases per kind; long tables stand in text files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MATH = ("math",)
STRICT = ("math", "gsm8k_strict")  # judged only by a stated answer
ANSWERS = ("math", "gsm8k_strict", "gsm8k_lenient")
OUTSIDE_BOX = ("stated", "lenient")  # forms that also read the text around a box
GSM8K = ("gsm8k_strict", "gsm8k_lenient")


@dataclass(frozen=True)
class Case:
    """One completion, what it attempts, and whether the reward functions in `tasks` must pay it."""

    category: str  # "extraction", "comparison", "cost", "unicode", "prompt echo", "format", "countdown", "code"
    name: str  # what is tried, in a few words
    completion: str
    gold: str
    pays: bool = False
    tasks: tuple[str, ...] = MATH
    prompt: str | list[dict] | None = None
    forms: tuple[str, ...] = ("boxed", "stated", "lenient")  # of reward "math" to which the case applies
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of the row, for a user's function


def sections(source: Path | str, mark: str = "# ") -> dict[str, str]:
    """{title: text} of a file or text whose sections begin with a line of `mark` and the title."""
    text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    _, *parts = re.split(rf"^{mark}(.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def answer_table(text: str) -> list[tuple[str, str]]:
    """(answer, reference) for every answer of a table with lines `reference :: answer :: answer …`."""
    rows = [line.split(" :: ") for line in text.strip().splitlines()]
    return [(answer, gold) for gold, *answers in rows for answer in answers]


_ATTEMPTS = sections(Path(__file__).with_name("attempts.txt"))


def attempts(title: str) -> dict[str, str]:
    """{name: completion} of a section of `attempts.txt`: lines `name :: completion`, or a sentence without a name.

    A ⏎ is a line break.
    """
    rows = [line.rpartition(" :: ") for line in _ATTEMPTS[title].replace("⏎", "\0").splitlines()]
    found = {name or f"stated: {text}": text for name, _, text in rows}
    return {name.replace("\0", "\n"): text.replace("\0", "\n") for name, text in found.items()}
