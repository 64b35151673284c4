"""Adapter sync against stand-in replicas: a version is served by all of them or by none."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from recipes.parts.errors import BadInput, CheckFailed
from recipes.parts.sync import AdapterSync


class Replica(ThreadingHTTPServer):
    """A server that keeps the adapters it was told to load; `refuses` names the one it answers 500 to."""

    def __init__(self, refuses: str | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuses, self.loaded = refuses, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Replica

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self._answer({"tokens": [1, 2, 3]})
        name = body["lora_name"]
        code = 500 if name == self.server.refuses else 200
        if code == 200 and self.path == "/v1/load_lora_adapter":
            self.server.loaded[name] = body["lora_path"]
        elif code == 200 and self.path == "/v1/unload_lora_adapter":
            code = 200 if self.server.loaded.pop(name, None) else 404
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"no slot left" if code == 500 else b"ok")

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "base", "max_model_len": 4096}]})

    def _answer(self, value: dict) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def replicas():
    made: list[Replica] = []

    def make(*refusals: str | None) -> list[Replica]:
        made.extend(Replica(name) for name in refusals)
        return made

    yield make
    for replica in made:
        replica.shutdown()
        replica.server_close()


def test_a_new_version_replaces_the_old_one_on_every_replica(replicas, tmp_path):
    both = replicas(None, None)
    sync = AdapterSync([replica.url for replica in both], "run", 5)
    sync.publish(tmp_path / "v000001", 1)
    name = sync.publish(tmp_path / "v000002", 2)
    assert name == f"run-{sync.session}-v000002"
    assert [replica.loaded for replica in both] == [{name: str((tmp_path / "v000002").resolve())}] * 2


def test_a_version_made_again_after_a_resume_has_another_name():
    # vLLM's prefix cache knows an adapter by its name, and the second version 41 has other weights than the first.
    first, second = (AdapterSync(["http://127.0.0.1:9"], "run", 5) for _ in range(2))
    assert first.session != second.session


def test_one_replica_that_refuses_keeps_all_on_the_old_version(replicas, tmp_path):
    both = replicas(None, None)
    sync = AdapterSync([replica.url for replica in both], "run", 5)
    old = sync.publish(tmp_path / "v000001", 1)
    both[1].refuses = f"run-{sync.session}-v000002"
    with pytest.raises(CheckFailed, match=rf"{both[1].url} did not load adapter version 2.*no slot left.*v000001"):
        sync.publish(tmp_path / "v000002", 2)
    assert [list(replica.loaded) for replica in both] == [[old]] * 2
    assert sync.served == old


def test_a_replica_that_is_gone_is_named(replicas, tmp_path):
    (alive,) = replicas(None)
    sync = AdapterSync([alive.url, "http://127.0.0.1:9"], "run", 5)
    with pytest.raises(CheckFailed, match=r"http://127\.0\.0\.1:9 did not load"):
        sync.publish(tmp_path / "v000001", 1)
    assert alive.loaded == {}


def test_what_an_earlier_process_left_is_unloaded_and_nothing_else(replicas):
    (replica,) = replicas(None)
    left = "run-0123abcd-v000007"
    others = ["run-v2-0123abcd-v000001", "other-0123abcd-v000001", "run-notes"]
    replica.loaded = dict.fromkeys([left, *others], "path")
    sync = AdapterSync([replica.url], "run", 5)
    # A replica that was restarted no longer has it and answers 404: nothing is wrong.
    sync.forget(replica.url, [left, "run-0123abcd-v000008", *others])
    assert list(replica.loaded) == others


def test_a_server_with_another_tokenizer_is_refused(replicas, tiny_model_dir):
    from transformers import AutoTokenizer

    from recipes.parts.config import load_config
    from recipes.parts.rollout import ServerRollout

    (replica,) = replicas(None)
    config = load_config(
        "recipes/configs/grpo-tiny-nf4-cpu.yaml", [f"--rollout.server_urls=['{replica.url}']", "--run.name=run"]
    )
    with pytest.raises(BadInput, match=r"tokenizes .* as \[1, 2, 3\]"):
        ServerRollout(config, AutoTokenizer.from_pretrained(tiny_model_dir)).check()
