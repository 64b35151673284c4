"""Split the base over the trainer's processes with FSDP2 or DeepSpeed ZeRO-3.

Written for accelerate 1.15, torch 2.13 and deepspeed 0.19.8. Each process loads and quantizes the whole base, hashes
it, and keeps its part of every tensor. accelerate's settings in the environment are checked before anything is loaded
(`faults`), and what it made of them before the first step (`prepare`).
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kit.core.config.sharding_rules import FSDP2, ZERO3, announced, offloading_faults, refused
from kit.core.errors import BadInput

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from peft import PeftModel
    from transformers import TrainingArguments

# Settings that DeepSpeed derives from the model's hidden size if "auto". Its own defaults are a gradient buffer of
# 1 GiB, and matrices of up to 100,000 entries that are never split.
ZERO3_SIZES = ("reduce_bucket_size", "stage3_param_persistence_threshold")


def quant_storage() -> "torch.dtype":
    """Storage dtype of the base's packed bytes: FSDP2 splits only floating-point tensors, and casts all but
    bfloat16."""
    import torch

    return torch.bfloat16 if announced() == FSDP2 else torch.uint8


@contextlib.contextmanager
def loading_whole(arguments: "TrainingArguments") -> Iterator[None]:
    """Build models whole within the block: once transformers 5.17 knows of ZeRO-3, it splits each as it is made."""
    plugin = arguments.deepspeed_plugin
    if plugin is None or announced() != ZERO3:
        yield
        return
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def prepare(accelerator: "Accelerator", model: "PeftModel") -> str | None:
    """Return how `accelerator` will split `model`, the policy before wrapping; `BadInput` for a way that does not
    work, wherever it was requested.

    Also sets options that have no key in an accelerate config.
    """
    plugin, parallel = accelerator.state.deepspeed_plugin, accelerator.parallelism_config
    kind = {"FSDP": FSDP2, "MEGATRON_LM": "Megatron-LM"}.get(accelerator.distributed_type.value)
    if kind is None and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        kind = FSDP2
    if parallel is not None and (parallel.tp_enabled or parallel.dp_shard_enabled or parallel.cp_enabled):
        raise BadInput(refused("accelerate's parallelism_config"))
    if plugin is not None and plugin.deepspeed_config["zero_optimization"]["stage"] == 3:
        kind = ZERO3
    if kind != announced():
        if kind is None:
            raise BadInput(f"{announced()} is asked for and accelerate does not do it here: it takes several GPUs.")
        raise BadInput(refused(kind))
    if kind == ZERO3:
        settings = plugin.deepspeed_config["zero_optimization"]
        if offloading := offloading_faults(settings):
            raise BadInput("\n".join(offloading))
        for name in ZERO3_SIZES:
            settings.setdefault(name, "auto")
        settings["stage3_prefetch_bucket_size"] = 0  # see `gather_in_any_order`
        # deepspeed 0.19.8 calls functions that torch 2.13 has renamed, which warns several times a step.
        warnings.filterwarnings("ignore", message=r".torch\.distributed\.\w+_tensor. is deprecated")
        _gather_by_decoder_layer(model)
    if kind == FSDP2:
        _prepare_fsdp2(accelerator, model)
    return kind


def _gather_by_decoder_layer(model: "PeftModel") -> None:
    """Make ZeRO-3 gather a decoder layer's parameters as it begins, not those of each module in it.

    Fused and quantized layers compute for each other, and gathers for each module take most of an update."""
    from deepspeed.utils import set_z3_leaf_modules

    base = model.get_base_model()
    set_z3_leaf_modules(model, list(base._no_split_modules))
    # DeepSpeed takes a layer's gradients once that of its input is there; without one, before they are.
    base.enable_input_require_grads()


def gather_in_any_order(engine: "torch.nn.Module") -> None:
    """Let ZeRO-3 gather each layer as it begins, whatever it gathered in the pass before.

    DeepSpeed records the order of a pass, gathers ahead by it and ends the run when a pass with the same modules reads
    other parameters of them, as the fused output layer does after a pass that scores the canary.
    """
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    reset = coordinator.reset_step

    def forget_order() -> None:
        reset()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()

    coordinator.reset_step = forget_order


def release_after_backward(engine: "torch.nn.Module") -> None:
    """Let ZeRO-3 release a decoder layer as soon as its backward pass is over.

    DeepSpeed lets the module around a recomputed layer keep the frozen parameters that the recomputation gathered, so
    that at the end of a backward pass every process would hold the whole base.
    """
    from deepspeed.utils import z3_leaf_module

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    release = coordinator.release_sub_module

    def release_layer(module: "torch.nn.Module", forward: bool = False) -> None:
        if not forward and z3_leaf_module(module):
            for parameter in module.parameters():
                parameter.ds_active_sub_modules.clear()
        release(module, forward)

    coordinator.release_sub_module = release_layer


def _prepare_fsdp2(accelerator: "Accelerator", model: "PeftModel") -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if accelerator.mixed_precision not in ("no", "bf16"):
        raise BadInput(
            f"mixed_precision is {accelerator.mixed_precision} under FSDP2, which would cast the base's bytes with "
            "the other weights. Set mixed_precision: bf16."
        )
    # accelerate would cast a float32 adapter and its gradients to bfloat16. Autocast casts as under DDP, and quantized
    # weights are those of the adapter that is saved. torch 2.11 fails where gradients are kept in another dtype over
    # several micro-batches and the head is not called as a module.
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    # Makes transformers keep generating on a finished process until all are done: every forward is collective.
    model.get_base_model()._is_fsdp_managed_module = True


def gather_adapter(model: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    """Gather every adapter tensor whole, by parameter name; called by all processes."""
    from kit.weights.gather import whole

    named = {name: one for name, one in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    with whole(named.values()) as values:
        return {name: value.clone() for name, value in zip(named, values, strict=True)}
