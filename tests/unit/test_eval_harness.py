"""Results of lm-evaluation-harness beside ours: a recorded file of version 0.4.13 read, compared, and told apart."""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from eval import harness
from eval.harness import Measured, compare, differences, lines, newest_results, publish, read_results
from eval.record import Record, as_rows
from eval.score import summarize
from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import CELL
from kit.core.run_directory import MANIFEST, RunDir, file_hash, write_record
from kit.core.run_files import read_json
from kit.data.problems import Problem
from tests import sandbox
from tests.unit.filled import filled

RECORDED = Path(__file__).parent / "recorded"
IDS = ["2b6dd2d24055888b", "48c10f8b4c462246", "7b64cc868f5ed200", "18b3ef76ae1511fa", "5f102698ed7ce111"]
OURS = [True, True, True, True, False]


@pytest.fixture
def recorded(tmp_path) -> Path:
    """The recorded results with their samples, whose checkpoint is tmp_path/checkpoint."""
    folder = shutil.copytree(RECORDED, tmp_path / "harness" / "model")
    file = folder / "results_2026-11-21.json"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    raw = json.loads(file.read_text().replace("CHECKPOINT", str(checkpoint)))
    (checkpoint / "chat_template.jinja").write_text(raw["chat_template"])
    file.write_text(json.dumps(raw))
    return file


def edit(file: Path, **changes: object) -> Path:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


def measured(tmp_path: Path, correct: list = OURS, **result: object) -> Measured:
    records = [
        Record(name, "", 9, True, False, True, "1", "1", right, right, False)
        for name, right in zip(IDS, correct, strict=True)
    ]
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row) + "\n" for row in as_rows(records))
    (file := folder / "eval" / "grpo-bf16.jsonl").write_text(rows)
    write_record(folder / "eval" / "grpo-bf16.meta.json", filled(CELL, {"records": file_hash(file)}))
    made = {
        "matrix": {"grpo": {"bf16": {**summarize(records), "compute_dtype": "float32"}}},
        "eval": {"bootstrap_samples": 500},
        "problems_hash": "h",
        "max_new_tokens": 40,
        "temperature": 0.0,
    }
    problems = [Problem(name, f"{name}?", "1", "t:1") for name in IDS]
    data = DataConfig(path="p")
    return Measured(
        RunDir(folder), folder, "grpo", "bf16", {**made, **result}, tmp_path / "checkpoint", problems, data
    )


def test_every_filter_of_every_task_is_a_score_with_its_interval(recorded):
    scores = read_results(recorded).scores
    assert [(score.task, score.filter, score.value, score.n, score.shots) for score in scores] == [
        ("kit_gsm8k", "strict-match", 0.0, 5, 5),
        ("kit_gsm8k", "flexible-extract", 0.2, 5, 5),
        ("kit_problems", "boxed", 0.8, 5, 0),
        ("kit_problems", "flexible-extract", 0.8, 5, 0),
    ]
    assert scores[1].right == {**dict.fromkeys(IDS[:4], 0.0), IDS[4]: 1.0}
    low, high = scores[1].interval
    assert 0 < low < 0.2 < high < 0.8
    assert newest_results(recorded.parents[1]) == recorded


def test_the_difference_is_on_the_same_problems_and_counts_who_was_right_alone(tmp_path, recorded):
    found = compare(measured(tmp_path), read_results(recorded))
    by_name = {(score["task"], score["filter"]): score["difference"] for score in found["harness"]}
    same = by_name["kit_problems", "boxed"]
    assert (same["difference"], same["only_harness_right"], same["only_ours_right"], same["n"]) == (0.0, 0, 0, 5)
    other = by_name["kit_gsm8k", "flexible-extract"]
    assert (other["difference"], other["only_harness_right"], other["only_ours_right"]) == (pytest.approx(-0.6), 1, 4)
    undecided = compare(measured(tmp_path, [True, True, True, True, None]), read_results(recorded))
    assert undecided["harness"][1]["difference"]["n"] == 4
    recorded.with_name("samples_kit_gsm8k_2026-11-21.jsonl").unlink()
    found = compare(measured(tmp_path), read_results(recorded))
    assert [score["difference"] is None for score in found["harness"]] == [True, True, False, False]


