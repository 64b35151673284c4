"""`rollout.keep_weights` by the recipe's command line: the run is the same, byte for byte."""

import pytest

from kit.core.run_files import read_json

CLOCKS = {"time", "seconds", "peak_gib", "rollout_tokens_per_s", "update_tokens_per_s"}


@pytest.mark.parametrize("compute", ["plain", "fused"])
def test_a_run_that_keeps_weights_is_the_run_that_does_not(
    tmp_path, recipe, recipe_arguments, learning_model_dir, read_jsonl, compute
):
    found = {}
    for mode in ("always", "never"):
        keys = {"train.max_steps": 2, "train.save_steps": 2, "watch.eval_every": 1, "watch.eval_problems": 6}
        keys |= {"rollout.keep_weights": mode, "policy.compute": compute, "watch.completions_every": 1}
        folder = tmp_path / mode
        run = recipe(recipe_arguments(learning_model_dir, folder, keys))
        assert run.code == 0, run.err
        word = "keep" if mode == "always" else "do not keep"
        assert run.out.count(f"rollouts {word} the weights") == 1 and "base unchanged" in run.out
        rows = [{key: row[key] for key in row.keys() - CLOCKS} for row in read_jsonl(folder / "metrics.jsonl")]
        texts = [(folder / "completions" / f"step-{step:06d}.jsonl").read_text() for step in (1, 2)]
        adapter = read_json(folder / "adapters" / "v000002" / "manifest.json")["tensor_hash"]
        found[mode] = rows, texts, adapter, read_json(folder / "base.json")["hash"]
    assert found["always"] == found["never"]
    assert found["always"][0][0]["heldout_accuracy"] is not None
