"""check and attack with a reward function of the user's: what it is asked, what is refused, what is found."""

import json
import sys

import pytest

from kit.core.errors import BadInput, CheckFailed
from reward.__main__ import main

MODULE = """
def said(completions): return [completion[0]["content"] for completion in completions]

def exact(completions, gold, *, scale: float = 1.0):
    return [scale * (text.strip() == right) for text, right in zip(said(completions), gold)]
def contains(completions, gold): return [float(right in text) for text, right in zip(said(completions), gold)]
def last_line(completions, gold):
    ends = [text.strip().rpartition("\\n")[2] for text in said(completions)]
    return [float(end == f"Label: {right}") for end, right in zip(ends, gold)]
def graded(completions, solution, level):
    return [None if text == "?" else float(text == right) * depth
            for text, right, depth in zip(said(completions), solution, level)]
def structured(prompts, completions, gold):
    import json
    assert prompts[0][0]["role"] == "user"
    return [float(text == json.loads(right)["a"]) for text, right in zip(said(completions), gold)]
async def later(completions, gold): return exact(completions, gold)
def best(completions, gold): return exact(completions, gold)
best.group = True
def inside(completions, completion_ids): return [1.0] * len(completions)
def fragile(completions, gold):
    if any(chr(0) in text for text in said(completions)): raise ValueError("a null byte")
    return exact(completions, gold)
def broken(completions, gold): raise KeyError("its own fault")
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "kit_checked_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kit_checked_rewards", raising=False)


def task(name: str) -> list[str]:
    return ["--task", f"kit_checked_rewards:{name}"]


@pytest.fixture
def write(tmp_path):
    def make(rows: list[dict]) -> str:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / "rows.jsonl")

    return make


@pytest.mark.parametrize(
    ("function", "row", "reward"),
    [
        ("exact", {"gold": "blue", "completion": "blue"}, 1.0),
        ("exact", {"gold": "blue", "completion": r"\boxed{blue}"}, 0.0),  # as in training
        ("later", {"gold": "blue", "completion": "blue"}, 1.0),
        ("last_line", {"gold": "blue", "prediction": "blue"}, 0.0),
        ("last_line", {"gold": "blue", "prediction": "blue", "prompt": "Which? End with 'Label: …'."}, 1.0),
        ("last_line", {"gold": "blue", "prediction": "red", "prompt": "Which? End with 'Label: …'."}, 0.0),
        ("graded", {"gold": "", "solution": "x", "level": 3, "completion": "x"}, 3.0),
        ("graded", {"gold": "", "solution": "x", "level": 3, "completion": "?"}, None),
        ("structured", {"gold": {"a": "1"}, "completion": "1"}, 1.0),
    ],
)
def test_a_row_is_judged_as_in_training_and_a_prediction_in_the_forms_of_its_prompt(
    write, capsys, function, row, reward
):
    assert main(["check", write([row]), *task(function), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["reward"], found["verdict"]) == (reward, None if reward is None else reward >= 1)


def test_options_and_the_lowest_paid_reward_decide_what_counts_as_paid(write, capsys):
    rows = [{"gold": "a", "completion": "a", "expected": True}, {"gold": "a", "completion": "b", "expected": False}]
    half = [*task("exact"), "--options", json.dumps({"scale": 0.5}), "--strict"]
    assert main(["check", write(rows), *half]) == 1
    assert main(["check", write(rows), *half, "--paid_from", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "line 1: not paid (reward 0.5)  'a' against 'a'  <- expected paid" in out
    assert "line 1: paid (reward 0.5)  'a' against 'a'\n" in out and "agreement: 2 of 2" in out


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("best", BadInput, "judges the completions of a group together, and here there are no groups"),
        ("inside", BadInput, "needs an argument 'completion_ids'; a reward gets prompts, completions, gold"),
        ("graded", BadInput, "needs an argument 'solution'"),
        ("absent", BadInput, "cannot be imported"),
        ("broken", CheckFailed, "raised KeyError"),
    ],
)
@pytest.mark.parametrize("command", ["check", "attack"])
def test_one_that_cannot_be_asked_is_refused_by_name(write, command, function, error, message):
    rows = write([{"gold": "a", "completion": "a"}])
    words = [command, rows] if command == "check" else [command, "--answers", rows]
    with pytest.raises(error, match=message):
        main([*words, *task(function)])


REFERENCES = [{"gold": gold, "prompt": "Which color?"} for gold in ("blue", "green", "red", "violet", "brown")]


@pytest.mark.parametrize(
    ("function", "code", "told"),
    [
        ("exact", 0, " 0 paid; 5 controls, 0 not paid"),
        ("later", 0, " 0 paid; 5 controls, 0 not paid"),
        ("last_line", 1, "NOT PAID (reward): kit_checked_rewards:last_line, control, the reference"),
        ("contains", 1, "several, every answer in a list: "),
        ("fragile", 1, "RAISED RewardFailed: reward 'kit_checked_rewards:fragile' raised ValueError: a null byte"),
    ],
)
def test_attack_makes_attempts_from_the_references_and_names_what_pays(write, capsys, function, code, told):
    assert main(["attack", *task(function), "--answers", write(REFERENCES)]) == code, capsys.readouterr().out
    assert told in capsys.readouterr().out


def test_the_control_is_in_the_form_that_the_prompt_asks_for(write, capsys):
    rows = [row | {"prompt": "Which color? Write 'Label: ' and the color."} for row in REFERENCES]
    assert main(["attack", *task("last_line"), "--answers", write(rows)]) == 0, capsys.readouterr().out


def test_attack_reads_the_users_data_by_the_columns_of_the_configuration_and_asks_for_references(
    write, tmp_path, capsys
):
    file = tmp_path / "own.yaml"
    groups = ["run: {name: x}", "model: {id: m}", "train: {max_steps: 1}"]
    groups += ["data: {path: rows.jsonl, question_column: note, answer_column: color, answer_format: any}"]
    groups += ["reward: {functions: ['kit_checked_rewards:exact', boxed_format], weights: [1.0, 0.1]}"]
    file.write_text("\n".join(groups))
    assert main(["attack", "--config", str(file)]) == 0
    told = "skipped: kit_checked_rewards:exact (name its references with --answers FILE.jsonl)"
    assert told in capsys.readouterr().out
    rows = write([{"note": "Which?", "color": row["gold"]} for row in REFERENCES])
    assert main(["attack", "--config", str(file), "--answers", rows]) == 0
    out = capsys.readouterr().out
    assert "kit_checked_rewards:exact" in out and "boxed_format" in out and "5 controls" not in out
    with pytest.raises(BadInput, match=r"rows.jsonl:1: no gold and no color; it has note"):
        main(["attack", "--config", str(file), "--answers", write([{"note": "Which?"}])])


def test_attack_without_references_uses_built_in_ones(capsys):
    assert main(["attack", *task("exact")]) == 0, capsys.readouterr().out
