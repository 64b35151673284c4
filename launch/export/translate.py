"""Translate a run's configuration to verl's, with notes on what cannot be expressed. Written for verl 0.9."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kit.core.config.base_rules import CALLED
from kit.core.config.cache_rules import FASTEST, FLASHINFER, FP8, LONG
from kit.core.config.checks import check_config
from kit.core.config.recipe import PLAIN, recipe_of
from kit.core.config.schema import Config
from kit.core.config.trl_rules import FLOOR_FIELD
from kit.core.errors import BadInput
from kit.core.file_kinds import MODEL_CONFIG
from kit.core.formats import find_experts
from kit.core.limits import MOST_GPUS, MOST_NODES, SERVED_RANKS
from kit.core.run_directory import base_directory
from kit.core.run_files import read_object
from reward import MODELS, is_own

# TRL's losses by verl's aggregation mode (trl.trainer.grpo_trainer, verl.trainer.ppo.core_algos.agg_loss).
LOSS = {"grpo": "seq-mean-token-mean", "dapo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
OPTIMIZERS = {
    "adamw_torch": ("AdamW", "torch.optim"),
    "adamw_torch_fused": ("AdamW", "torch.optim"),
    "adamw_8bit": ("AdamW8bit", "bitsandbytes.optim"),
    "adamw_bnb_8bit": ("AdamW8bit", "bitsandbytes.optim"),
}
NO_DUAL_CLIP = 1e6  # verl always clips the loss of negative advantages at this ratio, TRL only on request
LOWEST_RATIO = "1e-06"  # verl's masks have a lower bound too, above 0
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


@dataclass(frozen=True)
class Cluster:
    """The GPUs that verl gets. Its hybrid engine trains and samples on each of them in turn."""

    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass
class Translation:
    """Overrides of verl's ppo_trainer configuration, and notes on how it differs from the run here."""

    values: dict[str, Any] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)  # keys below an open group of verl's, written with a +
    notes: list[str] = field(default_factory=list)


def translate(
    config: Config, cluster: Cluster, processes: int | None, dequantized_base: bool, directory: Path
) -> Translation:
    """Return the overrides that make verl do the same run; `BadInput` lists what it cannot do."""
    processes = here(config) if processes is None else processes
    if min(processes, cluster.nodes, cluster.gpus_per_node) < 1:
        raise BadInput("--processes, --nodes and --gpus_per_node must be at least 1.")
    if cluster.nodes > MOST_NODES or cluster.gpus_per_node > MOST_GPUS:
        raise BadInput(f"--nodes must be at most {MOST_NODES}, --gpus_per_node at most {MOST_GPUS}.")
    check_config(config, processes)
    if faults := _impossible(config, cluster, processes):
        raise BadInput("\n".join(faults))
    found = Translation()
    _model(config, found, dequantized_base)
    _batch(config, cluster, processes, found)
    _loss(config, found)
    _rollout(config, found)
    _data(config, found, directory)
    _trainer(config, cluster, found, directory)
    _left_out(config, found)
    return found


def here(config: Config) -> int:
    """Trainer processes of the run on one machine, as far as the configuration tells: the number of train.gpus, or of
    the eight GPUs minus server.gpus; else 1."""
    if config.train.gpus is not None:
        return len(config.train.gpus)
    if config.rollout.backend != "server" or config.server.gpus is None or config.server.sleep:
        return 1
    return max(1, 8 - len(config.server.gpus))


