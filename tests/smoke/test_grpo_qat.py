"""The quantization-aware recipe by its command line: what a run leaves behind, a resume, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kit.core.config.load import load_config
from kit.core.config.recipe import PLAIN
from kit.core.config.recipe import QUANTIZED as RECIPE
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.plan.placement import Placement
from launch.starting.trainer_command import choose_launcher, trainer_command
from tests.conftest import SMALL

CONFIG = "recipes/configs/grpo-tiny-qat-nvfp4-cpu.yaml"
W4A4 = {"policy.quant_cfg": "nvfp4", "policy.quant_calib_size": 8, "train.save_steps": 1}


def arguments(model: Path, output: Path, changes: dict | None = None, flags: tuple[str, ...] = ()) -> list[str]:
    keys = {"run.output_dir": output, "model.path": model, "data.path": model, **SMALL, **(changes or {})}
    return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items()), *flags]


@pytest.fixture(scope="session")
def recipe(recipe):
    """`recipe(words, file)`: the command line in this process: exit code and all output."""

    def run(words: list[str], file: str = RECIPE) -> tuple[int, str]:
        done = recipe(words, file)
        return done.code, done.out + done.err

    return run


@pytest.fixture(scope="module")
def run(made_once, learning_model_dir, recipe) -> RunDir:
    """Two steps of W4A4 with a checkpoint after each."""

    def train(folder: Path) -> None:
        code, said = recipe(arguments(learning_model_dir, folder, W4A4 | {"train.max_steps": 2}))
        assert code == 0, said
        (folder / "stdout.txt").write_text(said)

    return RunDir(made_once("tiny-qat-run", train))


def test_two_steps_start_at_the_quantized_reference_and_learn(run, read_jsonl):
    first, second = read_jsonl(run.metrics_file)
    assert first["kl"] == 0.0 < second["kl"]
    assert first["grad_norm"] > 0 and first["completion_tokens"] > 0
    assert 0 <= first["quant_clip_fraction"] < 0.05 and 0 < first["quant_peak_ratio"] < 10
    said = (run.path / "stdout.txt").read_text()
    assert "format    nvfp4: weights nvfp4, a scale per 1 x 16; inputs nvfp4, a scale per block" in said
    assert "calibrated 14 layers over 8 prompts" in said and "base unchanged" in said
    assert read_json(run.config_file)["config"]["policy"]["quant_cfg"] == "nvfp4"


def test_adapters_and_checkpoints_carry_one_state(run):
    places = [run.adapter_dir(1), run.adapter_dir(2), run.checkpoints / "step-000001", run.checkpoints / "step-000002"]
    states = [load_file(place / "quantizer.safetensors") for place in places]
    assert len(states[0]) == 14 and "model.layers.0.self_attn.q_proj.input_amax" in states[0]
    for place, state in zip(places, states, strict=True):
        manifest = read_manifest(place, deep=True)
        assert manifest["quant_cfg"] == "nvfp4" and "quantizer.safetensors" in manifest["files"]
        assert manifest["quantizer_hash"] == read_manifest(places[0])["quantizer_hash"]
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    queries = [states[0][f"model.layers.0.self_attn.{name}_proj.input_amax"] for name in "qkv"]
    assert queries[0] == queries[1] == queries[2] > 0


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    run, recipe, learning_model_dir, tmp_path, monkeypatch
):
    parts = shutil.copytree(run.path, tmp_path / "parts")
    damaged = parts / "checkpoints" / "step-000002" / "quantizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(parts / "adapters" / "v000002")
    words = arguments(learning_model_dir, parts, W4A4 | {"train.max_steps": 2}, ("--resume",))
    monkeypatch.setattr("kit.data.calibration_prompts.calibration_prompts", None)  # the prompts may be gone
    code, said = recipe(words)
    assert code == 0 and "step-000001 (step 1)" in said and "calibrated" not in said, said
    assert "skipped: " in said and "is damaged: the content of quantizer.safetensors" in said
    state = (parts / "checkpoints" / "step-000001" / "quantizer.safetensors").read_bytes()
    assert (parts / "adapters" / "v000002" / "quantizer.safetensors").read_bytes() == state
    files = [place / "adapters" / "v000002" / "adapter_model.safetensors" for place in (parts, run.path)]
    resumed, uninterrupted = map(load_file, files)
    assert all(torch.equal(value, uninterrupted[name]) for name, value in resumed.items())


def test_a_packed_step_has_the_gradient_of_the_padded_one(recipe, learning_model_dir, tmp_path, read_jsonl):
    found = {}
    for name, keys in {"padded": {}, "packed": {"train.micro_batch_tokens": 200, "train.recompute": "full"}}.items():
        words = arguments(learning_model_dir, tmp_path / name, {"train.max_steps": 1} | keys)
        code, said = recipe(words)
        assert code == 0, said
        (found[name],) = read_jsonl(tmp_path / name / "metrics.jsonl")
    assert found["packed"]["completion_tokens"] == found["padded"]["completion_tokens"]
    assert found["packed"]["grad_norm"] == pytest.approx(found["padded"]["grad_norm"], rel=1e-4)
    assert found["packed"]["kl"] < 1e-8
    assert found["padded"]["quant_clip_fraction"] is None  # no calibrated range


def test_an_optimizer_that_leaves_no_trace_in_the_tensors_trains_the_same(
    recipe, learning_model_dir, tmp_path, read_jsonl, monkeypatch
):
    """As DeepSpeed and 8-bit optimizers do: no tensor's version tells of an update, and peaks are found again."""
    update, updates = torch.optim.AdamW.step, []

    def unseen(self, *args, **kwargs):
        tensors = [one for group in self.param_groups for one in group["params"]]
        versions = [one._version for one in tensors]
        answer = update(self, *args, **kwargs)
        updates.append(sum(one._version > version for one, version in zip(tensors, versions, strict=True)))
        torch._C._autograd._unsafe_set_version_counter(tensors, versions)
        return answer

    found = []
    for name in ("seen", "unseen"):
        if name == "unseen":
            monkeypatch.setattr(torch.optim.AdamW, "step", unseen)
        keys = {"policy.quant_cfg": "fp8", "train.max_steps": 3, "train.learning_rate": 1e-2}
        code, said = recipe(arguments(learning_model_dir, tmp_path / name, keys))
        assert code == 0, said
        assert sum(row["grad_norm"] > 0 for row in read_jsonl(tmp_path / name / "metrics.jsonl")) > 1, "nothing to see"
        found.append(load_file(tmp_path / name / "adapters" / "v000003" / "adapter_model.safetensors"))
    assert len(updates) == 3 and all(updates)
    seen, other = found
    assert all(torch.equal(value, other[name]) for name, value in seen.items())


