"""Loss scaling, for `model.dtype: float16`: without it, gradients below 6e-8 round to 0 in the backward pass.

accelerate (1.15) multiplies the loss by the scale, divides the adapter's float32 gradients by it before they are
clipped, and skips the update of a step whose gradient overflowed; then it halves the scale, and doubles it after 2,000
steps without an overflow. transformers saves the scale in a checkpoint (scaler.pt) and restores it. On a CPU
accelerate ignores fp16, so `use_float16` sets the same scaler and autocast up there.
"""

from collections.abc import Callable

import torch
from accelerate import Accelerator

from kit.train.figures import StepFigures

LOWEST = 1.0  # a gradient that overflows at this scale does so by itself
KEYS = ("loss_scale", "update_skipped")


def use_float16(accelerator: Accelerator) -> None:
    """Make an accelerator for fp16 compute in float16 on a CPU, as it does on a GPU."""
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")


class LossScale:
    """The loss scale of a run, and the steps whose update it skips. `say` prints a line in the main process."""

    def __init__(self, scaler: torch.amp.GradScaler, figures: StepFigures, say: Callable[[str], None] | None):
        self._scaler, self._figures, self._say = scaler, figures, say

    def note(self, step: int, overflowed: bool) -> None:
        """Record the scale of a step's backward passes, and whether its gradient overflowed; the scaler then makes no
        update."""
        scale = self._scaler.get_scale()
        self._figures.values |= {"loss_scale": scale, "update_skipped": int(overflowed)}
        if overflowed and not self.is_lowest and self._say is not None:
            self._say(
                f"step {step}: the gradient overflowed float16 at a loss scale of {scale:g}. The update is skipped "
                "and the scale lowered."
            )

    @property
    def is_lowest(self) -> bool:
        """Whether no smaller scale could keep the gradient finite."""
        return self._scaler.get_scale() <= LOWEST
