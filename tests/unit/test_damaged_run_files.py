"""A damaged file of a run, base, adapter or model ends a command with a sentence that names it, or harms nothing.

Hypothesis damages the files of a real run, one at a time: a value at any key is replaced by a hostile one or taken
out, bytes are cut, changed or inserted, and something else than a file lies in its place. Then a command that reads
the file runs in this process (`bad_inputs.attempt`). `RUN_FILES=3 python -m pytest -s` on this file tries three times
as many, with other random numbers, and prints the counts.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kit.core.checksum import KEY, with_checksum
from kit.core.run_directory import write_json, write_record
from kit.core.run_files import read_json
from tests.conftest import run_here
from tests.unit.bad_inputs import HUGE, JSON, Record, attempt
from tests.unit.test_eval_report import make_serving

TIMES = float(os.environ.get("RUN_FILES", "1"))
CASES = 1500

RUN = ("config.json", "metrics.jsonl", "end.json", "completions/*.jsonl")
MODEL = ("model/config.json", "model/tokenizer_config.json", "model/tokenizer.json", "model/chat_template.jinja")
ADAPTER = ("run/adapters/v000004/manifest.json", "run/adapters/v000004/adapter_config.json")
MERGED = ("run/merged/*/fp8/manifest.json", "run/merged/*/bf16/manifest.json")
EVALUATION = ("run/eval.json",)
# How often a command is tried on a file of its own, against one that takes a second: most take milliseconds.
OFTEN = {"audit": 60, "--json": 40, "card": 12, "stop": 40, "base": 10, "launch.up": 10, "eval.serving": 10}
OFTEN |= {"launch.plan": 6, "gate": 3, "merge.__main__": 2}
# Words of a command -> the files that it reads, below the folder in which it is started.
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("launch.watch", "run", "--once", "--json"): tuple(f"run/{name}" for name in RUN),
    ("launch.watch", "run", "--once"): ("run/config.json", "run/metrics.jsonl", "run/end.json"),
    ("launch.watch", "run", "--plot", "--html", "--out", "out"): ("run/config.json", "run/metrics.jsonl"),
    ("reward.__main__", "audit", "run"): (*(f"run/{name}" for name in RUN), *EVALUATION),
    ("eval.__main__", "gate", "--run", "run", "--dry_run"): (
        *("run/config.json", "run/base.json", "run/ledger.jsonl"),
        *(*EVALUATION, *EVALUATION, *MERGED),
    ),
    ("eval.__main__", "report", "--run", "run", "--out", "out"): (
        *("run/config.json", "run/base.json", "run/metrics.jsonl", "run/diagnostics.json", "run/serving.json"),
        *("run/endpoint.json", "run/lm_eval.json", "run/eval/*-fp8.jsonl", *EVALUATION, *MERGED),
    ),
    ("eval.__main__", "--run", "run", "--dry_run"): ("run/config.json", "run/base.json", *ADAPTER, *MERGED, *MODEL),
    ("eval.serving", "--run", "run", "--dry_run", "--out", "out"): (
        *("run/merged/grpo/*/config.json", "run/merged/grpo/*/manifest.json"),
        "run/merged/grpo/fp8/tokenizer.json",
    ),
    ("merge.__main__", "--run", "run", "--format", "fp8", "--overwrite", "--dry_run"): (
        *("run/config.json", "run/base.json", "run/completions/*.jsonl"),
        *(*ADAPTER, *MODEL, "run/merged/*/bf16/manifest.json"),
    ),
    ("merge.__main__", "card", "--run", "run"): (
        *("run/config.json", "run/base.json", "run/metrics.jsonl"),
        *(*EVALUATION, *MERGED),
    ),
    ("merge.__main__", "base", "--config", "run.yaml", "--dry_run"): ("base/base.json", "base/manifest.json", *MODEL),
    ("launch.server", "--config", "run.yaml", "--dry_run"): ("base/base.json", "base/manifest.json"),
    ("launch.server", "stop", "--config", "run.yaml"): (f"run/logs/server-{socket.gethostname()}.json",),
    ("launch.plan", "--config", "run.yaml", "--gpu", "h100-80g"): ("model/config.json",),
    ("launch.up", "--config", "run.yaml", "--resume", "--dry_run"): (
        *("run/config.json", "run/base.json", "run/ledger.jsonl", "run/end.json"),
        *("base/base.json", "base/manifest.json", "model/config.json"),
    ),
    ("recipes.grpo_qlora", "--config", "run.yaml", "--resume", "--dry_run"): (
        *("run/config.json", "run/base.json", "run/ledger.jsonl", "run/end.json", *MODEL),
        "run/checkpoints/step-000004/manifest.json",
    ),
}
# Text that the whole of a file, or a line, may be.
TEXTS = [
    b"",
    b"\n",
    b"null",
    b"[]",
    b"{}",
    b"3",
    b'"x"',
    b"NaN",
    b"\xff\xfe{}",
    b"\x00" * 64,
    b"\xef\xbb\xbf{}",
    b"{",
    b"{]",
]
TEXTS += [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b'{"step": 1e999}', b'"\\ud800"', b"{}\n{}", b'{"a": 1} x']
INSERTED = [
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\",
    b'"',
    b"{",
    b"]",
    b",",
    b"\n",
    b"9" * 400,
    b"-",
    b"NaN",
    b"\x1b[31m",
]
PLACES = ("missing", "folder", "loop", "pipe", "dangling")


@dataclass(frozen=True)
class Damage:
    """What is done to a file: the name of the way, and what it takes."""

    way: str
    taken: tuple = ()


def parsed(file: Path) -> Any:
    """The content of a JSON file, of JSON lines as a list; None for other text."""
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return json.loads(file.read_text()) if file.suffix == ".json" else None


def places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The path of keys to every value within `value`, at most three of a list and thirty of an object's keys."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in [*inside][: 30 if isinstance(value, dict) else 3]:
        yield (*at, key)
        yield from places(inner, (*at, key))


def written(file: Path, value: Any, is_sealed: bool) -> bytes:
    """The content of a file with this value; with the checksum of what it says now if `is_sealed`."""
    lines = value if file.suffix == ".jsonl" else [value]
    sealed = [with_checksum(line) if is_sealed and isinstance(line, dict) and KEY in line else line for line in lines]
    text = "".join(json.dumps(line) + "\n" for line in sealed)
    return text.replace(f'"{HUGE}"', HUGE).encode()  # an integer that int() refuses


def damage(file: Path, whole: bytes, how: Damage) -> None:
    """Do to a file what `how` says."""
    if how.way in PLACES:
        file.unlink()
        if how.way == "folder":
            file.mkdir()
        elif how.way == "pipe":
            os.mkfifo(file)
        elif how.way != "missing":
            file.symlink_to(file.name if how.way == "loop" else "nowhere")
    elif how.way in ("value", "without"):
        value = parsed(file)
        *path, last = how.taken[0]
        target = value
        for key in path:
            target = target[key]
        if how.way == "value":
            target[last] = how.taken[1]
        else:
            del target[last]
        file.write_bytes(written(file, value, is_sealed=how.taken[-1]))
    elif how.way == "text":
        file.write_bytes(how.taken[0])
    elif how.way == "line":
        lines = whole.split(b"\n")
        lines[how.taken[0] % len(lines)] = how.taken[1]
        file.write_bytes(b"\n".join(lines))
    else:
        at = how.taken[0] % max(1, len(whole))
        rest = b"" if how.way == "cut" else how.taken[1] + whole[at + (how.way == "changed") :]
        file.write_bytes(whole[:at] + rest)


def repair(file: Path, whole: bytes) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    elif file.is_symlink() or file.exists():
        file.unlink()
    file.write_bytes(whole)


def damages(file: Path) -> st.SearchStrategy:
    """Ways to damage a file: values of its keys half the time."""
    value, anywhere = parsed(file), st.integers(0, 2**20)
    texts = st.sampled_from(TEXTS)
    ways = [
        texts.map(lambda text: Damage("text", (text,))),
        st.sampled_from(PLACES).map(Damage),
        anywhere.map(lambda at: Damage("cut", (at,))),
        st.tuples(anywhere, st.sampled_from(INSERTED)).map(lambda taken: Damage("inserted", taken)),
        st.tuples(anywhere, st.sampled_from(INSERTED)).map(lambda taken: Damage("changed", taken)),
        st.tuples(anywhere, texts).map(lambda taken: Damage("line", taken)),
    ]
    if value:
        paths = st.sampled_from([*places(value)])
        hostile = JSON | st.sampled_from([HUGE, [[]], {"a": {}}, [None], -1, 2**62, 1e300])
        # Two in three by somebody who writes the new checksum too.
        is_sealed = st.sampled_from([True, True, False])
        ways += [st.tuples(paths, hostile, is_sealed).map(lambda taken: Damage("value", taken))] * 5
        ways += [st.tuples(paths, is_sealed).map(lambda taken: Damage("without", taken))]
    return st.one_of(ways)


def make_judged_run(folder: Path, run: Path, model: Path) -> None:
    """A copy of a trained run and its model in `folder`, merged, evaluated, diagnosed, with its base and run.yaml."""
    shutil.copytree(model, folder / "model")
    shutil.copytree(run, folder / "run")
    recorded = read_json(run / "config.json")
    moved = {"run": {"output_dir": "run"}, "model": {"path": "model"}, "server": {"base": "base"}}
    moved["data"] = {"path": "model", "eval_path": None}
    moved["eval"] = {"max_problems": 12, "formats": ["nf4", "bf16", "fp8"]}
    for group, keys in moved.items():
        recorded["config"][group] |= keys
    write_record(folder / "run/config.json", recorded)
    base = read_json(folder / "run/base.json")
    write_record(folder / "run/base.json", base | {"model": "model"})
    (folder / "run.yaml").write_text(yaml.safe_dump(recorded["config"]))
    for words in (
        ("merge.__main__", "--run", "run", "--format", "bf16", "fp8"),
        ("eval.__main__", "--run", "run", "--formats", "nf4", "bf16", "fp8"),
        ("merge.__main__", "diagnose", "--run", "run", "--skip_control"),
        ("merge.__main__", "base", "--config", "run.yaml"),
    ):
        done = run_here(*words)
        assert done.code == 0, done.err
    (folder / "out").mkdir()
    compared = {"difference": -0.02, "interval": [-0.08, 0.04], "same": 0.9}
    score = {"task": "t", "filter": "f", "accuracy": 0.4, "interval": [0.3, 0.5], "n": 12, "num_fewshot": 5}
    cell = {"policy": "grpo", "format": "fp8", "n": 12, "ours": {"accuracy": 0.5, "interval": [0.4, 0.6]}}
    cell |= {"harness": [score | {"difference": compared}], "differences": {"t": ["the prompt"]}}
    state = {"host": socket.gethostname(), "url": "http://127.0.0.1:1", "pid": 4_194_000, "started_at": 5, "log": "x"}
    for name, value in {
        "serving.json": make_serving("another"),
        "endpoint.json": {"deployed": "grpo/fp8", "n": 12, "cell": {"accuracy": 0.5}, "compared": compared},
        "lm_eval.json": {"cells": {"grpo/fp8": cell}},
        f"logs/server-{socket.gethostname()}.json": {"replicas": [state]},
    }.items():
        write_json(folder / "run" / name, value)


@dataclass(frozen=True)
class Target:
    """A file, the command that reads it, and the ways to damage it."""

    words: tuple[str, ...]
    file: Path
    whole: bytes
    ways: st.SearchStrategy

    def __repr__(self) -> str:
        return f"{' '.join(self.words)}: {self.file.name}"


def targets(folder: Path) -> list[Target]:
    found = []
    for words, patterns in COMMANDS.items():
        for pattern in patterns:
            files = sorted(folder.glob(pattern))
            assert files, f"{pattern}: no such file, so {' '.join(words)} is not tried on it"
            for file in files:
                often = next((OFTEN[word] for word in reversed(words) if word in OFTEN), 1)
                found += [Target(words, file, file.read_bytes(), damages(file))] * often
    return found


@pytest.fixture(scope="module")
def folder(made_once, tiny_run, tmp_path_factory):
    """A judged run of this test's own."""

    def make(place: Path) -> None:
        place.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            make_judged_run(place, tiny_run.path, Path(tiny_run.config()["model"]["path"]))

    own = tmp_path_factory.mktemp("damaged") / "work"
    shutil.copytree(made_once("judged-run", make), own)
    return own


