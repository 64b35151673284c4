"""A run that starts from an adapter of another program: checked before weights load, recorded, the same on resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest
from kit.policy import load as policy
from kit.weights.frozen_base import load_frozen, unquantized_config
from tests.conftest import CONFIG
from tests.unit.wrapped_models import load_whole, make_wrapped

WEIGHTS = "adapter_model.safetensors"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, learning_model_dir) -> Path:
    """Read-only: an adapter of rank 4 and alpha 8 on all linear layers, as peft saves it."""
    model = AutoModelForCausalLM.from_pretrained(learning_model_dir)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=MODULES, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, settings)
    torch.manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, 0.0, 0.01)
    wrapped.save_pretrained(folder := tmp_path_factory.mktemp("theirs") / "adapter")
    return folder


def altered(source: Path, folder: Path, change=None, **config) -> Path:
    shutil.copytree(source, folder)
    facts = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(facts | config))
    if change:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    return folder


@pytest.fixture
def check(learning_model_dir):
    """`check(adapter, **keys)`: the checks of a run that starts from `adapter`; reads no weights."""

    def run(adapter: Path, **keys) -> str:
        given = {"model.path": learning_model_dir, "policy.init_adapter": adapter}
        given |= {"policy.lora_rank": 4, "policy.lora_alpha": 8, **keys}
        config = load_config(CONFIG, [f"--{key}={value}" for key, value in given.items()])
        policy.check_init_adapter(config)
        policy.check_init_layers(config, unquantized_config(config.model.source))
        return policy.describe_start(config)

    return run


def without(part: str):
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


def wider(part: str):
    return lambda tensors: {name: torch.zeros(4, 999) if part in name else one for name, one in tensors.items()}


def with_head(tensors: dict) -> dict:
    return tensors | {"base_model.model.lm_head.weight": torch.zeros(3, 3)}


@pytest.mark.parametrize(
    ("change", "config", "keys", "message"),
    [
        (None, {"r": 8}, {}, "policy.lora_rank is 4, .* has 8"),
        (None, {}, {"policy.lora_alpha": 4}, "policy.lora_alpha is 4, .* has 8"),
        (None, {"use_rslora": True}, {}, "policy.use_rslora is False, .* has True"),
        (None, {}, {"policy.target_modules": "[q_proj]"}, r"adapts 14 layers \(down_proj, .*policy.target_modules 2 "),
        (without("layers.1.mlp"), {}, {}, "adapts 11 layers .*only the run has .*layers.1.mlp"),
        (wider("layers.0.self_attn.q_proj.lora_A"), {}, {}, r"lora_A\.weight as \(4, 999\), .* needs \(4, 64\)"),
        (None, {"alpha_pattern": {"o_proj": 2}}, {}, r"o_proj by 0\.5, the run by 2: .*alpha_pattern"),
        (None, {"use_dora": True}, {}, "use_dora: DoRA rescales"),
        (None, {"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        (with_head, {}, {}, "only the adapter has .*lm_head"),
    ],
)  # fmt: skip
def test_an_adapter_of_another_shape_scale_or_kind_is_refused_by_name(
    tmp_path, theirs, check, change, config, keys, message
):
    adapter = altered(theirs, tmp_path / "adapter", change, **config)
    with pytest.raises(BadInput, match=message):
        check(adapter, **keys)


def test_what_fits_is_accepted_and_the_base_that_it_names_is_said(tmp_path, theirs, check, learning_model_dir):
    assert "no hash proves" in check(theirs)
    same = altered(theirs, tmp_path / "patterns", rank_pattern={"q_proj": 4}, alpha_pattern={"mlp.up_proj": 8})
    assert "no hash proves" in check(same)
    copy = altered(theirs, tmp_path / "copy", base_model_name_or_path=f"x/{learning_model_dir.name}-unsloth-bnb-4bit")
    assert "WARNING" not in check(copy)
    other = altered(theirs, tmp_path / "other", base_model_name_or_path="Qwen/Qwen3-8B")
    assert "WARNING" in (said := check(other)) and "names Qwen/Qwen3-8B as its base, this run trains on" in said
    none = altered(theirs, tmp_path / "none", base_model_name_or_path=None)
    assert "WARNING" in (said := check(none)) and "names no base" in said


def test_an_adapter_of_a_whole_vision_language_model_starts_a_run_on_its_language_model(tmp_path, check):
    model = make_wrapped(tmp_path / "model", "qwen2_5_vl")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*(q_proj|v_proj)")
    get_peft_model(load_whole(model), settings).save_pretrained(tmp_path / "adapter")
    keys = {"model.path": model, "policy.target_modules": "[q_proj,v_proj]"}
    assert "no hash proves" in check(tmp_path / "adapter", **keys)
    config = load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])
    config.policy.lora_rank, config.policy.lora_alpha = 4, 8
    base = load_frozen(model, "none", "float32", device="cpu")
    student = get_peft_model(base, policy.lora_config(config.policy, base))
    policy.load_adapter_weights(student, tmp_path / "adapter")
    held = {name.replace(".default", ""): one for name, one in student.named_parameters() if "lora_" in name}
    saved = load_file(tmp_path / "adapter" / WEIGHTS)
    assert len(saved) == len(held) == 16
    for name, tensor in saved.items():
        assert torch.equal(held[name.replace("model.language_model.", "model.")], tensor)
    with pytest.raises(BadInput, match="only the run has"):
        check(tmp_path / "adapter", **keys | {"policy.target_modules": "[q_proj,v_proj,up_proj]"})


def test_a_run_starts_from_it_and_records_it_as_version_0_and_a_resume_needs_the_same(
    tmp_path, theirs, recipe, build_trainer, recipe_arguments, learning_model_dir
):
    adapter = altered(theirs, tmp_path / "adapter")
    changes = {"policy.init_adapter": adapter, "train.max_steps": 2}
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", changes))
    assert done.code == 0 and "no hash proves" in done.out, done.err
    run, saved = RunDir(tmp_path / "run"), load_file(adapter / WEIGHTS)
    manifest = read_manifest(run.adapter_dir(0), "adapter", deep=True)
    assert manifest["base_hash"] == run.base()["hash"] and manifest["imported_from"]["path"] == str(adapter)
    started = load_file(run.adapter_dir(0) / WEIGHTS)
    trained = load_file(run.newest_adapter() / WEIGHTS)
    assert run.newest_adapter() == run.adapter_dir(2) and started.keys() == saved.keys() == trained.keys()
    assert all(torch.equal(tensor, started[name]) for name, tensor in saved.items())
    moved = max((trained[name] - tensor).abs().max().item() for name, tensor in saved.items())
    assert 0 < moved < 0.01  # two steps away from it, not from zero
    changes["train.max_steps"] = 3
    built = build_trainer(recipe_arguments(learning_model_dir, run.path, changes, ("--resume",)))
    assert built is not None
    first, tensor = next(iter(saved.items()))
    save_file(saved | {first: tensor + 1}, adapter / WEIGHTS)
    done = recipe(recipe_arguments(learning_model_dir, run.path, changes, ("--resume",)))
    assert done.code == 2 and "was started from other weights than" in done.err and "v000000" in done.err, done.err
