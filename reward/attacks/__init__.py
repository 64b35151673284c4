"""The built-in adversarial suite of `python -m reward attack`: attempts to be paid without the answer, and controls.

A case is an attempt (`pays=False`) or an honest completion that must be paid (`pays=True`), so that a reward which
pays nobody fails as well. The cases lie in one file per kind.
"""

from dataclasses import dataclass

MATH = ("math",)
STRICT = ("math", "gsm8k_strict")  # judged by a stated answer only
ANSWERS = ("math", "gsm8k_strict", "gsm8k_lenient")
OUTSIDE_BOX = ("stated", "lenient")  # forms that read the text around a box, too
GSM8K = ("gsm8k_strict", "gsm8k_lenient")


@dataclass(frozen=True)
class Case:
    """One completion, what it tries, and whether the reward functions `tasks` must pay it."""

    category: str  # "extraction", "comparison", "cost", "unicode", "prompt echo", "format", "countdown", "code"
    name: str  # what is tried, in a few words
    completion: str
    gold: str
    pays: bool = False
    tasks: tuple[str, ...] = MATH
    prompt: str | None = None
    forms: tuple[str, ...] = ("boxed", "stated", "lenient")  # of reward "math": where the case holds