def test_what_differs_between_the_protocols_is_named_and_what_does_not_is_not(tmp_path, recorded):
    results = read_results(recorded)
    own, theirs = measured(tmp_path), differences(measured(tmp_path), results, "kit_gsm8k")
    starts = [text.partition(":")[0] for text in theirs]
    assert starts == ["examples", "words", "answer (strict-match)", "answer (flexible-extract)", "stops"]
    assert "5 worked ones" in theirs[0] and "'Question:'" in theirs[-1]
    stopping = measured(tmp_path)
    stopping.result["eval"] = {"stop": ["END"]}
    assert "; ours the model's stop tokens and 'END'" in differences(stopping, results, "kit_gsm8k")[-1]
    assert [text.partition(":")[0] for text in differences(own, results, "kit_problems")] == [
        "answer (boxed)",
        "answer (flexible-extract)",
    ]
    sampled = measured(tmp_path, temperature=1.0, max_new_tokens=256)
    said = differences(sampled, results, "kit_problems")
    assert "decoding: greedy; ours sampled at temperature 1" in said
    assert "length: at most 40 new tokens; ours 256" in said
    settings = {"repetition_penalty": 1.1, "min_length": 0, "temperature": 0.7, "eos_token_id": 2}
    (tmp_path / "checkpoint" / "generation_config.json").write_text(json.dumps(settings))
    said = differences(own, results, "kit_problems")
    assert any(text.startswith("settings: the checkpoint's repetition_penalty 1.1 apply") for text in said)
    (tmp_path / "checkpoint" / "chat_template.jinja").write_text("{{ messages }}")
    assert any(text.startswith("chat template:") for text in differences(own, results, "kit_problems"))
    (tmp_path / "checkpoint" / MANIFEST).write_text(
        json.dumps({"kind": "checkpoint", "files": {}, "chat_template_kwargs": {"enable_thinking": False}})
    )
    arguments = "chat template's arguments: the checkpoint's defaults {'enable_thinking': False}; ours {}"
    assert arguments in differences(own, results, "kit_problems")
    edit(recorded, system_instruction="Be brief.", chat_template=None)
    assert any(text.startswith("system message") for text in differences(own, read_results(recorded), "kit_problems"))


def test_the_table_shows_both_numbers_and_the_file_keeps_other_cells(tmp_path, recorded, capsys):
    own = measured(tmp_path)
    found = compare(own, read_results(recorded))
    text = "\n".join(lines(own, found))
    assert "ours                                          80.0 [ 37.6,  96.4]  of 5" in text
    assert "kit_gsm8k, flexible-extract, 5 examples       20.0 [  3.6,  62.4]  of 5  minus ours -60.0" in text
    other = {"policy": "base", "format": "fp8", "n": 1, "harness": [], "differences": {}}
    other["ours"] = {"accuracy": 0.5, "interval": [0.4, 0.6]}
    (own.folder / "lm_eval.json").write_text(json.dumps({"cells": {"base/fp8": other}}))
    publish(own, found, ["python"])
    cells = read_json(own.folder / "lm_eval.json")["cells"]
    assert set(cells) == {"base/fp8", "grpo/bf16"} and cells["grpo/bf16"]["versions"]["lm_eval"] == "0.4.13"


def test_results_of_another_checkpoint_are_refused(tmp_path, recorded):
    edit(recorded, config={"model_args": {"pretrained": "/elsewhere"}})
    with pytest.raises(BadInput, match="measured /elsewhere, the cell is"):
        compare(measured(tmp_path), read_results(recorded))
    edit(recorded, config={"model_args": "model=served,base_url=http://x"})
    found = compare(measured(tmp_path), read_results(recorded))
    assert found["n"] == 5 and "computed in the server's default; ours in float32" in found["differences"]["kit_gsm8k"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"results": None}, "is not a results file of lm_eval"),
        ({"results": {}}, "has no exact_match of any task; it has no tasks"),
        ({"results": {"mmlu": {"acc,none": 0.5}}}, "it has mmlu"),
        ({"results": {"gsm8k": {"exact_match,strict-match": 0.5}}}, "has exact_match 0.5 of None samples"),
        ({"results": {"gsm8k": {"exact_match,x": 1.5, "sample_len": 5}}}, "has exact_match 1.5 of 5 samples"),
        ({"results": {"gsm8k": {"exact_match,x": float("nan"), "sample_len": 5}}}, "has exact_match nan"),
    ],
)
def test_a_file_that_is_no_results_is_refused(recorded, change, message):
    with pytest.raises(BadInput, match=message):
        read_results(edit(recorded, **change))


