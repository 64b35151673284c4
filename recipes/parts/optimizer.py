"""What `train.optimizer` can be, and what it cannot be together with: those that update weights in the backward pass.

transformers 5.17: LOMO's step is its backward pass, and the layerwise ones step in a hook of every weight, as soon as
its gradient is there. Imports no torch.
"""

from recipes.parts.config import Config
from recipes.parts.errors import did_you_mean

# Those of transformers.training_args.OptimizerNames, which would import torch.
NAMES = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor"),
    *("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit"),
    *("adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit"),
    *("galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    *("lomo", "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    *("apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
)
IN_BACKWARD = ("lomo", "adalomo")
LAYERWISE = "_layerwise"


def problems(config: Config) -> list[str]:
    """That there is no such optimizer, or why a step of it would be several: a step's rows go through more than one
    backward pass."""
    train = config.train
    if train.optimizer not in NAMES:
        hint = did_you_mean(train.optimizer, NAMES) or f" Use one of {', '.join(NAMES)}."
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
