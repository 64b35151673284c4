"""Adapter sync against stand-in replicas: a version is served by all of them or by none."""

import json
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kit.core.config.load import load_config
from kit.core.errors import CheckFailed
from kit.core.run_directory import RunDir
from kit.rollout.canary import read_canary
from kit.rollout.noise import Noise
from kit.rollout.replica import Replica, log_name
from kit.rollout.sync import AdapterSync, restart_hint
from tests.unit.fake_replica import FakeReplica, log_probs

CONFIG = Path(__file__).parents[2] / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
SEQUENCES = [[5, 6, 7, 8], [9, 10, 11]]


class Adapter:
    """Writes a version as the trainer does, without a model."""

    base_hash = "ab" * 32

    def write(self, directory: Path, version: int) -> Path:
        directory.mkdir(parents=True)
        (directory / "adapter_model.safetensors").write_bytes(b"weights of %d" % version)
        return directory


def scores_of(version: int):
    """The trainer's side of the canary for an adapter version."""

    def score() -> tuple:
        policy = [log_probs(ids, version) for ids in SEQUENCES]
        return SEQUENCES, policy, [log_probs(ids, None) for ids in SEQUENCES]

    return score


@pytest.fixture
def replicas():
    made: list[FakeReplica] = []

    def make(count: int) -> list[FakeReplica]:
        made.extend(FakeReplica() for _ in range(count))
        return made

    yield make
    for replica in made:
        replica.stop()


@pytest.fixture
def synced(replicas, tmp_path):
    """`synced(n, *overrides)`: n replicas and a sync to them, both on version 1."""

    def make(count: int, *overrides: str) -> tuple[list[FakeReplica], AdapterSync]:
        both = replicas(count)
        config = load_config(CONFIG, ["--run.name=run", *overrides])
        sync = AdapterSync([Replica(replica.url, 5) for replica in both], config, RunDir(tmp_path))
        sync.publish(1, Adapter(), scores_of(1))
        return both, sync

    return make


def assert_all_serve(both: list[FakeReplica], sync: AdapterSync, version: int) -> None:
    assert [replica.served for replica in both] == [(sync.session, version)] * len(both)
    assert [replica.versions for replica in both] == [[version]] * len(both)
    assert sync.served == version


def test_a_new_version_replaces_the_old_one_on_every_replica(synced, tmp_path):
    both, sync = synced(2)
    sync.publish(2, Adapter(), scores_of(2))
    sync.settle()
    assert_all_serve(both, sync, 2)
    staged = both[0].staged[sync.session, 2]
    directory = tmp_path / "sync" / sync.session / "v000002"
    assert staged["body"] == {"path": str(directory.resolve())} and staged["base_hash"] == "ab" * 32
    assert (staged["way"], staged["run"]) == ("remerge", "run")
    assert sync.seconds.keys() == {"write", "stage", "activate", "canary"}
    assert [path.name for path in sync.folder.glob("v*")] == ["v000002"], "older versions are deleted"


def test_the_adapter_may_travel_in_the_body(synced):
    both, sync = synced(2, "--rollout.transport=body", "--rollout.sync=adapter")
    for replica in both:
        staged = replica.staged[sync.session, 1]
        assert staged["body"] == b"weights of 1" and staged["way"] == "adapter"


def test_a_version_made_again_after_a_resume_has_another_name(synced, replicas, tmp_path):
    # vLLM's prefix cache knows an adapter by its name, and the second version 41 has other weights than the first.
    _, first = synced(1)
    first.settle()
    second = AdapterSync(first.replicas, first.config, RunDir(tmp_path))
    second.publish(1, Adapter(), None)
    second.settle()
    assert first.session != second.session
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == [second.session]


def test_nothing_is_activated_before_everything_is_staged(synced):
    both, sync = synced(2)
    at_activation = []
    for replica in both:
        replica.before["activate"] = lambda body: at_activation.append([other.versions for other in both])
    sync.publish(2, Adapter(), scores_of(2))
    assert at_activation == [[[1, 2], [1, 2]]] * 2


