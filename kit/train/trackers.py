"""Trackers of `watch.report_to`: check that they are installed before weights load, direct them to the run directory,
and send what TRL does not: the other metrics of metrics.jsonl and the sampled completions.

transformers looks for them when the trainer is created, after the weights; and its TensorBoard files go below the
output directory, which here is a staging directory that is removed at the end.
"""

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir

if TYPE_CHECKING:
    from transformers import TrainerCallback

# Tracker -> variable that sets its directory. Trackio keeps its default: its dashboard shows all runs from there.
PLACES = {"tensorboard": "TENSORBOARD_LOGGING_DIR", "wandb": "WANDB_DIR"}
OF_THE_RUN = ("step", "total_steps", "time")  # which a tracker has itself


def prepare_trackers(config: Config, run: RunDir) -> list[str]:
    """TRL's `report_to`; raises `BadInput` if one is not installed. Variables that the user has set are kept."""
    missing = [name for name in config.watch.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(
            f"watch.report_to names {', '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )
    for name, variable in PLACES.items():
        if name in config.watch.report_to:
            folder = run.path if name == "wandb" else run.path / name  # wandb adds the folder itself
            os.environ.setdefault(variable, str(folder))
    return config.watch.report_to or ["none"]


def figures(record: dict, sent: Container[str] = ()) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl under its own names, a nested one as `seconds/rollout`, without those in
    `sent` and without null and non-finite ones."""
    found: dict[str, float] = {}

    def visit(prefix: str, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                visit(f"{prefix}{key}/", value)
            elif type(value) in (int, float) and math.isfinite(value):
                found[prefix + key] = value

    visit("", {key: value for key, value in record.items() if key not in OF_THE_RUN})
    return {key: value for key, value in found.items() if key not in sent}


def send_completions(trackers: list[str], callbacks: "list[TrainerCallback]", step: int, rows: list[dict]) -> None:
    """Send a table of a step's sampled completions to `trackers`, in the main process, by the trainer's callbacks."""
    if not rows or not trackers:
        return
    table = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(column for row in table for column in row))
    for callback in callbacks:
        if (writer := getattr(callback, "tb_writer", None)) is not None:  # TensorBoardCallback's
            writer.add_text("completions", _markdown(columns, table), step)
    if "wandb" in trackers and (wandb := importlib.import_module("wandb")).run is not None:
        data = [[row.get(column) for column in columns] for row in table]
        wandb.log({"completions": wandb.Table(columns=columns, data=data), "train/global_step": step})
    if "trackio" in trackers:
        import pandas

        trackio = importlib.import_module("trackio")
        frame = pandas.DataFrame(table, columns=columns)
        trackio.log({"completions": trackio.Table(dataframe=frame)}, step=step)


def _flat(row: dict) -> dict:
    """A row of completions/step-*.jsonl with a column for each reward, and text for what is nested."""
    rewards = {f"reward {name}": value for name, value in row["rewards"].items()}
    flat = {key: value for key, value in row.items() if key != "rewards"} | rewards
    if isinstance(row["prompt"], list):  # the messages of a conversation
        flat["prompt"] = "\n\n".join(message["content"] for message in row["prompt"])
    nested = {key: value for key, value in flat.items() if isinstance(value, dict | list)}  # an episode's turns
    return flat | {key: json.dumps(value, ensure_ascii=False) for key, value in nested.items()}


def _markdown(columns: list[str], rows: list[dict]) -> str:
    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", "<br>")

    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