def _impossible(config: Config, cluster: Cluster, processes: int) -> list[str]:
    train, policy, found = config.train, config.policy, []
    if (recipe := recipe_of(config)) != PLAIN:
        found.append(
            f"{recipe} trains this configuration, {PLAIN} alone has a counterpart in verl. Leave out policy.quant_cfg "
            "and the group distill."
        )
    if "length" in config.reward.functions:
        found.append(
            "reward.functions names length: it counts tokens, and verl hands the reward a text. Leave it out, and use "
            "the overlong buffer of verl's reward manager dapo."
        )
    if own := [name for name in config.reward.functions if is_own(name) or name in MODELS]:
        found.append(f"reward.functions names {own[0]}: the export knows the kit's own functions only. Leave it out.")
    if config.environment.is_given:
        found.append("the group environment is set: verl has tools and interactions of its own. Leave it out.")
    if train.loss is not None:
        found.append(f"train.loss is {train.loss}: verl has its own losses only. Leave it out.")
    if train.loss_type not in LOSS or train.trl.get("importance_sampling_level", train.ratio_level) != "token":
        found.append(
            f"train.loss_type is {train.loss_type} with ratios of a {train.ratio_level}: of {', '.join(LOSS)} with "
            "ratios of a token verl's counterpart is known."
        )
    if policy.reference == "init_adapter":
        found.append(
            "policy.reference is init_adapter: verl's reference of a LoRA is the base alone. Set it to adapter_off."
        )
    if config.rollout.resample_rounds:
        found.append(
            f"rollout.resample_rounds is {config.rollout.resample_rounds}: main_ppo of verl 0.9 replaces no groups. "
            "Set it to 0."
        )
    if config.rollout.replay_steps:
        found.append(
            f"rollout.replay_steps is {config.rollout.replay_steps}: verl 0.9 replays no groups. Set it to 0."
        )
    if config.data.pass_rates is not None:
        found.append("data.pass_rates is set: the export writes all problems. Write those of choice to data.path.")
    if train.kl_in_reward:
        found.append("train.kl_in_reward is true: the export knows the KL in the loss only. Leave it out.")
    if train.scale_rewards == "batch":
        found.append(
            "train.scale_rewards is batch: verl divides by a group's spread or not at all. Use group or none."
        )
    if train.lr_scheduler == "linear":
        found.append("train.lr_scheduler is linear: verl has constant and cosine, both with a warm-up.")
    if train.optimizer not in OPTIMIZERS:
        found.append(f"train.optimizer is {train.optimizer}: of {', '.join(OPTIMIZERS)} verl's counterpart is known.")
    if policy.use_rslora and not _alpha(config).is_integer():
        found.append(
            f"policy.use_rslora scales by {policy.lora_alpha} / sqrt({policy.lora_rank}); verl by a whole number / "
            f"{policy.lora_rank}, and {_alpha(config):.2f} is none. Choose another rank or alpha."
        )
    if policy.lora_rank > SERVED_RANKS[-1]:
        found.append(
            f"policy.lora_rank ({policy.lora_rank}) is above {SERVED_RANKS[-1]}, the largest that vLLM serves."
        )
    if policy.expert_rank != 0 and (experts := _experts(config)):
        found.append(
            f"{config.model.source} is a mixture of experts ({experts}): verl gives peft target_modules alone, which "
            "put no adapter on routed experts. Set policy.expert_rank to 0 to export a run without one."
        )
    completions = _completions(config, processes)
    if completions % cluster.gpus:
        found.append(
            f"a step has {completions} completions ({train.per_device_train_batch_size} per device x {processes} "
            f"processes x {train.gradient_accumulation_steps}), which {cluster.gpus} GPUs cannot share evenly. Use "
            "another number of GPUs or batch."
        )
    if cluster.gpus % config.server.tensor_parallel:
        found.append(
            f"server.tensor_parallel {config.server.tensor_parallel} does not divide the {cluster.gpus} GPUs of the "
            "cluster."
        )
    return found


def _experts(config: Config) -> str:
    """What `find_experts` says of a local model; empty for one on the hub, whose configuration is not read here."""
    file = Path(config.model.path or "") / "config.json"
    return find_experts(read_object(file, MODEL_CONFIG)) if config.model.path and file.is_file() else ""


def _alpha(config: Config) -> float:
    policy = config.policy
    return float(policy.lora_alpha) * (math.sqrt(policy.lora_rank) if policy.use_rslora else 1.0)


