"""A key of the configuration that a message names is one that a YAML may hold."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.core.config.load import REPLACED, leaves
from tests.unit.test_rooms import sources

ROOT = Path(__file__).parents[2]
GROUPS = "|".join(sorted({key.partition(".")[0] for key in leaves()}))
KEY = re.compile(rf"(?<![\w./-])(?:{GROUPS})\.[a-z_]+(?:\.[a-z_]+)*(?![\w/(])")
# What has the form of a key and is a file, a module of a room, a layer, a key that was replaced, or one of verl's.
OTHERS = re.compile(r"\.(json|jsonl|md|png|html|py|yaml|svg|sh|log|parquet|safetensors)$|^model\.layers")
OTHERS_IN = {"kit/core/config/load.py": set(REPLACED), "kit/environments/openenv.py": {"server.app"}}
OTHERS_IN["launch/server_key.py"] = {"server.key"}  # a file of the run
OTHERS_IN["merge/card_usage.py"] = {"model.device"}  # of the code in a card
OTHERS_IN |= dict.fromkeys(("launch/export/schema.py", "launch/export/translate.py"))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every string of a source outside docstrings, with what an f-string fills in as `*`."""
    tree = ast.parse(source)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            filled = (part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
            yield node.lineno, "".join(filled)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts | docstrings:
            yield node.lineno, node.value


KNOWN = leaves()


def exists(key: str) -> bool:
    """Whether the configuration has this key or group; any name goes below train.trl (TRL's own fields) and below the
    options of rewards and of an environment."""
    open_groups = ("train.trl.", "reward.options.", "environment.options.")
    return key in KNOWN or key.startswith(open_groups) or any(one.startswith(f"{key}.") for one in KNOWN)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def unknown_keys(source: str) -> list[str]:
    found = []
    for line, text in texts(source):
        keys = (match[0] for match in KEY.finditer(text))
        named = (key for key in keys if not OTHERS.search(key) and not is_module(key))
        found += [f"{line}: {key}" for key in named if not exists(key)]
    return found


@pytest.mark.parametrize("room", ["kit", "recipes", "merge", "eval", "launch", "reward"])
def test_every_key_that_a_message_names_exists(room):
    files = [file for file in sources(ROOT) if file.is_relative_to(ROOT / room)]
    found = {name: unknown_keys((ROOT / name).read_text()) for file in files if (name := str(file.relative_to(ROOT)))}
    for name, known in OTHERS_IN.items():
        found[name] = [one for one in found.get(name, []) if known is not None and one.split(": ")[1] not in known]
    assert {name: keys for name, keys in found.items() if keys} == {}


def test_a_key_that_does_not_exist_is_found_wherever_it_stands():
    planted = """
def f(size):
    'A docstring may name policy.nothing.'
    raise ValueError(f"{size}: set policy.block_size to 64, or eval.gate.min_gian.")
    fine = "train.learning_rate, train.trl.use_x, run.json, eval.gate.format; wandb/run.x"
    print("lower rollout." "temprature")
"""
    assert [one.split(": ")[1] for one in unknown_keys(planted)] == [
        *("policy.block_size", "eval.gate.min_gian", "rollout.temprature")
    ]
