"""`python -m merge base`: what it records, what it reuses, and what it refuses to take for its own."""

import os
import re
import shutil

import pytest
import torch
import yaml

from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput
from kit.core.run_directory import base_directory, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from launch.vllm_command import check_base
from merge import export as merge_export
from merge.__main__ import main
from tests.unit.merge_fixture import make_model, shared_folder, shared_model, shared_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settings(**model) -> dict:
    """A configuration of the tiny model, with `model` over its model group."""
    model = {"id": "tiny", "path": str(shared_model()), "dtype": "float32", **model}
    return {"run": {"name": "tiny"}, "model": model, "train": {"max_steps": 1}, "data": {"path": "problems.jsonl"}}


def export(folder, out, *flags, **model) -> int:
    """The command on `settings`; without `out`, where the base lies by default."""
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(**model)))
    place = [] if out is None else ["--out", str(out)]
    return main(["base", "--config", str(folder / "run.yaml"), *place, *flags])


@pytest.fixture
def written(tmp_path):
    """A copy of the dequantized base, which is made once a session."""
    whole = shared_folder() / "exported"
    if not whole.exists():
        assert export(tmp_path, whole) == 0
    return shutil.copytree(whole, tmp_path / "exported")


def edit_base(folder, **fields) -> None:
    write_json(folder / "base.json", {**read_json(folder / "base.json"), **fields})
    manifest = read_json(folder / "manifest.json")
    facts = {key: value for key, value in manifest.items() if key not in ("kind", "created", "files")}
    write_manifest(folder, "checkpoint", **facts)


def edit_manifest(folder, **fields) -> None:
    write_json(folder / "manifest.json", {**read_json(folder / "manifest.json"), **fields})


def edit_source(folder, **fields) -> None:
    """A base as if it were made of a hub model."""
    edit_base(folder, model="owner/model")
    edit_manifest(folder, source={**read_json(folder / "manifest.json")["source"], **fields})


def test_a_local_model_is_recorded_by_its_full_path_and_reused(written, tmp_path, monkeypatch, capsys):
    info = read_json(written / "base.json")
    assert (info["model"], info["revision"]) == (str(shared_model().resolve()), None)
    monkeypatch.chdir(shared_model().parent)
    assert export(tmp_path, written, path=shared_model().name) == 0
    assert f"exists already (base hash {info['hash'][:12]})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "flags", "model", "message"),
    [
        (lambda f: None, ["--policy.double_quantization=false"], {}, "policy.double_quantization is True"),
        (lambda f: None, [], {"dtype": "bfloat16"}, "model.dtype is 'float32', the configuration says 'bfloat16'"),
        (lambda f: None, [], {"revision": "v2"}, "revision is None, the configuration says 'v2'"),
        (lambda f: edit_source(f, commit=COMMIT, files={}), [], {}, "model is 'owner/model'"),
        (lambda f: edit_manifest(f, policy="grpo"), [], {}, "policy is 'grpo'"),
        (lambda f: edit_manifest(f, format="fp8"), [], {}, "format is 'fp8'"),
        (lambda f: (f / "base.json").unlink(), [], {}, "base.json is missing"),
        (lambda f: None, [], {"path": "models/nowhere"}, "model.path models/nowhere is not a directory"),
    ],
)  # fmt: skip
def test_what_lies_at_out_is_reused_only_for_the_same_base(written, tmp_path, spoil, flags, model, message):
    spoil(written)
    with pytest.raises(BadInput, match=message):
        export(tmp_path, written, *flags, **model)


def test_another_model_at_the_same_place_is_not_taken_for_the_first(written, tmp_path):
    other = make_model(tmp_path / "other", seed=3)
    with pytest.raises(BadInput, match=rf"it was made of {shared_model()}, and .*other is another model \(.*rm -r"):
        export(tmp_path, written, path=str(other))


