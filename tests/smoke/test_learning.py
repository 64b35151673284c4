"""That the recipe learns: the one claim that every other test takes for granted."""

import json
import re

from kit.core.run_directory import RunDir


def test_reward_climbs_within_twenty_five_steps(tmp_path, recipe, recipe_arguments, learning_model_dir):
    run = RunDir(tmp_path / "run")
    keys = {
        "rollout.group_size": 8,
        "train.per_device_train_batch_size": 64,
        "train.max_steps": 25,
        "train.save_steps": 25,
        "train.learning_rate": "2e-3",
        "watch.completions_every": 1,
        "policy.lora_rank": 16,
        "policy.lora_alpha": 32,
    }
    done = recipe(recipe_arguments(learning_model_dir, run.path, keys))
    assert done.code == 0, done.err
    rewards = [json.loads(line)["reward"] for line in run.metrics_file.read_text().splitlines()]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    # Seeds 0, 1, 2: .38 to .69, .35 to .64, .31 to .65 (AMD EPYC, torch 2.13.0+cpu, trl 1.16.0, 2026-11-22).
    assert last > first + 0.15, f"mean reward {first:.3f} in the first 5 steps, {last:.3f} in the last 5"
    # The text itself: a reward with the wrong sign climbs too, while the right answers disappear.
    shares = []
    for step in (*range(1, 6), *range(21, 26)):
        rows = [json.loads(line) for line in (run.completions / f"step-{step:06d}.jsonl").read_text().splitlines()]
        shares.append(sum(right(row) for row in rows) / len(rows))
    first, last = sum(shares[:5]) / 5, sum(shares[5:]) / 5
    assert last > first + 0.15, (
        f"{first:.3f} of the completions were right in the first 5 steps, {last:.3f} in the last 5"
    )


def right(row: dict) -> bool:
    """Whether a completion boxes the sum of the two numbers in its problem."""
    return f"\\boxed{{{sum(map(int, re.findall(r'[0-9]+', row['prompt'])))}}}" in row["completion"]
