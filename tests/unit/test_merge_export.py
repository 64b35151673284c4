"""`python -m merge base`: what it records, what it reuses, and what it refuses to take for its own."""

import json
import shutil

import pytest
import yaml

from merge.__main__ import main
from recipes.parts.errors import BadInput
from recipes.parts.rundir import read_json, read_manifest, write_json, write_manifest
from tests.unit.test_merge_fixture import make_model, shared_folder, shared_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def export(folder, out, *flags, **model) -> int:
    """The command on a configuration of the tiny model, with `model` over its model group."""
    model = {"id": "tiny", "path": str(shared_model()), "dtype": "float32", **model}
    config = {"run": {"name": "tiny"}, "model": model, "train": {"max_steps": 1}, "data": {"path": "problems.jsonl"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return main(["base", "--config", str(folder / "run.yaml"), "--out", str(out), *flags])


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


def test_a_local_model_is_recorded_by_its_full_path_and_reused(written, tmp_path, monkeypatch, capsys):
    info = read_json(written / "base.json")
    assert (info["model"], info["revision"]) == (str(shared_model().resolve()), None)
    monkeypatch.chdir(shared_model().parent)
    assert export(tmp_path, written, path=shared_model().name) == 0
    assert f"is there already (NF4 hash {info['hash'][:12]})" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spoil", "flags", "model", "message"),
    [
        (lambda f: None, ["--policy.double_quantization=false"], {}, "policy.double_quantization is True"),
        (lambda f: None, [], {"dtype": "bfloat16"}, "model.dtype is 'float32', the configuration says 'bfloat16'"),
        (lambda f: None, [], {"revision": "v2"}, "revision is None, the configuration says 'v2'"),
        (lambda f: edit_base(f, model="/models/other"), [], {}, "model is '/models/other'"),
        (lambda f: write_json(f / "manifest.json", {**read_json(f / "manifest.json"), "policy": "grpo"}), [], {},
         "policy is 'grpo'"),
        (lambda f: write_json(f / "manifest.json", {**read_json(f / "manifest.json"), "format": "fp8"}), [], {},
         "format is 'fp8'"),
        (lambda f: (f / "base.json").unlink(), [], {}, "base.json is missing"),
        (lambda f: None, [], {"path": "models/nowhere"}, "model.path models/nowhere does not exist"),
    ],
)  # fmt: skip
def test_what_lies_at_out_is_reused_only_for_the_same_base(written, tmp_path, spoil, flags, model, message):
    spoil(written)
    with pytest.raises(BadInput, match=message):
        export(tmp_path, written, *flags, **model)


def test_another_model_at_the_same_place_is_not_taken_for_the_first(written, tmp_path):
    other = make_model(tmp_path / "other", seed=3)
    with pytest.raises(BadInput, match="its model is"):
        export(tmp_path, written, path=str(other))


@pytest.mark.parametrize(("revision", "recorded"), [(None, COMMIT), ("v1", "v1")])
def test_of_a_hub_id_the_commit_is_recorded_unless_a_revision_is_asked_for(tmp_path, monkeypatch, revision, recorded):
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained

    def from_hub(path, **options):
        config = read(str(shared_model()) if path == "owner/tiny" else path)
        config._commit_hash = COMMIT
        return config

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(shared_model()))
    arguments = {"id": "owner/tiny", "path": None, "revision": revision}
    assert export(tmp_path, tmp_path / "out", **arguments) == 0
    info = json.loads((tmp_path / "out" / "base.json").read_text())
    assert (info["model"], info["revision"]) == ("owner/tiny", recorded)
    assert read_manifest(tmp_path / "out", "checkpoint", deep=True)["base_hash"] == info["hash"]
    assert export(tmp_path, tmp_path / "out", **arguments) == 0
