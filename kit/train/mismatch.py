"""How far the sampler is from the policy on the tokens it sampled, and the importance correction for it.

A server samples with other kernels and other weights (FP8) than the trainer computes with. The correction multiplies
the loss of a token by policy/sampler, capped; the metrics here say how much it corrects.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Metric -> key of metrics.jsonl; each covers one generation batch over all processes.
KEYS = (
    *("sampler_k3", "effective_sample_size"),
    *("sampler_delta_mean", "sampler_delta_p95", "sampler_delta_p99", "sampler_delta_max"),
    *("corrected_token_fraction", "corrected_sequence_fraction", "sampler_nan_count"),
)
# With `rollout.routing` compare or replay.
ROUTING_KEYS = ("sampler_routing_delta", "sampler_routing_delta_tokens")


def routing_figures(counts: "torch.Tensor") -> dict[str, float | None]:
    """Shares of (token, layer) pairs, and of tokens, for which sampler and trainer chose different experts. `counts`
    are those of `Routing`. None: nothing was compared."""
    differ, pairs, tokens_differ, tokens = counts.tolist()
    shares = differ / pairs if pairs else None, tokens_differ / tokens if tokens else None
    return dict(zip(ROUTING_KEYS, shares, strict=True))


def measure(
    policy: "torch.Tensor",
    sampler: "torch.Tensor",
    mask: "torch.Tensor",
    correction: str,
    cap: float,
    floor: float | None = None,
) -> dict[str, float | int | None]:
    """The metrics in `KEYS` for log-probs (N, T) of the same tokens and the mask (N, T) of those in the loss.

    With d = log policy - log sampler: k3 = mean(exp(d) - 1 - d), an estimate of KL(sampler || policy) that is never
    negative (Schulman 2020); |d| as mean, percentiles and maximum; the effective sample size of the uncapped token
    ratios exp(d), as a share of the tokens. The corrected shares follow trl 1.16: token_truncate caps and token_mask
    drops tokens whose ratio is outside [floor, cap]; sequence_truncate and sequence_mask do so for whole sequences,
    by the product of their ratios. A sequence counts as corrected if any of its tokens is.
    `sampler_nan_count` is the number of tokens whose sampler log-prob is not finite; they are excluded from the other
    metrics. None: no token to measure.
    """
    mask = mask.bool()
    finite = sampler.isfinite()
    figures: dict[str, float | int | None] = dict.fromkeys(KEYS)
    figures["sampler_nan_count"] = int((mask & ~finite).sum())
    usable = mask & finite
    difference = (policy.double() - sampler.double()).where(usable, 0.0)
    count = int(usable.sum())
    if not count:
        return figures
    d = difference[usable]
    ratio = d.exp()
    delta = d.abs().sort().values
    figures |= {
        "sampler_k3": (ratio - 1 - d).mean().item(),
        "effective_sample_size": (ratio.sum() ** 2 / (count * (ratio**2).sum())).item(),
        "sampler_delta_mean": delta.mean().item(),
        "sampler_delta_p95": _percentile(delta, 0.95),
        "sampler_delta_p99": _percentile(delta, 0.99),
        "sampler_delta_max": delta[-1].item(),
    }
    # Like trl, in which a token without a sampler's log-prob has ratio 1.
    whole = correction.startswith("sequence")
    ratios = (difference.sum(dim=1, keepdim=True) if whole else difference).exp()
    outside = (ratios > cap) | (ratios < (floor if floor is not None else -math.inf))
    if correction == "none":
        outside = outside & False
    touched = outside & mask  # (N, T), also for whole sequences
    figures["corrected_token_fraction"] = (touched.sum() / mask.sum()).item()
    figures["corrected_sequence_fraction"] = (touched.any(dim=1).sum() / mask.any(dim=1).sum()).item()
    return figures


def importance_ratio(
    policy: "torch.Tensor",
    sampler: "torch.Tensor",
    mask: "torch.Tensor",
    correction: str,
    cap: float,
    floor: float | None = None,
) -> "torch.Tensor":
    """Factor on the loss of a token, as in trl 1.16: policy/sampler per token (N, T) or, for whole sequences, the
    product over the row (N, 1). `*_truncate` clamps to [floor, cap], `*_mask` sets what is outside to 0. A token whose
    sampler log-prob is NaN has the ratio 1.
    """
    difference = ((policy - sampler) * mask).nan_to_num(nan=0.0)
    if correction.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    if correction.endswith("truncate"):
        return ratio.clamp(min=floor, max=cap)
    return ratio.masked_fill((ratio > cap) | (ratio < (floor if floor is not None else -math.inf)), 0.0)


def describe_fault(figures: dict[str, float | int | None], limit: float, is_ahead: bool) -> str:
    """Error text for a run that must stop at these results of `measure`; empty if they are fine. `limit` is
    `rollout.max_sampler_k3`; `is_ahead`: an earlier version sampled (`rollout.overlap`)."""
    if count := figures["sampler_nan_count"]:
        return (
            f"{count} log-probs of the sampler are not finite: its weights are damaged. Restart "
            "the replicas, then continue with --resume."
        )
    k3 = figures["sampler_k3"]
    if k3 is None or k3 <= limit:
        return ""
    fault = (
        f"the sampler is not the policy: k3 KL {k3:.4f} per token, limit rollout.max_sampler_k3 {limit}. Serve "
        "the dequantized base of this model (python -m merge base, python -m launch.server), and with an FP8 KV cache "
        "(server_kv_cache in metrics.jsonl) try server.kv_cache auto."
    )
    if is_ahead:
        fault += (
            " With rollout.overlap it includes the change of one update: if k3 rose from small values, "
            "start another run from the newest adapter (policy.init_adapter) with a lower "
            "train.learning_rate or without rollout.overlap."
        )
    return fault


def _percentile(ordered: "torch.Tensor", share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (torch.quantile stops at 16M values)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)].item()
