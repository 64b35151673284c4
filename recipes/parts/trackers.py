"""Trackers of `watch.report_to`, which TRL feeds: installed before weights load, and writing where the run keeps it.

transformers looks for them when the trainer is made, after the weights; and its TensorBoard files go below the output
directory, which here is a staging directory that is removed at the end.
"""

import importlib.util
import os

from recipes.parts.config import Config
from recipes.parts.errors import BadInput
from recipes.parts.rundir import RunDir

# Tracker -> variable that says where it writes. Trackio's own place stays: its dashboard shows all runs from there.
PLACES = {"tensorboard": "TENSORBOARD_LOGGING_DIR", "wandb": "WANDB_DIR"}


def prepare_trackers(config: Config, run: RunDir) -> list[str]:
    """What TRL reports to; `BadInput` when it is not installed. Variables that the user has set stay."""
    missing = [name for name in config.watch.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(
            f"watch.report_to names {', '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )
    for name, variable in PLACES.items():
        if name in config.watch.report_to:
            os.environ.setdefault(variable, str(run.path / name))
    return config.watch.report_to or ["none"]
