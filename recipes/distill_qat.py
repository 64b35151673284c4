"""On-policy distillation into a quantized policy: the student samples, the teacher scores every token.

The student is the NF4 base with a LoRA adapter; with `policy.quant_cfg` its layers compute with the weights of that
deployment format. The teacher is unquantized: the base itself (`distill.teacher base`), the base with the adapter of
an earlier run (`distill.teacher_adapter`), or another model. The recipe is made for the second case: a policy trained
by recipes/grpo_qlora.py is to be deployed in a format that costs it accuracy, so it is the teacher and the student
starts from it. Without `policy.quant_cfg` this is plain on-policy distillation.

Left out on purpose: teachers with another tokenizer, completions that the student did not sample, a divergence mixed
with rewards. Rewards are measured for the curves, but not learned from.

    # two CPU cores: plain GRPO first (66 s), then its policy into NVFP4 W4A16
    python recipes/tiny_base.py --out models/tiny-base
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo_qlora.py \\
        --config recipes/configs/grpo-tiny-nf4-cpu.yaml
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/distill_qat.py \\
        --config recipes/configs/distill-tiny-nvfp4-cpu.yaml

    # two GPUs, both train and sample with vLLM
    python -m merge base --config recipes/configs/distill-qwen3_8b-qat-nvfp4a16-2gpu.yaml
    python -m launch.server --config recipes/configs/distill-qwen3_8b-qat-nvfp4a16-2gpu.yaml --detach
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 recipes/distill_qat.py \\
        --config recipes/configs/distill-qwen3_8b-qat-nvfp4a16-2gpu.yaml

Measured: the CPU recipe, 40 steps, divergence .00044 nats per token (first 10 steps; .00013 without the .0032 one) to
.00008 (last 10), reward .950 to .950, seed 0: this model loses little in NVFP4 weights; 2 cores of an AMD EPYC,
2026-11-22, torch 2.13.0+cpu, transformers 5.17.0, trl 1.16.0, peft 0.21.2, bitsandbytes 0.50.2. On an H200: three
seeds of four formats with the small model in eval/MEASUREMENTS.md.

Every key can be given on the command line (`--distill.divergence js`); `--dry_run` checks everything and trains
nothing; `--resume` continues from the newest whole checkpoint, `--overwrite` starts the run anew. Exit code: 0 done,
1 a check failed, 2 bad input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.config import distill_rules
from kit.core.config.recipe import DISTILLATION
from kit.core.config.schema import Config
from kit.core.config.shared_gpu import describe_split
from kit.core.errors import run_command
from kit.core.formats import QuantFormat
from kit.core.run_directory import read_manifest
from kit.train.setup import (
    describe_adapter_type,
    describe_format,
    describe_step,
    range_prompts,
    read_command,
    read_task,
    say,
    say_unchecked,
    started,
    trainer_parts,
    training,
)


def describe_teacher(config: Config) -> str:
    """The teacher in a few words."""
    if adapter := config.distill.teacher_adapter:
        trained = read_manifest(Path(adapter), "adapter").get("quant_cfg")
        note = f", which was trained for {trained}: the teacher computes without it" if trained else ""
        return f"the unquantized base with {adapter}{note}"
    if distill_rules.is_own_model(config):
        return "the unquantized base"
    return f"{config.distill.teacher} stored in {config.policy.quantization}, a second model in memory"


def describe_plan(config: Config, fmt: QuantFormat | None, problems: int, processes: int) -> str:
    """What the run would do, in a few lines."""
    train, rollout, policy, wanted = config.train, config.rollout, config.policy, config.distill
    mixture = f", {wanted.js_beta:g} of the teacher in the mixture" if wanted.divergence == "js" else ""
    split = describe_split(config) if config.server.gpus is not None or train.max_gpu_gib is not None else None
    return "\n".join(
        [
            f"run       {config.run.name} -> {config.run.directory}",
            f"student   {config.model.source}, {policy.quantization}, LoRA rank {policy.lora_rank} from "
            f"{policy.init_adapter or 'zero'}, computes in {fmt.name if fmt else config.model.dtype}",
            *describe_adapter_type(config),
            *([describe_format(fmt, config)] if fmt else []),
            f"teacher   {describe_teacher(config)}",
            f"loss      {wanted.divergence}{mixture}, temperature {wanted.temperature:g}, learning rate "
            f"{train.learning_rate}",
            describe_step(config, problems, processes),
            f"rollouts  {rollout.backend}, temperature {rollout.temperature}",
            *([f"memory    {split}"] if split else []),
            f"rewards   {distill_rules.without_effect(config)}",
        ]
    )


def main() -> None:
    config, flags, run, processes = read_command(__doc__, DISTILLATION)

    from kit.policy.calibration import set_input_ranges
    from kit.policy.teacher import check_teacher, load_teacher
    from kit.train.distill_trainer import DistillTrainer, distill_arguments
    from kit.train.trainer import check_card

    task = read_task(config, run, processes, flags.dry_run)  # model, format, problems; rewards are only measured
    check_teacher(config, run, task.tokenizer, task.model_config)
    prompts = range_prompts(config, task, flags.resume)
    arguments = distill_arguments(config, run)
    check_card(config)
    say(describe_plan(config, task.fmt, len(task.dataset), processes))
    if flags.dry_run:
        say_unchecked(config)
        return

    with started(config, run, processes):
        parts, facts = trainer_parts(config, run, task, arguments)
        trainer = DistillTrainer(**parts, other_teacher=load_teacher(config, arguments))
        with training(trainer, facts, note=f" for {task.fmt.name}" if task.fmt else ""):
            if prompts:
                say(set_input_ranges(config, trainer.model, prompts))
            trainer.train_run(resume=flags.resume)


if __name__ == "__main__":
    run_command(main)
