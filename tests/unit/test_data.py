"""Problems from files and hub ids: formats, bad rows, duplicates, prompts."""

import gzip
import json
import math
from pathlib import Path

import pytest

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput
from kit.data.leaks import find_leaks
from kit.data.problems import (
    chat_messages,
    drop_long,
    hidden_columns,
    load_problems,
    prompt_of_row,
    read_problems,
    reward_columns,
    to_dataset,
)

ROOT = Path(__file__).parents[2]
ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]


def jsonl(path: Path, rows: list, newline: str = "\n") -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes((newline.join(lines) + newline).encode())
    return path


def config(path: Path | None = None, **fields) -> DataConfig:
    return DataConfig(path=str(path) if path else None, **fields)


def bad_input(data: DataConfig, split: str = "train") -> str:
    with pytest.raises(BadInput) as error:
        load_problems(data, split)
    return str(error.value)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_file_type_gives_the_same_problems(tmp_path, suffix):
    file = tmp_path / f"train.{suffix}"
    if suffix == "jsonl":
        jsonl(file, ROWS)
    elif suffix == "json":
        file.write_text(json.dumps(ROWS))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    for path in (file, tmp_path):  # the file itself, and the directory that holds <split>.<suffix>
        problems = load_problems(config(path), "train")
        assert [(p.question, p.gold) for p in problems] == [("1+1?", "2"), ("2+2?", "4"), ("3+3?", "6")]
        assert [p.source for p in problems] == [f"{file}:{line}" for line in (1, 2, 3)]
    ids = [problem.id for problem in problems]
    assert ids == [p.id for p in load_problems(config(jsonl(tmp_path / "same.jsonl", ROWS)), "train")]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(("suffix", "mark"), [("csv", ","), ("tsv", "\t")])
def test_a_table_gives_the_same_problems(tmp_path, suffix, mark):
    file = tmp_path / f"train.{suffix}"
    quoted = f'"Two lines{mark}\nand a ""mark"": 007?"'
    file.write_text(f"\ufeffquestion{mark}answer{mark}level\n1+1?{mark}2{mark}\n{quoted}{mark}007{mark}hard\n")
    for path in (file, tmp_path):
        problems = load_problems(config(path), "train")
        assert [p.question for p in problems] == ["1+1?", f'Two lines{mark}\nand a "mark": 007?']
        assert [p.gold for p in problems] == ["2", "007"], "text stays text"
        assert [p.columns["level"] for p in problems] == [None, "hard"]
        assert [p.source for p in problems] == [f"{file}:2", f"{file}:4"]


def test_a_row_of_a_table_with_other_columns_is_a_bad_row_and_a_torn_quote_no_table(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("question,answer\n1+1?,2,3\n2+2?\n3+3?,6\n")
    problems, report = read_problems(config(file, max_bad_fraction=0.7), "train")
    assert [p.question for p in problems] == ["3+3?"]
    assert report.bad == [
        (f"{file}:2", "3 fields, the first line names 2 columns"),
        (f"{file}:3", "1 fields, the first line names 2 columns"),
    ]
    file.write_text('question,answer\n"1+1?,2\n')
    assert "is not a table: unexpected end of data" in bad_input(config(file))
    file.write_text("answer,answer\n1,2\n")
    assert "several columns 'answer'" in bad_input(config(file))


def test_a_share_held_out_of_one_file_is_never_trained_on_and_no_row_changes_sides(tmp_path):
    rows = [{"question": f"sum of {n}, {n}?", "answer": str(2 * n)} for n in range(200)]
    file = jsonl(tmp_path / "all.jsonl", rows)
    data = config(file, heldout_fraction=0.2)
    train, heldout = (load_problems(data, split) for split in ("train", "eval"))
    assert len(train) + len(heldout) == 200 and 25 <= len(heldout) <= 55
    assert not find_leaks(heldout, train)
    copies = [row | {"question": row["question"].upper().replace(" ", "  ")} for row in rows]
    jsonl(file, [*reversed(rows), {"question": "new?", "answer": "1"}, *copies])
    kept, again = ({one.question for one in load_problems(data, split)} for split in ("train", "eval"))
    assert {one.question for one in heldout} <= again and {one.question for one in train} <= kept
    trained, held = ({" ".join(one.casefold().split()) for one in side} for side in (kept, again))
    assert not trained & held and len(kept) + len(again) == 401, "a copy in capitals is on its question's side"
    other = load_problems(config(file, heldout_fraction=0.2, heldout_seed=1), "eval")
    assert {one.question for one in other} != again
    assert "Leave one of them out" in bad_input(config(file, heldout_fraction=0.2, eval_path=str(file)), "eval")


def test_what_save_to_disk_wrote_is_read_like_the_files(tmp_path):
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    train, test = Dataset.from_list(ROWS), Dataset.from_list(ROWS[2:])
    train.save_to_disk(tmp_path / "one")
    DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    expected = [("1+1?", "2"), ("2+2?", "4"), ("3+3?", "6")]
    for folder in ("one", "both"):
        problems = load_problems(config(tmp_path / folder), "train")
        assert [(p.question, p.gold) for p in problems] == expected
    assert problems[0].source == f"{tmp_path / 'both' / 'train'}:1"
    assert [p.gold for p in load_problems(config(tmp_path / "both"), "eval")] == ["6"]
    one = config(tmp_path / "one", eval_path=str(tmp_path / "both" / "test"))
    assert [p.gold for p in load_problems(one, "eval")] == ["6"]
    assert "name the held-out problems with data.eval_path" in bad_input(config(tmp_path / "one"), "eval")
    message = bad_input(config(tmp_path / "both", eval_split="tst"), "eval")
    assert "it has test, train. Set data.eval_split to 'test'" in message
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"cut")
    assert "is not a whole data set of save_to_disk: " in bad_input(config(tmp_path / "one"))


