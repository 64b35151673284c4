"""The trainer: `GRPOTrainer` of TRL with the kit's rollouts, step, records and checkpoints.

    get_batch_samples   transformers draws the prompts of a step (`overlap.py`: those of the next one too)
    _prepare_inputs     sample, reward, advantage (`sampling.py`, `advantages.py`); TRL's functions shuffle and split
    compute_loss        forward, loss, backward; the check of the sampler (`step.py`, `loss.py`)
    log                 the step's line of metrics.jsonl

Written for trl 1.16. TRL keeps the data set, its sampler, tokenizing, generation in this process and the calls of
reward functions; transformers keeps the optimizer loop, callbacks and the content of checkpoints. Only the loop calls
back, by the methods above. `tests/unit/test_trl_seams.py` fails when upstream changes any of them.
"""

import contextlib
import copy
import itertools
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors.torch import save_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from kit.core.chat import question_of
from kit.core.config.card_rules import trainer_faults
from kit.core.config.elastic_rules import describe
from kit.core.config.schema import Config, DataConfig
from kit.core.config.sharding_rules import ZERO3
from kit.core.errors import BadInput, CheckFailed
from kit.core.format_names import read_quant_format
from kit.core.ledger import ledger_facts
from kit.core.progress import beat
from kit.core.run_directory import RunDir, checkpoint_step
from kit.policy.adapted_experts import targets_as_named, use_adapted_experts
from kit.policy.adapter_dropout import turned_off
from kit.policy.decoding import decode
from kit.policy.fused_linear import use_fused_linears
from kit.policy.fused_mlp import use_fused_mlps
from kit.policy.layer_kernels import use_kernels
from kit.policy.load import load_adapter_weights, publish_adapter, set_adapter_dtype
from kit.policy.packed.attention import use_packed_attention
from kit.policy.quantized_linear import (
    WATCHED,
    forget_peaks,
    quantizers_of,
    restore_quantizers,
    use_quantized_linears,
    write_quantizer_state,
)
from kit.policy.recompute import use_recompute
from kit.policy.routing import use_routing
from kit.policy.sharding import gather_adapter, gather_in_any_order, prepare, release_after_backward
from kit.policy.stop_texts import StopTexts
from kit.policy.stopping import StopCriterion, stopping
from kit.rollout.drafts import KEYS as DRAFT_KEYS
from kit.rollout.episodes import EpisodeRunner, rollouts_of
from kit.rollout.overlap import Batches, Lookahead
from kit.rollout.policy_view import AheadSampler, EpisodeSampler, Report, Rollouts, Sampler, StreamSampler
from kit.train.advantages import find_flat_groups, group_advantages, subtract_kl
from kit.train.checkpoint import (
    SAVE_ERRORS,
    commit_checkpoint,
    discard_staged,
    is_disk_error,
    rewind,
    rotate,
    saving_failed,
    seed_anew,
    staging_directory,
    trained_by,
)
from kit.train.data_order import passes_made, skip_passes
from kit.train.episode_steps import KEYS as EPISODE_KEYS
from kit.train.episode_steps import EpisodeSteps, recorded
from kit.train.figures import StepFigures, peak_gib
from kit.train.finite import FiniteAdapter, FiniteGradients
from kit.train.group_rewards import give_groups, take_rewards
from kit.train.head_tiles import use_host_tiles
from kit.train.heldout import HeldOut
from kit.train.kept_logits import keep_logits
from kit.train.loss import LossFunction, LossSettings
from kit.train.loss_scale import KEYS as SCALE_KEYS
from kit.train.loss_scale import LossScale, use_float16
from kit.train.mismatch import KEYS as MISMATCH
from kit.train.mismatch import ROUTING_KEYS
from kit.train.own_loss import load_loss
from kit.train.own_sampler import OwnSampler
from kit.train.record import Recorder, add_counts, keep_traceback, unknown_so_far
from kit.train.replay import KEYS as REPLAY_KEYS
from kit.train.replay import Replay
from kit.train.resampling import KEYS as RESAMPLE_KEYS
from kit.train.resampling import Drawn, Resampler
from kit.train.rows import loss_mask
from kit.train.sampling import (
    completion_messages,
    log_lengths,
    log_pending,
    log_rewards,
    row_tensors,
    sampled_lengths,
)
from kit.train.step import PolicyStep, SamplerIsNotThePolicy
from kit.train.streaming import LAST, ROWS, STREAM, Part, joined
from kit.train.trackers import figures, prepare_trackers, send_completions
from kit.train.trained_policy import TrainedPolicy
from kit.train.trl_trainer import GRPOConfig, GRPOTrainer, typed_fields
from reward.own import RewardFailed

