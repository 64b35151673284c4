"""Prompts as the model sees them: the one place that applies a chat template, with `data.chat_template_kwargs`.

Training, calibration, verification, every backend of eval and the checkpoints that merge writes use it, so a policy is
trained, evaluated and served on the same prompt. TRL tokenizes a step's prompts itself and gets the same arguments as
`GRPOConfig.chat_template_kwargs`. A template is code that came with the model: whatever it raises becomes a
`BadInput`. Imports no torch; transformers and jinja2 are imported inside functions only.
"""

import contextlib
from pathlib import Path
from typing import Any

from kit.core.checkpoint_files import from_files
from kit.core.errors import BadInput, did_you_mean
from kit.core.run_files import parse

KEY = "data.chat_template_kwargs"
_SENTINEL = "The answer is 42"
# Parameters of transformers' apply_chat_template, and the variables that it passes to every template itself.
RESERVED = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt continue_final_message "
    "tokenize padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "bos_token eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens "
    "raise_exception strftime_now range dict lipsum cycler joiner namespace loop self caller".split()
)
# Text that YAML would read as another type if it were not quoted. In a template every text is true.
WORDS = ("true", "false", "none", "null", "yes", "no", "on", "off")


def arguments_of(values: dict) -> dict[str, Any]:
    """`data.chat_template_kwargs` of a configuration given as nested dictionaries (config.json).

    Runs of earlier versions have them as `train.trl.chat_template_kwargs`, which applied to training prompts only.
    """
    if own := (values.get("data") or {}).get("chat_template_kwargs"):
        return own
    before = ((values.get("train") or {}).get("trl") or {}).get("chat_template_kwargs")
    if isinstance(before, str):  # TRL accepts this too
        with contextlib.suppress(ValueError):
            before = parse(before.encode())
    return before if isinstance(before, dict) else {}


def faults(arguments: dict) -> list[str]:
    """Error texts for names and values that no template can take; `check_template` tests whether it reads them."""
    found = []
    for name, value in arguments.items():
        if not name.isidentifier():
            found.append(
                f"{KEY} names {name!r}, which is not a variable's name. Write e.g. {{enable_thinking: false}}."
            )
        elif name in RESERVED:
            found.append(f"{KEY}.{name} is passed to the template by transformers itself. Remove it.")
        elif why := _unfit(value):
            found.append(f"{KEY}.{name} {why}.")
    return found


def _unfit(value: Any) -> str:
    """Why a value cannot be a template argument; empty if it can."""
    if isinstance(value, str) and value.lower() in WORDS:
        return f"is the text {value!r}, which a template treats as true. Write it without quotes"
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return f"has keys that are not text: {value!r:.60}"
    if isinstance(value, list | dict):
        return next(filter(None, map(_unfit, value.values() if isinstance(value, dict) else value)), "")
    return ""


def question_messages(question: str, system_prompt: str | None, suffix: str | None) -> list[dict]:
    """The chat messages of a question: the system message if there is one, then the question with its suffix."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question + (suffix or "")}]


def question_of(conversation: list[dict], system_prompt: str | None) -> str | list[dict]:
    """The user's text if `question_messages` makes this conversation of it and `system_prompt`; else all messages."""
    text = conversation[-1]["content"]
    return text if conversation == question_messages(text, system_prompt, None) else conversation


def render(tokenizer: Any, conversation: list[dict], arguments: dict) -> str:
    """Render the conversation as text, with the assistant's turn opened. Raises `BadInput` if the template fails."""
    return _apply(tokenizer, conversation, arguments, tokenize=False, add_generation_prompt=True)


def render_messages(tokenizer: Any, conversation: list[dict], arguments: dict, opened: bool) -> str:
    """As `render`, with the assistant's turn `opened` after the last message or not."""
    return _apply(tokenizer, conversation, arguments, tokenize=False, add_generation_prompt=opened)


def token_ids(tokenizer: Any, conversation: list[dict], arguments: dict, **form: Any) -> list[int]:
    """Token ids of `render`'s text, with nothing added. Raises `BadInput` if the template fails.

    `form` has other arguments of `apply_chat_template`: tools, chat_template, add_generation_prompt.
    """
    form = dict(tokenize=True, add_generation_prompt=True, return_dict=True) | form
    encoded = _apply(tokenizer, conversation, arguments, **form)
    return list(encoded["input_ids"])


def _apply(tokenizer: Any, conversation: list[dict], arguments: dict, **form: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(conversation, **form, **arguments)
    except Exception as error:  # from the template's author, jinja2, or an expression in it
        failed = error
    if len(conversation) > 1 and conversation[0]["role"] == "system":
        try:
            tokenizer.apply_chat_template(conversation[1:], **form, **arguments)
        except Exception:
            pass  # it fails without the system message too
        else:
            raise BadInput(
                f"the chat template of {_name(tokenizer)} takes no system message ({_reason(failed)}). Leave "
                "data.system_prompt out, or put its text into data.prompt_suffix."
            )
    given = f" and {KEY} {arguments}" if arguments else ""
    roles = ", ".join(message["role"] for message in conversation)
    raise BadInput(
        f"the chat template of {_name(tokenizer)} fails on a conversation of {roles}{given}: {_reason(failed)}. Use a "
        "model whose chat template works, or fix chat_template.jinja in a local copy (model.path)."
    )


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", None) or "the tokenizer"


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    text = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}{f' in line {line}' if line else ''}{f': {text}' if text else ''}"


