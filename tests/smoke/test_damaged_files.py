"""Damaged files: whatever is flipped, cut, exchanged, zeroed, removed or added in a run is found before it is used.

One run of the tiny recipe with everything that a run can leave: training checkpoints, adapters, the dequantized base,
merged checkpoints, an evaluation, pass rates, and the run's own JSON. Each damage is undone afterwards, so the run is
made once. A flip is harmless only where the values that are read stay the same, as with `e` and `E` in a number.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eval.cells import read_records
from eval.result import read_result
from eval.run import main as evaluate
from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput
from kit.core.file_kinds import COMPLETIONS, METRICS
from kit.core.ledger import check_ledger, read_ledger
from kit.core.run_directory import MANIFEST, RunDir, read_manifest
from kit.core.run_files import read_json, read_lines
from kit.data.pass_rates import read_pass_rates
from kit.policy.adapter_files import adapter_facts
from launch.vllm_command import check_base
from merge.__main__ import main as merge
from recipes.pass_rates import append, begun, entry
from tests.conftest import CONFIG

FLIPS = 1000
TEXT = (".json", ".jsonl")


@dataclass
class Kind:
    """Files of one kind, and `read`, which returns what the commands take from them or raises a `BadInput`."""

    files: list[Path]
    read: Callable[[Path], Any]


@dataclass
class Whole:
    """The run with everything in it, and its kinds of files by name."""

    run: RunDir
    kinds: dict[str, Kind]
    artifacts: dict[str, Path]
    readers: dict[str, Callable[[], Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_run) -> Whole:
    run = RunDir(tmp_path_factory.mktemp("damaged") / "run")
    shutil.copytree(tiny_run.path, run.path, symlinks=True)
    formats = ["bf16", "fp8", "w4a16", "nvfp4a16"]
    assert merge(["--run", str(run.path), "--format", *formats, "--skip_verify"]) == 0
    base = run.path / "base"
    values = read_json(run.config_file)["config"]
    config = config_from_dict(values | {"server": {**values["server"], "base": str(base)}})
    assert merge(["base", "--config", str(CONFIG), "--out", str(base), "--model.path", config.model.path]) == 0
    assert evaluate(["--run", str(run.path), "--formats", "bf16", "fp8", "--max_problems", "6"]) == 0
    rates = run.path / "rates.jsonl"
    begun(rates, {"samples": 2})
    append(rates, [entry(f"p{index}", [index % 2, 1.0], 1.0) for index in range(20)])

    artifacts = {"checkpoint": run.newest_checkpoint(), "adapter": run.adapter_dir(6), "base": base}
    artifacts |= {f"merged {name}": run.merged / "grpo" / name for name in formats}
    readers: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: read_manifest(artifacts["checkpoint"], "training-state", deep=True),
        "adapter": lambda: adapter_facts(artifacts["adapter"]),
        "base": lambda: check_base(config, "base.yaml", deep=True),
    }
    for name in formats:
        place = artifacts[f"merged {name}"]
        readers[f"merged {name}"] = lambda place=place: read_manifest(place, "checkpoint", deep=True)
    kinds = {}
    for name, place in artifacts.items():
        files = [place / listed for listed in read_json(place / MANIFEST)["files"]]
        kinds[name] = Kind([*files, place / MANIFEST], lambda _, name=name: readers[name]())
    kinds |= {
        "run json": Kind([run.config_file, run.base_file, run.data_file], read_json),
        "eval.json": Kind([run.eval_file], lambda file: read_result(file, run)),
        "eval records": Kind(sorted((run.path / "eval").glob("*.jsonl")), read_records),
        "eval headers": Kind(sorted((run.path / "eval").glob("*.meta.json")), read_json),
        "ledger": Kind([run.ledger_file], read_checked_ledger),
        "metrics": Kind([run.metrics_file], lambda file: read_lines(file, METRICS, True)),
        "completions": Kind(sorted(run.completions.glob("*.jsonl")), lambda file: read_lines(file, COMPLETIONS, True)),
        "pass rates": Kind([rates], read_pass_rates),
    }
    return Whole(run, kinds, artifacts, readers)


def read_checked_ledger(file: Path) -> list:
    """The ledger as a resume and the gate read it."""
    newest = RunDir(file.parent).adapter_dir(6)
    check_ledger(file, read_manifest(newest), newest)
    return read_ledger(file)


def outcome(kind: Kind, file: Path, before: Any) -> str:
    """ "found", "harmless" (what is read is what was read before), or "missed"."""
    try:
        after = kind.read(file)
    except BadInput as error:
        return "found" if str(file) in str(error) or file.parent.name in str(error) else f"unnamed: {error}"
    return "harmless" if file.suffix in TEXT and file.name != "index.json" and after == before else "missed"


def test_a_bit_flipped_at_a_thousand_places_is_found_before_use(whole, capsys):
    draw, counts, odd = random.Random(31), Counter(), []
    names = list(whole.kinds)
    for turn in range(FLIPS):
        name = names[turn % len(names)]
        kind = whole.kinds[name]
        file = draw.choice(kind.files)
        content = file.read_bytes()
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        before = kind.read(file) if file.suffix in TEXT else None
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        try:
            found = outcome(kind, file, before)
        finally:
            file.write_bytes(content)
        counts[name, found] += 1
        if found not in ("found", "harmless"):
            odd.append((name, file.name, place, bit, found))
    with capsys.disabled():
        print(f"\n{FLIPS} flips: {sum(count for (_, how), count in counts.items() if how == 'found')} found")
        for (name, how), count in sorted(counts.items()):
            print(f"  {name}: {count} {how}")
    assert not odd
    assert sum(count for (_, how), count in counts.items() if how == "found") >= 0.99 * FLIPS


def remove(file: Path, other: Path) -> None:
    file.unlink()


def cut(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zero(file: Path, other: Path) -> None:
    """As a file system leaves a page that was allocated and not written."""
    content = bytearray(file.read_bytes())
    length = min(4096, len(content))
    content[:length] = bytes(length)
    file.write_bytes(content)


def empty(file: Path, other: Path) -> None:
    file.write_bytes(b"")


def append_a_byte(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def exchange(file: Path, other: Path) -> None:
    """The file of the same name of another artifact of that kind."""
    file.write_bytes(other.read_bytes())


def add(file: Path, other: Path) -> None:
    (file.parent / "added.safetensors").write_bytes(file.read_bytes())


@pytest.mark.parametrize("damage", [remove, cut, zero, empty, append_a_byte, exchange, add])
def test_every_file_of_every_artifact_is_missed_when_it_is_damaged(whole, tmp_path, damage):
    tried = 0
    for name, place in whole.artifacts.items():
        copy = tmp_path / name
        shutil.copytree(place, copy)
        for listed in read_json(place / MANIFEST)["files"]:
            other = sibling(whole, name, listed)
            if damage is exchange and (other is None or other.read_bytes() == (place / listed).read_bytes()):
                continue
            damage(place / listed, other)
            with pytest.raises(BadInput, match=place.name):
                whole.readers[name]()
            shutil.rmtree(place)
            shutil.copytree(copy, place)
            tried += 1
        whole.readers[name]()
    assert tried >= (8 if damage is exchange else 40)


def sibling(whole: Whole, name: str, listed: str) -> Path | None:
    """The file of that name in another checkpoint, adapter or merged policy of the run."""
    run, place = whole.run, whole.artifacts[name]
    others = {
        "checkpoint": [one for one in sorted(run.checkpoints.glob("step-*")) if one != place],
        "adapter": [run.adapter_dir(4)],
    }
    found = others.get(name, [run.merged / "base" / place.name])[0] / listed
    return found if found.is_file() else None


def test_two_checkpoints_that_changed_names_are_refused(whole):
    first, second = sorted(whole.run.checkpoints.glob("step-*"))
    aside = first.with_name("aside")
    for one, other in ((first, aside), (second, first), (aside, second)):
        one.rename(other)
    try:
        with pytest.raises(BadInput, match=r"no whole training-state .*holds what was written after step"):
            whole.run.newest_checkpoint()
    finally:
        for one, other in ((first, aside), (second, first), (aside, second)):
            one.rename(other)


def test_a_ledger_from_which_lines_were_removed_or_that_is_gone_is_refused(whole):
    file = whole.run.ledger_file
    content = file.read_text()
    lines = content.splitlines(keepends=True)
    edits = {
        "a line removed": "".join(lines[:2] + lines[3:]),
        "the last line removed": "".join(lines[:-1]),
        "two lines exchanged": "".join([lines[1], lines[0], *lines[2:]]),
        "emptied": "",
        "cut in a line": content[:-20],
    }
    try:
        for text in edits.values():
            file.write_text(text)
            with pytest.raises(BadInput, match=r"is not the ledger that .*v000006 was written with"):
                read_checked_ledger(file)
        file.unlink()
        with pytest.raises(BadInput, match=r"is not the ledger that .*has 0 lines up to step 6"):
            read_checked_ledger(file)
    finally:
        file.write_text(content)
    assert len(read_checked_ledger(file)) == 6
