"""A rollout server behind a network with faults on demand: a proxy that starts the server and passes requests on.

Started in the place of vLLM (bench/soak_start), with vLLM's flags. `SOAK_FOLDER` is a directory for both sides:
`network.json` asks for the next fault, `network.log` gets a line for each request that had one, `server.pid` names the
server's process. `SOAK_SERVER` is the server: `vllm`, or
`numpy` for bench/soak_replica.py.

A fault is {"id", "kind", "action", "times"}: the next `times` requests of that action (a route of /v1/rollout) get

- `error`: status 500, without reaching the server
- `short`: the status and length of the server's answer, half of its bytes, then the end of the connection
- `few`: one sample less than was asked for; `version`: another version than was asked for (generate only)
- `slow`: the answer after `SLOW_S`
- `cut`: a reset of the connection once the server has answered
- `lost`: a reset at once, of every request for `LOST_S` from the first one on
"""

import contextlib
import ctypes
import http.client
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kit.rollout.protocol import PREFIX
from tests.processes import free_port

SLOW_S, LOST_S = 4.0, 6.0
PASS_ON = ("Content-Type", "Authorization")
PR_SET_PDEATHSIG = 1


class Faults:
    """The fault that `network.json` asks for, until `network.log` has it `times` times: this process may be started
    again because of it."""

    def __init__(self, file: Path):
        self.file, self.log, self.lock = file, file.with_name("network.log"), threading.Lock()
        self.lost_until = 0.0

    def next(self, action: str) -> str:
        """Kind of the fault that a request is to have; empty for none."""
        with self.lock:
            if time.monotonic() < self.lost_until:
                return "lost"
            try:
                fault = json.loads(self.file.read_text())
            except FileNotFoundError:
                return ""
            had = [line for line in lines_of(self.log) if line.startswith(f"{fault['id']} ")]
            if fault["action"] != action or len(had) >= fault["times"]:
                return ""
            with open(self.log, "a") as log:
                log.write(f"{fault['id']} {fault['kind']} {action}\n")
            if fault["kind"] == "lost":
                self.lost_until = time.monotonic() + LOST_S
            return fault["kind"]


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, server_port: int, faults: Faults):
        super().__init__((host, port), _Handler)
        self.server_port_behind, self.faults = server_port, faults

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # without the FIN that would come before a reset


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def _handle(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kind = self.server.faults.next(urlsplit(self.path).path.removeprefix(f"{PREFIX}/"))
        if kind == "lost":
            return self._reset()
        if kind == "error":
            return self._send(500, b'{"error": "a fault of the soak"}')
        if kind == "slow":
            time.sleep(SLOW_S)
        try:
            status, answer = self._ask(method, body)
        except (OSError, http.client.HTTPException):  # the server is gone, and with it its connections
            return self._reset()
        if kind == "cut":
            return self._reset()
        if kind in ("few", "version") and status == 200:
            answer = altered(kind, answer)
        self._send(status, answer, len(answer) // 2 if kind == "short" else len(answer))

    def _ask(self, method: str, body: bytes) -> tuple[int, bytes]:
        headers = {name: value for name in PASS_ON if (value := self.headers.get(name))}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.server.server_port_behind)) as behind:
            behind.request(method, self.path, body, headers)
            response = behind.getresponse()
            return response.status, response.read()

    def _send(self, status: int, answer: bytes, sent: int | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[:sent])
        except OSError:  # the client has given up
            self.close_connection = True
        if sent is not None and sent < len(answer):
            self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


def altered(kind: str, answer: bytes) -> bytes:
    """An answer of generate with one sample less, or of another version."""
    found = json.loads(answer)
    if "samples" in found:
        found = found | ({"samples": found["samples"][1:]} if kind == "few" else {"version": -7})
    return json.dumps(found).encode()


def server_command(words: list[str], port: int) -> list[str]:
    """The server's own command on another port, from vLLM's flags."""
    flags = dict(itertools.pairwise(words))
    if os.environ["SOAK_SERVER"] == "numpy":
        return [sys.executable, "-m", "bench.soak_replica", "--base", flags["--model"], "--port", str(port)]
    changed = [str(port) if before == "--port" else word for before, word in zip(["", *words], words, strict=False)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *changed]


def main() -> int:
    words, folder = sys.argv[1:], Path(os.environ["SOAK_FOLDER"])
    flags, behind = dict(itertools.pairwise(words)), free_port()
    parent = os.getpid()

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    server = subprocess.Popen(
        server_command(words, behind), env=os.environ | {"SOAK_BEHIND": "1"}, preexec_fn=end_with_parent
    )
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    (folder / "server.pid").write_text(str(server.pid))
    proxy = Proxy(flags["--host"], int(flags["--port"]), behind, Faults(folder / "network.json"))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