def test_ids_depend_on_content_and_not_on_place(tmp_path):
    forward = load_problems(config(jsonl(tmp_path / "a.jsonl", ROWS)), "train")
    backward = load_problems(config(jsonl(tmp_path / "b.jsonl", ROWS[::-1])), "train")
    assert [p.id for p in forward] == [p.id for p in backward][::-1]
    changed = load_problems(config(jsonl(tmp_path / "c.jsonl", [{"question": "1+1?", "answer": "3"}])), "train")
    assert changed[0].id not in {p.id for p in forward}


def test_splits_have_files_of_their_own(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS[:2])
    jsonl(tmp_path / "test.jsonl", ROWS[2:])
    other = jsonl(tmp_path / "other.jsonl", ROWS[:1])
    assert [p.gold for p in load_problems(config(tmp_path), "eval")] == ["6"]
    assert [p.gold for p in load_problems(config(tmp_path, eval_path=str(other)), "eval")] == ["2"]
    assert [p.gold for p in load_problems(config(tmp_path, eval_path=str(other)), "train")] == ["2", "4"]
    assert [p.gold for p in load_problems(config(tmp_path, train_split="test"), "train")] == ["6"]
    assert "data.eval_path" in bad_input(config(tmp_path / "train.jsonl"), "eval")