def test_one_replica_that_does_not_load_keeps_all_on_the_old_version(synced):
    both, sync = synced(2)
    both[1].refuses["stage"] = (422, "rank 64 is above 16. Start it with --max-lora-rank 64.")
    with pytest.raises(CheckFailed) as failed:
        sync.publish(2, Adapter(), scores_of(2))
    assert f"the replica at {both[1].url} did not load adapter version 2: 422 rank 64 is above 16" in str(failed.value)
    assert "All replicas stay on version 1." in str(failed.value) and both[0].url not in str(failed.value)
    assert_all_serve(both, sync, 1)


@pytest.mark.parametrize("action", ["stage", "activate", "score"])
def test_a_replica_that_another_trainer_has_is_not_to_be_restarted(synced, action):
    both, sync = synced(2)
    other = (409, {"error": "The trainer of run other has it."})
    both[1].before[action] = lambda body: None if body and body.get("version") == 1 else other
    with pytest.raises(CheckFailed) as failed:
        sync.publish(2, Adapter(), scores_of(2))
    said = str(failed.value)
    assert "The trainer of run other has it." in said and "Then continue with --resume." in said
    assert "Restart" not in said and "rollout.transport" not in said


def test_of_a_replica_that_is_gone_it_is_not_said_that_it_stays_on_the_old_version(synced):
    both, sync = synced(2)
    both[1].before["stage"] = cut
    with pytest.raises(CheckFailed) as failed:
        sync.publish(2, Adapter(), scores_of(2))
    assert f"the replica at {both[1].url} did not load" in str(failed.value)
    assert "Those that answer stay on version 1." in str(failed.value)


def test_one_replica_that_does_not_switch_takes_the_others_back(synced):
    both, sync = synced(2)
    both[1].before["activate"] = lambda body: None if body["version"] == 1 else (500, {"error": "no room"})
    with pytest.raises(CheckFailed, match=rf"{both[1].url} did not switch to adapter version 2.*version 1 again"):
        sync.publish(2, Adapter(), scores_of(2))
    assert_all_serve(both, sync, 1)


def test_a_replica_that_did_not_answer_is_not_asked_to_go_back(synced):
    both, sync = synced(2)
    both[1].before["activate"] = cut
    both[1].calls.clear()
    with pytest.raises(CheckFailed) as failed:
        sync.publish(2, Adapter(), scores_of(2))
    assert f"the replica at {both[1].url} did not answer, so what it serves is not known" in str(failed.value)
    assert both[1].calls == ["stage", "activate"]
    assert_all_serve(both[:1], sync, 1)


def cut(body: dict) -> None:
    raise ConnectionError


@pytest.mark.parametrize("action", ["stage", "activate", "score"])
def test_a_replica_that_hangs_in_a_sync_is_given_up_long_before_the_request_times_out(synced, monkeypatch, action):
    both, sync = synced(2)
    sync.settle()
    monkeypatch.setattr("kit.rollout.replica.PROBE_EVERY_S", 0.1)
    monkeypatch.setattr("kit.rollout.replica.PROBE_TIMEOUT_S", 0.5)
    for replica in sync.replicas:
        replica.timeout_s = replica.change_timeout_s = 60
    release = threading.Event()
    for one in (action, "info"):
        both[1].before[one] = lambda body: release.wait(60) and None
    started = time.monotonic()
    with pytest.raises(CheckFailed, match=rf"{both[1].url}.* takes requests and answers none"):
        sync.publish(2, Adapter(), scores_of(2))
    assert time.monotonic() - started < 50  # of 60
    release.set()
    assert_all_serve(both[:1], sync, 1)


@pytest.mark.parametrize(
    ("fault", "state"),
    [(lambda body: (500, {"error": "no room"}), "serves the base"), (cut, "did not answer, so what it serves is not")],
)
def test_the_failure_of_a_first_version_says_what_each_replica_serves(replicas, tmp_path, fault, state):
    both = replicas(2)
    both[1].before["activate"] = fault
    sync = AdapterSync([Replica(replica.url, 5) for replica in both], load_config(CONFIG), RunDir(tmp_path))
    with pytest.raises(CheckFailed) as failed:
        sync.publish(1, Adapter(), None)
    expected = f"before it: {both[0].url} serves the refused version 1, {both[1].url} {state}"
    assert expected in str(failed.value) and sync.served is None
    assert both[1].versions == ([] if "base" in state else [1]), "forgotten where it was only staged"


