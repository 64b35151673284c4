"""The losses of GRPO as pure functions: tensors in, a loss and its metrics out. No trainer, no processes, no files.

    r = π(token) / π_old(token)                              `policy_ratio`; GSPO has one for a whole sequence
    s = -min(min(r, δ) A, clip(r, 1 - ε, 1 + ε_high) A)      no δ unless `train.delta` is set
    s = -min(r, ε_high) A log π(token)                       `cispo`: no gradient through the ratio
    s = -4/τ σ(τ (r - 1)) A                                  `sapo`: a soft gate instead of a clip
    each = s · π_old(token) / π_sampler(token) + β k3        `sampler_ratio`, `kl_to_reference`
    loss = Σ each / N                                        `dr_grpo`, `dapo` and `grpo` differ in N

N belongs to the whole optimizer step (`LossInputs.step_rows`, `step_tokens`), so the losses, gradients and figures of
micro-batches add up to those of the step, however its rows are cut. A number that takes all processes is an argument.

tests/unit/test_loss.py compares every option with trl 1.16's `GRPOTrainer._compute_loss`. A loss of your own
(`train.loss`, kit/README.md) has the signature of `dr_grpo`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kit.train.mismatch import importance_ratio


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a run's loss."""

    loss_type: str = "dr_grpo"
    beta: float = 0.0  # weight of the KL to the reference
    epsilon: float = 0.2  # the ratio is clipped below 1 - epsilon
    epsilon_high: float = 0.2  # and above 1 + epsilon_high
    delta: float | None = None  # upper bound of the ratio where the advantage is negative
    importance_sampling_level: str = "token"  # or sequence (GSPO)
    sapo_temperature_pos: float = 1.0  # sharpness of SAPO's gate where the advantage is positive
    sapo_temperature_neg: float = 1.05  # and elsewhere
    bias_corrected_kl: bool = False  # weight the KL by the ratio
    off_policy_threshold: float | None = None  # drop sequences of negative advantage beyond it, nats per token
    top_entropy_quantile: float = 1.0  # learn from this share of the tokens, those of the highest entropy
    entropy_coef: float = 0.0  # weight of the entropy bonus
    max_completion_length: int = 256
    correction: str = "none"  # for the sampler's mismatch: mismatch.importance_ratio
    correction_cap: float = 2.0
    correction_floor: float | None = None


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """A micro-batch of b rows, completions of at most C tokens, padded on the right."""

    logps: torch.Tensor  # (b, C) log π(token), with a gradient
    entropies: torch.Tensor  # (b, C) of the policy, nats, with a gradient
    old_logps: torch.Tensor  # (b, C) before the batch's first update
    advantages: torch.Tensor  # (b,)
    mask: torch.Tensor  # (b, C) 1 at tokens in the loss, 0 at padding and in excluded completions
    ref_logps: torch.Tensor | None = None  # (b, C) of the reference; None with beta 0
    sampler_logps: torch.Tensor | None = None  # (b, C) of the server; None: sampled in this process
    step_rows: float  # completions of this process in the optimizer step
    step_tokens: torch.Tensor | float  # tokens in the loss in the optimizer step, mean over processes; above 0
    entropy_threshold: torch.Tensor | None = None  # of all processes; None unless top_entropy_quantile is below 1


LossResult: TypeAlias = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]
LossFunction: TypeAlias = Callable[[LossInputs, LossSettings], LossResult]


