"""Rewards for form, length, repetition and language."""

import pytest

from kit.core.config.schema import RewardConfig
from kit.core.errors import BadInput
from reward import REWARDS, reward_functions
from reward.attacks import attempts, form

THOUGHT = ["<think>a</think><answer>5</answer>", "  <think>a b\n</think>\n\n<answer>5</answer>\n"]


def test_think_format_wants_each_part_once_in_order_and_not_empty():
    faulty = [*attempts("think_format, no form").values(), *form.NO_FORM["think_format"].values()]
    faulty += ["<think> \n.</think><answer>5</answer>", "<think>a</think><answer> </answer>"]
    messages = [[{"role": "assistant", "content": text}] for text in faulty + THOUGHT]
    for completions in (faulty + THOUGHT, messages):
        assert REWARDS["think_format"](None, completions) == [0.0] * len(faulty) + [1.0] * len(THOUGHT)


def test_a_template_that_opens_the_thought_is_an_option():
    assert REWARDS["think_format"](None, ["a</think><answer>5</answer>"], opened=True) == [1.0]
    assert REWARDS["think_format"](None, ["<think>a</think><answer>5</answer>"], opened=True) == [0.0]


def test_a_form_filled_with_the_prompt_is_empty():
    prompt = "Answer as <think>your thoughts</think><answer>your answer</answer>"
    assert REWARDS["think_format"]([prompt], ["<think>your thoughts</think><answer>your answer</answer>"]) == [0.0]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (5000, -1)]
)
def test_length_falls_linearly_through_the_soft_zone(tokens, expected):
    arguments = {"completion_ids": [[7] * tokens], "max_length": 100, "soft_zone": 20}
    assert REWARDS["length"](None, ["x"], **arguments) == [pytest.approx(expected)]


def test_length_without_a_zone_is_a_step_and_needs_the_tokens():
    lengths = REWARDS["length"](None, ["x", "y"], completion_ids=[[1] * 100, [1] * 101], max_length=101)
    assert lengths == [0.0, 0.0] or lengths == [0.0, -1.0]
    with pytest.raises(ValueError, match="completion_ids"):
        REWARDS["length"](None, ["x"], max_length=10)


REPETITION = [
    ("", 0.0),
    ("one two three", 0.0),
    (" ".join(f"word{n}" for n in range(1000)), 0.0),
    ("the same words again " * 500, -1.0),
    ("again " * 500, -1.0),
    ("a" * 10_000, -1.0),
    ("好" * 1000, -1.0),
    ("! " * 1000, -1.0),
]


@pytest.mark.parametrize(("text", "expected"), REPETITION, ids=lambda v: repr(v)[:15])
def test_repetition_takes_the_share_of_repeated_ngrams(text, expected):
    assert REWARDS["repetition"](None, [text]) == [pytest.approx(expected, abs=0.01)]


def test_repetition_grows_with_its_share():
    fresh = " ".join(f"word{n}" for n in range(500))
    shares = [REWARDS["repetition"](None, [fresh + " loop" * count])[0] for count in (0, 100, 300, 900)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 0.0 and -0.8 < shares[-1] < -0.5


LANGUAGE = [
    ("All of it is English.", {}, 0.0),
    ("", {}, 0.0),
    ("12 + 3 = 15", {}, 0.0),
    ("Let α = 𝑥 + 1.", {}, 0.0),
    ("это по-русски", {}, -1.0),
    ("это по-русски", {"scripts": ["cyrillic"]}, 0.0),
    ("我们来计算", {}, -1.0),
    ("我们 think", {"allowed": 0.0}, -2 / 7),
]


@pytest.mark.parametrize(("text", "options", "expected"), LANGUAGE)
def test_language_takes_the_share_of_letters_of_other_scripts(text, options, expected):
    assert REWARDS["language"](None, [text], **options) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("length", {}, "max_length (0) must be set"),
        ("length", {"max_length": 10, "soft_zone": 11}, "soft_zone"),
        ("repetition", {"ngram": 0}, "ngram (0)"),
        ("language", {"scripts": ["elvish"]}, "elvish"),
        ("think_format", {"think_tag": "think"}, "think_tag"),
        ("think_format", {"think_tag": "<answer>"}, "both"),
        ("math", {"tolerance": 1.5}, "tolerance is 1.5"),
        ("math", {"answer_tag": "answer"}, "answer_tag"),
        ("math", {"answer_tag": "<a>", "hash_answers": True}, "use one"),
    ],
)
def test_options_that_cannot_be_meant_are_bad_input(name, options, message):
    with pytest.raises(BadInput) as error:
        reward_functions(RewardConfig(functions=[name], options={name: options}))
    assert message in str(error.value)


def test_options_reach_the_function_from_the_configuration():
    options = {"length": {"max_length": 10, "soft_zone": 5}, "math": {"answer_tag": "<answer>"}}
    functions, _ = reward_functions(RewardConfig(functions=["math", "length"], options=options))
    batch = {"prompts": None, "completions": ["<answer>7</answer>"], "gold": ["7"], "completion_ids": [[1] * 8]}
    assert [function(**batch) for function in functions] == [[1.0], [pytest.approx(-0.6)]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", 1),
        (r"<answer>so \boxed{7}</answer>", 1),
        (r"\boxed{7}", 0),
        ("<answer>7", 0),
        ("<answer>8</answer> <answer>7</answer>", 1),
        ("<answer>7</answer> <answer>8</answer>", 0),
        ("<answer>7</answer> and <answer>", 1),
    ],
)
def test_a_stated_tag_holds_the_answer(text, expected):
    assert REWARDS["math"](None, [text], ["7"], answer_tag="<answer>") == [float(expected)]
    assert REWARDS["math"](None, ["#### 7"], ["7"], form="boxed", hash_answers=True) == [1.0]
    assert REWARDS["math"](None, ["#### 7"], ["7"], form="boxed") == [0.0]
