"""Vision-language checkpoints through the command lines: two steps of GRPO on text, merged whole."""

import sys

import pytest
import torch

from kit.core.config.recipe import QUANTIZED
from kit.core.run_directory import RunDir
from kit.core.run_files import read_json
from tests import processes
from tests.unit.merge_fixture import read_all
from tests.unit.wrapped_models import FAMILIES, load_whole, make_wrapped

IDS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))


def letters(completions):
    """Something that random weights differ in."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(one.isalpha() for one in text) / (1 + len(text)) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_train_the_language_model_and_merge_writes_the_whole_checkpoint(
    family, tmp_path, recipe, recipe_arguments, tiny_model_dir, read_jsonl
):
    model = make_wrapped(tmp_path / "model", family)
    changes = {"data.path": tiny_model_dir, "train.max_steps": 2, "policy.target_modules": "all-linear"}
    changes |= {
        "reward.options": "{}",
        "reward.functions": "['tests.smoke.test_wrapped:letters']",
        "rollout.max_prompt_length": 96,
    }
    done = recipe(recipe_arguments(model, tmp_path / "run", changes))
    assert done.code == 0, done.err
    run = RunDir.open(tmp_path / "run")
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["kl"] == 0.0
    assert all(row["grad_norm"] > 0 for row in rows)
    assert run.base()["carried"], "the vision part is not in base.json"

    command = [sys.executable, "-m", "merge", "--run", str(run.path), "--format", "bf16", "fp8", "--policy", "grpo"]
    finished = processes.run(command)
    assert finished.returncode == 0, finished.stderr
    before = read_all(model)
    for name in ("bf16", "fp8"):
        merged = run.merged / "grpo" / name
        after = read_all(merged)
        assert all(torch.equal(before[one], after[one]) for one in run.base()["carried"])
        verified = read_json(merged / "manifest.json")
        assert verified["verify"]["mean_kl"] < 0.1 and verified["retained_update"] > 0.5
    with torch.no_grad():
        logits = [load_whole(one, dtype=torch.float32)(IDS).logits for one in (model, run.merged / "grpo" / "bf16")]
    assert logits[1].isfinite().all() and not torch.equal(*logits)


@pytest.mark.parametrize(("family", "name"), [("gemma3", "nvfp4a16"), ("qwen3_5", "nvfp4a16"), ("qwen2_5_vl", "fp8")])
def test_a_run_for_a_format_is_merged_into_what_it_trained_with(
    family, name, tmp_path, recipe, recipe_arguments, tiny_model_dir
):
    """`merge` fails unless the checkpoint computes with the numbers of the training."""
    model = make_wrapped(tmp_path / "model", family)
    changes = {"data.path": tiny_model_dir, "train.max_steps": 2, "policy.target_modules": "all-linear"}
    changes |= {"reward.functions": "['tests.smoke.test_wrapped:letters']", "rollout.max_prompt_length": 96}
    changes |= {"reward.options": "{}", "policy.quant_cfg": name, "train.save_steps": 2}
    done = recipe(recipe_arguments(model, tmp_path / "run", changes), QUANTIZED)
    assert done.code == 0, done.err
    finished = processes.run([sys.executable, "-m", "merge", "--run", str(tmp_path / "run"), "--policy", "grpo"])
    assert finished.returncode == 0, finished.stderr[-2000:]
    folder = RunDir.open(tmp_path / "run").merged / "grpo" / name
    assert read_json(folder / "manifest.json")["verify"]["mean_kl"] < 1e-4
    before, after = read_all(model), read_all(folder)
    assert all(torch.equal(before[one], after[one]) for one in RunDir.open(tmp_path / "run").base()["carried"])
