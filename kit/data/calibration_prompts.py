"""Prompts for calibrating the input ranges of formats with static activations.

`policy.quant_calib_data: train` uses the run's own training prompts, evenly spread over the split. A path is a jsonl
file; each row has a `text` that is used verbatim, a `prompt` (text, or chat messages) or the question column of
`data`; with `data.format` that function makes the prompt of a row without `text`. A file that contains a held-out
problem is refused. Everything is checked before any weight is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.chat import token_ids
from kit.core.config.schema import TRAIN, Config
from kit.core.errors import BadInput

if TYPE_CHECKING:
    from kit.data.problems import Row


def calibration_prompts(config: Config, messages: list[list[dict]], tokenizer: Any) -> list[list[int]]:
    """Token ids of `policy.quant_calib_size` prompts, each cut to `policy.quant_sequence_length` tokens.

    `messages` are the run's training prompts as chat messages. The choice is deterministic. Raises `BadInput` if there
    are too few prompts, or if a prompt file is missing, empty, or has a row without a prompt or with a held-out
    problem.
    """
    policy = config.policy
    prompts: Sequence[str | list[dict]]
    if policy.quant_calib_data == TRAIN:
        source, prompts = "the training split", messages
    else:
        source, prompts = policy.quant_calib_data, _read(Path(policy.quant_calib_data), config)
    size = policy.quant_calib_size
    if len(prompts) < size:
        what = "no prompt" if not prompts else f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        raise BadInput(
            f"{source} holds {what} and policy.quant_calib_size is {size}. Name more in policy.quant_calib_data, or "
            "lower policy.quant_calib_size."
        )
    chosen = prompts[:: len(prompts) // size][:size]
    arguments = config.data.chat_template_kwargs
    return [_token_ids(prompt, tokenizer, arguments)[: policy.quant_sequence_length] for prompt in chosen]


def _check_disjoint(rows: list[tuple[str, str | list[dict]]], config: Config) -> None:
    """Raise `BadInput` if one of these (place, prompt) equals a held-out question or contains one word for word."""
    from kit.data.leaks import find_leaks
    from kit.data.problems import Problem, load_problems

    suffix, seen = config.data.prompt_suffix, []
    for place, prompt in rows:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        # The suffix is not part of the question.
        texts += [text.removesuffix(suffix) for text in texts if suffix and text.endswith(suffix)]
        seen += [Problem("", text, "", place) for text in texts]
    heldout = load_problems(config.data, "eval")
    if leaked := find_leaks(heldout, seen):
        problem, row, whole = leaked[0]
        raise BadInput(
            f"policy.quant_calib_data {config.policy.quant_calib_data} holds {len(leaked)} of {len(heldout)} held-out "
            f"problems ({problem.source} {'is' if whole else 'is inside'} {row.source}: {problem.question[:80]!r}), "
            "so the input ranges would be fitted to problems that the run is evaluated on. Remove them from the file, "
            "or set policy.quant_calib_data to train."
        )


def _read(path: Path, config: Config) -> list[str | list[dict]]:
    """The prompts of a jsonl file: text, or chat messages."""
    if not path.is_file():
        raise BadInput(f"policy.quant_calib_data: no file at {path}. Name a jsonl file, or train.")
    from kit.data.problems import jsonl_rows

    found = []
    for row in jsonl_rows(path):
        try:
            found.append((row.source, _prompt(row, config)))
        except (ValueError, TypeError, KeyError) as error:
            raise BadInput(
                f"{row.source} has no prompt ({error}). A row is an object with text, prompt or "
                f"{config.data.question_column}."
            ) from None
    _check_disjoint(found, config)
    return [prompt for _, prompt in found]


def _prompt(place: "Row", config: Config) -> str | list[dict]:
    from kit.data.problems import Problem, chat_messages, prompt_of_row

    if (row := place.value) is None:
        raise ValueError(place.error)
    if config.data.format is not None and "text" not in row:
        if (made := prompt_of_row(config.data, row, place.source)) is None:
            raise ValueError(f"data.format {config.data.format!r} makes none of it")
        return made
    key = next((key for key in ("text", "prompt", config.data.question_column) if key in row), None)
    if key is None:
        raise ValueError(f"it has {', '.join(map(str, row))[:80] or 'no keys'}")
    value = row[key]
    if isinstance(value, list) and value and key != "text":
        return [{"role": str(one["role"]), "content": str(one["content"])} for one in value]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} is {value!r:.40}")
    return value if key == "text" else chat_messages(config.data, Problem("", value, "", ""))


def _token_ids(prompt: str | list[dict], tokenizer: Any, arguments: dict) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return token_ids(tokenizer, prompt, arguments)
