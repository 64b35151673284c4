"""Which groups teach nothing: all their completions got one reward."""

import math

import torch


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