def test_a_version_that_stays_on_a_replica_is_told_and_discarded_with_the_next_sync(synced, capsys):
    both, sync = synced(2)
    both[1].refuses["discard"] = (500, "busy")
    sync.publish(2, Adapter(), scores_of(2))
    sync.settle()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{both[1].url} keeps adapter version 1 in its memory: busy. The next sync asks it again."]
    assert both[1].versions == [1, 2]
    del both[1].refuses["discard"]
    at_stage = []
    both[1].before["stage"] = lambda body: at_stage.append(both[1].versions)
    sync.publish(3, Adapter(), scores_of(3))
    sync.settle()
    assert at_stage == [[2]], "gone before the next one needs room"
    assert_all_serve(both, sync, 3)


def test_a_replica_that_cannot_go_back_is_named_too(synced):
    both, sync = synced(2)
    both[1].refuses["activate"] = (500, "engine dead")
    with pytest.raises(CheckFailed, match=rf"The others serve version 1 again; the replica at {both[1].url} did not"):
        sync.publish(2, Adapter(), scores_of(2))
    assert both[0].served == (sync.session, 1)


@pytest.mark.parametrize(
    ("held", "reason"),
    [(0, "serves the base without this adapter"), (9, "it serves other weights than the trainer's")],
)
def test_a_replica_whose_weights_are_not_the_policys_takes_all_back(synced, held, reason):
    both, sync = synced(2, "--rollout.max_canary_delta=0.5")
    both[1].holds = held
    with pytest.raises(CheckFailed) as failed:
        sync.publish(2, Adapter(), scores_of(2))
    assert f"the canary of {both[1].url} failed" in str(failed.value) and reason in str(failed.value)
    assert both[0].url not in str(failed.value) and "All replicas serve version 1 again." in str(failed.value)
    assert_all_serve(both, sync, 1)


def test_noise_follows_the_canary_and_is_the_same_everywhere(synced):
    both, sync = synced(2)
    sync.publish(2, Adapter(), scores_of(2), Noise(0.01, 42))
    for replica in both:
        assert replica.calls[-3:] == ["activate", "score", "noise"] or "discard" in replica.calls[-3:]
        assert replica.calls.index("noise") > replica.calls.index("score")
        assert replica.noise == {"session": sync.session, "version": 2, "sigma": 0.01, "seed": 42}
    assert sync.seconds.keys() == {"write", "stage", "activate", "canary", "noise"}
    sync.publish(3, Adapter(), scores_of(3), Noise(0.0, 43))
    assert "noise" not in sync.seconds, "a stage without noise asks for none"


def test_noise_that_one_replica_does_not_take_takes_all_back(synced):
    both, sync = synced(2)
    both[1].refuses["noise"] = (500, "no norms")
    with pytest.raises(
        CheckFailed, match=f"{both[1].url} did not put noise on the norms of adapter version 2: 500 no"
    ):
        sync.publish(2, Adapter(), scores_of(2), Noise(0.01, 42))
    assert_all_serve(both, sync, 1)


def test_log_probs_that_are_not_numbers_fail_the_canary(synced):
    both, sync = synced(1)
    both[0].before["score"] = lambda body: {"version": 2, "logprobs": [nan(3), nan(2)]}
    with pytest.raises(CheckFailed, match="5 of 5 canary tokens have a log-prob that is not finite"):
        sync.publish(2, Adapter(), scores_of(2))
    assert_all_serve(both, sync, 1)


def nan(count: int) -> str:
    from kit.rollout.protocol import encode_floats

    return encode_floats([float("nan")] * count)