KEPT_LOGS = 100  # of transformers' history of logs
# TRL metric -> key of metrics.jsonl
METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_spread_fraction",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "cispo_clip_ratio": "clip_fraction",
    "completions/clipped_ratio": "truncated_fraction",
    "completions/mean_length": "completion_length",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def trainer_arguments(config: Config, run: RunDir) -> GRPOConfig:
    """TRL's `GRPOConfig` for a checked configuration; raises `BadInput` for a wrong or reserved key of `train.trl`."""
    train, rollout = config.train, config.rollout
    scale = train.scale_rewards or ("none" if train.loss_type == "dr_grpo" else "group")
    # With micro-batches by tokens all rows of a process come at once (step.py).
    whole = train.gradient_accumulation_steps if train.micro_batch_tokens else 1
    ours = {
        "output_dir": str(staging_directory(run)),
        "seed": config.run.seed,
        "max_steps": train.max_steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler,
        "warmup_steps": train.warmup_steps,
        "loss_type": "grpo" if train.loss_type == "gspo" else train.loss_type,
        "scale_rewards": scale,
        "beta": 0.0 if train.kl_in_reward else train.beta,
        "epsilon": train.epsilon,
        "epsilon_high": train.epsilon_high,
        "num_iterations": train.num_iterations,
        "mask_truncated_completions": train.mask_truncated,
        "per_device_train_batch_size": train.per_device_train_batch_size * whole,
        "gradient_accumulation_steps": train.gradient_accumulation_steps // whole,
        "max_grad_norm": train.max_grad_norm,
        "weight_decay": train.weight_decay,
        "optim": train.optimizer,
        "gradient_checkpointing": train.recompute != "none",
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "reward_weights": config.reward.weights,
        "chat_template_kwargs": config.data.chat_template_kwargs or None,
        "bf16": config.model.dtype == "bfloat16",
        "fp16": config.model.dtype == "float16",
        # Without this, transformers refuses bf16 without a GPU, and a dry run could not check such a recipe.
        "use_cpu": not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true",
        "save_strategy": "steps",
        "save_steps": train.save_steps,
        "logging_steps": 1,
        # The default hides a NaN loss behind the running mean.
        "logging_nan_inf_filter": False,
        "report_to": prepare_trackers(config, run),
        "run_name": config.run.name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        # transformers looks for unused parameters in every model that is not its own, such as a PeftModel.
        "ddp_find_unused_parameters": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": rollout.correction != "none",
        "vllm_importance_sampling_clip_max": rollout.correction_cap,
    }
    if rollout.correction != "none":
        ours["vllm_importance_sampling_mode"] = rollout.correction
    ours |= _keys_off_their_default(config)
    if ours["use_cpu"]:
        # With several processes accelerate 1.15 names the device cpu:0, to which torch loads no optimizer.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    for key in train.trl:
        if key in ours:
            raise BadInput(f"train.trl.{key} is set by the kit. Use the key of its own group instead.")
    try:
        arguments = GRPOConfig(**ours, **typed_fields(train.trl))
    except (ValueError, TypeError) as error:
        raise BadInput(f"trl refuses the configuration: {error}") from None
    check_optimizer(arguments)
    if arguments.n_gpu > 1:
        raise BadInput(
            f"one process sees {arguments.n_gpu} GPUs and would use only one. Launch with "
            "accelerate_configs/one_gpu.yaml, which makes one visible, or with accelerate_configs/ddp.yaml and "
            "--num_processes."
        )
    return arguments


def _keys_off_their_default(config: Config) -> dict[str, Any]:
    """TRL's fields for keys of the kit that, left at their default, may also be fields of `train.trl`."""
    train, found = config.train, dict[str, Any]()
    if train.delta is not None:
        found["delta"] = train.delta
    if train.ratio_level != "token":
        found["importance_sampling_level"] = train.ratio_level
    if train.entropy_coef:
        found["entropy_coef"] = train.entropy_coef
    if config.data.order != "shuffled":
        found["shuffle_dataset"] = False
    return found


def loss_settings(arguments: GRPOConfig, config: Config) -> LossSettings:
    """Settings of the loss, from TRL's `arguments` for this configuration and from `rollout`."""
    return LossSettings(
        loss_type=arguments.loss_type,
        beta=arguments.beta,
        epsilon=arguments.epsilon,
        epsilon_high=arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high,
        delta=arguments.delta,
        importance_sampling_level=arguments.importance_sampling_level,
        sapo_temperature_pos=arguments.sapo_temperature_pos,
        sapo_temperature_neg=arguments.sapo_temperature_neg,
        bias_corrected_kl=arguments.use_bias_correction_kl,
        off_policy_threshold=arguments.off_policy_mask_threshold,
        top_entropy_quantile=arguments.top_entropy_quantile,
        entropy_coef=arguments.entropy_coef,
        max_completion_length=arguments.max_completion_length,
        correction=config.rollout.correction,
        correction_cap=config.rollout.correction_cap,
        correction_floor=arguments.vllm_importance_sampling_clip_min,
    )


def check_optimizer(arguments: GRPOConfig) -> None:
    """Raise `BadInput` if transformers cannot create this optimizer here, mostly because its package is missing or a
    number is out of range."""
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Module())
        if not {"model", "params", "optimizer_dict"} & settings.keys():  # others need the real model
            kind([torch.nn.Parameter(torch.zeros(1))], **settings)
    except (ImportError, ValueError) as error:
        raise BadInput(
            f"train.optimizer is {arguments.optim.value}, which cannot be created here: {str(error).rstrip('.')}. Use "
            "adamw_torch_fused or adamw_8bit, or fix that."
        ) from None


