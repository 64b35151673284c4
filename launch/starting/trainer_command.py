"""The trainer's command line, and its GPUs beside the replicas, from the run's configuration."""

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.config.recipe import recipe_of
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.limits import MOST_GPUS, MOST_NODES
from kit.core.yaml_files import read_yaml
from kit.plan.placement import Placement
from launch.vllm_command import ROOT, visible_gpus

MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
CPU, ONE_GPU, DDP = (f"accelerate_configs/{name}.yaml" for name in ("cpu", "one_gpu", "ddp"))


@dataclass(frozen=True)
class Launcher:
    """The parts of an accelerate configuration that decide where the processes run."""

    path: str
    is_cpu: bool
    is_single: bool  # one process
    processes: int  # as the file says
    mixed_precision: str
    announces: dict[str, str]  # environment variables by which `accelerate launch` passes it on, as far as checks read


@dataclass(frozen=True)
class Command:
    """One command, and what it adds to this process's environment."""

    words: list[str]
    environment: dict[str, str]

    @property
    def text(self) -> str:
        """The command as one would type it."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.words)])


def read_accelerate(path: str) -> dict[str, Any]:
    """The content of an accelerate configuration; `BadInput` if the file is not one."""
    try:
        facts = read_yaml(path)
    except BadInput as error:
        raise BadInput(f"--launcher: {error} Name a file of accelerate_configs.") from None
    if not isinstance(facts, dict) or "distributed_type" not in facts:
        raise BadInput(
            f"--launcher {path} is not an accelerate configuration (no distributed_type). See accelerate_configs."
        )
    for key in ("num_processes", "num_machines"):
        if type(value := facts.get(key, 1)) is not int or not 1 <= value <= MOST_NODES * MOST_GPUS:
            raise BadInput(f"--launcher {path}: {key} is {value!r:.60}. Write a number from 1.")
    return facts


def read_launcher(path: str) -> Launcher:
    """Parse an accelerate configuration, a file or a name in accelerate_configs; `BadInput` if it is not one for a
    single machine."""
    if not os.path.exists(path) and (ROOT / (named := f"accelerate_configs/{path}.yaml")).is_file():
        path = in_checkout(named)
    facts = read_accelerate(path)
    if (machines := facts.get("num_machines", 1)) > 1:
        raise BadInput(
            f"--launcher {path} is for {machines} machines and this command starts one. Run accelerate launch on each "
            "of them, as the file says."
        )
    return Launcher(
        path,
        bool(facts.get("use_cpu")),
        facts["distributed_type"] == "NO",
        facts.get("num_processes", 1),
        str(facts.get("mixed_precision", "no")),
        announcement(facts),
    )


def announcement(facts: dict[str, Any]) -> dict[str, str]:
    """The environment variables through which `accelerate launch` passes its configuration to the trainer."""
    kind = facts.get("distributed_type")
    stage = (facts.get("deepspeed_config") or {}).get("zero_stage", 0)
    return {
        "ACCELERATE_MIXED_PRECISION": str(facts.get("mixed_precision", "no")),
        "ACCELERATE_USE_FSDP": "true" if kind == "FSDP" else "false",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage if kind == "DEEPSPEED" else 0),
        **{key.upper(): str(value) for key, value in (facts.get("fsdp_config") or {}).items()},
    }


@contextlib.contextmanager
def environment_of(values: dict[str, str]) -> Iterator[None]:
    """Set these variables in this process for the block."""
    before = {**os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def choose_launcher(gpus: int) -> Launcher:
    """The default launcher for the number of GPUs that the trainer gets."""
    return read_launcher(in_checkout(CPU if gpus == 0 else ONE_GPU if gpus == 1 else DDP))


def process_count(launcher: Launcher, trainer_gpus: int) -> int:
    """Number of trainer processes: one per GPU; without GPUs, what the launcher says."""
    if launcher.is_cpu:
        return launcher.processes
    if trainer_gpus == 0:
        raise BadInput(f"--launcher {launcher.path} is for GPUs and CUDA shows none here. Use {CPU}.")
    if launcher.is_single and trainer_gpus > 1:
        raise BadInput(
            f"--launcher {launcher.path} starts one process and the trainer has {trainer_gpus} GPUs. Use {DDP}, or "
            "name one GPU in train.gpus."
        )
    return trainer_gpus


def trainer_command(
    config: Config, config_path: str, overrides: list[str], launcher: Launcher, placement: Placement
) -> Command:
    """`accelerate launch` of the recipe on the trainer's GPUs."""
    environment = {
        # On few cores more threads only wait for each other; also torchrun's default for several processes.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
        **placement.environment(placement.trainer),
    }
    processes = process_count(launcher, len(placement.trainer))
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher.path]
    words += ["--num_processes", str(processes)]
    if launcher.is_cpu and processes > 1:  # accelerate starts only one there without MPI
        words, environment = _on_the_cpu(processes), environment | {"ACCELERATE_USE_CPU": "true"}
    if not launcher.is_cpu:
        words += ["--gpu_ids", "all"]  # all of CUDA_VISIBLE_DEVICES, which one_gpu.yaml would override
        mixed = MIXED_PRECISION[config.model.dtype]
        if config.model.dtype != "bfloat16" and launcher.mixed_precision != mixed:
            words += ["--mixed_precision", mixed]
    words += [in_checkout(recipe_of(config)), "--config", config_path, *overrides]
    if placement.servers and all(gpu.isdigit() for gpu in placement.servers):
        # The recipe's memory checks see only the trainer's CUDA_VISIBLE_DEVICES.
        chosen = [int(gpu) for gpu in placement.servers]
        words += [] if chosen == config.server.gpus else [f"--server.gpus={chosen}"]
    return Command(words, environment)


def gpus_to_plan(config: Config, launcher: Launcher | None, dry_run: bool) -> tuple[list[str], bool]:
    """(GPUs that the run can have, whether they are on another machine).

    A dry run on a machine without a GPU is placed on the GPUs that `train.gpus` and `server.gpus` name.
    """
    visible = visible_gpus() or []
    is_served = config.rollout.backend == "server"
    named = [*(config.train.gpus or []), *(config.server.gpus or [] if is_served else [])]
    is_elsewhere = bool(dry_run and named and not visible and not (launcher and launcher.is_cpu))
    return [str(number) for number in range(max(named) + 1)] if is_elsewhere else visible, is_elsewhere


def check_elsewhere(config: Config, trainer: Command, processes: int) -> Command:
    """The recipe's own checks for the GPUs of another machine: as many processes, on this machine's CPU."""
    recipe = trainer.words[trainer.words.index(in_checkout(recipe_of(config))) :]
    words = [*_on_the_cpu(processes), *recipe, "--dry_run"]
    return Command(words, {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})


def _on_the_cpu(processes: int) -> list[str]:
    """Words that start several processes on this machine's CPU."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def base_command(config_path: str, overrides: list[str], placement: Placement) -> Command:
    """`python -m merge base` on the trainer's device type: GPU and CPU round a few weights differently."""
    words = [sys.executable, "-m", "merge", "base", "--config", config_path, *overrides]
    environment = placement.environment(placement.trainer[:1])
    if Path.cwd() != ROOT:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Command(words, environment)


def in_checkout(name: str) -> str:
    """A kit file's path as seen from the working directory."""
    return name if Path.cwd() == ROOT else str(ROOT / name)
