"""One record per completion and one summary per cell: accuracy, and the hygiene that makes it meaningful.

The task's `Scoring` (chosen by `eval.tasks`) defines what an answer is and when it is right; MATH compares final
answers. What could not be decided (a comparison beyond its limits, a sandbox that failed, a reward of None) is neither
right nor wrong: it is counted as undecided and excluded from accuracies and from paired comparisons.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from eval.generate import Generation
from eval.hygiene import rates
from eval.record import Record
from eval.samples import majority_scores, pass_at_k_scores, powers, problem_means, score_table
from eval.stats import cluster_interval
from kit.core.errors import BadInput, CheckFailed

if TYPE_CHECKING:
    from kit.data.problems import Problem
    from kit.rollout.episodes import EpisodeResult
    from reward.pool import WorkerPool

# A prompt part shorter than this (normalized characters) is too unspecific for its echo to be a leak.
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
class Judgement:
    """The answer extracted from a completion and whether it is right; the fields are those of `Record`."""

    answer: str | None
    parsed: bool
    correct: bool | None
    strict: bool | None
    reward: float | None = None


@dataclass(frozen=True)
class Answered:
    """A completion as a task judges it: its text without special tokens, the problem, and the conversation.

    Of an `episode`, the text is that of the last turn and the conversation has the first observation.
    """

    text: str
    problem: "Problem"
    conversation: list[dict]
    episode: "EpisodeResult | None" = None

    @property
    def messages(self) -> list[dict]:
        """The completion as messages."""
        if self.episode is not None:
            return self.episode.messages
        return [{"role": "assistant", "content": self.text}]


@dataclass(frozen=True)
class Scoring:
    """How a task judges: `judge(answers, pool)` returns a `Judgement` for every `Answered`, in order.

    `quotes_question`: a right answer may contain the whole question (a function with its docstring), which is then not
    a prompt leak. `version` changes with the source of a reward function from outside the kit.
    """

    name: str
    judge: Callable[[Sequence[Answered], "WorkerPool | None"], list[Judgement]]
    quotes_question: bool = False
    version: str = ""


def leaks_prompt(completion: str, prompt_parts: Sequence[str]) -> bool:
    """Whether `completion` contains a role marker or repeats one of `prompt_parts` verbatim.

    Case and white space are ignored. Parts are the question, the instruction after it and the system message; a new
    sentence that uses the question's numbers is not a leak, the whole question is.
    """
    if _ROLE_MARKERS.search(completion):
        return True
    text = _flatten(completion)
    return any(len(part) >= _SHORTEST_ECHO and part in text for part in map(_flatten, prompt_parts))


def judge_answers(answers: Sequence[Answered], pool: "WorkerPool | None" = None) -> list[Judgement]:
    """Extract and compare final answers as the rewards do; `pool` (reward.pool) runs what needs a parser."""
    from reward.answer import boxed_answer, final_answer, judge, own_text

    own = [own_text(made.text, made.conversation) for made in answers]
    found, boxed = [final_answer(text) or None for text in own], [boxed_answer(text) or None for text in own]
    golds = [made.problem.gold for made in answers]
    # The two are mostly the same answer, so each distinct pair is judged once.
    asked = sorted({(a, g) for texts in (found, boxed) for a, g in zip(texts, golds, strict=True) if a})
    verdicts = dict(zip(asked, (verdict.value for verdict in judge(asked, pool)), strict=True))
    return [
        Judgement(
            answer=answer,
            parsed=answer is not None,
            correct=verdicts[answer, gold] if answer else False,
            strict=verdicts[box, gold] if box else False,
        )
        for answer, box, gold in zip(found, boxed, golds, strict=True)
    ]


MATH = Scoring("math", judge_answers)


def score(
    problems: Sequence["Problem"],
    generations: Sequence[Generation],
    conversations: Sequence[list[dict]],
    pool: "WorkerPool | None" = None,
    scoring: Scoring = MATH,
) -> list[Record]:
    """Return the records of one cell, with the samples of a problem (`id`, `gold`) together and equally many for each.

    `conversations` are the problems' prompts, one each. `BadInput` if the completions cannot be divided evenly.
    """
    samples, left = divmod(len(generations), max(len(problems), 1))
    if left or not samples or len(conversations) != len(problems):
        raise BadInput(
            f"{len(generations)} completions and {len(conversations)} prompts do not fit {len(problems)} problems."
        )
    asked = [(problem, turns) for problem, turns in zip(problems, conversations, strict=True) for _ in range(samples)]
    answers = [_answered(made, *pair) for made, pair in zip(generations, asked, strict=True)]
    judgements = map(_known, answers, scoring.judge(answers, pool))
    return [
        Record(
            problem_id=answer.problem.id,
            completion=made.raw,
            tokens=made.tokens,
            ended=made.ended,
            hit_max_tokens=made.hit_max_tokens,
            parsed=judged.parsed,
            answer=judged.answer,
            gold=answer.problem.gold,
            correct=judged.correct,
            correct_strict=judged.strict,
            prompt_leak=leaks_prompt(
                made.raw if made.said is None else made.said, prompt_parts(answer, scoring.quotes_question)
            ),
            sample=place % samples,
            reward=judged.reward,
            text=None if made.text == made.raw else made.text,
        )
        for place, (made, answer, judged) in enumerate(zip(generations, answers, judgements, strict=True))
    ]


def _answered(made: Generation, problem: "Problem", conversation: list[dict]) -> Answered:
    episode = made.episode
    return Answered(made.text, problem, conversation if episode is None else episode.prompt, episode)


def _known(answer: Answered, judged: Judgement) -> Judgement:
    """The judgement, undecided for an episode whose outcome is not known."""
    if answer.episode is None or answer.episode.unknown is None:
        return judged
    return replace(judged, correct=None, strict=None, reward=None)


def prompt_parts(answer: Answered, quotes_question: bool = False) -> list[str]:
    """Texts that a completion must not repeat: every message, the question, and the instruction that follows it."""
    parts, question = [message["content"] for message in answer.conversation], answer.problem.question
    after = [part.partition(question)[2] for part in parts if question in part]
    if quotes_question:
        parts = [part for part in parts if question not in part]
    else:
        parts = [*parts, question]
    return [part for part in [*parts, *after] if part.strip()]


def summarize(records: Sequence[Record]) -> dict:
    """A cell of the matrix: accuracies over problems, hygiene rates over all completions, fractions in 0..1.

    {"n" problems, "samples" completions each, "undecided" and "correct" completions, "accuracy", "interval", "strict",
    "parse_rate", "prompt_leak_rate", "end_of_turn_rate", "max_token_hit_rate", "undecided_rate", "max_token_hits",
    "mean_tokens"}; "pass_at_k" and "maj_at_k", each {k: {"value", "interval", "n"}}, where a problem has several
    completions; "mean_reward" over decided completions where a reward function scored, None where one is infinite. An
    accuracy is the mean over problems of the share of right ones among their decided completions. `CheckFailed` when
    none is decided.
    """
    table = score_table(records)
    (problems, samples), right = table.shape, sum(record.correct is True for record in records)
    means = problem_means(table)
    means = means[~np.isnan(means)]
    if not len(means):
        raise CheckFailed(
            f"none of {len(records)} answers could be compared with its reference; there is no accuracy to report."
        )
    strict = [record.correct_strict for record in records if record.correct_strict is not None]
    rewards = [record.reward for record in records if record.reward is not None]
    return {
        "n": problems,
        "samples": samples,
        "undecided": sum(record.correct is None for record in records),
        "correct": right,
        "accuracy": float(means.mean()),
        "interval": list(cluster_interval(means, int((~np.isnan(table)).sum()))),
        "strict": sum(strict) / len(strict) if strict else None,
        **rates(records),
        "max_token_hits": sum(record.hit_max_tokens for record in records),
        "mean_tokens": sum(record.tokens for record in records) / len(records),
        **(over_samples(records, table) if samples > 1 else {}),
        **({"mean_reward": mean if isfinite(mean := sum(rewards) / len(rewards)) else None} if rewards else {}),
    }


def over_samples(records: Sequence[Record], table: np.ndarray) -> dict:
    """{"pass_at_k": {k: …}, "maj_at_k": {samples: …}} with {"value", "interval", "n" problems}; k as text."""

    def estimate(scores: np.ndarray, completions: int) -> dict:
        scores = scores[~np.isnan(scores)]
        interval = list(cluster_interval(scores, len(scores) * completions)) if len(scores) else None
        return {"value": float(scores.mean()) if len(scores) else None, "interval": interval, "n": len(scores)}

    samples = table.shape[1]
    # There are samples // k disjoint sets of k completions.
    passed = {str(k): estimate(pass_at_k_scores(table, k), samples // k) for k in powers(samples)}
    return {"pass_at_k": passed, "maj_at_k": {str(samples): estimate(majority_scores(records), 1)}}


def _flatten(text: str) -> str:
    return " ".join(text.casefold().split())
