"""Runs whose reward hangs on every twentieth sample: the pool kills, the trainer masks, and nothing else changes."""

import json
import shutil
import sys

import pytest
from safetensors.torch import load_file

from kit.core.run_directory import RunDir
from kit.train import trainer
from reward import REWARDS
from reward.answer import boxed_answer
from reward.pool import WORKER, Verdict, WorkerPool, _Worker
from reward.score import own_texts

# The kit's own worker, except that it never answers about a sample that is marked to hang.
HANGING = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("worker", {str(WORKER)!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
def compare(answer, gold, *policy):
    while answer.startswith("hang"):
        time.sleep(1)
    return answer == gold, "stub"
worker.compare = compare
worker.main()
"""
# What a clock or a counter of reasons measures, and what follows from it; everything else must be equal.
CLOCKS = ("time", "seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s", "unknown_rewards")
CHANGES = {"train.learning_rate": 1e-3, "reward.max_unknown_fraction": 0.1}
EVERY = 20  # one sample of so many hangs: 5 %


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Kills after a second what is marked to hang; a loaded machine may take seconds over any other sample."""
    worker = tmp_path / "worker.py"
    worker.write_text(HANGING)
    send = _Worker.send

    def send_patiently(worker, task, timeout_s):
        send(worker, task, timeout_s if task[0].startswith("hang") else 20.0)

    monkeypatch.setattr(_Worker, "send", send_patiently)
    pool = WorkerPool(2, 1.0, command=[sys.executable, "-P", str(worker)])
    yield pool
    pool.close()


def judged(unlucky, pool=None):
    """A reward that counts its samples and calls every twentieth unlucky: it hangs, or gets `unlucky` by hand."""
    seen = []

    def reward(prompts, completions, gold, *, budget=None, **_):
        answers = [boxed_answer(text) or "" for text in own_texts(prompts, completions)]
        numbers = range(len(seen), len(seen) + len(answers))
        seen.extend(answers)
        chosen = [number % EVERY == 13 for number in numbers]
        if unlucky != "hang":
            fair = [float(answer == reference) for answer, reference in zip(answers, gold, strict=True)]
            return [unlucky if c else f for c, f in zip(chosen, fair, strict=True)]
        pairs = [
            (f"hang {number}" if c else answer, reference)
            for c, number, answer, reference in zip(chosen, numbers, answers, gold, strict=True)
        ]
        verdicts = pool.compare(pairs)
        budget.record(verdicts, [f"answer {answer!r}" for answer, _ in pairs])
        return [None if verdict.value is None else float(verdict.value) for verdict in verdicts]

    return reward


@pytest.fixture
def train(tmp_path, monkeypatch, recipe, recipe_arguments, learning_model_dir, read_jsonl):
    """Train 6 steps of 16 samples with the given reward functions; the metrics without clocks, and the adapter."""

    def run(name, functions, **changes):
        for label, function in functions.items():
            monkeypatch.setitem(REWARDS, label, function)
        output = RunDir(tmp_path / name)
        keys = {"reward.functions": json.dumps([*functions]), "reward.options": "{}", **CHANGES, **changes}
        done = recipe(recipe_arguments(learning_model_dir, output.path, keys))
        assert done.code == 0, done.err
        steps = read_jsonl(output.metrics_file)
        kept = [{key: value for key, value in row.items() if key not in CLOCKS} for row in steps]
        return kept, load_file(output.newest_adapter() / "adapter_model.safetensors"), steps

    return run


def equal(one, other):
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_a_run_whose_reward_hangs_equals_one_where_those_samples_are_masked_by_hand(train, pool):
    metrics, adapter, steps = train("hung", {"judged": judged("hang", pool)})
    by_hand, adapter_by_hand, _ = train("by_hand", {"judged": judged(None)})
    assert pool.counts == {"stub": 91, "timeout": 5}  # of 6 steps x 16 samples
    assert steps[-1]["unknown_rewards"] == {"judged": {"timeout": 5}}
    assert sum(row["masked_fraction"] * 16 for row in metrics) == 5
    assert metrics == by_hand
    assert equal(adapter, adapter_by_hand)
    # The comparison can fail: had the pool paid 0 for a hang, this is what would have been trained.
    _, paid_zero, _ = train("zero", {"judged": judged(0.0)})
    assert not equal(adapter, paid_zero)


def form(unlucky):
    """A second reward, which never hangs; by hand it is masked where the first one is."""
    seen = []

    def reward(prompts, completions, **_):
        numbers = range(len(seen), len(seen) + len(completions))
        seen.extend(completions)
        fair = [float(boxed_answer(text) is not None) for text in own_texts(prompts, completions)]
        return [unlucky if unlucky != "fair" and n % EVERY == 13 else f for n, f in zip(numbers, fair, strict=True)]

    return reward


def test_a_sample_whose_answer_is_undecided_is_masked_although_its_form_is_paid(train, pool):
    metrics, adapter, _ = train("hung", {"judged": judged("hang", pool), "form": form("fair")})
    by_hand, adapter_by_hand, _ = train("by_hand", {"judged": judged(None), "form": form(None)})
    assert sum(row["masked_fraction"] * 16 for row in metrics) == 5
    assert [row["reward"] for row in metrics] == [row["reward"] for row in by_hand]
    assert equal(adapter, adapter_by_hand)


def test_more_hangs_than_allowed_stop_the_run_with_the_answers_that_hung(
    tmp_path, monkeypatch, recipe, recipe_arguments, learning_model_dir, pool
):
    monkeypatch.setitem(REWARDS, "judged", judged("hang", pool))
    keys = {"reward.functions": '["judged"]', "reward.options": "{}", "reward.max_unknown_fraction": 0.005}
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 1
    assert "reward 'judged' could not be computed for 2 of the last 48 samples (timeout 2)" in done.err
    assert "allows 0.50% of 256" in done.err
    assert "timeout: answer 'hang 13'" in done.err and "timeout: answer 'hang 33'" in done.err
    assert pool.counts["timeout"] == 2
    assert run.newest_adapter() == run.adapter_dir(2)  # what was published before stays


def test_reasons_are_counted_over_all_processes_and_over_a_resume(
    tmp_path, monkeypatch, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    def reward(prompts, completions, gold, *, budget=None, **_):
        values = [None, *(float(number % 2) for number in range(1, len(completions)))]
        budget.record([Verdict(None if value is None else True, "late") for value in values], [""] * len(values))
        return values

    gather = trainer.gather_object  # a second process with the same counts

    def is_counts(value: object) -> bool:
        return isinstance(value, dict) and bool(value)

    monkeypatch.setattr(trainer, "gather_object", lambda found: gather(found) * (2 if is_counts(found[0]) else 1))
    monkeypatch.setitem(REWARDS, "judged", reward)
    run, keys = (
        RunDir(tmp_path / "run"),
        {"reward.functions": '["judged"]', "reward.options": "{}", "train.max_steps": 4, **CHANGES},
    )
    for flags in ((), ("--resume",)):
        done = recipe(recipe_arguments(learning_model_dir, run.path, keys, flags))
        assert done.code == 0, done.err
        counts = [row["unknown_rewards"]["judged"]["late"] for row in read_jsonl(run.metrics_file)]
        assert counts == [2, 4, 6, 8]  # one in a step and process
        shutil.rmtree(run.checkpoints / "step-000004")
