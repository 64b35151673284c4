"""What a rollout server refuses before any route sees it: routes, keys, pages, bodies, heads, connections, paths."""

import asyncio
import contextlib
import json
import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from kit.rollout.server import adapter_roots, fence
from kit.rollout.server.endpoint import Routes
from tests.unit.fake_engine import (
    ADDRESS,
    HASH,
    Engine,
    Server,
    adapter_body,
    application,
    generate_body,
    without_vllm,
    write_adapter,
    write_base,
)

# Routes of vLLM 0.31 in development mode, and others that name a file or change what is served.
DEVELOPMENT = ("collective_rpc", "sleep", "wake_up", "pause", "resume", "is_sleeping", "reset_prefix_cache")
DEVELOPMENT += ("update_weights", "init_weight_transfer_engine", "start_weight_update", "server_info", "start_profile")
DEVELOPMENT += ("update_config", "init_weights_update", "scale_elastic_ep", "invocations", "docs", "openapi.json")
DEVELOPMENT += ("v1/load_lora_adapter", "v1/unload_lora_adapter", "v1/rollout", "v1/rolloutx/info", "%2e%2e/sleep")
WHERE = {"way": "adapter", "run": "r", "session": "s", "version": 1, "base_hash": HASH}


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    without_vllm(monkeypatch, tmp_path)


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def server(base, tmp_path) -> Server:
    return Server(Engine(base), tmp_path)


def with_development_routes(base: Path, key: str | None = None) -> TestClient:
    app, answered = application(Engine(base), key), []
    for name in DEVELOPMENT:
        app.router.add_route(f"/{name}", lambda request: answered.append(request.url.path), methods=["GET", "POST"])
    client = TestClient(app, base_url=ADDRESS)
    client.answered = answered
    return client


@pytest.mark.parametrize("key", [None, "secret"])
def test_routes_that_are_not_of_a_rollout_server_are_not_there(base, key):
    client = with_development_routes(base, key)
    for name in DEVELOPMENT:
        for headers in ({}, {"Authorization": "Bearer secret"}):
            for method in (client.get, client.post):
                assert method(f"/{name}", headers=headers).status_code == 404, name
    assert client.answered == []
    assert client.get("/health").status_code == 200


def test_the_key_guards_every_route_but_health_whatever_the_method(base, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    client = TestClient(application(Engine(base)), base_url=ADDRESS)
    for path in (*fence.OWN, "/v1/rollout/info", "/v1/rollout/stage"):
        if path in fence.WITHOUT_KEY:
            continue
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            for given in (
                "",
                "secret",
                "Basic secret",
                "Bearer",
                "Bearer ",
                "Bearer secre",
                "Bearer secret ",
                "Bearer Secret",
            ):
                headers = {"Authorization": given} if given else {}
                assert client.request(method, path, headers=headers).status_code == 401, (path, given)
    assert client.get("/v1/rollout/info", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/health").status_code == 200


def test_a_key_of_the_command_line_counts_too(base):
    client = TestClient(application(Engine(base), api_key=["one", "two"]), base_url=ADDRESS)
    assert client.get("/v1/rollout/info").status_code == 401
    assert client.get("/v1/rollout/info", headers={"Authorization": "bearer two"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "rebound.example.com:8000"}, 403),
        ({"Host": "127.0.0.1.example.com"}, 403),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "10.0.0.7"}, 200),
    ],
)
def test_a_web_page_cannot_ask_a_server_without_a_key(server, headers, status):
    assert server.client.get("/v1/rollout/info", headers=headers).status_code == status


def test_web_sockets_are_closed(server):
    with pytest.raises(WebSocketDisconnect), server.client.websocket_connect("/v1/realtime"):
        pass


def json_of(**changes) -> bytes:
    return json.dumps(generate_body(**changes)).encode()


