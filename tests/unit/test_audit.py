"""`make audit`: what it accepts, and that not audited is not called clean."""

import json
import re
import tomllib
from collections import Counter

import pytest

from tests.audit import ACCEPTED, ROOT, compare, judge_packages

ENTRY = {"rule": "B102", "reason": "the sandbox", "files": {"reward/a.py": 2}}


@pytest.mark.parametrize(
    ("found", "accepted", "told"),
    [
        ({("reward/a.py", "B102"): 2}, [ENTRY], []),
        ({("reward/a.py", "B102"): 3}, [ENTRY], ["3 findings of B102, 2 accepted. Fix it"]),
        ({("reward/a.py", "B102"): 1}, [ENTRY], ["Remove what is gone"]),
        ({("reward/a.py", "B102"): 2, ("kit/b.py", "B301"): 1}, [ENTRY], ["kit/b.py: 1 findings of B301, 0 accepted"]),
        ({("reward/a.py", "B102"): 2}, [ENTRY | {"reason": " "}], ["accepted without a reason"]),
    ],
)
def test_a_new_finding_and_a_stale_entry_fail(found, accepted, told):
    said = compare(Counter(found), accepted)
    assert len(said) == len(told) and all(part in line for part, line in zip(told, said, strict=True))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, []),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, ["NOT AUDITED: 1 of 1 pinned packages (a)"]),
        (
            {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]},
            ["a 1: X-1, fixed in 2."],
        ),
    ],
)
def test_a_package_that_was_not_audited_is_not_called_clean(answer, told):
    said = judge_packages(json.dumps(answer))
    assert len(said) == len(told) and all(line.startswith(part) for part, line in zip(told, said, strict=True))
    assert judge_packages("")[0].startswith("NOT AUDITED")


def test_every_accepted_finding_is_of_a_file_that_exists_and_has_a_reason():
    entries = tomllib.loads(ACCEPTED.read_text())["accepted"]
    assert len(entries) == len({entry["rule"] for entry in entries}) > 5
    for entry in entries:
        assert re.fullmatch(r"B\d{3}", entry["rule"]) and len(entry["reason"]) > 20
        assert all((ROOT / file).is_file() and count > 0 for file, count in entry["files"].items())
