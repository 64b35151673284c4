"""Set the run's `data.chat_template_kwargs` as defaults in the chat template of a merged checkpoint.

A server then renders the training's prompt without passing them; a caller's own arguments override them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from kit.core.chat import names_read, render
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import TOKENIZER_CONFIG
from kit.core.run_files import read_object

# Files that hold templates under a key; the other files hold one template each, as transformers 5 writes them.
IN_JSON = ("tokenizer_config.json", "chat_template.json")
PROBES = (
    [{"role": "user", "content": "2 + 40?"}],
    [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 40?"}],
    [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2."}, {"role": "user", "content": "40?"}],
)


def literal(value: Any) -> str:
    """A JSON value as a jinja2 expression."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return ascii(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(entry)}' for key, entry in value.items())}}}"
    return repr(value)


def with_defaults(template: str, arguments: dict[str, Any]) -> str:
    """Prepend defaults for those of the arguments that the template reads; its own text is unchanged to the byte. An
    invalid template is returned unchanged."""
    try:
        names = names_read(template)
    except TemplateSyntaxError:
        return template
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {literal(value)} %}}{{%- endif %}}"
        for name, value in arguments.items()
        if name in names
    ]
    if not lines:
        return template
    return prepended("".join(lines), template)


def prepended(block: str, template: str) -> str:
    """`template` after statements or a comment that render as nothing."""
    # transformers drops a line feed after a block, and blanks before a block that begins a line. A line feed of our
    # own keeps leading ones as they were.
    return block + ("\n" if template[:1].isspace() else "") + template


def set_defaults(directory: Path, arguments: dict[str, Any]) -> None:
    """Give every chat template of a checkpoint these defaults."""
    change_templates(directory, lambda text: with_defaults(text, arguments))


def change_templates(directory: Path, change: Callable[[str], str]) -> None:
    """Apply `change` to every chat template of a checkpoint."""
    for file in [
        directory / "chat_template.jinja",
        *sorted((directory / "additional_chat_templates").rglob("*.jinja")),
    ]:
        if file.is_file():
            file.write_bytes(change(file.read_bytes().decode()).encode())
    for file in (directory / name for name in IN_JSON):
        if not file.is_file():
            continue
        facts = read_object(file, TOKENIZER_CONFIG)
        if facts.get("chat_template"):
            facts["chat_template"] = _each(facts["chat_template"], change)
            file.write_text(json.dumps(facts, indent=2) + "\n")


def _each(held: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to the templates under a key: one, {name: template}, or [{"name", "template"}]."""
    if isinstance(held, str):
        return change(held)
    if isinstance(held, dict):
        return {name: change(text) for name, text in held.items()}
    return [{**entry, "template": change(entry["template"])} for entry in held]


def check_defaults(source: Path, directory: Path, arguments: dict[str, Any]) -> None:
    """Raise `CheckFailed` unless `directory` renders without arguments exactly what `source` renders with them."""
    from transformers import AutoTokenizer

    before, after = (AutoTokenizer.from_pretrained(place, trust_remote_code=False) for place in (source, directory))
    for conversation in PROBES:
        try:
            wanted = render(before, conversation, arguments)
        except BadInput:  # a template may not support system messages
            continue
        if (found := render(after, conversation, {})) != wanted:
            raise CheckFailed(
                f"the chat template with defaults {arguments} renders {found!r} where the original with these "
                f"arguments renders {wanted!r}. It was not published."
            )
