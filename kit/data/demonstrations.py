"""Rows of supervised fine-tuning in TRL's columns: `messages`, `prompt` and `completion`, or `text`.

Read from the same sources as problems (`problems.py`); an unusable row is reported by file and line.
`data.system_prompt` and `data.prompt_suffix` are added to conversations in the places where GRPO's prompts have them,
so that GRPO can continue from the adapter on the same prompts. Other columns are ignored, so one file may hold
`question`, `answer` and `messages`. Imports no torch.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput
from kit.data.problems import ROLES, SHOWN, is_held_out, message_text, split_rows

_SHAREGPT = " ShareGPT's from is role (human: user, gpt: assistant), and its value is content."
COLUMNS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}


@dataclass(frozen=True)
class Demonstration:
    """A row: a conversation whose messages from number `answers_from` on are learned, or a text after a text.

    `id` is a hash of the content, `source` its place ("file:line").
    """

    id: str
    source: str
    messages: list[dict] | None = None
    answers_from: int = 0
    before: str = ""  # plain text that is not learned
    text: str = ""


def read_demonstrations(data: DataConfig, form: str, split: str) -> tuple[list[Demonstration], str]:
    """The usable rows of the "train" or "eval" split in file order and a line for the log; `form` is `sft.rows`.

    Raises `BadInput` if the source or a column is missing, or more than `data.max_bad_fraction` of the rows are
    unusable.
    """
    found, bad, count = [], [], 0
    for row in split_rows(data, split):
        count += 1
        if row.value is None:
            bad.append((row.source, row.error))
            continue
        if count == 1:
            _check_columns(row.source, row.value, form)
        made, error = _read(row.source, row.value, data, form)
        if made is None:
            bad.append((row.source, error))
        elif data.heldout_fraction is None or is_held_out(_asked(made), data) == (split == "eval"):
            found.append(made)
    check_share(bad, count, split, data)
    limit = data.max_train_problems if split == "train" else data.max_eval_problems
    return found[:limit], f"{count:,} rows, {len(bad):,} bad"


def _asked(row: Demonstration) -> str:
    """The text by which `data.heldout_fraction` divides rows: what the user asks first, so that rows on one question
    are in one split; of plain text the part that is not learned, or all of it."""
    if row.messages is None:
        return row.before or row.text
    return next((one["content"] for one in row.messages if one["role"] == "user"), row.messages[0]["content"])


def check_share(bad: list[tuple[str, str]], count: int, split: str, data: DataConfig) -> None:
    """Raise `BadInput` if more than `data.max_bad_fraction` of a split's `count` rows are `bad` (place, reason)."""
    if not count:
        raise BadInput(f"the {split} split has no rows.")
    if len(bad) == count or len(bad) > data.max_bad_fraction * count:
        places = "".join(f"\n  {source}: {error}" for source, error in bad[:SHOWN])
        skip = "" if len(bad) == count else ", or skip them with a higher data.max_bad_fraction"
        raise BadInput(
            f"{len(bad):,} of {count:,} rows of the {split} split cannot be used (data.max_bad_fraction is "
            f"{data.max_bad_fraction:g}):{places}\nFix these rows or check sft.rows{skip}."
        )


def _check_columns(source: str, row: dict, form: str) -> None:
    """Raise `BadInput` for a column that the first row lacks: that is a wrong configuration, not a bad row."""
    for name in COLUMNS[form]:
        if name not in row:
            fits = [other for other, columns in COLUMNS.items() if all(column in row for column in columns)]
            known = "; ".join(f"{other}: {', '.join(columns)}" for other, columns in COLUMNS.items())
            raise BadInput(
                f"{source} has no column {name!r}, which sft.rows {form} reads; it has "
                f"{', '.join(map(str, row)) or 'none'}. "
                + (f"Set sft.rows to {fits[0]}." if fits else f"Write the columns of one form ({known}).")
                + (_SHAREGPT if "conversations" in row else "")
            )


def _read(source: str, row: dict, data: DataConfig, form: str) -> tuple[Demonstration | None, str]:
    """The row, or None and why it cannot be learned from."""
    values = [row.get(name) for name in COLUMNS[form]]
    missing = [name for name, value in zip(COLUMNS[form], values, strict=True) if not value]
    if missing:
        return None, f"{missing[0]} is empty"
    try:
        content = json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return None, "an unpaired surrogate (half of a character), which no tokenizer reads"
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    if all(isinstance(value, str) for value in values) and form != "messages":
        return Demonstration(digest, source, before="".join(values[:-1]), text=values[-1]), ""
    if form == "text":
        return None, f"text is a {type(values[0]).__name__}"
    if not all(isinstance(value, list) for value in values):
        kinds = " and ".join(type(value).__name__ for value in values)
        return None, f"{' and '.join(COLUMNS[form])}: {kinds}, expected lists of messages" + (
            " or two texts" if form == "prompt_completion" else ""
        )
    messages, error = _conversation([message for value in values for message in value], data)
    if error:
        return None, error
    added = len(messages) - sum(map(len, values))
    first = 0 if form == "messages" else added + len(values[0])
    learned = [number for number, one in enumerate(messages) if number >= first and one["role"] == "assistant"]
    if not learned:
        return None, "no message of the assistant to learn"
    if empty := [number for number in learned if not messages[number]["content"].strip()]:
        return (
            None,
            f"message {empty[0] + 1 - added} of the assistant is empty, and the model would learn to say nothing",
        )
    if learned[0] == 0:
        return None, "no message before the assistant's first, so nothing is answered"
    return Demonstration(digest, source, messages=messages, answers_from=first), ""


def _conversation(rows: list[Any], data: DataConfig) -> tuple[list[dict], str]:
    """Messages as {role, content} with the run's system prompt and suffix, or [] and what is wrong."""
    messages = []
    for number, message in enumerate(rows, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return [], f"message {number} has no role of {', '.join(ROLES)}"
        if more := [key for key, value in message.items() if key not in ("role", "content") and value is not None]:
            return [], f"message {number} has {', '.join(map(str, more))}; role and content are supported"
        content, error = message_text(message.get("content"))
        if error:
            return [], f"message {number} {error}"
        suffix = data.prompt_suffix if message["role"] == "user" else ""
        messages.append({"role": message["role"], "content": content + suffix})
    if data.system_prompt:
        if messages[0]["role"] in ("system", "developer"):
            return [], "it has a system message of its own, and data.system_prompt is set. Set it to null"
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    return messages, ""
