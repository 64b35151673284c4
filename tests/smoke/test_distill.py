"""The distillation recipe by its command line: what a run leaves behind, that the student comes nearer, resuming."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.core.config.recipe import DISTILLATION
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.policy.load import publish_adapter

LOG_LINE = re.compile(
    r"step \d+/\d+ reward \S+ std \S+ divergence \d\S+ entropy \S+ truncated \S+ length \S+ grad_norm \S+ "
    r"seconds \S+ \(rollout \S+ teacher \S+ update \S+\)"
)


@pytest.fixture(scope="session")
def distill(recipe, recipe_arguments) -> Callable:
    """`distill(model, run directory, {key: value}, *flags)`: (exit code, output, errors) of the recipe."""

    def run(model: Path, output: Path, changes: dict, *flags: str) -> tuple[int, str, str]:
        done = recipe(recipe_arguments(model, output, changes, flags=flags), DISTILLATION)
        return done.code, done.out, done.err

    return run


@pytest.fixture(scope="session")
def teacher(made_once, build_trainer, recipe_arguments, learning_model_dir) -> Path:
    """An adapter that changes what the base says, published as a run's is."""

    def make(folder: Path) -> None:
        trainer = build_trainer(recipe_arguments(learning_model_dir, folder / "run"))
        generator = torch.Generator().manual_seed(0)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        publish_adapter(trainer.model, folder / "v000001", 1, trainer.policy.base_hash)

    return made_once("teacher", make) / "v000001"


@pytest.fixture(scope="session")
def distilled(made_once, distill, learning_model_dir, teacher) -> RunDir:
    """A finished distillation of 14 steps: the base teaches a student that starts as the base with `teacher`. Copy it
    before changing it."""

    def train(folder: Path) -> None:
        keys = {"distill.teacher": "base", "policy.init_adapter": teacher, "train.learning_rate": 3e-3}
        keys |= {"train.max_steps": 14}
        keys |= {"train.save_steps": 7, "watch.eval_every": 7, "watch.eval_problems": 8}
        code, out, err = distill(learning_model_dir, folder, keys)
        assert code == 0, err
        (folder / "stdout.txt").write_text(out)

    return RunDir(made_once("distilled", train))


def test_a_run_lowers_the_divergence_of_a_student_that_starts_with_another_adapter(distilled, read_jsonl):
    found = [row["divergence"] for row in read_jsonl(distilled.metrics_file)]
    assert len(found) == 14 and found[0] > 0.05
    assert sum(found[-3:]) / 3 < found[0] / 4, found


def test_a_run_leaves_what_a_run_of_grpo_leaves(distilled, read_jsonl):
    rows = read_jsonl(distilled.metrics_file)
    for row in rows:
        assert row["loss"] == pytest.approx(row["divergence"], rel=1e-4)
        assert all(row[key] is None for key in ("kl", "clip_fraction", "zero_spread_fraction", "sampler_k3"))
        assert row["entropy"] > 0 and row["reward"] is not None and row["rewards"].keys() == {"math"}
        assert 0 < row["seconds"]["teacher"] < row["seconds"]["step"]
    assert [row["step"] for row in rows if row["heldout_accuracy"] is not None] == [1, 7, 14]
    assert distilled.newest_adapter().name == "v000014" and distilled.newest_checkpoint().name == "step-000014"
    assert read_manifest(distilled.newest_adapter(), "adapter", deep=True)["base_hash"]
    assert len(read_jsonl(distilled.ledger_file)) == 14 and (distilled.completions / "step-000002.jsonl").is_file()
    lines = [line for line in (distilled.path / "stdout.txt").read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 14 + 1 and all(LOG_LINE.fullmatch(line) for line in lines[1:]), lines


def test_the_watcher_shows_and_draws_the_divergence(distilled, tmp_path, capsys):
    from launch.watch import main

    def watch(*flags: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["launch.watch", str(distilled.path), *flags])
            assert not main()
        return capsys.readouterr().out

    assert "divergence" in watch("--once")
    assert 0 < json.loads(watch("--once", "--json"))["recent"]["divergence"] < 1
    watch("--plot", "--out", str(tmp_path))
    assert (tmp_path / "health.png").stat().st_size > 10_000


def test_a_resumed_run_is_the_uninterrupted_one(distill, learning_model_dir, teacher, tmp_path, read_jsonl):
    """Quantized, with the teacher's adapter as the start, packed: what a user would do."""
    keys = {"distill.teacher_adapter": teacher, "policy.init_adapter": teacher, "policy.quant_cfg": "nvfp4"}
    keys |= {"policy.quant_calib_size": 8, "train.save_steps": 1, "train.micro_batch_tokens": 176}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, out, err = distill(learning_model_dir, whole, keys | {"train.max_steps": 2})
    assert code == 0, err
    assert "computes in nvfp4" in out and "calibrated" in out and "teacher   the unquantized base with" in out
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-000002")
    code, out, err = distill(learning_model_dir, parts, keys | {"train.max_steps": 2}, "--resume")
    assert code == 0 and "resuming from" in out and "calibrated" not in out, err
    assert f"adapter {parts / 'adapters' / 'v000002'} for nvfp4" in out
    ours, theirs = (read_manifest(path / "adapters" / "v000002", "adapter") for path in (whole, parts))
    assert ours["tensor_hash"] == theirs["tensor_hash"] and ours["quant_cfg"] == theirs["quant_cfg"] == "nvfp4"
    assert ours["quantizer_hash"] == theirs["quantizer_hash"]
    found = [read_jsonl(path / "metrics.jsonl")[-1]["divergence"] for path in (whole, parts)]
    assert found[0] == found[1] > 0
    other = keys | {"train.max_steps": 3, "policy.quant_cfg": "fp8"}
    code, _, err = distill(learning_model_dir, parts, other, "--resume")
    assert code == 2 and "was trained for nvfp4, policy.quant_cfg is fp8 now" in err


def test_another_model_teaches(distill, learning_model_dir, tmp_path, read_jsonl):
    weights = load_file(learning_model_dir / "model.safetensors")
    other = copied(learning_model_dir, tmp_path / "other")
    save_file({name: 1.1 * one for name, one in weights.items()}, other / "model.safetensors", {"format": "pt"})
    keys = {"distill.teacher": other, "distill.divergence": "js", "train.max_steps": 1}
    code, out, err = distill(learning_model_dir, tmp_path / "run", keys)
    assert code == 0, err
    assert "a second model in memory" in out and "js, 0.5 of the teacher in the mixture" in out
    assert 0 < read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]["divergence"] < 0.7  # of js at most log 2


