"""Speculative decoding of a replica: what it drafts, why its samples would not be the policy's, what was accepted.

A draft is one token x at each position: of n-grams, of suffix trees (Arctic Inference's), and of a model whose own
most likely token it is (vLLM's `draft_sample_method` greedy). vLLM's rejection sampler accepts it with probability
p(x) and samples from p without x otherwise: the tokens are those of p, whatever is drafted. With `processed_logprobs`
it returns log p at the sampling temperature for accepted, recovered and bonus tokens alike. Read in vllm 0.26 and
0.31, in the first model runner and without async scheduling; other ways to draft and to verify were not.
"""

from typing import Any

from kit.core.config.speculation_rules import BY_MODEL
from kit.rollout.protocol import Drafted, Speculation
from kit.rollout.server.vllm_types import VllmConfig

OURS = "kit.rollout.server."  # worker extensions that correct vLLM's sampler for CPUs (cpu_sampler.py)
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
GENERATED = "vllm:generation_tokens"
SHOWN = ("ngram", "suffix", *BY_MODEL)  # methods that were compared with the policy
# Settings of `speculative_config`, the values that were compared with the policy, and what others do.
COMPARED = {
    "rejection_sample_method": ("standard", "verifies drafts by {} rejection sampling"),
    "draft_sample_method": ("greedy", "samples its drafts ({})"),
    "use_heterogeneous_vocab": (False, "drafts in another vocabulary"),
    "parallel_drafting": (False, "drafts all tokens in one pass"),
    "num_speculative_tokens_per_batch_size": (None, "drafts {} tokens by the size of the batch"),
}


def described(config: VllmConfig) -> Speculation | None:
    """Settings of the server's speculative decoding; None without it."""
    if (one := _of(config)) is None:
        return None
    return Speculation(
        method=str(one.method),
        draft_tokens=int(one.num_speculative_tokens),
        ngram_min=int(one.prompt_lookup_min or 0),
        ngram_max=int(one.prompt_lookup_max or 0),
        model=str(one.model) if one.method in BY_MODEL else None,
    )


def fault(config: VllmConfig) -> str | None:
    """Error text if drafts would change the sampled distribution or its log-probs; None if they would not."""
    if (one := _of(config)) is None:
        return None
    if one.method not in SHOWN:
        return f"it drafts by {one.method}; only drafts of {', '.join(SHOWN)} were compared with the policy"
    for key, (value, what) in COMPARED.items():
        if (found := getattr(one, key, value)) != value:
            return f"it {what.format(found)}, which was not compared with the policy"
    if getattr(config, "use_v2_model_runner", False):
        return "it drafts in vLLM's second model runner, whose sampler was not compared with the policy"
    if getattr(config.scheduler_config, "async_scheduling", False):
        return "it drafts with async scheduling, which was not compared with the policy"
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
