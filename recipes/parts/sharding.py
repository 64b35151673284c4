"""A base that is split over the trainer's processes: FSDP2 and DeepSpeed ZeRO-3.

Written for accelerate 1.15, torch 2.13 and deepspeed 0.19.8. Each process loads and quantizes the whole base, hashes
it, and keeps its part of every tensor. What accelerate announces in the environment is checked before anything is
loaded (`problems`), and what it made of it before the first step (`prepare`).
"""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.parts.config import Config
from recipes.parts.errors import BadInput

if TYPE_CHECKING:
    import torch

FSDP2, ZERO3 = "FSDP2", "ZeRO-3"
# What `accelerate launch` announces of FSDP: the value that works, accelerate's default, and why no other does.
FSDP_SETTINGS = {
    "FSDP_VERSION": (
        "2",
        "1",
        "FSDP1 makes a layer one flat parameter, so the base's tensors cannot be hashed by name",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        *("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
        "layers have to be groups of their own, else a forward gathers the whole base at once",
    ),
    "FSDP_STATE_DICT_TYPE": (
        *("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
        "every checkpoint would gather the whole base in one process",
    ),
    "FSDP_OFFLOAD_PARAMS": (*("false", "false"), "4-bit layers whose bytes come from host memory were not tested"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (*("false", "false"), "only one process would load the base that each hashes"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        *("false", "false"),
        "it renames the base's tensors, and train.recompute does the same",
    ),
}
# The optimizers that step a part of a tensor as they step the whole.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
# What DeepSpeed sizes by the model's hidden size when told "auto"; its own defaults are a gradient buffer of 1 GiB,
# and matrices of up to 100,000 entries that are never split.
ZERO3_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
CONFIGS = "accelerate_configs/fsdp2.yaml"


def announced() -> str | None:
    """How the base will be split, as `accelerate launch` announces it; None: it is whole in every process."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return FSDP2
    return ZERO3 if _zero_optimization().get("stage") == 3 else None


def problems(config: Config) -> list[str]:
    """What of the announced settings would not train, each with its reason."""
    kind, found = announced(), []
    if kind == FSDP2:
        for variable, (works, default, why) in FSDP_SETTINGS.items():
            value = os.environ.get(variable, default)
            if value.lower() != works.lower():
                key = variable.lower()
                found.append(
                    f"{key} is {value} in the accelerate config: {why}. Set {key}: {works}, as {CONFIGS} does."
                )
    if kind == ZERO3:
        found += _offloading(_zero_optimization())
    if kind and config.train.optimizer not in OPTIMIZERS:
        found.append(
            f"train.optimizer is {config.train.optimizer} under {kind}, which gives it parts of tensors. Use "
            f"{' or '.join(OPTIMIZERS)}."
        )
    if kind and config.policy.embeddings == "host":
        found.append(f"policy.embeddings is host under {kind}, which splits that table already. Set it to gpu.")
    if kind and config.train.trl.get("cast_lm_head_to_fp32"):
        found.append(f"train.trl.cast_lm_head_to_fp32 under {kind} was not tested. Remove it.")
    return found


def _zero_optimization() -> dict[str, Any]:
    """`zero_optimization` as `accelerate launch` announces it: by a DeepSpeed file, or in its own variables."""
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    found: dict[str, Any] = {"stage": int(stage) if stage.isdigit() else stage}
    for name in ("offload_param", "offload_optimizer"):
        found[name] = {"device": os.environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}_DEVICE", "none").lower()}
    try:
        facts = json.loads(Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")).read_text())
        given = facts["zero_optimization"]
        return found | {key: value for key, value in given.items() if not (key == "stage" and value == "auto")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # DeepSpeed says what is wrong with it
        return found


def _offloading(settings: dict[str, Any]) -> list[str]:
    found = []
    for name in ("offload_param", "offload_optimizer"):
        device = (settings.get(name) or {}).get("device", "none")
        if device not in ("none", None):
            found.append(
                f"ZeRO-3 with {name} to {device} was not tested: the optimizer's state of an adapter is small, and a "
                f"base in host memory is copied in every forward. Set {name}_device: none."
            )
    return found


def refused(name: str) -> str:
    """Why the base cannot be split in this way."""
    return (
        f"{name} splits the base over the processes in a way that was not tested with 4-bit weights. Use accelerate "
        f"launch with accelerate_configs/ddp.yaml, or split it with {CONFIGS} or zero3.yaml."
    )


def quant_storage() -> "torch.dtype":
    """What the base's packed bytes are stored as: FSDP2 splits floating tensors only, and casts all but bfloat16."""
    import torch

    return torch.bfloat16 if announced() == FSDP2 else torch.uint8


@contextlib.contextmanager
def loading_whole(arguments: Any) -> Iterator[None]:
    """Let the block build models whole: once transformers 5.17 knows of ZeRO-3, it wants to split each as it is made.

    `arguments` are the trainer's.
    """
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


def prepare(accelerator: Any, model: Any) -> str | None:
    """How `accelerator` will split `model`, which is the policy before that; `BadInput` where it would in a way that
    does not work, wherever that was asked for.

    Sets what has no key in an accelerate config.
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
        if offloading := _offloading(settings):
            raise BadInput("\n".join(offloading))
        for name in ZERO3_SIZES:
            settings.setdefault(name, "auto")
        # deepspeed 0.19.8 calls functions that torch 2.13 has new names for, several lines of it a step.
        warnings.filterwarnings("ignore", message=r".torch\.distributed\.\w+_tensor. is deprecated")
    if kind == FSDP2:
        _prepare_fsdp2(accelerator, model)
    return kind


def _prepare_fsdp2(accelerator: Any, model: Any) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if accelerator.mixed_precision not in ("no", "bf16"):
        raise BadInput(
            f"mixed_precision is {accelerator.mixed_precision} under FSDP2, which would cast the base's bytes with "
            "the other weights. Set mixed_precision: bf16."
        )
    if accelerator.mixed_precision == "bf16":
        # accelerate sums the gradients in bfloat16; an adapter in float32 has float32 gradients.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    # transformers then lets a process that has generated enough go on until all have: every forward is collective.
    model.get_base_model()._is_fsdp_managed_module = True


def gather_adapter(model: "torch.nn.Module") -> dict[str, "torch.Tensor"]:
    """Every tensor of the adapter, whole, by the parameter's name; called by all processes."""
    from merge.whole import whole

    named = {name: one for name, one in model.named_parameters() if ".lora_A." in name or ".lora_B." in name}
    with whole(named.values()) as values:
        return {name: value.clone() for name, value in zip(named, values, strict=True)}
