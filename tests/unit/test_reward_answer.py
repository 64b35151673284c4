"""Extraction and comparison of answers, as tables; nothing in the exact part may start a worker."""

import time

import pytest

from reward.answer import answers_equal, boxed_answer, boxes, final_answer, hash_answer, last_number, own_text
from reward.exact import MAX_ANSWER_CHARS, decide, gold_fault

EXTRACTED = [
    (r"so \boxed{42}.", "42"),
    (r"\boxed{1} then \boxed{2}", "2"),
    (r"first \boxed{3}, and some words after it", "3"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\}}", r"\}"),
    (r"\boxed {5}", "5"),
    (r"\boxed 5", "5"),
    (r"is $\boxed 5$.", "5"),
    (r"\boxed 5. Done", "5"),
    (r"\boxed{\boxed{7}}", "7"),
    (r"\boxed{ \boxed{\boxed{7}} }", "7"),
    (r"\boxed{5} and then \boxed{6", "5"),
    (r"\boxed{ {5 }", None),
    (r"the set {1, 2 and \boxed{5}", "5"),
    (r"a stray } and \boxed{5}", "5"),
    (r"\boxed{}", ""),
    (r"\boxed{  }", ""),
    (r"\boxedly{5}", None),
    (r"\fbox{5}", None),
    ("boxed{5}", None),
    ("#### 42", "42"),
    ("work\n#### -1,234.5 \nmore", "-1,234.5"),
    ("#### 1\n#### 2", "2"),
    ("#### \\$5", "\\$5"),
    ("##### 5", None),
    ("#### Conclusion", None),
    ("#### 7\n#### Conclusion", "7"),
    (r"#### 7 but \boxed{8}", "8"),
    ("the answer is 42", None),
    ("", None),
    ("#### ٤٢", "٤٢"),
]


@pytest.mark.parametrize(("text", "expected"), EXTRACTED)
def test_final_answer_is_the_last_balanced_box_else_the_last_hash(text, expected):
    assert final_answer(text) == expected


