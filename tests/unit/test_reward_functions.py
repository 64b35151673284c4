"""The reward functions in TRL's signature, and how a configuration names them."""

import inspect
import pickle
import sys
from pathlib import Path
from typing import Literal

import pytest

from kit.core.config.load import match_type
from kit.core.config.schema import RewardConfig
from kit.core.errors import BadInput, CheckFailed
from reward import MODELS, REWARDS, function_options, reward_functions
from reward.pool import UnknownBudget, Verdict, shared_pool
from tests import processes

ROOT = Path(__file__).parents[2]
PROMPT = [{"role": "user", "content": "What is 2+5?\nPut the final answer in \\boxed{}."}]


def score(name, completions, gold="7", prompt=PROMPT, **options):
    messages = [[{"role": "assistant", "content": text}] for text in completions]
    batch = {"prompts": [prompt] * len(completions), "gold": [gold] * len(completions), "problem_id": ["p"], **options}
    as_messages = REWARDS[name](completions=messages, completion_ids=[], trainer_state=None, **batch)
    assert as_messages == REWARDS[name](completions=list(completions), **batch)  # both of TRL's forms
    return as_messages


NAMES = ("math", "gsm8k_strict", "gsm8k_lenient", "boxed_format")
TABLE = [
    # completion, math (form: boxed), gsm8k_strict, gsm8k_lenient, boxed_format
    (r"so \boxed{7}", 1, 1, 1, 1),
    (r"so \boxed{8}", 0, 0, 0, 1),
    (r"\boxed{7} in the middle of it", 1, 1, 1, 1),
    (r"\boxed{8} no, \boxed{7}", 1, 1, 1, 0),
    (r"\boxed{7} no, \boxed{8}", 0, 0, 0, 0),
    (r"\boxed{\frac{14}{2}}", 1, 1, 1, 1),
    (r"\boxed{}", 0, 0, 0, 0),
    (r"\boxed{7", 0, 0, 1, 0),
    ("#### 7", 0, 1, 1, 0),
    ("#### 8", 0, 0, 0, 0),
    ("the answer is 7", 0, 0, 1, 0),
    ("7 or maybe 8", 0, 0, 0, 0),
    ("Put the final answer in \\boxed{}. \\boxed{7}", 1, 1, 1, 1),
    ("", 0, 0, 0, 0),
    ("no idea", 0, 0, 0, 0),
    (r"\boxed{NaN}", 0, 0, 0, 1),
    (r"\boxed{٧}", 1, 1, 1, 1),
    ("7" * 1_000_000, 0, 0, 0, 0),
    ("\\boxed{" * 100_000, 0, 0, 0, 0),
    ("\\boxed{" + "7" * 1_000_000 + "}", 0, 0, 0, 1),
]


@pytest.mark.parametrize("name", NAMES)
def test_each_reward_pays_what_its_definition_says(name):
    completions, *expected = zip(*TABLE, strict=True)
    options = {"form": "boxed"} if name == "math" else {}
    assert tuple(score(name, completions, **options)) == expected[NAMES.index(name)]


@pytest.mark.parametrize(
    "name", ["math", "gsm8k_strict", "gsm8k_lenient", "arithmetic", "boxed_format", "think_format"]
)
def test_a_completion_that_repeats_a_solved_example_of_the_prompt_earns_nothing(name):
    prompt = [{"role": "user", "content": "3+4? The answer is \\boxed{7}.\n\n2+5?"}]
    assert score(name, ["3+4? The answer is \\boxed{7}.\n\n2+5?"], prompt=prompt) == [0.0]


def test_prompts_may_be_absent_and_a_missing_or_short_gold_column_is_an_error():
    assert REWARDS["math"](None, [r"\boxed{7}"], ["7"]) == [1.0]
    with pytest.raises(TypeError, match="gold"):
        REWARDS["math"](prompts=None, completions=["7"])
    with pytest.raises(ValueError):
        REWARDS["math"](prompts=None, completions=["7", "7"], gold=["7"])


