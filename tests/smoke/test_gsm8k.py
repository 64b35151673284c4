"""All of GSM8K through loading, prompts and rewards: reference solutions pay 1.0, corrupted ones 0.0."""

import json
import os
import time
from pathlib import Path

import pytest

from kit.core.config.schema import DataConfig, RewardConfig
from kit.data.problems import chat_messages, load_problems, read_problems, to_dataset
from reward import reward_functions
from reward.pool import shared_pool

SUFFIX = "\nPut the final answer in \\boxed{}."


@pytest.fixture(scope="module")
def data() -> DataConfig:
    folder = Path(os.environ.get("GRPO_KIT_DATA") or Path(__file__).parents[3] / "shared" / "data") / "gsm8k"
    if not all((folder / f"{split}.jsonl").is_file() for split in ("train", "test")):
        pytest.skip(
            "needs gsm8k/train.jsonl and gsm8k/test.jsonl in the folder $GRPO_KIT_DATA or in a folder `shared/data` "
            "beside the checkout"
        )
    return DataConfig(path=str(folder), answer_format="gsm8k", prompt_suffix=SUFFIX)


@pytest.fixture(scope="module")
def problems(data):
    return load_problems(data, "eval")


@pytest.fixture(scope="module")
def prompts(data, problems):
    return [chat_messages(data, problem) for problem in problems]


@pytest.fixture(scope="module")
def solutions(data, problems):
    """The reference solutions as written, without their `#### n` line."""
    rows = map(json.loads, (Path(data.path) / "test.jsonl").read_text(encoding="utf-8").splitlines())
    return {row["question"].replace("\r\n", "\n").strip(): row["answer"].rpartition("####")[0].strip() for row in rows}


def corruptions(gold: str) -> dict[str, str]:
    digits = gold.replace(",", "")
    sign, bare = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    made = {
        "one more": str(int(digits) + 1),
        "one less": str(int(digits) - 1),
        "sign flipped": bare if sign else f"-{bare}",
        "digit dropped": sign + bare[:-1] if len(bare) > 1 else "",
        "first digit dropped": sign + bare[1:] if len(bare) > 1 and bare[1] != "0" else "",
        "zero appended": f"{digits}0",
        "digit appended": f"{digits}7",
        "decimal shifted": f"{sign}{bare[:-1] or '0'}.{bare[-1]}",
        "half more": f"{digits}.5",
        "nothing": "",
        "not a number": "NaN",
    }
    if int(digits) == 0:
        for same in ("sign flipped", "zero appended", "decimal shifted"):
            del made[same]
    return made


def test_all_8792_problems_load_and_become_prompts(data):
    started = time.process_time()
    counts = {}
    for split in ("train", "eval"):
        problems, report = read_problems(data, split)
        assert report.bad == [] and report.duplicates == []
        dataset = to_dataset(problems, data)
        assert all(row[-1]["content"].endswith(SUFFIX) for row in dataset["prompt"])
        assert len(set(dataset["problem_id"])) == len(dataset)
        counts[split] = len(dataset)
    assert counts == {"train": 7473, "eval": 1319}
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("math", "boxed"),
        ("math", "said"),
        ("gsm8k_strict", "boxed"),
        ("gsm8k_strict", "hash"),
        ("gsm8k_lenient", "boxed"),
        ("gsm8k_lenient", "hash"),
    ],
)
def test_all_1319_references_pay_and_all_their_corruptions_do_not(problems, prompts, solutions, name, form):
    (function,), _ = reward_functions(RewardConfig(functions=[name], max_unknown_fraction=0.0))
    golds = [problem.gold for problem in problems]

    def score(answers):
        written = {"boxed": "\\boxed{{{}}}", "hash": "#### {}", "said": "The answer is ${}$. I hope it is correct."}[
            form
        ]
        completions = [
            [{"role": "assistant", "content": f"{solutions[problem.question]}\n" + written.format(answer)}]
            for problem, answer in zip(problems, answers, strict=True)
        ]
        return function(prompts=prompts, completions=completions, gold=golds)

    asked_before = shared_pool(2, 2.0).counts.copy()
    started = time.process_time()
    assert len(problems) == 1319
    assert score(golds) == [1.0] * 1319
    tables = [corruptions(gold) for gold in golds]
    tried = 0
    for kind in corruptions("12"):
        # With no readable answer the lenient reward falls back on the last number of the solution, which is right, and
        # a sentence may fall back on another of the solution.
        falls_back = form == "said" or (name == "gsm8k_lenient" and form == "hash")
        if falls_back and kind in ("nothing", "not a number"):
            continue
        chosen = [table.get(kind) for table in tables]
        rewards = score([answer or "" for answer in chosen])
        if falls_back:
            rewards = [reward for reward, answer in zip(rewards, chosen, strict=True) if answer]
        assert not any(rewards), (kind, [golds[i] for i, reward in enumerate(rewards) if reward][:5])
        tried += len(rewards)
    assert tried > 10_000
    if form != "said":  # without a number in it, a sentence of the solution is read instead
        assert shared_pool(2, 2.0).counts == asked_before, "plain numbers must not need a worker"
    assert time.process_time() - started < 10


def test_only_form_boxed_of_math_pays_no_unboxed_reference(problems, prompts):
    completions, golds = [f"#### {problem.gold}" for problem in problems], [problem.gold for problem in problems]
    for form in ("boxed", "stated", "lenient"):
        (function,), _ = reward_functions(RewardConfig(functions=["math"], options={"math": {"form": form}}))
        rewards = function(prompts=prompts, completions=completions, gold=golds)
        assert rewards == [0.0 if form == "boxed" else 1.0] * len(golds)


def test_lenient_pays_the_reference_as_the_last_number_and_strict_does_not(problems, prompts):
    (strict, lenient), _ = reward_functions(RewardConfig(functions=["gsm8k_strict", "gsm8k_lenient"]))
    completions = [f"Adding 1 and 2, the answer is {problem.gold}." for problem in problems]
    batch = {"prompts": prompts, "completions": completions, "gold": [problem.gold for problem in problems]}
    assert lenient(**batch) == [1.0] * 1319
    assert not any(strict(**batch))
