"""Resume on another number of processes, or with another division of the step: what stays the same.

A step's completions are per_device_train_batch_size x processes x gradient_accumulation_steps. Problems are drawn step
by step, and a checkpoint's adapter, optimizer, schedule and kept groups are those of all processes, so a run goes on
with the same problems in the same order as long as that product stays. Imports no torch.
"""

from kit.core.config.schema import Config
from kit.core.config.trl_rules import WHOLE_BATCH_FIELDS

# May change as long as the step's completions stay as many.
DIVISION = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")


def step_rows(config: Config, processes: int) -> int:
    """Completions of an optimizer step over all processes."""
    return config.train.per_device_train_batch_size * processes * config.train.gradient_accumulation_steps


def faults(before: Config, now: Config, processes_before: int, processes: int) -> list[str]:
    """Why `now` on `processes` cannot continue what `before` trained on `processes_before`, each with its fix."""
    wanted, rows = step_rows(before, processes_before), step_rows(now, processes)
    if rows != wanted:
        return [
            f"a step had {wanted} completions ({_division(before, processes_before)}) and would have {rows} "
            f"({_division(now, processes)}): {_fitting(now, processes, wanted)}"
        ]
    parts = [
        config.train.per_device_train_batch_size * count
        for config, count in ((before, processes_before), (now, processes))
    ]
    return [
        f"train.trl.{key} is computed over the completions of an accumulation step, which were {parts[0]} and would "
        f"be {parts[1]}: keep train.gradient_accumulation_steps at {before.train.gradient_accumulation_steps}"
        for key, nothing in WHOLE_BATCH_FIELDS.items()
        if parts[0] != parts[1] and now.train.trl.get(key, nothing[0]) not in nothing
    ]


def split_fault(is_whole: bool, splits: str | None, processes_before: int, processes: int) -> str | None:
    """Why a checkpoint, whose optimizer state `is_whole` or one part per process, cannot be continued by processes
    that `splits` names (None: each holds all of it); None if it can."""
    if is_whole and splits:
        return (
            f"its checkpoint has the optimizer's state in one file, {splits} reads a part per process: resume with "
            "accelerate_configs/one_gpu.yaml or ddp.yaml"
        )
    if not is_whole and not splits:
        return (
            "its checkpoint has a part of the optimizer's state per process: resume with the accelerate config of it"
        )
    if not is_whole and processes != processes_before:
        return (
            f"its checkpoint has the optimizer's state in {processes_before} parts, as {splits} splits it, and "
            f"{processes} processes would read it: resume with {processes_before}"
        )
    return None


def describe(config: Config, processes_before: int, processes: int) -> str:
    """What changes for the run when another number of processes goes on with it; empty for the same number."""
    if processes == processes_before:
        return ""
    stays = "the same problems in the same order, gradients summed in another order"
    draws = ["completions"] if config.rollout.backend == "in_process" and not config.sft.is_given else []
    draws += ["dropout masks"] if config.policy.lora_dropout else []
    drawn = f"; {' and '.join(draws)} are drawn from other random numbers" if draws else ""
    return f"processes {processes_before} -> {processes}: {stays}{drawn}"


def _division(config: Config, processes: int) -> str:
    train = config.train
    return (
        f"{train.per_device_train_batch_size} per device x {processes} processes x "
        f"{train.gradient_accumulation_steps} steps"
    )


def _fitting(config: Config, processes: int, wanted: int) -> str:
    """Values that make a step of `wanted` completions; the memory of a micro-batch stays if possible."""
    size, steps = config.train.per_device_train_batch_size, config.train.gradient_accumulation_steps
    if wanted % (size * processes) == 0:
        return f"set train.gradient_accumulation_steps to {wanted // (size * processes)}"
    if wanted % (steps * processes) == 0:
        return f"set train.per_device_train_batch_size to {wanted // (steps * processes)}"
    if wanted % processes == 0:
        size = wanted // processes
        return f"set train.per_device_train_batch_size to {size} and train.gradient_accumulation_steps to 1"
    fits = [str(count) for count in range(1, min(wanted, 64) + 1) if wanted % count == 0]
    return f"{processes} processes do not divide it. Use {', '.join(fits)}"
