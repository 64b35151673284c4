"""Training checkpoints that are whole or absent, and resuming from the newest whole one.

transformers writes straight into `checkpoint-N` and `get_last_checkpoint` takes whatever is there. Here a checkpoint
is staged elsewhere, gets a manifest with every file's size and hash, and is renamed to `checkpoints/step-N`.
"""

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from safetensors import SafetensorError

from kit.core.errors import BadInput, MachineFailed, is_failed_torch_save
from kit.core.file_kinds import METRICS
from kit.core.ledger import check_ledger, ledger_facts
from kit.core.run_directory import (
    RunDir,
    checkpoint_step,
    manifest_as_written,
    read_manifest,
    settle,
    write_manifest,
)
from kit.core.run_files import read_lines
from kit.train.record import drop_steps_after, note_resume

SAVE_ERRORS = (OSError, RuntimeError, SafetensorError)


def is_disk_error(error: Exception) -> bool:
    """Whether a failed save is the disk's fault (full, quota, I/O error)."""
    return not isinstance(error, RuntimeError) or is_failed_torch_save(error)


def staging_directory(run: RunDir) -> Path:
    """Directory where transformers writes a checkpoint before it is committed."""
    return run.checkpoints / ".staging"


def commit_checkpoint(run: RunDir, step: int, base_hash: str, **facts: Any) -> Path:
    """Turn the staged `checkpoint-<step>` into `checkpoints/step-<step>`, with `facts` in its manifest; return it."""
    staged = staging_directory(run) / f"checkpoint-{step}"
    (staged / "README.md").unlink(missing_ok=True)
    write_manifest(
        staged, "training-state", step=step, base_hash=base_hash, ledger=ledger_facts(run.ledger_file, step), **facts
    )
    settle(staged)
    final = run.checkpoints / f"step-{step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(staged, final)
    return final


def discard_staged(run: RunDir) -> None:
    """Remove the leftovers of an interrupted save."""
    shutil.rmtree(staging_directory(run), ignore_errors=True)


def rotate(run: RunDir, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints; a damaged one never displaces a whole one."""
    whole = []
    for checkpoint in sorted(run.checkpoints.glob("step-[0-9]*"), reverse=True):
        with contextlib.suppress(BadInput):
            read_manifest(checkpoint, "training-state")
            whole.append(checkpoint)
    for checkpoint in run.checkpoints.glob("step-[0-9]*"):
        if checkpoint not in whole[:keep]:
            shutil.rmtree(checkpoint)


def refusal_of(folder: Path, size: int) -> OSError | None:
    """The OSError of writing another file of `size` bytes to `folder`; None if that works."""
    place = folder / f".probe-{os.getpid()}"
    try:
        with open(place, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
    return None


def saving_failed(run: RunDir, step: int, error: Exception, needed: int) -> MachineFailed:
    """The error for a failed save of about `needed` bytes: the checkpoint that is left, and how to continue. Call it
    before space is freed."""
    free = shutil.disk_usage(run.path).free / 2**20
    try:
        left = f"{run.newest_checkpoint()} is whole. Free some space, then continue with --resume."
    except BadInput:
        left = "no checkpoint was completed before. Free some space, remove the run and start it again."
    reason = (str(error) or type(error).__name__).splitlines()[0]
    # torch.save and safetensors set no errno, and torch.save has no message either.
    if getattr(error, "errno", None) is None and (refused := refusal_of(run.path, needed)) is not None:
        reason = f"[Errno {refused.errno}] {refused.strerror}"
    return MachineFailed(
        f"saving step {step} failed: {reason} ({run.path} has {free:.1f} MiB free and needs about "
        f"{needed / 2**20:.1f} MiB for a checkpoint). Nothing half-written is kept; {left}"
    )


def trained_by(checkpoint: Path) -> int | None:
    """The number of processes that wrote a checkpoint; None if a version of the kit did that recorded none."""
    return manifest_as_written(checkpoint).get("processes")


def seed_anew(seed: int, step: int, rank: int, processes: int) -> None:
    """Seed the generators of a process that goes on with a checkpoint of another number of processes: their states
    belong to those. The same resume draws the same numbers."""
    digest = hashlib.blake2b(f"{seed} {step} {rank} {processes}".encode(), digest_size=4).digest()
    set_seed(int.from_bytes(digest, "big"))


def rewind(run: RunDir, checkpoint: Path, **facts: Any) -> int:
    """Remove what later steps wrote (metrics, ledger, adapters, completions) and return the checkpoint's step: the run
    may diverge from here, and nothing may be logged twice or mistaken for its newest adapter. `resumes.jsonl` keeps
    which steps and problems are sampled again, and `facts`. `BadInput`, with nothing removed, if metrics or ledger are
    damaged or the ledger is not the checkpoint's."""
    step = checkpoint_step(checkpoint)
    check_ledger(run.ledger_file, manifest_as_written(checkpoint), checkpoint)
    if run.metrics_file.exists():
        read_lines(run.metrics_file, METRICS, may_be_growing=True)  # refused before anything is removed
    note_resume(run, step, **facts)
    for path in (run.metrics_file, run.ledger_file):
        drop_steps_after(path, step)
    for adapter in run.adapters.glob("v[0-9]*"):
        if int(adapter.name[1:]) > step:
            shutil.rmtree(adapter)
    for sample in run.completions.glob("step-*.jsonl"):
        if int(sample.stem.removeprefix("step-")) > step:
            sample.unlink()
    return step