def test_configured_functions_have_the_names_and_weights_of_the_configuration():
    functions, weights = reward_functions(RewardConfig(functions=["math", "boxed_format"], weights=[1.0, 0.1]))
    assert [function.__name__ for function in functions] == ["math", "boxed_format"]
    assert weights == [1.0, 0.1]
    assert reward_functions(RewardConfig(functions=["math", "boxed_format"]))[1] == [1.0, 1.0]
    batch = {"prompts": [PROMPT], "completions": [r"\boxed{7}"], "gold": ["7"]}
    assert [function(**batch) for function in functions] == [[1.0], [1.0]]


def test_a_configured_function_survives_pickling():
    function = reward_functions(RewardConfig(functions=["gsm8k_strict"]))[0][0]
    copy = pickle.loads(pickle.dumps(function))
    assert copy(prompts=None, completions=["#### 7"], gold=["7"]) == [1.0] and copy.__name__ == "gsm8k_strict"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": ["maths"]}, "unknown reward 'maths'. Did you mean 'math'"),
        ({"functions": ["gsm8k"]}, "Did you mean 'gsm8k_"),
        ({"functions": ["zzz"]}, "There are math, gsm8k_strict"),
        ({"functions": []}, "reward.functions is empty"),
        ({"functions": ["math", "math"]}, "twice"),
        ({"functions": ["math"], "weights": [1.0, 2.0]}, "2 values for 1 reward.functions"),
        ({"timeout_s": 0.0}, "reward.timeout_s (0.0)"),
        ({"workers": 0}, "reward.workers (0)"),
        ({"max_unknown_fraction": 2.0}, "max_unknown_fraction is 2.0"),
    ],
)
def test_a_wrong_reward_configuration_is_bad_input(fields, message):
    with pytest.raises(BadInput) as error:
        reward_functions(RewardConfig(**fields))
    assert message in str(error.value)


FORMS = Literal["boxed", "hash"]


def fussy(
    prompts, completions, gold, *, pool=None, budget=None, ordered: bool = True, digits: int | None = None,
    form: FORMS = "boxed", scale: float = 1.0, tags: list[str] = (), **_,
):  # fmt: skip
    return [scale if ordered else 0.0 for _ in completions]


def check_fussy(*, scale, digits, **_):
    if scale < 0:
        raise ValueError(f"scale is {scale}, it must not be negative (digits {digits})")


fussy.check_options = check_fussy


@pytest.fixture
def fussy_reward(monkeypatch):
    monkeypatch.setitem(REWARDS, "fussy", fussy)


def test_options_reach_the_function_as_their_types_and_a_column_does_not_replace_them(fussy_reward):
    options = {"fussy": {"scale": 2, "digits": None, "tags": ["a"]}}
    (function,), _ = reward_functions(RewardConfig(functions=["fussy"], options=options))
    assert function.options == {"scale": 2.0, "digits": None, "tags": ["a"]}
    assert function(prompts=None, completions=["x"], gold=["y"], scale=["z"]) == [2.0]
    assert pickle.loads(pickle.dumps(function)).options == function.options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusy": {}}, "reward.options.fusy: 'fusy' is not a reward function. Did you mean 'fussy'?"),
        ({"math": {}}, "'math' is not in reward.functions"),
        ({"fussy": {"orderd": False}}, "reward.options.fussy.orderd: unknown option. Did you mean 'ordered'?"),
        ({"fussy": {"pool": None}}, "unknown option"),
        ({"fussy": {"gold": "7"}}, "unknown option"),
        ({"fussy": {"ordered": 1}}, "reward.options.fussy.ordered must be true or false, it is 1."),
        ({"fussy": {"digits": "3"}}, "must be an integer or null"),
        ({"fussy": {"form": "latex"}}, "must be one of boxed, hash"),
        ({"fussy": {"tags": [1]}}, "must be a list of text"),
        ({"fussy": [1]}, "must be a group of options"),
        ({"fussy": {"scale": -1.0}}, "reward.options.fussy: scale is -1.0, it must not be negative (digits None)"),
    ],
)
def test_a_wrong_option_is_bad_input_with_the_nearest_name(fussy_reward, options, message):
    with pytest.raises(BadInput) as error:
        reward_functions(RewardConfig(functions=["fussy"], options=options))
    assert message in str(error.value)


