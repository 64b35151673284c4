"""What a distillation needs from the configuration: its own group, and the GRPO keys that it sets or ignores.

Imports no torch.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kit.core.config.schema import Config

BASE = "base"  # distill.teacher: the student's own model
# Keys of GRPO's loss that a distillation does not use, with the values that make them no-ops in TRL.
SET = {"train.loss_type": "dapo", "train.beta": 0.0, "rollout.correction": "none"}
SET |= {"train.kl_in_reward": False, "train.delta": None, "train.importance_sampling_level": "token"}
SET |= {"train.entropy_coef": 0.0}
UNUSED = ("train.scale_rewards", "train.epsilon", "train.epsilon_high", "rollout.correction_cap")


def settled(config: Config) -> Config:
    """A copy with the keys of GRPO's loss set for a distillation (`SET`)."""
    changed: dict[str, dict[str, Any]] = {"train": {}, "rollout": {}}
    for key, value in SET.items():
        group, name = key.split(".")
        changed[group][name] = value
    return replace(config, **{group: replace(getattr(config, group), **keys) for group, keys in changed.items()})


def without_effect(config: Config) -> str:
    """One line naming the settings that a distillation does not learn from."""
    found = []
    for key in (*SET, *UNUSED):
        group, name = key.split(".")
        defaults = {field.name: field.default for field in fields(getattr(config, group))}
        if getattr(getattr(config, group), name) not in (defaults[name], SET.get(key, defaults[name])):
            found.append(key)
    measured = f"{', '.join(config.reward.functions)}, measured and not learned from"
    return measured + (f"; without effect: {', '.join(found)}" if found else "")


def faults(config: Config) -> list[str]:
    """Why this configuration with a teacher does not work as a distillation."""
    distill, policy, found = config.distill, config.policy, []
    if distill.teacher_adapter and distill.teacher not in (None, BASE):
        found.append(
            f"distill.teacher is {distill.teacher} and distill.teacher_adapter {distill.teacher_adapter}: an adapter "
            "belongs to the student's own base. Leave out distill.teacher, or distill.teacher_adapter."
        )
    if config.train.loss is not None:
        found.append(
            f"train.loss is {config.train.loss} in a distillation, whose loss is distill.divergence. Leave it out."
        )
    if distill.teacher_revision and is_own_model(config):
        found.append("distill.teacher_revision is for another model as teacher. Set model.revision for the base.")
    if distill.js_beta != 0.5 and distill.divergence != "js":
        found.append(f"distill.js_beta needs distill.divergence js, which is {distill.divergence}. Leave it out.")
    if policy.reference == "init_adapter":
        found.append("policy.reference is init_adapter in a distillation, which has no reference. Leave it out.")
    if config.train.keep_logits:
        found.append(
            "train.keep_logits is true in a distillation, whose divergence has tiles of its own. Leave it out."
        )
    if policy.lora_dropout:
        found.append(
            f"policy.lora_dropout ({policy.lora_dropout:g}) in a distillation: student and teacher would differ by "
            "the dropout. Set it to 0."
        )
    return found + _nothing_to_learn(config)


def is_own_model(config: Config) -> bool:
    """Whether the teacher is the student's own model, with or without another adapter."""
    return config.distill.teacher in (None, BASE)


def _nothing_to_learn(config: Config) -> list[str]:
    """Error if student and teacher are bitwise identical at the start: their divergence is 0 and stays 0."""
    distill, policy = config.distill, config.policy
    if not is_own_model(config) or policy.quant_cfg is not None:
        return []
    theirs, ours = (_place(path) for path in (distill.teacher_adapter, policy.init_adapter))
    if theirs != ours:
        return []
    same = f"both start from {policy.init_adapter}" if ours else "both are the base"
    return [
        f"student and teacher are the same: {same} and policy.quant_cfg is not set, so the divergence is 0 from the "
        "first step to the last. Set policy.quant_cfg, policy.init_adapter or another teacher."
    ]


def _place(path: str | None) -> Path | None:
    return Path(path).resolve() if path else None
