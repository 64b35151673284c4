"""A reward model: a local checkpoint with one output scores each completion.

The conversation, prompt and completion, is rendered by the chat template of the model's own tokenizer. A conversation
longer than its context is None, never truncated: a cut completion is another one. The model is loaded once in each
process, before the run's base, and stays on its device; the memory plan does not count it. Imports torch and
transformers inside functions only.
"""

import math
import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kit.core.chat import question_messages
from kit.core.checkpoint_files import from_files
from kit.core.errors import BadInput, CheckFailed
from kit.core.progress import beat
from reward.pool import Verdict
from reward.score import Budget, Message, Messages, Pool, Prompts, Rewards

if TYPE_CHECKING:
    from kit.core.config.schema import Config

KEY = "reward.options.reward_model"


class Loaded(NamedTuple):
    """A model and its tokenizer, on `device`."""

    model: Any
    tokenizer: Any
    device: str


def reward_model(
    prompts: Prompts,
    completions: Messages,
    *,
    path: str,
    batch_size: int = 8,
    max_length: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str = "auto",
    pool: Pool = None,
    budget: Budget = None,
    **_: Any,
) -> Rewards:
    """The model's output for every completion, unscaled; None where it is not finite or the conversation too long.

    `max_length` is in tokens of the model's tokenizer (null: its context). `dtype` auto is the checkpoint's; `device`
    auto is this process's GPU, or the CPU.
    """
    import torch

    loaded = load(path, dtype, device)
    most = max_length or context_of(loaded.model.config) or math.inf
    asked = prompts or [""] * len(completions)
    rows = [rendered(loaded.tokenizer, *pair) for pair in zip(asked, completions, strict=True)]
    found: Rewards = [None] * len(rows)
    reasons = ["too long" if len(ids) > most else "not finite" for ids in rows]
    # Rows of similar lengths share a batch; without a padding token, transformers cannot find the end of a padded row.
    order = sorted((index for index, ids in enumerate(rows) if len(ids) <= most), key=lambda index: len(rows[index]))
    padding = loaded.model.config.get_text_config().pad_token_id
    size = 1 if padding is None else batch_size
    for start_ in range(0, len(order), size):
        beat()
        batch = order[start_ : start_ + size]
        width = max(len(rows[index]) for index in batch)
        ids = torch.full((len(batch), width), padding or 0)  # (b, W), padded on the right
        mask = torch.zeros_like(ids)
        for place, index in enumerate(batch):
            ids[place, : len(rows[index])] = torch.tensor(rows[index])
            mask[place, : len(rows[index])] = 1
        with torch.inference_mode():
            scores = loaded.model(input_ids=ids.to(loaded.device), attention_mask=mask.to(loaded.device)).logits
        for index, score in zip(batch, scores[:, 0].float().tolist(), strict=True):
            found[index] = score if math.isfinite(score) else None
    if budget is not None:
        verdicts = [
            Verdict(None if score is None else True, reason) for score, reason in zip(found, reasons, strict=True)
        ]
        budget.record(verdicts, [f"conversation of {len(ids):,} tokens" for ids in rows])
    return found


def rendered(tokenizer: Any, prompt: Message, completion: Message) -> list[int]:
    """Token ids of a prompt with its completion, by the chat template; `CheckFailed` if it fails on them."""
    conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    try:
        encoded = tokenizer.apply_chat_template([*conversation, *answer], tokenize=True, return_dict=True)
    except Exception as error:  # from the template's author, or jinja2
        roles = ", ".join(one["role"] for one in [*conversation, *answer])
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckFailed(
            f"the chat template of the reward model {tokenizer.name_or_path} fails on {roles}: {reason}."
        ) from None
    return list(encoded["input_ids"])


def context_of(config: Any) -> int | None:
    """Most tokens of a sequence that the model takes; None without a limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def own_device() -> str:
    """The GPU of this process, or cpu."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=4)
def load(path: str, dtype: str, device: str) -> Loaded:
    """The model of a checked checkpoint in evaluation mode, frozen; the same for equal arguments.

    Raises `ValueError` if weights are missing, which transformers would draw at random.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = own_device() if device == "auto" else device
    model, info = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its files lack {', '.join(missing[:3])}")
    model = model.to(place).eval().requires_grad_(False)
    return Loaded(model, AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False), place)


def check_options(path: str, batch_size: int, max_length: int | None, device: str, **_: Any) -> None:
    """Raise `ValueError` unless `path` is a checkpoint's directory and the numbers make sense."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"path is {path!r}, which holds no config.json (seen from {Path.cwd()}).")
    if batch_size < 1 or (max_length is not None and max_length < 1):
        raise ValueError(f"batch_size ({batch_size}) and max_length ({max_length}) must be at least 1.")
    if device not in ("auto", "cpu", "cuda") and not (device.startswith("cuda:") and device[5:].isdecimal()):
        raise ValueError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N.")


def check_run(
    config: "Config", columns: Collection[str], *, path: str, max_length: int | None = None, **_: Any
) -> None:
    """Raise `BadInput` unless the checkpoint has one output and a chat template that renders the run's conversations,
    and the longest of them fits its context. Reads no weights."""
    from transformers import AutoConfig, AutoTokenizer

    where = f"{KEY}.path {path}"
    facts = from_files(
        "model config", where, lambda: AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    tokenizer = from_files(
        "tokenizer", where, lambda: AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    )
    names = getattr(facts, "architectures", None) or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise BadInput(
            f"{KEY}.path: {path} holds a {', '.join(names) or 'model without architectures'}. A reward model is saved "
            "from a class that ends in ForSequenceClassification."
        )
    if facts.num_labels != 1:
        raise BadInput(f"{KEY}.path: {path} has {facts.num_labels} labels (num_labels); a reward model has 1.")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(f"{KEY}.path: the tokenizer of {path} has no chat template. Save one with it.")
    asked = question_messages("2 + 40?", config.data.system_prompt, config.data.prompt_suffix)
    try:
        rendered(tokenizer, asked, "42")
    except CheckFailed as error:
        raise BadInput(f"{KEY}.path: {error} Use another model, or fix its chat_template.jinja.") from None
    wanted = config.rollout.max_prompt_length + config.rollout.max_completion_length
    context = context_of(facts)
    if context is not None and (max_length or context) > context:
        raise BadInput(f"{KEY}.max_length ({max_length}) exceeds the context of {path} ({context}).")
    most = max_length or context
    if most is not None and wanted > most:
        raise BadInput(
            f"rollout.max_prompt_length + max_completion_length ({wanted}) exceeds what the reward model {path} reads "
            f"({most} tokens), so long completions would have no reward. Lower one of them, or use another model."
        )


def start(
    *,
    path: str,
    dtype: str = "auto",
    device: str = "auto",
    **_: Any,
) -> None:
    """Load the model; `BadInput` if its files or the device do not allow it."""
    try:
        load(path, dtype, device)
    except Exception as error:  # those of transformers, safetensors and CUDA share no base class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{KEY}: {path} cannot be loaded on {device}: {reason}") from None


reward_model.check_options = check_options  # type: ignore[attr-defined]
reward_model.check_run = check_run  # type: ignore[attr-defined]
reward_model.start = start  # type: ignore[attr-defined]
