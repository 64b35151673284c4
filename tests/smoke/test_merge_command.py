"""`python -m merge` as a user runs it: what it writes, what it refuses, and with which exit code."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, read_manifest, write_json, write_manifest
from kit.core.run_files import read_json
from kit.weights import shards
from merge.__main__ import main
from tests import processes
from tests.unit.merge_fixture import (
    alter_adapter,
    make_model,
    shared_folder,
    shared_model,
    shared_run,
)


def merge(*arguments) -> subprocess.CompletedProcess:
    return processes.run([sys.executable, "-m", "merge", *map(str, arguments)])


def copy_of_run(folder: Path) -> RunDir:
    shutil.copytree(shared_run().path, folder)
    return RunDir(folder)


@pytest.fixture(scope="module")
def merged():
    """(run, the finished command) of the quickstart's merge line."""
    run = copy_of_run(shared_folder() / "merged-run")
    return run, merge("--run", run.path, "--format", "bf16", "fp8", "nf4", "w4a16")


def test_the_whole_command_writes_all_but_nf4_of_the_policy_and_exits_1(merged):
    run, done = merged
    assert done.returncode == 1, done.stderr
    written = {str(p.parent.relative_to(run.merged)) for p in run.merged.rglob("manifest.json")}
    assert written == {f"{p}/{f}" for p in ("base", "grpo") for f in ("bf16", "fp8", "w4a16", "nf4")} - {"grpo/nf4"}
    assert not list(run.merged.rglob(".partial-*"))
    assert not (run.merged / "grpo" / "nf4").exists()
    assert "refused: grpo nf4" in done.stdout
    assert "% of the update" in done.stdout
    table = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(table) == 8
    assert str(run.merged / "grpo" / "w4a16") in table[6]
    assert "%|" not in done.stderr  # no progress bars around the few lines that matter


def test_manifests_say_where_a_checkpoint_comes_from_and_how_near_it_is(merged):
    run, _ = merged
    info = json.loads(run.base_file.read_text())
    for policy in ("base", "grpo"):
        for name in ("bf16", "fp8", "w4a16"):
            manifest = read_manifest(run.merged / policy / name, "checkpoint", deep=True)
            assert (manifest["policy"], manifest["format"], manifest["promoted"]) == (policy, name, False)
            assert manifest["base_hash"] == info["hash"]
            assert manifest["adapter_version"] == (10 if policy == "grpo" else None)
            assert (manifest["adapter_hash"] is None) is (policy == "base")
            assert (manifest["retained_update"] is None) is (policy == "base")
            assert set(manifest["verify"]) == {"mean_kl", "max_abs_dlogp", "top1_agreement", "tokens"}
    kl = {n: read_manifest(run.merged / "grpo" / n)["verify"]["mean_kl"] for n in ("bf16", "fp8", "w4a16")}
    assert kl["bf16"] < kl["fp8"] < kl["w4a16"]


def test_existing_output_is_refused_and_replaced_on_request_with_bf16_reused(merged):
    run, _ = merged
    arguments = ["--run", str(run.path), "--policy", "grpo", "--format", "fp8"]
    with pytest.raises(BadInput, match="exists already"):
        main(arguments)
    before = (run.merged / "grpo" / "bf16" / "manifest.json").stat().st_mtime_ns
    assert main([*arguments, "--overwrite"]) == 0
    assert (run.merged / "grpo" / "bf16" / "manifest.json").stat().st_mtime_ns == before


def test_bf16_of_another_adapter_is_not_quantized_in_silence(merged, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(merged[0].path, run.path)
    newer = alter_adapter(run, run.adapter_dir(20), rename=lambda n: n)
    manifest = read_json(newer / "manifest.json")
    write_json(newer / "manifest.json", {**manifest, "step": 20, "tensor_hash": "another"})
    shutil.rmtree(run.merged / "grpo" / "fp8")
    with pytest.raises(BadInput, match="of another base or adapter"):
        main(["--run", str(run.path), "--policy", "grpo", "--format", "fp8"])
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "fp8", "--overwrite"]) == 0
    assert read_manifest(run.merged / "grpo" / "bf16")["adapter_hash"] == "another"


