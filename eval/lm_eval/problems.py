"""The data set of the two tasks here: jsonl files named by lm_eval's --metadata. Runs in lm_eval's environment."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(problems: str, fewshot: str | None = None, **_: Any) -> dict[str, datasets.Dataset]:
    """Load columns problem_id, question, prompt, answer of `problems`, and question and worked answer of `fewshot`."""
    found = {"test": rows(problems, ("problem_id", "question", "prompt", "answer"))}
    return found | (
        {"train": rows(fewshot, ("question", "answer"))} if fewshot else {"train": found["test"].select([])}
    )


def rows(file: str, columns: tuple[str, ...]) -> datasets.Dataset:
    lines = Path(file).read_bytes().decode("utf-8").split("\n")  # not splitlines, which cuts at U+2028
    read = [json.loads(line) for line in lines if line.strip()]
    return datasets.Dataset.from_list([{column: str(row[column]) for column in columns} for row in read])