def test_a_trainer_that_cannot_score_takes_the_replicas_back(synced):
    both, sync = synced(2)

    def score() -> tuple:
        raise CheckFailed("the trainer's own log-probs are not finite")

    with pytest.raises(CheckFailed, match="the trainer's own"):
        sync.publish(2, Adapter(), score)
    assert_all_serve(both, sync, 1)
    with pytest.raises(ZeroDivisionError):
        sync.publish(3, Adapter(), lambda: 1 // 0)
    assert_all_serve(both, sync, 1)


def test_the_trainer_scores_while_the_replicas_load(synced):
    both, sync = synced(1)
    scored, staged = threading.Event(), []
    both[0].before["stage"] = lambda body: staged.append(scored.wait(5))

    def score() -> tuple:
        scored.set()
        return scores_of(2)()

    sync.publish(2, Adapter(), score)
    assert staged == [True], "a stage that waits for the trainer's scores got them"


def test_an_error_names_the_log_of_the_replica_that_failed_and_no_others(tmp_path):
    run, urls = RunDir(tmp_path), ["http://127.0.0.1:8000", "http://10.0.0.5:8000", "http://[::1]:8001"]
    run.logs.mkdir()
    for url in urls:
        assert "its log" not in restart_hint(run, [url])
        log = run.logs / log_name(url)
        log.touch()
        assert f"; its log: {log})" in restart_hint(run, [url])


def test_a_replica_that_is_gone_is_named(synced):
    both, sync = synced(2)
    url = both[1].url
    both.pop().stop()
    with pytest.raises(CheckFailed, match=rf"{url} did not load .*ConnectionRefused"):
        sync.publish(2, Adapter(), scores_of(2))
    assert_all_serve(both, sync, 1)


def test_the_canary_can_be_scored_again_by_hand(synced):
    _, sync = synced(1)
    sync.publish(3, Adapter(), scores_of(3))
    facts = read_canary(sync.folder / "canary.json")
    assert (facts["session"], facts["version"], facts["way"]) == (sync.session, 3, "remerge")
    assert facts["sequences"] == SEQUENCES
    np.testing.assert_array_equal(facts["policy"][1], log_probs(SEQUENCES[1], 3))
    np.testing.assert_array_equal(facts["base"][0], log_probs(SEQUENCES[0], None))


def test_a_full_disk_is_a_check_that_failed(build_trainer, recipe_arguments, tiny_model_dir, tmp_path):
    import torch

    from kit.rollout.adapter_file import AdapterFile

    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run"))
    file = AdapterFile(trainer.model, torch.bfloat16, "ab" * 32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # within the tensors
    try:
        with pytest.raises(CheckFailed, match=r"writing the adapter of version 3 .* failed: .*too large.*--resume"):
            file.write(tmp_path / "sync" / "v000003", 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "sync").iterdir()) == []
    size = (file.write(tmp_path / "sync" / "v000003", 3) / "adapter_model.safetensors").stat().st_size
    assert len(file.header) < 20_000 < size


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_adapter_that_travels_is_the_one_that_the_forward_computes_with(
    build_trainer, recipe_arguments, tiny_model_dir, tmp_path, dtype
):
    import torch
    from peft import get_peft_model_state_dict
    from safetensors import safe_open
    from safetensors.torch import load_file

    from kit.rollout.adapter_file import AdapterFile

    trainer = build_trainer(recipe_arguments(tiny_model_dir, tmp_path / "run"))
    adapter = AdapterFile(trainer.model, getattr(torch, dtype), "ab" * 32)
    # Twice: the buffer of the first is used again.
    for version in (0, 1):
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
        directory = adapter.write(tmp_path / "sync" / f"v{version:06d}", version)
        written = load_file(directory / "adapter_model.safetensors")
        expected = get_peft_model_state_dict(trainer.model)
        assert written.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(written[name], tensor.to(getattr(torch, dtype))), (version, name)
    trainer.model.save_pretrained(tmp_path / "peft")
    config = (directory / "adapter_config.json").read_text()
    assert json.loads(config) == json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["adapter_config"] == config
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["version"] == 1 and manifest["base_hash"] == "ab" * 32 and manifest["rank"] == 4
