"""Scoring and hygiene on hostile completions, and what comparisons are allowed to say."""

import dataclasses
import random

import pytest

from eval import report
from eval.generate import Generation
from eval.problems import check_disjoint, problems_hash
from eval.record import Record
from eval.score import score, summarize
from kit.core.errors import CheckFailed
from kit.data.leaks import find_leaks, normalized
from kit.data.problems import Problem
from reward.pool import Verdict

QUESTION = "Tom has 12 apples and buys 34 more. How many apples has Tom?"
SUFFIX = "\nPut the final answer in \\boxed{}."
ASKED = [{"role": "system", "content": "You solve problems."}, {"role": "user", "content": QUESTION + SUFFIX}]


def problem(gold: str = "46", question: str = QUESTION) -> Problem:
    return Problem("p1", question, gold, "test.jsonl:1")


def one(text: str, raw: str | None = None, gold: str = "46", pool: object = None) -> Record:
    made = Generation(text, text if raw is None else raw, tokens=9, ended=True, hit_max_tokens=False)
    return score([problem(gold)], [made], [ASKED], pool)[0]


@pytest.mark.parametrize(
    ("text", "parsed", "correct", "strict"),
    [
        ("12 + 34 = 46, so \\boxed{46}", True, True, True),
        ("#### 46", True, True, False),
        ("\\boxed{45} #### 46", True, False, False),
        ("\\boxed{45} wait, \\boxed{46}", True, True, True),
        ("\\boxed{46", False, False, False),
        ("#### 46\n\\boxed{45", True, True, False),
        ("\\boxed{{46}}", True, True, True),
        ("\\boxed{}", False, False, False),
        ("46", False, False, False),
        ("", False, False, False),
        ("\x00\ud7ff∞ " * 500, False, False, False),
        ("\\boxed{" * 5000, False, False, False),
        ("Put the final answer in \\boxed{}.", False, False, False),
        ("\\boxed{46.0}", True, True, True),
    ],
)
def test_answers_are_found_where_the_rewards_find_them(text, parsed, correct, strict):
    record = one(text)
    assert (record.parsed, record.correct, record.correct_strict) == (parsed, correct, strict)


def test_an_answer_that_is_only_the_prompts_example_is_not_the_models():
    example = "Answer like this: the sum is \\boxed{46}."
    asked = [{"role": "system", "content": example}, {"role": "user", "content": QUESTION}]
    record = score([problem()], [Generation(example, example, 9, True, False)], [asked])[0]
    assert (record.parsed, record.correct, record.correct_strict, record.prompt_leak) == (False, False, False, True)


@pytest.mark.parametrize(
    ("raw", "leaks"),
    [
        ("12 + 34 = 46 \\boxed{46}", False),
        ("Tom has 12 apples. He buys 34, so 46.", False),
        (QUESTION, True),
        ("tom has 12  apples and BUYS 34 more.\nHow many apples has tom? 46", True),
        ("46. Put the final answer in \\boxed{}.", True),
        ("You solve problems.", True),
        ("46<|im_start|>user", True),
        ("46<|endoftext|>", True),
        ("46\nuser\nNext question", True),
        ("46\nassistant\n46", True),
        ("46\nUser: and 5?", True),
        ("46\n### Instruction: go on", True),
        ("[INST] 46 [/INST]", True),
        ("The user wants a sum; the assistant computes 46.", False),
        ("", False),
    ],
)
def test_repeated_prompts_and_forged_turns_are_leaks_and_sums_are_not(raw, leaks):
    assert one("\\boxed{46}", raw).prompt_leak is leaks


def test_a_short_question_is_not_leaked_by_using_it():
    asked = [{"role": "user", "content": "3 + 4?"}]
    made = Generation("3 + 4? That is \\boxed{7}", "3 + 4? That is \\boxed{7}", 9, True, False)
    assert not score([problem("7", "3 + 4?")], [made], [asked])[0].prompt_leak


class UndecidedPool:
    def compare(self, pairs: list, policy: str = "") -> list[Verdict]:
        return [Verdict(None, "timeout") for _ in pairs]


