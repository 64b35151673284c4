"""`python -m recipes.pass_rates` on a small model, and a run on the problems that it chooses, easy ones first."""

import json

import pytest

from kit.core.checksum import KEY
from kit.core.run_directory import RunDir
from tests.conftest import CONFIG, SMALL, run_here


@pytest.fixture(scope="module")
def measured(tmp_path_factory, learning_model_dir):
    """(file of the pass rates of 30 problems, 8 completions each; what the command printed)."""
    out = tmp_path_factory.mktemp("rates") / "rates.jsonl"
    keys = SMALL | {"model.path": learning_model_dir, "data.path": learning_model_dir, "data.max_train_problems": 30}
    command = ["recipes.pass_rates", "--config", CONFIG, "--out", out, "--samples", 8]
    done = run_here(*command, *(f"--{key}={value}" for key, value in keys.items()))
    assert done.code == 0, f"{done.out}\n{done.err}"
    return out, done.out


def test_every_problem_is_measured_with_as_many_completions(measured, read_jsonl):
    out, said = measured
    facts, *rows = read_jsonl(out)
    assert facts["facts"]["samples"] == 8 and len(facts["facts"]["base_hash"]) == 64
    assert len({row["problem_id"] for row in rows}) == len(rows) == 30
    assert {row["known"] for row in rows} == {8} and all(row["pass_rate"] * 8 % 1 == 0 for row in rows)
    rates = [row["pass_rate"] for row in rows]
    assert 0.1 < sum(rates) / 30 < 0.7 and len(set(rates)) > 3
    assert f"30 problems, {rates.count(0.0)} never solved" in said
    assert sorted(entry.name for entry in out.parent.iterdir()) == ["rates.jsonl"], "nothing else is left"


def test_a_run_learns_from_the_chosen_problems_easy_ones_first(
    measured, tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    rates = {row["problem_id"]: row["pass_rate"] for row in read_jsonl(measured[0])[1:]}
    keys = {"data.pass_rates": measured[0], "data.min_pass_rate": 0.05, "data.order": "easy_first"}
    keys |= {"data.max_train_problems": 30, "train.max_steps": 3, "train.save_steps": 1}
    run = RunDir(tmp_path / "run")
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, f"{done.out}\n{done.err}"
    kept = sum(rate >= 0.05 for rate in rates.values())
    assert f"pass rates: {kept} of 30 problems kept (0.05 to 1)" in done.out and "WARNING" not in done.out
    drawn = [rates[name] for entry in read_jsonl(run.ledger_file) for name in entry["problem_ids"]]
    assert drawn == sorted(rates.values(), reverse=True)[:12]
    lines = measured[0].read_text().splitlines()
    (other := tmp_path / "other.jsonl").write_text("\n".join([lines[0], *lines[:0:-1]]))
    rated = {**keys, "data.pass_rates": other, "data.min_pass_rate": 0.3}
    again = recipe(recipe_arguments(learning_model_dir, run.path, rated, ("--resume",)))
    assert again.code == 2 and "was started with other settings: data.min_pass_rate was 0.05, is 0.3" in again.err


def test_another_base_is_said_when_the_base_is_known(measured, tmp_path, recipe, recipe_arguments, learning_model_dir):
    lines = measured[0].read_text().splitlines()
    facts = json.loads(lines[0])
    facts["facts"]["base_hash"] = "0" * 64
    del facts[KEY]
    (other := tmp_path / "other.jsonl").write_text("".join(f"{line}\n" for line in [json.dumps(facts), *lines[1:]]))
    keys = {"data.pass_rates": other, "data.max_train_problems": 30, "train.max_steps": 1, "train.save_steps": 1}
    done = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", keys))
    assert done.code == 0 and "was measured with another base" in done.out
