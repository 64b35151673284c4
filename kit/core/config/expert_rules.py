"""Settings that do not reach the experts of a mixture. Imports no torch."""

from kit.core.config.format_rules import packed_of
from kit.core.config.schema import Config


def faults(config: Config) -> list[str]:
    """Why this configuration cannot train a mixture of experts, each reason with its fix and without a last period."""
    policy, rollout, found = config.policy, config.rollout, []
    if policy.quant_cfg is not None:
        found.append("policy.quant_cfg does not reach experts. Leave it out")
    if policy.compute == "fp8":
        found.append("policy.compute fp8 does not reach experts. Use fused or plain")
    if policy.lora_dropout and policy.expert_rank != 0:
        found.append(f"policy.lora_dropout ({policy.lora_dropout}) cannot be applied to experts. Set it to 0")
    if rollout.backend == "server" and rollout.sync == "adapter" and policy.expert_rank != 0:
        found.append("a server cannot serve an adapter on experts unmerged. Set rollout.sync to remerge")
    if packed_of(config):
        weights = config.server.weights
        found.append(f"server.weights {weights} does not hold experts. Set it to fp8_per_channel or bf16")
    return found