def check_card(config: Config) -> None:
    """Raise `BadInput` if the GPU, if there is one, cannot train this configuration (`card_rules.py`)."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        if found := trainer_faults(config, *gpu):
            raise BadInput("\n".join(found))


class NewWeights(TrainerCallback):
    """Invalidates the cached peaks of quantized layers after each update: DeepSpeed and 8-bit optimizers bypass a
    tensor's version counter."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        forget_peaks(kwargs["model"])


class Zero3Gathers(TrainerCallback):
    """Change how ZeRO-3 gathers (kit/policy/sharding.py); the trainer gets its engine before the first step."""

    def __init__(self, trainer: "PolicyTrainer"):
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        gather_in_any_order(self._trainer.model_wrapped)
        release_after_backward(self._trainer.model_wrapped)


class Sampled(NamedTuple):
    """The rollouts of a step over all processes, for completions/step-*.jsonl."""

    problem_ids: list[str]
    prompts: list[list[dict]]
    completions: list[list[dict]]
    rewards: list[dict[str, float]]
    advantages: list[float]
    versions: list[int]
    episodes: list[dict]  # what `episode_steps.recorded` adds; empty without an environment

    def rows(self, data: DataConfig, golds: Mapping[str, str]) -> list[dict]:
        """The rows of the file; a prompt is the question's text, or all messages of a conversation. `golds` are the
        references by problem id."""
        return [
            {
                "problem_id": problem_id,
                "prompt": question_of(prompt, data.system_prompt),
                "completion": [one["content"] for one in completion if one["role"] == "assistant"][-1],
                "gold": golds.get(problem_id),
                "rewards": rewards,
                "advantage": advantage,
                "adapter_version": version,
                **episode,
            }
            for problem_id, prompt, completion, rewards, advantage, version, episode in zip(*self, strict=True)
        ]


