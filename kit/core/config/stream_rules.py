"""Settings that conflict with `rollout.stream_groups`. Imports no torch."""

from kit.core.config.schema import Config

BY_TOKENS = ("dapo", "cispo")  # of train.loss_type: divided by the tokens of a step, which its last group decides


def faults(config: Config, processes: int, deepspeed: bool) -> list[str]:
    """Errors about `rollout.stream_groups` in a trainer of `processes`; empty if valid."""
    rollout, train = config.rollout, config.train
    if (size := rollout.stream_groups) is None:
        return []
    key, found = f"rollout.stream_groups is {size}", []
    if rollout.backend != "server":
        found.append(
            f"{key} and rollout.backend in_process: the trainer's process cannot update while it generates. Set "
            "rollout.backend to server, or leave rollout.stream_groups out."
        )
    if train.micro_batch_tokens is None:
        found.append(
            f"{key} without train.micro_batch_tokens: the rows of an accumulation step are fixed before they are "
            "generated. Set it to the tokens that a process computes at once."
        )
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
    if rows % rollout.group_size:
        found.append(
            f"{key} and groups span processes: a process has {rows} completions a step, which rollout.group_size "
            f"({rollout.group_size}) does not divide. Change train.per_device_train_batch_size or "
            "gradient_accumulation_steps."
        )
    elif size >= rows // rollout.group_size:
        found.append(
            f"{key} and a process has {rows // rollout.group_size} groups a step, so it would wait for all of them. "
            "Lower it, or leave it out."
        )
    if rollout.overlap:
        found.append(
            f"{key} and rollout.overlap true, which generates the whole next batch behind the update. Set one of them."
        )
    if config.server.sleep:
        found.append(
            f"{key} and server.sleep true: a replica that sleeps during the update cannot generate in that time. Set "
            "one of them."
        )
    others = {
        "rollout.resample_rounds": rollout.resample_rounds,
        "rollout.replay_steps": rollout.replay_steps,
        "train.kl_in_reward": train.kl_in_reward,
        "train.loss": train.loss,
    }
    for name, value in others.items():
        if value:
            found.append(f"{key} with {name}, which needs all of a step's completions at once. Leave one of them out.")
    if train.scale_rewards == "batch" or train.trl.get("multi_objective_aggregation") == "normalize_then_sum":
        found.append(
            f"{key} and advantages that are scaled by the deviation over the whole batch. Set train.scale_rewards to "
            "group or none, and train.trl.multi_objective_aggregation to sum_then_normalize."
        )
    if train.num_iterations > 1:
        found.append(
            f"{key} and train.num_iterations {train.num_iterations}: a batch is used once. Set num_iterations to 1."
        )
    if train.entropy_coef and train.loss_type in BY_TOKENS:
        found.append(
            f"{key} with train.entropy_coef and train.loss_type {train.loss_type}: the bonus is divided by rows, the "
            "loss by tokens, and gradients of the first groups are rescaled as one. Leave one of them out."
        )
    if train.sequence_parallel > 1:
        found.append(f"{key} with train.sequence_parallel ({train.sequence_parallel}) was not tested. Leave one out.")
    if rollout.routing != "own":
        found.append(f"{key} with rollout.routing {rollout.routing} was not tested. Set routing to own.")
    if deepspeed:
        found.append(
            f"{key} under DeepSpeed, which makes the update with its own count of backward passes. Use "
            "accelerate_configs/ddp.yaml or fsdp2.yaml."
        )
    for group, name in (("environment", "an environment"), ("distill", "a distillation"), ("sft", "fine-tuning")):
        if getattr(config, group).is_given:
            found.append(f"{key} with {name}, which does not sample groups one by one. Leave it out.")
    return found