def same_look(source, other) -> None:
    """Give `other`'s files the times of those of `source`, of which they have the sizes already."""
    for file in source.iterdir():
        stat = file.stat()
        assert (other / file.name).stat().st_size == stat.st_size
        os.utime(other / file.name, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_model_of_equal_sizes_and_times_at_another_place_is_not_taken_for_the_first(own, tmp_path):
    source, base = own
    other = shutil.copytree(source, tmp_path / "other")
    flip_byte(other / SHARD)
    same_look(source, other)
    with pytest.raises(BadInput, match=rf"other is another model \({SHARD} has other content\)"):
        export(tmp_path, base, path=str(other))


@pytest.mark.parametrize("place", ["own", f"cache/snapshots/{COMMIT}"])
def test_a_base_is_reused_when_it_and_its_local_model_were_moved(tmp_path, monkeypatch, place):
    source = shutil.copytree(shared_model(), tmp_path / place)
    assert export(tmp_path, tmp_path / "base", path=str(source)) == 0
    source = source.rename(tmp_path / "moved")
    base = (tmp_path / "base").rename(tmp_path / "moved-base")
    for file in source.iterdir():
        set_time(file)
    assert export(tmp_path, base, path=str(source)) == 0
    assert read_json(base / "manifest.json")["source"]["path"] == str(source)
    monkeypatch.setattr(merge_export, "file_hash", lambda file: pytest.fail(f"{file} is compared a second time"))
    assert export(tmp_path, base, path=str(source)) == 0


def served(written, tmp_path, **model) -> dict:
    """What launch.server says of the base for a run whose local model lies at a path of another host."""
    groups = settings(path="/elsewhere/model", **model)
    groups["run"]["output_dir"] = str(tmp_path / "run")
    return check_base(config_from_dict({**groups, "server": {"base": str(written)}}), "run.yaml")


def test_a_server_takes_a_local_models_base_whatever_its_path_unless_the_run_has_another(written, tmp_path):
    info = read_json(written / "base.json")
    assert served(written, tmp_path)["base_hash"] == info["hash"]
    with pytest.raises(BadInput, match=r"its model\.dtype is 'float32', the configuration says 'bfloat16'"):
        served(written, tmp_path, dtype="bfloat16")
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "base.json", info)
    assert served(written, tmp_path)["base_hash"] == info["hash"]
    write_json(tmp_path / "run" / "base.json", {**info, "hash": "cd" * 32})
    with pytest.raises(
        BadInput, match=rf"its base hash is {info['hash'][:12]}, that of the run \(.*\) is cdcdcdcdcdcd"
    ):
        served(written, tmp_path)


def test_a_second_command_on_the_same_name_is_refused_and_the_first_ones_base_is_whole(tmp_path, monkeypatch):
    write_base = merge_export.write_base

    def write_and_start_again(*arguments, **named):
        monkeypatch.setattr(merge_export, "write_base", write_base)
        with pytest.raises(BadInput, match="out is being written by another process"):
            export(tmp_path, tmp_path / "out")
        return write_base(*arguments, **named)

    monkeypatch.setattr(merge_export, "write_base", write_and_start_again)
    assert export(tmp_path, tmp_path / "out") == 0
    read_manifest(tmp_path / "out", "checkpoint", deep=True)


