"""The one reader of JSON files: what it refuses, and how it says so."""

import ast
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict

import pytest

from kit.core import file_kinds
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_files import (
    DEEPEST,
    MOST_BYTES,
    MOST_LINE_BYTES,
    FileKind,
    PathText,
    Within,
    find_fault,
    numbered_lines,
    parse,
    read_json,
    read_lines,
    read_object,
    read_optional,
)

ROOT = Path(__file__).parents[2]


class Inner(TypedDict, total=False):
    size: Required[Annotated[int, Within(0, 10)]]
    name: PathText | None


class Outer(TypedDict, total=False):
    kind: Required[Literal["a", "b"]]
    parts: dict[str, Inner]
    pair: tuple[float, float]
    words: list[str]
    either: list[Inner] | str
    free: Any
    says: str


KIND = FileKind("an example", Outer, "Make another.")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8"),
        (b'{"kind": "\xe9"}', "byte 10 is not UTF-8"),
        (b'{"kind": "a"', "Expecting ',' delimiter"),
        (b'{"kind": "a"}{}', "Extra data"),
        (b"\x00" * 40, "Expecting value"),
        (b'{"free": NaN}', "NaN"),
        (b'{"free": -Infinity}', "-Infinity"),
        (b'{"free": 1%s}' % (b"0" * 5000), "an integer of 5,001 digits"),
        (b'{"free": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (nested(DEEPEST + 1).encode(), f"more than {DEEPEST} levels deep"),
        (nested(100_000).encode(), f"more than {DEEPEST} levels deep"),
        ((b'{"a":' * 100_000), f"more than {DEEPEST} levels deep"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_the_reason(tmp_path, data, reason):
    file = tmp_path / "example.json"
    file.write_bytes(data)
    with pytest.raises(BadInput) as refused:
        read_object(file, KIND)
    assert str(refused.value).startswith(f"{file} is not JSON: ")
    assert reason in str(refused.value) and str(refused.value).endswith(". Make another.")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the content is [], expected an object"),
        (None, "the content is None, expected an object"),
        ({}, "kind is missing, expected 'a' or 'b'"),
        ({"kind": "c"}, "kind is 'c', expected 'a' or 'b'"),
        ({"kind": 1}, "kind is 1, expected 'a' or 'b'"),
        ({"kind": "a", "parts": []}, "parts is [], expected an object"),
        ({"kind": "a", "parts": {"x": None}}, "parts.x is None, expected an object"),
        ({"kind": "a", "parts": {"x": {}}}, "parts.x.size is missing, expected an integer"),
        ({"kind": "a", "parts": {"x": {"size": True}}}, "parts.x.size is True, expected an integer"),
        ({"kind": "a", "parts": {"x": {"size": 11}}}, "parts.x.size is 11, expected an integer from 0 to 10"),
        ({"kind": "a", "parts": {"x": {"size": 1, "name": 2}}}, "parts.x.name is 2, expected text or null"),
        (
            {"kind": "a", "parts": {"x": {"size": 1, "name": "a\0b"}}},
            "parts.x.name is 'a\\x00b', expected text or",
        ),
        ({"kind": "a", "pair": [1, 2, 3]}, "pair is [1, 2, 3], expected a list of 2"),
        ({"kind": "a", "pair": [1, "2"]}, "pair[1] is '2', expected a number"),
        ({"kind": "a", "pair": [1, 1e999]}, "pair[1] is inf, expected a number"),
        ({"kind": "a", "words": ["x", 3]}, "words[1] is 3, expected text"),
        ({"kind": "a", "either": 3}, "either is 3, expected a list or text"),
        ({"kind": "a", "either": [{"size": -1}]}, "either[0].size is -1, expected an integer from 0 to 10"),
        ({"kind": "a", "says": None}, "says is None, expected text"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place_and_what_was_expected(tmp_path, value, said):
    file = tmp_path / "example.json"
    file.write_text(json.dumps(value).replace("Infinity", "1e999"))
    with pytest.raises(BadInput) as refused:
        read_object(file, KIND)
    assert f"{file} is not an example: {said}" in str(refused.value)
    assert str(refused.value).endswith(". Make another.") and "\n" not in str(refused.value)


def test_what_fits_is_returned_with_keys_that_the_schema_does_not_know(tmp_path):
    value = {"kind": "b", "parts": {"x": {"size": 0, "new": [1]}}, "pair": [1, 2.5], "either": "x", "newer": None}
    value |= {"says": "\0 and 😀", "free": json.loads(nested(DEEPEST - 1))}
    file = tmp_path / "example.json"
    file.write_text("\ufeff" + json.dumps(value))
    assert read_object(file, KIND) == value
    assert read_optional(file, KIND) == value and read_optional(tmp_path / "none.json", KIND) == {}


@pytest.mark.parametrize("text", ["a\x1b[31mb", "x\ny", "\u202e", "k" * 5000])
def test_a_message_is_one_line_that_a_terminal_can_show_whatever_the_key_is(tmp_path, text):
    file = tmp_path / "example.json"
    file.write_text(json.dumps({"kind": "a", "parts": {text: {"size": text}}}))
    with pytest.raises(BadInput) as refused:
        read_object(file, KIND)
    assert str(refused.value).isprintable() and len(str(refused.value)) < len(str(file)) + 300


def test_nan_is_allowed_from_other_programs_but_not_where_a_number_is_expected(tmp_path):
    foreign = FileKind(KIND.what, KIND.schema, KIND.fix, is_foreign=True)
    assert find_fault(parse(b'{"kind": "a", "free": [0.0, Infinity]}', is_foreign=True), Outer) is None
    (tmp_path / "x.json").write_text('{"kind": "a", "pair": [0, NaN]}')
    with pytest.raises(BadInput, match=r"pair\[1\] is nan, expected a number"):
        read_object(tmp_path / "x.json", foreign)


def test_what_is_no_readable_file_is_refused_at_once(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as file:
        file.truncate(MOST_BYTES + 1)
    said = {
        "none": "does not exist",
        "folder": "is not a file",
        "pipe": "is not a file",
        "loop": "cannot be read",
        "x" * 300: "cannot be read: File name too long",
        "a\0b": "cannot be read: ",
        "sparse": f"is larger than {MOST_BYTES >> 20} MiB",
        "/dev/zero": "is not a file",
    }
    for name, reason in said.items():
        for read in (read_object, read_lines):
            if (name, read) != ("sparse", read_lines):
                with pytest.raises(BadInput, match=reason):
                    read(tmp_path / name, KIND)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "x.json").chmod(0)
    with pytest.raises(BadInput, match=r"x.json cannot be read: Permission denied"):
        read_object(tmp_path / "x.json", KIND)


def test_an_error_while_reading_is_named_too(tmp_path):
    with pytest.raises(BadInput, match=r"mem cannot be read: .*(error|argument)"):
        read_json(Path("/proc/self/mem"))


def test_a_bad_line_is_named_and_only_a_growing_file_may_end_in_half_of_one(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"kind": "a"}\n\n{"kind": "b"}\n{"kind": ')
    assert [row["kind"] for row in read_lines(file, KIND, may_be_growing=True)] == ["a", "b"]
    with pytest.raises(BadInput, match=r"lines.jsonl:4 is damaged: it is not JSON .* Make another\."):
        read_lines(file, KIND)
    file.write_text('{"kind": "a"}\n{"kind": 3}\n{"kind": "b"}')
    with pytest.raises(BadInput, match=r"lines.jsonl:2 is not an example: kind is 3, expected 'a' or 'b'\. Make"):
        read_lines(file, KIND, may_be_growing=True)
    file.write_text('{"kind": "a"}\n{"kind": "b"}')
    assert [number for number, _ in numbered_lines(file, KIND)] == [1, 2]


def test_a_line_without_end_is_refused_before_it_fills_memory(tmp_path):
    file = tmp_path / "lines.jsonl"
    with open(file, "wb") as lines:
        lines.truncate(1 << 40)  # sparse: takes no space
    with pytest.raises(BadInput, match=rf"lines.jsonl:1 is longer than {MOST_LINE_BYTES >> 20} MiB"):
        read_lines(file, KIND)


def test_any_part_of_a_configuration_fits_and_a_wrong_type_does_not():
    assert find_fault({}, Config) is None
    assert find_fault({"train": {"max_steps": 3, "new": 1}, "newer": 5}, Config) is None
    for value, said in [
        ({"train": []}, "train is [], expected an object"),
        ({"train": {"max_steps": None}}, "train.max_steps is None, expected an integer"),
        ({"eval": {"gate": {"min_gain": "x"}}}, "eval.gate.min_gain is 'x', expected a number"),
    ]:
        assert str(find_fault(value, Config)) == said


def test_every_schema_can_be_checked_and_every_kind_says_how_to_go_on():
    kinds = [value for value in vars(file_kinds).values() if isinstance(value, FileKind)]
    assert len(kinds) > 30
    for kind in kinds:
        assert kind.fix.endswith(".") and not kind.what.endswith(".")
        for value in (None, [], {}, [None], {"x": None}, 3, "x"):
            find_fault(value, kind.schema)


# Text that is no file of a run: between processes of one command, of a user's data, in a model's answer.
NOT_FILES = {
    "kit/core/as_typed.py": "words of a command line, from the environment",
    "kit/core/checksum.py": "a value as JSON gives it back",
    "kit/core/run_files.py": "the reader",
    "kit/data/pass_rates.py": "a value as JSON gives it back",
    "kit/data/problems.py": "the user's data",
    "kit/data/references.py": "a gold answer",
    "kit/environments/verifiers.py": "arguments of a tool call",
    "launch/checks/steps.py": "lines of a child",
    "launch/checks/children.py": "lines of a child",
    "merge/awq.py": "the request of the process that started it",
    "merge/gguf.py": "answers of a child",
    "merge/llamacpp.py": "answers of a child, and of a server",
    "eval/cells.py": "a value as JSON gives it back",
    "eval/endpoint.py": "a value as JSON gives it back",
    "eval/recheck.py": "a value as JSON gives it back",
    "eval/lm_eval/problems.py": "in the environment of lm_eval, without the kit",
    "eval/serving_client.py": "an event of a server",
    "eval/vllm_backend.py": "the answer of a worker",
    "eval/vllm_worker.py": "the request of the process that started it",
    "reward/pool.py": "the answer of a worker",
    "reward/worker.py": "the request of the pool",
    "reward/code_gold.py": "a gold answer",
    "reward/gold.py": "a gold answer",
    "reward/countdown.py": "a gold answer",
    "reward/llm_judge.py": "the answer of a server",
}


def test_no_other_module_parses_a_file():
    found = set()
    for room in ("kit", "launch", "merge", "eval", "recipes", "reward"):
        for file in (ROOT / room).rglob("*.py"):
            calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
            if any(ast.unparse(call) in ("json.loads", "json.load") for call in calls):
                found.add(str(file.relative_to(ROOT)))
    found = {name for name in found if not name.startswith("reward/sandbox")}  # frames between its processes
    assert found == NOT_FILES.keys()