def copied(source: Path, target: Path, **changes: str) -> Path:
    """A model's directory without its weights, with some text of files replaced."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, (old, new) in changes.items():
        file = target / f"{name}.json"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    return target


def test_a_teacher_that_does_not_fit_is_refused_before_weights(
    distill, learning_model_dir, teacher, tmp_path, monkeypatch
):
    monkeypatch.setattr("kit.policy.load.load_frozen", lambda *_, **__: pytest.fail("weights were loaded"))
    source = learning_model_dir

    def refused(changes: dict) -> str:
        code, _, err = distill(source, tmp_path / "run", changes)
        assert code == 2 and not (tmp_path / "run").exists()
        return err

    other = copied(source, tmp_path / "tokens", tokenizer=('"0":', '"zero":'))
    assert "has another tokenizer than" in refused({"distill.teacher": other})
    vocabulary = str(read_json(source / "config.json")["vocab_size"])
    small = copied(source, tmp_path / "small", config=(f'"vocab_size": {vocabulary}', '"vocab_size": 99'))
    assert "scores 99 ids" in refused({"distill.teacher": small})
    context = f'"max_position_embeddings": {read_json(source / "config.json")["max_position_embeddings"]}'
    short = copied(source, tmp_path / "short", config=(context, '"max_position_embeddings": 40'))
    assert "has a context of 40 tokens" in refused({"distill.teacher": short})
    assert "no model config at" in refused({"distill.teacher": tmp_path / "absent"})
    assert "does not exist" in refused({"distill.teacher_adapter": tmp_path / "absent"})
    few = {"distill.teacher_adapter": teacher, "policy.target_modules": ["q_proj"]}
    assert "only one of them adapts" in refused(few)
    (base := tmp_path / "base").mkdir()
    (base / "base.json").write_text(json.dumps({"hash": "0" * 64}))
    assert "was trained on another base" in refused({"distill.teacher_adapter": teacher, "server.base": base})
    assert "train.trl.entropy_coef does nothing in a distillation" in refused(
        {"distill.teacher_adapter": teacher, "train.trl": "{entropy_coef: 0.1}"}
    )
    assert "Start it with recipes/grpo_qlora.py, or set one of them" in refused({})


def test_the_other_recipes_refuse_a_configuration_with_a_teacher(recipe, recipe_arguments, tiny_model_dir, tmp_path):
    done = recipe(recipe_arguments(tiny_model_dir, tmp_path / "run", {"distill.teacher": "base"}))
    assert done.code == 2 and "Start it with recipes/distill_qat.py" in done.err
