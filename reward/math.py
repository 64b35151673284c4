r"""Reward "math": the final answer equals the reference answer.

What counts as the answer and as equal is policy (`reward/README.md`); where people differ, it is an option. Defaults:
a box, or the answer as models state it; no rounding below six decimals (0.333 is not 1/3, 0.333333 is, and 1.41421356
is `\sqrt2`); unevaluated expressions equal their value; a unit on only one side is ignored; several answers are all
required, in any order unless they form a tuple; digits of every script have their value.
"""

from typing import Any, Literal

from reward.answer import boxed_answer, final_answer, tag_answer
from reward.exact import Policy
from reward.gold import math_golds
from reward.score import Budget, Messages, Pool, Prompts, Rewards, score_answers
from reward.stated import lenient_answer, reference_answer, stated_answer


def math(
    prompts: Prompts,
    completions: Messages,
    gold: list[str],
    *,
    pool: Pool = None,
    budget: Budget = None,
    form: Literal["boxed", "stated", "lenient"] = "stated",
    tolerance: float = 0.0,
    ordered: bool = False,
    units: Literal["ignored", "required"] = "ignored",
    several: Literal["all", "any"] = "all",
    unicode_digits: bool = True,
    answer_tag: str | None = None,
    hash_answers: bool = False,
    **_: Any,
) -> Rewards:
    r"""1.0 if the final answer equals `gold`, else 0.0 (also if its place holds no answer); None if undecided.

    `form` selects where in the model's own text the answer is looked for, and how strictly it is compared:

    - `stated`: the last `\boxed{}` (all of several that are enumerated), `#### n`, `<answer>…</answer>`, or sentence
      such as "The answer is $x$."; not inside a thought, and not if the text retracts it or offers a choice.
    - `boxed`: only the last balanced `\boxed{}`, so the form is learned with the content. A long decimal is not a
      fraction.
    - `lenient`: as `stated`; without a statement, the last formula or number of the text.

    Options:

    - `answer_tag: "<answer>"`: the answer is the content of the last complete `<answer>…</answer>`, or a box in it.
    - `hash_answers: true`: with `form: boxed`, the last `#### n` counts if there is no box.
    - `tolerance: 0.01`: a number may differ from the reference by 1 % of it.
    - `ordered: true`: `2, 1` does not answer `1, 2` (tuples are always ordered, sets in braces never).
    - `units: required`: `5` does not answer `5 cm`. Two different units never agree.
    - `several: any`: one of several reference answers is enough (but not a prediction with a wrong one beside it).
    - `unicode_digits: false`: only 0 to 9 are digits.
    """
    policy = Policy(tolerance, ordered, units, several, unicode_digits, form)

    def extract(text: str) -> str | None:
        if answer_tag is not None:
            return tag_answer(text, answer_tag)
        if form == "boxed":
            return final_answer(text) if hash_answers else boxed_answer(text)
        return stated_answer(text) if form == "stated" else lenient_answer(text)

    if form != "boxed":
        gold = [reference_answer(reference) for reference in gold]
    return score_answers(extract, prompts, completions, gold, pool, budget, policy)


def check_options(tolerance: float, answer_tag: str | None, hash_answers: bool, **_: Any) -> None:
    """Raise `ValueError` for options that cannot be intended."""
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance is {tolerance}, a share of the reference from 0 up to (not including) 1.")
    if answer_tag is not None and hash_answers:
        raise ValueError("answer_tag and hash_answers are two places for the answer: use one.")
    if answer_tag is not None and (len(answer_tag) < 3 or answer_tag[0] + answer_tag[-1] != "<>"):
        raise ValueError(f'answer_tag is {answer_tag!r}, expected a tag like "<answer>".')


math.check_options = check_options  # type: ignore[attr-defined]
math.check_golds = math_golds  # type: ignore[attr-defined]