def dr_grpo(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): Σ_rows Σ_tokens each / (rows · longest completion).

    The divisor is a constant, so a token of a long completion weighs as much as one of a short completion.
    """
    total = (clipped_loss(inputs, settings) * inputs.mask).sum()
    return total / (inputs.step_rows * settings.max_completion_length)


def dapo(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """DAPO (arXiv 2503.14476, equation 8): Σ_rows Σ_tokens each / tokens of the whole batch, over all processes."""
    total = (clipped_loss(inputs, settings) * inputs.mask).sum()
    return total / inputs.step_tokens


def grpo(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """GRPO (arXiv 2402.03300, equation 3): Σ_rows (Σ_tokens each / tokens of the row) / rows."""
    return _mean_of_rows(clipped_loss(inputs, settings), inputs)


def cispo(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """CISPO (arXiv 2506.13585, equation 4): `dapo` with -min(r, ε_high) A log π(token), where the capped ratio has no
    gradient, so every token keeps one. ε_high is the cap itself, not a distance from 1."""
    weight = policy_ratio(inputs, settings).clamp(max=settings.epsilon_high).detach()
    each = token_loss(-weight * inputs.advantages[:, None] * inputs.logps, inputs, settings)
    return (each * inputs.mask).sum() / inputs.step_tokens


def sapo(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """SAPO (arXiv 2511.20347, equation 5): `grpo` with -4/τ σ(τ (r - 1)) A, which fades out smoothly instead of
    clipping. τ depends on the sign of the advantage."""
    advantages = inputs.advantages[:, None]
    sharp = torch.full_like(advantages, settings.sapo_temperature_neg)
    sharp = sharp.masked_fill(advantages > 0, settings.sapo_temperature_pos)  # (b, 1)
    gate = torch.sigmoid(sharp * (policy_ratio(inputs, settings) - 1)) * 4 / sharp
    return _mean_of_rows(token_loss(-gate * advantages, inputs, settings), inputs)


def _mean_of_rows(each: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    of_rows = (each * inputs.mask).sum(dim=1)  # (b,)
    return (of_rows / inputs.mask.sum(dim=1).clamp(min=1.0)).sum() / inputs.step_rows


LOSSES: dict[str, LossFunction] = {"dr_grpo": dr_grpo, "dapo": dapo, "grpo": grpo, "cispo": cispo, "sapo": sapo}


def clipped_loss(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """The loss of every token (b, C) before averaging; (b, 1) if all tokens of a row have the same.

    PPO's clipped surrogate (arXiv 1707.06347, equation 7), with two clip bounds (DAPO's "clip higher") and, with
    `delta`, a third one (dual clip, arXiv 1912.09729), times the sampler's correction, plus the KL to the reference.
    """
    advantages = inputs.advantages[:, None]  # (b, 1)
    ratio = policy_ratio(inputs, settings)  # (b, C) or (b, 1)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    each = -torch.min(_bounded(ratio, settings) * advantages, clipped * advantages)
    return token_loss(each, inputs, settings)


def token_loss(each: torch.Tensor, inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """A surrogate loss (b, C) or (b, 1) without the tokens that the settings exclude, times the sampler's correction,
    plus the KL to the reference."""
    if settings.off_policy_threshold is not None:
        each = each * near_policy(inputs, settings.off_policy_threshold)
    if inputs.entropy_threshold is not None:
        each = each * high_entropy(inputs)
    each = each * sampler_ratio(inputs, settings)
    if settings.beta:
        each = each + settings.beta * weighted_kl(inputs, settings)
    return each


def policy_ratio(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """π / π_old per token (b, C); at sequence level the geometric mean over the row (b, 1), as in GSPO (arXiv
    2507.18071, equation 7)."""
    difference = inputs.logps - inputs.old_logps  # (b, C)
    if settings.importance_sampling_level == "sequence":
        total = (difference * inputs.mask).sum(dim=1, keepdim=True)
        difference = total / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    return difference.exp()


def _bounded(ratio: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    return ratio if settings.delta is None else ratio.clamp(max=settings.delta)


def sampler_ratio(inputs: LossInputs, settings: LossSettings) -> torch.Tensor | float:
    """π_old / π_sampler, capped or masked: (b, C), or (b, 1) for whole sequences; 1 without a correction."""
    if inputs.sampler_logps is None or settings.correction == "none":
        return 1.0
    return importance_ratio(
        *(inputs.old_logps, inputs.sampler_logps, inputs.mask),
        *(settings.correction, settings.correction_cap, settings.correction_floor),
    )


def kl_to_reference(inputs: LossInputs) -> torch.Tensor:
    """k3 = exp(d) - d - 1 with d = log π_ref - log π (b, C): an estimate of KL(π || π_ref) that is never negative
    (Schulman 2020)."""
    difference = inputs.ref_logps - inputs.logps
    return difference.exp() - difference - 1


def weighted_kl(inputs: LossInputs, settings: LossSettings) -> torch.Tensor:
    """`kl_to_reference` (b, C); with `bias_corrected_kl` times π / π_old, so that its gradient is that of the KL
    (DeepSeek-V3.2)."""
    kl = kl_to_reference(inputs)
    return kl * policy_ratio(inputs, settings) if settings.bias_corrected_kl else kl


def near_policy(inputs: LossInputs, threshold: float) -> torch.Tensor:
    """Rows (b, 1) to learn from: those with an advantage of 0 or more, and those whose sampler is within `threshold`
    nats per token of the policy (DeepSeek-V3.2, off-policy sequence masking)."""
    sampler = inputs.old_logps if inputs.sampler_logps is None else inputs.sampler_logps
    # A token without a sampler's log-prob counts as no difference.
    difference = (sampler - inputs.logps.detach()).nan_to_num(nan=0.0)  # (b, C)
    total = (difference * inputs.mask).sum(dim=1, keepdim=True)
    mean = total / inputs.mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    return (inputs.advantages[:, None] >= 0) | (mean <= threshold)


def high_entropy(inputs: LossInputs) -> torch.Tensor:
    """Tokens (b, C) in the loss whose entropy is at least `entropy_threshold` (arXiv 2506.01939)."""
    mask = inputs.mask.bool()
    return (inputs.entropies * inputs.mask >= inputs.entropy_threshold) & mask


def entropy_threshold(entropies: torch.Tensor, top_quantile: float) -> torch.Tensor:
    """The entropy that `top_quantile` of the tokens (N,) reach, 0-dim; infinite without tokens."""
    if not len(entropies):
        return entropies.new_tensor(torch.inf)
    return torch.quantile(entropies.float(), 1 - top_quantile)


def entropy_bonus(inputs: LossInputs) -> torch.Tensor:
    """A micro-batch's part of the step's mean entropy, nats per token. With an `entropy_threshold`, whose number of
    tokens is known per micro-batch only, its mean over those tokens, times its share of the step's rows."""
    if inputs.entropy_threshold is None:
        return (inputs.entropies * inputs.mask).sum() / inputs.step_tokens
    mask = inputs.mask * high_entropy(inputs)
    mean = (inputs.entropies * mask).sum() / mask.sum().clamp(min=1.0)
    return mean * (len(mask) / inputs.step_rows)


