"""Held-out accuracy during a run: measured when it is due, by the judge of eval, and without any effect on the run."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir
from kit.rollout.policy_view import Rollouts
from kit.train.heldout import HeldOut, _judge, own_random_numbers
from tests.conftest import CONFIG

EVAL = {"watch.eval_every": 2, "watch.eval_problems": 10}
# What differs between two equal runs: clocks and memory.
UNSTABLE = ("time", "seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s")


def learned(rows: list[dict]) -> list[dict]:
    return [{key: row[key] for key in row if key not in (*UNSTABLE, "heldout_accuracy")} for row in rows]


@pytest.fixture(scope="module")
def measured_run(build_trainer, recipe_arguments, learning_model_dir, tmp_path_factory) -> RunDir:
    """The session's small run once more, measured every second step, resumed in the middle from step 4."""
    output = tmp_path_factory.mktemp("measured") / "run"
    build_trainer(recipe_arguments(learning_model_dir, output, EVAL)).train_run(resume=False)
    run = RunDir(output)
    (run.path / "first.jsonl").write_bytes(run.metrics_file.read_bytes())
    (newest := run.newest_checkpoint()).rename(run.path / newest.name)
    build_trainer(recipe_arguments(learning_model_dir, output, EVAL, ("--resume",))).train_run(resume=True)
    return run


def test_a_run_is_the_same_with_and_without_it_and_across_a_resume(tiny_run, measured_run, read_jsonl):
    without, resumed = read_jsonl(tiny_run.metrics_file), read_jsonl(measured_run.metrics_file)
    first = read_jsonl(measured_run.path / "first.jsonl")
    assert learned(first) == learned(without) == learned(resumed)
    assert any(row["grad_norm"] > 0 for row in without), "nothing was learned, so nothing is shown"
    assert [row["heldout_accuracy"] for row in first] == [row["heldout_accuracy"] for row in resumed]
    hashes = {
        json.loads((run.adapter_dir(6) / "manifest.json").read_text())["tensor_hash"]
        for run in (tiny_run, measured_run)
    }
    assert len(hashes) == 1


def test_it_is_measured_at_the_first_step_and_at_every_multiple_and_timed(measured_run, read_jsonl):
    rows = read_jsonl(measured_run.path / "first.jsonl")
    assert [row["heldout_accuracy"] is not None for row in rows] == [True, True, False, True, False, True]
    values = [row["heldout_accuracy"] for row in rows if row["heldout_accuracy"] is not None]
    assert all(0 <= value <= 1 and round(value * 10, 6).is_integer() for value in values)
    for row in rows:
        seconds = row["seconds"]
        assert ("heldout" in seconds) == (row["heldout_accuracy"] is not None)
        spent = sum(seconds.get(name, 0) for name in ("rollout", "reward", "heldout", "reference", "update"))
        assert spent == pytest.approx(seconds["step"], abs=0.001)


def test_without_it_nothing_is_measured(tiny_run, read_jsonl):
    assert [row["heldout_accuracy"] for row in read_jsonl(tiny_run.metrics_file)] == [None] * 6


def config_of(model, **keys):
    keys = {"model.path": model, "data.path": model, "watch.eval_every": 2, "watch.eval_problems": 5} | keys
    return load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])


class Answers:
    """A policy of `processes` processes, its sampler and its tokens: it answers the n-th held-out problem right when n
    is even."""

    def __init__(self, heldout: HeldOut, index: int = 0, processes: int = 1):
        self.right = {problem.question: place % 2 == 0 for place, problem in enumerate(heldout.problems)}
        self.golds = {problem.question: problem.gold for problem in heldout.problems}
        self.processes = SimpleNamespace(
            num_processes=processes, process_index=index, device=torch.device("cpu"), is_main_process=index == 0
        )
        self.asked: list[str] = []
        heldout.tokenizer = self

    def tokenize(self, prompts):
        self.asked = [prompt[-1]["content"] for prompt in prompts]
        return [[place] for place in range(len(prompts))]

    def generate(self, policy, prompt_ids, group):
        assert group == 1
        return Rollouts(prompt_ids, None, 0)

    def batch_decode(self, completions, skip_special_tokens):
        questions = [self.asked[ids[0]] for ids in completions]
        return [f"\\boxed{{{self.golds[q] if self.right[q] else 'wrong'}}}" for q in questions]

    def measured(self, heldout: HeldOut) -> float | None:
        return heldout.measure(self, self, self.tokenize)


