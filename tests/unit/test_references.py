"""Rewards tried on the data's own references before a base is loaded: what passes, what is refused, what is said."""

import json
import sys

import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.data.problems import read_problems
from kit.data.references import try_rewards
from launch.checks.steps import reward_checks
from reward import gold_checks, reward_functions
from reward.answer_forms import forms_for, written
from tests.conftest import CONFIG

MODULE = """
import re
ASKED = []
def said(completions):
    texts = [completion[0]["content"] for completion in completions]
    ASKED.extend(texts)
    return texts

def exact(completions, gold): return [float(text == right) for text, right in zip(said(completions), gold)]
def slashed(completions, gold):
    return [0.1 + float(text == right.replace("-", "/")) for text, right in zip(said(completions), gold)]
def silent(completions, gold): return [None] * len(completions)
def broken(completions, gold): return [float(text == right.id) for text, right in zip(said(completions), gold)]
def choosy(completions, gold):
    return [float(text == right and "03" not in right) for text, right in zip(said(completions), gold)]
def penalty(completions, gold): return [-float(text == right) for text, right in zip(said(completions), gold)]
def marked(completions, gold):
    found = [re.findall(r"Date >> (\\S+)", text) for text in said(completions)]
    return [float(found[-1:] == [right]) for found, right in zip(found, gold)]
def tagged(completions, gold):
    return [float(f"<date>{right}</date>" in text) for text, right in zip(said(completions), gold)]
def keyed(completions, gold):
    return [float(f'"day": "{right}"' in text) for text, right in zip(said(completions), gold)]
def formal(completions, gold):
    texts = said(completions)
    return [0.1 * ("<date>" in text) + float(text == right.replace("-", "/")) for text, right in zip(texts, gold)]
def columned(prompts, completions, gold, note, problem_id, log_metric):
    assert all(prompt[-1]["content"] == one for prompt, one in zip(prompts, note))
    return exact(completions, gold)
def brief(completions, **columns): return [0.0] * len(completions)
def inside(completions, gold, completion_ids): return [0.0] * len(completions)
def best(completions, gold): return [0.0] * len(completions)
best.group = True
async def later(completions, gold): return [0.0] * len(completions)
"""
DATES = [f"2024-0{month}-1{day}" for month in range(1, 5) for day in range(5)]


