"""From a checkpoint that is stored quantized to a run, by the command lines that a user types."""

import shlex
from pathlib import Path

import pytest
import torch

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.weights.hashing import hash_tensor
from merge.__main__ import main
from tests.conftest import run_here
from tests.unit.merge_fixture import make_model, make_run, read_all
from tests.unit.test_merge_dequantize import LAYOUTS, e4m3, rounded, spread, store_quantized


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> RunDir:
    """A run whose policy is merged into the formats that this kit serves most."""
    folder = tmp_path_factory.mktemp("merged")
    sizes = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    run = make_run(folder / "run", make_model(folder / "model", **sizes))
    formats = ["fp8", "fp8_block", "w4a16"]
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", *formats, "--skip_verify"]) == 0
    return run


def numbers(stored: dict[str, torch.Tensor], module: str, name: str) -> torch.Tensor:
    """What the stored parts of a layer stand for, from their bytes."""
    scale = stored[f"{module}.weight_scale"].double().numpy()
    if name == "w4a16":
        words = stored[f"{module}.weight_packed"]
        codes = torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1).numpy() - 8
        return rounded(codes * spread(scale, codes.shape, 1, 128))
    codes = e4m3(stored[f"{module}.weight"])
    return rounded(codes * spread(scale, codes.shape, *((1, codes.shape[1]) if name == "fp8" else (128, 128))))


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "w4a16"])
def test_what_merge_quantized_comes_back_as_what_its_codes_stand_for(name, merged, tmp_path, capsys):
    source, out = merged.merged / "grpo" / name, tmp_path / "plain"
    assert main(["dequantize", "--model.path", str(source), "--out", str(out)]) == 0
    assert f"7 of 13 tensors quantized ({'pack' if name == 'w4a16' else 'float'}-quantized)" in capsys.readouterr().out
    stored, found, plain = read_all(source), read_all(out), read_all(merged.merged / "grpo" / "bf16")
    assert found.keys() == plain.keys()
    for key, weight in found.items():
        is_stored = key.endswith("_proj.weight")
        assert torch.equal(weight, numbers(stored, key.removesuffix(".weight"), name) if is_stored else plain[key])
        error = ((weight.float() - plain[key].float()).norm() / plain[key].float().norm()).item()
        assert error == 0 if not is_stored else 0.01 < error < (0.2 if name == "w4a16" else 0.05), key
    kept = read_manifest(out, "checkpoint")["quantization_config"]
    assert kept == read_json(source / "config.json")["quantization_config"]


def test_a_recipe_names_the_command_whose_output_trains_and_merges(
    tmp_path, monkeypatch, recipe, recipe_arguments, tiny_model_dir
):
    quantized = tmp_path / "Tiny-FP8"
    store_quantized(tiny_model_dir, quantized, *LAYOUTS["fp8 in blocks"])
    steps = {"train.max_steps": 1, "train.save_steps": 1, "data.path": tiny_model_dir}
    refused = recipe(recipe_arguments(quantized, tmp_path / "run", steps))
    assert refused.code == 2 and not (tmp_path / "run").exists()
    command = shlex.split(refused.err.partition("what this writes: ")[2])
    assert command[:4] == ["python", "-m", "merge", "dequantize"] and command[-1] == "models/Tiny-FP8-bf16"
    monkeypatch.chdir(tmp_path)
    done = run_here(*command[2:])
    assert done.code == 0 and "wrote models/Tiny-FP8-bf16. Use it as any other base" in done.out, done
    plain = Path("models/Tiny-FP8-bf16").resolve()
    dry = recipe(recipe_arguments(plain, tmp_path / "run", steps, ("--dry_run",)))
    assert dry.code == 0, dry.err
    trained = recipe(recipe_arguments(plain, tmp_path / "run", steps))
    assert trained.code == 0 and "base unchanged" in trained.out, trained.err
    assert main(["--run", "run", "--policy", "grpo", "--format", "bf16"]) == 0
    assert read_manifest(tmp_path / "run" / "merged" / "grpo" / "bf16")["verify"]["mean_kl"] < 2e-3
    # The run's base is what the codes stand for: unquantized, its hash is that of these weights.
    again = {**steps, "policy.quantization": "none", "model.dtype": "bfloat16"}
    whole = recipe(recipe_arguments(plain, tmp_path / "whole", again))
    assert whole.code == 0, whole.err
    info = read_json(tmp_path / "whole" / "base.json")
    assert info["tensors"] == {key: hash_tensor(one) for key, one in read_all(plain).items() if key in info["tensors"]}