def test_a_function_that_runs_code_needs_the_switch(monkeypatch, fussy_reward):
    monkeypatch.setattr(fussy, "executes_code", True, raising=False)
    with pytest.raises(BadInput, match="allow_code_execution to true"):
        reward_functions(RewardConfig(functions=["fussy"]))
    assert reward_functions(RewardConfig(functions=["fussy"], allow_code_execution=True))


@pytest.mark.parametrize("name", REWARDS)
def test_every_option_of_every_reward_has_a_type_and_a_default_of_that_type(name):
    for option, (hint, default) in function_options(name).items():
        is_required = default is inspect.Parameter.empty and name in MODELS
        assert is_required or match_type(default, hint)[0], (name, option, hint, default)


def test_a_hang_is_none_and_a_spent_budget_stops_with_the_answer_that_hung(monkeypatch):
    (function,), _ = reward_functions(RewardConfig(timeout_s=20.0, workers=1, max_unknown_fraction=0.01))
    pool = shared_pool(1, 20.0)
    assert pool.compare([("1+1", "2")])[0].value is True
    # Only this process gets the short timeout; a worker's CPU-time limit could otherwise expire first.
    monkeypatch.setattr(pool, "timeout_s", 0.5)
    tower = r"\boxed{10^{10^{10}}}"
    batch = {"prompts": None, "gold": ["7", "7"]}
    assert function(completions=[tower, r"\boxed{7}"], **batch) == [None, 1.0]
    assert function.unknown_counts == {"timeout": 1}
    with pytest.raises(CheckFailed, match=r"10\^\{10\^\{10\}\}"):
        function(completions=[tower, tower], **batch)


def test_plain_numbers_need_no_worker_and_no_sympy():
    code = (
        "import sys, time\n"
        "from kit.core.config.schema import RewardConfig\n"
        "from reward import reward_functions\n"
        "from reward.pool import shared_pool\n"
        "names = ['math', 'gsm8k_lenient', 'boxed_format']\n"
        "config = RewardConfig(functions=names, max_unknown_fraction=0.0)\n"
        "completions = ['\\\\boxed{1,234}', 'no answer', '\\\\boxed{1234.5}']\n"
        "for function in reward_functions(config)[0]:\n"
        "    function(prompts=None, completions=completions, gold=['1234'] * 3)\n"
        "assert shared_pool(2, 2.0).pids() == []\n"
        "heavy = {'sympy', 'math_verify', 'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_an_empty_box_is_an_answer_and_no_reason_to_look_for_a_number():
    texts = ["it is 7, \\boxed{}", "it is 7", "it is 7, \\boxed{8}"]
    assert REWARDS["gsm8k_lenient"](None, texts, ["7"] * 3) == [0.0, 1.0, 0.0]
    assert REWARDS["gsm8k_strict"](None, texts, ["7"] * 3) == [0.0, 0.0, 0.0]


def test_the_options_of_math_reach_the_comparison():
    near = ["\\boxed{5.04}"], ["5"]
    assert [REWARDS["math"](None, *near, tolerance=share) for share in (0.0, 0.01)] == [[0.0], [1.0]]


def test_an_undecided_answer_is_none_and_counted(monkeypatch):
    undecided = [Verdict(None, "timeout"), Verdict(True, "exact"), Verdict(False, "exact")]
    monkeypatch.setattr("reward.score.judge", lambda pairs, pool, policy: undecided)
    budget = UnknownBudget("math", 0.5)
    assert REWARDS["math"](None, ["a", "b", "c"], ["1", "2", "3"], budget=budget) == [None, 1.0, 0.0]
    assert budget.counts == {"timeout": 1}