@pytest.fixture
def hub(monkeypatch):
    """`hub(*commits)`: owner/tiny is the tiny model, whose branch is at the next of these commits at each look."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained

    def serve(*commits):
        following = iter(commits)

        def from_hub(path, **options):
            config = read(str(shared_model()) if path == "owner/tiny" else path)
            if path == "owner/tiny":
                config._commit_hash = next(following)
            return config

        monkeypatch.setattr(AutoConfig, "from_pretrained", from_hub)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(shared_model()))

    return serve


@pytest.mark.parametrize("revision", [None, "main"])
def test_the_weights_are_of_the_commit_that_is_recorded_when_the_branch_moves_meanwhile(
    tmp_path, monkeypatch, hub, revision
):
    hub(COMMIT)
    later = make_model(tmp_path / "later", seed=3)

    def download(name, revision, allow_patterns):
        source = later if revision in (None, "main") else shared_model()
        return shutil.copytree(source, tmp_path / "snapshots" / source.name, dirs_exist_ok=True)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert export(tmp_path, tmp_path / "out", id="owner/tiny", path=None, revision=revision) == 0
    assert read_manifest(tmp_path / "out")["source"]["commit"] == COMMIT
    assert read_json(tmp_path / "out" / "base.json")["hash"] == read_json(shared_run().base_file)["hash"]


@pytest.mark.parametrize(("revision", "recorded"), [(None, COMMIT), ("v1", "v1")])
def test_of_a_hub_id_the_commit_is_recorded_unless_a_revision_is_asked_for(tmp_path, hub, revision, recorded):
    hub(COMMIT, COMMIT)
    arguments = {"id": "owner/tiny", "path": None, "revision": revision}
    assert export(tmp_path, tmp_path / "out", **arguments) == 0
    info = read_json(tmp_path / "out" / "base.json")
    assert (info["model"], info["revision"]) == ("owner/tiny", recorded)
    assert read_manifest(tmp_path / "out", "checkpoint", deep=True)["base_hash"] == info["hash"]
    assert export(tmp_path, tmp_path / "out", **arguments) == 0


@pytest.fixture
def own(tmp_path):
    """(a copy of the tiny checkpoint, the base made of it)."""
    source = shutil.copytree(shared_model(), tmp_path / "own")
    assert export(tmp_path, tmp_path / "base", path=str(source)) == 0
    return source, tmp_path / "base"


def set_time(file) -> None:
    os.utime(file, ns=(1, 1))


def flip_byte(file) -> None:
    """Another content of the same size, at another time."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    set_time(file)


