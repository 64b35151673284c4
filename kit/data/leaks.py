"""Find held-out questions in what a run has seen: equal after normalization, or contained word for word."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any


def find_leaks(held_out: Sequence[Any], training: Sequence[Any]) -> list[tuple[Any, Any, bool]]:
    """(held-out problem, training problem, whether they are equal) for every held-out problem that was trained on.

    Equal means equal normalized text. Otherwise contained: all words, numbers and signs of a held-out question of at
    least `LEAST_WORDS` of them occur contiguously in a training question. A different number makes another problem. A
    paraphrase is not found, and neither is a training question inside a longer held-out one, since the addition may
    ask for something else.
    """
    trained: dict[str, Any] = {}
    for problem in training:
        trained.setdefault(normalized(problem.question), problem)
    keys = [normalized(problem.question) for problem in held_out]
    inside = _contained([key if key not in trained else "" for key in keys], trained)
    found = []
    for index, (problem, key) in enumerate(zip(held_out, keys, strict=True)):
        if key in trained:
            found.append((problem, trained[key], True))
        elif index in inside:
            found.append((problem, inside[index], False))
    return found


def _contained(questions: Sequence[str], trained: dict[str, Any]) -> dict[int, Any]:
    """{index of a normalized question: first training problem that contains it}; only opening words are indexed."""
    opening: dict[str, dict[tuple[str, ...], list[int]]] = {}
    words = [_WORD.findall(question) for question in questions]
    for index, own in enumerate(words):
        if len(own) >= LEAST_WORDS:
            opening.setdefault(own[0], {}).setdefault(tuple(own[:LEAST_WORDS]), []).append(index)
    found: dict[int, Any] = {}
    for question, problem in trained.items() if opening else ():
        text = _WORD.findall(question)
        for start in range(len(text) - LEAST_WORDS + 1):
            if text[start] not in opening:
                continue
            for index in opening[text[start]].get(tuple(text[start : start + LEAST_WORDS]), ()):
                if text[start : start + len(words[index])] == words[index]:
                    found.setdefault(index, problem)
    return found


# Words, whole numbers with their decimals, and every sign: 3 is not in 34, and a minus counts.
_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s]|_")
LEAST_WORDS = 12
_TYPOGRAPHY = str.maketrans("\u2018\u2019\u201c\u201d\u2010\u2011\u2013\u2212", "''\"\"----")


def normalized(question: str) -> str:
    """Remove case, Unicode form, typographic marks, spacing and end punctuation from a question; signs stay.

    Numbers keep their value, not their spelling: 1,000 and 1000.0 are one number.
    """
    text = unicodedata.normalize("NFKC", question).translate(_TYPOGRAPHY).casefold()
    text = " ".join(text.split())
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", ""), text)
    text = re.sub(r"(?<![\d.,])(\d+)\.0+(?![\d.,]*\d)", r"\1", text)
    # A space matters between two words or numbers only: "3 + 4" is "3+4", "1 2" is not "12".
    return re.sub(r"(?<=\W) | (?=\W)", "", text).rstrip(".?!:")