HOSTILE = {
    "deep": b'{"stop":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000,
    "a huge int": json_of().replace(b'"n": 2', b'"n": ' + b"9" * 10_000),
    "a large int": json_of(max_tokens=10**30),
    "NaN": json_of(temperature=float("nan")),
    "infinity": json_of(top_p=float("inf")),
    "a number beyond floats": json_of().replace(b'"temperature": 1.0', b'"temperature": 1e400'),
    "below zero": json_of(temperature=-1),
    "top_p of zero": json_of(top_p=0.0),
    "top_k of 64 bits": json_of(top_k=2**40),
    "a bool": json_of(n=True),
    "a float": json_of(n=2.5),
    "text": json_of(max_tokens="4"),
    "ids as a list": json_of(token_ids=[1, 2]),
    "half an id": json_of(token_ids="AAAA"),
    "a stop id beyond the vocabulary": json_of(stop_token_ids=[300]),
    "a stop id below zero": json_of(stop_token_ids=[-1]),
    "many stop ids": json_of(stop_token_ids=[1] * 5000),
    "a long stop text": json_of(stop=["x" * 5000]),
    "many stop texts": json_of(stop=["x"] * 500),
    "a long request id": json_of(request_id="x" * 5000),
    "a routing that is no bool": json_of(routing=1),
    "a session alone": json_of(session="s"),
    "a version alone": json_of(version=1),
    "a version below zero": json_of(session="s", version=-1),
    "a version of 64 bits": json_of(session="s", version=2**63),
    "a session as a list": json_of(session=["s"], version=1),
    "an unknown argument": json_of(extra_args={"kv_transfer_params": {}}),
    "a lone surrogate": b'{"request_id": "\\ud800"}',
    "no UTF-8": b'{"request_id": "\xff"}',
    "a null byte": b"\0",
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arguments_are_refused_before_the_engine_sees_them(server, name):
    answer = server.client.post("/v1/rollout/generate", content=HOSTILE[name])
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]) < 300 and server.engine.params == []


@pytest.mark.parametrize("action", ["score", "activate", "discard", "noise"])
def test_every_route_types_its_arguments(server, action):
    wrong = [
        {},
        {"session": 1, "version": 1},
        {"session": "s", "version": "1"},
        {"session": "s", "version": 1, "x": 1},
    ]
    wrong += [{"sequences": "AAAA"}, {"sequences": []}, {"sequences": [1]}, {"sequences": ["AAAA"] * 5000}]
    wrong += [{"session": "s", "version": 1, "sigma": float("nan"), "seed": 0}]
    wrong += [{"session": "s", "version": 1, "sigma": 0.1, "seed": 2**70}]
    for body in wrong:
        content = json.dumps(body).encode()
        assert server.client.post(f"/v1/rollout/{action}", content=content).status_code == 400, body
    assert server.engine.params == [] and server.engine.calls == []


# Paths of adapters --------------------------------------------------------------------------------------------------


def stage(server: Server, path: Path | str) -> tuple[int, str]:
    status, answer = server.post("stage", {"path": str(path)}, **WHERE)
    return status, answer.get("error", "")


@pytest.fixture
def places(tmp_path, monkeypatch) -> Path:
    """A root with an adapter in it, and one outside."""
    root = tmp_path / "root"
    monkeypatch.setenv(adapter_roots.ROOTS, os.pathsep.join([str(tmp_path / "absent"), str(root)]))
    write_adapter(root / "run" / "v1")
    write_adapter(tmp_path / "outside")
    return root


def test_only_directories_below_a_root_are_read(server, places, tmp_path, monkeypatch):
    assert stage(server, places / "run" / "v1")[0] == 200
    outside = [tmp_path / "outside", places / ".." / "outside", f"{places}x/v1", "/etc", "/proc/self/cwd", "outside"]
    outside += [places / "run" / ".." / ".." / "outside", f"/proc/{os.getpid()}/root{places}/run/v1", "/", ""]
    for path in outside[:-1]:
        status, error = stage(server, path)
        assert status == 403 and "server.adapter_roots" in error, path
    monkeypatch.delenv(adapter_roots.ROOTS)
    status, error = stage(server, places / "run" / "v1")
    assert status == 403 and "reads adapters from (none)" in error


