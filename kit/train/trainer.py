"""The trainer: `GRPOTrainer` of TRL with the kit's rollouts, step, records and checkpoints.

Written for trl 1.16. `GRPOTrainer` has no public seam for a rollout backend, for what a step records or for how a
checkpoint becomes whole, so this one class overrides `_generate`, `_generate_single_turn`, `_calculate_rewards`,
`_generate_and_score_completions`, `log` and `_save_checkpoint`; `tests/unit/test_trl_seams.py` fails when upstream
moves any of them. The advantages, the sampler and the optimizer loop stay TRL's. The step is in `step.py`, its loss in
`loss.py`, generation ahead of it in `overlap.py`.
"""

import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from transformers import PrinterCallback, Trainer, TrainerCallback

from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed
from kit.core.format_names import read_quant_format
from kit.core.run_directory import RunDir, checkpoint_step
from kit.policy.fused_linear import check_compute, use_fused_linears
from kit.policy.host_memory import peak_resident_gib, reset_peak_resident
from kit.policy.kept_weights import keeping_weights
from kit.policy.liger import use_kernels
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
from kit.policy.sharding import gather_adapter, prepare
from kit.rollout.noise import facts, noise_of, noisy
from kit.rollout.overlap import OverlappedRollouts
from kit.train.checkpoint import (
    SAVE_ERRORS,
    commit_checkpoint,
    discard_staged,
    is_disk_error,
    rewind,
    rotate,
    saving_failed,
    staging_directory,
)
from kit.train.data_order import DataOrder, passes_made
from kit.train.finite import FiniteAdapter, FiniteGradients
from kit.train.head_tiles import use_host_tiles
from kit.train.heldout import HeldOut
from kit.train.loss import LossFunction, LossSettings
from kit.train.mismatch import KEYS as MISMATCH
from kit.train.own_loss import load_loss
from kit.train.record import Recorder, add_counts, keep_traceback, unknown_so_far
from kit.train.step import PolicyStep
from kit.train.trackers import prepare_trackers, send_completions, send_figures
from kit.train.trl_trainer import GRPOConfig, GRPOTrainer, typed_fields
from reward.own import RewardFailed

# TRL metric -> key of metrics.jsonl
METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_spread_fraction",
    "kl": "kl",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "completions/clipped_ratio": "truncated_fraction",
    "completions/mean_length": "completion_length",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def trainer_arguments(config: Config, run: RunDir) -> GRPOConfig:
    """TRL's `GRPOConfig` for a checked configuration; `BadInput` for a wrong or reserved key of `train.trl`."""
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
        "loss_type": train.loss_type,
        "scale_rewards": scale,
        "beta": train.beta,
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
        # Without this, transformers refuses bf16 where there is no GPU, and a dry run could not check such a recipe.
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
        # transformers looks for unused parameters in every model that is not its own, and a PeftModel is not.
        "ddp_find_unused_parameters": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": rollout.correction != "none",
        "vllm_importance_sampling_clip_max": rollout.correction_cap,
    }
    if rollout.correction != "none":
        ours["vllm_importance_sampling_mode"] = rollout.correction
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
            f"one process sees {arguments.n_gpu} GPUs and would use one. Launch with accelerate_configs/one_gpu.yaml, "
            "which shows it one, or with accelerate_configs/ddp.yaml and --num_processes."
        )
    return arguments


def loss_settings(arguments: GRPOConfig, config: Config) -> LossSettings:
    """What `arguments`, TRL's for this configuration, and `rollout` say about the loss."""
    return LossSettings(
        loss_type=arguments.loss_type,
        beta=arguments.beta,
        epsilon=arguments.epsilon,
        epsilon_high=arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high,
        delta=arguments.delta,
        importance_sampling_level=arguments.importance_sampling_level,
        bias_corrected_kl=arguments.use_bias_correction_kl,
        off_policy_threshold=arguments.off_policy_mask_threshold,
        top_entropy_quantile=arguments.top_entropy_quantile,
        entropy_coef=arguments.entropy_coef,
        max_completion_length=arguments.max_completion_length,
        correction=config.rollout.correction,
        correction_cap=config.rollout.correction_cap,
        correction_floor=arguments.vllm_importance_sampling_clip_min,
    )


