"""A rollout replica without vLLM: the /v1/rollout routes, answered by a thread of the test, with faults on demand."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kit.rollout.protocol import PREFIX, PROTOCOL, decode_ids, encode_floats, encode_ids

SHIFT = 0.2  # nats a token that one adapter version is away from the one before


def log_probs(ids: list[int] | np.ndarray, version: int | None) -> np.ndarray:
    """What the model of the tests says of a sequence with adapter `version` (None and 0: the base)."""
    return (-1 - 0.01 * (np.asarray(ids)[1:] % 7) - SHIFT * (version or 0)).astype(np.float32)


class FakeReplica(ThreadingHTTPServer):
    """`staged` and `served` are versions, `calls` what was asked, in order; faults:

    `refuses[action]` = (status, text) answered instead; `before[action]` is called with the request's body, and what
    it returns that is not None is the answer, or (status, answer). `holds` is the version whose weights it really
    has, when it lies.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, **info: Any):
        super().__init__(("127.0.0.1", port), _Handler)
        self.staged: dict[tuple[str, int], dict] = {}
        self.served: tuple[str, int] | None = None
        self.calls: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.refuses: dict[str, tuple[int, str]] = {}
        self.before: dict[str, Callable[[Any], dict | tuple[int, dict] | None]] = {}
        self.holds: int | None = None
        self.asleep = False
        self.pid = 1
        self.is_down = False
        self.noise: dict | None = None
        self.seconds_per_request = 0.0
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()
        self.connections: list[socket.socket] = []
        self.info = {
            **{"protocol": PROTOCOL, "vllm": "0.31.0", "model": "models/bases/tiny", "base_hash": "ab" * 32},
            **{
                "weights": "fp8_per_channel",
                "kv_cache": "auto",
                "prefix_caching": True,
                "logprobs_mode": "processed_logprobs",
                "max_model_len": 4096,
            },
            **{"max_num_seqs": 64, "vocab_size": 316, "tokenizer_hash": "", "tensor_parallel": 1},
            **{"sync": ["remerge", "adapter"], "max_lora_rank": 16, "modules": None, "sleep_enabled": False},
            **info,
        }
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def versions(self) -> list[int]:
        return sorted(version for _, version in self.staged)

    def stop(self) -> None:
        """Gone, as a killed process is: open connections are cut too."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """Answer nothing until `come_back`, as a process that is gone and started again."""
        self.is_down = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        """Be another process: it serves the base."""
        self.staged, self.served, self.asleep, self.holds = {}, None, False, None
        self.pid += 1
        self.is_down = False

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def answer(self, action: str, body: Any, query: dict) -> tuple[int, dict]:
        if self.is_down:
            raise ConnectionResetError
        if action in self.refuses:
            status, text = self.refuses[action]
            return status, {"error": text}
        if action in self.before and (early := self.before[action](body)) is not None:
            return early if isinstance(early, tuple) else (200, early)
        return getattr(self, f"do_{action}")(body, query)

    def do_info(self, body: None, query: dict) -> tuple[int, dict]:
        served = self.served and {"way": "remerge", "session": self.served[0], "version": self.served[1]}
        return 200, {**self.info, "served": served, "asleep": self.asleep, "pid": self.pid}

    def do_stage(self, body: Any, query: dict) -> tuple[int, dict]:
        key = query["session"], int(query["version"])
        if key in self.staged:
            return 409, {"error": f"{key[0]}/{key[1]} is staged already"}
        self.staged[key] = {"body": body, **query}
        return 200, {"seconds": 0.001}

    def do_activate(self, body: dict, query: dict) -> tuple[int, dict]:
        key = body["session"], body["version"]
        if key not in self.staged:
            return 409, {"error": f"{key[0]}/{key[1]} is not staged"}
        self.served = key
        return 200, {"seconds": {"total": 0.001}}

    def do_discard(self, body: dict, query: dict) -> tuple[int, dict]:
        key = body["session"], body["version"]
        if key == self.served:
            return 409, {"error": f"{key[0]}/{key[1]} is being served"}
        self.staged.pop(key, None)
        return 200, {}

    def do_score(self, body: dict, query: dict) -> tuple[int, dict]:
        if (body["session"], body["version"]) != self.served:
            return 409, {"error": "not what is served"}
        held = self.served[1] if self.holds is None else self.holds
        scores = [encode_floats(log_probs(decode_ids(text), held)) for text in body["sequences"]]
        return 200, {"version": self.served[1], "logprobs": scores}

    def do_generate(self, body: dict, query: dict) -> tuple[int, dict]:
        if (body["session"], body["version"]) != self.served:
            return 409, {"error": "not what is served"}
        with self.lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.seconds_per_request)
        with self.lock:
            self._at_once -= 1
        return 200, {"version": self.served[1], "samples": samples(decode_ids(body["token_ids"]), body["n"])}

    def do_noise(self, body: dict, query: dict) -> tuple[int, dict]:
        self.noise = body
        return 200, {"seconds": {}}

    def do_sleep(self, body: Any, query: dict) -> tuple[int, dict]:
        self.asleep = True
        return 200, {"seconds": 0.001}

    def do_wake(self, body: Any, query: dict) -> tuple[int, dict]:
        self.asleep = False
        return 200, {"seconds": 0.001}


def samples(prompt: np.ndarray, n: int) -> list[dict]:
    """Completions that tell their prompt: its first token, then the number of the sample."""
    return [
        {
            "token_ids": encode_ids([int(prompt[0]), index]),
            "logprobs": encode_floats([-0.5, -0.25]),
            "finish_reason": "stop",
        }
        for index in range(n)
    ]


class _Handler(BaseHTTPRequestHandler):
    server: FakeReplica
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_json = self.headers.get("Content-Type") == "application/json"
        self._handle(json.loads(data) if is_json else data)

    def _handle(self, body: Any) -> None:
        parts = urlsplit(self.path)
        action = parts.path.removeprefix(f"{PREFIX}/")
        with self.server.lock:
            self.server.calls.append(action)
            self.server.bodies.append((action, body))
        try:
            status, value = self.server.answer(action, body, dict(parse_qsl(parts.query)))
        except ConnectionError:  # a fault: the connection is cut without an answer
            self.close_connection = True
            return
        data = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has given up
            self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass
