"""Stock TRL's GRPOTrainer as a run's YAML says, from its start to the last step; one line "ROW {json}" per step.

    python bench/step/stock_clock.py --side bf16 --config RUN.yaml --train.max_steps 50
    python bench/step/stock_clock.py --side nf4 --device cpu --config RUN.yaml --train.max_steps 2

`bf16`: a BF16 base with vLLM colocated in this process. `nf4`: a base in NF4 as TRL's documentation loads it, with
transformers generating: vLLM would get merged and rounded weights (tests/evidence/stock_merge.py). Both take from the
YAML everything that decides what is learned: model, problems with their prompts, rewards, seed, LoRA, batch, lengths,
loss, learning rate, sampling, importance correction. Nothing of the kit's trainer or server runs.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput, run_command
from kit.policy.load import load_tokenizer, lora_config
from kit.train.setup import load_data
from kit.weights.attention import attention_of
from kit.weights.model_files import read_config
from reward import reward_functions

SIDES = ("bf16", "nf4")


def learned(config: Config, micro_batch: int | None) -> dict[str, Any]:
    """GRPOConfig fields that decide what is learned; `BadInput` if `micro_batch` does not divide a batch."""
    train, rollout = config.train, config.rollout
    rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
    micro_batch = micro_batch or train.per_device_train_batch_size
    if rows % micro_batch:
        raise BadInput(f"--micro_batch {micro_batch} does not divide the {rows} completions of a step.")
    found = {
        "seed": config.run.seed,
        "max_steps": train.max_steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler,
        "warmup_steps": train.warmup_steps,
        "loss_type": train.loss_type,
        "scale_rewards": train.scale_rewards or ("none" if train.loss_type == "dr_grpo" else "group"),
        "beta": train.beta,
        "epsilon": train.epsilon,
        "epsilon_high": train.epsilon_high,
        "num_iterations": train.num_iterations,
        "mask_truncated_completions": train.mask_truncated,
        "max_grad_norm": train.max_grad_norm,
        "weight_decay": train.weight_decay,
        "optim": train.optimizer,
        "gradient_checkpointing": train.recompute != "none",
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "num_generations": rollout.group_size,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "chat_template_kwargs": config.data.chat_template_kwargs or None,
        "vllm_importance_sampling_correction": rollout.correction != "none",
        "vllm_importance_sampling_clip_max": rollout.correction_cap,
    }
    if rollout.correction != "none":
        found["vllm_importance_sampling_mode"] = rollout.correction
    return found


def sampler(side: str, config: Config, vllm_share: float) -> dict[str, Any]:
    """GRPOConfig fields that select the sampler."""
    if side == "nf4":
        return {"use_vllm": False}
    longest = config.rollout.max_prompt_length + config.rollout.max_completion_length + 1
    found = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": longest}
    return found | {"vllm_gpu_memory_utilization": vllm_share}


def quantization(side: str, config: Config, dtype: Any) -> Any:
    """Quantization config for stock's base; None for BF16."""
    from transformers import BitsAndBytesConfig

    if side == "bf16":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=config.policy.double_quantization,
        bnb_4bit_compute_dtype=dtype,
    )


def recorder() -> Any:
    """A callback that prints a row at the end of every step."""
    import torch
    from transformers import TrainerCallback

    names = {"reward": "reward", "kl": "kl", "completions/mean_length": "length"}
    names |= {"completions/clipped_ratio": "truncated"}

    class Record(TrainerCallback):
        """Times are absolute, so that the parent process can subtract the start of this one."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **keys: Any) -> None:
            if "reward" not in (logs or {}):  # the summary after the last step
                return
            cuda = torch.cuda.is_available()
            row = {"number": state.global_step, "time": time.time()}
            row |= {ours: logs.get(theirs) for theirs, ours in names.items()}
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
            print(f"ROW {json.dumps(row)}", flush=True)

    return Record()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--config", required=True, help="YAML of the run; its keys as --group.key value")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--vllm_share", type=float, default=0.3, help="of the card, for the colocated vLLM")
    parser.add_argument("--micro_batch", type=int, help="completions per forward; default the YAML's")
    options, overrides = parser.parse_known_args()
    config = load_config(options.config, overrides)
    if options.side == "bf16" and options.device == "cpu":
        raise BadInput("--side bf16 needs a GPU: TRL's colocated vLLM does not run on a CPU. Use --side nf4.")
    fields = learned(config, options.micro_batch) | sampler(options.side, config, options.vllm_share)

    import torch
    from trl import GRPOConfig, GRPOTrainer

    rewards, weights = reward_functions(config.reward)
    tokenizer = load_tokenizer(config)
    dataset, _ = load_data(config, tokenizer, 1)
    dtype = getattr(torch, config.model.dtype)
    attention = attention_of(read_config(config.model.source), config.model.attn_implementation)
    arguments = GRPOConfig(
        **fields,
        output_dir=str(config.run.directory),
        reward_weights=weights,
        bf16=dtype is torch.bfloat16,
        use_cpu=options.device == "cpu",
        model_init_kwargs={"dtype": dtype, "attn_implementation": attention},
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=config.model.source,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        quantization_config=quantization(options.side, config, dtype),
        peft_config=lora_config(config.policy),
        callbacks=[recorder()],
    )
    trainer.train()


if __name__ == "__main__":
    run_command(main)
