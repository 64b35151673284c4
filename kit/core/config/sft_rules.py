"""What supervised fine-tuning needs from the configuration: the group `sft`, and GRPO keys that it sets or refuses.

Imports no torch.
"""

from dataclasses import replace
from typing import Any

from kit.core.config.schema import Config

# Keys of GRPO's rollouts and loss that supervised fine-tuning does not use, with values that make them no-ops.
SET: dict[str, Any] = {"train.loss_type": "dapo", "train.beta": 0.0, "train.scale_rewards": "none"}
SET |= {"train.kl_in_reward": False, "train.delta": None, "train.importance_sampling_level": "token"}
SET |= {"train.entropy_coef": 0.0, "train.epsilon_high": None, "train.mask_truncated": False}
SET |= {"train.share_prompts": False, "rollout.correction": "none", "rollout.temperature": 1.0}
SET |= {"watch.completions_every": 0, "policy.reference": "none"}


def rows_a_step(config: Config, processes: int) -> int:
    """Rows of the data per optimizer step, over all processes."""
    train = config.train
    return train.per_device_train_batch_size * processes * train.gradient_accumulation_steps


def settled(config: Config, processes: int) -> Config:
    """A copy with GRPO's keys set for supervised fine-tuning (`SET`): all rows of a step count as one group."""
    changed: dict[str, dict[str, Any]] = {"train": {}, "rollout": {}, "watch": {}, "policy": {}}
    for key, value in (SET | {"rollout.group_size": rows_a_step(config, processes)}).items():
        group, name = key.split(".")
        changed[group][name] = value
    return replace(config, **{group: replace(getattr(config, group), **keys) for group, keys in changed.items()})


def faults(config: Config, processes: int) -> list[str]:
    """Why this configuration does not work as supervised fine-tuning."""
    rollout, policy, train, found = config.rollout, config.policy, config.train, []
    if config.distill.is_given:
        found.append("the groups sft and distill are both set: a run has one loss. Leave one of them out.")
    if rows_a_step(config, processes) < 2:
        found.append(
            "a step has 1 row (train.per_device_train_batch_size 1 x 1 process x gradient_accumulation_steps 1); "
            "trl 1.16's sampler needs 2. Raise train.gradient_accumulation_steps."
        )
    if config.sft.rows == "text" and config.sft.loss_on == "answers":
        found.append("sft.loss_on is answers and sft.rows text: text has no answers. Leave sft.loss_on out.")
    if rollout.backend == "server":
        found.append(
            "rollout.backend is server and the group sft is set: supervised fine-tuning samples nothing. Set "
            "rollout.backend to in_process."
        )
    unused = {
        "rollout.overlap": rollout.overlap,
        "rollout.resample_rounds": rollout.resample_rounds,
        "rollout.replay_steps": rollout.replay_steps,
        "environment": config.environment.is_given,
        "train.loss": train.loss,
        "data.pass_rates": config.data.pass_rates,
        "data.format": config.data.format,
    }
    if names := [key for key, value in unused.items() if value]:
        is_it, it = ("is", "it") if len(names) == 1 else ("are", "them")
        found.append(f"{', '.join(names)} {is_it} for GRPO. Leave {it} out with the group sft.")
    if train.num_iterations > 1:
        found.append(
            f"train.num_iterations is {train.num_iterations}: a step learns each of its rows once. Set it to 1."
        )
    if policy.quant_cfg is not None:
        found.append(
            f"policy.quant_cfg is {policy.quant_cfg}: quantizers are trained by recipes/grpo_qat.py and "
            "recipes/distill_qat.py. Leave it out, and continue with one of them."
        )
    return found