def _completions(config: Config, processes: int) -> int:
    return config.train.per_device_train_batch_size * processes * config.train.gradient_accumulation_steps


def _model(config: Config, found: Translation, dequantized_base: bool) -> None:
    model, policy = config.model, config.policy
    source = Path(model.path).resolve() if model.path else model.id
    if dequantized_base:
        source = base_directory(config).resolve()
        if not (source / "manifest.json").is_file():
            raise BadInput(f"--dequantized_base: {source} does not exist. Write it with python -m merge base.")
    found.values |= {
        f"{MODEL}.path": str(source),
        f"{MODEL}.lora_rank": policy.lora_rank,
        f"{MODEL}.lora_alpha": int(_alpha(config)),
        f"{MODEL}.target_modules": policy.target_modules,
        f"{MODEL}.enable_gradient_checkpointing": config.train.recompute != "none",
        # FSDP wants one dtype for adapter and base; the forward pass computes in bfloat16 either way.
        f"{ACTOR}.fsdp_config.model_dtype": "fp32" if policy.adapter_dtype == "float32" else "bf16",
    }
    if policy.init_adapter:
        found.values[f"{MODEL}.lora_adapter_path"] = str(Path(policy.init_adapter).resolve())
    called, is_stored = CALLED[policy.quantization], policy.quantization != "none"
    which = f"what {called} dequantizes to" if dequantized_base and is_stored else "the original weights"
    why = f"The base is not {called}: verl 0.9 has no QLoRA (no bitsandbytes weights in its FSDP engine). "
    dtype = found.values[f"{ACTOR}.fsdp_config.model_dtype"]
    found.notes.append(f"{why if is_stored else ''}It trains on {which}, sharded by FSDP over all GPUs in {dtype}.")
    if not dequantized_base and is_stored:
        found.notes.append(
            f"So the starting model differs from the run here by {called}'s rounding; --dequantized_base keeps it."
        )
    if model.revision:
        found.notes.append(f"model.revision {model.revision} is not passed: verl takes the hub's newest, or a path.")
    if policy.lora_dropout:
        found.notes.append(f"policy.lora_dropout {policy.lora_dropout} is not passed: verl trains LoRA without.")
    if model.dtype != "bfloat16":
        found.notes.append(f"model.dtype {model.dtype}: verl computes in bfloat16.")
    if model.attn_implementation != "flash_attention_2":
        found.notes.append(f"Attention is verl's flash_attention_2, not {model.attn_implementation}.")


def _batch(config: Config, cluster: Cluster, processes: int, found: Translation) -> None:
    """verl counts a batch in prompts and a micro-batch in completions of one GPU."""
    train, completions = config.train, _completions(config, processes)
    prompts, each = completions // config.rollout.group_size, completions // cluster.gpus
    micro = max(size for size in range(1, min(train.per_device_train_batch_size, each) + 1) if each % size == 0)
    found.values |= {
        "data.train_batch_size": prompts,
        f"{ROLLOUT}.n": config.rollout.group_size,
        f"{ACTOR}.ppo_mini_batch_size": prompts,
        f"{ACTOR}.ppo_epochs": train.num_iterations,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": micro,
    }


