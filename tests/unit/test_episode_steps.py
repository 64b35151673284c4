"""What a trainer does with a step's episodes: rows for rewards, unknown ones, metrics, the tensors of a batch."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer

from kit.core.errors import CheckFailed
from kit.rollout.episodes import DONE, LENGTH, TURNS, UNKNOWN, EpisodeResult, rollouts_of
from kit.rollout.policy_view import Report
from kit.train import trainer
from kit.train.episode_steps import EnvironmentReward, EpisodeSteps, recorded
from kit.train.rows import loss_mask
from kit.train.sampling import row_tensors, sampled_lengths
from tests.unit.episode_cases import HERE, config, runner


def episode(instance="it", **closed):
    return SimpleNamespace(instance=instance, close=lambda: closed["log"].append(instance))


def result(sampled, versions=(), **more):
    ids = [10 + place for place in range(len(sampled))]
    return EpisodeResult(prompt_ids=[1, 2], completion_ids=ids, sampled=sampled, versions=[*versions], **more)


RESULTS = [
    result([1, 1, 0, 0, 1], (4, 5), end=DONE, tool_calls=1, reward=0.5, environment_s=0.25),
    result([1, 1], (5,), end=LENGTH, reward=0.0, environment_s=2.0),
    result([1, 0, 1], (5, 5), end=TURNS, tool_calls=3, failures={"raised": 1, "timeout": 1}, reward=1.0),
    result([0], end=UNKNOWN, unknown="server", told="it is down"),
]
ROWS = [{"problem_id": name, "gold": "1"} for name in "aabb"]


@pytest.fixture
def steps():
    return EpisodeSteps(runner(factory=f"{HERE}:PaidCounter"), config(factory=f"{HERE}:PaidCounter"))


def test_metrics_are_means_by_episode_and_tell_the_lag_of_each_turn(steps):
    figures, seconds = steps.report(RESULTS, step=7)
    assert seconds == {"environment": 2.0}
    assert figures == {
        "episode_turns": 5 / 4,
        "tool_calls": 1.0,
        "tool_failures": 0.5,
        "unfinished_fraction": 0.5,
        "environment_tokens": 4,
        "turn_lag": (2 + 1 + 1 + 1 + 1) / 5,
    }
    assert steps.report(RESULTS[3:], step=7).figures["turn_lag"] is None


def test_rewards_get_the_instances_and_the_environments_own_reward(steps):
    log: list = []
    results = [result([1], reward=0.5, episode=episode("x", log=log)), result([0], unknown="server")]
    rows = steps.rewarded_rows(ROWS[:2], results)
    assert [row["environments"] for row in rows] == ["x", None] and rows[0]["gold"] == "1"
    assert "environments" not in ROWS[0], "the data's rows stay as they are"
    reward = EnvironmentReward(steps.runner.environment)
    assert reward.__name__ == "PaidCounter"
    assert reward(**{key: [row[key] for row in rows] for key in rows[0]}) == [0.5, None]
    steps.close(results)
    assert log == ["x"]


def test_an_unknown_episode_has_no_reward_by_any_function(steps, monkeypatch):
    made = object.__new__(trainer.PolicyTrainer)
    vars(made).update(
        episodes=steps,
        figures=SimpleNamespace(counts=Counter(), timed=lambda name: torch.no_grad()),
        reward_weights=torch.ones(2),
        reward_funcs=[],
        recorder=object(),
        num_generations=2,
        _unknown_before={},
    )
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self, *_: torch.ones(4, 2))
    rows = steps.rewarded_rows(ROWS, RESULTS)
    rewards = made._calculate_rewards(rows, [], [], [[]] * 4)
    assert rewards.isnan().tolist() == [[False] * 2] * 3 + [[True] * 2]
    assert made._unknown == {"PaidCounter": {"server": 1}} and made.figures.counts["masked"] == 1


def test_too_many_unknown_episodes_stop_the_run_with_reasons_and_problems(steps):
    rows = steps.rewarded_rows(ROWS[:1] * 8, [RESULTS[3]] * 8)
    with pytest.raises(CheckFailed) as stopped:
        steps.unknown(rows)
    said = str(stopped.value)
    assert "the outcome of an episode of PaidCounter is not known for 8 of the last 8" in said and "server 8" in said
    assert "environment.max_unknown_fraction allows 2.00%" in said and "problem a, it is down" in said


def test_a_batch_says_which_tokens_were_sampled():
    made = rollouts_of(RESULTS, 4, Report({}, {}), has_logps=False)
    batch = row_tensors([[1, 2]] * 4, made, [False] * 4, 0, None, torch.device("cpu"))
    assert batch["completion_mask"].sum(dim=1).tolist() == [5, 2, 3, 1]
    assert batch["sampled_mask"].tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0] * 5]
    assert loss_mask(batch).sum(dim=1).tolist() == sampled_lengths(made) == [3, 2, 2, 0]
    cut = row_tensors([[1, 2]] * 4, made, [one.is_truncated for one in RESULTS], 0, None, torch.device("cpu"))
    assert loss_mask(cut).sum(dim=1).tolist() == [3, 0, 2, 0]


def test_completions_record_messages_versions_and_how_an_episode_ended():
    own = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    text = "1 2 10 11 12 13 14"
    assert recorded(RESULTS[0], own) == {"messages": [], "turn_versions": [4, 5], "end": DONE, "text": text}
    assert recorded(RESULTS[3], own).items() >= {"unknown": "server", "told": "it is down"}.items()