def test_the_first_n_problems_are_used_when_a_limit_is_set(tmp_path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    jsonl(tmp_path / "test.jsonl", ROWS)
    data = config(tmp_path, max_train_problems=2, max_eval_problems=1)
    assert (len(load_problems(data, "train")), len(load_problems(data, "eval"))) == (2, 1)


@pytest.mark.parametrize(
    ("answer_format", "answer", "gold"),
    [
        ("gsm8k", "She has 2 <<1+1=2>>.\n#### 1,234", "1,234"),
        ("boxed", r"Thus $\boxed{\frac{1}{2}}$, not $\boxed{3}$; so \boxed{\frac{2}{4}}.", r"\frac{2}{4}"),
        ("plain", " 42 ", "42"),
        ("plain", 42, "42"),
        ("plain", 0.5, "0.5"),
        ("plain", r"\frac{1}{2}", r"\frac{1}{2}"),
        ("plain", "Évelyn", "Évelyn"),
    ],
)
def test_the_reference_is_taken_from_its_form(tmp_path, answer_format, answer, gold):
    file = jsonl(tmp_path / "train.jsonl", [{"problem": "q", "solution": answer}])
    data = config(file, answer_format=answer_format, question_column="problem", answer_column="solution")
    assert load_problems(data, "train")[0].gold == gold


BAD_ROWS = [
    ("plain", '{"question": "q", "answer": "5"', "invalid JSON"),
    ("plain", "[" * 100_000, "invalid JSON"),
    ("plain", "[1, 2]", "a JSON list, expected an object"),
    ("plain", "null", "a JSON NoneType"),
    ("plain", {"question": "q"}, "no column 'answer'"),
    ("plain", {"question": "  ", "answer": "5"}, "question"),
    ("plain", {"question": "", "answer": "5"}, "the question is empty"),
    ("plain", {"question": None, "answer": "5"}, "the question is empty"),
    ("plain", {"question": ["q"], "answer": "5"}, "the question is ['q'], a list and not text or messages"),
    (
        "plain",
        {"question": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "answer": "5"},
        "the prompt ends with the assistant's message",
    ),
    (
        "plain",
        {"question": [{"role": "human", "content": "q"}], "answer": "5"},
        "message 1 of the prompt has the role 'human'",
    ),
    (
        "plain",
        {"question": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}], "answer": "5"},
        "content block of type 'image'",
    ),
    (
        "plain",
        {"question": [{"role": "user", "content": None}], "answer": "5"},
        "message 1 of the prompt has content None, a NoneType and not text",
    ),
    ("plain", {"question": [{"role": "user", "content": " "}], "answer": "5"}, "the question is empty"),
    (
        "plain",
        {
            "question": [{"role": "assistant", "content": "a", "tool_calls": [{}]}, {"role": "user", "content": "q"}],
            "answer": "5",
        },
        "message 1 of the prompt has tool_calls",
    ),
    ("plain", '{"question": [{"role": "user", "content": "cut \\ud83d"}], "answer": "5"}', "unpaired surrogate"),
    ("plain", {"question": {"text": "w" * 99}, "answer": "5"}, "www…, a dict and not text or messages"),
    ("plain", {"question": "q", "answer": ["word"] * 99}, "'word',…, not text"),
    ("plain", '{"question": "cut \\ud83d", "answer": "5"}', "unpaired surrogate"),
    ("plain", '{"question": "q", "answer": "cut \\ud83d"}', "unpaired surrogate"),
    ("plain", {"question": "q", "answer": None}, "the answer is None"),
    ("plain", {"question": "q", "answer": True}, "the answer is True"),
    ("plain", {"question": "q", "answer": ""}, "the answer is empty"),
    ("plain", {"question": "q", "answer": "nan"}, "the answer is 'nan'"),
    ("plain", {"question": "q", "answer": "\\frac{1}{2"}, "unbalanced braces"),
    ("plain", {"question": "q", "answer": "9" * 5000}, "5,000 characters"),
    ("gsm8k", {"question": "q", "answer": "42"}, "no '#### number'"),
    ("gsm8k", {"question": "q", "answer": "#### none"}, "no '#### number'"),
    ("boxed", {"question": "q", "answer": "42"}, r"no balanced \boxed{}"),
    ("boxed", {"question": "q", "answer": r"\boxed{4"}, r"no balanced \boxed{}"),
    ("boxed", {"question": "q", "answer": r"\boxed{}"}, "the answer is empty"),
]


@pytest.mark.parametrize(("answer_format", "row", "why"), BAD_ROWS, ids=lambda value: repr(value)[:30])
def test_a_bad_row_is_named_by_file_and_line_and_skipped_only_under_the_budget(tmp_path, answer_format, row, why):
    good = {"gsm8k": "#### 1", "boxed": r"\boxed{1}", "plain": "1"}[answer_format]
    rows = [{"question": f"q{number}", "answer": good} for number in range(9)]
    file = jsonl(tmp_path / "train.jsonl", [*rows[:4], row, *rows[4:]])
    message = bad_input(config(file, answer_format=answer_format))
    assert f"{file}:5: " in message and why in message and "1 of 10 rows" in message
    assert "data.max_bad_fraction 0.1" in message
    problems, report = read_problems(config(file, answer_format=answer_format, max_bad_fraction=0.1), "train")
    assert len(problems) == 9 and [place for place, _ in report.bad] == [f"{file}:5"]
    assert report.summary() == "10 rows, 1 bad, 0 repeated questions"


def test_five_bad_rows_are_shown_and_the_rest_counted(tmp_path):
    file = jsonl(tmp_path / "train.jsonl", [ROWS[0], *["{"] * 8])
    message = bad_input(config(file, max_bad_fraction=0.5))
    assert "8 of 9 rows" in message and message.count("invalid JSON") == 5 and "and 3 more" in message


