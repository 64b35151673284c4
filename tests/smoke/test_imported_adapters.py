"""Adapters that TRL's own trainers save become runs, merge exactly, and are what another run starts from."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from merge.__main__ import main
from tests.unit.merge_fixture import read_all
from tests.unit.test_merge_fold import assert_rounded_once

SETTINGS = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
COMMON = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "report_to": "none"}
COMMON |= {"use_cpu": True, "bf16": False, "logging_steps": 1, "save_steps": 2, "gradient_checkpointing": False}


def trained_by_sft(model: Path, folder: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"messages": [{"role": "user", "content": f"{a} + 1 ="}, {"role": "assistant", "content": str(a + 1)}]}
        for a in range(8)
    ]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=SFTConfig(output_dir=str(folder), max_length=64, **COMMON),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(**SETTINGS),
    )
    trainer.train()
    trainer.save_model()


def trained_by_grpo(model: Path, folder: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": f"{a} + 1 ="}]} for a in range(8)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(str(one)) % 7) for one in completions],
        args=GRPOConfig(output_dir=str(folder), num_generations=4, max_completion_length=8, **COMMON),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        peft_config=LoraConfig(**SETTINGS),
    )
    trainer.train()
    trainer.save_model()


@pytest.mark.parametrize("train", [trained_by_sft, trained_by_grpo])
def test_an_adapter_of_trl_merges_exactly_and_a_run_starts_from_it(
    tmp_path, train, learning_model_dir, recipe, recipe_arguments
):
    train(learning_model_dir, tmp_path / "trl")
    (checkpoint,) = (tmp_path / "trl").glob("checkpoint-*")
    for number, adapter in enumerate((tmp_path / "trl", checkpoint)):  # the final one, and one with optimizer state
        out = tmp_path / f"run-{number}"
        options = ["--adapter", str(adapter), "--out", str(out), "--format", "bf16", "--policy", "grpo"]
        assert main(options) == 0
        base = AutoModelForCausalLM.from_pretrained(learning_model_dir, dtype=torch.bfloat16).double()
        expected = PeftModel.from_pretrained(base, adapter).double().merge_and_unload().state_dict()
        for name, found in read_all(out / "merged" / "grpo" / "bf16").items():
            assert_rounded_once(found, expected[name].numpy(), name)
        manifest = read_manifest(out / "merged" / "grpo" / "bf16")
        assert 0.99 < manifest["retained_update"] < 1.01 and manifest["verify"]["mean_kl"] < 2e-3
        assert sorted(file.name for file in RunDir(out).adapter_dir(0).iterdir()) == [
            *("adapter_config.json", "adapter_model.safetensors", "manifest.json")
        ]
    assert read_json(tmp_path / "trl" / "adapter_config.json")["base_model_name_or_path"] == str(learning_model_dir)
    done = recipe(
        recipe_arguments(
            learning_model_dir, tmp_path / "next", {"policy.init_adapter": tmp_path / "trl", "train.max_steps": 1}
        )
    )
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "next" / "metrics.jsonl").read_text().splitlines()]
    started = load_file(RunDir(tmp_path / "next").adapter_dir(0) / "adapter_model.safetensors")
    saved = load_file(tmp_path / "trl" / "adapter_model.safetensors")
    assert len(rows) == 1 and all(torch.equal(tensor, started[name]) for name, tensor in saved.items())
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