def test_links_are_not_followed(server, places, tmp_path):
    (places / "link").symlink_to(tmp_path / "outside")
    (places / "up").symlink_to("..")
    (places / "inner").symlink_to(places / "run")
    linked = write_adapter(places / "linked")
    (linked / "adapter_config.json").unlink()
    (linked / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    for path in (places / "link", places / "up" / "outside", places / "inner" / "v1", linked):
        status, error = stage(server, path)
        assert status == 422 and "is a link or no directory" in error, (path, error)


def test_files_that_are_none_are_not_waited_for(server, places):
    for name, make in (("fifo", os.mkfifo), ("folder", os.mkdir)):
        directory = write_adapter(places / name)
        (directory / "adapter_model.safetensors").unlink()
        make(directory / "adapter_model.safetensors")
        status, error = stage(server, directory)
        assert status == 422 and "no regular file" in error
    large = write_adapter(places / "large")
    os.truncate(large / "adapter_model.safetensors", 1 << 40)  # a file of holes
    status, error = stage(server, large)
    assert status == 413 and str(1 << 40) in error


def test_what_is_served_is_what_was_checked(server, places):
    """The server's own copy: rewriting the directory afterwards changes nothing, as vLLM may read it again."""
    directory = places / "run" / "v1"
    assert stage(server, directory)[0] == 200
    (served,) = server.app.state.openai_serving_models.lora_requests.values()
    kept = Path(served.lora_path)
    assert kept.is_relative_to(server.private) and kept.stat().st_mode & 0o077 == 0
    (directory / "adapter_config.json").write_text("other")
    assert json.loads((kept / "adapter_config.json").read_text())["r"] == 2


def test_an_error_names_the_directory_that_was_asked_for(server, places):
    directory = write_adapter(places / "dora", use_dora=True)
    status, error = stage(server, directory)
    assert status == 422 and str(directory) in error and str(server.private) not in error


def test_an_adapter_larger_than_any_that_fits_is_not_written(server, monkeypatch):
    monkeypatch.setattr("kit.rollout.server.endpoint.HEADER_BYTES", 1 << 12)
    limit = Routes(server.app)._adapter_limit()
    assert limit < 1 << 14, "that of the small base"

    def endless():
        for _ in range(1 << 12):
            yield b"x" * 1024

    headers = {"content-type": "application/octet-stream"}
    for content in (endless(), b"x" * (limit + 1)):
        answer = server.client.post("/v1/rollout/stage", content=content, params=WHERE, headers=headers)
        assert answer.status_code == 413 and "largest adapter that fits" in answer.json()["error"]
    assert [*server.private.glob("*/*/*")] == []
    answer = server.client.post("/v1/rollout/stage", content=adapter_body(), params=WHERE, headers=headers)
    assert answer.status_code == 200


# Raw sockets on uvicorn ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(base, monkeypatch):
    """`served(**limits)`: the port of uvicorn with these constants of the fence."""
    started = []

    def start(**limits: float) -> int:
        for name, value in limits.items():
            monkeypatch.setattr(fence, name, value)
        app = application(Engine(base))
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="on"))
        server.config.load()
        app.state.server = server  # as vLLM does
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
        thread.start()
        started.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return server.servers[0].sockets[0].getsockname()[1]

    yield start
    for server, thread in started:
        server.should_exit = server.force_exit = True
        thread.join(10)


HEAD = b"POST /v1/rollout/generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def reply(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection or the answer is whole; b"" if it was cut."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in data and (part := connection.recv(65536)):
            data += part
    return data


def works(port: int, head_s: float = 10.0) -> bool:
    """Whether a request is answered. Its head has `head_s`: on a loaded machine it may come late."""
    body = json_of()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ConnectionError):
        patch.setattr(fence, "HEAD_S", head_s)
        with connect(port) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            return reply(connection).startswith(b"HTTP/1.1 200")
    return False