def test_a_resume_and_an_adapter_of_another_format_are_refused(run, recipe, learning_model_dir, tmp_path):
    other = W4A4 | {"policy.quant_cfg": "fp8_static"}
    code, said = recipe(arguments(learning_model_dir, run.path, other | {"train.max_steps": 2}, ("--resume",)))
    assert code == 2 and "was trained for nvfp4, policy.quant_cfg is fp8_static now" in said
    start = {"policy.init_adapter": run.adapter_dir(2)}
    code, said = recipe(arguments(learning_model_dir, tmp_path / "new", other | start))
    assert code == 2 and "was trained for nvfp4, policy.quant_cfg says fp8_static" in said
    plain = [
        "--config",
        "recipes/configs/grpo-tiny-nf4-cpu.yaml",
        *arguments(learning_model_dir, tmp_path / "p", start)[2:],
    ]
    code, said = recipe(plain, PLAIN)
    assert code == 2 and "was trained for nvfp4, policy.quant_cfg says nothing" in said


def test_a_format_whose_yaml_changed_is_refused_on_resume(recipe, learning_model_dir, run, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "format.yaml"
    weight = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
    inputs = {"enable": False}  # which the run was started without: W4A4 then, W4A16 now
    file.write_text(yaml.safe_dump({"quant_cfg": {"*weight_quantizer": weight, "*input_quantizer": inputs}}))
    manifest = {"config": read_json(run.config_file)["config"], "processes": 1}
    folder.mkdir()
    manifest["config"]["policy"]["quant_cfg"] = str(file)
    manifest["config"]["run"]["output_dir"] = str(folder)
    (folder / "config.json").write_text(json.dumps(manifest))
    (folder / "base.json").write_bytes(run.base_file.read_bytes())
    (folder / "checkpoints").symlink_to(run.checkpoints)
    words = W4A4 | {"policy.quant_cfg": file, "train.max_steps": 2}
    code, said = recipe(arguments(learning_model_dir, folder, words, ("--resume",)))
    assert code == 2 and f"was trained for nvfp4, policy.quant_cfg {file} is nvfp4a16 now" in said


def test_an_adapter_of_the_same_format_brings_its_ranges(run, recipe, learning_model_dir, tmp_path):
    keys = W4A4 | {"train.max_steps": 1, "policy.init_adapter": run.adapter_dir(2)}
    code, said = recipe(arguments(learning_model_dir, tmp_path / "run", keys))
    assert code == 0 and "input ranges of" in said, said
    states = [place / "quantizer.safetensors" for place in (run.adapter_dir(2), tmp_path / "run/adapters/v000001")]
    assert states[0].read_bytes() == states[1].read_bytes()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"policy.quant_cfg": "nvfp4a15"}, "Did you mean nvfp4a16?"),
        ({"policy.quant_cfg": "formats/none.yaml"}, "formats/none.yaml"),
        ({"policy.compute": "fused"}, "policy.compute is fused with policy.quant_cfg nvfp4a16"),
        ({"policy.lora_dropout": 0.1}, "policy.lora_dropout (0.1) with policy.quant_cfg nvfp4a16"),
        ({"server.quant_cfg": "fp8"}, "server.quant_cfg"),
        ({"rollout.backend": "server", "rollout.sync": "adapter"}, "rollout.sync"),
        ({"policy.quant_cfg": "nvfp4", "policy.quant_calib_size": 201}, "policy.quant_calib_size is 201"),
        ({"policy.quant_cfg": "nvfp4", "policy.quant_calib_size": 0}, "policy.quant_calib_size (0)"),
        ({"policy.quant_cfg": "nvfp4", "policy.quant_calib_data": "/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"policy.quant_cfg": "nvfp4", "policy.quant_calib_data": "EMPTY"}, "policy.quant_calib_size"),
        ({"policy.quant_cfg": "fp8_block"}, "fp8_block needs whole blocks of 128 x 128"),
        ({"distill.teacher": "base"}, "Start it with recipes/distill_qat.py"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(
    recipe, tiny_model_dir, tmp_path, changes, complaint, monkeypatch
):
    def load(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("kit.policy.load.load_frozen", load)
    (tmp_path / "empty.jsonl").touch()
    changes = {key: tmp_path / "empty.jsonl" if value == "EMPTY" else value for key, value in changes.items()}
    code, said = recipe(arguments(tiny_model_dir, tmp_path / "run", {"policy.quant_calib_size": 8} | changes))
    assert code == 2 and complaint in said, said
    assert not (tmp_path / "run").exists()


def test_each_recipe_names_the_one_that_trains_the_configuration(recipe, tiny_model_dir, tmp_path):
    words = arguments(tiny_model_dir, tmp_path / "run")
    code, said = recipe(words, PLAIN)
    assert (
        code == 2 and "policy.quant_cfg is nvfp4a16: recipes/grpo_qlora.py does not train this. Start it with" in said
    )
    code, said = recipe([*words, "--policy.quant_cfg", "null"])
    assert code == 2 and "Start it with recipes/grpo_qlora.py, or set policy.quant_cfg" in said


def test_launch_up_starts_the_recipe_that_the_configuration_needs():
    for path, recipe in ((CONFIG, RECIPE), ("recipes/configs/grpo-tiny-nf4-cpu.yaml", "recipes/grpo_qlora.py")):
        command = trainer_command(load_config(path), path, [], choose_launcher(0), Placement(is_machine_without=True))
        assert recipe in command.words
