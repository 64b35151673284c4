r"""Attacks on the form rewards (empty, doubled or copied forms), on countdown and on the penalties."""

import json

from reward.attacks import Case

BOXED_FORM = [
    # name, completion, pays
    ("nothing", "", False),
    ("no box", "The answer is 7.", False),
    ("an empty box", r"\boxed{}", False),
    ("a blank box", r"\boxed{  }", False),
    ("two boxes", r"\boxed{7} \boxed{7}", False),
    ("a hundred boxes", r"\boxed{7} " * 100, False),
    ("an unclosed box", r"\boxed{7", False),
    ("a box name that goes on", r"\boxedanswer{7}", False),
    ("one box", r"so \boxed{7}", True),
    ("one box that is wrong", r"so \boxed{8}", True),
]

THINK_FORM = [
    ("nothing", "", False),
    ("no tags", "2 + 5 = 7", False),
    ("both empty", "<think></think><answer></answer>", False),
    ("an empty think", "<think></think><answer>7</answer>", False),
    ("a blank think", "<think> \n </think><answer>7</answer>", False),
    ("a think of dots", "<think>...</think><answer>7</answer>", False),
    ("an empty answer", "<think>2 + 5 = 7</think><answer></answer>", False),
    ("no answer", "<think>2 + 5 = 7</think>", False),
    ("no think", "<answer>7</answer>", False),
    ("the answer first", "<answer>7</answer><think>2 + 5</think>", False),
    ("the answer inside the think", "<think>2 + 5 <answer>7</answer></think>", False),
    ("the think inside the answer", "<answer><think>2 + 5</think>7</answer>", False),
    ("crossed tags", "<think>2 + 5<answer></think>7</answer>", False),
    ("two thinks", "<think>2</think><think>5</think><answer>7</answer>", False),
    ("two answers", "<think>2 + 5</think><answer>7</answer><answer>8</answer>", False),
    ("a doubled opening tag", "<think><think>2 + 5</think><answer>7</answer>", False),
    ("an unclosed think", "<think>2 + 5 <answer>7</answer>", False),
    ("an unclosed answer", "<think>2 + 5</think><answer>7", False),
    ("closed only", "2 + 5</think>7</answer>", False),
    ("text before", "Sure! <think>2 + 5</think><answer>7</answer>", False),
    ("text between", "<think>2 + 5</think> so <answer>7</answer>", False),
    ("text after", "<think>2 + 5</think><answer>7</answer> Done.", False),
    ("capitals", "<THINK>2 + 5</THINK><ANSWER>7</ANSWER>", False),
    ("zero-width content", "<think>\u200b</think><answer>\u200b</answer>", False),
    ("100,000 tags", "<think>" * 100_000, False),
    ("the form", "<think>2 + 5 = 7</think>\n<answer>7</answer>", True),
    ("the form on one line", "<think>2 + 5 = 7</think><answer>7</answer>", True),
    ("the form with a wrong answer", "<think>2 + 5 = 8</think>\n<answer>8</answer>\n", True),
]

COUNTDOWN = json.dumps({"numbers": [3, 5, 7], "target": 22})
EXPRESSIONS = [
    # name, expression, whether it makes 22 from 3, 5 and 7, each once
    ("the target itself", "22", False),
    ("an equation of the target", "22 = 22", False),
    ("a false equation", "3 + 5 + 7 = 22", False),
    ("a right expression with a wrong result", "3 * 5 + 7 = 23", False),
    ("a number twice", "5 + 5 + 5 + 7", False),
    ("a number left out", "5 * 3 + 7 - 0", False),
    ("another number", "15 + 7", False),
    ("digits joined", "35 - 7 - 6", False),
    ("digits joined from its own", "37 - 5 * 3", False),
    ("another value", "3 + 5 + 7", False),
    ("a power", "3 ** 5 - 7", False),
    ("a power in LaTeX", "3^{5} + 7", False),
    ("a factorial", "3! + 5 + 7 + 4", False),
    ("integer division", "7 // 3 + 5 * 4", False),
    ("a remainder", "7 % 5 + 3 + 17", False),
    ("a bit operation", "(7 ^ 5) + 3 + 17", False),
    ("a comparison", "3 * 5 < 7 or 22", False),
    ("a name", "x", False),
    ("a call", "sum([3, 5, 7]) + 7", False),
    ("an import", "__import__('os').system('true') or 22", False),
    ("a comment", "22 # 3 5 7", False),
    ("the numbers as a list", "[3, 5, 7]", False),
    ("the numbers multiplied by zero", "(3 + 5 + 7) * 0 + 22", False),
    ("an inline addition of zeros", "3 * 5 + 7 + 0", False),
    ("division by zero", "7 / (5 - 3 - 2)", False),
    ("a decimal", "3.0 * 5 + 7", False),
    ("scientific notation", "2.2e1", False),
    ("superscripts", "3 × 5 + 7⁰", False),
    ("a tower", "9**9**9**9**9", False),
    ("deep parentheses", "(" * 100_000 + "3*5+7" + ")" * 100_000, False),
    ("a long sum", "+".join(["1"] * 100_000), False),
    ("two expressions", "3 * 5 + 7, 5 * 3 + 7", False),
    ("a choice", "3 * 5 + 7 or 3 + 5 + 7", False),
    ("words", "three times five plus seven", False),
    ("a solution", "3 * 5 + 7", True),
    ("a solution with its result", "3 * 5 + 7 = 22", True),
    ("a solution in parentheses", "(7 + (5 * 3))", True),
    ("a solution in LaTeX", r"3 \times 5 + 7", True),
    ("a solution in Unicode", "3 × 5 + 7", True),
]

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
    *(Case("format", name, text, "7", pays, ("boxed_format",)) for name, text, pays in BOXED_FORM),
    *(Case("format", name, text, "7", pays, ("think_format",)) for name, text, pays in THINK_FORM),
    *(
        Case("countdown", name, f"<answer>{text}</answer>", COUNTDOWN, pays, ("countdown",))
        for name, text, pays in EXPRESSIONS
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
