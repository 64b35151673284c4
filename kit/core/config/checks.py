"""Checks of a configuration across keys, before any weight is loaded."""

import os
import re

from kit.core import format_names
from kit.core.config import (
    base_rules,
    distill_rules,
    environment_rules,
    float16_rules,
    format_rules,
    launch_rules,
    loss_rules,
    optimizer_rules,
    recompute_rules,
    rollout_rules,
    sampling_rules,
    sequence_rules,
    sft_rules,
    sharding_rules,
    share_rules,
    speculation_rules,
    stream_rules,
    trl_rules,
)
from kit.core.config.schema import Config, limit_faults
from kit.core.errors import BadInput
from kit.core.limits import KERNEL_RANK, MOST_COMPLETIONS, SERVED_RANKS


def world_size() -> int:
    """The number of trainer processes, as `accelerate launch` announces it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the one process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def check_config(config: Config, processes: int) -> None:
    """Raise one `BadInput` that lists everything about the configuration that cannot work."""
    faults = [
        *limit_faults(config),
        *_batch(config, processes),
        *_reference(config),
        *_sampler(config),
        *trl_rules.faults(config),
        *loss_rules.faults(config),
        *sampling_rules.faults(config),
        *launch_rules.faults(config),
        *_adapter(config),
        *_lists(config),
        *_servers(config),
        *share_rules.faults(config, processes),
        *speculation_rules.faults(config),
        *rollout_rules.overlap_faults(config),
        *rollout_rules.stop_faults(config.rollout.stop),
        *_kept_weights(config, sharding_rules.announced()),
        *_kept_codes(config, sharding_rules.announced()),
        *optimizer_rules.faults(config),
        *format_names.faults(config),
        *format_rules.faults(config),
        *rollout_rules.noise_faults(config, sharding_rules.announced()),
        *recompute_rules.faults(config, sharding_rules.announced()),
        *_parallelism(config),
        *base_rules.faults(config, sharding_rules.announced()),
        *float16_rules.faults(config, sharding_rules.announced() or ("DeepSpeed" if uses_deepspeed() else None)),
        *_compute(config),
        *_micro_batches(config),
        *sequence_rules.faults(config, processes),
        *stream_rules.faults(config, processes, uses_deepspeed()),
        *environment_rules.faults(config, sharding_rules.announced()),
        *(distill_rules.faults(config) if config.distill.is_given else []),
        *(sft_rules.faults(config, processes) if config.sft.is_given else []),
    ]
    if faults:
        raise BadInput("\n".join(faults))


def _batch(config: Config, processes: int) -> list[str]:
    group, train = config.rollout.group_size, config.train
    batch = train.per_device_train_batch_size * processes * train.gradient_accumulation_steps
    found = []
    if batch > MOST_COMPLETIONS:
        found.append(
            f"a step would have {batch:,} completions ({train.per_device_train_batch_size:,} per device x "
            f"{processes:,} processes x {train.gradient_accumulation_steps:,} steps), more than {MOST_COMPLETIONS:,}. "
            "Lower train.per_device_train_batch_size or train.gradient_accumulation_steps."
        )
    elif group > 1 and batch % group and not config.sft.is_given:
        fits = [str(size) for size in range(2, min(batch, 1024) + 1) if batch % size == 0][:6]
        found.append(
            f"rollout.group_size ({group}) must divide the generation batch ({train.per_device_train_batch_size} per "
            f"device x {processes} processes x {train.gradient_accumulation_steps} steps = {batch}). "
            f"Use {''.join(f'{size}, ' for size in fits)}{'or ' if fits else ''}another batch."
        )
    for key, value in (("save_steps", train.save_steps), ("max_steps", train.max_steps)):
        if train.num_iterations > 1 and value % train.num_iterations:
            found.append(
                f"train.{key} ({value}) must be a multiple of train.num_iterations ({train.num_iterations}): a "
                "checkpoint between two updates of one batch could not be resumed exactly."
            )
    return found


def _reference(config: Config) -> list[str]:
    reference, beta = config.policy.reference, config.train.beta
    if reference == "adapter_off" or (reference == "none" and beta == 0):
        return []
    if reference == "none":
        return [f"train.beta ({beta}) is above 0 and policy.reference is none. Use adapter_off, or train.beta 0."]
    if reference == "init_adapter":
        return _start_as_reference(config)
    return [
        f"policy.reference is {reference!r}: a second model is never loaded. The reference is the base itself, the "
        "policy with its adapter off, which costs no memory (adapter_off), or the base with the adapter that the run "
        "started from (init_adapter). Use one of them."
    ]


def _start_as_reference(config: Config) -> list[str]:
    """Why the adapter that a run starts from cannot be its reference."""
    policy, found, key = config.policy, [], "policy.reference is init_adapter"
    if policy.init_adapter is None:
        found.append(
            f"{key} and policy.init_adapter is not set: the run starts from the base. Set policy.init_adapter, or "
            "policy.reference to adapter_off."
        )
    if not config.train.beta:
        found.append(
            f"{key} with train.beta 0, which reads no reference: a copy of the adapter would be held for nothing. Set "
            "train.beta above 0, or policy.reference to none."
        )
    if policy.lora_dropout:
        found.append(
            f"{key} with policy.lora_dropout {policy.lora_dropout:g}: the KL would measure the dropout from the first "
            "step on. Set policy.lora_dropout to 0."
        )
    return found


def _sampler(config: Config) -> list[str]:
    rollout, found = config.rollout, []
    if rollout.routing != "own" and rollout.backend != "server":
        found.append(
            f"rollout.routing is {rollout.routing} with rollout.backend {rollout.backend}: the trainer samples with "
            "its own routers. Set it to own."
        )
    if rollout.correction == "none":
        return found
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != off:
            found.append(
                f"rollout.{key} is {value} with rollout.correction {rollout.correction}: the correction compares the "
                f"sampler's log-probs with the policy's, and a truncated sampler is another distribution. Set "
                f"rollout.{key} to {off}, or rollout.correction to none."
            )
    if not rollout.correction_cap > 1:
        found.append(
            f"rollout.correction_cap ({rollout.correction_cap}) must be above 1, the ratio without a mismatch."
        )
    return found


def _adapter(config: Config) -> list[str]:
    policy, found = config.policy, []
    names = policy.target_modules
    if isinstance(names, str):
        if names != "all-linear":
            found.append(f"policy.target_modules is {names!r}. Use all-linear or a list of layer names.")
    elif not names:
        found.append("policy.target_modules is empty. Use all-linear or a list of layer names.")
    elif wrong := [name for name in names if name.split(".")[-1] in ("lm_head", "embed_tokens")]:
        found.append(
            f"policy.target_modules names {wrong}: log-probs are computed from the unadapted head. Remove it."
        )
    return found


def _servers(config: Config) -> list[str]:
    rollout, server, rank = config.rollout, config.server, config.policy.lora_rank
    if rollout.backend != "server":
        return []
    found, urls = [], [url.rstrip("/") for url in rollout.server_urls]
    if not urls:
        found.append("rollout.server_urls is empty. Name at least one replica, e.g. http://127.0.0.1:8000.")
    for url in urls:
        if not re.match(r"https?://[^/]+", url):
            found.append(f"rollout.server_urls names {url!r}. Write it as http://host:port.")
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        found.append(f"rollout.server_urls names {', '.join(twice)} more than once: each replica has one URL.")
    if server.gpus is not None:
        wanted = server.tensor_parallel * len(urls)
        if len(server.gpus) != wanted:
            found.append(
                f"server.gpus names {len(server.gpus)} GPUs; {len(urls)} replicas of server.tensor_parallel "
                f"{server.tensor_parallel} take {wanted}."
            )
        if len(set(server.gpus)) != len(server.gpus) or any(gpu < 0 for gpu in server.gpus):
            found.append(f"server.gpus ({server.gpus}) must name every GPU once, from 0.")
    if server.force_w8a16 and server.weights not in ("fp8_per_tensor", "fp8_per_block"):
        found.append(
            f"server.force_w8a16 with server.weights {server.weights}: vLLM's Marlin kernels serve fp8_per_tensor and "
            "fp8_per_block. Set server.weights to one of them."
        )
    if server.force_w8a16 and config.policy.quant_cfg is not None:
        found.append(
            f"server.force_w8a16 with policy.quant_cfg {config.policy.quant_cfg}: the server would not compute in "
            "that format. Remove one of them."
        )
    if server.max_num_seqs < rollout.group_size:
        found.append(
            f"server.max_num_seqs ({server.max_num_seqs}) is below rollout.group_size ({rollout.group_size}): a group "
            "is sampled in one request."
        )
    if rollout.sync == "adapter" and rank > SERVED_RANKS[-1]:
        found.append(
            f"policy.lora_rank ({rank}) is above {SERVED_RANKS[-1]}, the largest that vLLM serves unmerged. Lower it, "
            "or set rollout.sync to remerge, which takes any rank."
        )
    if config.policy.lora_dropout:
        found.append(
            f"policy.lora_dropout ({config.policy.lora_dropout}) with rollout.backend server: the server samples "
            "without dropout, so the sampler would not be the policy. Set it to 0."
        )
    return found


def _lists(config: Config) -> list[str]:
    found, reward = [], config.reward
    if not reward.functions and not config.environment.is_given:
        found.append("reward.functions is empty. Name at least one reward function.")
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        found.append(f"reward.weights has {len(reward.weights)} entries for {len(reward.functions)} reward.functions.")
    if reward.weights and not any(reward.weights):
        found.append(f"reward.weights ({reward.weights}) must be numbers, at least one of them not 0.")
    if reward.answer_form is not None and "{answer}" not in reward.answer_form:
        found.append(
            f"reward.answer_form ({reward.answer_form!r}) has no {{answer}}, the place of a reference. Write it as "
            "'Label: {answer}'."
        )
    if config.eval.gate.format not in config.eval.formats:
        found.append(f"eval.gate.format ({config.eval.gate.format}) is not in eval.formats {config.eval.formats}.")
    if config.data.id is None and config.data.path is None:
        found.append("data.id or data.path is missing: name a hub data set or a local file.")
    if config.data.format is not None and config.data.question_column != "question":
        found.append(
            f"data.question_column is {config.data.question_column} and data.format {config.data.format}, which gets "
            "the whole row. Leave one of them out."
        )
    return found


def _parallelism(config: Config) -> list[str]:
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if config.model.dtype == "float32" and mixed in dtypes:
        return [
            f"model.dtype is float32 and the accelerate config says mixed_precision: {mixed}, which would compute in "
            f"{dtypes[mixed]}. Set model.dtype to {dtypes[mixed]}, or pass --mixed_precision no to accelerate launch."
        ]
    return sharding_rules.faults(config)


def uses_deepspeed() -> bool:
    """Whether `accelerate launch` announces DeepSpeed, with any stage of ZeRO."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def _micro_batches(config: Config) -> list[str]:
    """Settings that conflict with `train.micro_batch_tokens`."""
    budget, rollout, found = config.train.micro_batch_tokens, config.rollout, []
    kernels = config.train.packed_attention
    if budget is None:
        if kernels != "flash":
            found.append(
                f"train.packed_attention is {kernels} and train.micro_batch_tokens is not set: without packs nothing "
                "reads it. Set train.micro_batch_tokens, or leave train.packed_attention out."
            )
        return found
    if kernels == "cudnn" and config.model.dtype == "float32":
        found.append(
            "train.packed_attention is cudnn and model.dtype is float32, which cuDNN's kernels do not support. Set "
            "model.dtype to bfloat16, or train.packed_attention to flex."
        )
    longest = rollout.max_prompt_length + rollout.max_completion_length
    parts = max(1, config.train.sequence_parallel)
    if 1 <= budget < (least := -(-longest // parts)):
        times = f" x train.sequence_parallel ({parts})" * (parts > 1)
        found.append(
            f"train.micro_batch_tokens ({budget}){times} is below rollout.max_prompt_length + max_completion_length "
            f"({rollout.max_prompt_length} + {rollout.max_completion_length} = {longest}): one completion may not "
            f"fit. Use {least} or more."
        )
    for key, nothing in trl_rules.WHOLE_BATCH_FIELDS.items():
        if (value := config.train.trl.get(key, nothing[0])) not in nothing:
            found.append(
                f"train.trl.{key} is {value!r} with train.micro_batch_tokens {budget}: it is computed over a whole "
                "batch, and micro-batches of different lengths do not add up to it. Remove one of them."
            )
    return found


def _compute(config: Config) -> list[str]:
    policy, found = config.policy, []
    if policy.fused_mlp and policy.compute == "plain":
        found.append(
            "policy.fused_mlp is true with policy.compute plain: it is made of the products of fused and fp8. Set "
            "policy.compute to fused, or policy.fused_mlp to false."
        )
    if policy.fused_mlp and policy.lora_rank > KERNEL_RANK:
        found.append(
            f"policy.fused_mlp is true with policy.lora_rank {policy.lora_rank}: its kernels hold adapters of rank "
            f"{KERNEL_RANK} and less. Set policy.fused_mlp to false."
        )
    key, value, off = "policy.compute", str(policy.compute), "plain"
    if policy.quant_cfg is not None:
        key, value, off = "policy.quant_cfg", policy.quant_cfg, "null"
        if policy.compute != "plain":
            found.append(
                f"policy.compute is {policy.compute} with policy.quant_cfg {value}: quantized layers have "
                "matmuls of their own. Set policy.compute to plain."
            )
    elif value == off:
        return found
    if policy.lora_dropout:
        found.append(
            f"policy.lora_dropout ({policy.lora_dropout}) with {key} {value}: its backward pass saves a layer's "
            f"input but no dropout mask. Set policy.lora_dropout to 0, or {key} to {off}."
        )
    return found


def _kept_codes(config: Config, sharded: str | None) -> list[str]:
    policy = config.policy
    found: list[str] = []
    if not config.train.keep_weights:
        return found
    if policy.compute != "fp8" or policy.quantization != "nf4":
        found.append(
            f"train.keep_weights is true with policy.compute {policy.compute} and policy.quantization "
            f"{policy.quantization}: it keeps the codes that fp8 makes of nf4. Leave it out."
        )
    if sharded:
        found.append(
            f"train.keep_weights is true under {sharded}, and every process would hold codes of the whole base. Leave "
            "it out, or use accelerate_configs/ddp.yaml."
        )
    return found


def _kept_weights(config: Config, sharded: str | None) -> list[str]:
    if config.rollout.keep_weights != "always":
        return []
    if config.rollout.backend == "server":
        return [
            "rollout.keep_weights is always and rollout.backend server: the trainer's process generates nothing. "
            "Leave rollout.keep_weights out, or set rollout.backend to in_process."
        ]
    if sharded:
        return [
            f"rollout.keep_weights is always under {sharded}, which leaves each process only part of the packed "
            "weights. Leave rollout.keep_weights out, or use accelerate_configs/ddp.yaml."
        ]
    return []
