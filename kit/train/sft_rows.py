"""Token ids of demonstrations, and which of them are in the loss.

A conversation is tokenized as GRPO samples it: the prompt as the chat template renders it with the assistant's turn
opened, then the answer up to its stop token. If the template marks answers itself (`{% generation %}`), its mask
decides; otherwise each answer is what the template adds to the prompt before it. A template that renders earlier
messages differently once later ones follow (Qwen3 removes the thinking of earlier turns) has no such prefix: rows on
which it does are unusable, with the reason.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.core.chat import render_messages
from kit.core.config.schema import Config
from kit.data.demonstrations import Demonstration, check_share

if TYPE_CHECKING:
    from datasets import Dataset

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # transformers' marker of what the assistant says
Part = tuple[list[int], bool]  # token ids, and whether they are in the loss


class TokenRow(NamedTuple):
    """A row as inputs of the loss: `prompt_ids` are before the first token in the loss, `completion_ids` from it to
    the last one; `learned` (0 or 1) is as long as the completion."""

    prompt_ids: list[int]
    completion_ids: list[int]
    learned: list[int]


class Unusable(Exception):
    """Why a row cannot be learned from."""


def token_row(row: Demonstration, tokenizer: Any, stops: set[int], config: Config) -> TokenRow:
    """Raises `Unusable` if the chat template does not show what the assistant says in this row."""
    everything, arguments = config.sft.learns_all, config.data.chat_template_kwargs
    if row.messages is None:
        parts = _text(row, tokenizer)
    elif GENERATION.search(tokenizer.chat_template) and row.answers_from == 0:
        parts = _marked(row.messages, tokenizer, arguments, stops)
    else:
        parts = _answers(row.messages, row.answers_from, tokenizer, arguments, stops)
    ids = [token for part, _ in parts for token in part]
    learned = [int(is_learned or everything) for part, is_learned in parts for _ in part]
    learned[0] = 0  # nothing predicts it
    if 1 not in learned:
        raise Unusable("no token to learn")
    first, last = learned.index(1), len(learned) - learned[::-1].index(1)
    return TokenRow(ids[:first], ids[first:last], learned[first:last])


def _text(row: Demonstration, tokenizer: Any) -> list[Part]:
    """Token ids of a text with its stop token, after a text that is not learned, in TRL's form."""
    before = tokenizer(row.before)["input_ids"] if row.before else []
    text = tokenizer(row.text, add_special_tokens=not row.before)["input_ids"]
    if text and text[-1] == tokenizer.eos_token_id:
        text = text[:-1]
    return [(before, False), ([*text, tokenizer.eos_token_id], True)]


def _marked(messages: list[dict], tokenizer: Any, arguments: dict, stops: set[int]) -> list[Part]:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    if not any(token in stops for token, is_marked in zip(ids, mask, strict=True) if is_marked):
        raise Unusable("the chat template marks no stop token as the assistant's, so answers would never end")
    return [([token], bool(is_marked)) for token, is_marked in zip(ids, mask, strict=True)]


def _answers(messages: list[dict], first: int, tokenizer: Any, arguments: dict, stops: set[int]) -> list[Part]:
    """The conversation in parts: answers of the assistant from message number `first` on, and what is between them."""
    parts: list[Part] = []
    before = ""  # the text so far
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        opened = render_messages(tokenizer, messages[:number], arguments, opened=True)
        closed = render_messages(tokenizer, messages[: number + 1], arguments, opened=False)
        if not (opened.startswith(before) and closed.startswith(opened)):
            raise Unusable(
                f"the chat template renders what comes before message {number + 1} differently once that follows, so "
                "it does not show what the assistant is to say. Split the row so that each ends with one answer, or "
                "give the model a template with {% generation %} (chat_template.jinja)"
            )
        prompt = tokenizer(opened.removeprefix(before), add_special_tokens=False)["input_ids"]
        answer = tokenizer(closed.removeprefix(opened), add_special_tokens=False)["input_ids"]
        places = [place for place, token in enumerate(answer) if token in stops]
        if not places:
            raise Unusable(f"the chat template writes no stop token after message {number + 1}")
        end = places[-1] + 1
        parts += [(prompt, False), (answer[:end], True), (answer[end:], False)]
        before = closed
    whole = render_messages(tokenizer, messages, arguments, opened=False)
    if not whole.startswith(before):
        raise Unusable("the chat template renders earlier answers differently once later messages follow")
    joined = [token for part, _ in parts for token in part]
    if tokenizer.decode(joined) != tokenizer.decode(tokenizer(before, add_special_tokens=False)["input_ids"]):
        raise Unusable("its tokens are not those of the whole conversation: the tokenizer reads a text by its context")
    return parts


def token_rows(
    rows: list[Demonstration], tokenizer: Any, stops: set[int], config: Config, split: str
) -> tuple[list[tuple[str, TokenRow]], int, int]:
    """The usable rows with their ids, and how many were too long or had no answer to learn.

    A row is never truncated. `BadInput` if more than `data.max_bad_fraction` of them are unusable.
    """
    rollout = config.rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    kept: list[tuple[str, TokenRow]] = []
    bad: list[tuple[str, str]] = []
    long = 0
    for row in rows:
        try:
            made = token_row(row, tokenizer, stops, config)
        except Unusable as error:
            bad.append((row.source, str(error)))
            continue
        length = len(made.prompt_ids) + len(made.completion_ids)
        if length > longest:
            long += 1
            bad.append(
                (
                    row.source,
                    f"{length:,} tokens, above rollout.max_prompt_length + max_completion_length ({longest:,})",
                )
            )
        else:
            kept.append((row.id, made))
    check_share(bad, len(rows), split, config.data)
    return kept, long, len(bad) - long


def to_dataset(rows: list[tuple[str, TokenRow]]) -> "Dataset":
    """A `datasets.Dataset` with the columns of `TokenRow`, `problem_id` and an unused `prompt`."""
    from datasets import Dataset

    found: dict[str, list] = {name: [getattr(row, name) for _, row in rows] for name in TokenRow._fields}
    return Dataset.from_dict(found | {"problem_id": [name for name, _ in rows], "prompt": [""] * len(rows)})
