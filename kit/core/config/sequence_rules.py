"""Settings that conflict with `train.sequence_parallel`. Imports no torch."""

from kit.core.config.schema import Config


def faults(config: Config, processes: int) -> list[str]:
    """Errors about `train.sequence_parallel` in a trainer of `processes`; empty if valid."""
    train = config.train
    if (size := train.sequence_parallel) <= 1:
        return []
    key, found = f"train.sequence_parallel ({size})", []
    if train.micro_batch_tokens is None:
        longest = config.rollout.max_prompt_length + config.rollout.max_completion_length
        found.append(
            f"{key} without train.micro_batch_tokens: only packs are split. Set it to the tokens that a process "
            f"computes at once, {-(-longest // size)} or more."
        )
    if processes % size:
        found.append(
            f"{key} does not divide the {processes} process{'es' * (processes > 1)} of accelerate launch. Use another "
            "number, or other --num_processes."
        )
    if config.policy.lora_dropout:
        found.append(
            f"{key} with policy.lora_dropout ({config.policy.lora_dropout}): each process would draw the same mask "
            "for its part of the tokens. Set policy.lora_dropout to 0."
        )
    if config.rollout.routing != "own":
        found.append(
            f"{key} with rollout.routing {config.rollout.routing}: the sampler's experts are not split with the "
            "tokens. Set rollout.routing to own."
        )
    for group, name in (("distill", "a distillation"), ("sft", "supervised fine-tuning")):
        if getattr(config, group).is_given:
            found.append(f"{key} in {name} was not tested. Leave it out.")
    return found
