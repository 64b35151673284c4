"""`policy.compute` by the recipe's command line: a fused and an FP8 step beside the plain one."""

import pytest

from kit.core.run_files import read_json


@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_a_step_leaves_the_base_as_it_is_and_a_fused_one_has_the_plain_gradient(
    tmp_path, recipe, recipe_arguments, learning_model_dir, tiny_run, read_jsonl, compute
):
    keys = {"policy.compute": compute, "train.max_steps": 1, "train.save_steps": 1}
    run = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", keys))
    assert run.code == 0, run.err
    facts = read_json(tmp_path / "run" / "base.json")
    assert facts["hash"] == read_json(tiny_run.base_file)["hash"]
    assert f"base unchanged ({facts['hash'][:12]})" in run.out
    (row,), plain = read_jsonl(tmp_path / "run" / "metrics.jsonl"), read_jsonl(tiny_run.metrics_file)[0]
    assert row["reward"] == row["rewards"]["math"] is not None and row["kl"] == 0.0
    if compute == "fused":  # the same completions, and what a step makes of them
        assert row["reward"] == plain["reward"] and row["completion_tokens"] == plain["completion_tokens"]
        assert row["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    else:
        assert row["grad_norm"] > 0 and row["completion_tokens"] > 0
