"""MBPP and HumanEval through the code reward: reference solutions pay 1.0, mutants what plain Python says."""

import importlib.util
import time
from pathlib import Path

import pytest

from kit.core.config.schema import DataConfig, RewardConfig
from kit.data.problems import chat_messages, read_problems
from reward import reward_functions

SCRIPT = Path(__file__).parents[1] / "evidence" / "code_mutants.py"
spec = importlib.util.spec_from_file_location("code_mutants", SCRIPT)
code_mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(code_mutants)


@pytest.fixture(scope="module")
def folder():
    found = code_mutants.data_folder()
    if found is None:
        pytest.skip(
            "needs mbpp/sanitized-mbpp.json and humaneval/HumanEval.jsonl.gz in the folder $GRPO_KIT_DATA or in a "
            "folder `shared/data` beside the checkout"
        )
    return found


def test_all_591_references_pay(folder):
    problems = code_mutants.problems(folder)
    assert len(problems) == 427 + 164
    options = {"code": {"timeout_s": 20.0}}  # one takes 3 s of CPU time where nothing else runs
    config = RewardConfig(functions=["code"], allow_code_execution=True, max_unknown_fraction=0.0, options=options)
    (function,), _ = reward_functions(config)
    completions = [f"I would write\n```python\n{problem['solution']}\n```\nThis works." for problem in problems]
    started = time.perf_counter()
    rewards = function(
        prompts=[problem["prompt"] for problem in problems],
        completions=completions,
        gold=[problem["gold"] for problem in problems],
    )
    assert [problem["id"] for problem, reward in zip(problems, rewards, strict=True) if reward != 1.0] == []
    assert time.perf_counter() - started < 400


@pytest.mark.parametrize("step", [24, pytest.param(1, marks=pytest.mark.sweep)])
def test_mutants_are_paid_as_plain_python_judges_them(folder, step):
    facts = code_mutants.compare(code_mutants.problems(folder)[::step])
    assert facts["unpaid"] == [] and facts["disagreements"] == []
    assert facts["mutants"] > 3 * facts["references"] and facts["mutants_that_pass"] < facts["mutants"] / 5


def test_mbpp_loads_as_problems_with_chat_prompts(folder):
    data = DataConfig(
        path=str(folder / "mbpp" / "sanitized-mbpp.json"),
        answer_format="mbpp",
        question_column="prompt",
        answer_column="test_list",
        prompt_suffix="\nAnswer with one Python code block.",
    )
    problems, report = read_problems(data, "train")
    assert report.bad == [] and len(problems) + len(report.duplicates) == 427
    assert chat_messages(data, problems[0])[-1]["content"].endswith("code block.")