def test_no_usable_row_is_an_error_at_any_budget(tmp_path):
    assert "1 of 1 rows" in bad_input(config(jsonl(tmp_path / "a.jsonl", ["{"]), max_bad_fraction=1.0))
    assert "no rows" in bad_input(config(jsonl(tmp_path / "b.jsonl", [""]), max_bad_fraction=1.0))


def test_a_missing_column_names_the_nearest_one(tmp_path):
    file = jsonl(tmp_path / "train.jsonl", [{"Question": "q", "final_answer": "5"}])
    message = bad_input(config(file))
    assert "no column 'question'; it has Question, final_answer" in message
    assert "Set data.question_column to 'Question'" in message
    assert "data.answer_column to 'final_answer'" in bad_input(config(file, question_column="Question"))


def test_repeated_questions_are_kept_once_and_counted(tmp_path):
    file = jsonl(tmp_path / "train.jsonl", [*ROWS, {"question": " 1+1?\r\n", "answer": "2"}])
    problems, report = read_problems(config(file), "train")
    assert len(problems) == 3 and report.duplicates == [f"{file}:4 repeats {file}:1"]
    assert report.summary() == "4 rows, 0 bad, 1 repeated questions"


def test_rows_of_one_question_are_problems_of_their_own_if_asked_for(tmp_path):
    rows = [{"prompt": "Play.", "seed": seed} for seed in (1, 2, 2, 3)]
    keys = {"repeated_questions": "keep", "answer_column": None, "question_column": "prompt", "answer_format": "any"}
    problems, report = read_problems(config(jsonl(tmp_path / "a.jsonl", rows), **keys), "train")
    assert [problem.columns["seed"] for problem in problems] == [1, 2, 2, 3] and problems[0].gold == ""
    assert len({problem.id for problem in problems}) == 4 and report.duplicates == []
    once = read_problems(config(jsonl(tmp_path / "a.jsonl", rows[:1]), **keys), "train")[0]
    assert once[0].id == problems[0].id, "the first one has the id of a question that is not repeated"
    moved = read_problems(config(jsonl(tmp_path / "b.jsonl", [rows[0], rows[3], rows[1]]), **keys), "train")[0]
    assert [problem.id for problem in moved] == [problems[place].id for place in (0, 3, 1)], "whatever their order"


def test_a_format_that_reads_the_answer_needs_its_column(tmp_path):
    file = jsonl(tmp_path / "train.jsonl", ROWS)
    assert "answer_column is null and data.answer_format plain" in bad_input(config(file, answer_column=None))


def test_one_question_with_two_answers_is_a_bad_row(tmp_path):
    file = jsonl(tmp_path / "train.jsonl", [*ROWS, {"question": "1+1?", "answer": "3"}])
    assert f"{file}:4: same question as {file}:1, other answer '3'" in bad_input(config(file))


def test_bom_crlf_blank_lines_and_unicode_separators_are_read(tmp_path):
    rows = [{"question": "Wie groß\u2028ist 1+1? 🦆", "answer": "2"}, "", {"question": "a\r\nb", "answer": "4"}]
    file = jsonl(tmp_path / "train.jsonl", rows, newline="\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    problems = load_problems(config(file), "train")
    assert [(p.question, p.source) for p in problems] == [
        ("Wie groß\u2028ist 1+1? 🦆", f"{file}:1"),
        ("a\nb", f"{file}:3"),
    ]


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"question": "q", "answer": "\xff"}\n' + json.dumps(ROWS[0]).encode())
    assert f"{file}:1: not UTF-8" in bad_input(config(file))
    assert len(load_problems(config(file, max_bad_fraction=0.5), "train")) == 1


def test_wrong_sources_are_bad_input_with_the_fix(tmp_path):
    jsonl(tmp_path / "training.jsonl", ROWS)
    for name, text in (("a.xls", "x"), ("a.json", "{}"), ("b.json", "{"), ("a.parquet", "x"), ("manifest.json", "{}")):
        (tmp_path / name).write_text(text)
    message = bad_input(config(tmp_path))
    assert "has no train.jsonl" in message and "training.jsonl" in message and "to 'training'" in message
    assert "manifest" not in message
    for path, why in (
        (tmp_path / "none", f"does not exist (seen from {Path.cwd()})"),
        (tmp_path / "a.xls", "unknown file type '.xls'"),
        (None, "set data.id"),
        (tmp_path / "a.json", "expected a list"),
        (tmp_path / "b.json", "is not JSON"),
        (tmp_path / "a.parquet", "not a readable parquet file"),
    ):
        assert why in bad_input(config(path))
    assert "unknown split" in bad_input(config(tmp_path / "training.jsonl"), "test")


