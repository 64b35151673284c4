"""Valid values of `train.optimizer`, and settings that conflict with optimizers that step in the backward pass.

transformers 5.17: LOMO's step is its backward pass, and the layerwise optimizers step in a hook on every weight, as
soon as its gradient is ready. Imports no torch.
"""

from kit.core.config.choices import OPTIMIZERS
from kit.core.config.schema import Config
from kit.core.errors import did_you_mean

IN_BACKWARD = ("lomo", "adalomo")
LAYERWISE = "_layerwise"


def faults(config: Config) -> list[str]:
    """Errors for an unknown optimizer, and for one that steps in every backward pass when a step has several."""
    train = config.train
    if train.optimizer not in OPTIMIZERS:
        hint = did_you_mean(train.optimizer, OPTIMIZERS) or f" Use one of {', '.join(OPTIMIZERS)}."
        return [f"train.optimizer is {train.optimizer}, which transformers does not have.{hint}"]
    if train.optimizer not in IN_BACKWARD and not train.optimizer.endswith(LAYERWISE):
        return []
    where, change = None, "train.gradient_accumulation_steps 1"
    if train.micro_batch_tokens is not None:
        where, change = f"train.micro_batch_tokens {train.micro_batch_tokens}", "leave train.micro_batch_tokens out"
    elif train.gradient_accumulation_steps > 1:
        where = f"train.gradient_accumulation_steps {train.gradient_accumulation_steps}"
    if where is None:
        return []
    return [
        f"train.optimizer is {train.optimizer} with {where}: it updates the adapter inside every backward pass, so "
        "each micro-batch would be a step of its own, and none would be stopped by rollout.max_sampler_k3 or by a "
        f"gradient that is not finite. Use adamw_torch_fused or adamw_8bit, or {change}."
    ]