SHARD = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: flip_byte(f / SHARD), rf"{SHARD} has other content"),
        (lambda f: (f / "chat_template.jinja").write_text("{{ x }}"), "chat_template.jinja has 7 bytes, it had"),
        (lambda f: flip_byte(f / "tokenizer.json"), "tokenizer.json has other content"),
        (lambda f: (f / "generation_config.json").unlink(), "generation_config.json is gone"),
        (lambda f: (f / "added_tokens.json").write_text("{}"), "added_tokens.json is new"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_changed_under_its_path_is_noticed(own, tmp_path, change, message):
    source, base = own
    change(source)
    with pytest.raises(BadInput, match=rf"base was made before .*own changed \({message}.*rm -r .*base"):
        export(tmp_path, base, path=str(source))


def test_touched_files_are_compared_by_content_once(own, tmp_path, monkeypatch):
    source, base = own
    read = []
    monkeypatch.setattr(
        merge_export,
        "file_hash",
        lambda file, hashed=merge_export.file_hash: (read.append(file.name), hashed(file))[1],
    )
    for file in source.iterdir():
        set_time(file)
    assert export(tmp_path, base, "--dry_run", path=str(source)) == 0
    assert SHARD in read
    before = len(read)
    assert export(tmp_path, base, path=str(source)) == 0
    assert len(read) == 2 * before  # a dry run records nothing
    assert export(tmp_path, base, path=str(source)) == 0
    assert len(read) == 2 * before
    flip_byte(source / SHARD)
    os.utime(source / SHARD, ns=(2, 2))
    with pytest.raises(BadInput, match="has other content"):
        export(tmp_path, base, path=str(source))


def test_a_moved_branch_of_a_hub_model_is_noticed(tmp_path, hub):
    hub(COMMIT, "f" * 40)
    assert export(tmp_path, tmp_path / "out", id="owner/tiny", path=None, revision="main") == 0
    with pytest.raises(BadInput, match=rf"made before owner/tiny changed \(commit {COMMIT}, now ffff"):
        export(tmp_path, tmp_path / "out", id="owner/tiny", path=None, revision="main")


def drop(folder, *keys) -> None:
    """Remove keys of the manifest, and the NF4 copy with its files."""
    manifest = read_json(folder / "manifest.json")
    if "files" in keys:
        shutil.rmtree(folder / "nf4")
        write_manifest(folder, "checkpoint", **{k: v for k, v in manifest.items() if k not in ("kind", *keys)})
    else:
        write_json(folder / "manifest.json", {k: v for k, v in manifest.items() if k not in keys})


@pytest.mark.parametrize("keys", [("files", "created"), ("source",)], ids=["copy", "source"])
def test_a_base_of_an_earlier_version_is_refused_with_the_way_to_remake_it(written, tmp_path, keys):
    drop(written, *keys)
    with pytest.raises(BadInput, match=r"earlier version .* Remove it \(rm -r .*exported\) and run this"):
        export(tmp_path, written)


def test_a_base_made_on_a_cpu_is_refused_where_the_trainer_has_a_gpu(written, tmp_path, monkeypatch):
    monkeypatch.setattr(merge_export, "default_device", lambda: torch.device("cuda", 0))
    with pytest.raises(BadInput, match="NF4 as quantized on a CPU"):
        export(tmp_path, written)


@pytest.mark.parametrize(
    ("model", "server", "place"),
    [
        ({"id": "Qwen/Qwen3-8B", "path": None}, {}, "models/bases/Qwen3-8B"),
        ({"path": "models/tiny-base/"}, {}, "models/bases/tiny-base"),
        ({"path": "/"}, {}, "models/bases"),
        ({"path": "x"}, {"base": "/data/held"}, "/data/held"),
    ],
)
def test_the_base_lies_where_the_configuration_says(model, server, place):
    assert str(base_directory(config_from_dict({**settings(**model), "server": server}))) == place


def test_a_model_given_as_the_current_directory_has_that_directorys_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert str(base_directory(config_from_dict(settings(path=".")))) == "models/bases/mine"


def test_without_out_the_base_is_written_and_found_again_at_its_default_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert export(tmp_path, None) == 0
    place = tmp_path / "models/bases" / shared_model().name
    assert read_manifest(place, "checkpoint", deep=True)["policy"] == "base"
    assert export(tmp_path, None) == 0
    assert f"models/bases/{shared_model().name} exists already" in capsys.readouterr().out
    with pytest.raises(BadInput, match=f"models/bases/{shared_model().name} exists and is not the base"):
        export(tmp_path, None, dtype="bfloat16")
    assert export(tmp_path, None, f"--server.base={tmp_path / 'elsewhere'}", dtype="bfloat16") == 0
    assert (tmp_path / "elsewhere/base.json").is_file()


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(written, tmp_path, capsys):
    out = tmp_path / "new"
    assert export(tmp_path, out, "--dry_run") == 0
    said = capsys.readouterr().out
    assert f"would write {out}" in said and "it does not exist yet" in said
    assert not out.exists()
    stored = sum(file.stat().st_size for file in written.glob("*.safetensors"))
    copied = sum(file.stat().st_size for file in written.glob("nf4/*.safetensors"))
    estimates = [float(number) * 2**20 for number in re.findall(r"([\d.]+) MiB", said)]
    assert estimates == [pytest.approx(stored, abs=0.06 * 2**20), pytest.approx(copied, abs=0.06 * 2**20)]
    assert export(tmp_path, written, "--dry_run") == 0
    assert "exists already" in capsys.readouterr().out


def test_a_dry_run_of_a_hub_model_downloads_no_weights(tmp_path, monkeypatch, hub, capsys):
    hub(COMMIT)
    patterns = []

    def download(*_, allow_patterns, **__):
        patterns.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert export(tmp_path, tmp_path / "out", "--dry_run", id="owner/tiny", path=None) == 0
    assert "0.8 MiB in BF16 and 0.2 MiB of NF4 copy" in capsys.readouterr().out
    assert "*.safetensors" not in patterns
