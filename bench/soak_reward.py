"""The reward of bench/soak.py: 1 for the right answer in a box. It hangs once whenever the soak asks for that."""

import os
import time
from pathlib import Path

from reward.answer import boxed_answer
from reward.score import own_texts

HANG = "hang"  # a file in SOAK_FOLDER; one call takes it and never returns


def boxed(prompts: list, completions: list, gold: list[str], **_: object) -> list[float]:
    try:
        (Path(os.environ["SOAK_FOLDER"]) / HANG).unlink()
    except FileNotFoundError:
        texts = own_texts(prompts, completions)
        return [float(boxed_answer(text) == answer) for text, answer in zip(texts, gold, strict=True)]
    while True:
        time.sleep(60)
