"""recipes/sft_qlora.py as users run it: a dry run, two steps, what the run directory has, a merge of it, refusals."""

import json
import shutil

import pytest

from kit.core.config.recipe import SUPERVISED
from kit.core.run_directory import RunDir, read_manifest

CONFIG = "recipes/configs/sft-tiny-nf4-cpu.yaml"


@pytest.fixture(scope="module")
def base(learning_model_dir, tmp_path_factory):
    """The model with conversations on its problems."""
    folder = tmp_path_factory.mktemp("sft") / "model"
    shutil.copytree(learning_model_dir, folder)
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            said = f"The answer is \\boxed{{{row['answer']}}}"
            row["messages"] = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": said}]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"worked-{name}.jsonl").write_text(text)
    return folder


@pytest.fixture
def arguments(base, tmp_path):
    def make(*more: str) -> list[str]:
        keys = {"run.output_dir": tmp_path / "run", "model.path": base, "data.path": base, "train.max_steps": 2}
        keys |= {"train.save_steps": 2, "train.per_device_train_batch_size": 4, "watch.eval_problems": 8}
        return ["--config", CONFIG, *(f"--{key}={value}" for key, value in keys.items()), *more]

    return make


def test_a_dry_run_prints_the_plan_and_writes_nothing(recipe, arguments, tmp_path):
    done = recipe(arguments("--dry_run"), SUPERVISED)
    assert done.code == 0, done.err
    assert "loss      cross-entropy of answers" in done.out and "tokens in the loss" in done.out
    assert not (tmp_path / "run").exists()


def test_two_steps_leave_an_adapter_a_checkpoint_and_lines_that_resume_refuses_to_mix(
    recipe, arguments, tmp_path, read_jsonl
):
    done = recipe(arguments(), SUPERVISED)
    assert done.code == 0, done.err
    run = RunDir(tmp_path / "run")
    assert read_manifest(run.adapter_dir(2), "adapter", deep=True)["step"] == 2
    assert run.newest_checkpoint().name == "step-000002"
    lines = read_jsonl(run.metrics_file)
    assert [line["step"] for line in lines] == [1, 2] and "reward" not in lines[0]
    assert lines[0]["heldout_loss"] > 0 and len(read_jsonl(run.ledger_file)[0]["problem_ids"]) == 4
    again = recipe(arguments("--resume", "--sft.loss_on=all"), SUPERVISED)
    assert again.code == 2 and "sft.loss_on was 'answers', is 'all'" in again.err


def test_a_row_without_an_answer_stops_the_run_before_any_weight_is_loaded(recipe, arguments, base, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "1?"}]}) + "\n")
    done = recipe(arguments(f"--data.path={file}", "--watch.eval_every=0"), SUPERVISED)
    assert done.code == 2 and "rows.jsonl:1: no message of the assistant to learn" in done.err
    assert not (tmp_path / "run").exists()
