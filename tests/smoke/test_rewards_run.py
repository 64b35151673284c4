"""Runs with rewards that ask a judge, judge whole groups or read columns, on data in verl's form."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from kit.core.run_directory import RunDir
from merge.calibrated import calibration_set
from reward.reward_model import load, rendered
from tests.smoke.test_two_processes import train
from tests.unit.stub_judge import stub_judge

EPISODES, STEPS = 200, 5
ROWS = EPISODES // STEPS
# What a clock or a counter of reasons measures; everything else is equal in a resumed run.
CLOCKS = ("time", "seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s")


@pytest.fixture(scope="module")
def verl_data(learning_model_dir, tmp_path_factory) -> Path:
    """The problems of the learning model as verl's rows."""
    folder = tmp_path_factory.mktemp("verl")
    for name in ("train", "heldout"):
        lines = []
        for index, line in enumerate((learning_model_dir / f"{name}.jsonl").read_text().splitlines()):
            row = json.loads(line)
            prompt = [{"role": "user", "content": row["question"]}]
            facts = {"data_source": "sums", "prompt": prompt, "extra_info": {"index": index, "split": name}}
            lines.append(json.dumps(facts | {"reward_model": {"style": "rule", "ground_truth": str(row["answer"])}}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def behavior(text: str) -> str:
    """What the stub does with a request: a tenth each late, silent, wrong and refused; else a score from 0 to 10."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
    words = {0: "judge-late", 1: "judge-silent", 2: "judge-garbage", 3: "judge-500"}
    return words.get(number % 10, f"judge-score {number // 10 % 11}")


def rows_of(run: RunDir) -> list[dict]:
    files = sorted(run.completions.glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_200_episodes_against_a_judge_that_is_late_wrong_and_absent(
    tmp_path, recipe, recipe_arguments, learning_model_dir, verl_data, read_jsonl, monkeypatch
):
    """Nothing hangs, nothing unknown is scored, and a resumed run repeats the uninterrupted one."""
    (tmp_path / "judge.txt").write_text("{question} {gold} {data_source} {extra_info} ANSWER {completion}")
    monkeypatch.setenv("STUB_KEY", "sk-stub-secret")
    with stub_judge(late_s=30.0) as judge:
        judge.choose = behavior
        options = {"url": judge.url, "model": "stub", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 3.0}
        options |= {"scale": [0, 10], "retries": 0, "api_key_env": "STUB_KEY", "concurrency": ROWS}
        keys = {"reward.functions": '["llm_judge"]', "reward.options": json.dumps({"llm_judge": options})}
        keys |= {"reward.max_unknown_fraction": 1.0, "train.max_steps": STEPS, "data.path": verl_data}
        keys |= {"train.per_device_train_batch_size": ROWS, "watch.completions_every": 1, "train.save_steps": 3}
        keys |= {"watch.completions_per_step": ROWS}
        run = RunDir(tmp_path / "run")
        done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
        assert done.code == 0, done.err
        assert "questions from 'prompt', answers from 'reward_model.ground_truth'" in done.out
        steps, rows = read_jsonl(run.metrics_file), rows_of(run)
        assert len(rows) == EPISODES

        by_name: dict[str, set] = {}  # completion -> what the stub did with the requests that show it
        for body in judge.bodies:
            text = body["messages"][0]["content"]
            by_name.setdefault(text.partition(" ANSWER ")[2], set()).add(behavior(text))
        for row in rows:
            value = row["rewards"]["llm_judge"]
            expected = {
                float(does.split()[1]) / 10 if "score" in does else None for does in by_name[row["completion"]]
            }
            assert (None if value is None else round(value, 4)) in expected, row
        unknown = sum(row["rewards"]["llm_judge"] is None for row in rows)
        counts = steps[-1]["unknown_rewards"]["llm_judge"]
        assert sum(counts.values()) == unknown > 40 and set(counts) == {"late", "unparseable", "HTTP 500"}
        assert sum(round(row["masked_fraction"] * ROWS) for row in steps) == unknown
        assert max(row["seconds"]["reward"] for row in steps) < 15.0, "at most 3 s for a request, all at once"
        files = [file for file in run.path.rglob("*") if file.is_file() and file.suffix in (".json", ".jsonl", ".log")]
        assert len(files) > 100 and not any("sk-stub-secret" in file.read_text() for file in files)

        first, before = [learned(row) for row in steps], judge.asked.total()
        (newest := run.newest_checkpoint()).rename(tmp_path / newest.name)
        done = recipe(recipe_arguments(learning_model_dir, run.path, keys, ("--resume",)))
        assert done.code == 0, done.err
        assert [learned(row) for row in read_jsonl(run.metrics_file)] == first
        # 80 episodes are repeated; their replies come from the cache, but for those that had none.
        assert 0 < judge.asked.total() - before < 40


def learned(row: dict) -> dict:
    return {key: value for key, value in row.items() if key not in CLOCKS}


OWN = """
import asyncio, json, os
from pathlib import Path

def note(name, **facts):
    with open(Path(os.environ["NOTES"]) / f"{name}-{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\\n")

def texts(completions):
    return [completion[-1]["content"] for completion in completions]

def longest(completions, problem_id, extra_info):
    note("longest", problems=problem_id, index=[one["index"] for one in extra_info], texts=texts(completions))
    most = max(map(len, texts(completions)))
    return [float(len(text) == most) for text in texts(completions)]
longest.group = True

async def spread(completions, data_source):
    assert data_source == ["sums"] * 4
    await asyncio.sleep(0.01)
    return [None if not text else len(set(texts(completions))) / 4 for text in texts(completions)]
spread.group = True

async def length(completions, *, scale: float):
    await asyncio.sleep(0.01)
    return [len(text) / scale for text in texts(completions)]

def short(completions):
    return [float(len(text) < 9) for text in texts(completions)]
"""


def test_a_group_that_spans_processes_is_judged_once_and_whole(
    tmp_path, monkeypatch, recipe_arguments, verl_data, learning_model_dir
):
    """Two processes with six completions each: of three groups of four, the middle one lies in both."""
    (tmp_path / "kit_smoke_rewards.py").write_text(OWN)
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = [f"kit_smoke_rewards:{name}" for name in ("short", "longest", "spread", "length")]
    keys = {"reward.functions": json.dumps(names), "train.per_device_train_batch_size": 6, "train.max_steps": 3}
    keys |= {"reward.options": json.dumps({names[3]: {"scale": 10}}), "data.path": verl_data}
    keys |= {"watch.completions_every": 1, "reward.max_unknown_fraction": 1.0}
    run = RunDir(tmp_path / "run")
    done = train(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.returncode == 0, done.stderr
    judged = {}  # by rank
    for rank in (0, 1):
        lines = (tmp_path / "notes" / f"longest-{rank}.jsonl").read_text().splitlines()
        judged[rank] = [json.loads(line) for line in lines]
    assert [len(judged[rank]) for rank in (0, 1)] == [6, 3], "a group is judged where its first completion is"
    rows = rows_of(run)
    groups = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    assert len(groups) == 9
    calls = [call for step in range(3) for call in (*judged[0][2 * step :][:2], judged[1][step])]
    for group, call in zip(groups, calls, strict=True):
        texts = [row["completion"] for row in group]
        assert call["problems"] == [row["problem_id"] for row in group] and len(set(call["problems"])) == 1
        assert call["texts"] == texts and len(set(call["index"])) == 1
        most = max(map(len, texts))
        for row, text in zip(group, texts, strict=True):
            assert row["rewards"][names[1]] == float(len(text) == most)
            assert row["rewards"][names[2]] == len(set(texts)) / 4
            assert row["rewards"][names[3]] == pytest.approx(len(text) / 10)
            assert row["rewards"][names[0]] == float(len(text) < 9)


def test_a_judge_that_is_down_ends_the_run_before_the_base_is_loaded(
    tmp_path, recipe, recipe_arguments, learning_model_dir, verl_data, monkeypatch
):
    (tmp_path / "judge.txt").write_text("{completion}")
    options = {"url": "http://127.0.0.1:9", "model": "stub", "prompt_file": str(tmp_path / "judge.txt")}
    keys = {"reward.functions": '["llm_judge"]', "reward.options": json.dumps({"llm_judge": options})}
    keys |= {"data.path": verl_data}
    run = RunDir(tmp_path / "run")
    monkeypatch.setattr("kit.policy.load.load_policy_base", lambda config: pytest.fail("weights were loaded"))
    assert recipe(recipe_arguments(learning_model_dir, run.path, keys, ("--dry_run",))).code == 0
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 2 and "the judge stub at http://127.0.0.1:9/v1/chat/completions does not answer" in done.err
    assert not run.base_file.exists()


def test_conversations_are_sampled_judged_and_measured_as_they_are(
    tmp_path, recipe, recipe_arguments, learning_model_dir, verl_data, read_jsonl
):
    """A reward model and math on prompts of three messages, held-out accuracy included."""
    (data := tmp_path / "data").mkdir()
    before = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (verl_data / f"{name}.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"prompt": [*before, *row["prompt"]]}) for row in rows]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(learning_model_dir)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    facts = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape)
    Qwen3ForSequenceClassification(facts).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    options = {"reward_model": {"path": str(tmp_path / "judge"), "dtype": "float32"}, "math": {"form": "lenient"}}
    keys = {"reward.functions": '["math", "reward_model"]', "reward.options": json.dumps(options), "data.path": data}
    keys |= {"watch.eval_every": 1, "watch.eval_problems": 4, "watch.completions_every": 1, "train.max_steps": 2}
    keys |= {"rollout.max_prompt_length": 128, "reward.weights": "[1.0, 0.1]"}
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, done.err
    rows, model = rows_of(run), load(str(tmp_path / "judge"), "float32", "auto").model
    assert len(rows) == 32
    for row in rows:
        assert row["prompt"][:2] == before and len(row["prompt"]) == 3
        ids = rendered(tokenizer, row["prompt"], row["completion"])
        with torch.no_grad():
            expected = model(torch.tensor([ids], device=model.device)).logits.item()
        assert row["rewards"]["reward_model"] == pytest.approx(expected, abs=1e-4)
    assert all(row["heldout_accuracy"] is not None for row in read_jsonl(run.metrics_file))
    findings = subprocess.run([sys.executable, "-m", "reward", "audit", str(run.path)], capture_output=True, text=True)
    assert findings.returncode in (0, 1) and "Traceback" not in findings.stderr, findings.stderr
    prompts = calibration_set(run, tokenizer, 4, 256)
    told = tokenizer.apply_chat_template(rows[-1]["prompt"], add_generation_prompt=True)["input_ids"]
    assert any(ids[: len(told)] == told for ids in prompts.sequences), "merge calibrates on the prompts of the run"
