"""Bad input of every kind ends in exit 2 with a sentence, or runs: no traceback, nothing written, no wait.

Hypothesis generates the cases: hostile values for every key of the schema, in the YAML and on the command line, for
every flag of every command, and damaged text for each kind of file that a user hands in. They run in this process
(`bad_inputs.attempt`). `BAD_INPUTS=10 python -m pytest -s tests/unit/test_bad_inputs.py` tries ten times as many, with
other random numbers, and prints the counts.
"""

import gzip
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kit.core.config.load import choices_of, leaves, load_config
from tests.unit.bad_inputs import (
    CHANGES,
    HUGE,
    TEXTS,
    VALUES,
    Record,
    attempt,
    attempt_call,
    damaged,
    fitting,
    flags_of,
    replaced,
    with_flag,
)

ROOT = Path(__file__).parents[2]
TIMES = float(os.environ.get("BAD_INPUTS", "1"))
KEYS = leaves()
MODEL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 384}
MODEL |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODEL |= {"vocab_size": 316, "tie_word_embeddings": True, "max_position_embeddings": 512}
ROWS = [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(3)]
RUN: dict = {"run": {"name": "x"}, "model": {"id": "m", "path": "model"}, "train": {"max_steps": 1}}
RUN |= {"data": {"path": "model", "eval_split": "heldout"}}
# A command that reads a configuration, and what is tried with it, cheap ones more often.
READERS = [("launch.train", "--dry_run")] * 6 + [("launch.plan", "--gpu", "h100-80g"), ("launch.plan", "--gpu", "cpu")]
READERS += [("launch.slurm.__main__",), ("launch.slurm.__main__", "--nodes", "2")]


def generated(cases: int, *strategies: st.SearchStrategy) -> Callable:
    """Run a test on so many cases (`BAD_INPUTS` times as many), the same ones in every run of `BAD_INPUTS=1`."""

    def decorate(test: Callable) -> Callable:
        checked = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
        chosen = settings(
            max_examples=round(cases * TIMES),
            deadline=None,
            database=None,
            derandomize=TIMES == 1,
            phases=[Phase.generate],  # a fault is recorded with its shortest case, and the test goes on
            suppress_health_check=checked,
        )
        return chosen(given(*strategies)(test))

    return decorate