def test_bf16_whose_content_changed_is_not_quantized_in_silence(merged, tmp_path):
    run = RunDir(shutil.copytree(merged[0].path, tmp_path / "run"))
    file = next((run.merged / "grpo" / "bf16").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # of the same size
    file.write_bytes(content)
    shutil.rmtree(run.merged / "grpo" / "fp8")
    arguments = ["--run", str(run.path), "--policy", "grpo", "--format", "fp8"]
    with pytest.raises(BadInput, match="is not whole or of another base"):
        main(arguments)
    assert main([*arguments, "--overwrite"]) == 0
    assert read_manifest(run.merged / "grpo" / "bf16", "checkpoint", deep=True)
    assert (run.merged / "grpo" / "fp8").is_dir()


def test_the_original_base_has_its_own_place_keeps_the_update_in_nf4_and_is_not_mixed_up(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    arguments = ["--run", str(run.path), "--policy", "grpo", "--into", "original", "--format", "bf16", "nf4"]
    assert main(arguments) == 0
    place = run.path / "merged-original" / "grpo"
    found = {name: read_manifest(place / name, "checkpoint", deep=True) for name in ("bf16", "nf4")}
    assert [made["into"] for made in found.values()] == ["original", "original"]
    assert found["nf4"]["retained_update"] > 0.5
    # Another base than the policy's: further away than a right merge may be, and written all the same.
    assert found["bf16"]["verify"]["mean_kl"] > 2e-3
    assert not run.merged.exists()
    assert f"{found['nf4']['retained_update']:.4f}" in capsys.readouterr().out
    # A checkpoint of the other base is never what the formats are made from.
    shutil.copytree(place, run.merged / "grpo")
    shutil.rmtree(run.merged / "grpo" / "nf4")
    with pytest.raises(BadInput, match="of another base or adapter"):
        main(["--run", str(run.path), "--policy", "grpo", "--format", "fp8"])


def test_a_merge_calls_a_distilled_policy_so_and_keeps_its_place(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    known = json.loads(run.config_file.read_text())
    known["config"]["distill"] = {"teacher": "base"}
    run.config_file.write_text(json.dumps(known))
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "bf16", "--skip_verify"]) == 0
    out = capsys.readouterr().out
    assert f"distilled bf16: {run.merged / 'grpo' / 'bf16'}" in out
    assert [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")] == ["distilled"]


def test_force_writes_nf4_and_exits_0(tmp_path):
    run = copy_of_run(tmp_path / "run")
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "nf4", "--force"]) == 0
    assert read_manifest(run.merged / "grpo" / "nf4")["retained_update"] < 0.15


