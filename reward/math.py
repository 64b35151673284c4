r"""Reward "math": the final answer equals the reference answer.

What counts as the answer and as equal is policy (`reward/README.md`); where people differ it is an option. The
defaults: a box, or the answer as models state it; no rounding below six decimals (0.333 is not 1/3, 0.333333 is, and
1.41421356 is `\sqrt2`); unevaluated expressions equal their value; a unit on one side only is ignored; several answers
are all needed, in any order unless they stand in a tuple; digits of every script have their value.
"""

from typing import Any, Literal

from reward.answer import boxed_answer, final_answer, tag_answer
from reward.exact import Policy
from reward.gold import math_golds
from reward.pool import UnknownBudget, WorkerPool
from reward.score import Explanation, Message, score_answers
from reward.stated import lenient_answer, reference_answer, stated_answer


def math(
    prompts: list[Message] | None,
    completions: list[Message],
    gold: list[str],
    *,
    pool: WorkerPool | None = None,
    budget: UnknownBudget | Explanation | None = None,
    form: Literal["boxed", "stated", "lenient"] = "stated",
    tolerance: float = 0.0,
    ordered: bool = False,
    units: Literal["ignored", "required"] = "ignored",
    several: Literal["all", "any"] = "all",
    unicode_digits: bool = True,
    answer_tag: str | None = None,
    hash_answers: bool = False,
    **_: Any,
) -> list[float | None]:
    r"""1.0 when the final answer equals `gold`, else 0.0 (also without an answer in its place); None when undecided.

    `form` says where the answer is looked for in the model's own text, and how narrowly it is compared:

    - `stated`: the last `\boxed{}` (all of several that are enumerated), `#### n`, `<answer>…</answer>`, or sentence
      such as "The answer is $x$."; not in a thought, not where the text takes it back or offers a choice.
    - `boxed`: the last balanced `\boxed{}` and nothing else, so the form is learned with the content. A long decimal
      is not a fraction.
    - `lenient`: as `stated`; without a statement the last formula or number of the text.

    Options:

    - `answer_tag: "<answer>"`: the answer is what the last complete `<answer>…</answer>` holds, or a box inside it.
    - `hash_answers: true`: with `form: boxed`, the last `#### n` counts where there is no box.
    - `tolerance: 0.01`: a number may differ from the reference by 1 % of it.
    - `ordered: true`: `2, 1` does not answer `1, 2` (tuples are ordered anyway, sets in braces never).
    - `units: required`: `5` does not answer `5 cm`. Two different units never agree.
    - `several: any`: one of several reference answers is enough (a prediction with a wrong one beside it is not).
    - `unicode_digits: false`: digits other than 0 to 9 are not digits.
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
    """`ValueError` for options that cannot be meant."""
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance is {tolerance}, a share of the reference from 0 up to (not including) 1.")
    if answer_tag is not None and hash_answers:
        raise ValueError("answer_tag and hash_answers are two places for the answer: use one.")
    if answer_tag is not None and (len(answer_tag) < 3 or answer_tag[0] + answer_tag[-1] != "<>"):
        raise ValueError(f'answer_tag is {answer_tag!r}, expected a tag like "<answer>".')


math.check_options = check_options
math.check_golds = math_golds
