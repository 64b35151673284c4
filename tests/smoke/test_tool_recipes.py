"""The shipped configurations with a calculator and a game: two steps on models made as their headers say."""

import sys

import pytest

from kit.core.run_directory import RunDir
from recipes.tiny_tools import TASKS, main

SIZE = ("--hidden", "64", "--layers", "1", "--problems", "300", "--heldout", "40", "--processes", "1")
# Enough to write a call of the right form now and then.
TAUGHT = ("--steps", "80", "--batch", "16", "--learning_rate", "1e-2")
NAMES = {"calculator": "math", "guess": "GuessNumber"}  # of the reward


@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_configuration_plays_episodes_with_calls_and_updates(task, tmp_path, recipe, read_jsonl):
    model = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_tools.py", "--task", task, "--out", str(model), *SIZE, *TAUGHT])
        main()
    run = RunDir(tmp_path / "run")
    changes = {
        "run.output_dir": run.path,
        "model.path": model,
        "data.path": model,
        "train.max_steps": 2,
        "watch.eval_problems": 20,
    }
    config = f"recipes/configs/grpo-tiny-{task}-cpu.yaml"
    done = recipe(["--config", config, *(f"--{key}={value}" for key, value in changes.items())])
    assert done.code == 0, done.err
    assert "base unchanged" in done.out
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rewards"].keys() == {NAMES[task]} and not any(row["unknown_rewards"].values())
        assert row["tool_calls"] > 0 and row["environment_tokens"] > 0 and row["episode_turns"] > 1
    assert rows[0]["heldout_accuracy"] is not None
    assert task == "calculator" or any(row["grad_norm"] > 0 for row in rows)  # one layer does no sum right
