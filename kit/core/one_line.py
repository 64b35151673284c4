"""Text from a model or a file as one line that a terminal can show."""

import unicodedata

# Control, format (including direction marks), surrogate, private and unassigned characters.
HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn")


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
