"""A command of the kit that stands in a message, whole or with placeholders, is one that its program takes."""

import re

import pytest

from tests.unit.advice import commands
from tests.unit.command_lines import Command, problem, split
from tests.unit.test_named_keys import ROOT, texts
from tests.unit.test_rooms import sources

# What messages fill in (`*`), by the option before it.
FILLED = {
    "--run": "runs/tiny",
    "--format": "bf16",
    "--formats": "bf16",
    "--config": "…",
    "--only": "vllm",
    "--out": "out",
    "--adapter": "theirs",
}


def filled(command: str) -> str:
    command = re.split(r" \[| \|\| ", command)[0]  # what follows is a usage line's, or a shell's
    command = re.sub(r"\.\.+", "…", command)
    for option, value in FILLED.items():
        command = re.sub(rf"({option}) \*", rf"\1 {value}", command)
    return re.sub(r"\s*\*+", "", command)


def named_commands(room: str) -> list[Command]:
    """Commands in the strings of a room, each once; that it lacks what it requires is no fault of a sentence."""
    found = {}
    for file in sources(ROOT):
        if file.is_relative_to(ROOT / room):
            for line, text in texts(file.read_text()):
                for words in (words for command in commands(text) for words in split(filled(command))):
                    where = f"{file.relative_to(ROOT)}:{line}"
                    found.setdefault(tuple(words), Command(tuple(words), where, is_named=True))
    return list(found.values())


@pytest.mark.parametrize("room", ["kit", "recipes", "merge", "eval", "launch", "reward"])
def test_every_command_in_a_message_is_one_that_its_program_takes(room):
    found = named_commands(room)
    assert found
    assert [wrong for command in found if (wrong := problem(command))] == []
