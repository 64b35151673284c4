"""Runs whose base is unquantized or in FP8, by the recipes' command lines: from the first step to a checked merge."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kit.core.config.recipe import DISTILLATION, PLAIN, QUANTIZED
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from merge.__main__ import main as merge
from tests.conftest import SMALL

QAT_CONFIG = "recipes/configs/grpo-tiny-qat-nvfp4-cpu.yaml"
STEPS = {"train.max_steps": 2, "train.save_steps": 1}


def arguments(config: str, model: Path, output: Path, changes: dict, *flags: str) -> list[str]:
    keys = {"run.output_dir": output, "model.path": model, "data.path": model, **SMALL, **STEPS, **changes}
    return ["--config", config, *(f"--{key}={value}" for key, value in keys.items()), *flags]


@pytest.fixture(scope="module")
def run(recipe, learning_model_dir, made_once) -> Callable[[str, str, str], RunDir]:
    """`run(recipe, configuration, policy.quantization)`: a run of two steps."""

    def start(file: str, config: str, kind: str) -> RunDir:
        def train(folder: Path) -> None:
            words = arguments(config, learning_model_dir, folder, {"policy.quantization": kind})
            done = recipe(words, file)
            assert done.code == 0 and "base unchanged" in done.out, done.out + done.err
            (folder / "stdout.txt").write_text(done.out)

        return RunDir(made_once(f"stored-{Path(file).stem}-{kind}", train))

    return start


def test_qat_on_an_unquantized_base_trains_and_merges_into_what_it_computed_with(run, read_jsonl):
    one = run(QUANTIZED, QAT_CONFIG, "none")
    assert (
        f"none, {read_json(one.config_file)['config']['model']['dtype']} compute\n"
        in (one.path / "stdout.txt").read_text()
    )
    first, second = read_jsonl(one.metrics_file)
    assert first["kl"] == 0.0 < second["kl"] and first["grad_norm"] > 0
    facts = read_json(one.base_file)
    assert facts["quantization"]["type"] == "none" and len(facts["quantized"]) == 14
    assert read_manifest(one.adapter_dir(2))["base_hash"] == facts["hash"]
    assert merge(["--run", str(one.path), "--policy", "grpo"]) == 0
    own = read_json(one.config_file)["config"]["policy"]["quant_cfg"]
    manifest = read_manifest(one.merged / "grpo" / own)
    assert manifest["base_hash"] == facts["hash"] and manifest["trained_for"] == own
    assert manifest["verify"]["mean_kl"] < 1e-4


def test_qlora_on_an_fp8_base_merges_and_resumes_with_that_base_alone(run, recipe, learning_model_dir):
    one = run(PLAIN, "recipes/configs/grpo-tiny-nf4-cpu.yaml", "fp8")
    facts = read_json(one.base_file)
    assert facts["quantization"]["type"] == "fp8" and not facts["offsets"]
    assert load_file(one.adapter_dir(2) / "adapter_model.safetensors")
    assert merge(["--run", str(one.path), "--policy", "grpo", "--format", "bf16", "fp8"]) == 0
    manifest = read_manifest(one.merged / "grpo" / "bf16")
    assert manifest["base_hash"] == facts["hash"] and manifest["verify"]["mean_kl"] < 2e-3
    changes = {"policy.quantization": "nf4", "train.max_steps": 3, "train.lr_scheduler": "constant"}
    config = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
    done = recipe(arguments(config, learning_model_dir, one.path, changes, "--resume"), PLAIN)
    assert done.code == 2 and "policy.quantization was 'fp8', is 'nf4'" in done.err, done.err


@pytest.mark.parametrize("kind", ["fp8", "none"])
def test_a_student_on_a_stored_base_is_taught_by_that_base_unquantized(
    kind, recipe, learning_model_dir, tmp_path, read_jsonl
):
    changes = {
        "policy.quantization": kind,
        "policy.quant_cfg": "nvfp4a16",
        "train.max_steps": 1,
        "distill.teacher": "base",
    }
    changes |= {"policy.target_modules": "[q_proj, down_proj]"}
    config = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
    done = recipe(arguments(config, learning_model_dir, tmp_path / "run", changes), DISTILLATION)
    assert done.code == 0 and "base unchanged" in done.out, done.err
    (row,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["divergence"] > 0 and row["grad_norm"] > 0
