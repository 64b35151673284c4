"""Speculative decoding of a replica: what it drafts, why its samples would not be the policy's, what was accepted.

An n-gram draft is one token x at each position. vLLM's rejection sampler accepts it with probability p(x) and samples
from p without x otherwise: the tokens are those of p, whatever is drafted. With `processed_logprobs` it returns log p
at the sampling temperature for accepted, recovered and bonus tokens alike. Read in vllm 0.26 and 0.31; other ways to
draft and to verify were not.
"""

from typing import Any

from kit.rollout.protocol import Drafted, Speculation
from kit.rollout.server.vllm_types import VllmConfig

OURS = "kit.rollout.server."  # worker extensions that correct vLLM's sampler for CPUs (cpu_sampler.py)
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
GENERATED = "vllm:generation_tokens"


def described(config: VllmConfig) -> Speculation | None:
    """Settings of the server's speculative decoding; None without it."""
    if (one := _of(config)) is None:
        return None
    return Speculation(
        method=str(one.method),
        draft_tokens=int(one.num_speculative_tokens),
        ngram_min=int(one.prompt_lookup_min or 0),
        ngram_max=int(one.prompt_lookup_max or 0),
    )


def fault(config: VllmConfig) -> str | None:
    """Error text if drafts would change the sampled distribution or its log-probs; None if they would not."""
    if (one := _of(config)) is None:
        return None
    if one.method != "ngram":
        return (
            f"it drafts by {one.method}; only n-gram drafts (server.speculation ngram) were compared with the policy"
        )
    if (way := getattr(one, "rejection_sample_method", "standard")) != "standard":
        return f"it verifies drafts by {way} rejection sampling, which was not compared with the policy"
    if config.model_config.is_hybrid:
        return "it drafts for a model with recurrent layers, whose state vLLM does not take back (vllm#52942)"
    if config.device_config.device_type == "cpu" and not config.parallel_config.worker_extension_cls.startswith(OURS):
        return "vLLM's rejection sampler for CPUs reads uninitialized memory, and no worker extension corrects it"
    return None


def drafted() -> Drafted | None:
    """Tokens that this server has drafted, accepted and generated since its start, by vLLM's own counters; None if it
    keeps none (`disable_log_stats`)."""
    from prometheus_client import REGISTRY

    sums: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if metric.name in (DRAFTED, ACCEPTED, GENERATED):
            sums[metric.name] = sum(one.value for one in metric.samples if one.name.endswith("_total"))
    if DRAFTED not in sums:
        return None
    return Drafted(drafted=int(sums[DRAFTED]), accepted=int(sums[ACCEPTED]), generated=int(sums.get(GENERATED, 0)))


def _of(config: VllmConfig) -> Any:
    return getattr(config, "speculative_config", None)
