"""`train.micro_batch_tokens` by the recipe's command line: what padded batches teach, and a resume that is exact."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from kit.core.run_directory import RunDir

# 16 completions a step, as in the plain run, of at most 88 tokens each.
PACKED = {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
PACKED |= {"train.micro_batch_tokens": 128}


@pytest.fixture(scope="module")
def packed(tmp_path_factory, recipe, recipe_arguments, learning_model_dir) -> RunDir:
    run = RunDir(tmp_path_factory.mktemp("packed") / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, PACKED))
    assert done.code == 0, f"{done.out}\n{done.err}"
    return run


def test_a_run_in_micro_batches_learns_what_the_plain_run_learns(packed, tiny_run, read_jsonl):
    found, expected = (read_jsonl(run.metrics_file) for run in (packed, tiny_run))
    assert len(found) == len(expected) == 6
    assert packed.ledger_file.read_text() == tiny_run.ledger_file.read_text()
    for one, other in zip(found, expected, strict=True):
        assert one["reward"] == other["reward"], "the same completions were sampled"
        for key in ("kl", "entropy", "loss", "grad_norm", "clip_fraction"):
            assert one[key] == pytest.approx(other[key], rel=1e-2, abs=1e-6), (one["step"], key)
        assert one["seconds"]["reference"] > 0


def test_a_resume_between_steps_of_micro_batches_repeats_the_run(
    packed, tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    run = RunDir(shutil.copytree(packed.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step-000006")
    done = recipe(recipe_arguments(learning_model_dir, run.path, PACKED, ("--resume",)))
    assert done.code == 0 and "(step 4)" in done.out, f"{done.out}\n{done.err}"
    for key in ("reward", "kl", "grad_norm", "loss"):
        first, second = ([row[key] for row in read_jsonl(one.metrics_file)] for one in (packed, run))
        assert first == second, key
    expected = load_file(packed.adapters / "v000006" / "adapter_model.safetensors")
    for name, tensor in load_file(run.adapters / "v000006" / "adapter_model.safetensors").items():
        assert tensor.equal(expected[name]), name


@pytest.mark.parametrize("budget", ["null", 400], ids=["padded", "larger"])
def test_a_resume_may_take_other_micro_batches(
    packed, tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl, budget
):
    run = RunDir(shutil.copytree(packed.path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step-000006")
    changes = {**PACKED, "train.micro_batch_tokens": budget}
    done = recipe(recipe_arguments(learning_model_dir, run.path, changes, ("--resume",)))
    assert done.code == 0, f"{done.out}\n{done.err}"
    assert run.ledger_file.read_text() == packed.ledger_file.read_text()
    for one, other in zip(*(read_jsonl(each.metrics_file) for each in (packed, run)), strict=True):
        assert one["reward"] == other["reward"]
        for key in ("grad_norm", "loss"):  # the KL of accumulated padded batches is TRL's mean over them
            assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), (one["step"], key)


def test_a_budget_that_no_completion_fits_is_refused_before_anything_heavy_is_imported(
    tmp_path, recipe, recipe_arguments
):
    changes = {**PACKED, "train.micro_batch_tokens": 40}
    done = recipe(recipe_arguments(Path("/no/model"), tmp_path / "run", changes))
    assert done.code == 2 and "train.micro_batch_tokens (40) is below rollout.max_prompt_length" in done.err
    assert "(64 + 24 = 88)" in done.err and not (tmp_path / "run").exists()
