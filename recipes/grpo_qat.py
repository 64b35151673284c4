"""GRPO in the numbers of the deployed checkpoint: `policy.quant_cfg` selects its quantization format.

Post-training quantization rounds what GRPO learned; here the rounding is part of the policy. Every linear layer of the
base computes with Q(base + s·B·A), as a reader of the exported checkpoint does, and with inputs quantized as on its
server if the format quantizes activations. Completions are sampled in the same numbers, in this process or by replicas
that requantize at every sync. In the backward pass, both quantizations pass the gradient straight through to A and B;
the base is never written. The reference is the quantized base, the policy with its adapter off: the KL starts at 0.

    nvfp4a16   FP4 weights in groups of 16 under E4M3 scales (W4A16)
    w4a16      INT4 weights in groups of 128
    fp8        FP8 weights by output channel, activations by token
    fp8_block  FP8 weights in blocks of 128 x 128, activations in groups of 128
    fp8_static FP8 weights and activations with one scale each; the activations' scale is calibrated
    nvfp4      FP4 weights and activations (W4A4); the activations' global scale is calibrated

or a name or YAML of nvidia-modelopt (kit/core/format_names.py). W4A4 is known to be unstable in reinforcement
learning: rounding inputs to 4 bits adds an error of some percent to every matmul that the straight-through gradient
does not see, and activations outgrow the range that was calibrated at the start. Watch quant_clip_fraction and
quant_peak_ratio in metrics.jsonl; prefer nvfp4a16 or fp8.

Left out on purpose: learned ranges and scales, formats that differ between layers, experts, LoRA dropout, a base that
is split over processes.

    # two CPU cores, a model made on the spot
    python recipes/tiny_base.py --out models/tiny-base
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo_qat.py \\
        --config recipes/configs/grpo-tiny-qat-nvfp4-cpu.yaml

    # two GPUs, both train and sample
    python -m merge base --config recipes/configs/grpo-qwen3_8b-qat-nvfp4a16-2gpu.yaml
    python -m launch.server --config recipes/configs/grpo-qwen3_8b-qat-nvfp4a16-2gpu.yaml --detach
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/grpo_qat.py \\
        --config recipes/configs/grpo-qwen3_8b-qat-nvfp4a16-2gpu.yaml

Measured: the CPU recipe, 80 steps, reward .509 (first 10 steps) to .919 (last 10), seed 0; 2 cores of an AMD EPYC,
2026-11-21, torch 2.13.0+cpu, transformers 5.17.0, trl 1.16.0, peft 0.21.2, bitsandbytes 0.50.2. On H200s: a step of an
8B shape in bench/STEP.md, three seeds of four formats with the small model in eval/MEASUREMENTS.md.

Every key can be given on the command line (`--policy.quant_cfg fp8`); `--dry_run` checks everything and trains
nothing; `--resume` continues from the newest whole checkpoint, ranges included, `--overwrite` starts the run anew.
Exit code: 0 done, 1 a check failed, 2 bad input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.config.recipe import QUANTIZED
from kit.core.errors import run_command
from kit.train.setup import (
    describe_format,
    describe_plan,
    range_prompts,
    read_command,
    read_task,
    say,
    say_unchecked,
    started,
    trainer_parts,
    training,
)


def main() -> None:
    config, flags, run, processes = read_command(__doc__, QUANTIZED)

    from kit.policy.calibration import set_input_ranges
    from kit.train.own_loss import load_loss
    from kit.train.trainer import PolicyTrainer, check_card, loss_settings, trainer_arguments

    task = read_task(config, run, processes, flags.dry_run)  # model, format, problems, rewards
    prompts = range_prompts(config, task, flags.resume)
    arguments = trainer_arguments(config, run)
    loss = load_loss(config, loss_settings(arguments, config))
    check_card(config)
    say(f"{describe_plan(config, len(task.dataset), processes)}\n{describe_format(task.fmt, config)}")
    if flags.dry_run:
        say_unchecked(config)
        return

    with started(config, run, processes):
        parts, facts = trainer_parts(config, run, task, arguments)
        trainer = PolicyTrainer(**parts, loss=loss)  # whose layers compute in policy.quant_cfg
        with training(trainer, facts, note=f" for {task.fmt.name}"):
            if prompts:
                say(set_input_ranges(config, trainer.model, prompts))
            trainer.train_run(resume=flags.resume)


if __name__ == "__main__":
    run_command(main)