@pytest.fixture(scope="module")
def record():
    kept = Record()
    yield kept
    print(f"\n{kept.report()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a model's config, problems, a valid run.yaml, and files that are none."""
    place = tmp_path_factory.mktemp("bad")
    (place / "model").mkdir()
    (place / "model/config.json").write_text(json.dumps(MODEL))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (place / "model/train.jsonl").write_text(lines)
    (place / "model/heldout.jsonl").write_text(lines)
    (place / "run.yaml").write_text(yaml.safe_dump(RUN))
    (place / "loop").symlink_to("loop")
    os.mkfifo(place / "fifo")
    return place


def faults_of(record: Record, kind: str) -> list[str]:
    """Faults found in the cases of a kind, each with its shortest case; one fault if no case was tried."""
    if not any(name == kind for name, _ in record.tried):
        return [f"no case of {kind} was tried"]
    return [f"{fault}\n    {case}" for (name, fault), case in record.faults.items() if name == kind]


def with_keys(values: dict) -> dict:
    """The valid run with `values` by dotted key."""
    made = json.loads(json.dumps(RUN))
    for key, value in values.items():
        *groups, leaf = key.split(".")
        group = made
        for name in groups:
            group = group.setdefault(name, {})
        group[leaf] = value
    return made


def pair(key: str) -> st.SearchStrategy:
    """A key with a value, of its own type three times in four."""
    hint, item = KEYS[key]
    return st.tuples(st.just(key), st.one_of(VALUES, *[fitting(hint, choices_of(hint, item))] * 3))


BY_KEY = st.lists(st.sampled_from([*KEYS]).flatmap(pair), min_size=1, max_size=2).map(dict)


def test_a_hostile_value_of_any_key_in_the_yaml_is_refused_or_runs(folder, record):
    @generated(3800, BY_KEY, st.sampled_from(READERS))
    def case(values, reader):
        (folder / "case.yaml").write_text(yaml.safe_dump(with_keys(values)))
        record.add("key", (reader[0], values), attempt(folder, reader[0], "--config", "case.yaml", *reader[1:]))

    case()
    assert faults_of(record, "key") == []


def test_a_hostile_value_of_any_key_on_the_command_line_is_refused_or_runs(folder, record):
    @generated(
        2000, st.sampled_from([*KEYS, "environment", "run", "x.y", ""]), TEXTS, st.booleans(), st.sampled_from(READERS)
    )
    def case(key, text, joined, reader):
        words = [f"--{key}={text}"] if joined else [f"--{key}", text]
        ended = attempt(folder, reader[0], "--config", "run.yaml", *reader[1:], *words)
        record.add("override", (reader[0], words), ended)

    case()
    assert faults_of(record, "override") == []


# A command line of every command that ends soon: what it names is missing, or it only checks.
LINES = [
    ("recipes.catalogue", "ls"),
    ("recipes.catalogue", "cp", "grpo-tiny-nf4-cpu", "out.yaml"),
    ("launch.doctor", "--list"),
    ("launch.plan", "--config", "run.yaml", "--gpu", "cpu"),
    ("launch.train", "--config", "run.yaml", "--dry_run"),
    ("launch.up", "--config", "run.yaml", "--dry_run"),
    ("launch.server", "stop", "--config", "run.yaml"),
    ("launch.watch", "model", "--once"),
    ("launch.slurm.__main__", "--config", "run.yaml"),
    ("launch.export.__main__", "verl", "--config", "run.yaml", "--out", "out"),
    ("launch.export.__main__", "check", "model"),
    ("merge.__main__", "--run", "none", "--dry_run"),
    ("merge.__main__", "base", "--config", "run.yaml", "--dry_run"),
    ("merge.__main__", "import", "--adapter", "model", "--out", "out", "--dry_run"),
    ("merge.__main__", "dequantize", "--model.path", "model", "--out", "out", "--dry_run"),
    ("merge.__main__", "gguf", "--run", "none", "--dry_run"),
    ("merge.__main__", "verify", "--run", "none"),
    ("merge.__main__", "diagnose", "--run", "none"),
    ("merge.__main__", "card", "--run", "none"),
    ("eval.__main__", "--run", "none"),
    ("eval.__main__", "gate", "--run", "none"),
    ("eval.__main__", "report", "--run", "none"),
    ("eval.__main__", "lm_eval", "--run", "none"),
    ("eval.__main__", "endpoint", "--run", "none", "--url", "http://127.0.0.1:9"),
    ("eval.serving", "--run", "none"),
    ("reward.__main__", "check", "model/train.jsonl", "--task", "math"),
    ("reward.__main__", "attack", "--task", "none"),
    ("reward.__main__", "audit", "model"),
    ("recipes.quickstart", "--dry_run"),
    ("recipes.tiny_base", "--dry_run"),
    ("recipes.real_base", "--out", "out", "--wheel", "none.whl"),
    ("recipes.split_problems", "model/train.jsonl", "--out", "out"),
    ("recipes.pass_rates", "--config", "run.yaml", "--out", "rates.jsonl", "--samples", "1"),
    ("recipes.study", "--config", "run.yaml", "--dry_run"),
    ("recipes.verifiers_rows", "none", "--out", "out"),
]
KIT = [(), ("plan",), ("ls",), ("cp",), ("completion",), ("serve",), ("serve", "stop"), ("python", "-c")]


def test_a_hostile_value_of_any_flag_of_any_command_is_refused_or_runs(folder, record):
    for line in LINES:  # what torch imports starts processes
        importlib.import_module(line[0])
    for module in ("merge.export", "merge.dequantize", "merge.verify_command", "merge.diagnose", "eval.run"):
        importlib.import_module(module)
    flags = [(line, flag) for line in LINES for flag in flags_of(*line) if flag.dest != "matrix"]  # valid, and long
    assert len(flags) > 200 and {line[0] for line, _ in flags} == {line[0] for line in LINES}

    @generated(1000, st.sampled_from(flags), st.lists(TEXTS, min_size=1, max_size=2))
    def case(chosen, texts):
        line, flag = chosen
        words = with_flag(flag, texts)
        record.add("flag", (*line, *words), attempt(folder, *line, *words))

    @generated(150, st.sampled_from(KIT), st.lists(TEXTS, max_size=2))
    def words_of_kit(line, texts):
        record.add("flag", ("kit", *line, *texts), attempt(folder, "kit.__main__", *line, *texts))

    case()
    words_of_kit()
    assert faults_of(record, "flag") == []


MODELOPT = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": [4, 3], "axis": 0}},
        {
            "quantizer_name": "*input_quantizer",
            "cfg": {"num_bits": [4, 3], "block_sizes": {"-1": None, "type": "dynamic"}},
        },
    ],
    "algorithm": "max",
}
QUANTIZED = ("--policy.quant_cfg=case.yaml", "--model.dtype=bfloat16")
# What a user's YAML or JSON holds, the file, and the command that reads it.
FILES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "config": (RUN, "case.yaml", ("launch.train", "--config", "case.yaml", "--dry_run")),
    "launcher": (
        yaml.safe_load((ROOT / "accelerate_configs/cpu.yaml").read_text()),
        "case.yaml",
        ("launch.train", "--config", "run.yaml", "--launcher", "case.yaml", "--dry_run"),
    ),
    "modelopt": (MODELOPT, "case.yaml", ("launch.train", "--config", "run.yaml", "--dry_run", *QUANTIZED)),
    "model": (MODEL, "other/config.json", ("launch.plan", "--config", "run.yaml", "--model", "other", "--gpu", "cpu")),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_yaml_or_config_json_is_refused_or_read(folder, record, kind):
    content, name, line = FILES[kind]
    write = json.dumps if name.endswith(".json") else yaml.safe_dump
    (folder / name).parent.mkdir(exist_ok=True)

    @generated(250, CHANGES)
    def in_bytes(changes):
        (folder / name).write_bytes(text := damaged(write(content).encode(), changes))
        record.add(kind, text, attempt(folder, *line))

    @generated(250, st.data())
    def in_values(data):
        (folder / name).write_text(text := write(replaced(content, data)))
        record.add(kind, text, attempt(folder, *line))

    in_bytes()
    in_values()
    assert faults_of(record, kind) == []