@pytest.fixture
def heldout(tiny_model_dir):
    return lambda **keys: HeldOut(config_of(tiny_model_dir, **keys), AutoTokenizer.from_pretrained(tiny_model_dir))


def test_processes_share_the_problems_and_every_problem_counts_once(heldout, monkeypatch):
    made = heldout()
    assert Answers(made).measured(made) == 3 / 5
    parts = []
    for index in (0, 1):
        answers = Answers(made, index, 2)
        monkeypatch.setattr("kit.train.heldout.gather_object", lambda scores: parts.append(scores) or scores)
        answers.measured(made)
        assert len(answers.asked) == 3
    everyone = [*parts[0], *parts[1]]
    assert everyone == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]  # the sixth is the first problem again
    monkeypatch.setattr("kit.train.heldout.gather_object", lambda scores: everyone)
    assert Answers(made, 0, 2).measured(made) == 3 / 5


def test_the_judge_reads_boxes_and_hashes_as_eval_does_whatever_form_the_reward_takes(heldout):
    judge = heldout().judge
    texts = ["so \\boxed{7}", "#### 7", "The answer is 7."]
    assert judge(prompts=None, completions=texts, gold=["7"] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("judged", "share"),
    [([None, 1.0, None, 0.0, 1.0], 2 / 3), ([None] * 5, None), ([0.99, 1.0, 0.5, 0.0, 1.0], 2 / 5)],
)
def test_what_is_partly_right_is_wrong_and_what_could_not_be_judged_is_left_out(heldout, monkeypatch, judged, share):
    made = heldout()
    monkeypatch.setattr(made, "judge", lambda **columns: judged)
    assert Answers(made).measured(made) == share


def test_the_problems_are_the_first_of_the_held_out_split(heldout, tiny_model_dir):
    lines = (tiny_model_dir / "heldout.jsonl").read_text().splitlines()
    wanted = [json.loads(line)["question"] for line in lines[:5]]
    assert [problem.question for problem in heldout().problems] == wanted
    assert len(heldout(**{"watch.eval_problems": 7}).problems) == 7


def drawn(seed: int = 0, process: int = 0) -> list[float]:
    with own_random_numbers(seed, process, torch.device("cpu")):
        return torch.rand(4).tolist()


def test_a_measurement_draws_the_same_numbers_every_time_and_takes_none_of_the_runs():
    torch.manual_seed(5)
    wanted = torch.rand(6)
    torch.manual_seed(5)
    before = torch.rand(3)
    first = drawn()
    after = torch.rand(3)
    assert torch.equal(torch.cat([before, after]), wanted) and drawn() == first
    others = [drawn(0, 1), drawn(1, 0), drawn(1, 1), drawn(0, 0)]
    assert len({tuple(one) for one in others}) == 4, "each process and each seed has its own"


@pytest.mark.parametrize(
    ("keys", "name", "options"),
    [
        ({}, "math", {"hash_answers": True}),
        ({"data.answer_format": "gsm8k"}, "math", {"hash_answers": True}),
        ({"reward.options": "{math: {hash_answers: false}}"}, "math", {"hash_answers": True}),
        ({"data.answer_format": "code", "reward.allow_code_execution": True}, "code", {"partial": False}),
        (
            {
                "data.answer_format": "mbpp",
                "reward.allow_code_execution": True,
                "reward.options": "{code: {partial: true}}",
            },
            "code",
            {"partial": False},
        ),
        ({"data.answer_format": "countdown"}, "countdown", {}),
    ],
)
def test_the_judge_is_that_of_the_references_form_whatever_the_runs_reward_gives_for_it(keys, name, options):
    judge = _judge(load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()]))
    assert judge.__name__ == name and options.items() <= judge.options.items()


def test_code_that_may_not_run_is_not_judged():
    with pytest.raises(BadInput, match=r"reward\.allow_code_execution"):
        _judge(load_config(CONFIG, ["--data.answer_format=code"]))


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"data.answer_format": "any"}, "does not say when an answer is correct"),
        ({"rollout.max_prompt_length": 2}, "prompts are longer than"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_load(heldout, keys, reason):
    with pytest.raises(BadInput, match=reason):
        heldout(**keys)


@pytest.mark.parametrize(("iterations", "due"), [(1, [1, 3, 6, 9]), (2, [1, 3, 7, 9])])
def test_due_steps_follow_the_generations(heldout, iterations, due):
    made = heldout(**{"watch.eval_every": 3, "train.num_iterations": iterations, "train.save_steps": 40})
    assert [step for step in range(1, 10, iterations) if made.is_due(step)] == due
