"""Stop a run before a non-finite gradient reaches its adapter, or a non-finite adapter samples or is saved."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from kit.core.errors import CheckFailed
from kit.train.loss_scale import LOWEST, LossScale


class FiniteGradients(TrainerCallback):
    """Stops the run before a non-finite gradient reaches the adapter; with a loss scale, once the scale cannot fall
    any further, since its scaler skips the update.

    `keep_step` saves the rows that caused it and returns a sentence with their path.
    """

    def __init__(self, keep_step: Callable[[], str], scale: LossScale | None = None):
        self.keep_step, self.scale = keep_step, scale

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
        overflowed = bool(gradients and not torch.isfinite(torch.stack(torch._foreach_norm(gradients))).all())
        if self.scale is not None:
            self.scale.note(state.global_step + 1, overflowed)
        if overflowed and (self.scale is None or self.scale.is_lowest):
            lowest = "" if self.scale is None else f", at the lowest loss scale ({LOWEST:g}) too"
            raise CheckFailed(
                f"step {state.global_step + 1}: the gradient is not finite{lowest}. The adapter was not updated. "
                f"{self.keep_step()} Continue with --resume; if it happens again, start another run from the "
                "newest adapter (policy.init_adapter) with a lower train.learning_rate."
            )


class FiniteAdapter(TrainerCallback):
    """Stops the run before a non-finite adapter samples or is saved: a finite gradient can cause one too."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if found := spoiled(model):
            raise CheckFailed(
                f"{found} that training starts from are not finite. Name another adapter in policy.init_adapter; to "
                "resume, remove the newest checkpoint."
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if found := spoiled(model):
            raise CheckFailed(
                f"step {state.global_step + 1}: {found} are not finite after the update. This step's adapter is not "
                "saved. Start another run from the newest adapter (policy.init_adapter) with a lower "
                "train.learning_rate."
            )


def spoiled(model: Any) -> str:
    """How many tensors of the adapter are not finite, in words; empty if all are finite. Blind to weights that ZeRO-3
    has sharded."""
    adapter = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    finite = torch.isfinite(torch.stack(torch._foreach_norm(adapter)))
    return "" if finite.all() else f"{len(adapter) - int(finite.sum())} of {len(adapter)} tensors of the adapter"