def test_a_torn_samples_file_is_named_by_line_and_one_of_other_problems_is_not_used(recorded):
    samples = recorded.with_name("samples_kit_gsm8k_2026-11-21.jsonl")
    whole = samples.read_text()
    samples.write_text(whole[:-40])
    with pytest.raises(BadInput, match=r"samples_kit_gsm8k_2026-11-21\.jsonl:10 is damaged: it is not JSON"):
        read_results(recorded)
    samples.write_text(whole.replace("problem_id", "other_id"))
    assert read_results(recorded).scores[0].right is None


def test_the_problems_are_written_in_the_policys_words_with_answers_that_compare_as_text(tmp_path):
    own = measured(tmp_path)
    golds = ["145.0", "-3.00", "1,000", "0.50", "2\u2028"]
    own.problems[:] = [Problem(name, f"{name}?", gold, "t:1") for name, gold in zip(IDS, golds, strict=True)]
    own.data.prompt_suffix = " Box it."
    harness.write_problems(own)
    rows = [json.loads(line) for line in (own.work / "problems.jsonl").read_text().split("\n") if line]
    assert [row["answer"] for row in rows] == ["145", "-3", "1,000", "0.50", "2\u2028"]
    assert rows[0] == {"problem_id": IDS[0], "question": f"{IDS[0]}?", "prompt": f"{IDS[0]}? Box it.", "answer": "145"}


def options(tmp_path: Path, **changes: object) -> Namespace:
    (tmp_path / "lm_eval").write_text("")
    given = {"lm_eval": tmp_path / "lm_eval", "tasks": list(harness.TASKS), "num_fewshot": 5, "batch_size": 8}
    given |= {"url": None, "model": None, "fewshot": tmp_path / "train.jsonl"}
    (tmp_path / "train.jsonl").write_text("")
    return Namespace(**given | changes)


def test_the_command_asks_the_checkpoint_with_its_chat_template_offline(tmp_path, recorded):
    command = harness.harness_command(own := measured(tmp_path), options(tmp_path))
    assert command[:4] == [str(tmp_path / "lm_eval"), "run", "--model", "hf"]
    assert f"pretrained={tmp_path / 'checkpoint'},dtype=float32" in command and "--apply_chat_template" in command
    metadata = json.loads(command[command.index("--metadata") + 1])
    assert metadata == {"problems": str(own.work / "problems.jsonl"), "fewshot": str(tmp_path / "train.jsonl")}
    served = harness.harness_command(own, options(tmp_path, url="http://h:1/", model="m", num_fewshot=0))
    arguments = served[served.index("--model_args") + 1].split(",")
    assert {"model=m", "base_url=http://h:1/v1/chat/completions", "num_concurrent=8"} <= set(arguments)
    assert "fewshot" not in served[served.index("--metadata") + 1]


def test_a_harness_that_is_not_there_or_fails_says_what_to_do(tmp_path, recorded):
    with pytest.raises(BadInput, match="make lm_eval"):
        harness.harness_command(measured(tmp_path), options(tmp_path, lm_eval=tmp_path / "none"))
    with pytest.raises(BadInput, match="needs worked examples"):
        harness.harness_command(measured(tmp_path), options(tmp_path, fewshot=tmp_path / "none.jsonl"))
    with pytest.raises(CheckFailed, match=r"exit code 3(?s:.)*no such task"):
        harness.run_harness(["sh", "-c", "echo no such task; exit 3"], tmp_path)
    with pytest.raises(BadInput, match="holds no results"):
        harness.run_harness(["true"], tmp_path / "checkpoint")
    with pytest.raises(CheckFailed, match="wrote no results"):
        os.utime(recorded, (1, 1))
        harness.run_harness(["true"], recorded.parent)


def test_the_tasks_of_the_harness_are_its_own_gsm8k_and_ours():
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    folder = Path(harness.__file__).parent / "lm_eval"
    found = {file.stem: yaml.load(file.read_text(), Loader) for file in folder.glob("*.yaml")}
    assert {name: task["task"] for name, task in found.items()} == {name: name for name in harness.TASKS}
    assert found["kit_gsm8k"]["num_fewshot"] == harness.SHOTS
    sandbox.has_environment("lm_eval")  # waits for it
    own = harness.INSTALLED.parents[1].glob("lib/python*/site-packages/lm_eval/tasks/gsm8k/gsm8k.yaml")
    for file in own:  # where the harness is installed, its protocol is the one that is copied here
        theirs = yaml.load(file.read_text(), Loader)
        for key in ("doc_to_text", "doc_to_target", "metric_list", "generation_kwargs", "filter_list", "num_fewshot"):
            assert found["kit_gsm8k"][key] == theirs[key], key
