"""Rows of a step: TRL's dictionary of a batch, prompts padded on the left and completions on the right."""

import inspect

import torch
from accelerate import Accelerator

from kit.policy.packed.sequence_parallel import SequenceGroup, all_gathered
from kit.policy.routing import Routing, routed

# Entries that a batch's first forward adds to its rows, for further updates with them.
KEPT = ("old_per_token_logps", "ref_per_token_logps")
PACK = "pack"  # of a micro-batch: how these rows are packed, and no others


def take_rows(inputs: dict, rows: list[int] | torch.Tensor) -> dict:
    """Select rows of a batch; entries that are not per row are kept, except its pack."""
    index = torch.as_tensor(rows, device=inputs["completion_ids"].device)
    values = {key: value for key, value in inputs.items() if key != PACK}
    return {key: value[index] if torch.is_tensor(value) and value.ndim else value for key, value in values.items()}


def keep_scores(inputs: dict, parts: list[dict], plan: list[list[int]]) -> None:
    """Copy `KEPT` from micro-batches `parts` (rows `plan` of the batch) back to `inputs`, in its order."""
    order = torch.tensor([row for rows in plan for row in rows]).argsort()
    for key in KEPT:
        if key in parts[0]:
            inputs[key] = torch.cat([part[key] for part in parts])[order]


def shared_rows(inputs: dict, group: SequenceGroup) -> dict:
    """The rows (B, ...) of all processes of the group, (N·B, ...) in the order of their ranks, padded to the widest:
    prompts on the left, all else on the right."""
    rows, shared = len(inputs["completion_ids"]), {}
    for key, value in inputs.items():
        if not torch.is_tensor(value) or not value.ndim or len(value) != rows:
            shared[key] = value
            continue
        if value.ndim == 2:
            widths = all_gathered(torch.tensor([value.size(1)], device=value.device), group)
            missing = int(torch.cat(widths).max()) - value.size(1)
            value = torch.nn.functional.pad(value, (missing, 0) if key.startswith("prompt_") else (0, missing))
        kind = value.dtype
        together = torch.cat(all_gathered(value.byte() if kind == torch.bool else value, group))
        shared[key] = together.to(kind)
    return shared


def keep_own_scores(inputs: dict, shared: dict, group: SequenceGroup) -> None:
    """Copy `KEPT` of this process's rows from `shared_rows` back to `inputs`."""
    rows, columns = inputs["completion_ids"].shape
    for key in KEPT:
        if key in shared:
            inputs[key] = shared[key][group.rank * rows : (group.rank + 1) * rows, :columns]


def whole_rows(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask (b, W) of prompts and completions."""
    return tuple(torch.cat([inputs[f"prompt_{of}"], inputs[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))


def loss_mask(inputs: dict) -> torch.Tensor:
    """(b, C) 1 at the tokens in the loss: those of completions, except what an environment wrote."""
    sampled = inputs.get("sampled_mask")
    return inputs["completion_mask"] if sampled is None else inputs["completion_mask"] * sampled


def takes_positions(policy: torch.nn.Module) -> bool:
    """Whether the model under the adapter takes `position_ids`. Models with ALiBi use the attention mask instead."""
    return "position_ids" in inspect.signature(type(policy.get_base_model()).forward).parameters


def padded_positions(mask: torch.Tensor) -> torch.Tensor:
    """Position (B, T) of every token, 0 at a row's first real one; `mask` (B, T) is 0 at padding."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def padded_logps(
    accelerator: Accelerator,
    model: torch.nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    columns: int,
    compute_entropy: bool,
    routing: Routing | None = None,
    field: str = "entropy",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and, if requested, entropies (b, C) of the last C = `columns` of padded rows (b, W), by TRL's fused
    head; `field` is another of its outputs in the place of the entropy.

    Positions count from a row's first real token, as in a sampler and a pack: in BF16, rotary embeddings of shifted
    positions differ. `routing` has the experts of all b·W tokens.
    """
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-columns] = -100
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if takes_positions(accelerator.unwrap_model(model)):
        given["position_ids"] = padded_positions(mask)
    with accelerator.autocast(), routed(routing):
        output = model(**given, fused_lm_head=True)
    return output.log_probs[:, -columns:], getattr(output, field)[:, -columns:] if compute_entropy else None
