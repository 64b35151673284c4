"""`data.format`: one function makes the prompts of training, held-out problems, evaluation, calibration and merges."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput
from kit.core.run_directory import write_json
from kit.data.calibration_prompts import _read
from kit.data.own_format import check_format, format_hash
from kit.data.problems import chat_messages, load_problems, prompt_of_row, read_problems

CONFIG = Path(__file__).parents[2] / "recipes/configs/grpo-tiny-nf4-cpu.yaml"
MODULE = """
import itertools, random

def asked(row):
    return f"{row['story']}\\n{row['ask']}"

def chat(row):
    return [{"role": "user", "content": row["story"]}, {"role": "assistant", "content": "Go on."},
            {"role": "user", "content": row.pop("ask")}]

def hard(row):
    return asked(row) if row["level"] > 1 else None

def none(row): return None
def number(row): return 3
def empty(row): return "  "
def ends_wrong(row): return [{"role": "assistant", "content": "x"}]
def raises(row): return row["missing"]
def chance(row): return f"{row['ask']} {random.random()}"
def two(row, tokenizer): return row["ask"]
async def late(row): return row["ask"]
text = "no function"
"""


@pytest.fixture
def data(tmp_path, monkeypatch) -> DataConfig:
    """Ten rows without a question column, and the module above in the working directory."""
    (tmp_path / "kit_own_format.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kit_own_format", raising=False)
    rows = [{"story": f"Ann has {n}.", "ask": f"Twice {n}?", "level": n % 4, "answer": str(2 * n)} for n in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0] | {"story": "Bo has 0.", "level": 2}) + "\n")
    return DataConfig(path=str(tmp_path), prompt_suffix=" Box it.", format="kit_own_format:asked")


def named(data: DataConfig, function: str) -> DataConfig:
    return replace(data, format=f"kit_own_format:{function}")


def test_text_and_messages_become_prompts_with_the_runs_system_message_and_suffix(data):
    first = load_problems(data, "train")[0]
    assert (first.question, first.messages, first.gold) == ("Ann has 0.\nTwice 0?", None, "0")
    assert chat_messages(replace(data, system_prompt="Add."), first) == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "Ann has 0.\nTwice 0? Box it."},
    ]
    talk = load_problems(named(data, "chat"), "train")[1]
    assert [one["content"] for one in talk.messages] == ["Ann has 1.", "Go on.", "Twice 1?"]
    assert chat_messages(data, talk)[-1]["content"] == "Twice 1? Box it."
    assert talk.columns["ask"] == "Twice 1?"  # the function got a copy of the row
    assert load_problems(data, "eval")[0].question == "Bo has 0.\nTwice 0?"


def test_a_row_of_another_reader_gets_the_same_prompt(data):
    for name in ("asked", "chat"):
        own = named(data, name)
        for problem in load_problems(own, "train"):
            assert prompt_of_row(own, dict(problem.columns), "a row") == chat_messages(own, problem)
    assert prompt_of_row(named(data, "none"), {}, "a row") is None


def test_skipped_rows_are_counted_and_no_row_left_is_an_error(data):
    problems, report = read_problems(named(data, "hard"), "train")
    assert (len(problems), report.skipped, report.rows) == (4, 6, 10)
    assert "6 skipped by data.format" in report.summary()
    with pytest.raises(BadInput, match=r"'kit_own_format:none' skipped each of 10 rows of the train split"):
        read_problems(named(data, "none"), "train")


def test_ids_and_sides_of_a_split_do_not_depend_on_the_order_of_the_rows(data, tmp_path):
    file = tmp_path / "train.jsonl"
    one_file = replace(data, path=str(file), heldout_fraction=0.4)

    def sides() -> list[set[str]]:
        return [{problem.id for problem in load_problems(one_file, split)} for split in ("train", "eval")]

    before, lines = sides(), file.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    file.write_text("".join(lines))
    assert sides() == before and not before[0] & before[1] and all(before)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "train.jsonl:1: data.format 'kit_own_format:number' returned 3, a int"),
        ("raises", "train.jsonl:1: data.format 'kit_own_format:raises' raised KeyError: 'missing'"),
        ("chance", "train.jsonl:1: data.format 'kit_own_format:chance' makes another prompt"),
        ("empty", "train.jsonl:1: data.format 'kit_own_format:empty': the question is empty"),
        ("ends_wrong", "data.format 'kit_own_format:ends_wrong': the prompt ends with the assistant's message"),
        ("two", "must take one argument, the row"),
        ("late", "is async"),
        ("text", "is a str, not a function"),
        ("gone", "cannot be imported: AttributeError"),
    ],
)
def test_a_function_that_makes_no_prompt_is_named_with_its_row(data, name, said):
    with pytest.raises(BadInput) as refused:
        load_problems(named(data, name), "train")
    assert said in str(refused.value)


def test_a_name_without_a_function_is_refused(data):
    with pytest.raises(BadInput, match=r"data.format is 'format'. Name a function as module:function"):
        load_problems(replace(data, format="format"), "train")


def test_a_question_column_and_supervised_fine_tuning_do_not_go_with_it():
    with pytest.raises(BadInput, match=r"data.question_column is body and data.format m:f"):
        check_config(load_config(CONFIG, ["--data.format=m:f", "--data.question_column=body"]), 1)
    sft = CONFIG.with_name("sft-tiny-nf4-cpu.yaml")
    with pytest.raises(BadInput, match=r"data.format is for GRPO. Leave it out with the group sft"):
        check_config(load_config(sft, ["--data.format=m:f"]), 1)


def test_prompts_that_calibrate_are_made_by_the_function(data, tmp_path):
    config = load_config(
        CONFIG, [f"--data.path={tmp_path}", "--data.eval_split=test", "--data.format=kit_own_format:hard"]
    )
    file = tmp_path / "calibration.jsonl"
    row = {"story": "Cy has 7.", "ask": "Half?", "level": 2}
    file.write_text(json.dumps(row) + "\n" + json.dumps({"text": "as it is"}) + "\n")
    assert _read(file, config) == [[{"role": "user", "content": "Cy has 7.\nHalf?"}], "as it is"]
    file.write_text(json.dumps(row | {"level": 0}) + "\n")
    with pytest.raises(BadInput, match=r"calibration.jsonl:1 has no prompt \(data.format 'kit_own_format:hard' makes"):
        _read(file, config)


def test_a_run_is_not_resumed_with_another_source_of_the_function(data, tmp_path):
    config = load_config(CONFIG, ["--data.format=kit_own_format:asked"])
    base, facts = tmp_path / "base.json", tmp_path / "config.json"
    run = SimpleNamespace(replaces=False, base_file=base, config_file=facts, path=tmp_path)
    run.facts = lambda: json.loads(facts.read_text())
    check_format(config, run)  # a new run
    base.write_text("{}")
    write_json(facts, format_hash(config))
    assert len(format_hash(config)["own_format"]) == 16
    check_format(config, run)
    source = tmp_path / "kit_own_format.py"
    source.write_text(source.read_text().replace("asked(row)", "asked(row)  "))
    with pytest.raises(BadInput, match=r"--resume: the file of data.format 'kit_own_format:asked' has changed"):
        check_format(config, run)
    run.replaces = True
    check_format(config, run)
