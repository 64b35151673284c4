"""Tasks of an evaluation: hostile completions of each, what is right or undecided, and which input is refused."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from eval import tasks
from eval.generate import Generation
from eval.problems import held_out
from eval.record import Record
from eval.score import Scoring, score, summarize
from eval.tasks import TASKS, scoring_of, task_config, task_values
from kit.core.config.load import config_from_dict
from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, write_json
from kit.data.problems import Problem, chat_messages, load_problems
from reward.code_gold import gold_from_row

MBPP = {"prompt": "Write a function add.", "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
MBPP |= {"code": "def add(a, b):\n    return a + b", "test_imports": []}
HUMAN = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n: int) -> int:\n    """ Two times n.\n    >>> twice(2)\n    4\n    """\n',
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
}
ADD = "def add(a, b):\n    return a + b"


def config(**groups: dict) -> Config:
    values = {"run": {"name": "t"}, "model": {"id": "m"}, "train": {"max_steps": 1}}
    groups.setdefault("data", {"path": "problems"})
    return config_from_dict({**values, **groups})


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    (file := folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(records: list[Record]) -> str:
    """right, wrong, undecided or unparsed, for each record."""
    named = {True: "right", False: "wrong", None: "undecided"}
    return " ".join(named[one.correct] if one.parsed else "unparsed" for one in records)


def judged(scoring: Scoring, problem: Problem, *texts: str, prompt: str | None = None) -> list[Record]:
    turns = [{"role": "user", "content": prompt or problem.question}]
    made = [Generation(text, text, 9, True, False) for text in texts]
    return score([problem], made, [turns], None, scoring)


def code_problem(row: dict, form: str) -> Problem:
    gold, error = gold_from_row(row, form, "test_list" if form == "mbpp" else "test")
    assert gold, error
    return Problem("p1", row["prompt"].strip(), gold, "test.jsonl:1")


def code_scoring(form: str, **reward: object) -> Scoring:
    options = {"code": {"timeout_s": 1.0, **reward}}
    return scoring_of(
        config(data={"path": "x", "answer_format": form}, reward={"allow_code_execution": True, "options": options})
    )


# ------------------------------------------------------------------------------------------------------------ math


def test_svamp_asks_body_and_question_and_its_decimal_answers_are_numbers(tmp_path):
    rows = [{"Body": "There are 87 oranges and 290 bananas in 2 groups", "Question": "How big?", "Answer": 145.0}]
    file = write(tmp_path, "svamp.jsonl", [*rows, {"Body": "It cost $ 6.", "Question": "How much?", "Answer": 6.5}])
    asked = task_config(config(), "svamp", file)
    problems = load_problems(asked.data, "eval")
    assert [problem.question for problem in problems] == [
        "There are 87 oranges and 290 bananas in 2 groups. How big?",
        "It cost $ 6. How much?",
    ]
    found = judged(
        scoring_of(asked), problems[0], "\\boxed{145}", "\\boxed{145.0}", "#### 145", "\\boxed{290/2}", "\\boxed{14.5}"
    )
    assert words(found) == "right right right right wrong"
    assert [record.sample for record in found] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("question", ["problem", "question"])
def test_math500_is_read_with_either_name_of_its_question(tmp_path, question):
    file = write(tmp_path, "math.jsonl", [{question: "Half?", "answer": "\\frac{1}{2}", "solution": "s", "level": 1}])
    asked = task_config(config(), "math500", file)
    (problem,) = load_problems(asked.data, "eval")
    found = judged(scoring_of(asked), problem, "\\boxed{0.5}", "\\boxed{\\dfrac12}", "\\boxed{2}", "1/2", "\\boxed{\\")
    assert words(found) == "right right wrong unparsed unparsed"


def test_a_policy_is_asked_in_the_words_it_was_trained_with_where_the_answers_are_of_one_kind(tmp_path):
    own = {"path": "x", "prompt_suffix": "\nBox it.", "system_prompt": "Be brief.", "answer_format": "boxed"}
    file = write(tmp_path, "a.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    for task, suffix in (("gsm8k", "\nBox it."), ("mbpp", TASKS["mbpp"].prompt_suffix)):
        data = task_config(config(data=own), task, file).data
        assert (data.prompt_suffix, data.system_prompt) == (suffix, "Be brief.")
    code = {**own, "answer_format": "mbpp", "prompt_suffix": "\nCode."}
    asked = task_config(config(data=code), "gsm8k", file, ["--data.max_eval_problems=5"])
    assert (asked.data.prompt_suffix, asked.data.max_eval_problems) == (tasks.BOX, 5)
    assert asked.data.path is None and asked.data.eval_path == str(file)
    (problem,) = load_problems(asked.data, "eval")
    assert chat_messages(asked.data, problem)[-1]["content"] == "1+1?" + tasks.BOX
    hub = task_config(config(), "humaneval").data
    names = (hub.id, hub.eval_split, hub.question_column, hub.answer_column, hub.path, hub.eval_path)
    assert names == ("openai/openai_humaneval", "test", "prompt", "test", None, None)


def test_countdown_is_judged_by_its_own_rules():
    problem = Problem("p", "Reach 22 with 3, 5, 7.", '{"numbers": [3, 5, 7], "target": 22}', "t:1")
    scoring = scoring_of(config(data={"path": "x", "answer_format": "countdown"}))
    found = judged(scoring, problem, "\\boxed{3*5+7}", "\\boxed{22}", "none", "\\boxed{7*3+1}")
    assert words(found) == "right wrong unparsed wrong"


# ------------------------------------------------------------------------------------------------------------ code

FORGED = [
    "import os\nprint('passed')\nos._exit(0)\n" + ADD,
    "class Always:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Always()",
    "import sys\ndef add(a, b):\n    sys.exit(0)",
    "def add(a, b):\n    raise AssertionError('assert add(1, 2) == 3 passed')",
    "import builtins\nbuiltins.AssertionError = ValueError\ndef add(a, b):\n    return 4",
]


@pytest.mark.parametrize(
    ("text", "parsed", "correct", "strict"),
    [
        (f"Sure:\n```python\n{ADD}\n```", True, True, True),
        (f"```\n{ADD}\n```", True, True, True),
        (f"```python\n{ADD}", True, True, True),  # cut before its closing fence
        (ADD, True, True, False),
        ("```python\ndef add(a, b):\n    return a - b\n```", True, False, False),
        ("```python\ndef add(a, b):\n    while True: pass\n```", True, False, False),
        ("```python\ndef add(a b)\n```", True, False, False),
        ("```python\n```", False, False, False),
        ("I would add the two numbers.", False, False, False),
        ("", False, False, False),
        ("0", False, False, False),
        ("Yes", False, False, False),
        ("add = lambda a, b: a + b", True, True, False),
        ("```python\ndef add(a, b):\n    return 3\n```", True, False, False),  # passes one of its two tests
        (f"```python\n{ADD}\n```\nor better\n```python\ndef add(a, b):\n    return 0\n```", True, False, False),
        ("def add(a, b): return a + b\n" + "#" * 200_000, False, False, False),
        *((f"```python\n{forged}\n```", True, False, False) for forged in FORGED),
    ],
)
def test_code_is_right_when_the_sandbox_says_so_and_strictly_right_in_a_block(text, parsed, correct, strict):
    (record,) = judged(code_scoring("mbpp", partial=True), code_problem(MBPP, "mbpp"), text)
    assert record.reward == float(correct)
    assert (record.parsed, record.correct, record.correct_strict) == (parsed, correct, strict)
    assert record.answer is None if not parsed else record.answer.strip() in text


def test_humaneval_may_be_continued_and_quoting_its_question_is_no_leak():
    problem, scoring = code_problem(HUMAN, "humaneval"), code_scoring("humaneval")
    whole = HUMAN["prompt"] + "    return 2 * n\n"
    asked = problem.question + TASKS["humaneval"].prompt_suffix
    texts = [
        f"```python\n{whole}```",
        "```python\n    return 2 * n\n```",
        f"```python\n{HUMAN['prompt']}    pass\n```",
    ]
    found = judged(scoring, problem, *texts, prompt=asked)
    assert [(record.correct, record.prompt_leak) for record in found] == [(True, False), (True, False), (False, False)]
    (echoed,) = judged(scoring, problem, f"{TASKS['humaneval'].prompt_suffix}\n```python\n{whole}```", prompt=asked)
    assert echoed.prompt_leak


def test_what_the_sandbox_could_not_decide_is_undecided_and_not_wrong(monkeypatch):
    from reward import code as reward_code
    from reward.sandbox import Outcome

    class Broken:
        def run(self, jobs):
            return [Outcome(0, 1, "sandbox", "no namespace") for _ in jobs]

    scoring, problem = code_scoring("mbpp"), code_problem(MBPP, "mbpp")
    monkeypatch.setattr(sys.modules[reward_code.__module__], "shared_sandbox", lambda *_: Broken())
    (record,) = judged(scoring, problem, f"```python\n{ADD}\n```")
    assert (record.parsed, record.correct, record.correct_strict, record.reward) == (True, None, None, None)
    with pytest.raises(CheckFailed, match="none of 1"):
        summarize([record])


def test_equal_completions_of_a_problem_are_run_once(monkeypatch):
    from reward import code as reward_code
    from reward.sandbox import Outcome

    ran = []

    class Counting:
        def run(self, jobs):
            ran.extend(jobs)
            return [Outcome(2, 2, "passed") for _ in jobs]

    scoring, problem = code_scoring("mbpp"), code_problem(MBPP, "mbpp")
    monkeypatch.setattr(sys.modules[reward_code.__module__], "shared_sandbox", lambda *_: Counting())
    found = judged(scoring, problem, *[f"```python\n{ADD}\n```"] * 3, f"```python\n{ADD} + 0\n```")
    assert [record.correct for record in found] == [True] * 4 and len(ran) == 2


def test_code_does_not_run_without_being_allowed():
    data = {"path": "x", "answer_format": "mbpp"}
    with pytest.raises(BadInput, match="--allow_code_execution"):
        scoring_of(config(data=data))
    with pytest.raises(BadInput, match="--allow_code_execution"):
        scoring_of(config(data=data, eval={"reward": "code"}))
    with pytest.raises(BadInput, match=r"data\.answer_format is plain"):
        scoring_of(config(eval={"reward": "code"}, reward={"allow_code_execution": True}))


# --------------------------------------------------------------------------------------------------------- rewards

REWARDS = """
import asyncio, math

