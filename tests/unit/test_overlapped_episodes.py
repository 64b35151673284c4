"""Episodes on a server from the trainer's side: overlapped, strict and resumed runs, and what they record.

The stand-in answers a context always alike, whatever adapter it serves, so all three must draw, pay and learn the
same. In a group the completions start with different numbers in the order in which their requests arrive, so sums are
equal up to rounding.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from tests.unit.game_replica import GROUP, KEYS, TURNS, GameReplica, make_game_model

STEPS = 6
SAME = ("reward", "reward_std", "episode_turns", "tool_calls", "environment_tokens", "completion_tokens")
ROUNDED = ("loss", "grad_norm", "kl", "entropy")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_game_model(tmp_path_factory.mktemp("game") / "model")


@pytest.fixture(scope="module")
def replica(model) -> Iterator[GameReplica]:
    found = GameReplica(model)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def train(build_trainer, recipe_arguments, model, replica) -> Callable[..., RunDir]:
    def run(folder: Path, overlap: bool, changes: dict | None = None, resume: bool = False) -> RunDir:
        keys = {**KEYS, "rollout.server_urls": f"['{replica.url}']", "rollout.overlap": str(overlap).lower()}
        keys |= {"train.max_steps": STEPS, "train.keep_checkpoints": 3, "train.learning_rate": "1e-3"}
        keys |= {"train.beta": 0.01} | (changes or {})
        trainer = build_trainer(recipe_arguments(model, folder, keys, ("--resume",) if resume else ()))
        try:
            trainer.train_run(resume=resume)
        finally:
            trainer.sampler.close()
        return RunDir(folder)

    return run


@pytest.fixture(scope="module")
def runs(train, tmp_path_factory) -> dict[str, RunDir]:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "overlapped", True)
    shutil.copytree(folder / "overlapped", folder / "resumed")
    for step in (4, 6):
        shutil.rmtree(folder / "resumed" / "checkpoints" / f"step-{step:06d}")
    train(folder / "resumed", True, resume=True)
    train(folder / "strict", False)
    return {name: RunDir(folder / name) for name in ("overlapped", "strict", "resumed")}


@pytest.mark.parametrize("other", ["strict", "resumed"])
def test_an_overlapped_run_draws_pays_and_learns_what_the_other_does(runs, other, read_jsonl):
    rows, others = (read_jsonl(runs[name].metrics_file) for name in ("overlapped", other))
    assert read_jsonl(runs["overlapped"].ledger_file) == read_jsonl(runs[other].ledger_file)
    for row, one in zip(rows, others, strict=True):
        assert {key: row[key] for key in SAME} == pytest.approx({key: one[key] for key in SAME}, rel=1e-9)
        assert {key: row[key] for key in ROUNDED} == pytest.approx(
            {key: one[key] for key in ROUNDED}, rel=1e-3, abs=1e-7
        )
    assert any(row["grad_norm"] > 0 for row in rows) and all(0 < row["reward"] < 1 for row in rows)


def test_every_turn_has_the_version_that_made_it_and_its_lag_is_counted(runs, read_jsonl):
    for name, lags in {"overlapped": [0, 1, 1, 1, 1, 1], "strict": [0] * 6, "resumed": [0, 1, 0, 1, 1, 1]}.items():
        rows = read_jsonl(runs[name].metrics_file)
        assert [row["turn_lag"] for row in rows] == [row["policy_lag"] for row in rows] == lags
        for row in rows:
            episodes = read_jsonl(runs[name].completions / f"step-{row['step']:06d}.jsonl")
            turns = [version for one in episodes for version in one["turn_versions"]]
            assert {*turns} == {row["adapter_version"]} and len(turns) == 4 * GROUP * row["episode_turns"]


def test_a_step_waits_for_no_more_than_its_turns(runs, replica, read_jsonl):
    rows = read_jsonl(runs["overlapped"].metrics_file)
    assert all(1 < row["episode_turns"] <= TURNS for row in rows)
    assert all(row["seconds"]["rollout_hidden"] > 0 for row in rows if row["policy_lag"])


def test_a_replica_that_dies_behind_the_update_ends_the_next_step(train, replica, tmp_path, read_jsonl):
    turns = []

    def dies(body: dict) -> Any:
        turns.append(body["version"])
        return (500, {"error": "out of blocks"}) if body["version"] else replica.play(body)

    replica.before["generate"] = dies
    try:
        with pytest.raises(CheckFailed, match=rf"server at {replica.url} failed on a prompt .* 500: out of blocks"):
            train(tmp_path / "run", True, {"rollout.retries": 0})
    finally:
        replica.before["generate"] = replica.play
    # Batches 1 and 2 are of version 0, the third of version 1.
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in read_jsonl(tmp_path / "run/ledger.jsonl")] == [1, 2, 3]
