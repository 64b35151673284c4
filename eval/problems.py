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


def held_out(data: Any, max_problems: int) -> list[Any]:
    """At most `max_problems` held-out problems of a data configuration, in file order.

    The choice depends on the problem set alone, not on the run's seed, so two runs are measured on the same problems.
    `CheckFailed` when any held-out problem, chosen or not, is among the training problems.
    """
    from recipes.parts.data import load_problems

    if max_problems < 1:
        raise BadInput(f"eval.max_problems must be at least 1, it is {max_problems}.")
    problems = load_problems(data, "eval")
    if not problems:
        raise BadInput("there are no held-out problems. Set data.eval_split or data.eval_path.")
    check_disjoint(problems, load_problems(data, "train"))
    # The first N of a sorted file would be its easiest, or one topic.
    chosen = sorted(random.Random(0).sample(range(len(problems)), min(max_problems, len(problems))))
    return [problems[index] for index in chosen]


def check_disjoint(held_out: Sequence[Any], training: Sequence[Any]) -> None:
    """`CheckFailed` with examples when a held-out question is among the training questions, by normalized text."""
    trained = {normalized(problem.question): problem for problem in training}
    leaked = [(problem, trained[key]) for problem in held_out if (key := normalized(problem.question)) in trained]
    if leaked:
        shown = "\n".join(
            f"  {problem.source} is {other.source}: {problem.question[:100]!r}" for problem, other in leaked[:_SHOWN]
        )
        raise CheckFailed(
            f"{len(leaked)} of {len(held_out)} held-out problems are training problems, so their accuracy measures "
            f"memory:\n{shown}\nRemove them from one side, or point data.eval_path at other problems."
        )


def normalized(question: str) -> str:
    """The question without case, Unicode form, spacing and end punctuation; numbers and signs stay."""
    text = " ".join(unicodedata.normalize("NFKC", question).casefold().split())
    # A space matters between two words or numbers only: "3 + 4" is "3+4", "1 2" is not "12".
    return re.sub(r"(?<=\W) | (?=\W)", "", text).rstrip(".?!:")


def problems_hash(problems: Sequence[Any]) -> str:
    """BLAKE2b-128 of the problems' ids, questions and answers in order."""
    rows = [[problem.id, problem.question, problem.gold] for problem in problems]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