def _loss(config: Config, found: Translation) -> None:
    train, rollout, values = config.train, config.rollout, found.values
    scale = train.scale_rewards or ("none" if train.loss_type == "dr_grpo" else "group")
    values |= {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": scale == "group",
        "algorithm.use_kl_in_reward": False,
        f"{ACTOR}.use_kl_loss": train.beta > 0,
        f"{ACTOR}.kl_loss_coef": train.beta,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
        f"{ACTOR}.clip_ratio": train.epsilon,
        f"{ACTOR}.clip_ratio_low": train.epsilon,
        f"{ACTOR}.clip_ratio_high": train.epsilon if train.epsilon_high is None else train.epsilon_high,
        f"{ACTOR}.clip_ratio_c": float(train.delta or train.trl.get("delta") or NO_DUAL_CLIP),
        f"{ACTOR}.loss_agg_mode": LOSS[train.loss_type],
        f"{ACTOR}.optim.lr": train.learning_rate,
        f"{ACTOR}.optim.weight_decay": train.weight_decay,
        f"{ACTOR}.optim.lr_scheduler_type": "cosine" if train.lr_scheduler == "cosine" else "constant",
        # transformers' "constant" schedule has no warm-up.
        f"{ACTOR}.optim.lr_warmup_steps": 0 if train.lr_scheduler == "constant" else train.warmup_steps,
        f"{ACTOR}.optim.clip_grad": train.max_grad_norm,
        f"{ACTOR}.grad_clip": train.max_grad_norm,
    }
    if train.loss_type == "dr_grpo":
        values[f"{ACTOR}.loss_scale_factor"] = rollout.max_completion_length
    optimizer, module = OPTIMIZERS[train.optimizer]
    values |= {f"{ACTOR}.optim.optimizer": optimizer, f"{ACTOR}.optim.optimizer_impl": module}
    if rollout.correction != "none":
        level, way = rollout.correction.split("_")
        cap, least = rollout.correction_cap, train.trl.get(FLOOR_FIELD) or LOWEST_RATIO
        values["algorithm.rollout_correction.rollout_is"] = level
        values["algorithm.rollout_correction.rollout_is_threshold"] = cap if way == "truncate" else f"{least}_{cap:g}"
    if train.entropy_coef:
        found.notes.append(f"train.entropy_coef {train.entropy_coef} is lost: verl averages its bonus as its loss.")
    if train.mask_truncated:
        found.notes.append("train.mask_truncated is lost: verl learns from truncated completions.")
    if others := sorted(set(train.trl) - {"delta", *([FLOOR_FIELD] if rollout.correction.endswith("_mask") else [])}):
        found.notes.append(f"Not passed, because they are TRL's: train.trl.{', train.trl.'.join(others)}.")


def _rollout(config: Config, found: Translation) -> None:
    rollout, server, values = config.rollout, config.server, found.values
    values |= {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.temperature": rollout.temperature,
        f"{ROLLOUT}.top_p": rollout.top_p,
        f"{ROLLOUT}.top_k": rollout.top_k or -1,
        f"{ROLLOUT}.seed": config.run.seed,
        f"{ROLLOUT}.tensor_model_parallel_size": server.tensor_parallel,
        f"{ROLLOUT}.max_model_len": rollout.max_prompt_length + rollout.max_completion_length,
        f"{ROLLOUT}.max_num_seqs": server.max_num_seqs,
        f"{ROLLOUT}.enforce_eager": server.enforce_eager,
        f"{ROLLOUT}.val_kwargs.temperature": config.eval.temperature,
        f"{ROLLOUT}.val_kwargs.do_sample": config.eval.temperature > 0,
        f"{ROLLOUT}.val_kwargs.n": config.eval.samples,
    }
    if rollout.stop:
        found.notes.append(f"rollout.stop {rollout.stop} is lost: verl's completions go on to a stop token.")
    if rollout.backend != "server":
        found.notes.append("Rollouts come from vLLM in BF16; here the policy samples in the trainer's own process.")
        return
    if server.weights != "bf16":
        values[f"{ROLLOUT}.quantization"] = "fp8"
        found.notes.append(
            f"Rollouts are in FP8 with verl's blocks of 128 x 128 in place of {server.weights}, from the base above."
        )
    extra = {"kv_cache_dtype": server.kv_cache} if server.kv_cache == FP8 else {}
    if server.kv_cache == FASTEST and rollout.max_completion_length >= LONG:
        found.notes.append(
            f"server.kv_cache {FASTEST} is not resolved here: verl's KV cache is in the model's dtype. On Hopper set "
            f"server.kv_cache to {FP8} and server.vllm to {{attention_backend: {FLASHINFER}}}."
        )
    for key, value in (extra | server.vllm).items():
        name = f"{ROLLOUT}.engine_kwargs.vllm.{key}"
        values[name] = value
        found.added.add(name)
    found.notes.append(
        "Trainer and vLLM share every GPU in turn, with half of it for vLLM (verl's default; "
        f"{ROLLOUT}.gpu_memory_utilization). server.gpus, server.kv_cache_gib, server.nf4_copy, train.max_gpu_gib and "
        "the URLs have no counterpart."
    )
    if rollout.sync == "remerge":
        found.notes.append(
            "vLLM serves the adapter unmerged: there is no rollout.sync remerge, which makes rollouts slower."
        )
    if rollout.overlap:
        found.notes.append("Generation and update take turns, strictly on-policy: rollout.overlap is not exported.")
    if rollout.stream_groups:
        found.notes.append("The update begins when all completions are there: rollout.stream_groups is not exported.")


