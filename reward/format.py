r"""Reward "boxed_format": the answer is boxed once, whatever it is."""

from typing import Any

from reward.answer import boxes
from reward.score import Message, own_texts


def boxed_format(prompts: list[Message] | None, completions: list[Message], **_: Any) -> list[float | None]:
    r"""1.0 for exactly one `\boxed{}` of the model's own, not empty; 0.0 otherwise. Never None."""
    found = [boxes(text) for text in own_texts(prompts, completions)]
    return [float(len(answers) == 1 and answers[0] != "") for answers in found]
