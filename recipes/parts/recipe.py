"""Which recipe trains a configuration. Imports no torch."""

from recipes.parts.config import Config
from recipes.parts.errors import BadInput

PLAIN, QUANTIZED, DISTILLATION = "recipes/grpo_qlora.py", "recipes/grpo_qat.py", "recipes/distill_qat.py"


def recipe_of(config: Config) -> str:
    """The recipe's file, from the root of the repository."""
    if config.distill.is_given:
        return DISTILLATION
    return PLAIN if config.policy.quant_cfg is None else QUANTIZED


def check_recipe(config: Config, recipe: str) -> None:
    """`BadInput` when `recipe` is not the one that trains this configuration."""
    needed = recipe_of(config)
    if needed == recipe:
        return
    distill, fmt = config.distill, config.policy.quant_cfg
    if needed == DISTILLATION:
        key = "distill.teacher" if distill.teacher else "distill.teacher_adapter"
        why, instead = f"{key} is {distill.teacher or distill.teacher_adapter}", "leave the group distill out"
    elif needed == QUANTIZED:
        why, instead = f"policy.quant_cfg is {fmt}", "leave policy.quant_cfg out to train without quantizers"
    else:
        why = "policy.quant_cfg is not set" if recipe == QUANTIZED else "distill.teacher is not set"
        instead = f"set {why.split()[0]}"
    raise BadInput(f"{why}: {recipe} does not train this. Start it with {needed}, or {instead}.")