def test_dry_run_checks_and_writes_nothing(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    assert main(["--run", str(run.path), "--format", "fp8", "--dry_run"]) == 0
    assert "grpo fp8" in capsys.readouterr().out
    assert not run.merged.exists()


def test_a_dry_run_checks_what_needs_no_weights_when_they_are_on_the_hub(tmp_path, monkeypatch, capsys):
    run = copy_of_run(tmp_path / "run")
    config = json.loads(run.config_file.read_text())
    config["config"]["model"] |= {"id": "owner/tiny", "path": None}
    run.config_file.write_text(json.dumps(config))
    info = json.loads(run.base_file.read_text())
    run.base_file.write_text(json.dumps({**info, "model": "owner/tiny"}))
    small = tmp_path / "snapshot"
    shutil.copytree(shared_model(), small, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **options: asked.append(options) or str(small))
    assert main(["--run", str(run.path), "--format", "fp8", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "note: the weights of owner/tiny are not on this machine" in out
    assert f"grpo fp8: {run.merged / 'grpo' / 'fp8'}\n" in out
    assert ["*.safetensors" in options["allow_patterns"] for options in asked] == [False]


def test_nf4_of_an_adapter_that_learned_nothing_is_written_and_called_so(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    idle = alter_adapter(run, tmp_path / "idle")
    file = idle / "adapter_model.safetensors"
    save_file({n: t * 0 if "lora_B" in n else t for n, t in load_file(file).items()}, file)
    manifest = json.loads((idle / "manifest.json").read_text())
    facts = {key: value for key, value in manifest.items() if key not in ("kind", "created", "files")}
    write_manifest(idle, "adapter", **facts)
    arguments = ["--run", str(run.path), "--adapter", str(idle), "--policy", "grpo", "--format", "nf4"]
    assert main(arguments) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(rows) == 2 and all("no update" in row for row in rows)
    assert read_manifest(run.merged / "grpo" / "nf4", "checkpoint", deep=True)["retained_update"] is None


def break_run(run: RunDir, fault: str, tmp_path: Path) -> list[str]:
    """Put one fault into a run; return the arguments that meet it."""
    arguments = ["--run", str(run.path), "--format", "bf16"]
    if fault == "no run":
        return ["--run", str(tmp_path / "nowhere"), "--format", "bf16"]
    if fault == "no adapter":
        shutil.rmtree(run.adapters)
    if fault == "half an adapter":
        (run.adapter_dir(10) / "adapter_model.safetensors").write_bytes(b"half")
    if fault == "adapter path without manifest":
        (tmp_path / "bare").mkdir()
        return [*arguments, "--adapter", str(tmp_path / "bare")]
    if fault == "adapter of another base":
        return [*arguments, "--adapter", str(alter_adapter(run, tmp_path / "stranger", base_hash="0" * 64))]
    if fault == "DoRA":
        return [*arguments, "--adapter", str(alter_adapter(run, tmp_path / "dora", {"use_dora": True}))]
    if fault == "base not there":
        return [*arguments, "--base", str(tmp_path / "nowhere" / "else")]
    if fault == "another bit in the adapter":
        file = run.newest_adapter() / "adapter_model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    if fault == "base of another shape":
        return [*arguments, "--base", str(shared_model(tied=False))]
    if fault == "base already quantized":
        base = tmp_path / "quantized"
        shutil.copytree(shared_model(), base)
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(
            json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
        )
        return [*arguments, "--base", str(base)]
    if fault == "no base.json":
        run.base_file.unlink()
    return arguments


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no run", "no run directory"),
        ("no adapter", "no whole adapter"),
        ("half an adapter", "no whole adapter"),
        ("adapter path without manifest", "not written by this kit"),
        ("adapter of another base", "trained on another base"),
        ("another bit in the adapter", "is damaged: the content of adapter_model.safetensors"),
        ("DoRA", "DoRA"),
        ("base not there", "no checkpoint at"),
        ("base of another shape", "lm_head"),
        ("base already quantized", "quantized already"),
        ("no base.json", r"base\.json does not exist"),
    ],
)
def test_bad_input_is_refused_before_any_weight_is_loaded(tmp_path, monkeypatch, fault, message):
    arguments = break_run(copy_of_run(tmp_path / "run"), fault, tmp_path)

    def no_weights(*_):
        raise AssertionError("a base weight was read")

    monkeypatch.setattr("kit.weights.frozen_base.BaseCheckpoint.read", no_weights)
    with pytest.raises(BadInput, match=message):
        main(arguments)
    assert not (tmp_path / "run" / "merged").exists()


def test_unknown_formats_and_abbreviations_exit_2():
    both = ["--run", "x", "--format", "bf16", "--compare_bases"]
    for arguments in (["--run", "x", "--format", "int3"], ["--run", "x", "--form", "bf16"], both):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def test_bad_input_exits_2_with_one_line_and_no_traceback(tmp_path):
    done = merge("--run", tmp_path / "nowhere", "--format", "bf16")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no run directory")
    assert len(done.stderr.splitlines()) == 1


def test_too_small_a_disk_is_refused_before_and_caught_while_writing(tmp_path, monkeypatch):
    run = copy_of_run(tmp_path / "run")
    usage = shutil.disk_usage(tmp_path)
    arguments = ["--run", str(run.path), "--format", "bf16", "--policy", "grpo"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 19))
        with pytest.raises(BadInput, match=r"has 0 MiB free and the checkpoints need about 1 MiB"):
            main(arguments)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(CheckFailed, match="No space left on device"):
        main(arguments)
    assert list((run.merged / "grpo").iterdir()) == []


def test_wrong_base_weights_of_the_right_shape_exit_1_by_name(tmp_path):
    other = make_model(tmp_path / "model", seed=5)
    run = copy_of_run(tmp_path / "run")
    with pytest.raises(CheckFailed, match=r"is not the base the adapter was trained on .* hashes to"):
        main(["--run", str(run.path), "--format", "bf16", "--base", str(other)])
    assert not list(run.merged.rglob("*.safetensors"))


def test_compare_bases_merges_into_both_says_which_is_closer_and_reuses_them(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    arguments = ["--run", str(run.path), "--compare_bases"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    result = json.loads((run.path / "compare_bases.json").read_text())
    bases = result["bases"]
    assert result["closer"] == "dequantized"
    assert bases["dequantized"]["mean_kl"] < 1e-3 < bases["original"]["mean_kl"]
    assert result["adapter_version"] == 10 and result["base_kl"] > 0
    assert "closer to the trained policy: dequantized (mean KL" in out
    assert len([line for line in out.splitlines() if line.startswith("│")]) == 2
    places = [run.merged / "grpo" / "bf16", run.path / "merged-original" / "grpo" / "bf16"]
    assert [str(place) for place in places] == [found["path"] for found in bases.values()]
    for place, into in zip(places, bases, strict=True):
        manifest = read_manifest(place, "checkpoint", deep=True)
        assert (manifest["into"], manifest["verify"]["mean_kl"]) == (into, bases[into]["mean_kl"])
        assert (place / "README.md").is_file()
    times = [(place / "manifest.json").stat().st_mtime_ns for place in places]
    assert main(arguments) == 0
    assert [(place / "manifest.json").stat().st_mtime_ns for place in places] == times
    again = json.loads((run.path / "compare_bases.json").read_text())["bases"]
    assert {into: found["mean_kl"] for into, found in again.items()} == pytest.approx(
        {into: found["mean_kl"] for into, found in bases.items()}
    )


@pytest.mark.parametrize("extra", [["--policy", "grpo"], ["--out", "x"], ["--skip_verify"], ["--into", "original"]])
def test_compare_bases_takes_no_option_that_it_would_pass_over(tmp_path, extra):
    with pytest.raises(BadInput, match=f"{extra[0]}.* cannot be given with it"):
        main(["--run", str(tmp_path), "--compare_bases", *extra])


def test_a_dry_run_of_compare_bases_writes_nothing(tmp_path, capsys):
    run = copy_of_run(tmp_path / "run")
    assert main(["--run", str(run.path), "--compare_bases", "--dry_run"]) == 0
    assert capsys.readouterr().out.count("to be written") == 2
    assert not run.merged.exists() and not (run.path / "compare_bases.json").exists()
