"""The lists of tests/evidence/faults.py stay true: every fault can be put in, and names tests that exist."""

import ast
import functools
from pathlib import Path

import pytest

from tests.evidence.faults import Fault, read_faults

ROOT = Path(__file__).parents[2]


@functools.cache
def names_in(file: str) -> set[str]:
    """The functions and classes of a file."""
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}


def problem(fault: Fault) -> str:
    """What keeps a fault from being put in and noticed, "" when nothing does."""
    text = (ROOT / fault.file).read_text()
    if (found := text.count(fault.old)) != 1:
        return f"{fault.file}: {fault.fault}: its text stands there {found} times"
    try:
        ast.parse(text.replace(fault.old, fault.new))
    except SyntaxError as error:
        return f"{fault.file}: {fault.fault}: {error}"
    for test in fault.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            return f"{fault.file}: {fault.fault}: no file {file}"
        if name and name.split("[")[0].rpartition("::")[2] not in names_in(file):
            return f"{fault.file}: {fault.fault}: no test {test}"
    return ""


def test_every_listed_fault_can_be_put_in_and_names_its_tests():
    faults = read_faults()
    assert [text for text in map(problem, faults) if text] == []
    assert len({(fault.file, fault.fault) for fault in faults}) == len(faults)


@pytest.mark.parametrize(
    ("old", "new", "tests", "complaint"),
    [
        ("no such text", "x", (), "0 times"),
        ("math.sqrt(rank) if", "math.sqrt(rank if", (), "'(' was never closed"),
        ("math.sqrt(rank) if", "rank if", ("tests/unit/test_none.py",), "no file"),
        ("math.sqrt(rank) if", "rank if", ("tests/unit/test_lora.py::test_none",), "no test"),
    ],
)
def test_a_row_that_went_stale_is_found(old, new, tests, complaint):
    assert complaint in problem(Fault("kit/core/lora.py", "planted", old, new, tests))
