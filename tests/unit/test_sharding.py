"""Settings that conflict with a split base are refused before anything is loaded; what is set before the split.

That FSDP2 and ZeRO-3 train is shown by tests/smoke/test_two_processes.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, DistributedType
from deepspeed.utils import get_z3_leaf_modules

from kit.core.config import sharding_rules
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.config.sharding_rules import FSDP_SETTINGS, announced
from kit.core.errors import BadInput
from kit.policy import sharding
from kit.policy.sharding import loading_whole, prepare
from tests.unit.test_accelerate_configs import announces

ROOT = Path(__file__).parents[2]


def configuration(*overrides: str) -> Config:
    return load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml", ["--model.dtype", "bfloat16", *overrides])


@pytest.fixture
def announce(monkeypatch):
    """Set what `accelerate launch` would announce for a shipped accelerate config, and some of it otherwise."""

    def announce(name: str, **other: str) -> None:
        for key, value in {**announces(ROOT / f"accelerate_configs/{name}.yaml"), **other}.items():
            monkeypatch.setenv(key, value)

    return announce


def refusal(*overrides: str) -> str:
    with pytest.raises(BadInput) as caught:
        check_config(configuration(*overrides), 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "storage"),
    [
        ("fsdp2", "FSDP2", torch.bfloat16),
        ("zero3", "ZeRO-3", torch.uint8),
        ("zero2", None, torch.uint8),
        ("ddp", None, torch.uint8),
    ],
)
def test_what_the_shipped_configs_announce_is_taken(announce, name, kind, storage):
    announce(name)
    check_config(configuration(), 1)
    assert announced() == kind
    assert sharding.quant_storage() == storage


OTHERS = {
    "FSDP_VERSION": "1",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_OFFLOAD_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
}


@pytest.mark.parametrize("variable", FSDP_SETTINGS)
def test_another_fsdp_than_the_tested_one_is_refused_with_the_key_and_its_value(announce, variable):
    announce("fsdp2", **{variable: OTHERS[variable]})
    found = refusal()
    assert len(found.splitlines()) == 1
    assert f"{variable.lower()} is {OTHERS[variable]} in the accelerate config" in found
    assert f"Set {variable.lower()}: {FSDP_SETTINGS[variable][0]}" in found


def test_fsdp_without_settings_is_version_1_and_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = refusal().splitlines()
    assert [line.partition(" in the")[0] for line in found] == [
        "fsdp_version is 1",
        "fsdp_auto_wrap_policy is NO_WRAP",
    ]


@pytest.mark.parametrize("name", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("in_file", [True, False])
def test_zero_3_with_offloading_is_refused(announce, tmp_path, name, in_file, device):
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, name: {"device": device}}}))
    variable = f"ACCELERATE_DEEPSPEED_{name.upper()}_DEVICE"
    announce("zero3", **({"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)} if in_file else {variable: device}))
    assert f"ZeRO-3 with {name} to {device} was not tested" in refusal()


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (("--policy.embeddings", "host"), "policy.embeddings is host under"),
        (("--train.trl", "{cast_lm_head_to_fp32: true}"), "cast_lm_head_to_fp32 under"),
    ],
)
def test_what_a_split_base_was_not_tested_with_is_refused(announce, name, override, complaint):
    assert not any(complaint in fault for fault in sharding_rules.faults(configuration(*override)))
    announce(name)
    assert any(complaint in fault for fault in sharding_rules.faults(configuration(*override)))


def test_a_gathered_adapter_is_whole_and_stays_what_it_was():
    """It is written while the next update runs."""
    model = torch.nn.Module()
    model.add_module("layer", torch.nn.Module())
    for name in ("lora_A", "lora_B", "other"):
        model.layer.add_module(name, torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2, bias=False)}))
    before = {name: one.detach().clone() for name, one in model.named_parameters() if "lora_" in name}
    gathered = sharding.gather_adapter(model)
    for parameter in model.parameters():
        parameter.data.add_(1)
    assert gathered.keys() == before.keys() == {f"layer.lora_{one}.default.weight" for one in "AB"}
    assert all(torch.equal(gathered[name], one) for name, one in before.items())


@pytest.mark.parametrize(
    ("stage", "variable", "kind"), [(3, None, "ZeRO-3"), ("auto", "3", "ZeRO-3"), (2, "3", None), ("auto", None, None)]
)
def test_the_stage_in_a_deepspeed_file_is_the_one_that_counts(monkeypatch, tmp_path, stage, variable, kind):
    # accelerate launch then announces no stage of its own.
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    if variable:
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", variable)
    assert announced() == kind
    check_config(configuration(), 1)


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
def test_an_optimizer_that_needs_whole_tensors_is_refused(announce, name):
    announce("zero2")
    check_config(configuration("--train.optimizer", "paged_adamw_8bit"), 1)
    announce(name)
    assert "train.optimizer is paged_adamw_8bit under" in refusal("--train.optimizer", "paged_adamw_8bit")


def accelerator(kind: str = "NO", **facts: Any) -> SimpleNamespace:
    own = {"parallelism_config": facts.pop("parallelism_config", None)}
    own["mixed_precision"] = facts.pop("mixed_precision", "no")
    state = SimpleNamespace(**{"deepspeed_plugin": None, **facts})
    return SimpleNamespace(state=state, distributed_type=SimpleNamespace(value=kind), **own)


def policy() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2))
    module.get_base_model = lambda: module
    module._no_split_modules, module.enable_input_require_grads = {"Linear"}, lambda: None
    return module


def test_a_base_that_accelerate_would_split_otherwise_is_refused_wherever_it_was_asked_for(announce, tmp_path):
    file = tmp_path / "deepspeed.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    zero3 = DeepSpeedPlugin(hf_ds_config=str(file))
    assert prepare(Accelerator(cpu=True), policy()) is None
    assert prepare(accelerator("DEEPSPEED", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)), policy()) is None
    assert DistributedType.FSDP.value == "FSDP" and DistributedType.MEGATRON_LM.value == "MEGATRON_LM"
    for one, name in (
        (accelerator("DEEPSPEED", deepspeed_plugin=zero3), "ZeRO-3"),
        (accelerator("FSDP"), "FSDP2"),
        (accelerator("MULTI_GPU", fsdp_plugin=object()), "FSDP2"),
        (accelerator("MEGATRON_LM"), "Megatron-LM"),
        *(
            (accelerator("MULTI_GPU", parallelism_config=ParallelismConfig(**{size: 2})), "parallelism_config")
            for size in ("tp_size", "dp_shard_size", "cp_size")
        ),
    ):
        with pytest.raises(BadInput, match=f"{name} splits the base .* not tested"):
            prepare(one, policy())
    announce("fsdp2")
    with pytest.raises(BadInput, match="FSDP2 is asked for and accelerate does not do it here"):
        prepare(Accelerator(cpu=True), policy())
    with pytest.raises(BadInput, match="mixed_precision is fp16 under FSDP2"):
        prepare(accelerator("FSDP", fsdp_plugin=SimpleNamespace(), mixed_precision="fp16"), policy())


def test_fsdp2_casts_neither_the_adapter_nor_its_gradients_and_generates_in_step(announce):
    announce("fsdp2")
    plugin, model = SimpleNamespace(), policy()
    assert prepare(accelerator("FSDP", fsdp_plugin=plugin, mixed_precision="bf16"), model) == "FSDP2"
    dtypes = plugin.mixed_precision_policy.param_dtype, plugin.mixed_precision_policy.reduce_dtype
    assert dtypes == (None, None)
    assert model._is_fsdp_managed_module


def test_zero_3_is_sized_by_the_model_unless_a_file_says_otherwise_and_offloads_nothing(announce, tmp_path):
    announce("zero3")
    file = tmp_path / "deepspeed.json"
    settings: dict[str, Any] = {"stage": 3, "reduce_bucket_size": 1000}
    file.write_text(json.dumps({"zero_optimization": settings}))
    plugin = DeepSpeedPlugin(hf_ds_config=str(file))
    model = policy()
    assert prepare(accelerator("DEEPSPEED", deepspeed_plugin=plugin), model) == "ZeRO-3"
    assert get_z3_leaf_modules(model) == [model[1]], "a decoder layer's weights are gathered at once"
    found = plugin.deepspeed_config["zero_optimization"]
    assert found["reduce_bucket_size"] == 1000 and found["stage3_prefetch_bucket_size"] == 0
    assert plugin.is_auto("zero_optimization.stage3_param_persistence_threshold")
    file.write_text(json.dumps({"zero_optimization": settings | {"offload_param": {"device": "cpu"}}}))
    with pytest.raises(BadInput, match="offload_param to cpu"):
        prepare(accelerator("DEEPSPEED", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(file))), policy())


def test_models_are_built_whole_although_transformers_knows_of_zero_3(announce):
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

    announce("zero3")
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.set_deepspeed_weakref()
    assert is_deepspeed_zero3_enabled()
    with loading_whole(SimpleNamespace(deepspeed_plugin=plugin)):
        assert not is_deepspeed_zero3_enabled()
    assert is_deepspeed_zero3_enabled(), "generation asks for it: every process makes the same number of forwards"
    unset_hf_deepspeed_config()
