"""What a command line asks to be evaluated: the configuration with its overrides, and the problems of another task."""

import argparse
from collections.abc import Callable
from pathlib import Path

from eval.result import run_config
from eval.tasks import TASKS, task_config
from kit.core.config.schema import Config, DataConfig
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir


def evaluation_config(
    run: RunDir, arguments: argparse.Namespace, overrides: list[str]
) -> tuple[Config, DataConfig | None, Path]:
    """What a command line asks to be evaluated.

    Returns the configuration, the data configuration that was trained on if that is another one (else None), and the
    folder for the results.
    """
    config, training = asked_config(lambda keys: run_config(run, keys, arguments.config), arguments, overrides)
    return config, training, run.path if arguments.task is None else run.path / f"eval-{arguments.task}"


def keys_of(arguments: argparse.Namespace, overrides: list[str]) -> list[str]:
    """The overrides of a command line, with its options that are keys of the configuration."""
    names = ("max_problems", "batch_size", "backend", "samples")
    flags = {f"eval.{name}": getattr(arguments, name, None) for name in names}
    found = overrides + [f"--{key}={value}" for key, value in flags.items() if value is not None]
    return [*found, "--reward.allow_code_execution=true"] if arguments.allow_code_execution else found


def asked_config(
    resolved: Callable[[list[str]], Config], arguments: argparse.Namespace, overrides: list[str]
) -> tuple[Config, DataConfig | None]:
    """The configuration to evaluate, and that of the training data if it is another one (else None).

    `resolved` returns the run's configuration with overrides.
    """
    overrides = keys_of(arguments, overrides)
    config = resolved(overrides)
    if config.eval.batch_size < 1 or config.eval.bootstrap_samples < 100:
        raise BadInput(
            f"eval.batch_size ({config.eval.batch_size}) must be at least 1 and eval.bootstrap_samples "
            f"({config.eval.bootstrap_samples}) at least 100."
        )
    if arguments.task is not None:
        own = resolved([])  # the training data has its own columns
        return task_config(own, arguments.task, arguments.data, overrides), own.data
    if arguments.data is not None:
        raise BadInput(f"--data names the problems of a task: give --task, one of {', '.join(TASKS)}.")
    return config, None