def test_a_launcher_of_several_cpu_processes_is_valid_input(folder):
    facts = yaml.safe_load((ROOT / "accelerate_configs/cpu.yaml").read_text()) | {"num_processes": 2}
    (folder / "two.yaml").write_text(yaml.safe_dump(facts))
    ended = attempt(folder, "launch.train", "--config", "run.yaml", "--launcher", "two.yaml", "--dry_run")
    assert ended.code is None and not ended.fault  # it would start torchrun


TABLES = {".jsonl": "".join(json.dumps(row) + "\n" for row in ROWS), ".json": json.dumps(ROWS)}
TABLES |= {
    suffix: "\n".join(sep.join(row.values()) for row in [{"a": "question", "b": "answer"}, *ROWS])
    for suffix, sep in ((".csv", ","), (".tsv", "\t"))
}
FORMATS = ("plain", "gsm8k", "boxed", "countdown", "code", "mbpp", "humaneval", "any")


def test_a_damaged_data_file_is_refused_or_read(folder, record):
    read = ("recipes.split_problems", "--heldout", "1", "--out", "out", "--max_bad_fraction", ".9")

    @generated(450, st.sampled_from([*TABLES, ".jsonl.gz"]), CHANGES, st.booleans())
    def in_bytes(suffix, changes, inside):
        text = TABLES[suffix.removesuffix(".gz")].encode()
        packed = gzip.compress(damaged(text, changes)) if inside else damaged(gzip.compress(text), changes)
        (folder / f"case{suffix}").write_bytes(packed if suffix.endswith(".gz") else damaged(text, changes))
        record.add("data", (suffix, changes), attempt(folder, *read, f"case{suffix}"))

    @generated(450, st.data(), st.sampled_from(FORMATS))
    def in_values(data, form):
        rows = [replaced(row, data) for row in ROWS]
        (folder / "case.json").write_text(json.dumps(rows))
        words = ("--data.path=case.json", f"--data.answer_format={form}", "--data.eval_path=model/heldout.jsonl")
        line = ("launch.export.__main__", "verl", "--config", "run.yaml", "--out", "out", "--data.max_bad_fraction=.9")
        record.add("data", (form, rows), attempt(folder, *line, *words))

    in_bytes()
    in_values()
    assert faults_of(record, "data") == []


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
LAUGHS += "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n"
MERGES += "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
PLAN = ("launch.plan", "--gpu", "h100-80g", "--config", "run.yaml")
SPLIT = ("recipes.split_problems", "--out", "out", "--heldout", "1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((*PLAN, f"--run.name={'x' * 101}"), "must be at most 100 letters"),
        ((*PLAN, f"--run.output_dir={'x' * 300}"), "must be a path without control characters, of at most 200 bytes"),
        ((*PLAN, "--model.path=loop"), "model.path ('loop') must be a path"),
        ((*PLAN, "--data.path=~nosuchuser/x"), "data.path ('~nosuchuser/x') must be a path"),
        ((*PLAN, "--data.path=\udcff"), "or bytes that are not UTF-8: '--data.path=\\udcff'"),
        ((*PLAN, "--model.id=\x1b[2J"), "argument 5 has a control character"),
        (("eval.serving", "--run", "none", "--requests_per_batch=--"), "has -- as its value"),
        ((*PLAN, "x" * 70_000), "argument 5 has 70,000 characters, more than 16,000"),
        ((*PLAN, "--train.beta=inf"), "train.beta is inf, which JSON cannot carry"),
        ((*PLAN, "--server.vllm={a: [.nan]}"), "server.vllm holds nan, which JSON cannot carry"),
        ((*PLAN, "--train.max_steps=" + "9" * 5000), "train.max_steps must be an integer, it is '9999"),
        ((*PLAN, "--train.max_steps=2147483648"), "train.max_steps (2147483648) must be below 2,147,483,648"),
        ((*PLAN, f"--server.vllm={'[' * 9000}"), "is not YAML: line 1, column 33: it has more than 32 levels"),
        ((*PLAN, "--train.per_device_train_batch_size=99999999"), "a step would have 99,999,999 completions"),
        ((*PLAN, "--train.gpus=[99999999]"), "must be at most 1024 numbers of GPUs"),
        (("launch.plan", "--config", "run.yaml", "--gpu", "h100-80g:99999999"), "must be at least 1 and at most 1024"),
        (("launch.slurm.__main__", "--config", "run.yaml", "--gpus_per_node", "99999999"), "at most 1024"),
        (("launch.plan", "--config", "fifo"), "fifo cannot be read as a config file: it is a named pipe"),
        (("launch.plan", "--config", "/proc/self/mem"), "cannot be read as a config file: Input/output"),
        (("launch.plan", "--check", "."), ". is not a file. Write it with bench/memory_points.py"),
        (("launch.plan", "--check", "fifo"), "fifo is not a file. Write it with bench/memory_points.py"),
        (("launch.plan", "--config", "/dev/zero"), "/dev/zero cannot be read as a config file: it is a device"),
        (("launch.plan", "--config", "large.yaml"), "large.yaml is larger than 131,072 bytes"),
        (("launch.plan", "--config", "laughs.yaml"), "line 4, column 4: it has more than 10,000 values"),
        (("launch.plan", "--config", "merges.yaml"), "it has more than 10,000 values"),
        (("launch.plan", "--config", "itself.yaml"), "it has the alias *a inside what it stands for"),
        (("launch.plan", "--config", "surrogate.yaml"), "'\\ud800' has a NUL or an unpaired"),
        (("launch.train", "--config", "run.yaml", "--launcher", "fifo"), "--launcher: fifo cannot be read"),
        ((*SPLIT, "bomb.jsonl.gz"), "bomb.jsonl.gz has a line of more than 67,108,864 bytes"),
        ((*SPLIT, "rows.jsonl.gz"), "rows.jsonl.gz grows more than 200 times when it is unpacked"),
        ((*SPLIT, "alike.parquet"), "alike.parquet has 3,000,000 rows in"),
        ((*SPLIT, "fifo"), "fifo does not exist"),
        ((*SPLIT, "/dev/zero"), "/dev/zero does not exist"),
        ((*SPLIT, "digits.jsonl"), "digits.jsonl:1: invalid JSON: Exceeds the limit"),
    ],
)  # fmt: skip
def test_what_once_hung_or_ended_in_a_traceback_is_refused_in_these_words(hostile, line, message):
    ended = attempt(hostile, *line)
    assert not ended.fault and ended.code == 2
    assert message in ended.err


