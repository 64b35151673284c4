"""Read an evaluation's result: eval.json, how it was measured, the names of its columns and engines."""

import dataclasses
from dataclasses import replace
from pathlib import Path

from eval.artifacts import eval_command
from eval.naming import trained_name
from kit.core.config.base_rules import CALLED
from kit.core.config.load import load_config, resolve
from kit.core.config.schema import Config, limit_faults
from kit.core.errors import BadInput
from kit.core.file_kinds import EVALUATION
from kit.core.run_directory import RunDir
from kit.core.run_files import read_object


def measurement(config: Config) -> dict:
    """How a configuration measures: its eval group without the gate, with the length of completions resolved and the
    texts at which they stop (`rollout.stop`)."""
    values = dataclasses.asdict(config.eval)
    del values["gate"]
    longest = config.eval.max_new_tokens or config.rollout.max_completion_length
    return values | {"max_new_tokens": longest, "stop": config.rollout.stop}


def run_config(run: RunDir, overrides: list[str], file: str | None = None) -> Config:
    """The run's own configuration (or that of a YAML) with command-line overrides; `BadInput` for bad gate limits."""
    if file is not None:
        config = load_config(file, overrides)
    else:
        config = resolve(run.config(), overrides, str(run.config_file))
    if faults := limit_faults(config.eval.gate, "eval.gate."):
        raise BadInput("\n".join(faults))
    return config


def read_result(file: Path, run: RunDir) -> dict:
    """Return the content of an eval.json; `BadInput` names the command that makes it if it is missing or invalid."""
    if not file.is_file():
        raise BadInput(f"{file} does not exist. Make it with: {eval_command(run)}")
    result = read_object(file, replace(EVALUATION, fix=f"Make it with: {eval_command(run)}"))
    result.setdefault("trained_policy", trained_name(run.config()))
    return result


def engines(matrix: dict) -> str:
    """Which engine computed which format in which dtype; formats are named only if these differ."""
    found: dict[str, list[str]] = {}
    for row in matrix.values():
        for name, cell in row.items():
            text = f"{cell.get('engine', 'unknown')}, computing in {cell.get('compute_dtype', 'unknown')}"
            if cell.get("engine") == "transformers":
                text += ", quantized weights dequantized as they load"
            if name not in found.setdefault(text, []):
                found[text].append(name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in found.items())


def column(result: dict, name: str) -> str:
    """Column title of a format; for a run that was trained for a format, also what the column stands for."""
    own, storage = result.get("trained_for"), result.get("base_storage", "nf4")
    if own is None and name == "nf4" and storage != "nf4":
        return f"nf4 (policy on its {CALLED[storage]} base)"
    if own is None or name not in ("nf4", "bf16", own):
        return name
    what = {"nf4": f"policy with the numbers of {own}", "bf16": "no quantizers"}
    return f"{name} ({what.get(name, 'trained for')})"
