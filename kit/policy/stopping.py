"""Generation by transformers that ends at stop texts (`stop_texts.py`)."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from kit.policy.stop_texts import StopTexts


class StopCriterion(StoppingCriteria):
    """Ends each row of a batch at the token that completes a stop text in it.

    `prompts` are the token ids of the rows without padding. A row that has ended at one of `stop_ids` is padded from
    then on, and is no longer searched.
    """

    def __init__(self, texts: StopTexts, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int]):
        self.texts = texts
        self._watches = {row: texts.watch(ids) for row, ids in enumerate(prompts)} if texts else {}
        self._stop_ids, self._first = {*stop_ids}, 0
        self._lengths: dict[int, int] = {}  # of the rows that ended at a stop text
        self._rows = len(prompts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # (B, T) -> (B,)
        self._first = self._first or input_ids.shape[1] - 1
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if (watch := self._watches.get(row)) is None:
                continue
            if token not in self._stop_ids and watch.add(token):
                self._lengths[row] = input_ids.shape[1] - self._first
            if token in self._stop_ids or row in self._lengths:
                del self._watches[row]
        ended = [row in self._lengths for row in range(self._rows)]
        return torch.tensor(ended, device=input_ids.device)

    def cut(self, rows: list[list[int]]) -> list[list[int]]:
        """The completions without the padding behind a stop text."""
        return [ids[: self._lengths.get(row)] for row, ids in enumerate(rows)]


@contextlib.contextmanager
def stopping(
    model: torch.nn.Module, criterion: StopCriterion, decode: Callable[..., torch.Tensor] | None = None
) -> Iterator[None]:
    """Let `model.generate` end at the criterion, whoever calls it, and with `decode` run that loop (`decoding.py`):
    TRL 1.16 passes neither on."""
    options: dict[str, Any] = {}
    if criterion.texts:
        options["stopping_criteria"] = StoppingCriteriaList([criterion])
    if decode is not None:
        options["custom_generate"] = decode
    if not options:
        yield
        return
    model.generate = functools.partial(model.generate, **options)
    try:
        yield
    finally:
        del model.generate
