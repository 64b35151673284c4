"""Training checkpoints that are whole or absent, and resuming from the newest whole one.

transformers writes straight into `checkpoint-N` and `get_last_checkpoint` takes whatever lies there. Here a checkpoint
is written aside, gets a manifest with every file's size and hash, and is renamed to `checkpoints/step-N`.
"""

import contextlib
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from recipes.parts.errors import BadInput, CheckFailed
from recipes.parts.record import drop_steps_after
from recipes.parts.rundir import RunDir, read_manifest, write_manifest

# A full disk is an OSError to Python, a SafetensorError to safetensors and a RuntimeError without errno to torch.save.
SAVE_ERRORS = (OSError, RuntimeError, SafetensorError)


def staging_directory(run: RunDir) -> Path:
    """Where transformers writes a checkpoint before it counts."""
    return run.checkpoints / ".staging"


def commit_checkpoint(run: RunDir, step: int, base_hash: str) -> Path:
    """Turn the staged `checkpoint-<step>` into `checkpoints/step-<step>` and return it."""
    staged = staging_directory(run) / f"checkpoint-{step}"
    (staged / "README.md").unlink(missing_ok=True)
    write_manifest(staged, "training-state", step=step, base_hash=base_hash)
    for file in staged.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
    final = run.checkpoints / f"step-{step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staged, final)
    return final


def discard_staged(run: RunDir) -> None:
    """Remove whatever an interrupted save left behind."""
    shutil.rmtree(staging_directory(run), ignore_errors=True)


def rotate(run: RunDir, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints; a damaged one never takes the place of a whole one."""
    whole = []
    for checkpoint in sorted(run.checkpoints.glob("step-[0-9]*"), reverse=True):
        with contextlib.suppress(BadInput):
            read_manifest(checkpoint, "training-state")
            whole.append(checkpoint)
    for checkpoint in run.checkpoints.glob("step-[0-9]*"):
        if checkpoint not in whole[:keep]:
            shutil.rmtree(checkpoint)


def saving_failed(run: RunDir, step: int, error: Exception) -> CheckFailed:
    """The error of a save that the disk refused: what is left, and how to go on. Call it before space is freed."""
    free = shutil.disk_usage(run.path).free / 2**20
    try:
        left = f"{run.newest_checkpoint()} is whole"
    except BadInput:
        left = "no checkpoint was completed before"
    return CheckFailed(
        f"saving step {step} failed: {str(error).splitlines()[0]} ({free:.1f} MiB free). Nothing half-written is "
        f"kept; {left}. Free some space, then continue with --resume."
    )


def checkpoint_step(checkpoint: Path) -> int:
    """The step that `checkpoints/step-000010` was written after."""
    return int(checkpoint.name.removeprefix("step-"))


def rewind(run: RunDir, checkpoint: Path) -> int:
    """The checkpoint's step; lines of later steps leave metrics.jsonl and ledger.jsonl, so none is told twice."""
    step = checkpoint_step(checkpoint)
    for path in (run.metrics_file, run.ledger_file):
        drop_steps_after(path, step)
    return step
