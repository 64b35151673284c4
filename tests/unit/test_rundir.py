"""What is published is whole or absent; what is damaged is found and named."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eval.artifacts import merge_command
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, publish, read_manifest, stored_as, write_json, write_manifest
from kit.core.run_files import read_json
from kit.train.checkpoint import commit_checkpoint, discard_staged, rotate, staging_directory
from tests.conftest import CONFIG

ROOT = Path(__file__).parents[2]


def artifact(folder: Path, kind: str = "adapter", **fields) -> Path:
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "sub").mkdir()
    (folder / "sub" / "small.txt").write_text("x")
    write_manifest(folder, kind, **fields)
    return folder


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(3)]
)
def test_publish_leaves_nothing_when_its_block_fails(tmp_path, error):
    with pytest.raises(type(error)):
        with publish(tmp_path / "out") as partial:
            (partial / "half").write_text("half")
            raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_another_user_can_read_what_the_umask_lets_them(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with publish(tmp_path / "adapter") as partial:
            save_file({"weight": torch.zeros(2)}, partial / "adapter_model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_mode & 0o777 == mode


def test_publish_keeps_the_old_version_when_overwriting_fails(tmp_path):
    with publish(tmp_path / "out") as partial:
        (partial / "a").write_text("old")
    with pytest.raises(RuntimeError):
        with publish(tmp_path / "out", overwrite=True) as partial:
            (partial / "a").write_text("new")
            raise RuntimeError
    assert (tmp_path / "out" / "a").read_text() == "old"
    with publish(tmp_path / "out", overwrite=True) as partial:
        (partial / "b").write_text("new")
        assert (tmp_path / "out" / "a").read_text() == "old"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["b"]


def test_an_interruption_while_the_old_version_is_removed_leaves_the_new_one_whole(tmp_path, monkeypatch):
    def interrupted(folder, *_, **__):
        for file in folder.iterdir():
            file.unlink()
        monkeypatch.undo()
        raise KeyboardInterrupt

    for text in ("old", "new"):
        with contextlib.suppress(KeyboardInterrupt), publish(tmp_path / "out", overwrite=True) as partial:
            (partial / "a").write_text(text)
            monkeypatch.setattr("shutil.rmtree", interrupted)
    assert (tmp_path / "out" / "a").read_text() == "new"
    with publish(tmp_path / "out", overwrite=True):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_of_a_link_to_the_old_version_only_the_link_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to("elsewhere")
    with publish(tmp_path / "out", overwrite=True) as partial:
        (partial / "a").write_text("new")
    assert not (tmp_path / "out").is_symlink() and (tmp_path / "out" / "a").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "out"]


def test_publish_refuses_to_overwrite_unless_asked(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(BadInput, match="exists already"):
        with publish(tmp_path / "out"):
            raise AssertionError("the block must not run")


def test_a_process_killed_while_publishing_leaves_no_artifact_and_no_obstacle(tmp_path):
    code = (
        "import sys, time; from kit.core.run_directory import publish, write_manifest\n"
        "with publish(sys.argv[1] + '/v000001') as partial:\n"
        "    (partial / 'weights').write_text('x'); write_manifest(partial, 'adapter')\n"
        "    print('inside', flush=True); time.sleep(60)\n"
    )
    run = RunDir(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", code, str(run.adapters)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"inside\n"
    with pytest.raises(BadInput, match=r"v000001 is being written by another process, in .*\.partial-v000001\."):
        with publish(run.adapter_dir(1), overwrite=True):
            raise AssertionError("the block must not run")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = run.adapters.iterdir()
    assert left.name.startswith(".partial-v000001.") and (left / "weights").read_text() == "x"
    with pytest.raises(BadInput, match="no whole adapter"):
        run.newest_adapter()
    with publish(run.adapter_dir(1)) as partial:
        write_manifest(partial, "adapter")
    assert [entry.name for entry in run.adapters.iterdir()] == ["v000001"]


def test_a_second_writer_is_refused_and_the_first_ones_files_stay_whole(tmp_path):
    with publish(tmp_path / "out") as first:
        with open(first / "weights", "wb") as file:
            file.write(b"first")
            with pytest.raises(BadInput, match="is being written by another process"):
                with publish(tmp_path / "out") as second:
                    (second / "weights").write_bytes(b"half")
            file.write(b" to the end")
        write_manifest(first, "adapter")
    read_manifest(tmp_path / "out", "adapter", deep=True)
    assert (tmp_path / "out" / "weights").read_bytes() == b"first to the end"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_where_files_cannot_be_locked_two_writers_still_have_a_directory_each(tmp_path, monkeypatch, overwrite):
    def no_locks(*_):
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)

    def both() -> None:
        with publish(tmp_path / "out", overwrite) as first:
            (first / "weights").write_bytes(b"first")
            with publish(tmp_path / "out", overwrite) as second:
                (second / "weights").write_bytes(b"second")
                write_manifest(second, "adapter")
            assert (tmp_path / "out" / "weights").read_bytes() == b"second"
            write_manifest(first, "adapter")

    if overwrite:
        both()
    else:
        with pytest.raises(BadInput, match="out was written by another process meanwhile"):
            both()
    read_manifest(tmp_path / "out", "adapter", deep=True)
    assert (tmp_path / "out" / "weights").read_bytes() == (b"first" if overwrite else b"second")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_directory_taken_for_a_dead_ones_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = fcntl.flock, []

    def take_the_first(*arguments):
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", take_the_first)
    with publish(tmp_path / "out") as partial:
        (partial / "weights").write_text("x")
    assert taken and (tmp_path / "out" / "weights").read_text() == "x"


def test_what_a_dead_process_left_of_another_name_stays(tmp_path):
    other = tmp_path / ".partial-out.v2.0123abcd"
    other.mkdir()
    (tmp_path / ".partial-out.0123abcd").mkdir()
    with publish(tmp_path / "out"):
        pass
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [other.name, "out"]


def test_a_whole_artifact_reads_back_with_its_fields(tmp_path):
    manifest = read_manifest(artifact(tmp_path / "a", version=3), "adapter", deep=True)
    assert manifest["version"] == 3
    assert set(manifest["files"]) == {"weights.bin", "sub/small.txt"}
    assert manifest["files"]["weights.bin"]["bytes"] == 1024
    with pytest.raises(BadInput, match="holds a 'adapter', expected a 'checkpoint'"):
        read_manifest(tmp_path / "a", "checkpoint")
    with pytest.raises(BadInput, match="does not exist"):
        read_manifest(tmp_path / "b")


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = {
    "missing": (lambda folder: (folder / "weights.bin").unlink(), r"is not whole: weights\.bin is missing"),
    "truncated": (
        rewrite("weights.bin", lambda old: old[:-1]),
        r"weights\.bin has 1023 bytes, .* says 1024",
    ),
    "grown": (rewrite("weights.bin", lambda old: old + b"x"), r"weights\.bin has 1025 bytes, .* says 1024"),
    "a bit": (
        rewrite("weights.bin", lambda old: bytes([old[0] ^ 1]) + old[1:]),
        r"content of weights\.bin is not",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest\.json"),
    "half a manifest": (rewrite("manifest.json", lambda old: old[:80]), "is not JSON"),
    "an empty manifest": (rewrite("manifest.json", lambda old: b""), "is not JSON"),
    "a list": (
        rewrite("manifest.json", lambda old: b"[]"),
        "is not a manifest of this kit: the content is \\[\\], expected an object",
    ),
    "no files": (rewrite("manifest.json", lambda old: b'{"kind": "training-state"}'), "files is missing"),
    "bytes": (rewrite("manifest.json", lambda old: b"\x00\x01"), "is not JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_artifact_is_named_with_what_is_wrong(tmp_path, name):
    damage, message = DAMAGES[name]
    damage(artifact(tmp_path / "a", "training-state"))
    if name == "a bit":  # which takes the time of a hash
        read_manifest(tmp_path / "a", "training-state")
    with pytest.raises(BadInput, match=message):
        read_manifest(tmp_path / "a", "training-state", deep=name == "a bit")


def test_an_adapter_that_is_missing_is_named_with_those_that_are_there(tmp_path):
    for version in (40, 80):
        (folder := tmp_path / "adapters" / f"v{version:06d}").mkdir(parents=True)
        write_manifest(folder, kind="adapter")
    with pytest.raises(BadInput, match=r"v000099 does not exist \(seen from /.*adapters has v000040, v000080\."):
        read_manifest(tmp_path / "adapters/v000099")


@pytest.mark.parametrize("place", [0, 1 << 22, (1 << 22) + 1, 9 << 20])
def test_a_changed_byte_is_found_wherever_it_is_in_a_large_file(tmp_path, place):
    folder = tmp_path / "a"
    folder.mkdir()
    with open(folder / "weights.bin", "wb") as file:
        file.truncate((9 << 20) + 1)
    write_manifest(folder, "adapter")
    read_manifest(folder, deep=True)
    with open(folder / "weights.bin", "r+b") as file:
        file.seek(place)
        file.write(b"\1")
    with pytest.raises(BadInput, match=r"is damaged: the content of weights\.bin"):
        read_manifest(folder, deep=True)


@pytest.mark.parametrize("name", ["adapter.safetensors", "pytorch_model.bin", "extra.json", "sub/chat.jinja"])
def test_a_checkpoint_with_a_file_that_readers_take_and_its_manifest_does_not_list_is_refused(tmp_path, name):
    folder = artifact(tmp_path / "a", "checkpoint")
    (folder / "notes.txt").write_text("x")
    read_manifest(folder, "checkpoint", deep=True)
    (folder / name).write_text("{}")
    with pytest.raises(BadInput, match=f"holds {re.escape(name)}, which its manifest does not list"):
        read_manifest(folder, "checkpoint", deep=True)


def test_every_file_is_listed_with_its_own_hash(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.bin").write_bytes(os.urandom(50 + number))
    files = write_manifest(tmp_path, "checkpoint", version=4)["files"]
    assert len(files) == 30
    for name, listed in files.items():
        content = (tmp_path / name).read_bytes()
        expected = hashlib.blake2b(content, digest_size=32).hexdigest()
        assert listed == {"bytes": len(content), "blake2b": expected}
    assert read_json(tmp_path / "manifest.json")["version"] == 4


def test_bases_that_are_stored_otherwise_are_told_apart():
    def stored(*keys: str) -> dict:
        return stored_as(load_config(CONFIG, list(keys)))

    given = {"model.dtype": "float32", "policy.quantization": "nf4", "policy.double_quantization": True}
    assert stored() == given
    assert stored("--policy.double_quantization=false") == given | {"policy.double_quantization": False}
    assert stored("--model.dtype=bfloat16") == given | {"model.dtype": "bfloat16"}
    for kind in ("fp8", "none"):  # which have no block scales
        assert stored(f"--policy.quantization={kind}") == {"model.dtype": "float32", "policy.quantization": kind}


def test_write_json_keeps_the_old_file_when_the_value_cannot_be_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    for value in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_reader_of_write_json_never_sees_half(tmp_path):
    path, text = tmp_path / "a.json", "y" * 200_000
    write_json(path, {"n": 0, "text": text})
    child = os.fork()
    if child == 0:
        try:
            for number in itertools.count(1):
                write_json(path, {"n": number, "text": text})
        finally:
            os._exit(1)
    seen: set[int] = set()
    try:
        while len(seen) < 30:
            assert os.waitpid(child, os.WNOHANG)[0] == 0, "it writes until it is killed"
            found = json.loads(path.read_text())
            assert len(found["text"]) == 200_000
            seen.add(found["n"])
            time.sleep(0.001)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def checkpoint(run: RunDir, step: int) -> Path:
    staged = staging_directory(run) / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "weights.bin").write_bytes(bytes(range(256)) * 4)
    return commit_checkpoint(run, step, "00")


@pytest.mark.parametrize("name", DAMAGES)
def test_the_newest_whole_checkpoint_is_taken_never_a_damaged_newer_one(tmp_path, name):
    run, (damage, _) = RunDir(tmp_path), DAMAGES[name]
    checkpoint(run, 2)
    newest = checkpoint(run, 10)
    assert run.newest_checkpoint().name == "step-000010"
    damage(newest)
    passed_over: list[str] = []
    assert run.newest_checkpoint(passed_over).name == "step-000002"
    assert len(passed_over) == 1 and str(newest) in passed_over[0]
    damage(run.checkpoints / "step-000002")
    with pytest.raises(BadInput, match=rf"no whole training-state under .*: 2 damaged, the newest because {newest}"):
        run.newest_checkpoint()


def test_what_is_staged_is_never_taken_and_is_removed(tmp_path):
    run = RunDir(tmp_path)
    checkpoint(run, 2)
    leftover = staging_directory(run) / "checkpoint-4"
    leftover.mkdir()
    (leftover / "optimizer.pt").write_bytes(b"half")
    assert run.newest_checkpoint().name == "step-000002"
    discard_staged(run)
    assert [entry.name for entry in run.checkpoints.iterdir()] == ["step-000002"]


def test_rotation_keeps_the_newest_and_never_removes_the_only_whole_one(tmp_path):
    for damaged, kept in (((), ["step-000004", "step-000010"]), ((4, 10), None)):
        run = RunDir(tmp_path / str(len(damaged)))
        for step in (2, 4, 10):
            checkpoint(run, step)
        for step in damaged:
            DAMAGES["truncated"][0](run.checkpoints / f"step-{step:06d}")
        rotate(run, 2)
        if kept:
            assert sorted(entry.name for entry in run.checkpoints.glob("step-*")) == kept
        else:
            assert run.newest_checkpoint().name == "step-000002"


@pytest.mark.parametrize("versions", [(2, 10), (99, 100), (999, 1000), (9_999, 10_000), (99_999, 100_000)])
def test_the_newest_is_the_highest_number_that_is_whole_and_not_the_last_word(tmp_path, versions):
    run = RunDir(tmp_path)
    for version in versions:
        artifact(run.adapter_dir(version))
        artifact(run.checkpoints / f"step-{version:06d}", "training-state")
    artifact(run.adapters / ".partial-v900000")
    assert run.newest_adapter() == run.adapter_dir(versions[1])
    assert run.newest_checkpoint().name == f"step-{versions[1]:06d}"
    DAMAGES["missing"][0](run.adapter_dir(versions[1]))
    assert run.newest_adapter() == run.adapter_dir(versions[0])


def test_where_a_run_keeps_what(tmp_path):
    run = RunDir(tmp_path)
    assert run.adapter_dir(7) == tmp_path / "adapters" / "v000007"
    assert run.merged_into("dequantized") == tmp_path / "merged"
    assert run.merged_into("original") == tmp_path / "merged-original"


def test_opening_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"has no config\.json"):
        RunDir.open(tmp_path)
    with pytest.raises(BadInput, match=rf"no run directory at absent \(seen from {re.escape(str(Path.cwd()))}\)"):
        RunDir.open("absent")


def test_a_command_that_a_message_names_takes_a_run_whose_path_has_a_space():
    named = merge_command(RunDir("my runs/tiny"), ["fp8"])
    assert shlex.split(named) == ["python", "-m", "merge", "--run", "my runs/tiny", "--format", "fp8"]
    assert RunDir("runs/tiny").as_argument == "runs/tiny"
    for room in ("eval", "kit", "launch", "merge", "recipes", "reward"):
        for file in (ROOT / room).rglob("*.py"):
            assert not re.search(r"--run \{[\w.]*\.path\}", file.read_text()), file