class PolicyTrainer(GRPOTrainer):
    """GRPO on a frozen NF4 base with an adapter; records every step in the run directory.

    `model` is the base without adapter; the reference is the same model with the adapter disabled, or with the one
    that the run started from (`policy.reference`).
    """

    _buffered_inputs: list[dict] | None  # TRL's
    resampler: Resampler | None = None  # None without `rollout.resample_rounds`
    replay: Replay | None = None  # None without `rollout.replay_steps`
    passes = 0  # whole passes over the data before this process started
    episodes: EpisodeSteps | None = None  # with an environment

    def __init__(
        self,
        *,
        config: Config,
        run: RunDir,
        base_hash: str,
        rollout: Sampler | None = None,
        heldout: HeldOut | None = None,
        loss: LossFunction | None = None,
        episodes: EpisodeRunner | None = None,
        **kwargs: Any,
    ):
        with targets_as_named():
            super().__init__(**kwargs)
        split = prepare(self.accelerator, self.model)
        if split == ZERO3:
            self.add_callback(Zero3Gathers(self))
        use_host_tiles(self.accelerator.device)
        keep_logits(config.train.keep_logits)
        if self.ref_model is not None or "ref" in self.model.peft_config:
            raise CheckFailed("a second reference was created; the reference must be the policy with its adapter off.")
        if config.train.micro_batch_tokens is not None:
            use_packed_attention(self.model.get_base_model(), is_split=config.train.sequence_parallel > 1)
        # Since torch 2.11 sdpa's first choice on Hopper. With a padding mask its backward pass gives NaN where the
        # length divided by 128 leaves 64 and a position's log-sum-exp is below -88 (pytorch issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config, self.run, self.heldout = config, run, heldout
        self.policy = TrainedPolicy(self, config, base_hash, split)
        set_adapter_dtype(self.model, config.policy.adapter_dtype)
        if config.policy.init_adapter:
            load_adapter_weights(self.model, config.policy.init_adapter)
        if config.policy.reference == "init_adapter":
            self.policy.keep_start()
        use_adapted_experts(self.model)
        self.model.get_input_embeddings().register_forward_pre_hook(lambda *_: beat())
        if config.rollout.routing != "own":
            use_routing(self.model)
        if config.policy.compute != "plain":
            use_fused_linears(self.model, config.policy.compute, config.train.keep_weights)
        if config.policy.quant_cfg is not None:
            use_quantized_linears(self.model, read_quant_format(config.policy.quant_cfg), is_split=split is not None)
            self.add_callback(NewWeights())
        use_kernels(self.model, config)
        use_fused_mlps(self.model, config)
        use_recompute(self.model, config)
        self.remove_callback(PrinterCallback)
        self.recorder = Recorder(run, config) if self.accelerator.is_main_process else None
        self.figures = StepFigures(self.accelerator.device)
        say = self.recorder.say if self.recorder else None
        scaler = self.accelerator.scaler
        self.add_callback(FiniteGradients(self.keep_step, scaler and LossScale(scaler, self.figures, say)))
        self.add_callback(FiniteAdapter())
        if episodes is not None:
            self.episodes = EpisodeSteps(episodes, config)
        self.stop_texts = StopTexts(self._tokenizer, config.rollout.stop)
        self.sampler: Sampler = rollout or self._own_sampler(episodes)
        self.policy_step = self._make_step(loss)
        self._lookahead = Lookahead()
        self._unknown: dict[str, dict[str, int]] = {}  # by reward function and reason
        self._unknown_before: dict[str, dict[str, int]] = {}  # before a resume, in the main process
        self._sampled: Sampled | None = None
        if config.rollout.resample_rounds:
            self.resampler = Resampler(config, self.accelerator, self.train_dataset)
        if config.rollout.replay_steps:
            self.replay = Replay(config.rollout.replay_steps, self.num_generations, self.accelerator)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_float16(self.accelerator)

    @cached_property
    def golds(self) -> dict[str, str]:
        """The references of the training problems by their ids."""
        return dict(zip(self.train_dataset["problem_id"], self.train_dataset["gold"], strict=True))

    def _own_sampler(self, episodes: EpisodeRunner | None) -> OwnSampler:
        def generate(prompt_ids: list[list[int]], group: int, max_tokens: int) -> list[list[int]]:
            self.generation_config.max_new_tokens = max_tokens
            criterion = StopCriterion(self.stop_texts, prompt_ids, self.eos_token_ids)
            loop = None if self.policy.is_split else decode
            with stopping(self.policy.unwrapped.get_base_model(), criterion, loop):
                return criterion.cut(self._generate_single_turn(prompt_ids, None, {}, group)[0])

        rows = self.args.generation_batch_size // self.accelerator.num_processes
        say = self.recorder.say if self.recorder else None
        return OwnSampler(self.config, self.policy, generate, rows, say, episodes)

    def _make_step(self, loss: LossFunction | None) -> PolicyStep:
        settings = loss_settings(self.args, self.config)
        function = loss or load_loss(self.config, settings)
        facts = self.config, self.run, self.policy, self.args, settings, function
        return PolicyStep(*facts, self.figures, self._metrics["train"])

    def train_run(self, resume: bool) -> None:
        """Train to the last step, from the start or from the newest whole checkpoint of the run."""
        damaged: list[str] = []
        checkpoint = self.run.newest_checkpoint(damaged) if resume else None
        self.passes = passes_made(checkpoint) if checkpoint else 0
        if self.accelerator.is_main_process:
            discard_staged(self.run)
            for fault in damaged:
                self.recorder.say(f"skipped: {fault}")
            if checkpoint:
                processes = self.accelerator.num_processes
                before = trained_by(checkpoint) or processes
                step = rewind(self.run, checkpoint, processes=processes, processes_before=before)
                self.recorder.say(f"resuming from {checkpoint} (step {step})")
                if change := describe(self.config, before, processes):
                    self.recorder.say(change)
                self._unknown_before = unknown_so_far(self.run.metrics_file)
        self.accelerator.wait_for_everyone()
        if checkpoint and checkpoint_step(checkpoint) >= self.args.max_steps:
            # transformers would train one step more.
            return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.accelerator.wait_for_everyone()  # transformers reads the staged files once more, in every process
        if self.accelerator.is_main_process:
            discard_staged(self.run)

    def keep_step(self) -> str:
        """Write this process's rows of the step, as TRL has them, and its adapter; return a sentence with the path."""
        step = self.state.global_step + 1
        file = self.run.not_finite / f"step-{step:06d}-process-{self.accelerator.process_index}.safetensors"
        found = {f"adapter/{name}": p for name, p in self.model.named_parameters() if p.requires_grad}
        for number, rows in enumerate(self._buffered_inputs):
            found |= {f"rows-{number}/{key}": value for key, value in rows.items() if torch.is_tensor(value)}
        parts = {name: getattr(value, "to_local", value.detach)() for name, value in found.items()}  # FSDP's shards
        try:
            file.parent.mkdir(exist_ok=True)
            copies = {
                name: part.detach().cpu().clone(memory_format=torch.contiguous_format) for name, part in parts.items()
            }
            save_file(copies, file)  # which refuses tensors that share memory
        except SAVE_ERRORS as error:
            return f"Its rows could not be saved: {error}."
        return f"Its rows and the adapter are in {file}."

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # peft casts what it loads to float32.
        set_adapter_dtype(self.model, self.config.policy.adapter_dtype)
        if self.config.policy.quant_cfg is not None:
            restore_quantizers(self.model, resume_from_checkpoint)
        if self.replay:
            self.replay.read(Path(resume_from_checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        processes = self.accelerator.num_processes
        if checkpoint is None or (trained_by(Path(checkpoint)) or processes) == processes:
            return super()._load_rng_state(checkpoint)
        seed_anew(self.args.seed, self.state.global_step, self.accelerator.process_index, processes)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> torch.utils.data.Sampler:
        sampler = super()._get_train_sampler(dataset)
        skip_passes(sampler, self.passes)
        return sampler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Batches:
        draw = super().get_batch_samples
        if not self.config.rollout.overlap:
            return draw(epoch_iterator, num_batches, device)
        is_last = self.state.global_step + 1 >= self.state.max_steps
        return self._lookahead.draw(epoch_iterator, lambda: draw(epoch_iterator, num_batches, device), is_last)

    def _prepare_inputs(self, rows: list[dict]) -> dict:
        """The rows of an accumulation step, sampled with those of the whole step and used `train.num_iterations`
        times; with `rollout.stream_groups` batches of them."""
        self.figures.begin()
        if self.config.rollout.stream_groups:
            return {STREAM: self.stream(rows), ROWS: len(rows)}
        parts = self.args.steps_per_generation
        if self._step % (parts * self.num_iterations) == 0 or self._buffered_inputs is None:
            if self.replay:
                self.replay.keep(self._buffered_inputs)
            with turned_off(self.policy_step.dropouts):
                batch = self.sample(rows)
            self._buffered_inputs = split_tensor_dict(shuffle_sequence_dict(batch), parts)
        return self._buffered_inputs[self._step % parts]

    def sample(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Complete the prompts of this process's rows and compute their advantages; return the inputs of the loss."""
        accelerator, step = self.accelerator, self.state.global_step + 1
        self._note_problems(rows)
        drawn = self.draw(rows)
        self._log_drawn(drawn)
        if self.heldout and self.heldout.is_due(step):
            self._settle_sync()
            self._measure_heldout()
        if self.resampler:
            drawn = self._resample(drawn)
        if self.replay:
            drawn = self._replay(drawn)
        self._log_pending()
        batch = self._batch(drawn)
        if self.replay:
            self.replay.add_entries(batch, drawn)
        self.policy_step.add_reference(batch)
        kl = None
        if self.config.train.kl_in_reward:
            kl = accelerator.gather(self.policy_step.sampled_kl(batch))  # (N,)
        advantages = self._advantages(drawn.rewards, kl)
        batch["advantages"] = self._own(advantages, len(rows))
        self._note_sampled(drawn, advantages)
        return batch

    def stream(self, rows: list[dict]) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the inputs of the loss in batches of groups that have finished, while the servers generate the others.
        The step's metrics are logged with the last."""
        self._note_problems(rows)
        prompt_ids = self._token_ids([row["prompt"] for row in rows])
        sampler, least = cast(StreamSampler, self.sampler), self.config.rollout.stream_groups
        parts, batches, advantages, found = list[Part](), list[dict](), list[torch.Tensor](), None
        with contextlib.closing(cast(Generator, sampler.stream(self.policy, prompt_ids, least))) as streamed:
            while found is None or not found.is_last:
                self.figures.synchronize()  # the backward is not part of the wait
                with self.figures.timed("rollout"):
                    found = next(streamed)
                self.figures.version = found.rollouts.version
                mine = [rows[place] for place in found.places], [prompt_ids[place] for place in found.places]
                drawn = self._judged(*mine, found.rollouts)
                batch = self._batch(drawn)
                everyone = self._advantages(drawn.rewards)
                batch["advantages"] = self._own(everyone, len(found.places))
                parts.append(Part(found.places, drawn))
                advantages.append(batch["advantages"])
                batches.append(batch)
                if found.is_last:
                    self.figures.add(found.rollouts.report)
                    self.figures.note_peak("update")  # of the batches so far, which the rollout ran beside
                    whole, order = joined(parts, self.accelerator)
                    self._log_drawn(whole)
                    if self.heldout and self.heldout.is_due(self.state.global_step + 1):
                        self._measure_heldout()
                    self._log_pending()
                    self._note_sampled(whole, self.accelerator.gather(torch.cat(advantages)[order]))
                    self._buffered_inputs = batches
                yield batch | {LAST: found.is_last}

    def _note_problems(self, rows: list[dict]) -> None:
        problem_ids = gather_object([row["problem_id"] for row in rows])
        self._write_ledger(self.state.global_step + 1, list(dict.fromkeys(problem_ids)))

    def _log_drawn(self, drawn: Drawn) -> None:
        metrics = self._metrics["train"]
        log_lengths(metrics, self.accelerator, drawn.made, drawn.is_truncated)
        log_rewards(metrics, self.reward_func_names, drawn.rewards, self.reward_weights)
        flat = find_flat_groups(drawn.rewards, self.reward_weights, self.num_generations, self._are_summed)
        metrics["frac_reward_zero_std"].append(flat.float().mean().item())

    def _log_pending(self) -> None:
        log_pending(self._metrics["train"], self._pending_metrics, self.accelerator)
        self._pending_extra_logs.clear()

    def _batch(self, drawn: Drawn) -> dict[str, torch.Tensor]:
        """Make the inputs of the loss from this process's rows, with the tokens in the loss of all processes' rows."""
        masked = drawn.is_truncated if self.mask_truncated_completions else []
        padding = self._tokenizer.pad_token_id, self.pad_to_multiple_of, self.accelerator.device
        batch = row_tensors(drawn.prompt_ids, drawn.made, masked, *padding)
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()
        return batch

    def _own(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        """Return this process's part of values of all processes' rows, `rows` in each."""
        return values[self.accelerator.process_index * rows :][:rows]

    def _note_sampled(self, drawn: Drawn, advantages: torch.Tensor) -> None:
        """Keep the step's rows for completions/step-*.jsonl."""
        rows = len(drawn.prompt_ids)
        self._sampled = Sampled(
            *(gather_object(drawn.problem_ids), gather_object(drawn.prompts), gather_object(drawn.completions)),
            [dict(zip(self.reward_func_names, row, strict=True)) for row in drawn.rewards.tolist()],
            *(advantages.tolist(), gather_object(drawn.versions)),
            gather_object([recorded(one, self._tokenizer) for one in drawn.made.episodes or []] or [{}] * rows),
        )

    def draw(self, rows: list[dict]) -> Drawn:
        """Complete this process's rows and reward them; called by all processes together, with as many rows each."""
        with self.figures.timed("rollout"):
            made, prompt_ids = self._rollouts(rows)
            self.figures.add(made.report)
            self.figures.version = made.version
            if self.config.rollout.overlap:
                self.figures.add(self._begin_next())
        self.figures.note_peak("rollout")
        return self._judged(rows, prompt_ids, made)

    def _judged(self, rows: list[dict], prompt_ids: list[list[int]], made: Rollouts) -> Drawn:
        """Reward the completions `made` of this process's rows; called by all processes together, as `draw`."""
        problem_ids, prompts = [row["problem_id"] for row in rows], [row["prompt"] for row in rows]
        self._count_tokens(prompt_ids, made)
        if (episodes := made.episodes) is not None:
            prompts, completions = [one.prompt for one in episodes], [one.messages for one in episodes]
            rows = self.episodes.rewarded_rows(rows, episodes)
        else:
            completions = completion_messages(self._tokenizer, prompt_ids, made.token_ids)
        rewards = self._calculate_rewards(rows, prompts, completions, made.token_ids)  # (N, functions)
        if episodes is not None:
            self.episodes.close(episodes)
        truncated = self._truncated(prompt_ids, made)
        drawn = Drawn(problem_ids, prompts, prompt_ids, made, truncated, completions, rewards)
        return replace(drawn, versions=[made.version] * len(rows), old_logps=[None] * len(rows))

    @property
    def _are_summed(self) -> bool:
        return self.multi_objective_aggregation == "sum_then_normalize"

    def _advantages(self, rewards: torch.Tensor, kl: torch.Tensor | None = None) -> torch.Tensor:
        """Advantages (N,) of all processes' rows, from their rewards minus `train.beta` times `kl` (N,)."""
        weights = self.reward_weights
        if kl is not None:
            rewards, weights = subtract_kl(rewards, weights, kl, self.config.train.beta)
        return group_advantages(rewards, weights, self.num_generations, self.scale_rewards, self._are_summed)[0]

    def _has_signal(self, drawn: Drawn) -> list[bool]:
        """Which groups of all processes teach something."""
        learned = self._advantages(drawn.rewards) != 0
        if self.mask_truncated_completions:
            device = self.accelerator.device
            learned &= ~self.accelerator.gather(torch.tensor(drawn.is_truncated, device=device))
        return learned.view(-1, self.num_generations).any(dim=1).tolist()

    def _write_ledger(self, *entry: Any, **more: Any) -> None:
        if self.recorder:
            self.recorder.ledger(*entry, **more)

    def _resample(self, first: Drawn) -> Drawn:
        """Replace groups without signal; the metrics of a step, except those of replacing, stay those of `first`."""
        figures, step = self.figures, self.state.global_step + 1
        values = dict(figures.values)
        drawn = self.resampler.run(step, first, self.draw, self._has_signal, self._write_ledger)
        figures.values |= values | self.resampler.figures
        sampled, trained = self._tokens(drawn.prompt_ids, drawn.made)
        figures.values["dropped_tokens"] = int(figures.counts["completion_tokens"]) - sampled
        figures.counts["tokens"] = trained
        return drawn

    def _replay(self, drawn: Drawn) -> Drawn:
        """Put kept groups of earlier steps in the places of those without signal."""
        names = gather_object(drawn.problem_ids)[:: self.num_generations]
        facts = self._has_signal(drawn), names, self._write_ledger
        drawn = self.replay.fill(self.state.global_step + 1, drawn, *facts)
        self.figures.values |= self.replay.figures
        self.figures.counts["tokens"] = self._tokens(drawn.prompt_ids, drawn.made)[1]
        return drawn

    def _rollouts(self, rows: list[dict]) -> tuple[Rollouts, list[list[int]]]:
        """Completions of this process's rows, or their episodes, and the token ids of their prompts."""
        if self.episodes is None:
            prompt_ids = self._token_ids([row["prompt"] for row in rows])
            return self.sampler.generate(self.policy, prompt_ids), prompt_ids
        results, report = cast(EpisodeSampler, self.sampler).run_episodes(self.policy, rows)
        self.figures.add(self.episodes.report(results, self.state.global_step + 1))
        version = min(gather_object([min(one.versions, default=self.policy.version) for one in results]))
        has_logps = self.config.rollout.backend == "server"
        return rollouts_of(results, version, report, has_logps), [one.prompt_ids for one in results]

    def _begin_next(self) -> Report:
        """Start to sample what the next step will learn from."""
        ahead = self._lookahead.rows()
        if self.episodes is not None:
            return cast(EpisodeSampler, self.sampler).begin_episodes(self.policy, ahead)
        prompt_ids = self._token_ids([row["prompt"] for row in ahead]) if ahead else []
        return cast(AheadSampler, self.sampler).begin(self.policy, prompt_ids)

    def _settle_sync(self) -> None:
        """Wait until the replicas serve the version before this step's update, which they sync during the step
        (`rollout.overlap`)."""
        if self.config.rollout.overlap:
            report = cast(AheadSampler, self.sampler).settle(self.policy)
            self.figures.add(report)
            self.figures.seconds["rollout"] += report.seconds.get("sync", 0.0)  # a part of it in every step

    def _truncated(self, prompt_ids: list[list[int]], made: Rollouts) -> list[bool]:
        """Which completions were cut at their token limit."""
        if made.episodes is not None:
            return [one.is_truncated for one in made.episodes]
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        most, rows = self.config.rollout.max_completion_length, zip(prompt_ids, made.token_ids, strict=True)
        return [not self.stop_texts.has_ended(prompt, ids, most, ends) for prompt, ids in rows]

    def _token_ids(self, prompts: list[list[dict]]) -> list[list[int]]:
        """Token ids of prompts; equal ones in a row, as those of a group, are rendered once."""
        alike = [list(one) for _, one in itertools.groupby(prompts)]
        made = self._tokenize_prompts(copy.deepcopy([one[0] for one in alike]))[0]  # TRL prepares messages in place
        return [[*ids] for ids, one in zip(made, alike, strict=True) for _ in one]

    def _tokens(self, prompt_ids: list[list[int]], made: Rollouts) -> tuple[int, int]:
        """The tokens that the model wrote, and all that an update with them computes, over all processes."""
        mine = [sum(sampled_lengths(made)), sum(map(len, made.token_ids)) + sum(map(len, prompt_ids))]
        counted = torch.tensor(mine, device=self.accelerator.device)
        sampled, computed = self.accelerator.reduce(counted, "sum").tolist()
        return sampled, computed

    def _count_tokens(self, prompt_ids: list[list[int]], made: Rollouts) -> None:
        completion_tokens, tokens = self._tokens(prompt_ids, made)
        self.figures.counts["completion_tokens"] += completion_tokens
        self.figures.counts["tokens"] += tokens
        self.state.num_input_tokens_seen += tokens
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]

    def _measure_heldout(self) -> None:
        with self.figures.timed("heldout"):
            accuracy = self.heldout.measure(self.sampler, self.policy, self._token_ids)
        self.figures.values["heldout_accuracy"] = accuracy
        if accuracy is not None:  # for the trackers
            self._metrics["train"]["heldout_accuracy"].append(accuracy)
        self.figures.note_peak("heldout")

    def _calculate_rewards(self, rows: list[dict], *args: Any) -> torch.Tensor:
        """Rewards (N, functions) of all processes' completions, NaN for those that a function could not judge."""
        try:
            with self.figures.timed("reward"):
                rewards = self._rewards_by_function(rows, *args)
        except RewardFailed as error:
            raise CheckFailed(
                f"step {self.state.global_step + 1}: {error} Return None for a completion whose reward cannot "
                "be computed, and put timeouts and retries around requests. Continue with --resume, or start "
                f"again before the first checkpoint. Traceback: {keep_traceback(self.run, error.__cause__)}"
            ) from error
        # A sum would count a reward that could not be computed as 0. A function of weight 0 is only measured.
        counted = (self.reward_weights != 0).to(rewards.device)
        rewards[rewards[:, counted].isnan().any(dim=1)] = torch.nan
        if self.episodes:
            rewards[torch.tensor(self.episodes.unknown(rows), device=rewards.device)] = torch.nan
        self.figures.counts["masked"] += rewards.isnan().all(dim=1).sum().item()
        self.figures.counts["completions"] += len(rewards)
        counts = {f.__name__: dict(f.unknown_counts) for f in self.reward_funcs if hasattr(f, "unknown_counts")}
        if self.episodes and self.recorder:  # all processes have counted the same
            counts[self.episodes.name] = dict(self.episodes.budget.counts)
        self._unknown = add_counts([self._unknown_before, *gather_object([counts])])
        return rewards

    def _rewards_by_function(
        self, rows: list[dict], prompts: list, completions: list, token_ids: list[list[int]]
    ) -> torch.Tensor:
        """TRL's rewards (N, functions); those of group functions too where groups span processes."""
        functions = [one for one in self.reward_funcs if getattr(one, "is_group", False)]
        if not functions or len(rows) % self.num_generations == 0:
            return super()._calculate_rewards(rows, prompts, completions, token_ids)
        place = self.num_generations, self.accelerator.process_index
        give_groups(functions, rows, prompts, completions, token_ids, *place)
        rewards = super()._calculate_rewards(rows, prompts, completions, token_ids)
        take_rewards(functions, self.reward_func_names, rewards)
        return rewards

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        try:
            if STREAM in inputs:
                with contextlib.closing(inputs[STREAM]) as batches:
                    return self.policy_step.streamed_loss(model, batches, inputs[ROWS])
            loss = self.policy_step.loss(model, inputs, self.current_gradient_accumulation_steps)
            if self.accelerator.sync_gradients:
                self._settle_sync()
            return loss
        except SamplerIsNotThePolicy:
            record = self._record({}, self.state.global_step + 1)
            self._send_figures(record)
            if self.recorder:
                self.recorder.step(record)
            raise

    def _send_figures(self, record: dict, sent: dict | None = None) -> None:
        """Send a step's line of metrics.jsonl to the trackers, except what they have from `sent`."""
        if self.config.watch.report_to and (found := figures(record, sent or {})):
            self.callback_handler.on_log(self.args, self.state, self.control, found)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        training = "loss" in logs and self.model.training
        super().log(logs, start_time)
        # transformers writes all of them into every checkpoint; metrics.jsonl has every step.
        del self.state.log_history[:-KEPT_LOGS]
        if not training:
            return
        self.figures.synchronize()
        record = self._record(logs, self.state.global_step)
        self.figures.clear()
        self._send_figures(record, logs)
        if self.recorder:
            self.recorder.step(record)
            if self.recorder.wants_completions(record["step"]) and record["completion_tokens"]:
                rows = self._sampled.rows(self.config.data, self.golds)[: self.config.watch.completions_per_step]
                self.recorder.completions(record["step"], rows)
                trackers = self.config.watch.report_to, self.callback_handler.callbacks
                send_completions(*trackers, record["step"], rows)
        # DeepSpeed hides the gradients, so there FiniteGradients sees none and this check is the first.
        # A gradient that overflowed at its loss scale was not used; the loss is not scaled where it is logged.
        checked = ("loss",) if record.get("update_skipped") else ("loss", "grad_norm")
        if bad := [key for key in checked if not math.isfinite(record[key] or 0.0)]:
            is_half = self.config.model.dtype == "float16"
            half = " In float16 activations above 65,504 overflow: use bfloat16 or float32." if is_half else ""
            raise CheckFailed(
                f"step {record['step']}: {' and '.join(bad)} not finite. This step's adapter is not saved. Start "
                f"another run from the newest adapter (policy.init_adapter) with a lower train.learning_rate.{half}"
            )

    def _record(self, logs: dict, step: int) -> dict:
        mine = self.figures
        seconds = dict.fromkeys(("rollout", "reward", "sync"), 0.0) | mine.seconds
        seconds["step"] = time.perf_counter() - (mine.started or time.perf_counter())
        others = sum(seconds.get(name, 0.0) for name in ("rollout", "reward", "heldout", "reference", "teacher"))
        seconds["update"] = max(0.0, seconds["step"] - others)
        mine.peak_gib["update"] = max(mine.peak_gib.get("update", 0.0), peak_gib())
        counts, means = mine.counts, dict.fromkeys(METRICS.values())
        means |= {ours: logs[theirs] for theirs, ours in METRICS.items() if theirs in logs}
        if self.config.train.mask_truncated and means["truncated_fraction"] == 1:
            means |= dict.fromkeys(("kl", "entropy", "clip_fraction"))  # TRL's means over no token are 0
        generation_s = seconds["rollout"] + seconds.get("rollout_hidden", 0.0)
        return {
            "step": step,
            "total_steps": self.state.max_steps,
            "time": time.time(),
            **means,
            "rewards": {name: logs.get(f"rewards/{name}/mean") for name in self.reward_func_names},
            "masked_fraction": counts["masked"] / counts["completions"] if counts["completions"] else None,
            "unknown_rewards": self._unknown,
            **dict.fromkeys(
                (
                    *MISMATCH,
                    *ROUTING_KEYS,
                    *EPISODE_KEYS,
                    *RESAMPLE_KEYS,
                    *REPLAY_KEYS,
                    *SCALE_KEYS,
                    "canary_delta",
                    "canary_k3",
                    "sync_seconds",
                    "server_product",
                    "server_kv_cache",
                    *DRAFT_KEYS,
                    "heldout_accuracy",
                    "mapped_gib",
                    *WATCHED,
                )
            ),
            **mine.values,
            **(quantizers.watched() if (quantizers := quantizers_of(self.model)) else {}),
            "completion_tokens": int(counts["completion_tokens"]),
            "rollout_tokens_per_s": counts["completion_tokens"] / generation_s if generation_s else None,
            "update_tokens_per_s": counts["tokens"] / seconds["update"] if counts["tokens"] else None,
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "peak_gib": {name: round(value, 4) for name, value in mine.peak_gib.items()},
            "adapter_version": mine.version,
            "policy_lag": step - 1 - mine.version,
        }

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        step = self.state.global_step
        try:
            # GRPOTrainer's own only adds a model card to the output directory.
            Trainer._save_checkpoint(self, model, trial)
            self.accelerator.wait_for_everyone()
            policy = self.accelerator.unwrap_model(self.model)
            adapter = gather_adapter(policy) if self.policy.is_split else None
            if self.replay:
                self.replay.keep(self._buffered_inputs)
            if self.accelerator.is_main_process:
                staged = staging_directory(self.run) / f"checkpoint-{step}"
                if self.replay:
                    self.replay.write(staged)
                ledger = ledger_facts(self.run.ledger_file, step)
                place = self.run.adapter_dir(step)
                publish_adapter(policy, place, step, self.policy.base_hash, adapter, ledger=ledger)
                state = write_quantizer_state(policy, staged) | {"processes": self.accelerator.num_processes}
                commit_checkpoint(self.run, step, self.policy.base_hash, **state)
                rotate(self.run, self.config.train.keep_checkpoints)
        except SAVE_ERRORS as error:
            if not is_disk_error(error):
                raise
            failed = saving_failed(self.run, step, error, self._checkpoint_bytes())
            if self.accelerator.is_main_process:
                discard_staged(self.run)
            raise failed from error
        self.accelerator.wait_for_everyone()

    def _checkpoint_bytes(self) -> int:
        """Approximate size of a save: the adapter twice, and the optimizer's state."""
        adapter = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        states = getattr(self.optimizer, "state", {}).values()
        tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
        return 2 * adapter + sum(value.numel() * value.element_size() for value in tensors)
