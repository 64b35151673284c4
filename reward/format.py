r"""Rewards for the form of a completion, regardless of its answer: "boxed_format" and "think_format"."""

from typing import Any

from reward.answer import boxes, message_text
from reward.score import Messages, Prompts, Rewards, own_texts


def boxed_format(prompts: Prompts, completions: Messages, **_: Any) -> Rewards:
    r"""1.0 for exactly one nonempty `\boxed{}` of the model's own; 0.0 otherwise. Never None."""
    found = [boxes(text) for text in own_texts(prompts, completions)]
    return [float(len(answers) == 1 and answers[0] != "") for answers in found]


def think_format(
    prompts: Prompts,
    completions: Messages,
    *,
    think_tag: str = "<think>",
    answer_tag: str = "<answer>",
    opened: bool = False,
    **_: Any,
) -> Rewards:
    """1.0 for `<think>…</think><answer>…</answer>` and nothing else; 0.0 otherwise. Never None.

    Each tag occurs exactly once, in this order. Both parts contain a letter or a digit, only white space surrounds
    them, and the thought is not the prompt's own example. `opened: true` is for chat templates that end the prompt
    with `<think>`: the completion starts inside the thought.
    """
    prompts = [None] * len(completions) if prompts is None else prompts
    return [
        float(_is_structured(message_text(completion), message_text(prompt), think_tag, answer_tag, opened))
        for completion, prompt in zip(completions, prompts, strict=True)
    ]


def _is_structured(text: str, prompt: str, think: str, answer: str, opened: bool) -> bool:
    text = think + text if opened else text
    tags = (think, f"</{think[1:]}", answer, f"</{answer[1:]}")
    if any(text.count(tag) != 1 for tag in tags):
        return False
    places = [text.index(tag) for tag in tags]
    if places != sorted(places):
        return False
    thought = text[places[0] + len(tags[0]) : places[1]]
    answered = text[places[2] + len(tags[2]) : places[3]]
    outside = text[: places[0]] + text[places[1] + len(tags[1]) : places[2]] + text[places[3] + len(tags[3]) :]
    if outside.strip() or not all(any(sign.isalnum() for sign in part) for part in (thought, answered)):
        return False
    return f"{think}{thought}{tags[1]}" not in prompt  # the instruction's example is not a thought


def check_options(think_tag: str, answer_tag: str, **_: Any) -> None:
    """Raise `ValueError` for invalid tags."""
    for name, tag in (("think_tag", think_tag), ("answer_tag", answer_tag)):
        if len(tag) < 3 or tag[0] + tag[-1] != "<>":
            raise ValueError(f'{name} is {tag!r}, expected a tag like "<{name.removesuffix("_tag")}>".')
    if think_tag == answer_tag:
        raise ValueError(f"think_tag and answer_tag are both {think_tag!r}.")


think_format.check_options = check_options  # type: ignore[attr-defined]
