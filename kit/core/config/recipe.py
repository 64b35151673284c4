"""Which recipe trains a configuration, and for which format a run was trained. Imports no torch."""

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.format_names import read_quant_format
from kit.core.run_directory import RunDir, read_manifest

PLAIN, QUANTIZED, DISTILLATION = "recipes/grpo_qlora.py", "recipes/grpo_qat.py", "recipes/distill_qat.py"
SUPERVISED = "recipes/sft_qlora.py"


def recipe_of(config: Config) -> str:
    """The recipe's file, relative to the root of the repository."""
    if config.sft.is_given:
        return SUPERVISED
    if config.distill.is_given:
        return DISTILLATION
    return PLAIN if config.policy.quant_cfg is None else QUANTIZED


def check_recipe(config: Config, recipe: str) -> None:
    """Raise `BadInput` unless `recipe` is the one that trains this configuration."""
    if config.run.imported_from is not None:
        raise BadInput(
            f"run.imported_from is {config.run.imported_from}: python -m merge import sets it, and such a run is not "
            "trained. To train from that adapter, leave it out and set policy.init_adapter."
        )
    needed = recipe_of(config)
    if needed == recipe:
        return
    distill, fmt = config.distill, config.policy.quant_cfg
    if needed == SUPERVISED:
        why, instead = f"sft.rows is {config.sft.rows}", "leave the group sft out"
    elif needed == DISTILLATION:
        key = "distill.teacher" if distill.teacher else "distill.teacher_adapter"
        why, instead = f"{key} is {distill.teacher or distill.teacher_adapter}", "leave the group distill out"
    elif needed == QUANTIZED:
        why, instead = f"policy.quant_cfg is {fmt}", "leave policy.quant_cfg out to train without quantizers"
    else:
        why, instead = "policy.quant_cfg is not set", "set policy.quant_cfg"
    if recipe == DISTILLATION:  # with or without quantizers, what it lacks is a teacher
        why, instead = "distill.teacher and distill.teacher_adapter are not set", "set one of them"
    if recipe == SUPERVISED:
        why, instead = "sft.rows is not set", "set it to messages, prompt_completion or text"
    raise BadInput(f"{why}: {recipe} does not train this. Start it with {needed}, or {instead}.")


def check_resumed_format(config: Config, run: RunDir) -> None:
    """Raise `BadInput` unless the newest whole checkpoint was trained for the format that `policy.quant_cfg` means.

    The name that the run was started with does not matter. Also raised if there is no whole checkpoint.
    """
    trained = read_manifest(run.newest_checkpoint()).get("quant_cfg")
    given = config.policy.quant_cfg
    wanted = None if given is None else read_quant_format(given).name
    if trained != wanted:
        raise BadInput(
            f"--resume: {run.path} was trained for {trained or 'no format'}, policy.quant_cfg "
            f"{'' if given in (None, wanted) else f'{given} '}is {wanted or 'not set'} now. Resume with "
            f"{f'policy.quant_cfg {trained}' if trained else 'policy.quant_cfg left out'}, or start another run."
        )
