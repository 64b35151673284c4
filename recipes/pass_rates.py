"""Measure how often the base solves each training problem, for `data.pass_rates` of a run.

    python -m recipes.pass_rates --config recipes/configs/grpo-tiny-nf4-cpu.yaml --out pass-rates.jsonl

    # several GPUs
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 recipes/pass_rates.py \\
        --config recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml --out pass-rates.jsonl

Samples `--samples` completions of each training problem as a run of this configuration does: its base, its adapter to
start from (`policy.init_adapter`), its sampler (in process or on servers), environment and rewards. A completion
passes if its reward, the weighted sum of `reward.functions`, is at least `--pass_reward`. Nothing is trained. The file
is written line by line; after an interruption the same command measures the rest.

Keys of the configuration can be given as --group.key value. Exit code: 0 done, 1 a check failed, 2 bad input.
"""

import argparse
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.checksum import line_of
from kit.core.config.checks import check_config, is_main_process, world_size
from kit.core.config.load import load_config
from kit.core.config.run_checks import check_run_directory
from kit.core.config.schema import Config, DistillConfig
from kit.core.errors import BadInput, run_command
from kit.core.file_kinds import MEASUREMENT, PASS_RATES
from kit.core.run_files import read_lines
from kit.data.pass_rates import SAMPLING, TASK, read_pass_rates, settings_of


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.pass_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, for data.pass_rates")
    parser.add_argument(
        "--samples", type=int, help="completions per problem, a multiple of rollout.group_size (default)"
    )
    parser.add_argument("--pass_reward", type=float, default=1.0, help="least reward of a completion that passes")
    return parser.parse_known_args(argv)


def measuring(config: Config, out: Path) -> Config:
    """The configuration of a run that only samples: all its problems, nothing else measured, files beside `out`."""
    run = replace(config.run, output_dir=str(out.with_name(f".{out.name}.run")))
    data = replace(config.data, pass_rates=None, min_pass_rate=0.0, max_pass_rate=1.0, order="shuffled")
    rollout = replace(
        config.rollout, overlap=False, stream_groups=None, resample_rounds=0, resample_budget=None, replay_steps=0
    )
    watch = replace(config.watch, eval_every=0, report_to=[])
    return replace(config, run=run, data=data, rollout=rollout, watch=watch, distill=DistillConfig())


