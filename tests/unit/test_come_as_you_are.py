"""The tables "Come as you are" of the README: their keys exist, their cards take them, and their tests are there."""

import re

import pytest
import yaml

from kit.core.config.card_rules import server_faults, trainer_faults
from kit.core.config.load import config_from_dict, load_config, to_dict
from kit.plan.gpus import parse_gpus
from tests.conftest import ROOT

SECTION = (ROOT / "README.md").read_text().split("\n## Come as you are\n")[1].split("\n## ")[0]
ROWS: dict[str, list[list[str]]] = {}  # kind -> rows of (what, write, test)
for line in SECTION.splitlines():
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split(" | ")]) == 3:
        if cells[1] == "write":
            ROWS[kind := cells[0]] = []
        else:
            ROWS[kind].append(cells)
EIGHT_B = "recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml"


def with_keys(text: str, file: str = EIGHT_B):
    """The configuration of `file` with the keys in a cell's code; `BadInput` for one that does not exist."""
    values = to_dict(load_config(file))
    if not text.startswith("nothing"):
        for group, keys in yaml.safe_load(text.strip("`")).items():
            values[group] = values[group] | keys
    return config_from_dict(values)


def test_as_many_ways_as_the_page_promises():
    count = {kind: len(rows) for kind, rows in ROWS.items()}
    assert count.pop("card") == 6 and count.pop("reward") == 6 and count.pop("data") == 5
    assert count.pop("adapter") >= 3 and count.pop("model") >= 1 and not count
    families = set(re.findall(r"[A-Z][\w]+", ROWS["model"][0][0]))
    assert len(families) >= 10


@pytest.mark.parametrize("kind", ROWS)
def test_what_has_to_be_written_is_what_the_configuration_then_has(kind):
    for _, write, _ in ROWS[kind]:
        resolved = to_dict(with_keys(write))
        for group, keys in ({} if write.startswith("nothing") else yaml.safe_load(write.strip("`"))).items():
            assert {key: resolved[group][key] for key in keys} == keys, write


@pytest.mark.parametrize("kind", ROWS)
def test_every_named_test_is_there(kind):
    for _, _, named in ROWS[kind]:
        if named != "the same":
            file, _, test = named.strip("`").partition("::")
            assert f"\ndef {test}" in (ROOT / file).read_text(), named


def test_every_card_takes_its_row():
    for names, write, _ in ROWS["card"]:
        config = with_keys(write)
        for name in re.findall(r"`([\w]+)`", names):
            card = parse_gpus(name)[0]
            found = (card.name, card.capability)
            assert [*trainer_faults(config, *found), *server_faults(config, *found)] == [], name
