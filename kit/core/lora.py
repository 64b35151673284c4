"""Read a peft LoRA adapter's configuration: the rank and scale of a module, and why s·B·A may not be its update.

Shared by the trainer's merge, the rollout server and the workers inside vLLM. Needs only the standard library.
"""

import math
import re

# Initializations of peft 0.21 that leave the base weight as it is. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA)
# rewrite it, so that B·A does not belong to the base loaded from disk.
PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
# Other adapter features of peft 0.21, by the key of adapter_config.json that enables them.
OTHER_KINDS = {
    "fan_in_fan_out": "the factors are transposed (Conv1D models)",
    "layer_replication": "the adapter belongs to a model with repeated layers; train without it",
    "alora_invocation_tokens": "the adapter applies to part of the sequence only; train a plain LoRA",
    "trainable_token_indices": "trained rows of the embedding; train without them",
    "use_qalora": "the adapter sees pooled inputs; train a plain LoRA",
    "use_bdlora": "the factors are block-diagonal; train a plain LoRA",
    "arrow_config": "several adapters are mixed token by token; train a plain LoRA",
    "kasa_config": "KaSA rewrites the base weights and scales between the factors; train a plain LoRA",
    "monteclora_config": "the factors are sampled; train a plain LoRA",
    "velora_config": "peft does not put VeLoRA on a quantized base; train a plain LoRA",
    "megatron_config": "the adapter belongs to Megatron's parallel layers; train it on the transformers model",
}
# Fused parameters of a layer's experts (transformers 5) that `target_parameters` may name, in the order in which peft
# wraps them: the last is the outer wrapper.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
# Matrices of an expert that each of them holds, by their names in checkpoints.
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
# Keys of peft 0.21 under which an adapter still adds s·B·A, or that `reasons` checks: shape and place of the factors,
# their initialization, dropout, and where the file comes from. `merge` and the servers read the first two rows.
UNDERSTOOD = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "peft_type"),
    *("bias", "lora_bias", "use_dora", "modules_to_save", "init_lora_weights", "target_parameters"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core"),
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    "runtime_config",
}


def reasons(config: dict, tied: bool = False) -> list[str]:
    """Why adding s·B·A to the base's linear weights is not what an adapter_config.json describes; empty if it is.

    `tied`: whether the output embedding shares its weight with the input embedding.
    """
    found = []
    if config.get("peft_type") != "LORA":
        found.append(f"peft_type is {config.get('peft_type')!r}, only LORA is supported")
    if config.get("use_dora"):
        found.append("use_dora: DoRA rescales the merged weight: its update is not s·B·A; train with use_dora=False")
    if config.get("modules_to_save"):
        found.append(
            f"modules_to_save {config['modules_to_save']}: fully trained copies, which the NF4 base's hash does not "
            "cover and a server cannot load; train without them"
        )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        found.append("trained biases (bias or lora_bias): the base's biases are frozen; train with bias='none'")
    found += [f"{key}: {why}" for key, why in OTHER_KINDS.items() if config.get(key)]
    if odd := [name for name in config.get("target_parameters") or () if not _is_expert_parameter(name)]:
        found.append(
            f"target_parameters names {odd[0]}; of bare parameters, only those of fused experts are supported "
            f"({', '.join(f'experts.{name}' for name in EXPERT_PARAMETERS)})"
        )
    found += [
        f"{key} ({str(value)[:40]}): this version does not know what it does to the weights; train without it"
        for key, value in config.items()
        if value and key not in UNDERSTOOD and key not in OTHER_KINDS
    ]
    init = str(config.get("init_lora_weights", True)).lower()
    if init not in PLAIN_INITS:
        found.append(
            f"init_lora_weights={init} rewrites the base weights, or is unknown here; train with the default "
            "initialization, or save the adapter converted to plain LoRA, as PiSSA's trainers offer"
        )
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    if odd := [alpha for alpha in alphas if isinstance(alpha, bool) or not isinstance(alpha, int | float)]:
        found.append(
            f"lora_alpha or alpha_pattern holds {odd[0]!r}, and the scale needs a number; write the adapter again"
        )
    if tied and "lm_head" in (config.get("target_modules") or []):
        found.append("it targets lm_head, which shares its weight with the input embedding; leave lm_head out")
    return found


def _is_expert_parameter(name: str) -> bool:
    """Whether an entry of `target_parameters` names fused experts: with their module, or bare, as peft 0.21 rewrites
    `target_modules` that name experts' layers."""
    return name in EXPERT_PARAMETERS or f".{name}".endswith(tuple(f".experts.{one}" for one in EXPERT_PARAMETERS))


def expert_parameter(config: dict, module: str) -> str | None:
    """Name of the fused parameter (`….experts.gate_up_proj`) that a LoRA factor's `module` in an adapter's file stands
    for; None for a linear layer.

    peft nests one wrapper per targeted parameter, in the order of `EXPERT_PARAMETERS`, so that all but the last have
    `.base_layer` in their names.
    """
    inner = module.count(".base_layer")
    plain = module.replace(".base_layer", "")
    named = [name for name in config.get("target_parameters") or () if _is_expert_parameter(name)]
    if not plain.endswith(".experts") or not named:
        return None
    wrapped = [one for one in EXPERT_PARAMETERS if any(f".{name}".endswith(f".{one}") for name in named)]
    return f"{plain}.{wrapped[-1 - inner]}" if inner < len(wrapped) else None


def expert_wrappers(module: str) -> list[str]:
    """Names that peft's wrappers of a module of experts have in an adapter's file, inner ones first."""
    return [f"{module}{'.base_layer' * level}" for level in range(len(EXPERT_PARAMETERS) - 1, -1, -1)]


def rank_of(config: dict, module: str) -> int | None:
    """The rank that an adapter_config.json gives `module` (a layer's name in the plain model)."""
    return _by_pattern(config.get("rank_pattern"), module, config.get("r"))


def scale_of(config: dict, module: str) -> float:
    """The factor s of s·B·A: alpha/r, or alpha/√r with rsLoRA, of the module's own rank and alpha."""
    rank = rank_of(config, module)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: dict | None, module: str, default: int | None) -> int | None:
    """Value of the first pattern that matches, as in peft 0.21 (`peft.utils.other.get_pattern_key`).

    A pattern is a regular expression for the whole name or for its end after a dot.
    """
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
