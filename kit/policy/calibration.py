"""Set the input ranges of formats with static activations: calibrate over kit/data/calibration_prompts.py, or restore
those of `policy.init_adapter`."""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kit.core.config.schema import Config
from kit.core.errors import CheckFailed

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # token ids (B, L), mask of real tokens (B, L)


def batches(prompts: list[list[int]], size: int, device: "torch.device | str") -> Iterator[Batch]:
    """Yield batches of `size` prompts of similar lengths, padded on the right."""
    import torch

    prompts = sorted((ids for ids in prompts if ids), key=len)
    for start in range(0, len(prompts), size):
        rows = prompts[start : start + size]
        length = max(map(len, rows))
        ids = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=device)
        real = torch.tensor([[n < len(row) for n in range(length)] for row in rows], device=device)
        yield ids, real


def set_input_ranges(config: Config, model: "PeftModel", prompts: list[list[int]]) -> str:
    """Calibrate the initial policy over `prompts` (token ids), or restore the ranges of `policy.init_adapter` if it
    was trained for a format; return a one-line summary."""
    from kit.core.run_directory import manifest_as_written
    from kit.policy.quantized_linear import restore_quantizers

    start = config.policy.init_adapter
    if start and manifest_as_written(Path(start)).get("quant_cfg"):
        restore_quantizers(model, start)
        return f"input ranges of {start}"
    state = calibrate(model, batches(prompts, config.policy.quant_batch_size, model.device))
    peaks = sorted(peak.item() for peak in state.values())
    tokens = sum(map(len, prompts))
    return (
        f"calibrated {len(peaks)} layers over {len(prompts)} prompts, {tokens:,} tokens: largest |input| "
        f"{peaks[0]:.3g} to {peaks[-1]:.3g}"
    )


def calibrate(model: "PeftModel", batches: Iterable[Batch]) -> "dict[str, torch.Tensor]":
    """Measure the input ranges of formats with static activations and return the state; empty for other formats.

    A range is the largest |input| of a layer of the current model, with its quantizers off, over batches
    padded on the right. `CheckFailed` if a layer gets no input or one that is not
    finite.
    """
    import torch

    from kit.policy.quantized_linear import (
        AMAX,
        load_quantizer_state,
        quantized_layers,
        quantizer_state,
        quantizers_of,
        quantizers_off,
    )
    from kit.weights.frozen_base import plain_name

    quantizers = quantizers_of(model)
    if quantizers is None or not quantizers.fmt.needs_calibration:
        return {}
    layers = quantized_layers(model)
    peaks: dict[str, torch.Tensor] = {}
    now: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        peak = inputs[0][now["real"]].abs().amax().float()
        peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

    hooks = [one.register_forward_pre_hook(functools.partial(watch, name)) for name, one in layers.items()]
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model  # no output layer
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad(), quantizers_off(model):
            for ids, now["real"] in batches:
                backbone(input_ids=ids, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    bad = [name for name in layers if name not in peaks or not 0 < peaks[name].item() < float("inf")]
    if bad:
        raise CheckFailed(
            f"{len(bad)} of {len(layers)} layers have no usable input over the calibration prompts (first: "
            f"{plain_name(bad[0])}). Calibrate with other prompts (policy.quant_calib_data), or use a format that "
            "needs none: fp8, nvfp4a16, w4a16."
        )
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        everyone = torch.stack([peaks[name] for name in layers])  # equal up to rounding on other devices
        torch.distributed.all_reduce(everyone, op=torch.distributed.ReduceOp.MAX)
        peaks = dict(zip(layers, everyone.unbind(), strict=True))
    load_quantizer_state(model, {f"{plain_name(name)}{AMAX}": peak for name, peak in peaks.items()})
    return quantizer_state(model)