def check_optimizer(arguments: Any) -> None:
    """`BadInput` when transformers cannot make the optimizer of these arguments here: most often its package lacks, or
    a number is out of its range."""
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Module())
        if not {"model", "params", "optimizer_dict"} & settings.keys():  # what others want of the real model
            kind([torch.nn.Parameter(torch.zeros(1))], **settings)
    except (ImportError, ValueError) as error:
        raise BadInput(
            f"train.optimizer is {arguments.optim.value}, which cannot be made here: {str(error).rstrip('.')}. Use "
            "adamw_torch_fused or adamw_8bit, or mend that."
        ) from None


def check_card(config: Config) -> None:
    """`BadInput` when the GPU, if there is one, cannot compute as `policy.compute` says."""
    check_compute(config.policy.compute, config.model.dtype)


class NewWeights(TrainerCallback):
    """Invalidates the cached peaks of quantized layers after each update: DeepSpeed and 8-bit optimizers bypass a
    tensor's version counter."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        forget_peaks(model)


class PolicyTrainer(OverlappedRollouts, PolicyStep, DataOrder, GRPOTrainer):
    """GRPO on a frozen NF4 base with an adapter; records every step in the run directory.

    `model` is the base without adapter; the reference is that same base, reached by switching the adapter off.
    """

    _kept: bool | None = None  # what was printed of rollout.keep_weights

    def __init__(
        self,
        *,
        config: Config,
        run: RunDir,
        base_hash: str,
        rollout: Any = None,
        heldout: HeldOut | None = None,
        loss: LossFunction | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.sharding = prepare(self.accelerator, self.model)
        use_host_tiles(self.accelerator.device)
        if self.ref_model is not None or "ref" in self.model.peft_config:
            raise CheckFailed("a second reference was created; the reference must be the policy with its adapter off.")
        if config.train.micro_batch_tokens is not None:
            use_packed_attention(self.model.get_base_model())
        # Since torch 2.11 sdpa's first choice on Hopper. With a padding mask its backward pass gives NaN where the
        # length divided by 128 leaves 64 and a position's log-sum-exp is below -88 (pytorch issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config, self.run, self.base_hash, self.rollout, self.heldout = config, run, base_hash, rollout, heldout
        self.loss_settings = loss_settings(self.args, config)
        self.loss_function = loss or load_loss(config, self.loss_settings)
        set_adapter_dtype(self.model, config.policy.adapter_dtype)
        if config.policy.init_adapter:
            load_adapter_weights(self.model, config.policy.init_adapter)
        if config.policy.compute != "plain":
            use_fused_linears(self.model, config.policy.compute)
        if config.policy.quant_cfg is not None:
            use_quantized_linears(self.model, read_quant_format(config.policy.quant_cfg))
            self.add_callback(NewWeights())
        use_kernels(self.model, config)
        use_recompute(self.model, config)
        self.remove_callback(PrinterCallback)
        self.add_callback(FiniteGradients(self.keep_step))
        self.add_callback(FiniteAdapter())
        self.recorder = Recorder(run, config) if self.accelerator.is_main_process else None
        self._seconds, self._counts = defaultdict(float), defaultdict(float)
        self._peak: dict[str, float] = {}
        self._sampler: dict[str, Any] = {}
        self._unknown, self._unknown_before = {}, {}  # the latter: before a resume, in the main process
        self._problem_ids: list[str] = []
        self._row_versions: list[int] = []
        self._rollout_version = 0
        self._step_started: float | None = None

    def train_run(self, resume: bool) -> None:
        """Train to the last step, from the start or from the newest whole checkpoint of the run."""
        damaged: list[str] = []
        checkpoint = self.run.newest_checkpoint(damaged) if resume else None
        self.passes = passes_made(checkpoint) if checkpoint else 0
        if self.accelerator.is_main_process:
            discard_staged(self.run)
            for problem in damaged:
                self.recorder.say(f"passed over: {problem}")
            if checkpoint:
                step = rewind(self.run, checkpoint)
                self.recorder.say(f"resuming from {checkpoint} (step {step})")
                self._unknown_before = unknown_so_far(self.run.metrics_file)
        self.accelerator.wait_for_everyone()
        if checkpoint and checkpoint_step(checkpoint) >= self.args.max_steps:
            # transformers would train one step more.
            return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.accelerator.wait_for_everyone()  # transformers looks at what is staged once more, in every process
        if self.accelerator.is_main_process:
            discard_staged(self.run)

    @property
    def adapter_version(self) -> int:
        """The version the next rollout is sampled from: the number of updates made."""
        return self.state.global_step

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's wall-clock seconds to a phase of this step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[phase] += time.perf_counter() - started

    def keep_step(self) -> str:
        """Write this process's rows of the step, as TRL has them, and its adapter; a sentence that says where."""
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
            return f"Its rows could not be kept: {error}."
        return f"Its rows and the adapter are in {file}."

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        # peft casts what it loads to float32.
        set_adapter_dtype(self.model, self.config.policy.adapter_dtype)
        if self.config.policy.quant_cfg is not None:
            restore_quantizers(self.model, resume_from_checkpoint)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._step_started is None:
            self._step_started = time.perf_counter()
            _reset_peak()
        return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        # (B*G) rows of this process; with all processes, the problems of the step in the order they were drawn.
        self._rollout_version = self.adapter_version
        self._problem_ids = gather_object([row["problem_id"] for row in inputs])
        if self.recorder:
            self.recorder.ledger(self.state.global_step + 1, list(dict.fromkeys(self._problem_ids)))
        output = super()._generate_and_score_completions(inputs)
        versions = self.rollout.versions if self.rollout is not None else [self._rollout_version] * len(inputs)
        self._row_versions = gather_object(versions)
        return output

    def _generate(self, prompts: list) -> tuple:
        with self.timed("rollout"), self._keeping_weights():
            output = super()._generate(prompts)
        prompt_ids, completion_ids = output[0], output[1]
        made = torch.tensor([sum(map(len, completion_ids)), sum(map(len, prompt_ids))], device=self.accelerator.device)
        completion_tokens, prompt_tokens = self.accelerator.reduce(made, "sum").tolist()
        self._counts["completion_tokens"] += completion_tokens
        self._counts["tokens"] += completion_tokens + prompt_tokens
        self._peak["rollout"] = _peak_gib()
        _reset_peak()
        if self.heldout and self.heldout.is_due(self.state.global_step + 1):
            self._measure_heldout()
        return output

    def _measure_heldout(self) -> None:
        with self.timed("heldout"), self._keeping_weights():
            accuracy = self.heldout.measure(self)
        self._sampler["heldout_accuracy"] = accuracy
        if accuracy is not None:  # for the trackers
            self._metrics["train"]["heldout_accuracy"].append(accuracy)
        self._peak["heldout"] = _peak_gib()
        _reset_peak()

    @contextlib.contextmanager
    def _keeping_weights(self) -> Iterator[None]:
        """Around whatever generates: `rollout.keep_weights`, for generation in this process."""
        if self.rollout is not None or self.sharding:
            yield
            return
        rollout, train = self.config.rollout, self.config.train
        rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        tokens = rollout.max_prompt_length + rollout.max_completion_length
        policy = self.accelerator.unwrap_model(self.model)
        with keeping_weights(policy, rollout.keep_weights, rows, tokens) as room:
            if self.recorder and room and room.is_kept != self._kept:
                self._kept = room.is_kept
                self.recorder.say(str(room))
            yield

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> tuple[list, list | None]:
        if self.rollout is None:
            noise = noise_of(self.config, self.adapter_version)
            self._sampler |= facts(noise)
            with noisy(self.accelerator.unwrap_model(self.model), noise):
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        try:
            return self.rollout.generate(self, prompt_ids)
        finally:
            self._sampler |= self.rollout.report

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            with self.timed("reward"):
                rewards = super()._calculate_rewards(*args, **kwargs)  # (all processes' B*G, functions)
        except RewardFailed as error:
            raise CheckFailed(
                f"step {self.state.global_step + 1}: {error} Let it return None for a completion whose reward cannot "
                "be computed, and bound and retry what it asks of other machines. Continue with --resume, or start "
                f"again before the first checkpoint. Traceback: {keep_traceback(self.run, error.__cause__)}"
            ) from error
        # TRL masks a sample that no function could compute; where only one could not, its sum takes that as 0. One of
        # weight 0 is only measured.
        counted = (self.reward_weights != 0).to(rewards.device)
        rewards[rewards[:, counted].isnan().any(dim=1)] = torch.nan
        self._counts["masked"] += rewards.isnan().all(dim=1).sum().item()
        self._counts["completions"] += len(rewards)
        counts = {f.__name__: dict(f.unknown_counts) for f in self.reward_funcs if hasattr(f, "unknown_counts")}
        self._unknown = add_counts([self._unknown_before, *gather_object([counts])])
        return rewards

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        training = "loss" in logs and self.model.training
        super().log(logs, start_time)
        if not training:
            return
        self._synchronize()
        record = self._record(logs, self.state.global_step)
        self._step_started = None
        for tally in (self._seconds, self._counts, self._peak, self._sampler):
            tally.clear()
        send_figures(self, record, logs)
        if self.recorder:
            self.recorder.step(record)
            if self.recorder.wants_completions(record["step"]) and record["completion_tokens"]:
                rows = self._completion_rows()
                self.recorder.completions(record["step"], rows)
                send_completions(self, record["step"], rows[: self.config.watch.completions_per_step])
        # DeepSpeed keeps the gradients to itself, so there FiniteGradients sees none and this is the first to know.
        if bad := [key for key in ("loss", "grad_norm") if not math.isfinite(record[key] or 0.0)]:
            raise CheckFailed(
                f"step {record['step']}: {' and '.join(bad)} not finite. This step's adapter is not saved. Start "
                "another run from the newest adapter (policy.init_adapter) with a lower train.learning_rate."
            )

    def _record(self, logs: dict, step: int) -> dict:
        seconds = dict.fromkeys(("rollout", "reward", "sync"), 0.0) | dict(self._seconds)
        seconds["step"] = time.perf_counter() - (self._step_started or time.perf_counter())
        others = sum(seconds.get(name, 0.0) for name in ("rollout", "reward", "heldout", "reference", "teacher"))
        seconds["update"] = max(0.0, seconds["step"] - others)
        self._peak["update"] = _peak_gib()
        counts, means = self._counts, {ours: logs.get(theirs) for theirs, ours in METRICS.items()}
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
            **dict.fromkeys((*MISMATCH, "canary_delta", "canary_k3", "sync_seconds", "heldout_accuracy", *WATCHED)),
            **self._sampler,
            **(quantizers.watched() if (quantizers := quantizers_of(self.model)) else {}),
            "completion_tokens": int(counts["completion_tokens"]),
            "rollout_tokens_per_s": counts["completion_tokens"] / generation_s if generation_s else None,
            "update_tokens_per_s": counts["tokens"] / seconds["update"] if counts["tokens"] else None,
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "peak_gib": {name: round(value, 4) for name, value in self._peak.items()},
            "adapter_version": self._rollout_version,
            "policy_lag": step - 1 - self._rollout_version,
        }

    def _completion_rows(self) -> list[dict]:
        logs = self._logs
        rewards = {name: list(values) for name, values in logs["rewards"].items()}
        return [
            {
                "problem_id": problem_id,
                "prompt": prompt[-1]["content"],
                "completion": completion[0]["content"],
                "rewards": {name: values[index] for name, values in rewards.items()},
                "advantage": advantage,
                "adapter_version": version,
            }
            for index, (problem_id, version, prompt, completion, advantage) in enumerate(
                zip(
                    *(self._problem_ids, self._row_versions, logs["prompt"], logs["completion"], logs["advantages"]),
                    strict=True,
                )
            )
        ]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        try:
            # GRPOTrainer's own only adds a model card to the output directory.
            Trainer._save_checkpoint(self, model, trial)
            self.accelerator.wait_for_everyone()
            policy = self.accelerator.unwrap_model(self.model)
            adapter = gather_adapter(policy) if self.sharding else None
            if self.accelerator.is_main_process:
                publish_adapter(policy, self.run.adapter_dir(step), step, self.base_hash, adapter)
                state = write_quantizer_state(policy, staging_directory(self.run) / f"checkpoint-{step}")
                commit_checkpoint(self.run, step, self.base_hash, **state)
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

    def _synchronize(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak_resident()


def _peak_gib() -> float:
    """Peak GPU memory since the last reset; without a GPU, the process's peak resident memory."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else peak_resident_gib()
