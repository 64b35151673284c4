"""The model card says where a checkpoint comes from, what it measured, and nothing that belongs to another adapter."""

import json
import re
import shutil

import pytest
import yaml

from kit.core.config.load import config_from_dict, to_dict
from kit.core.errors import BadInput
from kit.core.file_kinds import EVALUATION
from kit.core.run_directory import RunDir, read_manifest, write_json
from kit.core.run_files import read_json
from merge.__main__ import main
from merge.card import LOSS, RECIPE, code, render, write_card
from tests.unit.filled import filled
from tests.unit.merge_fixture import shared_folder, shared_run

CELL = {"accuracy": 0.5, "interval": [0.4, 0.6]}


@pytest.fixture
def run(tmp_path) -> RunDir:
    """A copy of a run with merged BF16 checkpoints of both policies, made once a session."""
    whole = shared_folder() / "run-with-cards"
    if not whole.exists():
        shutil.copytree(shared_run().path, whole)
        assert main(["--run", str(whole), "--format", "bf16", "--skip_verify"]) == 0
    return RunDir(shutil.copytree(whole, tmp_path / "run"))


def card(run: RunDir, policy: str = "grpo") -> str:
    return write_card(run, run.merged / policy / "bf16").read_text()


def change_manifest(run: RunDir, **fields) -> dict:
    file = run.merged / "grpo" / "bf16" / "manifest.json"
    write_json(file, read_json(file) | fields)
    return read_json(file)


def evaluate(run: RunDir, **changes) -> None:
    manifest = read_json(run.merged / "grpo" / "bf16" / "manifest.json")
    result = {
        "n": 50,
        "matrix": {"base": {"bf16": CELL, "fp8": CELL}, "grpo": {"bf16": CELL | {"accuracy": 0.75}}},
        "gain": {"bf16": {"difference": 0.25, "interval": [0.1, 0.4]}},
        "conclusion": "GRPO gains.\nNothing was lost.",
        "base_hash": manifest["base_hash"],
        "adapter_hash": manifest["adapter_hash"],
        "adapter_version": 10,
        "date": "2026-11-21",
    }
    result = filled(EVALUATION, result | {"gain_survival": {}, "quantization_loss": {}}) | changes
    write_json(run.eval_file, result)


def test_a_merge_writes_cards_and_leaves_the_checkpoints_whole(run):
    for policy in ("base", "grpo"):
        place = run.merged / policy / "bf16"
        text = (place / "README.md").read_text()
        manifest = read_manifest(place, "checkpoint", deep=True)
        assert "README.md" not in manifest["files"]
        assert manifest["base_hash"] in text
        assert ("adapter version" in text) is (policy == "grpo")
        assert "Not evaluated yet" in text and "Not compared." in text
    assert read_json(run.merged / "grpo" / "bf16" / "manifest.json")["adapter_hash"] in card(run)


