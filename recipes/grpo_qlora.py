"""GRPO on an NF4 base with a LoRA adapter; the KL reference is the same model with the adapter off.

The base is quantized once and never written again: its bytes are hashed before the first step and after the last.
Only the adapter learns, only the adapter is saved. Losses: Dr. GRPO, DAPO, GRPO, GSPO, CISPO, SAPO (`train.loss_type`)
or one of your own (`train.loss`, kit/README.md). A step:

    sample     `rollout.group_size` completions of each problem, by the policy in this process or by vLLM servers that
               hold the same base, dequantized, and load the adapter before each step; a canary batch scored by trainer
               and servers shows that they hold one policy
    reward     `reward.functions`; a reward that could not be computed is masked and counted, never 0
    resample   groups without signal, up to `rollout.resample_rounds` times, by those of fresh problems
    advantage  the reward minus the mean of its group, divided by a standard deviation as `train.scale_rewards` says
    loss       the clipped importance ratio times the advantage, `train.beta` times the KL to the reference, corrected
               for the mismatch of sampler and policy (`rollout.correction`); one forward gives the old log-probs too
    update     the adapter, unless a gradient is not finite or the sampler is too far off (`rollout.max_sampler_k3`)
    record     a line of metrics, the step's problem ids; every `train.save_steps` steps a checkpoint and the adapter

With `environment` a completion is an episode of several turns, with tools (kit/environments/README.md).

Left out on purpose: a second model in memory.

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
bitsandbytes 0.50.2. An 8B shape on GPUs: bench/README.md. The 1.5B recipe: not measured.

Every key can be given on the command line (`--train.learning_rate 2e-5`); `--dry_run` checks everything and trains
nothing; `--resume` continues from the newest whole checkpoint, `--overwrite` starts the run anew. Exit code: 0 done,
1 a check failed, 2 bad input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.config.recipe import PLAIN
from kit.core.errors import run_command
from kit.train.setup import (
    describe_plan,
    read_command,
    read_task,
    say,
    say_unchecked,
    started,
    trainer_parts,
    training,
)


def main() -> None:
    config, flags, run, processes = read_command(__doc__, PLAIN)

    from kit.train.own_loss import load_loss
    from kit.train.trainer import PolicyTrainer, check_card, loss_settings, trainer_arguments

    task = read_task(config, run, processes, flags.dry_run)  # model, problems, rewards
    arguments = trainer_arguments(config, run)
    loss = load_loss(config, loss_settings(arguments, config))
    check_card(config)
    say(describe_plan(config, len(task.dataset), processes))
    if flags.dry_run:
        say_unchecked(config)
        return

    with started(config, run, processes):
        parts, facts = trainer_parts(config, run, task, arguments)
        trainer = PolicyTrainer(**parts, loss=loss)
        with training(trainer, facts):
            trainer.train_run(resume=flags.resume)


if __name__ == "__main__":
    run_command(main)
