"""Settings that conflict with `train.recompute`, and the layers that it recomputes. Imports no torch."""

from kit.core.config.schema import Config
from kit.core.config.sharding_rules import ZERO3

# Model types whose layers end with a residual plus the MLP's output: nothing between needs down_proj's output again.
ENDS_WITH_RESIDUAL = ("llama", "mistral", "qwen2", "qwen3")


def faults(config: Config, splits: str | None) -> list[str]:
    """Settings of `train.recompute` that cannot work; `splits` is what `sharding_rules.announced` returns."""
    train, found = config.train, []
    if not 0 < train.recompute_fraction <= 1:
        found.append(
            f"train.recompute_fraction ({train.recompute_fraction:g}) must be above 0 and at most 1. For no layer at "
            "all set train.recompute to none."
        )
    elif train.recompute_fraction != 1 and train.recompute in ("none", "auto"):
        why = "applies to no layer" if train.recompute == "none" else "chooses a share itself"
        found.append(
            f"train.recompute_fraction ({train.recompute_fraction:g}) has no effect: train.recompute is "
            f"{train.recompute}, which {why}. Leave train.recompute_fraction out, or set train.recompute to full or "
            "selective."
        )
    given = train.trl.get("gradient_checkpointing_kwargs") or {}
    if not isinstance(given, dict):
        return [*found, f"train.trl.gradient_checkpointing_kwargs must be a group of keys, it is {given!r:.60}."]
    for key, ours in (("every_n_layers", "recompute_fraction"), ("offload", "recompute_offload")):
        if key in given:
            found.append(f"train.trl.gradient_checkpointing_kwargs.{key}: set train.{ours} instead.")
    if why := reentrant_because(config, splits):
        if train.recompute == "selective":
            found.append(
                f"train.recompute is selective, and {why} uses a checkpoint that cannot be selective. Use full."
            )
        if train.recompute_offload:
            found.append(f"train.recompute_offload was not tested with {why}. Remove it.")
    if train.recompute_offload and train.recompute == "none":
        found.append("train.recompute_offload moves what train.recompute keeps, which is none. Set it to full.")
    return found


def reentrant_because(config: Config, splits: str | None) -> str | None:
    """What makes torch's checkpoints reentrant, which keep nothing selectively; None if they are not."""
    given = config.train.trl.get("gradient_checkpointing_kwargs") or {}
    if splits == ZERO3:
        return ZERO3
    return "use_reentrant" if given.get("use_reentrant") else None


def recomputed_layers(layers: int, fraction: float) -> list[int]:
    """Indices of the decoder layers to recompute: the share `fraction` of them, rounded up, evenly spread."""
    chosen = -int(-layers * fraction // 1)
    return [n for n in range(layers) if (n + 1) * chosen // layers > n * chosen // layers]
