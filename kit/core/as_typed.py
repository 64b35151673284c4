"""Output of a command that `kit` started: it names commands as the user types them, `kit merge` for `python -m merge`.

An installed kit has no `python -m merge`: only processes of `kit` have its folders on their path.
"""

import os
import re
import sys
from typing import Any, TextIO, cast

VARIABLE = "GRPO_KIT_COMMANDS"  # set by `kit`: JSON, {words after `python -m`: command of kit}
ROOMS = ("kit", "recipes", "reward", "launch", "merge", "eval")


class AsTyped:
    """A text stream that replaces `python -m …` of the kit's modules in what is written."""

    def __init__(self, stream: TextIO, names: dict[str, str]):
        self.stream, self._names = stream, names
        known = "|".join(re.escape(words).replace(r"\ ", r"\s+") for words in sorted(names, key=len, reverse=True))
        rooms = "|".join(ROOMS)
        self._pattern = re.compile(
            rf"(?<![\w/.-])(?<!kit )python\s+-m\s+(?:(?P<known>{known})(?![\w.])|(?=(?:{rooms})\b))"
        )

    def write(self, text: str) -> int:
        self.stream.write(self._pattern.sub(self._typed, text))
        return len(text)

    def _typed(self, found: re.Match) -> str:
        words = found["known"]
        return "kit python -m " if words is None else f"kit {self._names[' '.join(words.split())]}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def plain_stdout() -> TextIO:
    """The standard output that changes nothing, for what another program reads."""
    return sys.stdout.stream if isinstance(sys.stdout, AsTyped) else sys.stdout


def name_commands_as_typed() -> None:
    """Replace this process's output streams if `kit` started it."""
    if (names := os.environ.get(VARIABLE)) and not isinstance(sys.stdout, AsTyped):
        import json  # here: Ctrl-C must end a command with one line while it imports the rest

        sys.stdout = cast(TextIO, AsTyped(sys.stdout, json.loads(names)))
        sys.stderr = cast(TextIO, AsTyped(sys.stderr, json.loads(names)))
