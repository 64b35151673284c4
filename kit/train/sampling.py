"""Rows of a step, prompts and completions, as the tensors that its loss reads.

The entries have TRL's names (trl 1.16), whose buffer hands the rows to the accumulation steps.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.trainer.utils import nanstd

from kit.policy.routing import UNKNOWN
from kit.rollout.policy_view import Rollouts


def row_tensors(
    prompt_ids: list[list[int]],
    rollouts: Rollouts,
    truncated: list[bool],
    padding: int,
    multiple: int | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Ids and masks of prompts, padded on the left, and of completions, padded on the right, both to a `multiple`;
    completions that are `truncated` are masked."""

    def padded(rows: list[list], value: float, side: str, dtype: type = np.int64) -> torch.Tensor:
        return torch.from_numpy(padded_rows(rows, value, side, multiple or 1, dtype)).to(device)

    found = {}
    for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", rollouts.token_ids, "right")):
        found[f"{name}_ids"] = padded(rows, padding, side)
        found[f"{name}_mask"] = padded([np.ones(len(row), np.int64) for row in rows], 0, side)
    if any(truncated):
        kept = ~torch.tensor(truncated, device=device)
        found["completion_mask"] = found["completion_mask"] * kept.unsqueeze(1).int()
    if rollouts.episodes is not None:
        found["sampled_mask"] = padded([one.sampled for one in rollouts.episodes], 0, "right")
    if rollouts.logps is not None:
        found["sampling_per_token_logps"] = padded(rollouts.logps, 0.0, "right", np.float32)
    if rollouts.experts is not None:
        width = found["prompt_ids"].shape[1], found["completion_ids"].shape[1]
        found["sampling_experts"] = expert_rows(rollouts.experts, [len(ids) for ids in prompt_ids], *width).to(device)
    return found


def padded_rows(
    rows: list[list] | list[np.ndarray], value: float, side: str, multiple: int, dtype: type
) -> np.ndarray:
    """Rows of numbers as (B, W) of a dtype, filled up with `value` on the left or right `side` to the longest, rounded
    up to a `multiple`: what TRL's `pad` makes of a tensor per row, without these."""
    width = max(map(len, rows))
    found = np.full((len(rows), -(-width // multiple) * multiple), value, dtype)
    for line, row in zip(found, rows, strict=True):
        if len(row):
            line[slice(-len(row), None) if side == "left" else slice(len(row))] = row
    return found


def expert_rows(experts: list[np.ndarray], prompts: list[int], before: int, after: int) -> torch.Tensor:
    """Experts (B, W, L, k) int16 of rows of `before` columns for prompts, padded on the left, and `after` for
    completions; `experts` are those of each row's tokens (T, L, k), `prompts` the rows' prompt tokens."""
    found = torch.full((len(experts), before + after, *experts[0].shape[1:]), UNKNOWN, dtype=torch.int16)
    for row, (own, length) in enumerate(zip(experts, prompts, strict=True)):
        found[row, before - length : before - length + len(own)] = torch.from_numpy(own.astype(np.int16))
    return found


def sampled_lengths(rollouts: Rollouts) -> list[int]:
    """Tokens of each completion that the model wrote."""
    if rollouts.episodes is not None:
        return [sum(one.sampled) for one in rollouts.episodes]
    return [len(ids) for ids in rollouts.token_ids]


def log_lengths(
    metrics: Mapping[str, list[float]],
    accelerator: Accelerator,
    rollouts: Rollouts,
    truncated: list[bool],
) -> None:
    """Log the lengths of the completions in tokens that the model wrote, over all processes, as TRL does."""
    lengths = torch.tensor(sampled_lengths(rollouts), device=accelerator.device)
    cut = torch.tensor(truncated, device=accelerator.device)
    lengths, cut = accelerator.gather(lengths).float(), accelerator.gather(cut)
    ended = lengths[~cut] if not cut.all() else lengths.new_zeros(1)
    for name, values in (("", lengths), ("_terminated", ended)):
        for how, value in (("mean", values.mean()), ("min", values.min()), ("max", values.max())):
            metrics[f"completions/{how}{name}_length"].append(value.item())
    metrics["completions/clipped_ratio"].append(cut.float().mean().item())


def log_rewards(
    metrics: Mapping[str, list[float]], names: list[str], rewards: torch.Tensor, weights: torch.Tensor
) -> None:
    """Log mean and deviation of rewards (N, functions) by function, and of their weighted sum, as TRL does."""
    for name, values in zip(names, rewards.unbind(dim=1), strict=True):
        metrics[f"rewards/{name}/mean"].append(values.nanmean().item())
        metrics[f"rewards/{name}/std"].append(nanstd(values).item())
    summed = (rewards * weights.to(rewards.device)).nansum(dim=1)
    summed = summed.masked_fill(rewards.isnan().all(dim=1), torch.nan)
    metrics["reward"].append(summed.nanmean().item())
    metrics["reward_std"].append(nanstd(summed).item())


def log_pending(metrics: Mapping[str, list[float]], pending: dict[str, list[float]], accelerator: Accelerator) -> None:
    """Log the means over all processes of what reward functions passed to TRL's `log_metric`."""
    for name in sorted(set(gather_object(list(pending)))):
        values = pending.get(name, [])
        mine = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=accelerator.device)
        total, count = accelerator.gather(mine).view(-1, 2).sum(dim=0).tolist()
        metrics[name].append(total / count)
    pending.clear()


def completion_messages(tokenizer: Any, prompt_ids: list[list[int]], token_ids: list[list[int]]) -> list[list[dict]]:
    """The completions as messages, parsed if the tokenizer has a response schema."""
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        from trl.chat_template_utils import parse_response

        pairs = zip(token_ids, prompt_ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prefix)] for ids, prefix in pairs]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]
