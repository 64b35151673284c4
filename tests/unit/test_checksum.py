"""Checksums in the kit's own JSON: any bit flipped is found, and a file of an earlier version is read as it is."""

import json
from typing import Any

import pytest

from kit.core.checksum import KEY, content_hash, line_of, with_checksum, without_checksum
from kit.core.errors import BadInput
from kit.core.ledger import check_ledger, ledger_facts, read_ledger
from kit.core.run_directory import write_json, write_record
from kit.core.run_files import FileKind, read_json, read_lines

ROW = FileKind("a row", dict[str, Any], "Restore the file from a copy.")
VALUE = {"text": "é \u2028 \U0001f600", "small": 1e-07, "none": None, "list": [1, 2.5, {"deep": True}], "": "x"}


def flips(content: bytes):
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            yield bytes(flipped)


def test_a_checksum_is_missed_when_any_bit_of_it_is_flipped(tmp_path):
    """A damaged file is refused, or it still holds the same values."""
    file = tmp_path / "record.json"
    write_record(file, VALUE)
    assert read_json(file) == VALUE
    harmless = 0
    for content in flips(file.read_bytes()):
        file.write_bytes(content)
        try:
            assert read_json(file) == VALUE
            harmless += 1
        except BadInput as error:
            assert str(file) in str(error)
    assert harmless < 40, "the case of digits in \\u00e9 and of the e in 1e-07"


def test_every_bit_flipped_in_a_jsonl_file_is_found(tmp_path):
    file, rows = tmp_path / "rows.jsonl", [{"step": step, "problem_ids": [f"p{step}"]} for step in range(3)]
    content = "".join(f"{line_of(row)}\n" for row in rows).encode()
    for flipped in flips(content):
        file.write_bytes(flipped)
        with pytest.raises(BadInput, match=r"rows\.jsonl"):
            read_lines(file, ROW, may_be_growing=True)
    file.write_bytes(content)
    assert read_lines(file, ROW, may_be_growing=True) == rows


def test_spacing_and_the_order_of_keys_are_not_what_a_checksum_is_of():
    sealed = with_checksum({"a": 1, "b": {"c": [2]}})
    assert without_checksum(json.loads(json.dumps(sealed, indent=7)), "f") == {"a": 1, "b": {"c": [2]}}
    assert without_checksum(dict(reversed(sealed.items())), "f") == {"a": 1, "b": {"c": [2]}}
    assert content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1}) != content_hash({"a": 2, "b": 1})
    assert content_hash({10: "x", 9: "y"}) == content_hash({"10": "x", "9": "y"})


def test_a_value_that_is_written_again_gets_a_new_checksum(tmp_path):
    file = tmp_path / "record.json"
    write_record(file, {"a": 1})
    write_record(file, read_json(file) | {"a": 2})
    assert read_json(file) == {"a": 2}
    assert with_checksum(with_checksum({"a": 1})) == with_checksum({"a": 1})


@pytest.mark.parametrize("value", [{"a": 1}, [1], "x", None, {"blake2b": "00"}])
def test_what_an_earlier_version_wrote_is_read_as_it_is(tmp_path, value):
    write_json(tmp_path / "old.json", value)
    assert read_json(tmp_path / "old.json") == value


def test_lines_of_an_earlier_version_may_come_before_those_with_a_checksum(tmp_path):
    (file := tmp_path / "rows.jsonl").write_text('{"step": 1}\n\n' + line_of({"step": 2}) + "\n")
    assert read_lines(file, ROW, may_be_growing=True) == [{"step": 1}, {"step": 2}]


def test_a_line_without_a_checksum_after_one_with_it_is_refused(tmp_path):
    (file := tmp_path / "rows.jsonl").write_text(line_of({"step": 1}) + '\n{"step": 2}\n')
    with pytest.raises(BadInput, match=rf"rows\.jsonl:2 has no {KEY}, unlike the line before it"):
        read_lines(file, ROW, may_be_growing=True)


@pytest.mark.parametrize("rest", ['{"step": 2, "re', "\0" * 300, '{"step": 2, "text": "\\u00'])
def test_a_last_line_that_a_crash_cut_is_skipped_unless_the_file_is_complete(tmp_path, rest):
    (file := tmp_path / "rows.jsonl").write_text(line_of({"step": 1}) + "\n" + rest)
    assert read_lines(file, ROW, may_be_growing=True) == [{"step": 1}]
    with pytest.raises(BadInput, match=r"rows\.jsonl:2 is damaged"):
        read_lines(file, ROW)


@pytest.mark.parametrize("line", ["[1]", "null", "{", "\0", '{"a": 1} {"b": 2}', "[" * 100_000])
def test_a_line_within_a_file_that_is_no_object_is_named(tmp_path, line):
    (file := tmp_path / "rows.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(BadInput, match=r"rows\.jsonl:2 is (damaged|not a row)"):
        read_lines(file, ROW, may_be_growing=True)


def test_a_ledger_is_compared_up_to_the_step_of_the_artifact(tmp_path):
    file, artifact = tmp_path / "ledger.jsonl", tmp_path / "v000002"
    rows = [{"step": 1, "problem_ids": ["a"]}, {"step": 3, "problem_ids": ["c"]}, {"step": 2, "problem_ids": ["b"]}]
    file.write_text("".join(f"{line_of(row)}\n" for row in rows))  # step 3 was drawn ahead
    manifest = {"step": 2, "ledger": ledger_facts(file, 2)}
    file.write_text("".join(f"{line_of(row)}\n" for row in (rows[0], rows[2])))  # as a resume leaves it
    check_ledger(file, manifest, artifact)
    check_ledger(file, {"step": 2}, artifact)
    file.write_text(line_of(rows[0]) + "\n")
    with pytest.raises(BadInput, match=r"has 1 lines up to step 2, and 2 were recorded\. Restore it"):
        check_ledger(file, manifest, artifact)


@pytest.mark.parametrize("row", [{"step": 1}, {"problem_ids": []}, {"step": "1", "problem_ids": []}])
def test_a_line_that_is_no_entry_is_named(tmp_path, row):
    (file := tmp_path / "ledger.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=r"ledger\.jsonl:1 is not an entry of a ledger"):
        read_ledger(file)
