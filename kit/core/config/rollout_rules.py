"""Settings that conflict with noise on the sampler or with `rollout.overlap`; stop texts. Imports no torch."""

from collections.abc import Sequence

from kit.core.config.schema import Config

STOP = "rollout.stop"
MOST_STOPS = 4  # that vLLM takes in a request over HTTP (VLLM_MAX_STOP_STRINGS)
NO_CHARACTER = "\ufffd"  # stands in decoded text for bytes that are none


def noise_faults(config: Config, sharding: str | None) -> list[str]:
    """Settings that conflict with the noise. `sharding` is what splits the base over processes."""
    found: list[str] = []
    policy = config.policy
    start, end, stages = policy.quant_noise_start, policy.quant_noise_end, policy.quant_noise_stages
    if not start and not end:
        return found
    if not 0 < end <= start < 1:
        found.append(
            f"policy.quant_noise_start ({start:g}) and quant_noise_end ({end:g}) must be above 0 and below 1, the end "
            "at most the start: the noise decays geometrically. QeRL uses 1e-2 and 1e-4; 0 and 0 turn it off."
        )
    if stages < 2:
        found.append(f"policy.quant_noise_stages ({stages}) must be 2 or more: there is no noise in the first stage.")
    if config.rollout.backend == "server" and config.rollout.sync != "remerge":
        found.append(
            f"policy.quant_noise_start is {start:g} with rollout.sync {config.rollout.sync}: only the workers of "
            "remerge put noise on their norms. Set rollout.sync to remerge."
        )
    if config.rollout.backend == "in_process" and sharding:
        found.append(
            f"policy.quant_noise_start is {start:g} under {sharding}, which splits the norms over processes. Use "
            "rollout.backend server, or accelerate_configs/ddp.yaml."
        )
    return found


def overlap_faults(config: Config) -> list[str]:
    """Settings that conflict with `rollout.overlap`; empty if it is off."""
    found: list[str] = []
    rollout = config.rollout
    if not rollout.overlap:
        return found
    if rollout.backend != "server":
        found.append(
            "rollout.overlap is true and rollout.backend in_process: the trainer's process would generate and update "
            "with the same weights on the same device, so neither can run behind the other. Set rollout.backend to "
            "server, or rollout.overlap to false."
        )
    if rollout.correction == "none":
        found.append(
            "rollout.overlap is true and rollout.correction none: every batch is sampled by the policy of the "
            "previous update, and nothing would correct for that. Set rollout.correction to token_truncate."
        )
    if config.train.num_iterations > 1:
        found.append(
            f"rollout.overlap is true and train.num_iterations {config.train.num_iterations}: a batch would be up to "
            f"{config.train.num_iterations} updates old. Set train.num_iterations to 1, or rollout.overlap to false."
        )
    if config.server.sleep:
        found.append(
            "rollout.overlap and server.sleep are both true: a replica that sleeps during the update cannot generate "
            "in that time. Set one of them to false."
        )
    return found


def stop_faults(texts: Sequence[str]) -> list[str]:
    """Stop texts that no sampler can take; `kit/policy/stop_texts.py` knows those that a tokenizer cannot produce."""
    found = []
    if len(texts) > MOST_STOPS:
        found.append(f"{STOP} has {len(texts)} texts; vLLM takes at most {MOST_STOPS} in a request. Leave some out.")
    if twice := sorted({text for text in texts if [*texts].count(text) > 1}):
        found.append(f"{STOP} names {twice[0]!r} more than once. Leave one out.")
    for text in texts:
        if not text:
            found.append(f"{STOP} has an empty text, at which every completion would end. Remove it.")
        elif NO_CHARACTER in text or any(0xD800 <= ord(one) < 0xE000 for one in text):
            found.append(f"{STOP} has {text!r}, which holds no whole character and is never decoded. Remove it.")
    return found