@pytest.fixture(scope="module")
def hostile(folder):
    """The folder with files that unpack or write out to more than they seem."""
    import pyarrow
    import pyarrow.parquet

    (folder / "large.yaml").write_text("x" * 10**7)
    (folder / "laughs.yaml").write_text(LAUGHS)
    (folder / "merges.yaml").write_text(MERGES)
    (folder / "itself.yaml").write_text("run: &a [*a]")
    (folder / "surrogate.yaml").write_text('a: "\\ud800"')
    (folder / "digits.jsonl").write_text(f'{{"question": "q", "answer": {HUGE}}}\n')
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(96):
            file.write(bytes(1 << 20))
    with gzip.open(folder / "rows.jsonl.gz", "wb", compresslevel=9) as file:
        for _ in range(96):
            file.write(b" " * (1 << 20) + b"\n")
    pyarrow.parquet.write_table(pyarrow.table({"question": pyarrow.repeat("q", 3_000_000)}), folder / "alike.parquet")
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["launch.plan", "--config", "fifo"], b"it is a named pipe"),
        (["launch.slurm", "--config", "run.yaml", b"--run.name=\xff"], b"argument 3 has a control character"),
        (["recipes.split_problems", "bomb.jsonl.gz", "--out", "out"], b"has a line of more than"),
        (["launch.train", "--config", "laughs.yaml"], b"it has more than 10,000 values"),
    ],
)
def test_a_process_of_its_own_refuses_it_too_within_ten_seconds_and_a_gibibyte(hostile, line, message):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))

    before = sorted(hostile.rglob("*"))
    command = [sys.executable, "-m", *line]
    done = subprocess.run(
        command, cwd=hostile, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, preexec_fn=limited
    )
    assert done.returncode == 2 and message in done.stderr and b"Traceback" not in done.stderr
    assert sorted(hostile.rglob("*")) == before


def test_a_damaged_tokenizer_template_or_config_of_a_users_folder_is_refused_or_loads(
    tmp_path, tiny_model_dir, record
):
    from kit.policy.load import load_tokenizer
    from kit.weights.model_files import unquantized_config

    names = ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json")
    whole = {name: (tiny_model_dir / name).read_bytes() for name in names}
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml", [f"--model.path={tmp_path}"])

    def load(name: str, content: bytes) -> None:
        for other in names:
            (tmp_path / other).write_bytes(whole[other])
        (tmp_path / name).write_bytes(content)

        def main() -> None:
            load_tokenizer(config)
            unquantized_config(tmp_path)

        record.add("model folder", (name, content[:200]), attempt_call(main))

    @generated(60, st.sampled_from(names), CHANGES)
    def in_bytes(name, changes):
        load(name, damaged(whole[name], changes))

    @generated(100, st.sampled_from([name for name in names if name.endswith(".json")]), st.data())
    def in_values(name, data):
        load(name, json.dumps(replaced(json.loads(whole[name]), data)).encode())

    in_bytes()
    in_values()
    assert faults_of(record, "model folder") == []
