"""The parts of bench/soak.py: a replica that samples the policy alike every time, a network with faults on demand, and
what counts as growth."""

import json
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.soak import FIGURES, Ran, differences, per_step, trend
from bench.soak_faults import KINDS, Fault, planned
from bench.soak_network import Faults, Proxy
from bench.soak_replica import NumpyReplica
from kit.core.run_directory import RunDir, write_json
from kit.rollout.replica import Replica, ReplicaError
from tests.conftest import CONFIG
from tests.processes import free_port
from tests.unit.fake_replica import FakeReplica

SAMPLING = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [2]}
VERSION = {"session": "s", "version": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory, learning_model_dir) -> Path:
    from merge.export import main as merge_base

    out = tmp_path_factory.mktemp("soak") / "base"
    line = ["--config", str(CONFIG), "--model.path", str(learning_model_dir), "--out", str(out)]
    assert merge_base(line) == 0
    return out


@pytest.fixture(scope="module")
def policy(base):
    """The base with a random adapter, in torch."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def replica(base, policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    policy.save_pretrained(folder)
    server = NumpyReplica(base)
    client = Replica(server.url, 20)
    client.stage(way="remerge", run="r", base_hash=client.info()["base_hash"], path=folder, **VERSION)
    client.activate(**VERSION)
    yield client
    server.stop()


def test_the_replica_of_the_soak_scores_as_the_policy_does(replica, policy):
    sequences = [np.random.default_rng(seed).integers(3, 300, 20 + seed).tolist() for seed in range(3)]
    scored = replica.score(sequences, **VERSION)
    for ids, found in zip(sequences, scored, strict=True):
        with torch.no_grad():
            logps = policy(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        wanted = logps[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
        assert np.abs(found - wanted).max() < 2e-5
    assert np.abs(np.concatenate(replica.score(sequences, None, None)) - np.concatenate(scored)).mean() > 0.05


def test_it_samples_alike_every_time_and_scores_its_samples_as_it_said(replica):
    prompt = np.random.default_rng(9).integers(3, 300, 17).tolist()
    version, samples = replica.generate("one", prompt, n=8, **SAMPLING, **VERSION)
    again = replica.generate("other", prompt, n=8, **SAMPLING, **VERSION)[1]
    assert version == 1 and len({tuple(one.token_ids) for one in samples}) > 4
    for one, two in zip(samples, again, strict=True):
        assert np.array_equal(one.token_ids, two.token_ids) and np.array_equal(one.logprobs, two.logprobs)
        (scored,) = replica.score([prompt + one.token_ids.tolist()], **VERSION)
        assert np.abs(scored[-len(one.token_ids) :] - one.logprobs).max() < 2e-5
        assert (one.finish_reason == "stop") == (one.token_ids[-1] == 2) and 2 not in one.token_ids[:-1]


def test_its_samples_have_the_frequencies_of_the_policy(replica, policy):
    prompt = np.random.default_rng(3).integers(3, 300, 9).tolist()
    drawn = replica.generate("many", prompt, n=30_000, **SAMPLING | {"max_tokens": 1}, **VERSION)[1]
    with torch.no_grad():
        wanted = policy(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    found = np.bincount([one.token_ids[0] for one in drawn], minlength=len(wanted)) / len(drawn)
    assert np.abs(found - wanted).sum() < 0.12 < np.abs(found - 1 / len(wanted)).sum()


@pytest.fixture
def network(tmp_path):
    """`network(kind, action, times)`: a client of a replica behind a proxy that is to have this fault."""
    server, port = FakeReplica(), free_port()
    proxy = Proxy("127.0.0.1", port, server.server_port, Faults(tmp_path / "network.json"))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    client = Replica(f"http://127.0.0.1:{port}", 20)
    client.stage(way="remerge", run="r", base_hash="", path=tmp_path, **VERSION)
    client.activate(**VERSION)

    def make(kind: str, action: str, times: int) -> Replica:
        write_json(tmp_path / "network.json", {"id": 4, "kind": kind, "action": action, "times": times})
        return client

    make.log = tmp_path / "network.log"
    make.server = server
    yield make
    proxy.shutdown()
    proxy.server_close()
    server.stop()


def generate(client: Replica):
    return client.generate("r", [5, 6], n=3, **SAMPLING, **VERSION)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("error", "a fault of the soak"),
        ("short", "IncompleteRead"),
        ("cut", "ConnectionReset"),
        ("lost", "ConnectionReset"),
    ],
)
def test_requests_fail_as_often_as_asked_and_others_pass(network, monkeypatch, kind, said):
    monkeypatch.setattr("bench.soak_network.LOST_S", 0.0)
    client = network(kind, "generate", 2)
    assert client.info()["protocol"]
    for _ in range(2):
        with pytest.raises(ReplicaError, match=said):
            generate(client)
    assert len(generate(client)[1]) == 3
    assert network.log.read_text().splitlines() == [f"4 {kind} generate"] * 2
    # What was cut or cut short had reached the server, the rest had not.
    assert network.server.calls.count("generate") == (3 if kind in ("short", "cut") else 1)


def test_a_lost_network_loses_every_request_for_a_while(network, monkeypatch):
    monkeypatch.setattr("bench.soak_network.LOST_S", 60.0)
    client = network("lost", "score", 1)
    assert client.info()
    with pytest.raises(ReplicaError):
        client.score([[5, 6]], **VERSION)
    with pytest.raises(ReplicaError):
        client.info()


def test_answers_are_slow_short_of_a_sample_or_of_another_version(network, monkeypatch):
    monkeypatch.setattr("bench.soak_network.SLOW_S", 0.5)
    assert len(generate(network("few", "generate", 1))[1]) == 2
    network.log.unlink()
    assert generate(network("version", "generate", 1))[0] == -7
    network.log.unlink()
    began = time.monotonic()
    assert generate(network("slow", "generate", 1))[0] == 1 and time.monotonic() - began > 0.5


def test_a_proxy_that_is_started_again_knows_what_was_had(tmp_path):
    write_json(tmp_path / "network.json", {"id": 4, "kind": "version", "action": "generate", "times": 2})
    first = Faults(tmp_path / "network.json")
    assert (first.next("score"), first.next("generate")) == ("", "version")
    again = Faults(tmp_path / "network.json")
    assert (again.next("generate"), again.next("generate")) == ("version", "")


def test_every_kind_of_fault_comes_as_often_as_any_other():
    faults = planned(2000, 50, seed=0)
    count = [sum(fault.kind == kind for fault in faults) for kind in KINDS]
    assert len(faults) == 40 and set(count) == {2, 3}
    assert all(fault.number * 50 < fault.step < (fault.number + 1) * 50 for fault in faults)
    assert planned(2000, 50, seed=0) == faults != planned(2000, 50, seed=1)


def ran(folder: Path, values: list[float] | None = None, **changes) -> Ran:
    """A run of 40 windows of 50 steps whose trainer takes `values` MiB."""
    run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    rows = changes.pop("rows", [{"step": step, "reward": 0.5} for step in (1, 2, 3)])
    for file in (run.metrics_file, run.ledger_file):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(run.base_file, {"hash": changes.pop("base", "a")})
    adapter = run.adapter_dir(3)
    adapter.mkdir(parents=True, exist_ok=True)
    (adapter / "manifest.json").write_text(json.dumps({"kind": "adapter", "files": {}, "tensor_hash": "h"}))
    samples = [{"step": 50 * number + 7, "trainer_mib": value} for number, value in enumerate(values or [])]
    return Ran(run, 1.0, changes.pop("faults", []), samples, 1, changes.pop("left", []))


def test_a_leak_is_growth_and_noise_is_not(tmp_path):
    draw, figure = random.Random(0), FIGURES[0]
    noise = [700 + draw.gauss(0, 30) for _ in range(40)]
    assert trend(figure, ran(tmp_path, [1e6, *noise]), 50, 2000).is_flat, "the first window loads everything"
    leak = [value + 4 * number for number, value in enumerate(noise)]
    found = trend(figure, ran(tmp_path, leak), 50, 2000)
    assert not found.is_flat and 130 < found.growth < 190


def test_time_per_step_counts_whole_steps_of_one_trainer():
    """Samples come twice a step; a new trainer loads, and repeats steps, before it makes a new one."""
    samples = [{"trainer": 1, "step": number // 2, "ms": 50 * number} for number in range(20)]
    samples += [{"trainer": 2, "step": max(9, number // 2), "ms": 9000 + 50 * number} for number in range(30)]
    assert per_step("ms")(samples) == 100
    assert per_step("ms")(samples[:2]) is None


def test_what_is_lost_repeated_or_left_behind_is_a_difference(tmp_path):
    rows = [{"step": step, "reward": 0.5} for step in (1, 2, 3)]
    calm = ran(tmp_path / "calm")
    assert differences(calm, ran(tmp_path / "same"), 3, is_exact=True) == []
    for number, (changes, said) in enumerate(
        [
            ({"rows": rows[:2]}, "the metrics of the run with faults have 2 lines"),
            ({"rows": [*rows, rows[2]]}, "the ledger of the run with faults have 4 lines"),
            ({"rows": [*rows[:2], {"step": 3, "reward": 0.25}]}, "1 steps have other figures"),
            ({"base": "b"}, "the bases differ"),
            ({"left": ["7 sleep"]}, "1 processes outlived the run with faults"),
            (
                {"faults": [Fault(0, "disk full", 7)]},
                "1 faults had no effect, or no step after it: disk full at step 7",
            ),
        ]
    ):
        found = differences(calm, ran(tmp_path / f"{number}", **changes), 3, is_exact=True)
        assert any(line.startswith(said) for line in found), found
