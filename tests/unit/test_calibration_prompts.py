"""The prompts that calibrate input ranges: from the training split or a file, and what is refused."""

import json

import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.data.calibration_prompts import calibration_prompts
from tests.unit.test_fused_linear import CONFIG

LONG = "A farmer has 12 hens and 3 dogs; how many legs do they have all together?"
HELD_OUT = ("4 + 5 = ?", LONG)


class Words:
    """A tokenizer of one id a character."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **_):
        return {"input_ids": [ord(letter) for letter in "|".join(one["content"] for one in messages)]}


def prompts_of(tmp_path, text, messages=(), **keys):
    (tmp_path / "calibration.jsonl").write_text(text)
    (tmp_path / "heldout.jsonl").write_text(
        "".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in HELD_OUT)
    )
    path = str(tmp_path / "calibration.jsonl")
    overrides = [f"--policy.{key}={value}" for key, value in ({"quant_calib_data": path} | keys).items()]
    config = load_config(CONFIG, [f"--data.path={tmp_path}", "--data.prompt_suffix= Box it.", *overrides])
    return ["".join(map(chr, ids)) for ids in calibration_prompts(config, list(messages), Words())]


def test_calibration_prompts_are_spread_over_the_training_split_and_cut(tmp_path):
    messages = [[{"role": "user", "content": f"{n}. problem of many"}] for n in range(10)]
    found = prompts_of(tmp_path, "", messages, quant_calib_data="train", quant_calib_size=3, quant_sequence_length=10)
    assert found == ["0. problem", "3. problem", "6. problem"]
    with pytest.raises(BadInput, match="the training split holds 10 prompts"):
        prompts_of(tmp_path, "", messages, quant_calib_data="train", quant_calib_size=11)


def test_a_calibration_file_may_hold_text_prompts_messages_and_questions(tmp_path):
    rows = '{"text": "raw"}\n\n{"prompt": "asked"}\n{"prompt": [{"role": "user", "content": "said"}]}\n'
    rows += '{"question": "what\u2028else"}\n'  # which JSON may hold, and ends a line of text
    found = ["raw", "asked Box it.", "said", "what\u2028else Box it."]
    assert prompts_of(tmp_path, rows, quant_calib_size=4) == found


@pytest.mark.parametrize(
    "row",
    [
        {"text": "4+5 = ?"},
        {"question": "4 + 5 = ?"},
        {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "4 + 5 = ? Box it."}]},
        {"text": f"<|im_start|>user {LONG} Box it.<|im_end|>"},
    ],
    ids=str,
)
def test_a_calibration_file_that_holds_a_held_out_problem_is_refused(row, tmp_path):
    rows = json.dumps({"text": "another"}) + "\n" + json.dumps(row)
    with pytest.raises(BadInput, match=r"holds 1 of 2 held-out problems \(.*heldout.jsonl:\d (is|is inside) .*:2: "):
        prompts_of(tmp_path, rows, quant_calib_size=2)


def test_a_calibration_file_of_other_numbers_is_taken(tmp_path):
    rows = json.dumps({"question": "4 + 6 = ?"}) + "\n" + json.dumps({"text": LONG.replace("12", "13")})
    assert len(prompts_of(tmp_path, rows, quant_calib_size=2)) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no prompt and policy.quant_calib_size is 2"),
        ('{"text": "one"}\n', "holds 1 prompt and policy.quant_calib_size is 2"),
        (
            '{"text": "one"}\n{"txt": "two"}\n',
            ":2 has no prompt \\(it has txt\\)\\. A row is an object with text, prompt or question",
        ),
        ('{"text": "one"}\n{"text": " "}\n', ":2 has no prompt"),
        ('{"text": "one"}\n[1]\n', r":2 has no prompt \(a JSON list, expected an object\)"),
        ('{"text": "one"}\nnot json\n', ":2 has no prompt"),
        ('{"text": "one"}\n{"prompt": [{"content": 3}]}\n', ":2 has no prompt"),
    ],
)
def test_a_calibration_file_that_cannot_be_used_is_refused(tmp_path, text, complaint):
    with pytest.raises(BadInput, match=complaint):
        prompts_of(tmp_path, text, quant_calib_size=2)


def test_a_calibration_file_that_is_no_utf_8_is_refused_with_the_line(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"text": "one"}\n{"text": "zw\xf6lf"}\n'.encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin\.jsonl:2 has no prompt"):
        prompts_of(tmp_path, "", quant_calib_data=str(tmp_path / "latin.jsonl"), quant_calib_size=2)


def test_a_calibration_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match="no file at /nowhere/rows"):
        prompts_of(tmp_path, "", quant_calib_data="/nowhere/rows.jsonl")