def test_the_front_matter_is_yaml_and_names_only_what_the_hub_knows(run):
    def front() -> dict:
        return yaml.safe_load(card(run).split("---\n")[1])

    assert front() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "qlora", "bf16"],
    }
    facts = read_json(run.config_file)
    facts["config"]["model"]["id"] = "Qwen/Qwen2.5-1.5B-Instruct"
    facts["config"]["data"] |= {"id": "openai/gsm8k", "path": None}
    write_json(run.config_file, facts)
    assert front()["base_model"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert front()["base_model_relation"] == "finetune"
    assert front()["datasets"] == ["openai/gsm8k"]
    change_manifest(run, format="fp8")
    assert front()["base_model_relation"] == "quantized"


def test_the_evaluation_appears_when_it_is_of_this_base_and_adapter(run, capsys):
    evaluate(run)
    assert main(["card", "--run", str(run.path)]) == 0
    text = (run.merged / "grpo" / "bf16" / "README.md").read_text()
    assert "| bf16 | 50.0% (40.0% to 60.0%) | 75.0% (40.0% to 60.0%) | +25.0 points (+10.0 to +40.0) |" in text
    assert "| fp8 | 50.0% (40.0% to 60.0%) | – | – |" in text
    assert "Promoted" not in text
    change_manifest(run, promoted=True)
    assert "Promoted by the run's evaluation gate." in card(run)
    assert "50 held-out problems" in text and "GRPO gains." in text and "Nothing was lost." in text
    assert len(capsys.readouterr().out.splitlines()) == 2
    read_manifest(run.merged / "grpo" / "bf16", "checkpoint", deep=True)


@pytest.mark.parametrize(
    ("changes", "manifest", "told"),
    [
        ({"adapter_hash": "another", "adapter_version": 7}, {}, "of another adapter (version 7)"),
        ({"base_hash": "another"}, {}, "of another adapter"),
        ({}, {"into": "original"}, "merged into the dequantized base"),
        ({"matrix": None}, {}, "holds no result"),
    ],
)
def test_an_evaluation_of_something_else_is_not_shown(run, changes, manifest, told):
    evaluate(run, **changes)
    change_manifest(run, **manifest)
    text = card(run)
    assert told in text and "75.0%" not in text


def test_metrics_are_means_of_the_first_and_last_steps_up_to_the_adapter(run):
    rows = [{"step": step, "reward": step / 100, "kl": None} for step in range(1, 41)]
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 41, "rew')
    change_manifest(run, adapter_version=30)
    text = card(run)
    assert "| metric, mean | steps 1 to 10 | steps 21 to 30 |" in text
    assert "| reward | 0.055 | 0.255 |" in text
    assert "| kl | – | – |" in text
    assert "## Training" not in card(run, "base")


def test_what_was_checked_is_said_with_its_numbers(run):
    verify = {"mean_kl": 1.5e-4, "max_abs_dlogp": 0.25, "top1_agreement": 0.99, "tokens": 640}
    text = render(run, change_manifest(run, verify=verify, retained_update=0.9312))
    assert "On 640 tokens" in text and "1.50e-04 nats per token, max |Δlogp| 0.250, top-1 agreement 0.990" in text
    assert "keep 93.12% of the adapter's update" in text


def test_the_recipe_is_shown_as_configured_and_hostile_text_stays_in_its_cell(run):
    facts = read_json(run.config_file)
    whole = {"run": {"name": "x"}, "model": {"id": "a/b"}, "train": {"max_steps": 3}, "data": {"path": "p.jsonl"}}
    facts["config"] = to_dict(config_from_dict(whole))
    facts["config"]["data"]["prompt_suffix"] = "a | b\n`rm`\n\n# Title"
    write_json(run.config_file, facts)
    text = card(run)
    assert "| train.max_steps | `3` |" in text and "| run.seed | `0` |" in text
    assert "| data.prompt_suffix | `a \\| b\\n'rm'\\n\\n# Title` |" in text
    unset = {key for key in (*LOSS, *RECIPE) if f"| {key} |" not in text}
    own = {"train.loss"}  # of the user, which this run has not
    assert unset == {
        "train.epsilon_high",
        "train.delta",
        "reward.weights",
        "policy.quant_cfg",
        "rollout.stop",
        "policy.init_adapter",
        *own,
    }


def test_a_distilled_policy_is_not_said_to_be_trained_by_grpo(run):
    assert "trained with GRPO" in card(run)
    facts = read_json(run.config_file)
    facts["config"]["train"] = {"loss_type": "dapo"}
    facts["config"]["distill"] = {"teacher": None, "teacher_adapter": "runs/a/adapters/v000080", "divergence": "js"}
    write_json(run.config_file, facts)
    run.metrics_file.write_text(json.dumps({"step": 1, "reward": 0.5, "divergence": 0.25}) + "\n")
    text = card(run)
    assert "trained with on-policy distillation" in text and "GRPO" not in text and "- distillation\n" in text
    assert "| distill.teacher_adapter | `runs/a/adapters/v000080` |" in text and "train.loss_type" not in text
    assert "| distill.divergence | `js` |" in text and "| divergence | 0.25 | 0.25 |" in text


def test_stop_texts_are_in_the_manifest_and_the_card_says_what_clients_must_send(run):
    assert "## Serving" not in card(run) and "stop" not in read_manifest(run.merged / "grpo" / "bf16", "checkpoint")
    facts = read_json(run.config_file)
    facts["config"].setdefault("rollout", {})["stop"] = ["</answer>"]
    write_json(run.config_file, facts)
    assert main(["--run", str(run.path), "--format", "bf16", "--skip_verify", "--overwrite"]) == 0
    place = run.merged / "grpo" / "bf16"
    assert read_manifest(place, "checkpoint")["stop"] == ["</answer>"]
    assert 'Completions end at the first of `["</answer>"]`' in (text := (place / "README.md").read_text())
    assert "send `stop` with every request" in text
    # With stop_strings there, transformers' generate needs the tokenizer, and vLLM does not read them.
    assert "stop_strings" not in read_json(place / "generation_config.json")


def test_values_are_written_as_inline_code():
    assert [code(value) for value in (1, True, "x", ["a"], {"b": None})] == [
        "`1`",
        "`true`",
        "`x`",
        '`["a"]`',
        '`{"b": null}`',
    ]


def test_a_card_that_cannot_be_written_leaves_the_old_one(run, monkeypatch):
    before = card(run)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        card(run)
    assert (run.merged / "grpo" / "bf16" / "README.md").read_text() == before
    assert not list((run.merged / "grpo" / "bf16").glob(".README*"))


def test_nothing_to_write_a_card_for_is_bad_input(run):
    with pytest.raises(BadInput, match=re.escape(f"python -m merge --run {run.path}")):
        main(["card", "--run", str(run.path), "--format", "fp8"])
    (run.merged / "grpo" / "bf16" / "config.json").unlink()
    with pytest.raises(BadInput, match="is not whole"):
        main(["card", "--run", str(run.path)])
