"""A disk that fills while a run saves: the run stops with the numbers, nothing half-written counts, resume works.

The disk is a small tmpfs where it may be mounted (root); elsewhere a limit on the size of a file, which the kernel
refuses in the same place with another error number.
"""

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.core.run_directory import RunDir, read_manifest


class Disk:
    """A directory that can be made full for the next checkpoint, and emptied."""

    def __init__(self, folder: Path, mounted: bool):
        self.folder, self.mounted = folder, mounted
        self.unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def leave(self, free: int, largest_file: int) -> None:
        if self.mounted:
            used = shutil.disk_usage(self.folder).used
            self._mount("remount,", used + free)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, self.unlimited[1]))

    def release(self) -> None:
        if self.mounted:
            self._mount("remount,", 64 << 20)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.unlimited)

    def _mount(self, option: str, size: int) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", f"{option}size={size}", "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    disk = Disk(folder, mounted=False)
    disk.mounted = shutil.which("mount") is not None and disk._mount("", 64 << 20)
    try:
        yield disk
    finally:
        disk.release()
        if disk.mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_before_step(patch: pytest.MonkeyPatch, step: int, fill: Callable[[], None]) -> None:
    """Make the disk full when the run begins to save `step`."""
    from kit.train.trainer import PolicyTrainer

    save = PolicyTrainer._save_checkpoint

    def full(self, model, trial):
        if self.state.global_step == step:
            fill()
        return save(self, model, trial)

    patch.setattr(PolicyTrainer, "_save_checkpoint", full)


# How much of a checkpoint still fits: nothing, part of the adapter, the adapter but not the optimizer, nearly all.
@pytest.mark.parametrize(("free", "largest_file"), [(0, 0), (20 << 10, 20 << 10), (90 << 10, 60 << 10)])
def test_a_full_disk_stops_the_run_and_resume_continues_from_the_newest_whole_checkpoint(
    disk, recipe, recipe_arguments, learning_model_dir, read_jsonl, monkeypatch, free, largest_file
):
    run = RunDir(disk.folder / "run")
    arguments = recipe_arguments(learning_model_dir, run.path, {"train.max_steps": 4})
    with monkeypatch.context() as patch:
        fill_before_step(patch, 4, lambda: disk.leave(free, largest_file))
        done = recipe(arguments)
    disk.release()
    assert done.code == 1, done.err
    why = "[Errno 28] No space left on device" if disk.mounted else "[Errno 27] File too large"
    assert f"error: saving step 4 failed: {why} ({run.path} has " in done.err, done.err
    assert re.search(r"has [\d.]+ MiB free and needs about 0\.[1-9] MiB for a checkpoint", done.err), done.err
    assert f"{run.checkpoints / 'step-000002'} is whole" in done.err and "--resume" in done.err
    assert run.newest_checkpoint().name == "step-000002"
    assert run.newest_adapter().name in ("v000002", "v000004")
    read_manifest(run.newest_adapter(), "adapter", deep=True)
    assert not list(run.path.rglob(".partial-*")) and not list(run.path.rglob("*.tmp"))
    assert sorted(entry.name for entry in run.checkpoints.iterdir()) == ["step-000002"]

    resumed = recipe([*arguments, "--resume"])
    assert resumed.code == 0, resumed.err
    assert run.newest_checkpoint().name == "step-000004"
    assert [row["step"] for row in read_jsonl(run.metrics_file)] == [1, 2, 3, 4]
