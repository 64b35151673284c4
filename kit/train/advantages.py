"""Advantages of GRPO from the rewards of all processes: tensors in, tensors out.

Equal to those of trl 1.16, except that a group with equal rewards gets exactly 0: TRL subtracts a mean with a rounding
error (eight times 0.7), and Adam turns the residue into full-size steps.
"""

import math

import torch
from trl.trainer.utils import nanstd


def group_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, group_size: int, scale: str, are_summed: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (N,) of rewards (N, functions), NaN where none was computed, and which groups (N / group_size,) have
    no signal.

    `are_summed`: the weighted sum of a completion's rewards is compared within its group, and divided by the deviation
    of the group or the batch as `scale` says; otherwise each function's reward is normalized first (GDPO, arXiv
    2601.05242). A completion without any reward has the advantage 0.
    """
    weights = weights.to(rewards.device)
    unknown = rewards.isnan().all(dim=1)

    def total(each: torch.Tensor) -> torch.Tensor:
        summed = (each * weights).nansum(dim=1)  # (N,)
        return summed.masked_fill(unknown, torch.nan)

    if are_summed:
        summed = total(rewards)
        groups = summed.view(-1, group_size)
        advantages = summed - groups.nanmean(dim=1).repeat_interleave(group_size)
        if scale == "group":
            advantages = advantages / (nanstd(groups, dim=1).repeat_interleave(group_size) + 1e-4)
        elif scale == "batch":
            advantages = advantages / (nanstd(summed) + 1e-4)
    else:
        grouped = rewards.view(-1, group_size, rewards.size(1))
        normed = (grouped - grouped.nanmean(dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
        summed = total(normed.view(rewards.shape))
        advantages = (summed - summed.nanmean()) / (nanstd(summed) + 1e-4)
    flat = find_flat_groups(rewards, weights, group_size, are_summed)
    return advantages.nan_to_num(nan=0.0).masked_fill(flat.repeat_interleave(group_size), 0.0), flat


def subtract_kl(
    rewards: torch.Tensor, weights: torch.Tensor, kl: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards (N, functions + 1) and weights whose weighted sum is the reward minus `beta` times the completion's KL
    (N,). A completion without any reward gets none."""
    cost = (-kl).masked_fill(rewards.isnan().all(dim=1), torch.nan)
    beta_weight = torch.tensor([beta], dtype=weights.dtype, device=weights.device)
    return torch.cat([rewards, cost[:, None].to(rewards)], dim=1), torch.cat([weights, beta_weight])


def find_flat_groups(
    rewards: torch.Tensor, weights: torch.Tensor, group_size: int, are_summed: bool = True
) -> torch.Tensor:
    """Groups (N / group_size,) whose rewards are equal, from rewards (N, functions) with NaN where none was computed.

    `are_summed`: the weighted sum is what a group's advantages come from; otherwise each function's reward. A function
    of weight 0 is only measured. A group without any reward is not flat.
    """
    weights = weights.to(rewards.device)
    rewards, weights = rewards[:, weights != 0], weights[weights != 0]
    unknown = rewards.isnan().any(dim=1, keepdim=True)
    if are_summed:
        rewards = (rewards * weights).sum(dim=1, keepdim=True)
    low, high = (
        rewards.masked_fill(unknown, end).view(-1, group_size, rewards.size(1)) for end in (math.inf, -math.inf)
    )
    return (low.amin(dim=1) == high.amax(dim=1)).all(dim=1)
