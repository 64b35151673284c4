"""GRPO on an NF4 base with a LoRA adapter; the KL reference is the same model with the adapter off.

The base is quantized once and never written again: its bytes are hashed before the first step and after the last.
Only the adapter learns, only the adapter is saved. Losses: Dr. GRPO, DAPO, GRPO (`train.loss_type`).

Left out on purpose: a reward model, several turns, tools, a second model in memory.

    # two CPU cores, a model made on the spot (`make quickstart` does both)
    python recipes/tiny_base.py --out models/tiny-base
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo_qlora.py \\
        --config recipes/configs/grpo-tiny-nf4-cpu.yaml

    # one GPU
    accelerate launch --config_file accelerate_configs/one_gpu.yaml recipes/grpo_qlora.py \\
        --config recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml

    # eight GPUs of one machine: vLLM samples on four (GPUs 4 to 7 in the YAML), four processes train
    python -m merge base --config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml
    python -m launch.server --config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml --detach
    CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \\
        recipes/grpo_qlora.py --config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml

Measured: the CPU recipe, 80 steps in 66 s, peak 1.21 GiB of memory, reward .492 (first 10 steps) to .922 (last 10),
seed 0; 2 cores of an AMD EPYC, 2026-11-21, torch 2.13.0+cpu, transformers 5.17.0, trl 1.16.0, peft 0.21.2,
bitsandbytes 0.50.2. An 8B shape on GPUs: tests/gpu/README.md. The 1.5B recipe: not measured.

Every key can be given on the command line (`--train.learning_rate 2e-5`); `--dry_run` checks everything and trains
nothing; `--resume` continues from the newest whole checkpoint. Exit code: 0 done, 1 a check said no, 2 bad input.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from recipes.parts.checks import (
    check_config,
    check_run_directory,
    describe_split,
    is_main_process,
    lock_run,
    world_size,
)
from recipes.parts.config import Config, parse_command
from recipes.parts.errors import BadInput, run_command
from recipes.parts.recipe import PLAIN, check_recipe


def say(text: str) -> None:
    """Print, in the main process only."""
    if is_main_process():
        print(text, flush=True)


def load_data(config: Config, tokenizer, processes: int) -> tuple:
    """The training set as TRL reads it and its size; every prompt fits, and the held-out problems can be read."""
    from recipes.parts.data import drop_long, read_problems, to_dataset

    problems, report = read_problems(config.data, "train")
    problems, dropped = drop_long(problems, tokenizer, config.data, config.rollout.max_prompt_length)
    say(f"training problems: {report.summary()}, {dropped} too long, {len(problems):,} used")
    heldout, report = read_problems(config.data, "eval")
    say(f"held-out problems: {report.summary()}, {len(heldout):,} used")
    train = config.train
    needed = (
        train.per_device_train_batch_size * processes * train.gradient_accumulation_steps // config.rollout.group_size
    )
    if len(problems) < needed:
        raise BadInput(
            f"a step draws {needed} problems and {len(problems)} are left. Lower the batch, or add problems."
        )
    return to_dataset(problems, config.data), len(problems)


def check_context(config: Config, model_config) -> None:
    """`BadInput` unless a prompt and a completion of the longest allowed length fit the model's context."""
    wanted = config.rollout.max_prompt_length + config.rollout.max_completion_length
    context = model_config.get_text_config().max_position_embeddings
    if wanted > context:
        raise BadInput(
            f"rollout.max_prompt_length + max_completion_length ({wanted}) exceeds the context of "
            f"{config.model.source} ({context}). Lower one of them."
        )


def check_model(config: Config, processes: int):
    """The model's transformers config, everything checked that depends on it, and `train.recompute: auto` resolved."""
    from recipes.parts.host_embedding import check_embeddings
    from recipes.parts.kernels import check_kernels
    from recipes.parts.packing import check_packing
    from recipes.parts.policy import check_base, check_init_adapter

    model_config = check_base(config)
    check_context(config, model_config)
    check_packing(config, model_config)
    check_embeddings(config, model_config)
    check_init_adapter(config)
    check_kernels(config, model_config.model_type)
    if config.train.recompute == "auto":
        from launch.planning.recompute import resolve

        say(resolve(config, model_config.to_dict(), processes))
    return model_config


