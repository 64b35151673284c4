"""Two GRPO steps of the real command line on the whole of GSM8K, with a small model of random weights."""

import json
import os
import re
from pathlib import Path

import pytest

from kit.core.config.load import load_config
from kit.core.run_directory import RunDir
from kit.data.problems import load_problems
from tests.conftest import ROOT, make_base

CONFIG = "recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml"


@pytest.fixture(scope="module")
def data() -> Path:
    folder = Path(os.environ.get("GRPO_KIT_DATA") or ROOT.parent / "shared" / "data") / "gsm8k"
    if not all((folder / f"{split}.jsonl").is_file() for split in ("train", "test")):
        pytest.skip(
            "needs gsm8k/train.jsonl and gsm8k/test.jsonl in the folder $GRPO_KIT_DATA or in a folder `shared/data` "
            "beside the checkout"
        )
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model whose context holds the longest question: its tokenizer has no English, so a prompt has 1,000 tokens."""
    size = ("--hidden", 64, "--layers", 1, "--problems", 200, "--heldout", 40, "--context", 1280)
    return make_base(tmp_path_factory.mktemp("models") / "untrained", "--steps", 0, *size)


@pytest.fixture(scope="module")
def overrides(data, model) -> list[str]:
    """What a user without a hub and without a GPU adds to the GSM8K recipe."""
    changes = {
        "model.path": model,
        "model.dtype": "float32",
        "data.path": data,
        "rollout.max_prompt_length": 1200,
        "rollout.max_completion_length": 24,
        "rollout.group_size": 4,
        "train.per_device_train_batch_size": 4,
        "train.gradient_accumulation_steps": 2,
        "train.max_steps": 2,
        "watch.completions_every": 1,
    }
    return [part for key, value in changes.items() for part in (f"--{key}", str(value))]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_problem_counts(out: str) -> None:
    assert re.search(r"^training problems: 7,473 rows, 0 bad, .*, 0 too long, 7,473 used$", out, re.M), out
    assert re.search(r"^held-out problems: 1,319 rows, 0 bad, .*, 1,319 used$", out, re.M), out


def test_two_steps_run_on_all_of_gsm8k(tmp_path, overrides, recipe):
    run = RunDir(tmp_path / "run")
    done = recipe(["--config", CONFIG, "--run.output_dir", str(run.path), *overrides])
    assert done.code == 0, done.err[-3000:]
    check_problem_counts(done.out)

    known = {problem.id: problem for problem in load_problems(load_config(ROOT / CONFIG, overrides).data, "train")}
    steps = rows(run.metrics_file)
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["total_steps"] == 2 and row["completion_tokens"] > 0 for row in steps)
    assert steps[0]["kl"] == 0
    assert set(steps[0]["rewards"]) == {"math"}

    ledger = rows(run.ledger_file)
    assert [row["step"] for row in ledger] == [1, 2]
    drawn = [problem for row in ledger for problem in row["problem_ids"]]
    assert len(drawn) == len(set(drawn)) == 4  # 8 completions a step are 2 groups of 4
    assert set(drawn) <= set(known)

    for row in ledger:
        written = rows(run.completions / f"step-{row['step']:06d}.jsonl")
        assert [entry["problem_id"] for entry in written] == [name for name in row["problem_ids"] for _ in range(4)]
        for entry in written:
            question = known[entry["problem_id"]].question
            assert entry["prompt"] == question + "\nPut the final answer in \\boxed{}."
            assert set(entry["rewards"]) == {"math"}
            assert entry["adapter_version"] == row["step"] - 1
    assert run.newest_adapter() == run.adapter_dir(2)
    assert "base unchanged" in done.out


def test_dry_run_checks_all_of_gsm8k_and_prints_the_plan(tmp_path, overrides, recipe):
    run = RunDir(tmp_path / "run")
    # As on the GPU: bfloat16, and 128 completions a step. Nothing is trained, so a CPU can say so.
    kept = [part for part in overrides if part not in ("--model.dtype", "float32")]
    for key in ("--train.per_device_train_batch_size", "--train.gradient_accumulation_steps", "--rollout.group_size"):
        del kept[kept.index(key) : kept.index(key) + 2]
    done = recipe(["--config", CONFIG, "--run.output_dir", str(run.path), *kept, "--dry_run"])
    assert done.code == 0, done.err
    check_problem_counts(done.out)
    assert "16 problems x 8 completions of at most 24 tokens, 2 steps over 7,473 problems" in done.out
    assert "nf4, bfloat16 compute, double quantization on" in done.out
    assert not run.path.exists()


def test_prompts_that_do_not_fit_are_counted_and_the_longest_is_named_with_the_fix(tmp_path, overrides, recipe):
    short = ["--rollout.max_prompt_length", "200", "--dry_run"]
    done = recipe(["--config", CONFIG, "--run.output_dir", str(tmp_path / "run"), *overrides, *short])
    assert done.code == 2
    told = re.search(r"of 7,473 prompts are longer .* \(200 tokens\); the longest has ([\d,]+) \((.*)\)\. ", done.err)
    assert told, done.err
    assert f"Set rollout.max_prompt_length to {told[1]}" in done.err
    file, line = told[2].rsplit(":", 1)
    questions = [len(row["question"]) for row in rows(Path(file))]
    # Tokens and characters go nearly together in a byte-level tokenizer.
    assert questions[int(line) - 1] > 0.9 * max(questions)
    assert not (tmp_path / "run").exists()
