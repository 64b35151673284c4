"""Rewards "repetition" and "language": penalties on the text itself, from 0.0 down to -1.0, never None."""

import re
import unicodedata
from functools import lru_cache
from typing import Any

from reward.answer import message_text
from reward.score import Messages, Prompts, Rewards

# Long runs without spaces are cut into pieces, scripts without spaces into characters: neither hides a repetition.
_PIECE = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{1,12}|[^\w\s]"
)


def repetition(prompts: Prompts, completions: Messages, *, ngram: int = 8, allowed: float = 0.1, **_: Any) -> Rewards:
    """Minus the share of repeated n-grams above `allowed`, scaled so that pure repetition is -1.0.

    An n-gram is `ngram` consecutive words or signs, case-folded; it is repeated if it has occurred before in the same
    completion. A completion shorter than that has none.
    """
    return [-_above(_repeated(message_text(completion), ngram), allowed) for completion in completions]


def _repeated(text: str, ngram: int) -> float:
    pieces = _PIECE.findall(text.casefold())
    total = len(pieces) - ngram + 1
    if total < 2:
        return 0.0
    return 1.0 - (len({tuple(pieces[i : i + ngram]) for i in range(total)}) - 1) / (total - 1)


def _above(share: float, allowed: float) -> float:
    return max(0.0, share - allowed) / (1.0 - allowed)


def language(
    prompts: Prompts,
    completions: Messages,
    *,
    scripts: list[str] = ["latin", "greek"],  # noqa: B006  (never mutated; the type and default are the option's)
    allowed: float = 0.02,
    **_: Any,
) -> Rewards:
    """Minus the share of letters outside `scripts` above `allowed`, scaled so that text with none inside is -1.0.

    A script is the first word of the letters' Unicode names: latin, greek, cyrillic, arabic, hebrew, devanagari, thai,
    hangul, hiragana, katakana, cjk. Greek is in the default because formulas use it. Digits and signs do not count.
    """
    inside = {script.upper() for script in scripts}
    return [-_above(_foreign(message_text(completion), inside), allowed) for completion in completions]


def _foreign(text: str, inside: set[str]) -> float:
    letters = [sign for sign in text if sign.isalpha()]
    return sum(_script(letter) not in inside for letter in letters) / len(letters) if letters else 0.0


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    # "MATHEMATICAL ITALIC SMALL X" and "FULLWIDTH LATIN …" are Latin, according to NFKC.
    plain = unicodedata.normalize("NFKC", letter)[:1] or letter
    if plain.isascii():
        return "LATIN"
    return re.split(r"[ -]", unicodedata.name(plain, "UNKNOWN"))[0]


def check_repetition(ngram: int, allowed: float, **_: Any) -> None:
    """Raise `ValueError` for values that cannot be intended."""
    if ngram < 1 or not 0.0 <= allowed < 1.0:
        raise ValueError(f"ngram ({ngram}) must be at least 1 and allowed ({allowed}) 0 up to (not including) 1.")


def check_language(scripts: list[str], allowed: float, **_: Any) -> None:
    """Raise `ValueError` for an unknown script."""
    known = "latin greek cyrillic armenian arabic hebrew devanagari bengali thai hangul hiragana katakana cjk".split()
    unknown = [script for script in scripts if script.lower() not in known]
    if unknown or not scripts or not 0.0 <= allowed < 1.0:
        raise ValueError(
            f"scripts is {scripts}, of {', '.join(known)}; allowed ({allowed}) is 0 up to (not including) 1."
        )


repetition.check_options = check_repetition  # type: ignore[attr-defined]
language.check_options = check_language  # type: ignore[attr-defined]