def brief(completions, gold, **kwargs):
    return [len(g) / max(len(c[-1]["content"]), 1) for c, g in zip(completions, gold)]

def named(prompts, completions, problem_id):
    return [1 if p[-1]["content"] and i == "p1" else 0 for p, i in zip(prompts, problem_id)]

def torn(completions, **kwargs):
    return [None, float("nan"), math.inf, True][: len(completions)]

def short(completions, **kwargs):
    return [1.0]

def words(completions, **kwargs):
    return ["good" for _ in completions]

def broken(completions, **kwargs):
    raise KeyError("gold")

def demanding(completions, ground_truth):
    return []

def runs_code(completions, **kwargs):
    return [1.0 for _ in completions]

async def leveled(completions, level, gold):
    await asyncio.sleep(0)
    return [float(one) for one in level]

async def sleepy(completions):
    await asyncio.sleep(9)

def grouped(completions):
    return []
grouped.group = True

runs_code.executes_code = True
notafunction = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "kit_test_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "kit_test_rewards", raising=False)
    return "kit_test_rewards"


PLAIN = Problem("p1", "Say ab.", "ab", "t:1")


def test_a_reward_of_the_users_decides_from_the_threshold_on_and_its_mean_is_reported(module):
    scoring = scoring_of(config(eval={"reward": f"{module}:brief", "reward_threshold": 0.5}))
    found = judged(scoring, PLAIN, "ab", "abcd", "abcde", "")
    assert [record.correct for record in found] == [True, True, False, True]
    assert [record.reward for record in found] == [1.0, 0.5, 0.4, 2.0]
    assert [record.parsed for record in found] == [True, True, True, False]
    assert summarize(found)["mean_reward"] == pytest.approx(3.9 / 4)
    assert scoring.version and json.dumps([dataclasses.asdict(record) for record in found])


