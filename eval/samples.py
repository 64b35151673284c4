"""Several completions per problem: records by problem, pass@k, majority vote.

A completion whose answer could not be compared (`correct` is None) is neither right nor wrong: it is excluded from its
problem's mean and from pass@k.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from kit.core.errors import BadInput

if TYPE_CHECKING:
    from eval.record import Record

_LONGEST = 500  # above this many characters, two answers are only compared as text; a program is longer


def by_problem(records: Sequence["Record"]) -> list[list["Record"]]:
    """The records of each problem, in order; every problem must have the same number of them, numbered 0, 1, …

    `BadInput` otherwise: a record file was truncated, or two were mixed.
    """
    groups: list[list[Record]] = []
    for record in records:
        if record.sample == 0:
            groups.append([])
        if (
            not groups
            or record.sample != len(groups[-1])
            or record.problem_id != (groups[-1] or [record])[0].problem_id
        ):
            raise BadInput(
                f"completion {record.sample} of problem {record.problem_id} is out of place: records come problem by "
                "problem, the completions of one in order. Evaluate again."
            )
        groups[-1].append(record)
    if len({len(group) for group in groups}) > 1:
        fewest = min(groups, key=len)
        raise BadInput(
            f"problem {fewest[0].problem_id} has {len(fewest)} completions, others {max(map(len, groups))}. Evaluate "
            "again."
        )
    return groups


def score_table(records: Sequence["Record"]) -> np.ndarray:
    """(n problems, k completions): 1.0 right, 0.0 wrong, NaN undecided."""
    rows = [[np.nan if one.correct is None else float(one.correct) for one in group] for group in by_problem(records)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), -1)


def problem_means(table: np.ndarray) -> np.ndarray:
    """(n,): the share of right completions among the decided ones of each problem, NaN where none is decided."""
    decided = (~np.isnan(table)).sum(axis=1)
    right = np.nansum(table, axis=1)
    return np.divide(right, decided, out=np.full(len(table), np.nan), where=decided > 0)


def powers(samples: int) -> list[int]:
    """1, 2, 4, … and `samples` itself: the k at which pass@k is reported."""
    doubled = [1 << place for place in range(samples.bit_length()) if 1 << place <= samples]
    return doubled if doubled[-1] == samples else [*doubled, samples]


def pass_at_k(right: int, total: int, k: int) -> float:
    """Chance that k completions drawn without replacement from `total`, `right` of them right, include a right one.

    1 - C(total - right, k)/C(total, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, section 2.1);
    1 - (1 - right/total)^k would be too low. `BadInput` if there are fewer than k.
    """
    if not 0 <= right <= total or not 1 <= k <= total:
        raise BadInput(f"pass@{k} needs at least {k} completions and 0 <= right <= total, got {right} of {total}.")
    return 1.0 - comb(total - right, k) / comb(total, k)


def pass_at_k_scores(table: np.ndarray, k: int) -> np.ndarray:
    """(n,): pass@k of each problem of a score table, NaN where fewer than k completions are decided."""
    scores = np.full(len(table), np.nan)
    for place, row in enumerate(table):
        decided = row[~np.isnan(row)]
        if len(decided) >= k:
            scores[place] = pass_at_k(int(decided.sum()), len(decided), k)
    return scores


def majority_scores(records: Sequence["Record"]) -> np.ndarray:
    """(n,): whether the most frequent answer of each problem is right; NaN where that was not decided."""
    return np.array([_majority(group) for group in by_problem(records)], dtype=np.float64)


def _majority(group: Sequence["Record"]) -> float:
    """1.0, 0.0, a share on a tie, or NaN.

    Every completion with a parsed answer has one vote (self-consistency: Wang et al. 2022, arXiv:2203.11171); answers
    are the same if they are exactly equal (`_same`), whether right or wrong. A tie is split: the expected value of
    drawing one of the tied answers, so neither the order nor the reference decides it. No parsed answer at all counts
    as wrong.
    """
    answers: list[tuple[str, list[bool | None]]] = []
    for record in group:
        if record.answer is None:
            continue
        found = next((verdicts for known, verdicts in answers if _same(known, record.answer)), None)
        if found is None:
            answers.append((record.answer, [record.correct]))
        else:
            found.append(record.correct)
    if not answers:
        return 0.0
    most = max(len(verdicts) for _, verdicts in answers)
    tied = [verdicts for _, verdicts in answers if len(verdicts) == most]
    shares = [
        np.mean([v for v in verdicts if v is not None]) if set(verdicts) != {None} else np.nan for verdicts in tied
    ]
    return float(np.mean(shares))


@lru_cache(maxsize=65536)
def _same(one: str, other: str) -> bool:
    """Whether two answers are the same: as text, or by the exact comparison of the rewards (1/2 and 0.5), no parser.

    The parser that decides the rest is left out on purpose: it only compares with the reference, and an equality that
    merges right answers but not wrong ones would favor the right ones.
    """
    from reward import exact

    if one == other or len(one) + len(other) > _LONGEST:
        return one == other
    return exact.decide(one, other) is True or exact.decide(other, one) is True