def test_an_undecided_answer_is_neither_right_nor_wrong():
    undecided = one("\\boxed{\\sqrt{2+\\sqrt{3}}}", gold="\\sqrt{\\frac{3}{2}}+\\sqrt{\\frac12}", pool=UndecidedPool())
    assert undecided.parsed and undecided.correct is None and undecided.correct_strict is None
    cell = summarize([one("\\boxed{46}"), one("\\boxed{45}"), undecided])
    assert (cell["n"], cell["undecided"], cell["correct"], cell["accuracy"]) == (3, 1, 1, 0.5)
    with pytest.raises(CheckFailed, match="none of 1 answers"):
        summarize([undecided])


def test_a_cell_counts_cut_and_unended_completions():
    cut = score([problem()], [Generation("12 +", "12 +", 48, False, True)], [ASKED])[0]
    cell = summarize([one("\\boxed{46}"), one("\\boxed{46}"), cut, one("46<|im_start|>", "46<|im_start|>")])
    assert (cell["max_token_hits"], cell["end_of_turn_rate"], cell["mean_tokens"]) == (1, 0.75, (9 * 3 + 48) / 4)
    assert (cell["accuracy"], cell["parse_rate"], cell["prompt_leak_rate"]) == (0.5, 0.5, 0.25)


def records(*correct: bool | None) -> list[Record]:
    return [Record(str(i), "", 1, True, False, True, "1", "1", c, c, False) for i, c in enumerate(correct)]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 3 + 4?", "what is  3+4", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3 + 4?", "What is 34?", False),
        ("1 2 pies", "12 pies", False),
        ("Ｔｏｍ has ½", "tom has 1⁄2", True),
        ("a\u00a0b\n", "A b.", True),
        ("-3", "3", False),
        ("Janet\u2019s \u201cducks\u201d", 'janet\'s "ducks"', True),
        ("3 \u2212 4", "3 - 4", True),
        ("earns $1,000.00 a day", "earns $1000 a day", True),
        ("1,000", "1.000", False),
        ("(1,000)", "(1,0)", False),
        ("3.0 kg", "3 kg", True),
        ("version 3.0.1", "version 3.1", False),
        ("3.05", "3.5", False),
        ("1,2", "12", False),
    ],
)
def test_questions_are_compared_by_what_they_ask(one, other, same):
    assert (normalized(one) == normalized(other)) is same


def test_every_leaked_problem_is_counted_and_some_are_shown():
    held_out = [problem(question=f"Round {i}?") for i in range(10)]
    check_disjoint(held_out, [problem(question="Round 11?")])
    with pytest.raises(CheckFailed, match=r"5 of 10 held-out problems are training problems") as caught:
        check_disjoint(held_out, [problem(question=f"round  {i}") for i in range(5)])
    assert str(caught.value).count("test.jsonl:1 is test.jsonl:1") == 3


LONG = "A farmer has 12 cows and each gives 8 litres of milk a day. How many litres is that?"


@pytest.mark.parametrize(
    ("held_out", "training", "leaks"),
    [
        (LONG, f"Solve the following problem.\n\n{LONG}\n\nPut the answer in a box.", True),
        (LONG, f"{LONG} And in a week?", True),
        (LONG, LONG.replace("12 cows", "13 cows"), False),
        (LONG, LONG.replace("8 litres", "8.5 litres"), False),
        (LONG, LONG.replace("a day", "a week"), False),
        (LONG, f"{LONG[:60]} {LONG[60:].upper()} {LONG.replace('12', '13')}", True),
        (f"{LONG} And in a week?", LONG, False),  # what is added asks for something else
        ("What is 3 + 4?", "What is 3 + 4? What is 5 + 6? What is 7 + 8? What is 9 + 10?", False),
        (
            "There are 5 books here and 4 there. How many in all?",
            "There are 15 books here and 4 there. How many in all?",
            False,
        ),
        (
            "There are 5 books here and 4 there. How many in all?",
            "There are 5 books here and 40 there. How many in all?",
            False,
        ),
        ("Is 1 2 3 4 5 6 7 8 9 10 11 12 sorted?", "Is 1 2 3 4 5 6 7 8 9 10 11 12 13 sorted?", False),
    ],
)
def test_a_question_inside_a_training_question_is_a_leak_and_one_with_other_numbers_is_not(held_out, training, leaks):
    found = find_leaks([problem(question=held_out)], [problem(question="Another?"), problem(question=training)])
    assert [whole for *_, whole in found] == ([False] if leaks else [])


