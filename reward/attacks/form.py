r"""Attempts on the form rewards: shapes that look right and are empty, doubled or copied; and on countdown."""

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

CASES = [
    *(Case("format", name, text, "7", pays, ("boxed_format",)) for name, text, pays in BOXED_FORM),
    Case(
        "format",
        "the instruction's empty box",
        "Put the final answer in \\boxed{}.",
        "7",
        tasks=("boxed_format",),
        prompt="What is 2+5?\nPut the final answer in \\boxed{}.",
    ),
]
