r"""Forms that a bare answer may be written in: as it is, in `\boxed{}`, after `####`, in a tag or behind a label.

A form is a text with `{answer}` in place of the answer. `forms_for` puts those that a prompt mentions first, so a
reward that reads a form of its own is asked in it.
"""

import re

PLACE = "{answer}"
BARE = PLACE
BOXED, HASH = r"\boxed{{answer}}", "#### {answer}"
THOUGHT = "<think>\nI compare the parts.\n</think>\n"
USUAL = (
    BARE,
    BOXED,
    HASH,
    "<answer>{answer}</answer>",
    f"{THOUGHT}<answer>{{answer}}</answer>",
    f"{THOUGHT}{{answer}}",
    "The answer is {answer}.",
    r"<answer>\boxed{{answer}}</answer>",
)
MOST_OF_A_KIND = 4  # tags, labels and keys that are taken from a prompt

_TAG = re.compile(r"<(\w+)>")
_KEY = re.compile(r'"(\w{1,30})"\s*:')
_LABEL = re.compile(r"""(?:^|[\s'"“‘`(*])([^\W\d_][\w -]{0,20}:)""", re.MULTILINE)


def asked_forms(prompt: str) -> list[str]:
    r"""The forms that a prompt asks for in so many words: a tag, `\boxed`, `####`; empty if it mentions none."""
    tags = [tag for tag in dict.fromkeys(_TAG.findall(prompt)) if f"</{tag}>" in prompt]
    tagged = [f"<{tag}>{{answer}}</{tag}>" for tag in tags if tag != "think"][:MOST_OF_A_KIND]
    thought = THOUGHT if "think" in tags else ""
    marked = [form for mark, form in ((r"\boxed", BOXED), ("####", HASH)) if mark in prompt]
    return [thought + form for form in (*tagged, *marked)]


def forms_for(prompt: str, own: str | None = None) -> list[str]:
    """The forms to try, first those that the prompt asks for; only `own` if it is set (`reward.answer_form`)."""
    if own is not None:
        return [own]
    keys = [f'{{"{key}": "{PLACE}"}}' for key in dict.fromkeys(_KEY.findall(prompt))][:MOST_OF_A_KIND]
    labels = [f"{label} {PLACE}" for label in dict.fromkeys(_LABEL.findall(prompt))][-MOST_OF_A_KIND:]
    return [*dict.fromkeys([*asked_forms(prompt), *USUAL, *keys, *labels])]


def written(form: str, answer: str) -> str:
    """The answer in a form."""
    return form.replace(PLACE, answer)


def described(form: str) -> str:
    """A form as a message shows it."""
    return "as it is" if form == BARE else "as " + " ".join(form.replace(PLACE, "…").split())
