"""Supervised fine-tuning on an NF4 base with a LoRA adapter: the first step of a run that GRPO continues.

The rows are TRL's: conversations (`messages`), `prompt` and `completion`, or `text` (`sft.rows`). The loss is the
cross-entropy of what the assistant says, or of everything (`sft.loss_on`); each token of a step weighs the same. The
prompts are those that GRPO makes of the same questions, so that it can go on from the adapter:

    policy.init_adapter: runs/NAME/adapters/v000100    # where GRPO starts
    policy.reference: init_adapter                     # and what its KL is measured to

Base, adapter, packs, recomputation, plan, records, checkpoints, merge and eval are those of recipes/grpo_qlora.py.

Left out on purpose: truncated rows (a row that is too long is dropped and counted), tool calls, images.

    # two CPU cores: the base of the quickstart, its problems with worked answers, then GRPO from there
    python recipes/tiny_base.py --out models/tiny-base
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft_qlora.py \\
        --config recipes/configs/sft-tiny-nf4-cpu.yaml
    OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo_qlora.py \\
        --config recipes/configs/grpo-tiny-after-sft-cpu.yaml

Measured: the CPU recipe, 100 steps in 83 s, peak 0.84 GiB, held-out loss .040 to .003 nats per token, seed 0;
sampled answers that are right and boxed go from .49 (the first steps of grpo-tiny-nf4-cpu.yaml, which start at the
base) to .95 (step 1 of grpo-tiny-after-sft-cpu.yaml); 2 busy cores of an AMD EPYC, 2026-11-25, torch 2.13.0+cpu,
transformers 5.17.0, trl 1.16.0, peft 0.21.2, bitsandbytes 0.50.2. On GPUs: not measured.

Every key can be given on the command line (`--train.learning_rate 2e-5`); `--dry_run` checks everything and trains
nothing; `--resume` continues from the newest whole checkpoint, `--overwrite` starts the run anew. Exit code: 0 done,
1 a check failed, 2 bad input.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.config.recipe import SUPERVISED
from kit.core.errors import run_command
from kit.train.setup import read_command, say, say_unchecked, started, trainer_parts, training


def main() -> None:
    config, flags, run, processes = read_command(__doc__, SUPERVISED)

    from kit.train.sft_setup import describe_plan, read_task
    from kit.train.sft_trainer import SftTrainer, sft_arguments
    from kit.train.trainer import check_card

    task, heldout = read_task(config, run, processes, flags.dry_run)  # model and rows
    arguments = sft_arguments(config, run, processes)
    check_card(config)
    say(describe_plan(config, len(task.dataset), processes))
    if flags.dry_run:
        say_unchecked(config)
        return

    with started(config, run, processes):
        parts, facts = trainer_parts(config, run, task, arguments)
        trainer = SftTrainer(**parts, processes=processes, heldout_rows=heldout)
        with training(trainer, facts):
            trainer.train_run(resume=flags.resume)


if __name__ == "__main__":
    run_command(main)
