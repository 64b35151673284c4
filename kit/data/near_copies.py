"""Near-copies among problems: the same text with other numbers, other names, or another question at its end.

Similarity is the share of the shorter problem's pairs of adjacent words that also occur in the other one. All numbers
count as one word and all names as another; a name is a capitalized word that the problems never write in lower case.
Not covered: paraphrases, and languages that capitalize nouns or do not separate words.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_WORD = re.compile(r"\d[\d,]*(?:\.\d+)?|[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
NUMBER, NAME = "#", "@"
_ROWS = 512  # compared with all others at once


def shingles(questions: Sequence[str]) -> list[set[tuple[str, ...]]]:
    """Pairs of adjacent words of each question, with numbers and names replaced; its single word if it has no pair."""
    texts = [_WORD.findall(question) for question in questions]
    lower = {word for words in texts for word in words if word.islower()}

    def sign(word: str) -> str:
        if word[0].isdigit():
            return NUMBER
        return NAME if word[0].isupper() and word.lower() not in lower else word.lower()

    found: list[set[tuple[str, ...]]] = []
    for words in texts:
        signs = [sign(word) for word in words]
        found.append({*itertools.pairwise(signs)} or {tuple(signs)})
    return found


def similar(left: Sequence[str], right: Sequence[str] | None = None) -> Iterator[tuple[int, list[int], list[float]]]:
    """Yield (index in `left`, indices in `right`, similarities above 0 up to 1) for every question of `left`.

    Without `right`, `left` is compared with itself, including each question with itself. Time and memory grow with the
    number of pairs that share any two words.
    """
    import numpy as np

    every = shingles([*left, *(right or ())])
    matrix = _matrix(every)
    sizes = np.array([len(one) for one in every])
    others, other_sizes = (matrix, sizes) if right is None else (matrix[len(left) :], sizes[len(left) :])
    for start in range(0, len(left), _ROWS):
        shared = (matrix[start : min(start + _ROWS, len(left))] @ others.T).tocsr()
        for row in range(shared.shape[0]):
            part = slice(shared.indptr[row], shared.indptr[row + 1])
            columns = shared.indices[part]
            values = shared.data[part] / np.minimum(sizes[start + row], other_sizes[columns])
            yield start + row, columns.tolist(), values.tolist()


def _matrix(sets: list[set[tuple[str, ...]]]) -> "csr_matrix":
    """Question-by-shingle matrix, 1 where the question has the shingle."""
    import numpy as np
    from scipy.sparse import csr_matrix

    index = {one: number for number, one in enumerate(sorted({one for found in sets for one in found}))}
    columns = [index[one] for found in sets for one in sorted(found)]
    ends = np.cumsum([0, *(len(found) for found in sets)])
    return csr_matrix((np.ones(len(columns), np.float32), columns, ends), shape=(len(sets), len(index)))


def groups(questions: Sequence[str], threshold: float) -> list[list[int]]:
    """Group the indices of near-copies, ordered by each group's first question.

    No two questions of different groups have a similarity of `threshold` or more. Within a group, every question has
    that similarity to at least one other.
    """
    parent = list(range(len(questions)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for index, others, values in similar(questions):
        for other, value in zip(others, values, strict=True):
            if value >= threshold and (first := root(index)) != (second := root(other)):
                parent[max(first, second)] = min(first, second)
    found: dict[int, list[int]] = {}
    for index in range(len(questions)):
        found.setdefault(root(index), []).append(index)
    return list(found.values())


def nearest(left: Sequence[str], right: Sequence[str]) -> list[tuple[float, int | None]]:
    """(similarity, index) of the most similar question of `right`, for each question of `left`.

    (0.0, None) if no two words are shared.
    """
    found: list[tuple[float, int | None]] = []
    for _, others, values in similar(left, right):
        found.append(max(zip(values, others, strict=True), key=lambda one: one[0], default=(0.0, None)))
    return found
