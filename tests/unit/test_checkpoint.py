"""A checkpoint is on the disk before it counts, says what it is of, and a rewind keeps what its step left."""

import errno
import json
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir, checkpoint_step, publish, read_manifest, write_json, write_manifest
from kit.train.checkpoint import commit_checkpoint, is_disk_error, rewind, rotate, saving_failed, staging_directory


def stage(run: RunDir, step: int) -> Path:
    """A checkpoint as transformers leaves it, part of it in a folder of its own."""
    staged = staging_directory(run) / f"checkpoint-{step}"
    for name in ("adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "README.md", "rng/state.pth"):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(f"{name} of step {step}".encode())
    return staged


@pytest.fixture
def disk(monkeypatch):
    """What happened, in order: ("sync", file) when a file is brought to the disk, ("rename", new path)."""
    seen, replace, rename, sync = [], os.replace, os.rename, os.fsync

    def synced(handle):
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)

    def renamed(how):
        def call(source, target, **keys):
            seen.append(("rename", Path(target)))
            how(source, target, **keys)

        return call

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed(replace))
    monkeypatch.setattr(os, "rename", renamed(rename))
    return seen


def synced_before_renaming(seen: list, final: Path) -> set[str]:
    """Names of the files that were on the disk when something became `final`."""
    before = seen[: seen.index(("rename", final))]
    names = {path.name for what, path in before if what == "sync"}
    # write_json's temporary file is the manifest's content
    return {"manifest.json" if name.startswith(".manifest.json.") else name for name in names}


def test_every_file_of_a_checkpoint_is_on_the_disk_before_the_checkpoint_counts(tmp_path, disk):
    run = RunDir(tmp_path)
    stage(run, 3)
    final = commit_checkpoint(run, 3, "00")
    files = {file.name for file in final.rglob("*") if file.is_file()}
    assert len(files) == 5 and synced_before_renaming(disk, final) == files


def test_every_file_that_is_published_is_on_the_disk_before_it_can_be_read(tmp_path, disk):
    with publish(tmp_path / "v000001") as partial:
        (partial / "sub").mkdir()
        (partial / "weights.bin").write_bytes(b"x" * 100)
        (partial / "sub" / "more.bin").write_bytes(b"x")
        write_manifest(partial, "adapter")
    assert synced_before_renaming(disk, tmp_path / "v000001") == {"weights.bin", "more.bin", "manifest.json"}
    disk.clear()
    write_json(tmp_path / "a.json", {})
    ((first, file), (second, final)) = disk
    assert (first, second, final) == ("sync", "rename", tmp_path / "a.json") and file.parent == tmp_path


def test_a_checkpoint_says_its_step_its_base_and_its_facts_and_has_no_model_card(tmp_path):
    run = RunDir(tmp_path)
    staged = stage(run, 12)
    final = commit_checkpoint(run, 12, "ab12", quant_cfg="fp8")
    assert final == run.checkpoints / "step-000012" and not staged.exists()
    manifest = read_manifest(final, "training-state", deep=True)
    assert (manifest["step"], manifest["base_hash"], manifest["quant_cfg"]) == (12, "ab12", "fp8")
    assert set(manifest["files"]) == {
        *("adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "rng/state.pth")
    }
    assert run.newest_checkpoint() == final and checkpoint_step(final) == 12


def test_a_step_that_is_saved_again_takes_the_place_of_its_damaged_checkpoint(tmp_path):
    run = RunDir(tmp_path)
    stage(run, 4)
    (commit_checkpoint(run, 4, "00") / "left-over.pt").write_bytes(b"of the first")
    stage(run, 4)
    final = commit_checkpoint(run, 4, "01")
    assert read_manifest(final, deep=True)["base_hash"] == "01" and not (final / "left-over.pt").exists()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_so_many_whole_ones_and_no_damaged_one(tmp_path, keep):
    run = RunDir(tmp_path)
    for step in (2, 4, 6, 8, 10):
        stage(run, step)
        commit_checkpoint(run, step, "00")
    for step in (6, 10):
        (run.checkpoints / f"step-{step:06d}" / "optimizer.pt").write_bytes(b"")
    rotate(run, keep)
    left = sorted(entry.name for entry in run.checkpoints.glob("step-*"))
    assert left == ["step-000002", "step-000004", "step-000008"][3 - keep :]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_rewind_keeps_what_its_own_step_and_those_before_left_and_nothing_later(tmp_path, step):
    run = RunDir(tmp_path)
    for made in (2, 4, 6, 10):
        run.adapter_dir(made).mkdir(parents=True)
        run.completions.mkdir(exist_ok=True)
        (run.completions / f"step-{made:06d}.jsonl").write_text("{}\n")
        for file in (run.metrics_file, run.ledger_file):
            with open(file, "a") as lines:
                lines.write(json.dumps({"step": made, "problem_ids": []}) + "\n")
    assert rewind(run, run.checkpoints / f"step-{step:06d}") == step
    kept = [made for made in (2, 4, 6, 10) if made <= step]
    assert sorted(run.adapters.iterdir()) == [run.adapter_dir(made) for made in kept]
    assert sorted(entry.name for entry in run.completions.iterdir()) == [f"step-{made:06d}.jsonl" for made in kept]
    for file in (run.metrics_file, run.ledger_file):
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == kept


@pytest.mark.parametrize(
    ("error", "of_disk"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (SafetensorError("Error while serializing: I/O error"), True),
        (RuntimeError("[enforce fail at inline_container.cc:664] unexpected pos 64 vs 0"), True),
        (RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("NCCL communicator was aborted"), False),
    ],
)
def test_a_failed_save_is_the_disks_fault_only_when_it_is(error, of_disk):
    assert is_disk_error(error) == of_disk


@pytest.mark.parametrize("before", [True, False])
def test_a_save_that_the_disk_refused_names_the_checkpoint_that_a_resume_takes(tmp_path, before):
    run = RunDir(tmp_path)
    if before:
        stage(run, 2)
        commit_checkpoint(run, 2, "00")
    failed = saving_failed(run, 4, OSError(errno.ENOSPC, "No space left on device"), 1 << 20)
    assert isinstance(failed, CheckFailed) and str(failed).startswith("saving step 4 failed: [Errno 28] No space left")
    assert ("step-000002 is whole" in str(failed)) == before
    assert ("no checkpoint was completed before" in str(failed)) != before