def describe_plan(config: Config, problems: int, processes: int) -> str:
    """What the run would do, in a few lines."""
    import torch

    train, rollout = config.train, config.rollout
    completions = train.per_device_train_batch_size * processes * train.gradient_accumulation_steps
    has_gpu = torch.cuda.is_available() or train.max_gpu_gib is not None or config.server.gpus is not None
    split = describe_split(config) if has_gpu else None
    return "\n".join(
        [
            f"run       {config.run.name} -> {config.run.directory}",
            f"base      {config.model.source}, {config.policy.quantization}, {config.model.dtype} compute, "
            f"double quantization {'on' if config.policy.double_quantization else 'off'}",
            f"adapter   LoRA rank {config.policy.lora_rank}, alpha {config.policy.lora_alpha}, "
            f"{config.policy.adapter_dtype}, on {config.policy.target_modules}",
            f"step      {completions // rollout.group_size} problems x {rollout.group_size} completions of at most "
            f"{rollout.max_completion_length} tokens, {train.max_steps} steps over {problems:,} problems",
            f"loss      {train.loss_type}, beta {train.beta}, learning rate {train.learning_rate}",
            f"rollouts  {rollout.backend}, temperature {rollout.temperature}",
            *([f"memory    {split}"] if split else []),
            f"rewards   {', '.join(config.reward.functions)}",
        ]
    )


def make_rollout(config: Config, tokenizer, model_config, run):
    """The rollout backend, checked as far as it can be without weights; None: the policy generates in this process."""
    if config.rollout.backend == "in_process":
        return None
    from recipes.parts.policy import adapted_layers
    from recipes.parts.rollout import ServerRollout

    rollout = ServerRollout(config, tokenizer, run)
    rollout.check(adapted_layers(config, model_config), model_config.get_text_config().vocab_size)
    return rollout


def main() -> None:
    config, flags = parse_command(__doc__)
    check_recipe(config, PLAIN)
    processes = world_size()
    check_config(config, processes)
    run = check_run_directory(config, flags.resume, processes)

    from accelerate import PartialState

    from recipes.parts.heldout import HeldOut
    from recipes.parts.kernels import check_gpu
    from recipes.parts.policy import check_base_unchanged, load_policy_base, load_tokenizer, lora_config, record_base
    from recipes.parts.record import write_config
    from recipes.parts.rundir import write_json
    from recipes.parts.sharding import loading_whole
    from recipes.parts.trainer import PolicyTrainer, check_card, limit_gpu_memory, trainer_arguments
    from reward import reward_functions

    model_config = check_model(config, processes)
    rewards, weights = reward_functions(config.reward)
    tokenizer = load_tokenizer(config)
    dataset, problems = load_data(config, tokenizer, processes)
    arguments = trainer_arguments(config, run)
    check_card(config)
    heldout = HeldOut(config, tokenizer) if config.watch.eval_every else None
    state = PartialState()
    say(describe_plan(config, problems, processes))
    if flags.dry_run:
        if state.is_main_process and not flags.resume:
            write_config(config, run, processes)
        return
    lock = lock_run(run) if state.is_main_process else None
    if state.is_main_process:
        write_config(config, run, processes)

    check_gpu(config)
    limit_gpu_memory(config)
    with loading_whole(arguments):
        rollout = make_rollout(config, tokenizer, model_config, run)
        base = load_policy_base(config)
    facts = record_base(base, run, config, write=False)
    if rollout:
        rollout.check_base(facts["hash"])
    if state.is_main_process:
        write_json(run.base_file, facts)
    arguments.reward_weights = weights
    trainer = PolicyTrainer(
        config=config,
        run=run,
        base_hash=facts["hash"],
        rollout=rollout,
        heldout=heldout,
        model=base,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora_config(config.policy),
    )
    started = time.perf_counter()
    try:
        trainer.train_run(resume=flags.resume)
    finally:
        if rollout and state.is_main_process:
            rollout.close()
    check_base_unchanged(trainer.accelerator.unwrap_model(trainer.model), facts)
    say(
        f"done: {trainer.state.global_step} steps in {time.perf_counter() - started:.0f} s, base unchanged "
        f"({facts['hash'][:12]}), adapter {run.newest_adapter()}"
    )
    if lock:
        lock.close()


if __name__ == "__main__":
    run_command(main)