def test_a_hub_id_goes_through_load_dataset_with_its_config_and_split(tmp_path, monkeypatch):
    import datasets

    # A local directory of the hub's shape: the same loader resolves it.
    jsonl(tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    jsonl(tmp_path / "test.jsonl", [{"question": "2+2?", "answer": "#### 4"}])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = config(id=str(tmp_path), answer_format="gsm8k")
    assert [(p.gold, p.source) for p in load_problems(data, "eval")] == [("4", f"{tmp_path}[test]:1")]

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or [ROWS[0]])
    load_problems(config(id="openai/gsm8k", config="main"), "train")
    load_problems(config(id="openai/gsm8k", eval_split="validation"), "eval")
    assert asked == [(("openai/gsm8k", "main"), {"split": "train"}), (("openai/gsm8k",), {"split": "validation"})]
    # a local path overrides the id
    assert len(load_problems(config(jsonl(tmp_path / "a.jsonl", ROWS), id="openai/gsm8k"), "train")) == 3
    assert len(asked) == 2


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach the hub"), ValueError("Unknown split"), OSError()])
def test_a_hub_id_that_cannot_be_loaded_is_bad_input_with_the_ways_out(monkeypatch, error):
    import datasets

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    message = bad_input(config(id="openai/gsm8k", config="main"))
    assert "data.id 'openai/gsm8k' (config 'main', split 'train')" in message
    assert type(error).__name__ in message and str(error) in message and "data.path" in message


def test_prompts_are_chat_messages_without_a_template(tmp_path):
    suffix = "\nPut the final answer in \\boxed{}."
    data = config(jsonl(tmp_path / "a.jsonl", ROWS), system_prompt="Be brief.", prompt_suffix=suffix)
    problems = load_problems(data, "train")
    user = {"role": "user", "content": "1+1?" + suffix}
    assert chat_messages(data, problems[0]) == [{"role": "system", "content": "Be brief."}, user]
    assert chat_messages(config(prompt_suffix=suffix), problems[0]) == [user]
    dataset = to_dataset(problems, data)
    assert dataset.column_names == ["prompt", "gold", "problem_id", "question", "answer"] and len(dataset) == 3
    made = {"prompt": chat_messages(data, problems[0]), "gold": "2", "problem_id": problems[0].id}
    assert dataset[0] == made | {"question": "1+1?", "answer": "2"}
    with pytest.raises(BadInput, match="no problems"):
        to_dataset([], data)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "2+2?"}]},
]


def test_a_conversation_is_asked_as_it_is_with_the_suffix_at_its_end(tmp_path):
    rows = [{"question": TALK, "answer": "4"}, {"question": [{"role": "user", "content": "3+3?"}], "answer": "6"}]
    file = jsonl(tmp_path / "a.jsonl", rows)
    problems = load_problems(config(file), "train")
    data = config(file, prompt_suffix=" Box it.")
    last = {"role": "user", "content": "And 2+2? Box it."}
    assert chat_messages(data, problems[0]) == [*TALK[:3], last]
    assert chat_messages(config(system_prompt="S"), problems[1])[0] == {"role": "system", "content": "S"}
    assert [problem.question for problem in problems] == ["1+1?\n\n2\n\nAnd 2+2?", "3+3?"]
    assert "data.system_prompt is set. Set it to null" in bad_input(config(file, system_prompt="S"))
    dataset = to_dataset(problems, data)
    assert dataset[0]["prompt"] == [*TALK[:3], last] and dataset[0]["question"] == TALK
    for row, problem in zip(rows, problems, strict=True):
        assert prompt_of_row(data, row, "") == chat_messages(data, problem)
    assert prompt_of_row(data, {"answer": "1"}, "") is None


def test_conversations_that_differ_in_one_message_are_different_problems(tmp_path):
    other = [{"role": "system", "content": "Be long."}, *TALK[1:]]
    rows = [{"question": TALK, "answer": "4"}, {"question": other, "answer": "4"}, {"question": TALK, "answer": "4"}]
    problems, report = read_problems(config(jsonl(tmp_path / "a.jsonl", rows)), "train")
    assert len(problems) == 2 and problems[0].id != problems[1].id and len(report.duplicates) == 1
    assert len(find_leaks(problems[:1], problems[1:])) == 1, "the system message does not hide a held-out question"