def test_boxed_and_hash_answers_do_not_mix():
    assert boxed_answer("#### 7") is None
    assert hash_answer(r"\boxed{7}") is None
    assert boxes(r"\boxed{1} \boxed 2 \boxed{\boxed{3}}") == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("it is 12.", "12"),
        ("-3", "-3"),
        ("5-3", "3"),
        ("costs $1,234.50 now", "$1,234.50"),
        ("3/4 of it", "3/4"),
        ("none", None),
        ("", None),
        ("1,23", "23"),
        ("x=-7", "-7"),
        ("10.", "10"),
    ],
)
def test_last_number_keeps_sign_commas_and_currency(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "\\boxed",
        "\\boxed 5 ",
        "\\boxed{5}",
        "\\boxed{}",
        "{",
        "}",
        "\\",
        "#### ",
        "####",
        "#### 1",
        "-",
        "9",
        "1,",
        "$",
        "\n",
        "\\boxed{\n",
        "\\boxed{ \\boxed{1}",
    ],
)
def test_a_megabyte_of_anything_is_searched_in_linear_time(unit):
    text = unit * (1_000_000 // len(unit))
    started = time.process_time()
    final_answer(text), last_number(text), own_text(text, [{"role": "user", "content": r"Use \boxed{}."}])
    assert time.process_time() - started < 5.0


def test_deeply_nested_boxes_cost_no_more_than_their_length():
    started = time.process_time()
    assert boxed_answer("\\boxed{" * 100_000 + "5" + "}" * 100_000) == "5"
    assert len(boxed_answer("\\boxed{" + "\\boxed{5} " * 100_000 + "}")) == 999_999
    assert time.process_time() - started < 5.0


EQUAL = [
    ("5²", "25"),
    ("2+3", "5"),
    ("42", "42"),
    (" 42. ", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"10\,000", "10000"),
    ("1,234,567.50", "1234567.5"),
    ("$1,234", "1234"),
    (r"\$5", "5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("−5", "-5"),
    ("5 dollars", "$5"),
    ("50%", "50"),
    (r"50\%", "50%"),
    ("50%", "0.5"),
    ("50 percent", "50%"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    ("5 centimeters", "5 cm"),
    ("5 mph", "5"),
    ("5 square feet", "5"),
    ("20 apples", "20"),
    (r"90^\circ", "90"),
    ("90°", "90 degrees"),
    ("5 million", "5000000"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac12", "1/2"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{2}", "-0.5"),
    (r"2\frac{1}{2}", "2.5"),
    ("2 1/2", "5/2"),
    (r"1.5\times10^{3}", "1500"),
    ("1.5 × 10^3", "1500"),
    ("1e3", "1000"),
    ("４２", "42"),
    ("٤٢", "42"),
    ("4\u200b2", "42"),
    ("10\u202f000", "10000"),
    ("1\u2009234\u2009567.5", "1234567.5"),
    ("x = 5", "5"),
    ("300 K", r"300\text{ K}"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("**5**", "5"),
    ("(B)", "B"),
    (r"\text{(B)}", "B"),
    (r"\text{Monday}", "monday"),
    ("Yes", "yes"),
    ("x^2 + 1", "x^2+1"),
    ("9" * 1200, "9" * 1200),
]

DIFFERENT = [
    ("41", "42"),
    ("-42", "42"),
    ("4.2", "42"),
    ("420", "42"),
    ("42.5", "42"),
    ("0.333333", "1/3"),
    ("3.14", "3.14159"),
    ("50.5%", "50"),
    ("5 m", "5 cm"),
    ("£5", "$5"),
    ("20 oranges", "20 apples"),
    ("5 million", "5"),
    (r"5\text{ million}", "5"),
    ("5 dozen", "5"),
    ("2 3", "5"),
    ("1 1", "11"),
    ("4 2", "42"),
    ("4=5", "5"),
    ("x+1=5", "5"),
    ("x = 4 = 5", "5"),
    ("x = 4 = 5", "x = 5"),
    ("f(x)=4=5", "5"),
    (r"x=4 \lor x=5", "5"),
    (r"x=4 \land x=5", "5"),
    (r"x=4 \Rightarrow x=5", "5"),
    (r"x=4 \text{ or } x=5", "5"),
    ("x=4 → x=5", "5"),
    (r"\sqrt2 = \sqrt3", r"\sqrt3"),
    (r"2 = \frac{\pi}{2}", r"\frac{\pi}{2}"),
    (r"\pi = 2\pi = 3\pi", r"3\pi"),
    (r"\pi = 3\pi", r"3\pi"),
    ("5 wrong", "5"),
    (r"5\text{ wrong}", "5"),
    ("5 feet wrong", "5"),
    ("5 root", "5"),
    ("5 roots", "5"),
    ("5 inverse", "5"),
    ("5 cube", "5"),
    ("5 squares", "5"),
    ("5 added", "5"),
    ("5 reciprocal", "5"),
    ("10\u202f00", "1000"),
    ("1\u20090000", "10000"),
    (r"\frac{1}{1}=5", "5"),
    (r"5\mathrm{k}", "5"),
    ("5 M", "5"),
    (r"5\text{ feet 6 inches}", "5"),
    (r"5\text{6}", "5"),
    (r"5 \mod 6", "5"),
    (r"4 \equiv 5", "5"),
    (r"5\ldots", "5"),
    ("5.33...", "5.33"),
    ("12_8", "12"),
    ("five", "5"),
    ("NaN", "5"),
    ("inf", "5"),
    ("-inf", "5"),
    ("nan", "nan5"),
    ("A", "B"),
    ("no", "yes"),
    (r"\text{on}", r"\text{no}"),
    ("Monday", "Tuesday"),
    ("", "5"),
    ("  ", "5"),
    (None, "5"),
    ("$", "5"),
    ("9" * 1_000_000, "9"),
    ("1" + "0" * 1200, "5"),
    ("x" * 1_000_000, "x"),
    ("(" * 5000 + ")" * 5000, "x"),
]

NOT_PLAIN = [
    ("5²", "52"),
    ("5x", "5"),
    ("5 i", "5"),
    ("5m", "5"),
    ("1/0", "5"),
    (r"\frac{5}{0}", "5"),
    ("1e99999", "5"),
    ("10^{10^{10}}", "5"),
    ("5!", "5"),
    ("--5", "-5"),
    ("1,23", "123"),
    ("5 or 6", "5"),
    ("y=5", "x=5"),
    ("1.2.3", "1.2"),
    ("3/4/5", "3"),
]


@pytest.mark.parametrize(("predicted", "gold"), EQUAL)
def test_equal_numbers_and_words_are_equal_without_a_worker(predicted, gold):
    assert decide(predicted, gold) is True


@pytest.mark.parametrize(("predicted", "gold"), DIFFERENT, ids=lambda value: repr(value)[:20])
def test_different_numbers_and_words_differ_without_a_worker(predicted, gold):
    assert decide(predicted, gold) is not True
    assert answers_equal(predicted, gold) is False


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [
        (r"x = \sqrt3", r"\sqrt3"),
        (r"f(x) = x^2 + 1", "x^2+1"),
        (r"f^{-1}(x) = \frac{x-1}{2}", r"\frac{x-1}{2}"),
        (r"\vec{v} = 3\pi", r"3\pi"),
        ("x=1, x=2", "1, 2"),
        (r"x = 1 \text{ or } x = 2", "1, 2"),
        ("x <= 5", r"x \le 5"),
        ("y = 2x + 1", "y = 1 + 2x"),
    ],
)
def test_a_named_value_and_several_named_values_still_equal_the_bare_ones(predicted, gold):
    assert decide(predicted, gold) is not False
    assert answers_equal(predicted, gold) is True


@pytest.mark.parametrize(("predicted", "gold"), NOT_PLAIN)
def test_what_is_not_a_plain_number_is_never_called_equal_by_the_exact_part(predicted, gold):
    assert decide(predicted, gold) is not True


def test_exponents_are_bounded_before_a_number_is_built():
    assert decide("1e1000", "5") is False
    assert decide("1e1001", "5") is None and decide(r"1\times10^{10001}", "5") is None


def test_numbers_are_exact_far_beyond_floats():
    assert decide("0.1" + "0" * 30 + "1", "0.1") is False
    assert decide("123456789012345678901234567890", "123456789012345678901234567891") is False
    assert decide("1/3", "33333333333333333333/100000000000000000000") is False


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        ("", "empty"),
        ("\u200b", "empty"),
        ("nan", "'nan'"),
        ("-inf", "'-inf'"),
        ("None", "'None'"),
        (r"\frac{1}{2", "unbalanced"),
        ("5}", "unbalanced"),
        ("9" * (MAX_ANSWER_CHARS + 1), "4,097 characters"),
    ],
)
def test_a_reference_that_cannot_be_one_is_named(gold, why):
    problem = gold_fault(gold)
    assert why in problem


@pytest.mark.parametrize("gold", ["42", "-1,000", r"\frac{1}{2}", r"\{1, 2\}", r"[0, 1)", "x^2", "(B)"])
def test_sound_references_pass(gold):
    assert gold_fault(gold) is None


PROMPT = [
    {"role": "system", "content": "Solve the problem. Put the final answer in \\boxed{}."},
    {"role": "user", "content": "Example: 3+4?\n\nThe answer is \\boxed{7}.\n\nNow: what is 2+5?\n#### 7"},
]
ECHOES = [
    (PROMPT[1]["content"], None),
    (PROMPT[0]["content"] + "\n" + PROMPT[1]["content"], None),
    ("You asked: The answer is \\boxed{7}. I do not know.", None),
    ("Put the final answer in \\boxed{}. I will.", None),
    (PROMPT[1]["content"] + "\nIt is \\boxed{8}", "8"),
    ("\\boxed{7}", "7"),
    ("2+5=7, so\n#### 7", "7"),
    ("Thus the answer is \\boxed{7}.", "7"),
]


@pytest.mark.parametrize(("completion", "expected"), ECHOES)
@pytest.mark.parametrize("as_text", [False, True], ids=["messages", "text"])
def test_an_answer_echoed_from_the_prompt_is_not_the_models(completion, expected, as_text):
    prompt = "\n".join(message["content"] for message in PROMPT) if as_text else PROMPT
    said = completion if as_text else [{"role": "assistant", "content": completion}]
    assert final_answer(own_text(said, prompt)) == expected


@pytest.mark.parametrize(
    "completion", [None, "", [], [{"role": "assistant"}], [{"role": "assistant", "content": None}]]
)
def test_an_empty_completion_has_no_answer(completion):
    assert final_answer(own_text(completion, PROMPT)) is None
    assert final_answer(own_text(completion, None)) is None
