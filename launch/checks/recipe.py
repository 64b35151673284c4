"""The model check of `launch.doctor`: what the recipe rejects once it knows the model, before loading any weight."""

import json
from collections.abc import Iterator
from pathlib import Path

from launch.checks.children import reason, run_steps
from launch.checks.machine import Machine, Row, fail, ok, skip
from launch.checks.run import announced, fails_of, planned_processes

LIMIT_S = 120.0  # for a child that imports torch and transformers from a cold disk


def model(machine: Machine) -> Iterator[Row]:
    """Whether the recipe accepts the run's model and this machine; from its config.json, in a child process."""
    from kit.core.config.load import to_dict

    name, config = "model", machine.config
    if config is None:
        yield skip(name, "no --config")
        return
    processes = planned_processes(machine)
    # Files that are not here yet belong to the hub check, which has a time limit of its own.
    environment = {**machine.environment, **announced(machine, processes), "HF_HUB_OFFLINE": "1"}
    step = ["recipe_checks", json.dumps(to_dict(config), default=str), processes, str(Path.cwd())]
    log = machine.logs and machine.logs / "model.log"
    outcome = run_steps([step], LIMIT_S, environment, log)[0]
    if outcome.problem:
        fix = "python -m launch.doctor --only imports torch --logs doctor-logs"
        yield fail(name, f"the recipe's checks broke: {reason(outcome)}", fix)
    elif outcome.facts["skipped"]:
        yield skip(name, outcome.facts["skipped"])
    elif outcome.facts["refused"]:
        yield from fails_of(name, outcome.facts["refused"])
    else:
        yield ok(name, f"{config.model.source}, {outcome.facts['kind']}: the recipe takes it")
