"""`train.loss: module:function`, a loss of the user's: found, tried on a few numbers, its result checked.

Whatever is wrong with it is said before weights are loaded, where a call on two rows can show it.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed, KitError
from kit.train.loss import LossFunction, LossInputs, LossResult, LossSettings
from reward.own import imported

KEY = "train.loss"


class LossFailed(CheckFailed):
    """The user's loss raised an exception, which is the error's cause, or returned something else than a loss."""


class OwnLoss:
    """The user's function, with its result checked at every call; `LossFailed` names it and what it did."""

    def __init__(self, name: str, function: LossFunction):
        self.name, self.function = name, function

    def __call__(self, inputs: LossInputs, settings: LossSettings) -> LossResult:
        try:
            result = self.function(inputs, settings)
        except KitError:
            raise
        except Exception as error:  # a function of the user's may fail in any way
            said = " ".join(str(error).split())[:300] or "no message"
            raise LossFailed(f"{KEY} {self.name!r} raised {type(error).__name__}: {said.rstrip('.')}.") from error
        if fault := describe_fault(result, inputs):
            raise LossFailed(f"{KEY} {self.name!r} {fault}")
        return result


def load_loss(config: Config, settings: LossSettings) -> LossFunction | None:
    """The function of `train.loss`, tried on two rows; None where it is not set. `BadInput` says what is wrong."""
    name = config.train.loss
    if name is None:
        return None
    if not all(name.partition(":")):
        raise BadInput(f"{KEY} is {name!r}. Name a function as module:function.")
    function = imported(name, KEY)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise BadInput(f"{KEY} {name!r} must take two arguments, inputs and settings: {error}.") from None
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
    """What is wrong with the result of a loss, as the rest of a sentence; empty if nothing is."""
    loss, figures = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not torch.is_tensor(loss):
        return f"returned a {type(loss).__name__}. Return a tensor with one number, or it and a dictionary of figures."
    if loss.dim():
        return f"returned a tensor of shape {(*loss.shape,)}. Return one number: sum over the rows and tokens."
    if not loss.requires_grad and torch.is_grad_enabled():
        return "returned a loss without a gradient. Compute it from inputs.logps."
    if not isinstance(figures, Mapping):
        return f"returned figures as a {type(figures).__name__}. Return a dictionary of them."
    rows, columns = inputs.mask.shape
    for key, value in figures.items():
        shape = (*value.shape,) if torch.is_tensor(value) else None
        if not isinstance(key, str) or shape not in ((rows, columns), (rows, 1), (rows,)):
            return f"returned the figure {key!r}, which is no tensor by token ({rows}, {columns}) or by row ({rows},)."
    return ""


def example_inputs(settings: LossSettings, is_served: bool) -> LossInputs:
    """Two rows of three tokens, one of them padding, with what a run of these settings has; a server's samples come
    with its log-probs."""
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
