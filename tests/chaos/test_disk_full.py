"""A disk that fills while a run saves: the run stops with the numbers, nothing half-written counts, resume works."""

import re
from collections.abc import Callable, Iterator

import pytest

from kit.core.run_directory import RunDir, read_manifest
from tests.disk import Disk, small_disk


@pytest.fixture
def disk(tmp_path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


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
