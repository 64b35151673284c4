"""Find held-out questions in what a run has seen: equal after normalization, or contained word for word.

Two normalizations. `normalized` removes what does not change a question: case, Unicode form, typographic marks,
spacing. `undisguised` also removes what is added or exchanged to make a copy look new: zero-width characters, letters
of other scripts that look alike, accents, a number in front, punctuation, markdown, LaTeX's spacing and fonts.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any


def find_leaks(held_out: Sequence[Any], training: Sequence[Any]) -> list[tuple[Any, Any, bool]]:
    """(held-out problem, training problem, whether they are equal) for every held-out problem that was trained on.

    Equal means equal normalized or undisguised text, or for at least `LEAST_WORDS` words the same sentences in any
    order. Otherwise contained: all words, numbers and signs of a held-out question of at least `LEAST_WORDS` of them
    occur contiguously in a training question. A different number makes another problem. A paraphrase is not found, and
    neither is a training question inside a longer held-out one, since the addition may ask for something else.
    """
    trained: dict[str, Any] = {}
    same: dict[str, Any] = {}
    for problem in training:
        trained.setdefault(normalized(problem.question), problem)
        for key in _disguise_keys(problem.question):
            same.setdefault(key, problem)
    keys = [normalized(problem.question) for problem in held_out]
    inside = _contained([key if key not in trained else "" for key in keys], trained)
    found = []
    for index, (problem, key) in enumerate(zip(held_out, keys, strict=True)):
        copies = (same[one] for one in _disguise_keys(problem.question) if one in same)
        if (copy := trained.get(key) or next(copies, None)) is not None:
            found.append((problem, copy, True))
        elif index in inside:
            found.append((problem, inside[index], False))
    return found


def _disguise_keys(question: str) -> list[str]:
    """Keys of which two copies of a question share one: its undisguised text, and its sentences in alphabetical
    order."""
    text = undisguised(question)
    keys = [text] if text else []
    if len(_WORD.findall(normalized(question))) >= LEAST_WORDS:
        sentences = [undisguised(part) for part in _SENTENCE_END.split(_plain(question))]
        keys.append(" / ".join(sorted(filter(None, sentences))))
    return keys


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
_SENTENCE_END = re.compile(r"[.!?;\n]+(?=\s|$)")
# Letters of other scripts that look like Latin ones, and the letters that they look like.
_LOOKALIKES = str.maketrans(
    "АВЕКМНОРСТУХІЈЅԌԚԜаеорсухіјѕһԁԛԝӏқΑΒΕΖΗΙΚΜΝΟΡΤΥΧοϲϳɑɡıǀ",
    "ABEKMHOPCTYXIJSGQWaeopcyxijshdqwlkABEZHIKMNOPTYXocjagil",
)
# LaTeX that changes how a formula looks and not what it says.
_LATEX = (
    (re.compile(r"\\[,;:!> ]|\\(?:quad|qquad|displaystyle|limits|left|right|[bB]igg?[lrm]?)(?![a-zA-Z])|~"), " "),
    (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|operatorname|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×⋅·∗]"), "*"),
    (re.compile(r"\\div(?![a-zA-Z])|÷"), "/"),
    (re.compile(r"\$|\\[()\[\]]"), " "),
)
_MARK = re.compile(r"[\u0300-\u036f\ufe00-\ufe0f]")  # combining accents, variants of a glyph
_MARKDOWN = re.compile(r"\*\*([^*\n]+)\*\*|__([^_\n]+)__|`+")
_NUMBERING = re.compile(
    r"^[\s#>*-]*(?:(?:problem|question|exercise|example|task|item|prompt|no|nr|q)\b[\s.:#-]*)?"
    r"(?:\(?#?(?:\d{1,5}|[a-z]|[ivx]{1,4})[).:\]]+\s+|\[\d{1,5}\]\s*|#?\d{1,5}\s*[-:]\s+(?=[a-z]))"
)
_LABEL = re.compile(r"^[\s#>*-]*(?:problem|question|exercise|example|task|prompt|q)\s*(?:\d{1,5}\s*)?[:.)]+\s*")


def _plain(question: str) -> str:
    """A question in ASCII letters and digits where it has lookalikes of them, without invisible characters, accents,
    markdown and LaTeX's layout; upper and lower case, punctuation and line ends stay."""
    text = unicodedata.normalize("NFKD", question).translate(_TYPOGRAPHY)
    kept = []
    for sign in text:
        kind = unicodedata.category(sign)
        if (kind in ("Cf", "Cc") and sign not in "\n\t") or _MARK.match(sign):
            continue  # zero-width, directional, control
        kept.append(str(unicodedata.decimal(sign)) if kind == "Nd" else sign)
    text = unicodedata.normalize("NFKC", "".join(kept)).translate(_LOOKALIKES)
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    return _MARKDOWN.sub(lambda found: found[1] or found[2] or "", text)


def undisguised(question: str) -> str:
    """What is left of a question without everything that can be added to it or exchanged in it and leaves its meaning:
    words in lower case, numbers, operators and brackets. Spaces are left between numbers only."""
    text = _numbers(" ".join(_plain(question).casefold().split()))
    for pattern in (_NUMBERING, _LABEL):
        text = pattern.sub("", text)
    text = re.sub(r"\(([a-z ]{3,})\)", r" \1 ", text)  # words in brackets; f(x) stays
    text = re.sub(r"(?<=[a-z]{2})-(?=[a-z]{2})", " ", text)  # a hyphen; a minus stays
    text = re.sub(r"(?<!\d)\.|\.(?!\d)", " ", text)  # a full stop; a decimal point stays
    text = re.sub(r"""[,;:!?"'`´\u2026]""", " ", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text.strip())


def _numbers(text: str) -> str:
    """Give numbers one spelling: 1,000 and 1000.0 are one number."""
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", ""), text)
    return re.sub(r"(?<![\d.,])(\d+)\.0+(?![\d.,]*\d)", r"\1", text)


def normalized(question: str) -> str:
    """Remove case, Unicode form, typographic marks, spacing and end punctuation from a question; signs stay.

    Numbers keep their value, not their spelling: 1,000 and 1000.0 are one number.
    """
    text = unicodedata.normalize("NFKC", question).translate(_TYPOGRAPHY).casefold()
    text = _numbers(" ".join(text.split()))
    # A space matters between two words or numbers only: "3 + 4" is "3+4", "1 2" is not "12".
    return re.sub(r"(?<=\W) | (?=\W)", "", text).rstrip(".?!:")
