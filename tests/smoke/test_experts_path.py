"""A small mixture of experts through the command lines: train, write the base, merge, diagnose, evaluate, gate."""

import json

import pytest

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from tests.conftest import CONFIG, Finished, make_base, run_here

FORMATS = ("bf16", "fp8", "w4a16", "nvfp4a16")
EXPERT = "model.layers.0.mlp.experts.3.down_proj"


def letters(completions):
    """Something that random weights differ in."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(one.isalpha() for one in text) / (1 + len(text)) for text in texts]


@pytest.fixture(scope="module")
def path(tmp_path_factory, recipe, recipe_arguments) -> tuple[RunDir, dict[str, Finished]]:
    """A run of two steps after every command, and what each of them said."""
    folder = tmp_path_factory.mktemp("experts")
    run, base = RunDir(folder / "run"), folder / "base"
    make_base(base, "--experts", 4, "--layers", 1, "--steps", 0, "--limit", 10, "--problems", 200, "--heldout", 24)
    changes = {"data.eval_split": "heldout", "eval.batch_size": 24, "eval.max_problems": 24, "train.max_steps": 2}
    changes |= {"train.learning_rate": 3e-3, "policy.target_modules": "all-linear", "reward.options": "{}"}
    changes |= {"reward.functions": "['tests.smoke.test_experts_path:letters']"}
    trained = recipe(recipe_arguments(base, run.path, changes))
    assert trained.code == 0, trained.err
    done = {"train": trained}
    commands = {
        "base": ["merge", "base", "--config", CONFIG, "--model.path", base, "--out", folder / "written"],
        "merge": ["merge", "--run", run.path, "--format", *FORMATS],
        "nf4": ["merge", "--run", run.path, "--format", "nf4"],
        "diagnose": ["merge", "diagnose", "--run", run.path, "--formats", "bf16", "fp8"],
        "eval": ["eval", "--run", run.path, "--formats", "nf4", *FORMATS],
        "gate": ["eval", "gate", "--run", run.path],
    }
    for name, (module, *words) in commands.items():
        done[name] = run_here(module, *words)
    return run, done


def test_two_steps_train_experts_and_leave_the_base_unchanged(path, read_jsonl):
    run, done = path
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)
    assert EXPERT in run.base()["quantized"]
    assert "model.layers.0.mlp.gate" not in run.base()["quantized"]
    config = read_json(run.newest_adapter() / "adapter_config.json")
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert "base unchanged" in done["train"].out


def test_every_format_that_holds_experts_is_written_and_verified(path):
    run, done = path
    assert done["merge"].code == 0, done["merge"].err
    assert done["base"].code == 0, done["base"].err
    for name in FORMATS:
        manifest = read_manifest(run.merged / "grpo" / name, "checkpoint", deep=True)
        # Of experts whose codes were taken for weights, the most likely token agrees at one place in a hundred.
        assert manifest["verify"]["top1_agreement"] > 0.9, name
        assert manifest["retained_update"] > 0.5, name


def test_a_format_that_does_not_hold_experts_is_refused_with_the_reason(path):
    _, done = path
    assert done["nf4"].code == 2
    assert "mixture of 4 experts, which cannot be stored as nf4" in done["nf4"].err


def test_layers_are_diagnosed_and_every_format_is_evaluated(path):
    run, done = path
    assert done["diagnose"].code == 0, done["diagnose"].err
    assert EXPERT in json.dumps(read_json(run.path / "diagnostics.json"))
    assert done["eval"].code == 0, done["eval"].err
    matrix = read_json(run.eval_file)["matrix"]
    assert set(matrix["grpo"]) == set(matrix["base"]) == {"nf4", *FORMATS}
    assert done["gate"].code == 1  # two steps on random weights gain nothing