def rows_of(trainer: Any, problems: list[dict], samples: int) -> Iterator[tuple[list[str], list[dict]]]:
    """(ids of a batch's problems, this process's rows): as many rows as a step has, the last batch filled up with
    problems of the first."""
    group, processes = trainer.num_generations, trainer.accelerator.num_processes
    total = trainer.args.generation_batch_size
    repeated = [row for row in problems for _ in range(samples // group)]
    for start in range(0, len(repeated), total // group):
        batch = list(itertools.islice(itertools.cycle(repeated), start, start + total // group))
        rows = [row for row in batch for _ in range(group)]
        share, index = len(rows) // processes, trainer.accelerator.process_index
        yield [row["problem_id"] for row in batch], rows[index * share : (index + 1) * share]


def main(argv: list[str] | None = None) -> None:
    options, overrides = parse_arguments(argv)
    given = load_config(options.config, overrides)
    if not options.out.name:
        raise BadInput(f"--out {str(options.out)!r} names no file. Give one, such as --out data/rates.jsonl.")
    config, group = measuring(given, options.out), given.rollout.group_size
    samples = options.samples or group
    if samples < 1 or samples % group:
        raise BadInput(f"--samples ({samples}) must be a multiple of rollout.group_size ({group}).")
    if given.policy.quant_cfg is not None:
        raise BadInput(
            f"policy.quant_cfg is {given.policy.quant_cfg}: pass rates are measured without quantizers. Give "
            "--policy.quant_cfg null."
        )
    processes = world_size()
    check_config(config, processes)
    run = check_run_directory(config, resume=False, processes=processes, overwrite=True)

    import torch
    from accelerate.utils import broadcast_object_list

    from kit.policy.adapter_dropout import turned_off
    from kit.train.setup import read_task, say, started, trainer_parts
    from kit.train.trainer import PolicyTrainer, check_card, trainer_arguments

    task = read_task(config, run, processes, dry_run=False)
    arguments = trainer_arguments(config, run)
    check_card(config)
    with started(config, run, processes):
        parts, base = trainer_parts(config, run, task, arguments)
        facts = {
            "base_hash": base["hash"],
            "model": config.model.source,
            "settings": settings_of(config, SAMPLING + TASK),
        }
        facts |= {"samples": samples, "pass_reward": options.pass_reward, "backend": config.rollout.backend}
        facts |= {"seed": config.run.seed}
        partial = options.out.with_name(f"{options.out.name}.partial")
        shared = [begun(partial, facts) if is_main_process() else set()]
        known = broadcast_object_list(shared)[0]
        trainer = PolicyTrainer(**parts)
        if trainer.policy.is_split:
            raise BadInput("pass rates are measured on a whole base: use accelerate_configs/one_gpu.yaml or ddp.yaml.")
        left = [row for row in task.dataset if row["problem_id"] not in known]
        say(f"{len(left):,} of {len(task.dataset):,} problems to measure, {samples} completions each")
        rewards: dict[str, list[float]] = {}
        began = time.perf_counter()
        try:
            for names, rows in rows_of(trainer, left, samples):
                with turned_off(trainer.policy_step.dropouts):
                    drawn = trainer.draw(rows)
                weights = trainer.reward_weights.to(drawn.rewards.device)
                total = (drawn.rewards * weights).nansum(dim=1)
                total[drawn.rewards.isnan().all(dim=1)] = torch.nan
                for name, of_group in zip(names, total.view(-1, group).tolist(), strict=True):
                    rewards.setdefault(name, []).extend(of_group)
                whole = [name for name, values in rewards.items() if len(values) >= samples and name not in known]
                known |= {*whole}
                append(partial, [entry(name, rewards.pop(name)[:samples], options.pass_reward) for name in whole])
                say(f"{len(known):,} problems measured, {time.perf_counter() - began:.0f} s")
        finally:
            if trainer.accelerator.is_main_process:
                trainer.sampler.close()
    if is_main_process():
        os.replace(partial, options.out)
        shutil.rmtree(run.path)
        say(summary(options.out))


def begun(partial: Path, facts: dict) -> set[str]:
    """Ids of the problems that an interrupted measurement with these facts has; starts the file if there is none.
    Called by the main process only."""
    if partial.exists():
        # Without a line that a kill cut.
        head, *rows = read_lines(partial, PASS_RATES, may_be_growing=True, first=MEASUREMENT) or [{}]
        if head == {"facts": facts}:
            partial.write_text("".join(f"{line_of(row)}\n" for row in (head, *rows)))
            return {row["problem_id"] for row in rows}
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(line_of({"facts": facts}) + "\n")
    return set()


def append(partial: Path, entries: list[dict]) -> None:
    if is_main_process():
        with open(partial, "a") as file:
            file.writelines(f"{line_of(one)}\n" for one in entries)


def entry(name: str, rewards: list[float], least: float) -> dict:
    """A problem's line from the rewards of its completions, NaN for those that could not be judged."""
    known = [value for value in rewards if value == value]
    passed = sum(value >= least - 1e-6 for value in known)
    return {
        "problem_id": name,
        "pass_rate": passed / len(known) if known else None,
        "known": len(known),
        "mean_reward": sum(known) / len(known) if known else None,
    }


def summary(out: Path) -> str:
    """One line: how many problems are never, sometimes and always solved."""
    rates = list(read_pass_rates(out).rates.values())
    never, always, unknown = rates.count(0.0), rates.count(1.0), rates.count(None)
    between = len(rates) - never - always - unknown
    return (
        f"wrote {out}: {len(rates):,} problems, {never:,} never solved, {between:,} sometimes, {always:,} always, "
        f"{unknown:,} not known"
    )


if __name__ == "__main__":
    run_command(main)
