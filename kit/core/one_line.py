"""Text from a model or a file as a terminal, a page or a comment can show it: nothing in it is a command."""

import html
import re
import unicodedata

# Control, format (including direction marks), surrogate, private and unassigned characters.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")
# Control characters except tab and line feed (escape sequences, carriage return), marks that reverse the direction of
# text, halves of surrogate pairs, and the noncharacters that XML forbids.
COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def printable(text: object) -> str:
    """The text with every character replaced that a terminal or a page would obey instead of showing."""
    return COMMANDS.sub("\ufffd", str(text).replace("\r\n", "\n"))


def in_markdown(text: object) -> str:
    """The text on one line, with the syntax of HTML and Markdown escaped, and addresses that are no links."""
    flat = html.escape(" ".join(printable(text).split()), quote=False)
    flat = re.sub(r"([\\`*\[\]|~])", r"\\\1", flat)
    return re.sub(r"(?i)\bwww\.", "www&#46;", flat.replace("://", "&#58;//"))


def as_paragraph(text: object) -> str:
    """Like `in_markdown`, for the start of a line, where symbols and numbers would begin a heading or a list."""
    shown = re.sub(r"^([#+\-=])", r"\\\1", in_markdown(text))
    return re.sub(r"^(\d+)([.)])", r"\1\\\2", shown)


def in_comment(text: object) -> str:
    """The text on one line, for a comment of a script: a line feed would end it."""
    return printable(str(text).replace("\n", "\\n"))


def one_line(text: str, most: int) -> str:
    """`text` on one line of at most `most` characters: its beginning and, if it is longer, its end, where answers are.

    Characters that would move a terminal's cursor, color it or reverse the text direction are shown as "·".
    """
    shown = " ".join(text[: 4 * most].split()) if len(text) <= 4 * most else None
    if shown is None:
        shown = " ".join(text[: 2 * most].split()) + " " * (2 * most) + " ".join(text[-2 * most :].split())
    shown = "".join("·" if unicodedata.category(character) in HIDDEN else character for character in shown)
    if len(shown) <= most:
        return shown
    head = max(1, (most - 3) // 3)
    return f"{shown[:head].rstrip()} … {shown[-(most - head - 3) :].lstrip()}" if most > 8 else shown[:most]