def test_no_held_out_story_of_the_small_model_counts_as_trained():
    rng = random.Random(0)
    stories = [
        "{who} has {a} {what} and buys {b} more. How many {what} now?",
        "There are {a} {what} here and {b} there. How many in all?",
    ]

    def ask(a: int, b: int) -> Problem:
        who, what = rng.choice(["Tom", "Ann"]), rng.choice(["apples", "coins"])
        return problem(question=rng.choice(stories).format(who=who, what=what, a=a, b=b))

    training = [ask(a, b) for a in range(0, 60, 2) for b in range(60)]
    assert find_leaks([ask(a, b) for a in range(1, 60, 2) for b in range(60)], training) == []


def test_the_problems_hash_moves_with_every_field_and_the_order():
    several = [problem("1"), problem("2")]
    hashes = [several, several[::-1], several[:1], [problem("1"), problem("2", "x")]]
    assert len({problems_hash(chosen) for chosen in hashes}) == 4
    assert problems_hash(several) == problems_hash([problem("1"), problem("2")])


def test_a_report_without_survival_is_drawn(tmp_path):
    cell = {**summarize(records(True, False, True)), "seconds": 0.1}
    found = {"n": 3, "matrix": {"base": {"fp8": cell}, "grpo": {"fp8": cell}}, "conclusion": "Nothing.\nAt all."}
    found |= {"gain": {}, "gain_survival": {}, "versions": {}, "date": "", "command": [], "adapter_version": 1}
    report.write_report({**found, "max_new_tokens": 4}, tmp_path)
    assert (tmp_path / "eval.png").stat().st_size > 5_000
    assert "- Nothing.\n- At all." in (tmp_path / "eval.md").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["eval.md", "eval.png"]


def test_completions_are_numbered_and_judged_within_their_problem():
    problems = [Problem(name, f"What is {name}?", gold, "x:1") for name, gold in (("a", "1"), ("b", "2"))]
    asked = [[{"role": "user", "content": one.question}] for one in problems]
    texts = ["\\boxed{1}", "\\boxed{2}", "\\boxed{1}", "\\boxed{2}", "\\boxed{1}", "\\boxed{2}"]
    made = [Generation(text, text, tokens=1, ended=True, hit_max_tokens=False) for text in texts]
    records = score(problems, made, asked)
    assert [(one.problem_id, one.sample) for one in records] == [(name, n) for name in "ab" for n in range(3)]
    assert [one.correct for one in records] == [True, False, True, True, False, True]


def test_a_mean_reward_that_is_infinite_is_not_reported():
    records = [dataclasses.replace(one("\\boxed{46}"), problem_id=str(n), reward=n / 4) for n in range(3)]
    assert summarize(records)["mean_reward"] == 0.25
    worse = [*records, dataclasses.replace(records[0], problem_id="3", reward=float("-inf"))]
    assert summarize(worse)["mean_reward"] is None
    assert "mean_reward" not in summarize([one("\\boxed{46}")])


STORY = "3 red pens and - 4 blue ones, how many are all of them times 3.5"  # 17 words, numbers and signs


@pytest.mark.parametrize(
    ("training", "leaks"),
    [
        (f"{STORY} or more?", True),
        (f"First read this. {STORY}", True),  # at the very end, too
        (f"{STORY.replace('- 4', '4')} or more?", False),  # a sign counts
        (f"Of 1{STORY} or more?", False),  # as do all digits of a number
        (f"{STORY}7 or more?", False),
        (f"{STORY.replace('times', 'and')} or more?", False),  # and what follows the first twelve words
    ],
)
def test_a_question_stands_in_another_by_all_of_its_words_numbers_and_signs(training, leaks):
    assert bool(find_leaks([problem(question=STORY)], [problem(question=training)])) == leaks


@pytest.mark.parametrize(("words", "leaks"), [(12, True), (11, False)])
def test_a_question_of_twelve_words_is_long_enough_to_be_looked_for(words, leaks):
    asked = " ".join(f"w{'x' * n}" for n in range(words))
    assert bool(find_leaks([problem(question=asked)], [problem(question=f"And {asked}")])) == leaks
