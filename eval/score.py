"""One record per completion and one summary per cell of the matrix: accuracy, and the hygiene that makes it mean
something.

An answer that could not be compared (`answers_equal` gives None) is neither right nor wrong: it is counted as
undecided and left out of accuracies and of paired comparisons.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.generate import Generation
from eval.stats import wilson
from recipes.parts.errors import CheckFailed

# A prompt part shorter than this (normalized characters) says too little to call its echo a leak.
_SHORTEST_ECHO = 12
_ROLE_MARKERS = re.compile(
    r"<\|(?:im_start|im_end|endoftext|start_header_id|end_header_id|eot_id|begin_of_text|system|user|assistant|end)\|>"
    r"|\[/?INST\]|<</?SYS>>|</?(?:start_of_turn|end_of_turn)>|<\uff5c(?:User|Assistant)\uff5c>"
    r"|^\s*#{2,3} (?:Instruction|Human|User|Assistant|Response):"
    r"|^\s*(?:system|user|assistant|human)\s*:?\s*$"  # what is left of a marker when special tokens are skipped
    r"|^\s*(?:User|Human|Assistant|System):",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Record:
    """One scored completion, number `sample` of its problem.

    `correct` accepts every answer form, `correct_strict` a box only; None is undecided.
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


def leaks_prompt(completion: str, prompt_parts: Sequence[str]) -> bool:
    """Whether `completion` holds a role marker or repeats one of `prompt_parts` word for word.

    Case and white space do not matter. Parts are the question, the instruction after it and the system message; a
    sentence of its own that uses the question's numbers is no leak, the whole question is.
    """
    if _ROLE_MARKERS.search(completion):
        return True
    text = _flatten(completion)
    return any(len(part) >= _SHORTEST_ECHO and part in text for part in map(_flatten, prompt_parts))


def score(
    problems: Sequence[Any], generations: Sequence[Generation], conversations: Sequence[list[dict]], pool: Any = None
) -> list[Record]:
    """The records of one cell: one completion for each problem (`id`, `gold`), asked with `conversations`.

    Answers are read and compared as the rewards do it; `pool` (reward.pool) runs what needs a parser.
    """
    from reward.answer import boxed_answer, final_answer, judge, own_text

    own = [own_text(made.text, asked) for made, asked in zip(generations, conversations, strict=True)]
    answers, boxed = [final_answer(text) or None for text in own], [boxed_answer(text) or None for text in own]
    golds = [problem.gold for problem in problems]
    # Mostly the two are the same answer: what both ask is judged once.
    asked = sorted({(a, g) for found in (answers, boxed) for a, g in zip(found, golds, strict=True) if a})
    verdicts = dict(zip(asked, (verdict.value for verdict in judge(asked, pool)), strict=True))
    return [
        Record(
            problem_id=problem.id,
            completion=made.raw,
            tokens=made.tokens,
            ended=made.ended,
            hit_max_tokens=made.hit_max_tokens,
            parsed=answer is not None,
            answer=answer,
            gold=problem.gold,
            correct=verdicts[answer, problem.gold] if answer else False,
            correct_strict=verdicts[box, problem.gold] if box else False,
            prompt_leak=leaks_prompt(made.raw, prompt_parts(turns, problem)),
        )
        for problem, made, turns, answer, box in zip(problems, generations, conversations, answers, boxed, strict=True)
    ]


def prompt_parts(conversation: list[dict], problem: Any) -> list[str]:
    """What a completion must not repeat: every message, the question, and the instruction that follows it."""
    parts = [message["content"] for message in conversation]
    after = [part.partition(problem.question)[2] for part in parts if problem.question in part]
    return [part for part in [*parts, problem.question, *after] if part.strip()]


def summarize(records: Sequence[Record]) -> dict:
    """A cell of the matrix: accuracies over decided completions, hygiene rates over all, all fractions in 0..1.

    {"n", "undecided", "correct", "accuracy", "interval" (Wilson), "strict", "parse_rate", "prompt_leak_rate",
    "end_of_turn_rate", "max_token_hits" (a count), "mean_tokens"}
    """
    n = len(records)
    decided = [record.correct for record in records if record.correct is not None]
    strict = [record.correct_strict for record in records if record.correct_strict is not None]
    if not decided:
        raise CheckFailed(f"none of {n} answers could be compared with its reference; there is no accuracy to report.")
    return {
        "n": n,
        "undecided": n - len(decided),
        "correct": sum(decided),
        "accuracy": sum(decided) / len(decided),
        "interval": list(wilson(sum(decided), len(decided))),
        "strict": sum(strict) / len(strict) if strict else None,
        "parse_rate": sum(record.parsed for record in records) / n,
        "prompt_leak_rate": sum(record.prompt_leak for record in records) / n,
        "end_of_turn_rate": sum(record.ended for record in records) / n,
        "max_token_hits": sum(record.hit_max_tokens for record in records),
        "mean_tokens": sum(record.tokens for record in records) / n,
    }


def as_rows(records: Sequence[Record]) -> list[dict]:
    """The records as dictionaries, one line each of the cell's jsonl."""
    return [dataclasses.asdict(record) for record in records]


def _flatten(text: str) -> str:
    return " ".join(text.casefold().split())