def test_a_reward_of_none_or_nan_is_undecided(module):
    found = judged(scoring_of(config(eval={"reward": f"{module}:torn"})), PLAIN, "a", "b", "c", "d")
    assert [record.correct for record in found] == [None, None, True, True]
    assert [record.reward for record in found][:2] == [None, None]
    assert json.dumps(summarize(found), allow_nan=False), "an infinite reward has no mean, and eval.json is written"
    (record,) = judged(scoring_of(config(eval={"reward": f"{module}:named"})), PLAIN, "ab")
    assert (record.correct, record.reward) == (True, 1.0)  # it gets the columns that it names


def test_an_async_reward_gets_the_columns_of_a_conversations_row(module, tmp_path):
    (tmp_path / "problems").mkdir()
    prompt = [{"role": "user", "content": "Say ab."}]
    rows = [{"prompt": prompt, "reward_model": {"ground_truth": "ab"}, "level": level} for level in (1, 0)]
    rows[1]["prompt"] = [{"role": "user", "content": "Hm."}, {"role": "assistant", "content": "?"}, *prompt]
    write(tmp_path / "problems", "test.jsonl", rows)
    asked = config(data={"path": "problems", "answer_format": "any"}, eval={"reward": f"{module}:leveled"})
    problems, scoring = load_problems(asked.data, "eval"), scoring_of(asked)
    found = [judged(scoring, problem, "ab")[0] for problem in problems]
    assert [(record.correct, record.reward) for record in found] == [(True, 1.0), (False, 0.0)]
    assert [record.prompt_leak for record in found] == [False, False]
    reward = {"request_timeout_s": 0.1}
    (record,) = judged(scoring_of(config(eval={"reward": f"{module}:sleepy"}, reward=reward)), problems[0], "ab")
    assert (record.correct, record.reward) == (None, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", "1 values for 2 completions"), ("words", "'good', expected a number"), ("broken", "KeyError: 'gold'")],
)
def test_what_is_no_reward_stops_the_cell(module, name, message):
    with pytest.raises(CheckFailed, match=message):
        judged(scoring_of(config(eval={"reward": f"{module}:{name}"})), PLAIN, "a", "b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "kit_test_rewards:demanding",
            "needs an argument 'ground_truth'; a reward gets prompts, completions, gold, problem_id, "
            "question, answer, level",
        ),
        ("kit_test_rewards:grouped", "judges the completions of a group together"),
        ("kit_test_rewards:notafunction", "is a int, not a function"),
        ("kit_test_rewards:missing", "cannot be imported: AttributeError"),
        ("no_such_module_anywhere:f", "cannot be imported: ModuleNotFoundError"),
        (":f", "cannot be imported"),
        ("kit_test_rewards:runs_code", "--allow_code_execution"),
        ("mth", "Did you mean math"),
        ("length", "counts a run's tokens"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_beforehand(module, tmp_path, name, message):
    (tmp_path / "problems").mkdir()
    write(tmp_path / "problems", "test.jsonl", [{"question": "1?", "answer": "1", "level": 3}])
    with pytest.raises(BadInput, match=message):
        scoring_of(config(eval={"reward": name}))


def test_a_reward_of_the_kit_is_named_and_takes_the_runs_options():
    problem = Problem("p", "?", "3.14", "t:1")
    texts = ["<answer>3.14</answer>", "<answer>3.141</answer>", "\\boxed{3.14}"]
    reward = {"options": {"math": {"answer_tag": "<answer>", "tolerance": 0.01}}}
    found = judged(scoring_of(config(eval={"reward": "math"}, reward=reward)), problem, *texts)
    assert words(found) == "right right unparsed"


def test_any_jsonl_needs_a_reward_and_keeps_references_as_they_are(tmp_path, module):
    rows = [{"prompt": "Say ab.", "gold": {"must": ["a", "b"]}}, {"prompt": "Say nothing.", "gold": ""}]
    asked = task_config(config(), "jsonl", write(tmp_path, "a.jsonl", rows))
    assert [json.loads(p.gold) if p.gold else "" for p in load_problems(asked.data, "eval")] == [rows[0]["gold"], ""]
    with pytest.raises(BadInput, match="Name a reward"):
        scoring_of(asked)
    assert scoring_of(task_config(asked, "jsonl", tmp_path / "a.jsonl", [f"--eval.reward={module}:brief"]))


# ----------------------------------------------------------------------------------------------------- bad problems


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("gsm8k", [{"question": "1?"}], "a.jsonl:1 has no column 'answer'"),
        ("gsm8k", [{"question": "1?", "answer": "#### 1"}, {"question": "2?"}], "a.jsonl:2: no column 'answer'"),
        ("gsm8k", [{"question": "1?", "answer": "1"}], "a.jsonl:1: the answer has no '#### number'"),
        ("svamp", [{"Body": "b", "Answer": 1.0}], "a.jsonl:1 has no column"),
        ("svamp", [{"Body": "b", "Question": "", "Answer": 1.0}], "a.jsonl:1: the question is empty"),
        ("math500", [{"problem": "p", "solution": "s"}], "a.jsonl:1 has no column 'answer'"),
        ("mbpp", [{"prompt": "p", "test_list": []}], "a.jsonl:1: the tests are"),
        ("mbpp", [MBPP, {"prompt": "p", "test_list": ["assert f(1) =="]}], "a.jsonl:2: SyntaxError in the tests"),
        ("humaneval", [{"prompt": "p", "test": "x = 1"}], "a.jsonl:1: "),
        ("jsonl", [{"question": "q"}], "a.jsonl:1 has no column 'answer'"),
        ("jsonl", [{"question": 3, "answer": ""}], "a.jsonl:1: the question is 3"),
    ],
)
def test_rows_that_lack_something_are_named_by_file_and_line(tmp_path, task, rows, message):
    asked = task_config(config(), task, write(tmp_path, "a.jsonl", rows))
    with pytest.raises(BadInput) as caught:
        load_problems(asked.data, "eval")
    assert f"{tmp_path}/{message}" in str(caught.value)


