"""Episodes on a server with two trainer processes (gloo, CPU): all are played in the main one, each gets its own."""

import json
from pathlib import Path

import pytest

from kit.core.run_directory import RunDir
from tests.smoke.test_two_processes import rows, train
from tests.unit.game_replica import GROUP, KEYS, GameReplica, make_game_model

pytestmark = pytest.mark.slow
SAME = ("reward", "reward_std", "episode_turns", "tool_calls", "environment_tokens", "completion_tokens", "turn_lag")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_game_model(tmp_path_factory.mktemp("game") / "model")


@pytest.mark.parametrize("overlap", [False, True])
def test_two_processes_pay_and_learn_what_one_does(tmp_path, recipe_arguments, recipe, model, overlap, request):
    replica = GameReplica(model)
    request.addfinalizer(replica.stop)
    keys = {**KEYS, "rollout.server_urls": f"['{replica.url}']", "rollout.overlap": str(overlap).lower()}
    keys |= {"train.max_steps": 3, "train.learning_rate": "1e-3", "train.beta": 0.01}
    two, one = RunDir(tmp_path / "two"), RunDir(tmp_path / "one")
    done = train(recipe_arguments(model, two.path, {**keys, "train.per_device_train_batch_size": 2 * GROUP}))
    assert done.returncode == 0, done.stderr[-3000:]
    asked = replica.turns.copy()
    done = recipe(recipe_arguments(model, one.path, {**keys, "train.per_device_train_batch_size": 4 * GROUP}))
    assert done.code == 0, done.err
    assert {ids: 2 * count for ids, count in asked.items()} == replica.turns, "the same contexts, each once a run"
    assert rows(two, "ledger.jsonl") == rows(one, "ledger.jsonl")
    for row, other in zip(rows(two, "metrics.jsonl"), rows(one, "metrics.jsonl"), strict=True):
        assert {key: row[key] for key in SAME} == pytest.approx({key: other[key] for key in SAME}, rel=1e-6)
        assert (row["loss"], row["grad_norm"]) == pytest.approx(
            (other["loss"], other["grad_norm"]), rel=1e-3, abs=1e-6
        )
    episodes, others = (
        [json.loads(line) for line in (run.completions / "step-000001.jsonl").read_text().splitlines()]
        for run in (two, one)
    )
    assert [line["problem_id"] for line in episodes] == [line["problem_id"] for line in others]
    assert sorted(json.dumps(line["messages"]) for line in episodes) == sorted(
        json.dumps(line["messages"]) for line in others
    )


def test_a_replica_that_fails_during_a_turn_ends_both_processes(tmp_path, recipe_arguments, model, request):
    replica = GameReplica(model)
    request.addfinalizer(replica.stop)
    play = replica.play
    replica.before["generate"] = lambda body: (
        (500, {"error": "out of blocks"}) if len(replica.turns) > 20 else play(body)
    )
    keys = {**KEYS, "rollout.server_urls": f"['{replica.url}']", "rollout.retries": 0, "train.max_steps": 3}
    done = train(recipe_arguments(model, tmp_path / "run", {**keys, "train.per_device_train_batch_size": 2 * GROUP}))
    assert done.returncode != 0
    assert done.stderr.count(f"error: the rollout server at {replica.url} failed on a prompt") == 1
