"""`train.loss: module:function`, a user's loss: import it, try it on a few numbers, check its results.

Whatever a call on two rows can reveal is reported before weights are loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.train.loss import LossFunction, LossInputs, LossResult, LossSettings
from reward.own import imported_taking

KEY = "train.loss"


class LossFailed(CheckFailed):
    """The user's loss raised an exception, which is the error's cause, or did not return a loss."""


class OwnLoss:
    """The user's function, with its result checked at every call; `LossFailed` says what is wrong with it."""

    def __init__(self, name: str, function: LossFunction):
        self.name, self.function = name, function

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> LossResult:
        try:
            result = self.function(inputs, settings)
        except KitError:
            raise
        except Exception as error:  # a user's function may raise anything
            said = " ".join(str(error).split())[:300] or "no message"
            raise LossFailed(f"{KEY} {self.name!r} raised {type(error).__name__}: {said.rstrip('.')}.") from error
        if fault := describe_fault(result, inputs):
            raise LossFailed(f"{KEY} {self.name!r} {fault}")
        return result


def load_loss(config: Config, settings: LossSettings) -> LossFunction | None:
    """The function of `train.loss`, tried on two rows; None if not set. Raises `BadInput` if it does not work."""
    name = config.train.loss
    if name is None:
        return None
    function = imported_taking(name, KEY, 2, "two arguments, inputs and settings")
    own, inputs = OwnLoss(name, function), example_inputs(settings, config.rollout.backend == "server")
    try:
        result = own(inputs, settings)
    except LossFailed as error:
        raise BadInput(f"{str(error).rstrip('.')}. It was called with two rows of three tokens.") from error.__cause__
    loss = result[0] if isinstance(result, tuple) else result
    if torch.autograd.grad(loss, inputs.logps, allow_unused=True)[0] is None:
        raise BadInput(f"{KEY} {name!r} does not use inputs.logps, so the policy would learn nothing from it.")
    return own


def describe_fault(result: Any, inputs: LossInputs) -> str:
    """What is wrong with a loss function's result, as the rest of a sentence; empty if valid."""
    loss, figures = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not torch.is_tensor(loss):
        return f"returned a {type(loss).__name__}. Return a scalar tensor, or it and a dictionary of metrics."
    if loss.dim():
        return f"returned a tensor of shape {(*loss.shape,)}. Return a scalar: sum over the rows and tokens."
    if not loss.requires_grad and torch.is_grad_enabled():
        return "returned a loss without a gradient. Compute it from inputs.logps."
    if not isinstance(figures, Mapping):
        return f"returned metrics as a {type(figures).__name__}. Return a dictionary."
    rows, columns = inputs.mask.shape
    for key, value in figures.items():
        shape = (*value.shape,) if torch.is_tensor(value) else None
        if not isinstance(key, str) or shape not in ((rows, columns), (rows, 1), (rows,)):
            return f"returned the metric {key!r}, which is not a tensor of shape ({rows}, {columns}) or ({rows},)."
    return ""


def example_inputs(settings: LossSettings, is_served: bool) -> LossInputs:
    """Two rows of three tokens, one of them padding, with the inputs that a run of these settings has. `is_served`:
    with the sampler's log-probs."""
    logps = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.5, 0.0]])
    return LossInputs(
        logps=logps.clone().requires_grad_(),
        entropies=torch.full((2, 3), 0.5, requires_grad=True),
        old_logps=logps - 0.1,
        advantages=torch.tensor([0.5, -0.5]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ref_logps=logps + 0.1 if settings.beta else None,
        sampler_logps=logps + 0.05 if is_served else None,
        step_rows=2,
        step_tokens=torch.tensor(5.0),
        entropy_threshold=torch.tensor(0.5) if settings.top_entropy_quantile < 1 else None,
    )
