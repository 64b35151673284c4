"""The adapter's file for the replicas, as any reader of safetensors finds it, for a small model in memory."""

import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kit.core.errors import CheckFailed, MachineFailed
from kit.rollout.adapter_file import AdapterFile, WrittenAdapter
from tests.unit.test_policy_files import BASE, small_model


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The factors by their names in a file."""
    return {name.replace(".default", ""): one.detach() for name, one in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_every_version_holds_the_factors_as_they_were_when_it_was_written(tmp_path, dtype, is_gathered):
    model, gathered, file = small_model(rank=3), None, None
    for version in (4, 5):
        for number, one in enumerate(model.parameters()):
            if one.requires_grad:
                one.data = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * version + number))
        expected = trained(model)
        if is_gathered:  # the model holds parts
            gathered = {name: 2 * one.detach() for name, one in model.named_parameters() if "lora_" in name}
            expected = {name: 2 * one for name, one in expected.items()}
        if file is None or is_gathered:
            file = AdapterFile(model, dtype, BASE, gathered)
        folder = file.write(tmp_path / f"v{version}", version)
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], one.to(dtype)) for name, one in expected.items())
        manifest = json.loads((folder / "manifest.json").read_text())
        facts = {"version": version, "base_hash": BASE, "rank": 3, "kind": "sync"}
        assert {key: manifest[key] for key in facts} == facts
        assert manifest["targets"] == sorted(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["v4", "v5"]


def test_a_written_version_is_copied_only_to_another_folder(tmp_path):
    model = small_model()
    folder = AdapterFile(model, torch.float32, BASE).write(tmp_path / "a" / "v1", 1)
    expected = load_file(folder / "adapter_model.safetensors")
    for one in model.parameters():
        one.data.zero_()  # the trainer has gone on
    written = WrittenAdapter(folder, BASE)
    assert written.write(folder, 1) == folder and written.base_hash == BASE
    other = written.write(tmp_path / "b" / "v1", 1)
    for place in (folder, other):
        found = load_file(place / "adapter_model.safetensors")
        assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_a_version_written_again_replaces_the_first_and_its_data_is_aligned(tmp_path):
    model = small_model()
    file = AdapterFile(model, torch.float32, BASE)
    (tmp_path / ".partial-v1").mkdir()  # left by a process that was killed
    (tmp_path / ".partial-v1" / "rest").touch()
    for _ in range(2):
        folder = file.write(tmp_path / "v1", 1)
    assert sorted(one.name for one in folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "manifest.json")
    ]
    assert int.from_bytes((folder / "adapter_model.safetensors").read_bytes()[:8], "little") % 8 == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["v1"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, MachineFailed), (errno.EACCES, CheckFailed)])
def test_a_version_that_cannot_be_written_leaves_nothing_and_a_full_disk_is_the_machine_s(
    tmp_path, monkeypatch, number, kind
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("kit.rollout.adapter_file.write_json", fail)
    with pytest.raises(CheckFailed, match=r"version 1 to .* failed: .*--resume") as caught:
        AdapterFile(small_model(), torch.float32, BASE).write(tmp_path / "v1", 1)
    assert type(caught.value) is kind and not list(tmp_path.iterdir())


@pytest.mark.parametrize("peaks", [None, {"model.layers.0.mlp.up_proj": 2.5, "model.layers.0.mlp.down_proj": 0.1}])
@pytest.mark.parametrize("quant_cfg", [None, "nvfp4"])
def test_the_format_and_the_ranges_of_inputs_travel_in_the_file(tmp_path, quant_cfg, peaks):
    model = small_model(rank=2, alpha=5, use_rslora=True)
    folder = AdapterFile(model, torch.float32, BASE, None, quant_cfg, peaks).write(tmp_path / "v1", 1)
    with safe_open(folder / "adapter_model.safetensors", "pt") as content:
        facts = content.metadata()
    assert facts.get("quant_cfg") == quant_cfg
    assert ("input_peaks" in facts) == (quant_cfg is not None)
    assert quant_cfg is None or json.loads(facts["input_peaks"]) == (peaks or {})
    config = json.loads(facts["adapter_config"])
    assert facts["adapter_config"] == (folder / "adapter_config.json").read_text()
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["inference_mode"]) == (2, 5, True, True)


def test_an_adapter_of_more_than_lora_factors_is_refused():
    """A replica would serve it without the rest."""
    with pytest.raises(CheckFailed, match="holds more than LoRA matrices"):
        AdapterFile(small_model(modules_to_save=["lm_head"]), torch.float32, BASE)
