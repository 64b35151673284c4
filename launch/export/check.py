"""Run the check of an export in verl's own environment."""

import os
import subprocess
import tempfile
from pathlib import Path

from kit.core.errors import CHECK_FAILED, DONE, BadInput
from launch.vllm_command import ROOT

FILES = ("run.sh", "overrides.yaml", "reward_function.py", "train.parquet", "test.parquet")
PYTHON = ROOT / ".venv-verl/bin/python"


def check(directories: list[Path]) -> int:
    """Return exit code 0 if verl accepts every export; `BadInput` without an export or verl's environment."""
    for directory in directories:
        if missing := [name for name in FILES if not (directory / name).is_file()]:
            raise BadInput(
                f"{directory} has no {', '.join(missing)}: it is not what `python -m launch.export verl` writes."
            )
    if not PYTHON.is_file():
        raise BadInput(f"{PYTHON} does not exist. Make verl's environment with: make verl")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # -P: modules in that folder must not shadow packages of the same name.
    command = [
        str(PYTHON),
        "-P",
        str(Path(__file__).with_name("schema.py")),
        *(str(one.resolve()) for one in directories),
    ]
    with tempfile.TemporaryDirectory() as cache:  # for what datasets generates from the parquet files
        done = subprocess.run(command, env=environment | {"HF_DATASETS_CACHE": cache})
    return CHECK_FAILED if done.returncode else DONE
