"""Rows of a step: TRL's dictionary of a batch, prompts padded on the left and completions on the right."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

# What a batch's first forward leaves with its rows, for further updates with them.
KEPT = ("old_per_token_logps", "ref_per_token_logps")


def take_rows(inputs: dict, rows: list[int]) -> dict:
    """Some rows of a batch; an entry of the whole batch stays."""
    index = torch.tensor(rows, device=inputs["completion_ids"].device)
    return {key: value[index] if torch.is_tensor(value) and value.ndim else value for key, value in inputs.items()}


def keep_scores(inputs: dict, parts: list[dict], plan: list[list[int]]) -> None:
    """Copy `KEPT` from micro-batches `parts`, rows `plan` of the batch, to `inputs`, in its order."""
    order = torch.tensor([row for rows in plan for row in rows]).argsort()
    for key in KEPT:
        if key in parts[0]:
            inputs[key] = torch.cat([part[key] for part in parts])[order]


def whole_rows(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (b, W) of prompts and completions."""
    return tuple(torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))


def takes_positions(policy: Any) -> bool:
    """Whether the model under the adapter takes `position_ids`. Models with ALiBi count by the attention mask."""
    return "position_ids" in inspect.signature(type(policy.get_base_model()).forward).parameters


def padded_positions(mask: torch.Tensor) -> torch.Tensor:
    """Position (B, T) of every token, 0 at a row's first real one; `mask` (B, T) is 0 at padding."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def with_positions(model: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """`model`, called with the positions of its rows too; `policy` is the same without wrappers.

    A padded row counts from its first real token, as a sampler and a pack do. TRL passes no positions, so they would
    count from the padding, and in BF16 rotary embeddings of shifted positions are not the same.
    """
    if not takes_positions(policy):
        return model
    return lambda **inputs: model(**inputs, position_ids=padded_positions(inputs["attention_mask"]))
