"""Seconds of a rollout in the trainer's process beside plain transformers on the dequantized base without an adapter.

    OMP_NUM_THREADS=1 python bench/in_process.py --config recipes/configs/grpo-tiny-nf4-cpu.yaml
    OMP_NUM_THREADS=1 python bench/in_process.py --config recipes/configs/grpo-smollm2_135m-nf4-svamp-cpu.yaml \\
        --rounds 3 --rollout.backend in_process --model.dtype float32 --eval.backend transformers

The kit's side is what a step calls: the trainer's sampler, with `rollout.keep_weights` and all it takes to prepare.
The other is `generate` of transformers, with the same prompts, sampling settings, dtype and seed; --peft adds it with
peft's adapter, unmerged. Sides take turns, --rounds times after one to warm up. Completions end as sampled, from an
adapter that is still zero, so that both sides draw from one policy; with --fixed, in a second setting, all have the
full length, and the adapter is not zero. Claims of the first setting, exit 1 when one fails: the median takes at most
BOUND of transformers', and at least SAME of the completions are transformers' own, id for id: one rounding may send a
row another way. Prints the table last.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.config.load import load_config
from kit.core.errors import DONE, BadInput, command_parser, run_command
from kit.core.installed import installed_versions
from kit.core.measured import PACKAGES
from kit.core.run_directory import RunDir
from kit.train.setup import read_task, trainer_parts

BOUND, SAME = 1.05, 0.9
SAMPLED, FULL = "as sampled", "full length"
KIT, PLAIN, PEFT = "kit, NF4 base and adapter", "transformers, no adapter", "transformers, peft's adapter"


def make_trainer(config: Any) -> tuple[Any, list[list[int]]]:
    """The recipe's trainer, and the prompts of its first step, each `rollout.group_size` times in a row."""
    from kit.train.trainer import PolicyTrainer, trainer_arguments

    run = RunDir(config.run.directory)
    run.path.mkdir(parents=True)
    task = read_task(config, run, 1, dry_run=False)
    parts, _ = trainer_parts(config, run, task, trainer_arguments(config, run))
    trainer = PolicyTrainer(**parts)
    rollout, train = config.rollout, config.train
    problems = train.per_device_train_batch_size * train.gradient_accumulation_steps // rollout.group_size
    prompts = trainer._token_ids([task.dataset[row]["prompt"] for row in range(problems)])
    return trainer, [ids for ids in prompts for _ in range(rollout.group_size)]


def make_plain(trainer: Any) -> Any:
    """The dequantized base as transformers loads any model."""
    import torch
    from transformers import AutoModelForCausalLM

    from kit.weights.frozen_base import dequantize, plain_name, stored_linears

    config, policy = trainer.config.model, trainer.policy.unwrapped
    model = AutoModelForCausalLM.from_pretrained(config.source, dtype=getattr(torch, config.dtype)).eval()
    for name in stored_linears(policy):
        model.get_submodule(plain_name(name)).weight.data.copy_(dequantize(policy.get_submodule(name)))
    return model


def with_adapter(trainer: Any) -> Any:
    """A second plain model with the policy's adapter by peft, unmerged."""
    from peft import get_peft_model

    policy = trainer.policy.unwrapped
    model = get_peft_model(make_plain(trainer), policy.peft_config["default"]).eval()
    model.load_state_dict({name: one for name, one in policy.state_dict().items() if "lora_" in name}, strict=False)
    return model


def generate(model: Any, trainer: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Completions by transformers' own `generate`, up to their stop token."""
    import torch

    padding, longest = trainer._tokenizer.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[padding] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    with torch.no_grad(), trainer.accelerator.autocast():
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config)
    stops, found = {*trainer.eos_token_ids}, []
    for row in made[:, longest:].tolist():
        end = next((place for place, token in enumerate(row) if token in stops), len(row))
        found.append(row[: end + 1])
    return found


def set_length(trainer: Any, is_fixed: bool) -> None:
    most = trainer.config.rollout.max_completion_length
    trainer.generation_config.max_new_tokens = most
    trainer.generation_config.min_new_tokens = most if is_fixed else None


def fill_adapter(trainer: Any) -> None:
    import torch

    torch.manual_seed(0)
    for name, parameter in trainer.policy.unwrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.002)