def try_all(folder: Path, cases: int) -> Record:
    """Damage files so many times; what happened."""
    record, known = Record(), targets(folder)
    for words in COMMANDS:  # a file that is whole is no bad input, and what a command imports is there from now on
        ended = attempt(folder, *words)
        assert ended.code != 2 or (words[0] == "launch.server" and not ended.trace), f"{words}: {ended}"
    chosen = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        phases=[Phase.generate],  # a fault is recorded with its shortest case, and the test goes on
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )

    @chosen
    @given(st.sampled_from(known).flatmap(lambda target: st.tuples(st.just(target), target.ways)))
    def case(drawn: tuple[Target, Damage]) -> None:
        target, how = drawn
        try:
            damage(target.file, target.whole, how)
            ended = attempt(folder, *target.words)
        finally:
            repair(target.file, target.whole)
        named = (target.file.name, str(target.file.parent.relative_to(folder)))
        if ended.code == 2 and not ended.fault and not any(name in ended.err for name in named):
            ended.trace = f"does not name the file: {ended.err.strip()[:150]}"
        record.add(target.words[0].partition(".")[0], (target, how), ended)

    case()
    return record


def test_a_damaged_file_is_named_or_harms_nothing(folder):
    record = try_all(folder, round(CASES * TIMES))
    print(f"\n{record.report()}")
    assert not record.faults, "\n".join(f"{fault}\n    {case}" for (_, fault), case in record.faults.items())
    assert sum(record.tried.values()) >= CASES * TIMES * 0.9
    for group in ("launch", "merge", "eval", "reward", "recipes"):
        assert record.tried[group, "bad input"], record.report()
        assert record.tried[group, "valid"] or group == "recipes", record.report()  # which is tried a few times only
