"""The /v1/rollout routes, each over HTTP, on a fake engine: what they answer and refuse."""

import asyncio
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.testclient import TestClient

from kit.rollout.protocol import PROTOCOL, decode_floats, decode_ids, encode_ids
from kit.rollout.server import endpoint, versions
from kit.rollout.server.private_files import PREFIX, PrivateFiles
from tests.unit.fake_engine import (
    ADDRESS,
    HASH,
    LAYERS,
    Engine,
    Server,
    adapter_body,
    application,
    ask,
    generate_body,
    without_vllm,
    write_base,
)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    without_vllm(monkeypatch, tmp_path)


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def server(base, tmp_path) -> Server:
    return Server(Engine(base), tmp_path)


def test_the_routes_are_there_for_the_first_request_and_the_key_guards_them(base):
    client = TestClient(application(Engine(base), key="secret"), base_url=ADDRESS)
    assert client.get("/v1/rollout/info").status_code == 401
    assert client.post("/v1/rollout/generate", json={}).status_code == 401
    assert client.get("/v1/rollout/info", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/health").json() == "fine"


def test_the_routes_are_added_once_and_with_the_lifespan_too(base):
    app = application(Engine(base))
    with TestClient(app, base_url=ADDRESS) as client:
        assert client.get("/v1/rollout/info").status_code == 200
        assert [route.path for route in app.routes].count("/v1/rollout/info") == 1


@pytest.mark.parametrize("argument", ["api_server_count", "data_parallel_size"])
def test_servers_that_would_not_share_the_version_do_not_start(base, argument):
    with (
        pytest.raises(RuntimeError, match="one server per replica"),
        TestClient(application(Engine(base), **{argument: 2}), base_url=ADDRESS),
    ):
        pass


def test_info_says_what_is_held_and_which_ways_work(server):
    info = server.info()
    assert (info["protocol"], info["base_hash"], info["served"], info["damaged"]) == (PROTOCOL, HASH, None, None)
    assert (info["sync"], info["modules"], info["max_lora_rank"]) == (["adapter", "remerge"], sorted(LAYERS), 8)
    assert (info["vocab_size"], info["max_num_seqs"], info["tensor_parallel"], info["pid"]) == (300, 8, 2, os.getpid())
    server.info()
    assert [call.split()[0] for call in server.engine.calls] == ["remerge_describe", "remerge_setup"], "set up once"


@pytest.mark.parametrize(
    ("options", "nf4", "way", "reason"),
    [
        ({"remerge": False}, True, "remerge", "--worker-extension-cls kit.rollout.server.remerge.Remerge"),
        ({}, False, "remerge", "python -m merge base"),
        ({"lora_rank": None}, True, "adapter", "--enable-lora"),
    ],
)
def test_a_way_that_does_not_work_says_why_and_refuses_to_stage(tmp_path, options, nf4, way, reason):
    server = Server(Engine(write_base(tmp_path / "other", nf4), **options), tmp_path)
    info = server.info()
    assert way not in info["sync"] and reason in info["refused"][way]
    status, answer = server.stage(1, way)
    assert status == 400 and reason in answer["error"]


def test_workers_without_a_usable_nf4_copy_refuse_remerge_and_nothing_else(server):
    server.engine.fails["remerge_setup"] = "blocks do not divide"
    info = server.info()
    assert info["sync"] == ["adapter"] and "blocks do not divide" in info["refused"]["remerge"]
    assert server.stage(1, "remerge")[0] == 500
    assert server.stage(1, "adapter")[0] == 200


def test_samples_come_in_order_as_bits_and_a_nan_stays_one(server):
    status, answer = server.post("generate", generate_body(n=3, stop_token_ids=[5]))
    assert (status, answer["version"], len(answer["samples"])) == (200, None, 3)
    for index, sample in enumerate(answer["samples"]):
        assert decode_ids(sample["token_ids"]).tolist() == [7, 8, index]
        first, second, third = decode_floats(sample["logprobs"])
        assert (first, third) == (server.engine.logprob(None), -index) and np.isnan(second)
        assert sample["finish_reason"] == "stop"
    (params,) = server.engine.params
    assert (params.n, params.max_tokens, params.stop_token_ids, params.logprobs) == (3, 4, [5], 0)
    assert params.stop == []
    assert server.post("generate", generate_body(stop=["</answer>", "END"]))[0] == 200
    assert server.engine.params[-1].stop == ["</answer>", "END"]


def test_a_sequence_has_a_score_for_every_token_but_its_first(server):
    sequences = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    body = {"sequences": [encode_ids(ids) for ids in sequences], "session": None, "version": None}
    status, answer = server.post("score", body)
    scores = [decode_floats(text).tolist() for text in answer["logprobs"]]
    assert status == 200 and scores == [[server.engine.logprob(None)] * (len(ids) - 1) for ids in sequences]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": "§"}, "base64"),
        ({"token_ids": "AAA="}, "token_ids"),
        ({"token_ids": ""}, "empty"),
        ({"token_ids": encode_ids([300])}, "the id 300"),
        ({"token_ids": encode_ids([-1])}, "the id -1"),
        ({"n": 0}, "at least 1"),
        ({"n": 9}, "--max-num-seqs 8. Start it with 9"),
        ({"n": "2"}, "n: Input should be a valid integer; it is '2'"),
        ({"top_p": None}, "top_p: Input should be a valid number"),
        ({"max_tokens": 30}, "Start it with 33"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
        ({"stop": "x"}, "stop: Input should be a valid array"),
        ({"stop": ["x", ""]}, "stop.1: String should have at least 1 character"),
        ({"session": "s1"}, "session"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_the_engine_sees_it(server, changes, reason):
    status, answer = server.post("generate", generate_body(**changes))
    assert status == 400 and reason in answer["error"]
    assert server.engine.params == []


def test_a_body_that_is_no_object_is_refused(server):
    for content in (b"", b"[1]", b"{", b"\xff"):
        assert server.client.post("/v1/rollout/generate", content=content).status_code == 400


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_an_adapter_in_the_body_is_staged_from_a_private_place_and_leaves_nothing(server, way):
    where = {"way": way, "run": "r", "session": "s1", "base_hash": HASH}

    def send(version: int, content: bytes):
        headers = {"content-type": "application/octet-stream"}
        query = {**where, "version": version}
        return server.client.post("/v1/rollout/stage", content=content, params=query, headers=headers)

    def kept() -> int:
        return len([*server.private.glob(f"{PREFIX}*/*/adapter_config.json")])

    assert send(1, adapter_body()).status_code == 200
    # The workers hold a remerged adapter; vLLM may read an unmerged one again.
    assert kept() == (0 if way == "remerge" else 1)
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 200
    for content, reason in (
        (adapter_body(None), "adapter_config"),
        (adapter_body()[:-5], "not a whole safetensors file"),
        (b"", "whole"),
    ):
        answer = send(2, content)
        assert answer.status_code == 422 and reason in answer.json()["error"]
    assert send(2, adapter_body({"peft_type": "LORA", "r": 2, "use_dora": True})).status_code == 422
    assert send(2, adapter_body()).status_code == 200
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 200
    assert server.post("discard", {"session": "s1", "version": 1})[0] == 200
    assert kept() == (0 if way == "remerge" else 1)


def test_a_stage_request_names_everything_it_needs(server, tmp_path):
    whole = {"way": "adapter", "run": "r", "session": "s", "version": "1", "base_hash": HASH}
    for key, value in (("way", "merge"), ("version", "-1"), ("run", ""), ("base_hash", "")):
        assert server.post("stage", {"path": "/x"}, **{**whole, key: value})[0] == 400
    for body in ({}, {"path": 3}, {"path": ""}, {"path": "/x", "other": 1}):
        assert server.post("stage", body, **whole)[0] == 400
    status, answer = server.post("stage", {"path": str(tmp_path / "absent")}, **whole)
    assert status == 422 and "rollout.transport to body" in answer["error"]


def test_info_answers_while_the_engine_is_too_busy_to(server, monkeypatch):
    monkeypatch.setattr(versions, "ASLEEP_S", 0.05)
    server.info()
    server.engine.hangs |= {"is_sleeping", "remerge_describe", "remerge_setup"}
    assert server.info()["asleep"] is False


def test_weights_without_quantization_are_named_by_their_dtype(base, tmp_path):
    for dtype, name in (("torch.bfloat16", "bf16"), ("torch.float32", "float32")):
        assert Server(Engine(base, quantization=None, dtype=dtype), tmp_path).info()["weights"] == name


def test_a_copy_that_can_be_nowhere_does_not_start(base, monkeypatch):
    monkeypatch.setenv("GRPO_KIT_NF4_COPY", "disk")
    with (
        pytest.raises(RuntimeError, match="'disk', it must be one of gpu, host"),
        TestClient(application(Engine(base))),
    ):
        pass


def test_what_the_engine_aborts_is_no_answer(server):
    server.engine.finish_reason = "abort"
    status, answer = server.post("generate", generate_body())
    assert status == 503 and "abort" in answer["error"]


def test_a_client_that_hangs_up_aborts_its_request(server):
    async def scenario() -> None:
        server.engine.gate, hang_up = asyncio.Event(), asyncio.Event()
        request = asyncio.ensure_future(ask(server.app, "generate", generate_body(), hang_up))
        while not server.engine.params:
            await asyncio.sleep(0)
        hang_up.set()
        assert (await request)[0] == 499
        assert server.engine.aborted == 1

    asyncio.run(scenario())


def test_a_request_that_fails_ends_the_others_of_its_call(server):
    async def scenario() -> None:
        server.engine.gate = asyncio.Event()
        server.engine.breaks.add((4, 5))
        sequences = [encode_ids(ids) for ids in ([1, 2], [4, 5], [2, 3])]
        status, answer = await ask(server.app, "score", {"sequences": sequences, "session": None, "version": None})
        assert status == 400 and "breaks" in answer["error"]
        assert server.engine.aborted == 2

    asyncio.run(scenario())


def test_private_places_of_dead_servers_are_removed_and_of_living_ones_kept(tmp_path):
    dead, alive = PrivateFiles(tmp_path), PrivateFiles(tmp_path)
    abandoned, kept = dead.make(), alive.make()
    fcntl.flock(dead._lock, fcntl.LOCK_UN)  # as the kernel does when a process is killed
    PrivateFiles(tmp_path).make()
    assert not abandoned.exists() and kept.exists()
    alive.close()
    assert not kept.exists()


def test_a_private_place_is_locked_before_others_can_see_it(tmp_path, monkeypatch):
    real = fcntl.flock

    def lock(file: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            PrivateFiles(tmp_path)._remove_abandoned()  # another server starts at this moment
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    place = PrivateFiles(tmp_path).make()
    assert place.is_dir() and place.parent.name.startswith(PREFIX)
    assert [*tmp_path.glob("*adapters*")] == [place.parent]


def test_flat_log_probs_take_the_first_of_every_position():
    several = SimpleNamespace(start_indices=[0, 0, 2], end_indices=[0, 2, 4], logprobs=[-1.0, -9.0, -2.0, -9.0])
    assert endpoint.flat_floats(several, 3, 1).tolist() == [-1.0, -2.0]
    with pytest.raises(RuntimeError, match="3 log-probs for 4 tokens"):
        endpoint.flat_floats(several, 4, 1)


def quantized_server(tmp_path: Path, quant_cfg: str, extension: str = versions.REMERGE) -> Server:
    engine = Engine(write_base(tmp_path / "base-of-a-format"), workers=1, quantization=None)
    engine.vllm_config.additional_config = {"quant_cfg": quant_cfg}
    engine.vllm_config.parallel_config.worker_extension_cls = extension
    return Server(engine, tmp_path)


def test_a_server_with_a_format_answers_only_once_its_base_is_in_it(tmp_path):
    server = quantized_server(tmp_path, "nvfp4a16")
    status, answer = server.post("generate", generate_body())
    assert status == 503 and "not in nvfp4a16 yet" in answer["error"]
    info = server.info()
    assert (info["quant_cfg"], info["sync"], info["weights"]) == ("nvfp4a16", ["remerge"], "bf16")
    assert "an unmerged adapter would not be quantized" in info["refused"]["adapter"]
    calls = [call.split()[0] for call in server.engine.calls]
    assert calls == ["remerge_describe", "pause", "remerge_setup", "resume"], "requests would mix two bases"
    assert server.post("generate", generate_body())[0] == 200
    status, answer = server.stage(1, "remerge")
    assert status == 422 and "it was trained as the unquantized policy" in answer["error"]


def test_a_server_without_a_format_refuses_an_adapter_of_one(server):
    status, answer = server.stage(1, "remerge", quant_cfg="nvfp4")
    assert status == 422
    assert "it was trained as nvfp4, this server samples from the unquantized policy" in answer["error"]


def test_a_format_with_static_activations_needs_workers_that_quantize_inputs(tmp_path):
    info = quantized_server(tmp_path, "nvfp4").info()
    assert info["sync"] == [] and f"--worker-extension-cls {versions.QUANTIZED_INPUTS}" in info["refused"]["remerge"]
    assert quantized_server(tmp_path / "2", "nvfp4", versions.QUANTIZED_INPUTS).info()["sync"] == ["remerge"]


def test_noise_is_put_on_the_served_version_and_gone_with_the_next(server):
    server.serve(1, "remerge")
    body = {"session": "s1", "version": 1, "sigma": 0.01, "seed": 5}
    server.engine.calls.clear()
    assert server.post("noise", body)[0] == 200
    assert server.engine.calls == ["pause", "remerge_noise 0.01 5", "reset_prefix_cache", "resume"]
    assert server.info()["noise"] == {"sigma": 0.01, "seed": 5}
    server.serve(2, "remerge")
    assert server.info()["noise"] is None
    status, answer = server.post("noise", body)
    assert status == 409 and "serves s1/2" in answer["error"]
    for wrong in ({"sigma": -1}, {"sigma": "1"}, {"seed": 0.5}, {"sigma": 1}, {"session": None}):
        assert server.post("noise", body | {"version": 2} | wrong)[0] == 400


def test_an_unmerged_adapter_gets_no_noise(server):
    server.serve(1, "adapter")
    status, answer = server.post("noise", {"session": "s1", "version": 1, "sigma": 0.01, "seed": 5})
    assert status == 400 and "only remerge" in answer["error"]
