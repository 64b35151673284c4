"""`python -m merge diagnose` as a user runs it on a tiny run: what it writes, what it reuses, what it refuses."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from kit.weights.frozen_base import BaseCheckpoint
from merge.__main__ import main
from merge.merge import read_adapter
from tests.conftest import run_here
from tests.smoke.test_merge_command import copy_of_run, merge
from tests.unit.merge_fixture import LINEARS, alter_adapter, shared_folder, shared_run

LAYER_KEYS = {"name", "shape", "update_norm", "relative_update", "kurtosis", "outlier_fraction", "formats"}


def refuse_nan(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def read(file) -> dict:
    return json.loads(file.read_text(), parse_constant=refuse_nan)


@pytest.fixture(scope="module")
def diagnosed():
    """(run with merged checkpoints, the finished command)."""
    run = copy_of_run(shared_folder() / "diagnosed-run")
    assert main(["--run", str(run.path), "--format", "bf16", "fp8", "w4a16"]) == 0
    formats = ("bf16", "fp8", "w4a16", "nf4")
    return run, run_here("merge", "diagnose", "--run", run.path, "--tokens", "--formats", *formats)


def test_the_command_writes_json_markdown_and_picture_and_prints_table_and_verdict(diagnosed):
    run, done = diagnosed
    assert done.code == 0, done.err
    result = read(run.path / "diagnostics.json")
    info = read(run.base_file)
    assert (result["base_hash"], result["adapter_version"], result["into"]) == (info["hash"], 10, "dequantized")
    assert result["command"][:4] == ["python", "-m", "merge", "diagnose"]
    assert {layer["name"] for layer in result["layers"]} == set(info["quantized"])
    assert all(LAYER_KEYS <= set(layer) for layer in result["layers"])
    assert list(result["summary"]) == ["bf16", "fp8", "w4a16", "nf4"] == list(result["layers"][0]["formats"])
    assert list(result["by_module"]) == [name.removesuffix("_proj") for name in LINEARS]
    assert list(result["by_depth"]) == ["0", "1"]
    assert (run.path / "diagnostics.png").read_bytes()[:4] == b"\x89PNG"
    text = (run.path / "diagnostics.md").read_text()
    assert all(line in text and f"- {line}" in done.out for line in result["verdict"])
    assert len([line for line in done.out.splitlines() if line.startswith("│")]) == 4
    assert not list(run.path.glob(".*partial*"))


def test_the_figures_agree_with_those_that_the_merge_wrote_of_its_files(diagnosed):
    run, _ = diagnosed
    result = read(run.path / "diagnostics.json")
    for name in ("bf16", "fp8", "w4a16"):
        manifest = read_manifest(run.merged / "grpo" / name, "checkpoint")
        assert result["summary"][name]["retained"] == pytest.approx(manifest["retained_update"], rel=2e-3)
        verify = manifest["verify"]
        assert result["tokens"][name] == {"kl": verify["mean_kl"], "top1": verify["top1_agreement"]}
    updates = read_adapter(run.newest_adapter(), BaseCheckpoint(run.config()["model"]["path"], read(run.base_file)))
    for layer in result["layers"]:
        exact = torch.linalg.norm(updates[f"{layer['name']}.weight"].delta().double()).item()
        assert layer["update_norm"] == pytest.approx(exact, rel=1e-5)
    error = [layer["formats"]["w4a16"]["error"]["grpo"] * layer["weight_norm"]["grpo"] for layer in result["layers"]]
    size = [layer["weight_norm"]["grpo"] for layer in result["layers"]]
    assert result["summary"]["w4a16"]["error"]["grpo"] == pytest.approx(math.hypot(*error) / math.hypot(*size))
    # Gaussian weights: E4M3 rounds them by 2.65 %, INT4 in groups of 128 by about 11 %, NF4 sits on its own grid.
    found = {name: figures["error"]["grpo"] for name, figures in result["summary"].items()}
    assert found["bf16"] < 0.003 < found["fp8"] < 0.03 < found["w4a16"] < 0.15
    assert result["summary"]["nf4"]["error"]["base"] < 0.01
    assert result["summary"]["nf4"]["retained"] < 0.15


def test_only_the_layers_asked_for_on_the_original_base_elsewhere(diagnosed, tmp_path, capsys):
    run, _ = diagnosed
    before = (run.path / "diagnostics.json").stat().st_mtime_ns
    arguments = ["--run", str(run.path), "--into", "original", "--layers", r"layers\.1\..*q_proj", "--out", tmp_path]
    assert main(["diagnose", *map(str, arguments), "--formats", "nf4", "--skip_control"]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {f"diagnostics-original.{e}" for e in ("json", "md", "png")}
    assert (run.path / "diagnostics.json").stat().st_mtime_ns == before
    result = read(tmp_path / "diagnostics-original.json")
    assert [layer["name"] for layer in result["layers"]] == ["model.layers.1.self_attn.q_proj"]
    assert "tokens" not in result
    # Between NF4 values rounding keeps the update in expectation; on the grid it would keep 1.5 %.
    assert result["summary"]["nf4"]["error"]["base"] == pytest.approx(0.092, abs=0.01)
    assert result["summary"]["nf4"]["retained"] > 0.6
    assert result["layers"][0]["formats"]["nf4"]["control_error"] is None


def test_by_default_every_format_is_measured_and_those_that_need_a_checkpoint_are_named(diagnosed, tmp_path, capsys):
    from kit.core.formats import FORMATS

    run, _ = diagnosed
    assert main(["diagnose", "--run", str(run.path), "--out", str(tmp_path), "--layers", "q_proj"]) == 0
    result = read(tmp_path / "diagnostics.json")
    assert set(result["summary"]) <= set(FORMATS) and {"bf16", "fp8", "w4a16", "nf4"} <= set(result["summary"])
    (note,) = [note for note in result["notes"] if "awq" in note]
    assert f"--run {run.path} --format awq" in note and f"note: {note}\n" in capsys.readouterr().out


def test_an_adapter_of_zero_is_told_and_leaves_null(diagnosed, tmp_path, capsys):
    run, _ = diagnosed
    idle = alter_adapter(run, tmp_path / "idle")
    file = idle / "adapter_model.safetensors"
    save_file({n: t * 0 if "lora_B" in n else t for n, t in load_file(file).items()}, file)
    kept = ("version", "step", "base_hash")
    facts = {key: value for key, value in read(idle / "manifest.json").items() if key in kept}
    write_manifest(idle, "adapter", **facts)
    arguments = ["--run", str(run.path), "--adapter", str(idle), "--out", str(tmp_path / "out"), "--formats", "fp8"]
    assert main(["diagnose", *arguments, "--tokens"]) == 0
    result = read(tmp_path / "out" / "diagnostics.json")
    nothing = "The adapter changes none of the 14 layers, so there is nothing to say about training."
    assert result["verdict"] == [nothing]
    assert result["summary"]["fp8"]["snr"] is result["summary"]["fp8"]["retained"] is None
    assert result["tokens"] == {}  # the merged checkpoints are of the other adapter


def test_a_checkpoint_merged_without_verification_is_compared_now(tmp_path):
    run = copy_of_run(tmp_path / "run")
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "fp8", "--skip_verify"]) == 0
    assert main(["diagnose", "--run", str(run.path), "--formats", "fp8", "--layers", "q_proj", "--tokens"]) == 0
    tokens = read(run.path / "diagnostics.json")["tokens"]
    assert set(tokens) == {"bf16", "fp8"}
    assert 0 <= tokens["bf16"]["kl"] < tokens["fp8"]["kl"]
    assert tokens["fp8"]["top1"] <= tokens["bf16"]["top1"] <= 1


def test_stored_weights_of_a_merged_checkpoint_give_the_figures_of_the_computed_format(
    diagnosed, monkeypatch, tmp_path
):
    run, _ = diagnosed
    computed = read(run.path / "diagnostics.json")["summary"]
    monkeypatch.setattr("merge.quantize.STORED", {})
    assert main(["diagnose", "--run", str(run.path), "--formats", "w4a16", "fp8", "--out", str(tmp_path)]) == 0
    stored = read(tmp_path / "diagnostics.json")["summary"]
    for name in ("w4a16", "fp8"):
        for key in ("snr", "retained"):
            assert stored[name][key] == pytest.approx(computed[name][key], rel=1e-5)
        assert stored[name]["error"] == pytest.approx(computed[name]["error"], rel=1e-5)
        assert stored[name]["control_error"] is None


def test_a_run_that_is_none_is_exit_2_and_a_stranger_s_checkpoint_is_not_read(diagnosed, tmp_path, monkeypatch):
    done = merge("diagnose", "--run", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: no run directory" in done.stderr
    run = RunDir(tmp_path / "run")
    shutil.copytree(diagnosed[0].path, run.path)
    manifest = run.merged / "grpo" / "w4a16" / "manifest.json"
    write_json(manifest, {**read_json(manifest), "adapter_hash": "another"})
    monkeypatch.setattr("merge.quantize.STORED", {})
    with pytest.raises(BadInput, match=r"of another base or adapter.*--overwrite"):
        main(["diagnose", "--run", str(run.path), "--formats", "w4a16"])


def test_the_run_of_the_tests_is_left_as_it_was():
    assert not list(shared_run().path.glob("diagnostics*"))