def test_ids_of_text_are_those_of_earlier_runs(tmp_path):
    problem = load_problems(config(jsonl(tmp_path / "a.jsonl", [ROWS[0] | {"level": 1}])), "train")[0]
    assert problem.id == "be60d90ba8442b39"


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}
TRL = {"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        (VERL, "questions from 'prompt', answers from 'reward_model.ground_truth'"),
        (TRL, "questions from 'prompt', answers from 'solution'"),
        (TRL | {"answer": "2", "solution": "because"}, "questions from 'prompt'"),
        ({"prompt": "1+1?", "answer": "2"}, "questions from 'prompt'"),
        ({"question": "1+1?", "solution": "2"}, "answers from 'solution'"),
        (ROWS[0] | {"prompt": "other", "solution": "3"}, ""),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_columns_of_trl_and_verl_load_without_renaming(tmp_path, row, taken, form):
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    file = tmp_path / "train.jsonl"
    if form == "jsonl":
        jsonl(file, [row])
    elif form == "parquet":
        Dataset.from_list([row]).to_parquet(file := tmp_path / "train.parquet")
    else:
        Dataset.from_list([row]).save_to_disk(file := tmp_path / "saved")
    (problem,), report = read_problems(config(file), "train")
    assert (problem.question, problem.gold) == ("1+1?", "2")
    assert report.taken == taken and report.summary().endswith(taken or "0 repeated questions")


def test_a_configured_column_is_not_replaced_and_a_path_reaches_into_objects(tmp_path):
    row = VERL | {"solution": "3", "a.b": "7", "a": {"b": "8"}}
    file = jsonl(tmp_path / "a.jsonl", [row])
    golds = {"reward_model.ground_truth": "2", "solution": "3", "a.b": "7", "extra_info.split": "train"}
    for column, gold in golds.items():
        found = load_problems(config(file, question_column="prompt", answer_column=column), "train")
        assert found[0].gold == gold
    assert "no column 'question'" in bad_input(config(file, answer_column="solution"))
    for column in ("reward_model.truth", "ability.ground_truth", "reward_model.style.x"):
        message = bad_input(config(file, question_column="prompt", answer_column=column))
        assert f"no column '{column}'" in message


def test_every_column_reaches_the_data_set_as_it_was(tmp_path):
    rows = [
        {"question": "1?", "answer": "1", "level": 1, "tags": ["a"], "extra": {"a": 1}, "mixed": "5", "prompt": "x"},
        {"question": "2?", "answer": "2", "level": 2, "tags": [], "extra": {"b": {"c": None}}, "mixed": 5},
        {
            "question": "3?",
            "answer": "3",
            "level": None,
            "extra": None,
            "mixed": {"é": 1.5},
            "late": True,
            "gold": "g",
        },
        {"question": "4?", "answer": "4", "big": 2**70, "torn": "\ud83d", "nan": math.nan},
    ]
    file = jsonl(tmp_path / "a.jsonl", [json.dumps(row) for row in rows])
    problems = load_problems(config(file), "train")
    dataset = to_dataset(problems, config(file))
    own = ("level", "tags", "extra", "mixed", "late")
    for row, made in zip(rows, dataset, strict=True):
        assert {name: made[name] for name in own} == {name: row.get(name) for name in own}
    assert math.isnan(dataset[3]["nan"]) and int(dataset[3]["big"]) == 2**70
    assert [row["gold"] for row in dataset] == ["1", "2", "3", "4"], "a run's columns are not replaced"
    assert set(reward_columns(config(file), "train")) == {"question", "answer", "nan", "big", "torn", *own}
    assert hidden_columns(problems, config(file)) == ["gold"]
    named = config(file, answer_column="gold")
    assert hidden_columns(problems, named) == []


class WordTokenizer:
    """One token per word, and two for the template."""

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt, return_dict):
        assert tokenize and add_generation_prompt and return_dict
        return {"input_ids": [0] * (2 + sum(len(message["content"].split()) for message in conversation))}


