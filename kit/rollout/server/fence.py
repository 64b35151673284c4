"""What stands before every route of a rollout server, vLLM's own included.

- Only the routes of `OWN` and /v1/rollout answer: whatever else vLLM was started with, such as the development routes
  that `trl vllm-serve` turns on (/collective_rpc, /update_weights, /sleep, /v1/load_lora_adapter), is not there.
- With a key every route needs it, except /health and /ping. Without one, requests of a browser's page are refused.
- A body has a size and a time, a connection a time to send a request's head, and connections a number.

Written for uvicorn 0.3x to 0.54, which has no limit of its own on heads and idle connections. Imports no vLLM.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from kit.rollout.protocol import BINARY, PREFIX
from kit.rollout.server.versions import Failure

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

WITHOUT_KEY = ("/health", "/ping")
OWN = frozenset(WITHOUT_KEY) | {"/version", "/metrics", "/load", "/tokenize", "/detokenize"}
OWN |= {"/v1/models", "/v1/completions", "/v1/chat/completions"}
STAGE = f"{PREFIX}/stage"
MAX_BODY_BYTES = 32 << 20  # 16 sequences of 128k tokens take 11 MB; an adapter's own limit is in endpoint.py
MAX_HEAD_BYTES = 256 << 10
MAX_CONNECTIONS = 4096  # a trainer has rollout.max_in_flight (256) of them
BODY_S = 120.0  # a client waits 130 s for a change (kit/rollout/replica.py)
HEAD_S = 10.0  # also the longest silence between two requests of a connection
logger = logging.getLogger("vllm.rollout")


class Fence:
    """ASGI application that answers what is not allowed itself, and hands the rest to `app`."""

    def __init__(self, app: "ASGIApp"):
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            bound_connections(scope["app"])
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        elif refusal := refused(scope, keys(scope["app"])):
            await answer(send, *refusal)
            return
        else:
            receive = Body(scope, receive)
        await self.app(scope, receive, send)


class Body:
    """`receive` of a request whose body is bounded in size and time; `Failure` where it is not."""

    def __init__(self, scope: "Scope", receive: "Receive"):
        headers = dict(scope["headers"])
        is_adapter = scope["path"] == STAGE and headers.get(b"content-type", b"").startswith(BINARY.encode())
        self.limit = None if is_adapter else MAX_BODY_BYTES
        self.receive, self.deadline = receive, time.monotonic() + BODY_S
        self.size, self.is_whole = 0, False
        self.announced = int(headers.get(b"content-length", b"0"))

    async def __call__(self) -> "Message":
        if self.is_whole:  # waits until the client hangs up
            return await self.receive()
        if self.limit is not None and self.announced > self.limit:
            raise self._too_large()
        try:
            message = await asyncio.wait_for(self.receive(), max(0.0, self.deadline - time.monotonic()))
        except TimeoutError:
            raise Failure(408, f"the body was not here within {BODY_S:g} s.") from None
        self.size += len(message.get("body", b""))
        self.is_whole = not message.get("more_body", False)
        if self.limit is not None and self.size > self.limit:
            raise self._too_large()
        return message

    def _too_large(self) -> Failure:
        return Failure(413, f"the body has more than {MAX_BODY_BYTES >> 20} MiB.")


def refused(scope: "Scope", known: list[bytes]) -> tuple[int, str] | None:
    """(status, sentence) for a request that no route may answer; None if one may."""
    path, headers = scope["path"], dict(scope["headers"])
    if path not in OWN and not path.startswith((f"{PREFIX}/", "/metrics/")):
        return 404, f"a rollout server has no route {path!r:.100}: development routes of vLLM are off."
    if known and path not in WITHOUT_KEY and not is_known(headers.get(b"authorization", b""), known):
        return 401, "the API key is missing or another. Set VLLM_API_KEY to the one that the server was started with."
    if not known and (b"origin" in headers or not is_local(headers.get(b"host", b""))):
        return 403, "a server without a key answers no web page. Ask it by its address, or start it with VLLM_API_KEY."
    if not headers.get(b"content-length", b"0").isdigit():
        return 400, "content-length is not a number."
    return None


def keys(app: "FastAPI") -> list[bytes]:
    """Hashes of the keys that this server takes: those of --api-key, else the one of VLLM_API_KEY."""
    given = getattr(getattr(app.state, "args", None), "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return [hashlib.sha256(key.encode()).digest() for key in ([given] if isinstance(given, str) else given) if key]


def is_known(authorization: bytes, known: list[bytes]) -> bool:
    """Whether a header holds one of the keys; takes as long for a wrong one whatever they have in common."""
    scheme, _, key = authorization.partition(b" ")
    found = hashlib.sha256(key).digest()
    return scheme.lower() == b"bearer" and any([hmac.compare_digest(found, one) for one in known])


def is_local(host: bytes) -> bool:
    """Whether a Host header is an address or localhost, as a client of the kit sends it, and no name that someone's
    DNS points here."""
    name = host.decode("latin-1").rpartition(":")[0] if host.count(b":") == 1 else host.decode("latin-1")
    name = name[1 : name.rfind("]")] if name.startswith("[") else name
    try:
        return name in ("", "localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


async def answer(send: "Send", status: int, text: str) -> None:
    """Send {"error": text} and close the connection."""
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def bound_connections(app: "FastAPI") -> None:
    """Bound the connections of the uvicorn server in `app.state`, before it accepts the first."""
    server = getattr(app.state, "server", None)
    if server is None:
        logger.warning("rollout: vLLM's server is not in app.state, so the number of connections has no limit here")
        return
    server.config.http_protocol_class = bounded(server.config.http_protocol_class)


def bounded(protocol: Any) -> Any:
    """uvicorn's protocol of a connection with limits: `MAX_CONNECTIONS`, and for the head of a request `HEAD_S` and
    `MAX_HEAD_BYTES`."""

    class Bounded(protocol):
        head_bytes = 0
        idle_cycle: Any = None  # the last request, if it was already answered at the last look

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.idle_cycle = self
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
            else:
                asyncio.get_running_loop().call_later(HEAD_S, self._look)

        def data_received(self, data: bytes) -> None:
            self.head_bytes = self.head_bytes + len(data) if self._is_idle() else 0
            if self.head_bytes > MAX_HEAD_BYTES + (64 << 10):  # what comes with a head may be the start of its body
                self.transport.abort()
                return
            super().data_received(data)
            self.head_bytes = self.head_bytes if self._is_idle() else 0

        def _is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _look(self) -> None:
            if self.transport.is_closing():
                return
            if self._is_idle() and self.idle_cycle in (self, self.cycle):
                self.transport.abort()
                return
            self.idle_cycle = self.cycle if self._is_idle() else None
            asyncio.get_running_loop().call_later(HEAD_S, self._look)

    return Bounded
