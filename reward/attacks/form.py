r"""Attacks on the form rewards (empty, doubled or copied forms), on countdown and on the penalties."""

import json

from reward.attacks import Case, attempts

# {reward: what has not its form}, beside `attempts.txt`
NO_FORM = {
    "boxed_format": {"nothing": "", "a hundred boxes": r"\boxed{7} " * 100},
    "think_format": {
        "nothing": "",
        "zero-width content": "<think>\u200b</think><answer>\u200b</answer>",
        "100,000 tags": "<think>" * 100_000,
    },
}
FORM = {
    "boxed_format": {},
    "think_format": {"the form with a wrong answer": "<think>2 + 5 = 8</think>\n<answer>8</answer>\n"},
}
COUNTDOWN = json.dumps({"numbers": [3, 5, 7], "target": 22})
# Expressions that do not make 22 from 3, 5 and 7, each once.
EXPRESSIONS = attempts("countdown, no solution") | {
    "deep parentheses": "(" * 100_000 + "3*5+7" + ")" * 100_000,
    "a long sum": "+".join(["1"] * 100_000),
}

ARITHMETIC = [
    ("the question itself", "3 * 5 + 7", "22", False),
    ("the question in LaTeX", r"3 \times 5 + 7", "22", False),
    ("a power", "2^{10}", "1024", False),
    ("two values", "22, 23", "22", False),
    ("another value", "23", "22", False),
    ("the sign", "-22", "22", False),
    ("nothing", "", "22", False),
    ("a tower", "9^{9^{9^{9}}}", "22", False),
    ("Python", "int('22')", "22", False),
    ("the value", "22", "22", True),
    ("the value with a comma", "1,024", "1024", True),
    ("a fraction", r"\frac{22}{7}", "22/7", True),
]

PENALTIES = [
    # reward, name, completion, whether it must go without a penalty
    ("repetition", "one word", "so " * 500, False),
    ("repetition", "one sentence", "We add the numbers and look at the result again. " * 60, False),
    ("repetition", "one sentence in changing case", "we add the numbers now. WE ADD THE NUMBERS NOW. " * 40, False),
    ("repetition", "one sign", "!" * 2000, False),
    ("repetition", "one letter", "a" * 2000, False),
    ("repetition", "line breaks between", "We wait.\n\n" * 300, False),
    ("repetition", "without spaces", "我们再算一次" * 100, False),
    ("repetition", "a text", "First we add 2 and 5, which makes 7; then we check it by taking 5 away again.", True),
    ("repetition", "counting", " ".join(str(n) for n in range(300)), True),
    ("repetition", "nothing", "", True),
    ("language", "another script", "Ответ семь, потому что два плюс пять равно семи.", False),
    ("language", "half another script", "The answer is 七因为二加五等于七所以答案是七", False),
    ("language", "digits in between", "答1案2是3七", False),
    ("language", "a text", "The answer is 7, because 2 + 5 = 7.", True),
    ("language", "a formula", r"Let \alpha = π/2; then ∑ x² ≤ 7.", True),
]

INSTRUCTION = "What is 2+5? Answer as <think>your work</think><answer>your answer</answer>"

CASES = [
    *(
        Case("format", name, text, "7", pays, (reward,))
        for pays, kind, more in ((False, "no form", NO_FORM), (True, "form", FORM))
        for reward in more
        for name, text in (attempts(f"{reward}, {kind}") | more[reward]).items()
    ),
    *(
        Case("countdown", name, f"<answer>{text}</answer>", COUNTDOWN, pays, ("countdown",))
        for pays, table in ((False, EXPRESSIONS), (True, attempts("countdown, solution")))
        for name, text in table.items()
    ),
    *(
        Case("countdown", name, rf"\boxed{{{text}}}", gold, pays, ("arithmetic",))
        for name, text, gold, pays in ARITHMETIC
    ),
    *(Case("penalty", name, text, "7", pays, (reward,)) for reward, name, text, pays in PENALTIES),
    Case(
        "format",
        "the instruction's empty box",
        "Put the final answer in \\boxed{}.",
        "7",
        tasks=("boxed_format",),
        prompt="What is 2+5?\nPut the final answer in \\boxed{}.",
    ),
    Case("format", "the instruction's tags", INSTRUCTION, "7", tasks=("think_format",), prompt=INSTRUCTION),
    Case(
        "format",
        "the last line of the instruction",
        "<think>your work</think><answer>your answer</answer>",
        "7",
        tasks=("think_format",),
        prompt="What is 2+5? Answer in this form:\n<think>your work</think><answer>your answer</answer>",
    ),
    Case("countdown", "no expression", "I cannot find one.", COUNTDOWN, tasks=("countdown",)),
    Case(
        "countdown",
        "right, then wrong",
        "<answer>3*5+7</answer> <answer>3+5</answer>",
        COUNTDOWN,
        tasks=("countdown",),
    ),
]
