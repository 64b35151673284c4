"""How `accelerate launch` will split the base over the trainer's processes, and which splits cannot train.

Imports no torch.
"""

import os
from pathlib import Path
from typing import Any

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.file_kinds import DEEPSPEED
from kit.core.run_files import read_object

FSDP2, ZERO3 = "FSDP2", "ZeRO-3"
# FSDP settings of `accelerate launch`: the value that works, accelerate's default, and why no other works.
FSDP_SETTINGS = {
    "FSDP_VERSION": (
        "2",
        "1",
        "FSDP1 flattens each layer into one parameter, so the base's tensors cannot be hashed by name",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        *("TRANSFORMER_BASED_WRAP", "NO_WRAP"),
        "each layer must be an FSDP unit of its own, or a forward gathers the whole base at once",
    ),
    "FSDP_STATE_DICT_TYPE": (
        *("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
        "every checkpoint would gather the whole base in one process",
    ),
    "FSDP_OFFLOAD_PARAMS": (*("false", "false"), "4-bit layers whose bytes come from host memory were not tested"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (*("false", "false"), "only one process would load the base, and all hash it"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        *("false", "false"),
        "it renames the base's tensors, and train.recompute does the same",
    ),
}
# Optimizers whose step on a shard equals their step on the whole tensor.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")
CONFIGS = "accelerate_configs/fsdp2.yaml"


def announced() -> str | None:
    """How `accelerate launch` will split the base; None if every process holds all of it."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return FSDP2
    return ZERO3 if _zero_optimization().get("stage") == 3 else None


def faults(config: Config) -> list[str]:
    """Announced settings that would not train, each with its reason."""
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
        found += offloading_faults(_zero_optimization())
    if kind and config.train.optimizer not in OPTIMIZERS:
        found.append(
            f"train.optimizer is {config.train.optimizer} under {kind}, which gives it sharded tensors. Use "
            f"{' or '.join(OPTIMIZERS)}."
        )
    if kind and config.policy.embeddings == "host":
        found.append(f"policy.embeddings is host under {kind}, which splits that table already. Set it to gpu.")
    if kind and config.train.trl.get("cast_lm_head_to_fp32"):
        found.append(f"train.trl.cast_lm_head_to_fp32 under {kind} was not tested. Remove it.")
    return found


def _zero_optimization() -> dict[str, Any]:
    """`zero_optimization` as `accelerate launch` passes it on: in a DeepSpeed file, or in its own variables."""
    stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    found: dict[str, Any] = {"stage": int(stage) if stage.isdigit() else stage}
    for name in ("offload_param", "offload_optimizer"):
        found[name] = {"device": os.environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}_DEVICE", "none").lower()}
    try:
        given = read_object(Path(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")), DEEPSPEED)[
            "zero_optimization"
        ]
        return found | {key: value for key, value in given.items() if not (key == "stage" and value == "auto")}
    except BadInput:  # DeepSpeed reports what is wrong with it
        return found


def offloading_faults(settings: dict[str, Any]) -> list[str]:
    """Why ZeRO-3 with these settings is untested; empty if nothing is offloaded to host memory."""
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
    """Error text for a way of splitting the base that is refused."""
    return (
        f"{name} splits the base over the processes in a way that was not tested with 4-bit weights. Use accelerate "
        f"launch with accelerate_configs/ddp.yaml, or split it with {CONFIGS} or zero3.yaml."
    )