def test_an_unknown_task_or_one_without_problems_is_refused(tmp_path):
    with pytest.raises(BadInput, match="Did you mean svamp"):
        task_values({}, "swamp", "x")
    with pytest.raises(BadInput, match="name a file with --data"):
        task_values({}, "jsonl")
    with pytest.raises(BadInput, match="does not exist"):
        task_values({}, "gsm8k", tmp_path / "nowhere.jsonl")


def test_another_task_is_still_checked_against_what_the_run_was_trained_on(tmp_path):
    train = write(tmp_path, "train.jsonl", [{"question": "Tom has 12 eggs; how many?", "answer": "12"}])
    own = config(data={"path": str(train), "eval_path": "unused"})
    leaking = write(tmp_path, "task.jsonl", [{"question": "tom has  12 eggs; how many", "answer": "#### 12"}])
    asked = task_config(own, "gsm8k", leaking)
    with pytest.raises(CheckFailed, match="1 of 1 held-out problems are training problems"):
        held_out(asked.data, 10, own.data)
    clean = write(tmp_path, "clean.jsonl", [{"question": "Tom has 13 eggs; how many?", "answer": "#### 13"}])
    assert len(held_out(task_config(own, "gsm8k", clean).data, 10, own.data)) == 1


def test_columns_named_for_a_task_are_not_those_of_the_training_problems(tmp_path):
    from eval.asked import evaluation_config
    from eval.run import parse_arguments

    train = write(tmp_path, "train.jsonl", [{"question": "Tom has 12 eggs; how many?", "answer": "12"}])
    other = write(tmp_path, "task.jsonl", [{"asked": "Tom has 12 eggs; how many?", "right": "12"}])
    run = RunDir(tmp_path)
    write_json(run.config_file, {"config": dataclasses.asdict(config(data={"path": str(train)}))})
    words = ["--run", str(tmp_path), "--task", "svamp", "--data", str(other)]
    words += ["--data.question_column", "asked", "--data.answer_column", "right"]
    asked, training, _ = evaluation_config(run, *parse_arguments(words))
    assert asked.data.question_column == "asked"
    with pytest.raises(CheckFailed, match="1 of 1 held-out problems are training problems"):
        held_out(asked.data, 10, training)


def test_the_known_problem_sets_load_whole():
    folder = Path(os.environ.get("GRPO_KIT_DATA") or Path(__file__).parents[3] / "shared" / "data")
    files = {
        **{"gsm8k": ("gsm8k", 1319), "svamp": ("svamp", 1000), "mbpp": ("mbpp/sanitized-mbpp.json", 427)},
        "humaneval": ("humaneval/HumanEval.jsonl.gz", 164),
    }
    if not all((folder / file).exists() for file, _ in files.values()):
        pytest.skip(
            "needs the problem sets in the folder $GRPO_KIT_DATA or in a folder `shared/data` beside the checkout"
        )
    for task, (file, count) in files.items():
        problems = load_problems(task_config(config(), task, folder / file).data, "eval")
        assert len(problems) == count, task