def measure(sides: dict[str, Callable[[], list[list[int]]]], rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds and processor seconds of each side in every round, and the completions of all rounds."""
    import torch

    found: dict[str, dict[str, Any]] = {side: {"s": [], "cpu_s": [], "made": []} for side in sides}
    for number in range(rounds + 1):
        for side, make in sides.items():
            torch.manual_seed(number)
            started, cpu = time.perf_counter(), time.process_time()
            made = make()
            if number:
                found[side]["s"].append(time.perf_counter() - started)
                found[side]["cpu_s"].append(time.process_time() - cpu)
                found[side]["made"] += made
    return found


def rows_of(setting: str, found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of the table for each side."""
    plain, rows = found[PLAIN], []
    for side, one in found.items():
        row: dict[str, Any] = {"setting": setting, "side": side, "tokens": sum(map(len, one["made"]))}
        row |= {key: statistics.median(one[key]) for key in ("s", "cpu_s")}
        row |= {f"times_{key}": row[key] / statistics.median(plain[key]) for key in ("s", "cpu_s")}
        same = sum(a == b for a, b in zip(one["made"], plain["made"], strict=True))
        rows.append(row | {"same": same / len(plain["made"])})
    return rows


def main() -> int:
    parser = command_parser("bench/in_process.py", __doc__)
    parser.add_argument("--config", required=True, help="YAML of a run; its keys can be given as --group.key value")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fixed", action="store_true", help="completions of full length as well")
    parser.add_argument("--peft", action="store_true", help="transformers with peft's adapter as well")
    parser.add_argument("--out", help="write the rows as JSON")
    flags, overrides = parser.parse_known_args()
    if flags.rounds < 1:
        raise BadInput(f"--rounds ({flags.rounds}) must be at least 1.")
    with tempfile.TemporaryDirectory() as work:
        config = load_config(flags.config, [*overrides, f"--run.output_dir={work}/run"], tuple(vars(flags)))
        if config.rollout.backend != "in_process":
            raise BadInput("rollout.backend is server. Add --rollout.backend in_process.")
        trainer, prompts = make_trainer(config)
        plain, rows = make_plain(trainer), []
        sides = {
            KIT: lambda: trainer.sampler.generate(trainer.policy, prompts).token_ids,
            PLAIN: lambda: generate(plain, trainer, prompts),
        }
        if flags.peft:
            adapted = with_adapter(trainer)
            sides[PEFT] = lambda: generate(adapted, trainer, prompts)
        for setting in (SAMPLED, FULL)[: 1 + flags.fixed]:
            set_length(trainer, setting == FULL)
            if setting == FULL:
                fill_adapter(trainer)
            rows += rows_of(setting, measure(sides, flags.rounds))
    return show(rows, config, prompts, flags)


def show(rows: list[dict[str, Any]], config: Any, prompts: list[list[int]], flags: argparse.Namespace) -> int:
    import torch

    versions = ", ".join(f"{name} {version}" for name, version in installed_versions(PACKAGES).items())
    lengths = f"{min(map(len, prompts))} to {max(map(len, prompts))}"
    print(
        f"{config.model.id}, {config.model.dtype}: {len(prompts)} rows, prompts of {lengths} tokens, at most "
        f"{config.rollout.max_completion_length} new; {torch.get_num_threads()} threads, {flags.rounds} rounds; "
        f"{versions}"
    )
    print("| completions | side | tokens a round | s | CPU s | times transformers: s, CPU s | same ids |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['setting']} | {row['side']} | {row['tokens'] / flags.rounds:,.0f} | {row['s']:.2f} | "
            f"{row['cpu_s']:.2f} | {row['times_s']:.2f}, {row['times_cpu_s']:.2f} | "
            f"{format(row['same'], '.0%') if row['setting'] == SAMPLED else ''} |"
        )
    if flags.out:
        Path(flags.out).write_text(json.dumps({"command": sys.argv, "versions": versions, "rows": rows}, indent=2))
    ours = rows[0]
    for fault, text in (
        (ours["times_s"] > BOUND, f"a rollout takes {ours['times_s']:.2f} times transformers' time, at most {BOUND}"),
        (ours["same"] < SAME, f"{ours['same']:.0%} of the completions are transformers' own, at least {SAME:.0%}"),
    ):
        if fault:
            print(f"failed: {text}")
    return 1 if ours["times_s"] > BOUND or ours["same"] < SAME else DONE


if __name__ == "__main__":
    run_command(main)
