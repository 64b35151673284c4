"""Start the trainer of a run alone: `accelerate launch` of the recipe that trains the configuration.

    python -m launch.train --config RUN.yaml
    python -m launch.train --config RUN.yaml --launcher zero2
    python -m launch.train --config RUN.yaml --dry_run

Prints the command, then becomes it. The accelerate configuration is cpu without a GPU, one_gpu for one, ddp for more;
--launcher names another of accelerate_configs, or a file. The trainer takes the GPUs of train.gpus, or those that no
replica uses. With rollout.backend server the replicas must be running: `python -m launch.server`, or `python -m
launch.up` for everything. --dry_run checks the run, one for GPUs on a machine without a GPU too, and writes nothing.
Keys of the YAML can be given as --group.key value. Exit code: 0 done, 2 bad input, 1 for what the recipe finds: it
prints why, and `accelerate launch` turns its exit code into 1.
"""

import os

from kit.core.config.checks import check_config
from kit.core.config.load import FLAGS, load_config
from kit.core.errors import BadInput, command_parser, run_command
from kit.plan.placement import place
from launch.starting.trainer_command import (
    Command,
    check_elsewhere,
    choose_launcher,
    gpus_to_plan,
    process_count,
    read_launcher,
    trainer_command,
)
from launch.vllm_command import installed_vllm


def replicas_take_gpus(urls: list[str], is_elsewhere: bool) -> bool:
    """Whether the replicas of these URLs hold GPUs of the trainer's machine."""
    from launch.checks.run import is_here

    if not any(map(is_here, urls)):
        return False
    try:
        return is_elsewhere or not installed_vllm().is_cpu
    except BadInput:  # the servers may have an environment of their own
        return True


def prepare(
    config_path: str, overrides: list[str], launcher_path: str | None = None, flags: list[str] | None = None
) -> Command:
    """The trainer's command line for this machine, checked; `flags` are those of the recipe, such as --dry_run."""
    flags = flags or []
    config = load_config(config_path, overrides, (*FLAGS, "launcher"))
    asked = read_launcher(launcher_path) if launcher_path else None
    visible, is_elsewhere = gpus_to_plan(config, asked, "--dry_run" in flags)
    is_served = config.rollout.backend == "server"
    replicas = is_served and replicas_take_gpus(config.rollout.server_urls, is_elsewhere)
    placement = place(config, visible, replicas, not (asked and asked.is_cpu))
    launcher = asked or choose_launcher(len(placement.trainer))
    processes = process_count(launcher, len(placement.trainer))
    check_config(config, processes)
    trainer = trainer_command(config, config_path, overrides, launcher, placement)
    if "--config_file" in trainer.words:  # accelerate's, and not torchrun's for several processes on the CPU
        trainer.words.insert(trainer.words.index("--config_file"), "--quiet")  # no traceback of the launcher's own
    trainer.words.extend(flag for flag in flags if not (is_elsewhere and flag == "--dry_run"))
    return check_elsewhere(config, trainer, processes) if is_elsewhere else trainer


def main() -> None:
    parser = command_parser("launch.train", __doc__)
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument(
        "--launcher", help="accelerate configuration, a file or a name in accelerate_configs; default by GPUs"
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, then exit without training")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest whole checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true", help="start over: list and delete the contents of the run directory"
    )
    flags, overrides = parser.parse_known_args()
    chosen = [f"--{name}" for name in ("dry_run", "resume", "overwrite") if getattr(flags, name)]
    command = prepare(flags.config, overrides, flags.launcher, chosen)
    print(command.text, flush=True)
    os.execve(command.words[0], command.words, {**os.environ, **command.environment})


if __name__ == "__main__":
    run_command(main)
