"""The held-out problems of a run: which ones, and that none of them was trained on."""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from recipes.parts.errors import BadInput, CheckFailed

_SHOWN = 3


def held_out(data: Any, max_problems: int, training: Any = None) -> list[Any]:
    """At most `max_problems` held-out problems of a data configuration, in file order.

    The choice depends on the problem set alone, not on the run's seed, so two runs are measured on the same problems.
    `training` is the data configuration that the run was trained with, when that is another one. `CheckFailed` when
    any held-out problem, chosen or not, is among the training problems.
    """
    from recipes.parts.data import load_problems

    if max_problems < 1:
        raise BadInput(f"eval.max_problems must be at least 1, it is {max_problems}.")
    problems = load_problems(data, "eval")
    if not problems:
        raise BadInput("there are no held-out problems. Set data.eval_split or data.eval_path.")
    check_disjoint(problems, load_problems(data if training is None else training, "train"))
    # The first N of a sorted file would be its easiest, or one topic.
    chosen = sorted(random.Random(0).sample(range(len(problems)), min(max_problems, len(problems))))
    return [problems[index] for index in chosen]


def check_disjoint(held_out: Sequence[Any], training: Sequence[Any]) -> None:
    """`CheckFailed` with examples when a held-out question is a training question, or stands in one word for word."""
    leaked = find_leaks(held_out, training)
    if leaked:
        shown = "\n".join(
            f"  {problem.source} {'is' if whole else 'stands in'} {other.source}: {problem.question[:100]!r}"
            for problem, other, whole in leaked[:_SHOWN]
        )
        raise CheckFailed(
            f"{len(leaked)} of {len(held_out)} held-out problems are training problems, so their accuracy measures "
            f"memory:\n{shown}\nRemove them from one side, or point data.eval_path at other problems."
        )


def find_leaks(held_out: Sequence[Any], training: Sequence[Any]) -> list[tuple[Any, Any, bool]]:
    """(held-out problem, training problem, whether they are equal) for every held-out problem that was trained on.

    Equal: by normalized text. Otherwise contained: all words, numbers and signs of a held-out question of at least
    `LEAST_WORDS` of them stand in a training question in one piece. A number that differs is another problem; a
    paraphrase is not found, and neither is a training question inside a longer held-out one, since what is added may
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
    """Index of a normalized question to the first training problem that holds it; only the first words are indexed."""
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
    """The question without case, Unicode form, typographic marks, spacing and end punctuation; signs stay.

    Numbers keep their value and lose their form: 1,000 and 1000.0 are one number.
    """
    text = unicodedata.normalize("NFKC", question).translate(_TYPOGRAPHY).casefold()
    text = " ".join(text.split())
    text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda number: number[0].replace(",", ""), text)
    text = re.sub(r"(?<![\d.,])(\d+)\.0+(?![\d.,]*\d)", r"\1", text)
    # A space matters between two words or numbers only: "3 + 4" is "3+4", "1 2" is not "12".
    return re.sub(r"(?<=\W) | (?=\W)", "", text).rstrip(".?!:")


def problems_hash(problems: Sequence[Any]) -> str:
    """BLAKE2b-128 of the problems' ids, questions and answers in order."""
    rows = [[problem.id, problem.question, problem.gold] for problem in problems]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
