"""The client of one replica: what travels arrives as it was, and an error says whether a retry makes sense."""

import time

import numpy as np
import pytest

from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.protocol import PROTOCOL, decode_floats, decode_ids, encode_floats, encode_ids
from kit.rollout.replica import Replica, ReplicaError, is_loopback, is_tested_vllm
from tests.unit.fake_replica import FakeReplica

ONE = {"n": 1, "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}


@pytest.fixture
def fake():
    replica = FakeReplica()
    yield replica
    replica.stop()


@pytest.mark.parametrize("ids", [[], [0], [151_935, 2**31 - 1, 7]])
def test_token_ids_survive_the_way(ids):
    assert decode_ids(encode_ids(ids)).tolist() == ids


def test_log_probs_survive_the_way_bit_for_bit():
    values = np.array([-0.1, -1e-30, 0.0, np.nan, -np.inf, -17.25], dtype=np.float32)
    assert decode_floats(encode_floats(values)).tobytes() == values.tobytes()


@pytest.mark.parametrize("text", ["?", "AAA", "AAAA", None, 7, "AAAA AAAA"])
def test_what_is_not_binary_is_a_value_error(text):
    with pytest.raises(ValueError):
        decode_ids(text)


@pytest.mark.parametrize(
    ("is_tested", "versions"),
    [
        (True, ["0.26.0", "0.31.0", "0.26.0+cu129", "0.31.1.dev3+g1"]),
        (False, ["0.25.9", "0.32.0", "1.0", "0.3.1", "dev"]),
    ],
)
def test_a_version_of_vllm_that_was_tested(is_tested, versions):
    assert {version: is_tested_vllm(version) for version in versions} == dict.fromkeys(versions, is_tested)


@pytest.mark.parametrize(
    ("is_ours", "hosts"),
    [
        (True, ["localhost", "127.0.0.1", "127.8.0.1", "::1"]),
        (False, ["10.0.0.7", "192.168.1.2", "172.16.0.1", "169.254.0.1", "0.0.0.0", "node-b", ""]),
    ],
)
def test_an_address_of_the_network_is_not_taken_for_this_machines_own(is_ours, hosts):
    """Without a key a server may listen on this machine's own alone."""
    assert {host: is_loopback(host) for host in hosts} == dict.fromkeys(hosts, is_ours)


def test_a_turn_is_sent_on_a_connection_of_its_own(fake):
    """An idle one may be closed by the server in the moment in which the next turn is sent on it."""
    fake.served, replica = ("s", 1), Replica(fake.url, 5)
    for opened in (1, 2, 3):
        replica.generate("r", [8, 9], **ONE, session="s", version=1)
        assert len(fake.connections) == opened
    for _ in range(2):
        replica.info()
        assert len(fake.connections) == 4, "other requests follow each other at once"


def test_a_generation_asks_for_everything_that_sampling_depends_on(fake):
    sampling = {"n": 3, "max_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop_token_ids": [3, 4]}
    fake.served = "s", 1
    _, found = Replica(fake.url, 5).generate("r", [8, 9], **sampling, session="s", version=1)
    ((_, body),) = fake.bodies
    assert decode_ids(body.pop("token_ids")).tolist() == [8, 9]
    assert body == {"request_id": "r", "session": "s", "version": 1, **sampling}
    assert [(one.token_ids.tolist(), one.logprobs.tolist()) for one in found] == [
        ([8, index], [-0.5, -0.25]) for index in range(3)
    ]


def test_a_relative_directory_is_named_so_that_the_server_finds_it(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = {"way": "remerge", "run": "r", "session": "s", "version": 4, "base_hash": "ab"}
    Replica(fake.url, 5).stage(**where, path="sync/v000004")
    staged = fake.staged["s", 4]
    assert staged.pop("body") == {"path": str(tmp_path / "sync" / "v000004")}
    assert staged == {key: str(value) for key, value in where.items()}


def test_a_redirect_is_not_followed(fake, monkeypatch):
    """It would take the prompts, and the key, to another server."""
    other = FakeReplica()

    def redirect(handler) -> None:
        if handler.server is other:
            return handler._handle(None)
        handler.send_response(307)
        handler.send_header("Location", f"{other.url}/v1/rollout/info")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr("tests.unit.fake_replica._Handler.do_GET", redirect)
    with pytest.raises(ReplicaError, match="307"):
        Replica(fake.url, 5).info()
    assert other.calls == []
    other.stop()


@pytest.mark.parametrize("answer", [[], [1], "text", 3, None])
def test_an_answer_that_is_no_object_is_final(fake, answer):
    fake.before["info"] = lambda body: (200, answer)
    with pytest.raises(ReplicaError, match="is not an object") as failed:
        Replica(fake.url, 5).info()
    assert not failed.value.retry


def test_a_client_error_is_final_and_a_server_error_is_not(fake):
    replica = Replica(fake.url, 5)
    for status, retry in ((400, False), (409, False), (422, False), (500, True), (503, True)):
        fake.refuses["activate"] = (status, "this is why")
        with pytest.raises(ReplicaError) as failed:
            replica.activate("s", 1)
        error = failed.value
        assert (error.url, error.status, error.text, error.retry) == (fake.url, status, "this is why", retry)


def test_no_answer_may_be_tried_again(fake):
    url = fake.url
    fake.before["sleep"] = lambda body: time.sleep(3)
    with pytest.raises(ReplicaError, match=r"no answer within 0\.3 s") as slow:
        Replica(url, 0.3).sleep()
    fake.stop()
    with pytest.raises(ReplicaError, match="Connection") as gone:
        Replica(url, 3).info()
    for failed in (slow, gone):
        assert failed.value.retry and failed.value.status is None and url in str(failed.value)


def test_only_generation_and_the_first_stage_may_take_longer_than_a_change(fake, monkeypatch):
    monkeypatch.setattr("kit.rollout.replica.CHANGE_TIMEOUT_S", 0.3)
    replica = Replica(fake.url, 20)
    where = {"way": "remerge", "run": "r", "session": "s", "base_hash": "ab", "path": "."}
    calls = {
        "stage": lambda: replica.stage(**where, version=2),
        "activate": lambda: replica.activate("s", 1),
        "score": lambda: replica.score([[1, 2]], "s", 1),
        "sleep": replica.sleep,
        "wake": replica.wake,
    }
    for action, call in calls.items():
        fake.before[action] = lambda body: time.sleep(5.0)
        with pytest.raises(ReplicaError, match=rf"{action}: no answer within 0\.3 s"):
            call()
    fake.before = {name: lambda body: time.sleep(1.0) for name in ("stage", "generate")}
    replica.stage(**where, version=1, is_first=True)
    patient = Replica(fake.url, 20)
    patient.change_timeout_s = 20  # a stall of the machine is no reason to fail
    patient.activate("s", 1)
    assert replica.generate("r", [1], **ONE, session="s", version=1)[0] == 1


@pytest.mark.parametrize("answer", [{"samples": 3}, {"version": 1}, {"version": 1, "samples": [{"token_ids": "?"}]}])
def test_an_answer_that_is_not_of_the_protocol_is_final(fake, answer):
    fake.before["generate"] = lambda body: answer
    with pytest.raises(ReplicaError, match=f"the answer is not of protocol {PROTOCOL}") as failed:
        Replica(fake.url, 5).generate("r", [1], **ONE, session="s", version=1)
    assert not failed.value.retry


@pytest.mark.parametrize(
    ("version", "logprobs"),
    [
        *((version, [encode_floats([-1.0])]) for version in (2, None)),
        *((1, wrong) for wrong in ([encode_floats([-1.0, -2.0])], [encode_floats([-1.0])] * 2, [], ["AAAA"])),
    ],
)
def test_scores_of_another_version_or_length_are_refused(fake, version, logprobs):
    fake.before["score"] = lambda body: {"version": version, "logprobs": logprobs}
    with pytest.raises(ReplicaError, match="not of protocol"):
        Replica(fake.url, 5).score([[1, 2]], "s", 1)


def test_the_api_key_of_the_environment_is_sent(fake, monkeypatch):
    keys = []
    monkeypatch.setattr(
        "tests.unit.fake_replica._Handler.do_GET",
        lambda handler: keys.append(handler.headers.get("Authorization")) or handler._handle(None),
    )
    Replica(fake.url, 5).info()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    Replica(fake.url, 5).info()
    assert keys == [None, "Bearer secret"]


def test_a_proxy_of_the_environment_does_not_catch_the_rollouts(fake, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Replica(fake.url, 5).info()["protocol"] == PROTOCOL


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int], digits: int = 1):
        self.vocabulary, self.digits = vocabulary, digits

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(text) // self.digits]


def test_the_hash_of_a_tokenizer_knows_its_vocabulary_and_how_it_splits():
    one = tokenizer_hash(Tokenizer({"a": 0, "b": 1}))
    assert one == tokenizer_hash(Tokenizer({"b": 1, "a": 0}))
    assert one != tokenizer_hash(Tokenizer({"a": 1, "b": 0}))
    assert one != tokenizer_hash(Tokenizer({"a": 0, "b": 1}, digits=3))
