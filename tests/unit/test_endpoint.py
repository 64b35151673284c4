"""The /v1/rollout routes, each over HTTP, on a fake engine: what they answer, refuse and leave as it was."""

import asyncio
import fcntl
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import numpy as np
import pytest
from starlette.testclient import TestClient

from launch import endpoint
from launch.private_files import PREFIX, PrivateFiles
from recipes.parts.replica import decode_floats, decode_ids, encode_ids
from tests.unit.fake_engine import HASH, LAYERS, Engine, adapter_body, application, write_adapter, write_base

SAMPLING = {"n": 2, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    """The three names of vLLM that the routes import, and private directories where the test sees them."""
    protocol = SimpleNamespace(LoadLoRAAdapterRequest=SimpleNamespace, UnloadLoRAAdapterRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.serve.lora.protocol", protocol)
    monkeypatch.setattr(endpoint, "sampling_params", lambda **options: SimpleNamespace(**options))
    monkeypatch.setattr(endpoint, "vllm_version", lambda: "0.31.0")
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("launch.versions.PrivateFiles", lambda: PrivateFiles(tmp_path / "private"))


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "base")


class Server:
    """An application and its engine; `post` returns (status, answer)."""

    def __init__(self, engine: Engine, tmp_path: Path):
        self.engine, self.tmp_path = engine, tmp_path
        self.app = application(engine)
        self.client = TestClient(self.app)
        self.private = tmp_path / "private"

    def post(self, action: str, body: dict | None = None, **query) -> tuple[int, dict]:
        answer = self.client.post(f"/v1/rollout/{action}", json=body or {}, params=query)
        return answer.status_code, answer.json()

    def info(self) -> dict:
        return self.client.get("/v1/rollout/info").json()

    def stage(self, version: int, way: str, session: str = "s1", run: str = "r", hash: str = HASH, **adapter):
        path = write_adapter(self.tmp_path / f"{session}-{version}", **adapter)
        return self.post(
            "stage", {"path": str(path)}, way=way, run=run, session=session, version=version, base_hash=hash
        )

    def serve(self, version: int, way: str, session: str = "s1", run: str = "r") -> None:
        assert self.stage(version, way, session, run)[0] == 200
        assert self.post("activate", {"session": session, "version": version})[0] == 200

    def score(self, session: str | None, version: int | None) -> tuple[int, dict]:
        return self.post("score", {"sequences": [encode_ids([1, 2, 3])], "session": session, "version": version})

    def first_logprob(self, session: str | None, version: int | None) -> float:
        status, answer = self.score(session, version)
        assert status == 200, answer
        return float(decode_floats(answer["logprobs"][0])[0])


@pytest.fixture
def server(base, tmp_path) -> Server:
    return Server(Engine(base), tmp_path)


def generate_body(**changes) -> dict:
    return {
        "request_id": "q",
        "token_ids": encode_ids([1, 2, 3]),
        **SAMPLING,
        "session": None,
        "version": None,
    } | changes


def test_the_routes_are_there_for_the_first_request_and_the_key_guards_them(base):
    client = TestClient(application(Engine(base), key="secret"))
    assert client.get("/v1/rollout/info").status_code == 401
    assert client.post("/v1/rollout/generate", json={}).status_code == 401
    assert client.get("/v1/rollout/info", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/health").json() == "fine"


def test_the_routes_are_added_once_and_with_the_lifespan_too(base):
    app = application(Engine(base))
    with TestClient(app) as client:
        assert client.get("/v1/rollout/info").status_code == 200
        assert [route.path for route in app.routes].count("/v1/rollout/info") == 1


@pytest.mark.parametrize("argument", ["api_server_count", "data_parallel_size"])
def test_servers_that_would_not_share_the_version_do_not_start(base, argument):
    with (
        pytest.raises(RuntimeError, match="one server per replica"),
        TestClient(application(Engine(base), **{argument: 2})),
    ):
        pass


def test_info_says_what_is_held_and_which_ways_work(server):
    info = server.info()
    assert (info["protocol"], info["base_hash"], info["served"], info["damaged"]) == (1, HASH, None, None)
    assert (info["sync"], info["modules"], info["max_lora_rank"]) == (["adapter", "remerge"], [*LAYERS], 8)
    assert (info["vocab_size"], info["max_num_seqs"], info["tensor_parallel"], info["pid"]) == (300, 8, 2, os.getpid())
    server.info()
    assert [call.split()[0] for call in server.engine.calls] == ["remerge_describe", "remerge_setup"], "set up once"


@pytest.mark.parametrize(
    ("options", "nf4", "way", "reason"),
    [
        ({"remerge": False}, True, "remerge", "--worker-extension-cls launch.remerge.Remerge"),
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
        ({"n": "2"}, "n must be a number"),
        ({"top_p": None}, "top_p must be a number"),
        ({"max_tokens": 30}, "Start it with 33"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids"),
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
def test_only_the_served_version_answers(server, way):
    server.serve(1, way)
    assert server.stage(2, way)[0] == 200
    assert server.post("generate", generate_body(session="s1", version=1))[0] == 200
    for session, version in (("s1", 2), ("s2", 1), (None, None)):
        status, answer = server.post("generate", generate_body(session=session, version=version))
        assert status == 409 and "this server serves s1/1" in answer["error"]
    one = server.first_logprob("s1", 1)
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 200
    assert server.first_logprob("s1", 2) != one
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 200, "the one before, still staged"
    assert server.first_logprob("s1", 1) == one
    assert server.info()["served"] == {"way": way, "session": "s1", "version": 1}


def test_the_base_can_be_scored_beside_an_adapter_but_not_once_folded_in(server, base, tmp_path):
    bare = server.first_logprob(None, None)
    server.serve(1, "adapter")
    assert server.first_logprob(None, None) == bare != server.first_logprob("s1", 1)
    folded = Server(Engine(base), tmp_path)
    folded.serve(1, "remerge")
    assert folded.score(None, None)[0] == 409


def test_an_adapter_name_is_never_used_twice(server):
    """vLLM's prefix cache is keyed by it: a version made again must not be answered from the first one's blocks."""
    server.serve(1, "adapter")
    assert server.stage(2, "adapter")[0] == 200
    assert server.post("discard", {"session": "s1", "version": 2}) == (200, {})
    assert server.stage(2, "adapter")[0] == 200
    loaded = server.app.state.openai_serving_models.loaded
    assert loaded == ["r-s1-v000001", "r-s1-v000002", "r-s1-v000002-2"]
    assert server.stage(2, "adapter")[0] == 409


def test_discard_gives_the_slot_back_and_keeps_what_is_served(server):
    server.serve(1, "adapter")
    server.stage(2, "adapter")
    assert server.post("discard", {"session": "s1", "version": 1})[0] == 409
    assert server.post("discard", {"session": "s1", "version": 2})[0] == 200
    assert server.post("discard", {"session": "s1", "version": 77})[0] == 200
    assert server.engine.loras == {1}


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_a_new_session_drops_what_the_older_one_of_its_run_left(server, way):
    server.serve(1, way, session="old")
    server.stage(2, way, session="old")
    server.serve(0, way, session="new")
    server.stage(5, way, session="x", run="another")
    assert server.post("activate", {"session": "old", "version": 1})[0] == 409
    assert server.post("activate", {"session": "old", "version": 2})[0] == 409
    assert server.first_logprob("new", 0)
    if way == "remerge":
        assert {"remerge_discard old/1", "remerge_discard old/2"} <= {*server.engine.calls}
    else:
        assert len(server.engine.loras) == 2


def test_a_run_on_other_weights_is_refused_with_both_hashes(server):
    status, answer = server.stage(1, "adapter", hash="cd" * 32)
    assert status == 409 and HASH in answer["error"] and "cd" * 32 in answer["error"]
    assert server.app.state.openai_serving_models.loaded == []


def test_an_adapter_is_not_served_on_weights_that_were_folded(server):
    server.serve(1, "remerge")
    status, answer = server.stage(2, "adapter")
    assert status == 409 and "Restart" in answer["error"]


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_a_refused_adapter_touches_nothing(server, way):
    server.serve(1, way)
    calls, loras = len(server.engine.calls), set(server.engine.loras)
    status, answer = server.stage(2, way, use_dora=True)
    assert status == 422 and "DoRA" in answer["error"]
    assert (len(server.engine.calls), server.engine.loras) == (calls, loras)
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 409
    assert server.first_logprob("s1", 1)


def test_what_vllm_or_a_worker_refuses_is_not_staged(server):
    server.app.state.openai_serving_models.refuses = "no slot for it"
    assert server.stage(1, "adapter") == (422, {"error": f"vLLM did not load {server.tmp_path}/s1-1: no slot for it"})
    server.engine.fails["remerge_stage"] = "no place for it"
    status, answer = server.stage(2, "remerge")
    assert status == 422 and "no place for it" in answer["error"] and "rank 1 of 2" in answer["error"]
    assert server.engine.calls[-1] == "remerge_discard s1/2", "the ranks that did read it forget it"


def test_folding_in_runs_while_nothing_is_generated_and_nothing_is_cached(server):
    server.stage(1, "remerge")
    server.engine.calls.clear()
    server.engine.cache_is_busy = 2
    status, answer = server.post("activate", {"session": "s1", "version": 1})
    resets = ["reset_prefix_cache"] * 3
    assert server.engine.calls == ["pause", "remerge_activate s1/1", *resets, "resume"]
    assert status == 200 and {"pause", "remerge", "resume", "total"} <= answer["seconds"].keys()


def test_a_prefix_cache_that_cannot_be_reset_damages_the_server(server, monkeypatch):
    server.stage(1, "remerge")
    server.engine.cache_is_busy = 10_000
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 500
    assert server.score("s1", 1)[0] == 500 and "Restart" in server.info()["damaged"]


def test_a_failed_fold_leaves_the_version_before_in_the_weights(server):
    server.serve(1, "remerge")
    server.stage(2, "remerge")
    one = server.first_logprob("s1", 1)
    server.engine.fails["remerge_activate s1/2"] = "out of memory"
    status, answer = server.post("activate", {"session": "s1", "version": 2})
    assert status == 500 and "out of memory" in answer["error"]
    assert server.engine.calls[-4:] == [
        "remerge_activate s1/2",
        "remerge_activate s1/1",
        "reset_prefix_cache",
        "resume",
    ]
    assert server.first_logprob("s1", 1) == one
    assert server.info()["served"]["version"] == 1


def test_a_failed_fold_with_nothing_before_it_damages_the_server(server):
    server.stage(1, "remerge")
    server.engine.fails["remerge_activate"] = "out of memory"
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 500
    for answer in (server.score(None, None), server.stage(2, "remerge"), server.post("generate", generate_body())):
        assert answer[0] == 500 and "Restart the server" in answer[1]["error"]


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
        (adapter_body()[:-5], "not written"),
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
    for body in ({}, {"path": "relative/dir"}, {"path": 3}):
        assert server.post("stage", body, **whole)[0] == 400
    status, answer = server.post("stage", {"path": str(tmp_path / "absent")}, **whole)
    assert status == 422 and "rollout.transport to body" in answer["error"]


def test_a_sleeping_server_says_so_and_wakes_with_its_version(base, tmp_path):
    server = Server(Engine(base, sleep=True), tmp_path)
    server.serve(1, "adapter")
    assert server.post("sleep")[0] == 200 and server.info()["asleep"]
    for status, answer in (
        server.score("s1", 1),
        server.stage(2, "adapter"),
        server.post("generate", generate_body()),
    ):
        assert status == 503 and "wake" in answer["error"]
    assert server.post("sleep")[0] == 200 and server.engine.calls.count("sleep 1") == 1
    assert server.post("wake")[0] == 200 and not server.info()["asleep"]
    assert server.first_logprob("s1", 1)


def test_sleep_without_the_option_is_refused(server):
    for action in ("sleep", "wake"):
        status, answer = server.post(action)
        assert status == 400 and "server.sleep" in answer["error"]


def test_what_the_engine_aborts_is_no_answer(server):
    server.engine.finish_reason = "abort"
    status, answer = server.post("generate", generate_body())
    assert status == 503 and "abort" in answer["error"]


async def ask(app, action: str, body: dict, hang_up: asyncio.Event | None = None, **query) -> tuple[int, dict]:
    """One request on the running event loop; the client hangs up when `hang_up` is set."""
    sent, content = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict:
        if content:
            return content.pop()
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": f"/v1/rollout/{action}", "headers": [], "root_path": ""}
    await app(scope | {"query_string": urlencode(query).encode()}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


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


async def stage_two(server: Server) -> None:
    """Versions 1 and 2 staged, 1 served, on the running event loop."""
    where = {"way": "remerge", "run": "r", "session": "s1", "base_hash": HASH}
    for version in (1, 2):
        path = str(write_adapter(server.tmp_path / f"v{version}"))
        assert (await ask(server.app, "stage", {"path": path}, version=version, **where))[0] == 200
    assert (await ask(server.app, "activate", {"session": "s1", "version": 1}))[0] == 200


def test_an_answer_that_spans_a_change_of_the_weights_is_of_no_version(server):
    async def scenario() -> None:
        await stage_two(server)
        server.engine.gate = asyncio.Event()
        request = asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1)))
        while not server.engine.params:
            await asyncio.sleep(0)
        assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
        server.engine.gate.set()
        status, answer = await request
        assert status == 409 and "changed" in answer["error"]

    asyncio.run(scenario())


def test_a_request_that_arrives_while_the_engine_resumes_gets_no_old_name_for_new_weights(server):
    async def scenario() -> None:
        await stage_two(server)
        arrived = []

        async def arrive() -> None:
            server.engine.gate = asyncio.Event()
            arrived.append(asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1))))
            while not server.engine.params:
                await asyncio.sleep(0)

        server.engine.while_resuming = arrive
        assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
        server.engine.gate.set()
        assert (await arrived[0])[0] == 409

    asyncio.run(scenario())


def test_private_places_of_dead_servers_are_removed_and_of_living_ones_kept(tmp_path):
    dead, alive = PrivateFiles(tmp_path), PrivateFiles(tmp_path)
    abandoned, kept = dead.make(), alive.make()
    fcntl.flock(dead._lock, fcntl.LOCK_UN)  # as the kernel does when a process is killed
    PrivateFiles(tmp_path).make()
    assert not abandoned.exists() and kept.exists()
    alive.close()
    assert not kept.exists()


def test_flat_log_probs_take_the_first_of_every_position():
    several = SimpleNamespace(start_indices=[0, 0, 2], end_indices=[0, 2, 4], logprobs=[-1.0, -9.0, -2.0, -9.0])
    assert endpoint.flat_floats(several, 3, 1).tolist() == [-1.0, -2.0]
    with pytest.raises(RuntimeError, match="3 log-probs for 4 tokens"):
        endpoint.flat_floats(several, 4, 1)
