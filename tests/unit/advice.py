"""The commands of the kit that a message names."""

import re


def commands(text: str) -> list[str]:
    """The command lines in a text, each up to the end of its sentence or line, parted at `&&`."""
    found = re.findall(r"(?<![\w/])python (?:-m [\w.]+|recipes/\w+\.py)[^\n`]*", text)
    lines = [re.split(r"(?:\)?[.,;:)](?=\s|$)| \()", line)[0] for line in found]
    return [one.strip() for line in lines for one in line.split(" && ")]