def _data(config: Config, found: Translation, directory: Path) -> None:
    found.values |= {
        "data.train_files": str(directory / "train.parquet"),
        "data.val_files": str(directory / "test.parquet"),
        "data.max_prompt_length": config.rollout.max_prompt_length,
        "data.max_response_length": config.rollout.max_completion_length,
        # As here, prompts that are too long are skipped, never truncated.
        "data.filter_overlong_prompts": True,
        "data.truncation": "error",
        "data.seed": config.run.seed,
        f"{ACTOR}.data_loader_seed": config.run.seed,
        f"{ACTOR}.fsdp_config.seed": config.run.seed,
        "reward.custom_reward_function.path": str(directory / "reward_function.py"),
        "reward.custom_reward_function.name": "compute_score",
    }
    for name, value in config.data.chat_template_kwargs.items():
        key = f"data.apply_chat_template_kwargs.{name}"
        found.values[key] = value
        found.added.add(key)
    found.notes.append("The seed is the same, the order of the problems and the samples are not.")
    found.notes.append(
        "A reward that could not be computed is 0.0 with unknown 1.0 in the metrics; here it is masked. Above "
        "reward.max_unknown_fraction it ends the run in both."
    )


def _trainer(config: Config, cluster: Cluster, found: Translation, directory: Path) -> None:
    train, watch = config.train, config.watch
    found.values |= {
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.gpus_per_node,
        # A step is an update here, a batch of rollouts in verl.
        "trainer.total_training_steps": train.max_steps // train.num_iterations,
        "trainer.save_freq": max(1, train.save_steps // train.num_iterations),
        "trainer.max_actor_ckpt_to_keep": train.keep_checkpoints,
        "trainer.test_freq": watch.eval_every // train.num_iterations or -1,
        "trainer.val_before_train": watch.eval_every > 0,
        "trainer.project_name": "grpo",
        "trainer.experiment_name": config.run.name,
        "trainer.logger": ["console", *watch.report_to],
        "trainer.default_local_dir": str(directory / "checkpoints"),
    }


def _left_out(config: Config, found: Translation) -> None:
    checks = ["the hash of the frozen base", "the ledger of problems"]
    if config.rollout.backend == "server":
        checks += ["the canary after each sync", "the limit rollout.max_sampler_k3 (verl logs the mismatch)"]
    found.notes.append(f"Checks that stop the run here and are not made there: {', '.join(checks)}.")
    found.notes.append("verl's checkpoints are FSDP shards; its model_merger writes an adapter that peft reads.")


def epochs(problems: int, values: dict[str, Any]) -> int:
    """Passes over the data that verl's steps need: verl stops when its epochs are over. It drops the last batch."""
    per_pass = problems // values["data.train_batch_size"]
    if per_pass == 0:
        raise BadInput(
            f"a step draws {values['data.train_batch_size']} problems and there are {problems}. Lower the batch, or "
            "add problems."
        )
    return math.ceil(values["trainer.total_training_steps"] / per_pass)
