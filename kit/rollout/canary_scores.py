"""The trainer's half of the canary: the tokens to score, and their log-probs under the policy and the base."""

import contextlib
from typing import Any

import numpy as np

from kit.core.errors import CheckFailed

MOST_PROMPT_TOKENS, MOST_TOKENS = 128, 256


class CanaryScorer:
    """Score the first prompts of this process, each with a completion of the policy once there is one.

    An adapter acts on completions; a prompt alone hardly shows it. The sequences then stay the same until the end.
    `longest` is the context length of the replicas: scoring needs room for one more token than a sequence has.
    """

    def __init__(self, prompts: int, longest: int):
        self.prompts, self.most_tokens = prompts, min(MOST_TOKENS, longest - 1)
        self.sequences: list[list[int]] = []
        self._base: list[np.ndarray] | None = None
        self._rows: list[int] = []
        self._extended = False

    def choose(self, prompts: list[list[int]]) -> None:
        """Take the first distinct prompts of a generation, unless some were already taken."""
        if self.sequences or not self.prompts:
            return
        first: dict[tuple[int, ...], int] = {}
        for row, ids in enumerate(prompts):
            first.setdefault(tuple(ids), row)
        self._rows = [row for ids, row in first.items() if len(ids) > 1][: self.prompts]
        # Keep the tokens nearest to the answer, and at least two: one token alone has no log-prob.
        kept = max(2, min(MOST_PROMPT_TOKENS, self.most_tokens // 2))
        self.sequences = [list(prompts[row])[-kept:] for row in self._rows]

    def extend(self, completions: list[list[int]]) -> None:
        """Append, once, the completions of that same generation."""
        if self._extended or not self.sequences:
            return
        for row, ids in zip(self._rows, self.sequences, strict=True):
            ids += list(completions[row])[: self.most_tokens - len(ids)]
        self._extended, self._base = True, None

    def policy(self, trainer: Any) -> list[np.ndarray]:
        """Log-probs (len - 1,) per sequence with the adapter on, temperature 1."""
        return self._checked(_score(trainer, self.sequences))

    def base(self, trainer: Any) -> list[np.ndarray]:
        """The same with the adapter off; computed once, since the base never changes."""
        if self._base is None:
            with trainer.accelerator.unwrap_model(trainer.model).disable_adapter():
                self._base = self._checked(_score(trainer, self.sequences))
        return self._base

    def _checked(self, scores: list[np.ndarray]) -> list[np.ndarray]:
        if bad := sum(int((~np.isfinite(one)).sum()) for one in scores):
            raise CheckFailed(
                f"the trainer's own log-probs of {bad} canary tokens are not finite: the adapter is spoiled. Start "
                "another run from the newest adapter (policy.init_adapter) with a lower train.learning_rate."
            )
        return scores


def _score(trainer: Any, sequences: list[list[int]]) -> list[np.ndarray]:
    """Run one forward exactly as in training: same autocast, same mode, no dropout (checks.py).

    If the base is split, all processes call this together.
    """
    import torch
    from trl.models.utils import disable_gradient_checkpointing

    model = trainer.accelerator.unwrap_model(trainer.model)
    length = max(map(len, sequences))
    device = trainer.accelerator.device
    # Padded on the right: with causal attention earlier tokens never see the padding, so no mask is needed.
    ids = torch.tensor([row + [row[-1]] * (length - len(row)) for row in sequences], device=device)  # (S, L)
    with (
        torch.no_grad(),
        disable_gradient_checkpointing(model, trainer.args.gradient_checkpointing_kwargs),
        # FSDP2 and DeepSpeed cast the weights instead.
        contextlib.nullcontext() if trainer.sharding else trainer.accelerator.autocast(),
    ):
        # Bypass the outer model's forward: accelerate's wrapper would copy all logits to float32. FSDP2 and ZeRO-3
        # need it, because they start a forward there.
        forward = model if trainer.sharding else model.get_base_model()
        logits = forward(input_ids=ids, use_cache=False).logits  # (S, L, vocabulary)
    scores = []
    for row, tokens in enumerate(sequences):
        own = logits[row, : len(tokens) - 1].float()
        chosen = own.gather(1, ids[row, 1 : len(tokens), None]).squeeze(1)
        scores.append((chosen - own.logsumexp(dim=1)).cpu().numpy())
    return scores