def flood(connection: socket.socket, part: bytes, most: int) -> int:
    """Send a part until the server closes the connection; the bytes that it took."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most:
            sent += connection.send(part)
    return sent


def test_a_large_body_is_refused_by_its_announced_length(served):
    port = served()
    with connect(port) as connection:
        connection.sendall(HEAD + b"Content-Length: 10000000000\r\n\r\n{")
        assert reply(connection).startswith(b"HTTP/1.1 413")
    assert works(port)


def test_chunks_without_end_are_refused_at_the_limit(served):
    port = served(MAX_BODY_BYTES=1 << 20)
    with connect(port) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        flood(connection, b"10000\r\n" + b"x" * 65536 + b"\r\n", 3 << 20)
        assert reply(connection)[:12] in (b"HTTP/1.1 413", b"")
    assert works(port)


def test_a_body_that_drips_is_given_up(served):
    port = served(BODY_S=0.3)
    with connect(port) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        started, answered = time.monotonic(), []
        while not answered and time.monotonic() - started < 5:
            connection.sendall(b" ")
            answered = select.select([connection], [], [], 0.05)[0]
        assert answered and reply(connection).startswith(b"HTTP/1.1 408")
    assert works(port)


@pytest.mark.parametrize("first", [b"", HEAD, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" + HEAD])
def test_a_head_that_drips_is_given_up(served, first):
    port = served(HEAD_S=0.3)
    with connect(port) as connection:
        connection.sendall(first)
        started, closed = time.monotonic(), False
        while not closed and time.monotonic() - started < 5:
            time.sleep(0.05)
            try:
                connection.sendall(b"X-A: 1\r\n" if first else b"")
                connection.setblocking(False)
                closed = connection.recv(65536) == b""
            except BlockingIOError:
                pass
            except OSError:
                closed = True
            connection.settimeout(10)
        assert closed
    assert works(port)


@pytest.mark.parametrize("part", [b"x" * 65536, b"X-A: 1\r\n" * 8192])
def test_a_head_without_end_is_cut(served, part):
    port = served()
    with connect(port) as connection:
        connection.sendall(HEAD + b"X-B: ")
        assert flood(connection, part, 64 << 20) < 32 << 20, "more than what the kernel holds"
    assert works(port)


def alive(connections: list[socket.socket]) -> int:
    """How many of them the server has left open."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        with contextlib.suppress(ConnectionError):
            try:
                connection.recv(1)
            except BlockingIOError:
                count += 1
    return count


def test_connections_have_a_number_and_idle_ones_make_room(served):
    port, began = served(MAX_CONNECTIONS=20, HEAD_S=4.0), time.monotonic()
    with contextlib.ExitStack() as opened:
        connections = [opened.enter_context(connect(port)) for _ in range(100)]
        while (count := alive(connections)) > 20 and time.monotonic() - began < 3.5:  # none is idle for long enough
            time.sleep(0.05)
        assert count <= 20
        deadline = time.monotonic() + 15
        while not (has_room := works(port)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert has_room, "the idle ones are still open on this side"


def test_a_request_that_takes_long_is_not_idle(served, monkeypatch):
    port = served()
    generate = Engine.generate

    async def slowly(self, *arguments, **keywords):
        await asyncio.sleep(3.0)
        async for output in generate(self, *arguments, **keywords):
            yield output

    monkeypatch.setattr(Engine, "generate", slowly)
    assert works(port, head_s=2.0)


def test_no_bytes_make_a_server_fall(served):
    port = served(HEAD_S=1.0)
    for content in (b"\0" * 1000, b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", HEAD * 50 + b"\r\n",
                    HEAD + b"Content-Length: -5\r\n\r\n", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
                    HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
                    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
                    HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
                    HEAD.replace(b"generate", b"%00%2e%2e%2f") + b"\r\n",
                    HEAD.replace(b"HTTP/1.1", b"HTTP/1.1\r\n folded") + b"\r\n"):  # fmt: skip
        with connect(port) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
            assert not reply(connection).startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")), content
    assert works(port)
