"""The adapter's dropout (`policy.lora_dropout`): active in the forward and backward pass of the loss and nowhere else.

Completions are sampled, held-out problems are answered and reference log-probs are computed without it: the policy is
the model without dropout. Old log-probs come from the loss's own first forward, so the importance ratio of a batch's
first update is exactly 1. A further update with the same batch (`train.num_iterations`) drops the same entries again,
so its ratio reflects the previous update, not another draw of the mask.
"""

import contextlib
from collections.abc import Iterator

import torch

SEED = "dropout_seed"  # key in a batch, next to TRL's own entries


def adapter_dropouts(model: torch.nn.Module) -> list[torch.nn.Dropout]:
    """The adapter's dropout layers; empty with `policy.lora_dropout` 0."""
    return [
        module
        for name, module in model.named_modules()
        if "lora_dropout" in name.split(".") and isinstance(module, torch.nn.Dropout) and module.p
    ]


@contextlib.contextmanager
def turned_off(dropouts: list[torch.nn.Dropout]) -> Iterator[None]:
    """Disable these dropout layers within the block, in training mode too."""
    rates = [layer.p for layer in dropouts]
    try:
        for layer in dropouts:
            layer.p = 0.0
        yield
    finally:
        for layer, rate in zip(dropouts, rates, strict=True):
            layer.p = rate


def seed_of(batch: dict) -> int:
    """Seed of the batch's dropout masks, drawn from torch's generator on the first call."""
    if SEED not in batch:
        batch[SEED] = int(torch.randint(2**31, ()))
    return batch[SEED]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch within the block and restore its generators on exit. A checkpointed layer that is recomputed in the
    backward pass restores the state of its first run by itself."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