def parsed(template: str) -> Any:
    """The syntax tree of a chat template in transformers' dialect; jinja2's errors propagate."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template).environment.parse(template)


def names_read(template: str) -> set[str]:
    """Every variable that a chat template may read and does not set itself; jinja2's errors propagate."""
    from jinja2.meta import find_undeclared_variables

    return find_undeclared_variables(parsed(template))


def check_template(tokenizer: Any, conversation: list[dict], arguments: dict) -> None:
    """Raise `BadInput` unless the chat template is valid, reads every argument and renders the conversation.

    jinja2 silently ignores arguments that are never read. The conversation's system message must be rendered too.
    """
    try:
        known = names_read(tokenizer.get_chat_template())
    except Exception as error:
        raise BadInput(f"the chat template of {_name(tokenizer)} is not valid: {_reason(error)}.") from None
    if unread := [name for name in arguments if name not in known]:
        others = sorted(known - RESERVED - set(getattr(tokenizer, "special_tokens_map", {})))
        has = f"It reads {', '.join(others)}." if others else "It reads no argument at all. Remove it."
        raise BadInput(
            f"{KEY}.{unread[0]} would change nothing: the chat template of {_name(tokenizer)} never reads "
            f"{unread[0]!r}.{did_you_mean(unread[0], others, f'{KEY}.')} {has}"
        )
    text = render(tokenizer, conversation, arguments)
    if conversation[0]["role"] != "system" or conversation[0]["content"].strip() in text:
        return
    if text == render(tokenizer, conversation[1:], arguments):
        raise BadInput(
            f"the chat template of {_name(tokenizer)} drops the system message, so the model would never see it. "
            "Leave data.system_prompt out, or put its text into data.prompt_suffix."
        )


def date_arguments(tokenizer: Any, conversation: list[dict], arguments: dict) -> list[str] | None:
    """The arguments that may pin the date if the prompt depends on it (`strftime_now`); None if it does not."""
    from jinja2.nodes import Name

    template = tokenizer.get_chat_template()
    if all(node.name != "strftime_now" for node in parsed(template).find_all(Name)):
        return None
    days = ({**arguments, "strftime_now": lambda form, day=day: day} for day in ("01 Jan 2024", "02 Feb 2025"))
    first, second = (render(tokenizer, conversation, day) for day in days)
    return sorted(name for name in names_read(template) if "date" in name) if first != second else None


def end_of_turn_token(tokenizer: Any, arguments: dict | None = None) -> int:
    """Id of the token that closes an assistant's turn in the chat template; raises `BadInput` if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, so the policy would be asked with raw "
            "prompts it was not trained on. Evaluate a checkpoint saved with its chat template."
        )
    turns = [{"role": "user", "content": "2 + 40?"}, {"role": "assistant", "content": _SENTINEL}]
    rendered = _apply(tokenizer, turns, arguments or {}, tokenize=False)
    tail = rendered[rendered.rfind(_SENTINEL) + len(_SENTINEL) :]
    special = set(special_tokens(tokenizer).values())
    closing = [token for token in tokenizer(tail, add_special_tokens=False)["input_ids"] if token in special]
    if not closing:
        raise BadInput(
            f"the chat template of {tokenizer.name_or_path} ends an assistant's turn with {tail!r}, which is no "
            "special token, so nothing can stop a completion. Fix the template or the tokenizer's special tokens."
        )
    return closing[0]


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """All special tokens of a tokenizer and their ids, including unnamed ones."""
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return named | added


def stop_tokens(generation_config: Any, tokenizer: Any, arguments: dict | None = None) -> list[int]:
    """The model's stop tokens and the tokenizer's own, at which TRL and vLLM stop too.

    Raises `BadInput` if the model's lack the template's end-of-turn token.
    """
    closing = end_of_turn_token(tokenizer, arguments)
    stops = generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if wrong := [stop for stop in stops if type(stop) is not int or stop < 0]:
        raise BadInput(
            f"the model of {tokenizer.name_or_path} has the stop token {wrong[0]!r:.60}: eos_token_id in "
            "generation_config.json must be the number of a token, or a list of them."
        )
    if closing not in stops:
        shown = [tokenizer.convert_ids_to_tokens(stop) for stop in stops] or "none"
        raise BadInput(
            f"the chat template of {tokenizer.name_or_path} ends a turn with "
            f"{tokenizer.convert_ids_to_tokens(closing)!r} (id {closing}), which is not among the model's stop tokens "
            f"({shown}): every completion would run to the token limit. Add {closing} to eos_token_id in "
            "generation_config.json."
        )
    own = tokenizer.eos_token_id
    return stops if own is None or own in stops else [*stops, own]


def model_stop_tokens(
    model: str | Path, tokenizer: Any, arguments: dict | None = None, revision: str | None = None
) -> list[int]:
    """Stop tokens of a model's files, local or on the hub, as transformers reads them; errors as in `stop_tokens`."""
    from transformers import AutoConfig, GenerationConfig

    def of_config() -> Any:
        return GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
        )

    if Path(model).is_dir() and not (Path(model) / "generation_config.json").is_file():
        return stop_tokens(of_config(), tokenizer, arguments)

    def given() -> Any:
        return GenerationConfig.from_pretrained(model, revision=revision)

    if Path(model).is_dir():
        found = from_files("readable generation_config.json", model, given)
    else:
        try:
            found = given()
        except OSError:  # a hub model without one
            found = of_config()
    return stop_tokens(found, tokenizer, arguments)