@dataclass(frozen=True)
class LossFigures:
    """Metrics of a micro-batch, on its device; `+` combines those of several.

    Reading one synchronizes with the device, so add them up and read them once per step.
    """

    names: tuple[str, ...]
    totals: torch.Tensor  # (F, 2) for each mean: the sum, and the number of tokens or rows
    # (2,) The lowest share of tokens in a row that are clipped low, the highest of those clipped high; NaN: no row.
    extremes: torch.Tensor

    def __add__(self, other: "LossFigures") -> "LossFigures":
        if self.names != other.names:
            raise ValueError(f"micro-batches have different metrics: {', '.join({*self.names} ^ {*other.names})}.")
        extremes = _join_extremes(torch.stack([self.extremes, other.extremes]))
        return LossFigures(self.names, self.totals + other.totals, extremes)

    def read(self) -> dict[str, float]:
        """{TRL's name: value}."""
        sums, counts = self.totals.unbind(dim=1)
        found = dict(zip(self.names, (sums / counts.where(counts > 0, 1.0)).tolist(), strict=True))
        if "clip_ratio/low_mean" not in found:  # cispo, sapo
            return found
        low, high = _join_extremes(self.extremes.view(-1, 2)).tolist()  # of several processes, if gathered
        return found | {"clip_ratio/low_min": low, "clip_ratio/high_max": high}


def _join_extremes(extremes: torch.Tensor) -> torch.Tensor:
    """Reduce (N, 2) to (2,), ignoring NaN."""
    low, high = extremes.unbind(dim=-1)
    ends = torch.stack([low.nan_to_num(nan=torch.inf).min(), high.nan_to_num(nan=-torch.inf).max()])
    return ends.where(ends.isfinite(), torch.nan)


@torch.no_grad()
def measure_loss(
    inputs: LossInputs, settings: LossSettings, others: Mapping[str, torch.Tensor] | None = None
) -> LossFigures:
    """KL, entropy and clip fractions; `others` {name: (b, C), (b, 1) or (b,)} are averaged the same way."""
    mask, advantages = inputs.mask, inputs.advantages[:, None]
    tokens, rows = mask.sum(), torch.ones(len(mask), device=mask.device).sum()

    def total(values: torch.Tensor) -> torch.Tensor:
        """(2,) Sum and number over tokens of (b, C), over rows of (b, 1)."""
        of_rows = values.size(1) == 1 and mask.size(1) != 1
        pair = (values.sum(), rows) if of_rows else ((values * mask).sum(), tokens)
        return torch.stack([one.float() for one in pair])

    def of_rows(values: torch.Tensor) -> torch.Tensor:
        """(b,) The mean of each row; NaN for one without tokens."""
        if settings.importance_sampling_level == "sequence":
            return values[:, 0]
        return (values * mask).sum(dim=1) / mask.sum(dim=1)

    ratio = _bounded(policy_ratio(inputs, settings), settings)
    low = ((ratio < 1 - settings.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + settings.epsilon_high) & (advantages > 0)).float()
    found = {"kl": total(weighted_kl(inputs, settings))} if settings.beta else {}
    found["entropy"] = total(inputs.entropies)
    if settings.loss_type == "cispo":
        found["cispo_clip_ratio"] = total(((ratio > settings.epsilon_high) & (advantages > 0)).float())
    elif settings.loss_type != "sapo":
        for name, values in (("low", low), ("high", high), ("region", low + high)):
            found[f"clip_ratio/{name}_mean"] = total(values)
    for name, values in (others or {}).items():
        found[name] = total(values.detach() if values.dim() == 2 else values.detach()[:, None])
    extremes = _join_extremes(torch.stack([of_rows(low), of_rows(high)], dim=1))
    return LossFigures((*found,), torch.stack([*found.values()]), extremes)


def compute_loss(
    inputs: LossInputs, settings: LossSettings, function: LossFunction | None = None
) -> tuple[torch.Tensor, LossFigures]:
    """A micro-batch's part of the step's loss, 0-dim with a gradient, and its metrics.

    `function` replaces the one of `settings.loss_type`. The entropy bonus is added to either.
    """
    result = (function or LOSSES[settings.loss_type])(inputs, settings)
    loss, others = result if isinstance(result, tuple) else (result, {})
    figures = measure_loss(inputs, settings, others)
    if not settings.entropy_coef:
        return loss, figures
    value = loss.detach().float()
    policy = torch.stack([value, torch.full_like(value, len(inputs.mask) / inputs.step_rows)])
    figures = LossFigures(("policy_loss", *figures.names), torch.cat([policy[None], figures.totals]), figures.extremes)
    return loss - settings.entropy_coef * entropy_bonus(inputs), figures