@pytest.fixture
def tried(tmp_path, monkeypatch):
    """tried(function, …) -> the lines about a function of the user's, or a reward of the kit's, on a file of dates."""
    (tmp_path / "kit_tried_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kit_tried_rewards", raising=False)

    def make(function: str, *words: str, golds: list = DATES, weight: float = 1.0, own: bool = True):
        name = f"kit_tried_rewards:{function}" if own else function
        rows = [{"note": f"note {place}", "day": gold} for place, gold in enumerate(golds)]
        (tmp_path / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        keys = {"data.path": "notes.jsonl", "data.question_column": "note", "data.answer_column": "day"}
        keys |= {"data.heldout_fraction": "0.1", "data.answer_format": "any", "data.eval_split": "test"}
        keys |= {"reward.functions": json.dumps([name]), "reward.options": "{}", "reward.weights": f"[{weight}]"}
        config = load_config(CONFIG, [*(word for key, value in keys.items() for word in (f"--{key}", value)), *words])
        rewards, weights = reward_functions(config.reward, ("note", "day"), 4)
        problems, _ = read_problems(config.data, "train", gold_checks([name]))
        return try_rewards(config, rewards, weights, problems), config

    return make


@pytest.mark.parametrize(
    ("function", "words", "told"),
    [
        ("exact", (), "tried on 16 references (as it is)"),
        ("columned", (), "tried on 16 references (as it is)"),
        ("marked", ("--reward.answer_form", "Date >> {answer}"), "tried on 16 references (as Date >> …)"),
        ("tagged", ("--data.prompt_suffix", "Write <date>year-month-day</date>."), "(as <date>…</date>)"),
        ("keyed", ("--data.system_prompt", 'Reply with {"day": "2000-01-01"}.'), 'references (as {"day": "…"})'),
        ("exact", ("--reward.try_references", "3"), "tried on 3 references"),
        ("brief", (), "not tried on references: it takes no gold"),
        ("best", (), "not tried on references: it compares the completions of a group"),
        ("later", (), "not tried on references: it is async; `python -m reward check FILE.jsonl --task …`"),
        (
            "inside",
            (),
            "not tried on references: it needs arguments that only a run has (completion_ids, trainer_state)",
        ),
        ("slashed", ("--data.answer_column", "null"), "not tried on references: the data has no references"),
        ("silent", (), "WARNING: reward kit_tried_rewards:silent returned None for all of 16 references"),
    ],
)
def test_a_reward_that_pays_references_passes_and_one_that_cannot_be_asked_is_named(tried, function, words, told):
    ((line,), _) = tried(function, *words)
    assert told in line and f"kit_tried_rewards:{function} " in line


def test_a_reward_that_reads_another_form_than_the_prompt_asks_for_is_warned_about(tried):
    ((line,), _) = tried("exact", "--data.prompt_suffix", "Answer after ####.")
    told = "tried on 16 references (as it is); the prompt asks for another form (as #### …)"
    assert line == f"WARNING: reward kit_tried_rewards:exact {told}"


def test_each_kind_of_the_kits_rewards_is_tried_or_named(tried):
    plain = ("--data.answer_format", "plain")
    numbers = [str(number) for number in range(1, 40)]
    for name, told in (
        ("math", "tried on 16 references"),
        ("gsm8k_strict", r"tried on 16 references (as \boxed{…})"),
        ("boxed_format", "not tried on references: it reads no reference"),
        ("countdown", "not tried on references: its reference is not the answer"),
    ):
        words = () if name == "countdown" else plain
        golds = [json.dumps({"numbers": [1, 2], "target": 3})] * 39 if name == "countdown" else numbers
        ((line,), _) = tried(name, *words, golds=golds, own=False)
        assert line.startswith(f"reward {name} ") and told in line


def test_a_reward_that_pays_no_reference_is_refused_with_three_rows_their_rewards_and_the_fix(tried):
    with pytest.raises(BadInput) as error:
        tried("slashed")
    first, *examples, more, fix = str(error.value).splitlines()
    assert first.startswith("reward kit_tried_rewards:slashed: 16 of 16 references earn no more than a wrong answer, ")
    assert len(examples) == 3 and more == "  … and 13 more"
    assert examples[0].startswith("  notes.jsonl:1: reference '2024-01-10': '2024-01-10' earns 0.1, the wrong answer ")
    assert "Set reward.answer_form to the form" in fix and "check FILE.jsonl --task …" in fix
    with pytest.raises(BadInput, match=r"Fix reward.answer_form \('Day: {answer}'\) or the comparison"):
        tried("slashed", "--reward.answer_form", "Day: {answer}")
    assert tried("slashed", "--reward.try_references", "0")[0] == []


def test_what_the_form_alone_earns_is_no_pay_for_the_answer(tried):
    with pytest.raises(BadInput, match="formal: 16 of 16 references earn no more than a wrong answer"):
        tried("formal", "--data.prompt_suffix", "Write <date>year-month-day</date>.")


def test_references_that_are_never_paid_count_as_rows_that_cannot_be_used(tried):
    with pytest.raises(BadInput, match=r"choosy: 5 of 16 references earn no more .*\(data.max_bad_fraction is 0\)"):
        tried("choosy")
    ((line,), _) = tried("choosy", "--data.max_bad_fraction", "0.4")
    assert line.endswith("(as it is), 5 of them no better than a wrong answer")


def test_a_reward_that_raises_is_refused_with_the_place_and_one_that_is_only_measured_is_not_asked(tried):
    with pytest.raises(
        BadInput, match=r"raised AttributeError: .* tried on references of the data, from notes.jsonl:1"
    ):
        tried("broken")
    for function, weight in (("broken", 0.0), ("penalty", -1.0)):
        ((line,), _) = tried(function, weight=weight)
        assert line == f"reward kit_tried_rewards:{function} not tried on references: its weight is not positive"


def test_objects_are_no_answers_and_equal_references_have_a_wrong_answer_too(tried):
    ((line,), _) = tried("exact", golds=[{"must": "be polite", "row": row} for row in range(20)])
    assert line.endswith("not tried on references: the references are objects or lists, not answers")
    assert "tried on 16 references" in tried("exact", golds=["yes"] * 20)[0][0]
    with pytest.raises(BadInput, match=r"the wrong answer 'none of them' 0\.1"):
        tried("slashed", golds=["2024-01-01"] * 20)


def test_a_form_that_holds_no_answer_is_bad_input(tried):
    _, config = tried("exact")
    config.reward.answer_form = "Label:"
    with pytest.raises(BadInput, match=r"reward.answer_form \('Label:'\) has no {answer}"):
        check_config(config, 1)


def test_the_doctor_tries_the_rewards_of_a_run(tried, tmp_path):
    from kit.core.config.load import to_dict

    _, config = tried("exact")
    found = reward_checks(json.dumps(to_dict(config), default=str), 1, str(tmp_path))
    assert found == {
        "skipped": "",
        "refused": "",
        "said": ["reward kit_tried_rewards:exact tried on 16 references (as it is)"],
    }
    config.reward.functions = ["kit_tried_rewards:slashed"]
    assert "16 of 16" in reward_checks(json.dumps(to_dict(config), default=str), 1, str(tmp_path))["refused"]
    config.data.path = "elsewhere.jsonl"
    assert "not a file here" in reward_checks(json.dumps(to_dict(config), default=str), 1, str(tmp_path))["skipped"]


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("What is it?", "7"),
        (r"Put it in \boxed{}.", r"\boxed{7}"),
        ("Answer after ####.", "#### 7"),
        ("<label>x</label>", "<label>7</label>"),
        ("<think>…</think><label>…</label>", "<think>\nI compare the parts.\n</think>\n<label>7</label>"),
        ("a < b and <c> is open", "7"),
    ],
)
def test_the_form_that_a_prompt_asks_for_is_tried_first(prompt, first):
    assert written(forms_for(prompt)[0], "7") == first
    assert "7" in [written(form, "7") for form in forms_for(prompt)]
    assert forms_for(prompt, "Label: {answer}") == ["Label: {answer}"]