def test_prompts_that_are_too_long_are_an_error_with_the_longest_or_dropped_under_the_budget(tmp_path):
    rows = [{"question": "word " * (number + 1) + str(number), "answer": "1"} for number in range(10)]
    file = jsonl(tmp_path / "a.jsonl", rows)
    problems = load_problems(config(file), "train")
    assert drop_long(problems, WordTokenizer(), config(file), 13) == (problems, 0)
    assert drop_long(problems, WordTokenizer(), config(file), 33, added=20) == (problems, 0)
    with pytest.raises(BadInput, match=r"max_prompt_length \(32 tokens\).* Set rollout.max_prompt_length to 33"):
        drop_long(problems, WordTokenizer(), config(file), 32, added=20)
    with pytest.raises(BadInput) as error:
        drop_long(problems, WordTokenizer(), config(file), 11)
    message = str(error.value)
    assert "2 of 10 prompts" in message and "(11 tokens); the longest has 13" in message and f"{file}:10" in message
    assert "data.max_bad_fraction 0.2" in message
    assert drop_long(problems, WordTokenizer(), config(file, max_bad_fraction=0.2), 11) == (problems[:8], 2)
    with pytest.raises(BadInput, match="10 of 10"):
        drop_long(problems, WordTokenizer(), config(file, max_bad_fraction=1.0), 1)


def test_a_gzipped_jsonl_is_read_alone_and_as_a_split_and_a_torn_one_is_refused(tmp_path):
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(50)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(text))
    plain = jsonl(tmp_path / "plain.jsonl", rows)
    read = load_problems(config(tmp_path), "eval")
    assert [p.question for p in read] == [p.question for p in load_problems(config(plain), "train")]
    assert read[3].source == f"{tmp_path / 'test.jsonl.gz'}:4"
    assert load_problems(config(tmp_path / "test.jsonl.gz"), "train") == read
    for content in (gzip.compress(text)[:-20], text, b""):
        (tmp_path / "test.jsonl.gz").write_bytes(content)
        with pytest.raises(BadInput, match=r"not a whole gzip file|has no rows"):
            load_problems(config(tmp_path), "eval")


def test_a_question_may_join_columns_and_each_of_them_must_be_there(tmp_path):
    rows = [
        {"Body": "Tom has 3 pens", "Question": "How many?", "answer": "3"},
        {"Body": "Ann has 4. ", "Question": " How many?\n", "answer": "4"},
    ]
    data = config(jsonl(tmp_path / "a.jsonl", rows), question_column="Body+Question")
    assert [p.question for p in load_problems(data, "train")] == ["Tom has 3 pens. How many?", "Ann has 4. How many?"]
    named = config(jsonl(tmp_path / "b.jsonl", [{"a+b": "Sum?", "answer": "1"}]), question_column="a+b")
    assert load_problems(named, "train")[0].question == "Sum?"
    data = config(jsonl(tmp_path / "c.jsonl", [{"Body": "b", "answer": "1"}]), question_column="Body+Question")
    with pytest.raises(BadInput, match=r"c\.jsonl:1 has no column 'Question'"):
        load_problems(data, "train")
    data = config(jsonl(tmp_path / "d.jsonl", [*rows, {"Body": "b", "Question": " ", "answer": "1"}]))
    data.question_column = "Body+Question"
    with pytest.raises(BadInput, match=r"d\.jsonl:3: the question is"):
        load_problems(data, "train")


@pytest.mark.parametrize("answer", ["", "NaN", " x ", None, 3, [1, {"a": 2}], {"must": "é"}])
def test_any_reference_is_kept_as_it_is(tmp_path, answer):
    data = config(jsonl(tmp_path / "a.jsonl", [{"question": "1?", "answer": answer}]), answer_format="any")
    (problem,) = load_problems(data, "train")
    assert (problem.gold if isinstance(answer, str) else json.loads(problem.gold)) == answer


def test_references_that_no_comparison_reads_are_bad_rows(tmp_path, monkeypatch):
    file = jsonl(tmp_path / "train.jsonl", [{"question": f"q{n}", "answer": str(n)} for n in range(4)])
    monkeypatch.setattr("kit.data.problems.math_golds", lambda golds: [(golds.index("2"), "unparseable")])
    problems, report = read_problems(config(file, max_bad_fraction=0.25), "train")
    assert [problem.gold for problem in problems] == ["0", "1", "3"]
    assert report.bad == [(f"{file}:3", "unparseable")]
    with pytest.raises(BadInput, match=r"train\.jsonl:3: unparseable"):
        read_problems(config(file, max_bad_fraction=0.24), "train")
