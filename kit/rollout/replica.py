"""HTTP client of one rollout replica: the /v1/rollout routes that `kit/rollout/server/endpoint.py` adds to a vLLM
server.

Token ids are sent as base64 of little-endian int32 and log-probs as base64 of little-endian float32, so that a NaN
arrives as a NaN and no number is formatted and parsed again. Needs requests and numpy, no torch and no vLLM.
"""

import base64
import binascii
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import requests
from requests.adapters import HTTPAdapter

from kit.core.errors import KitError
from kit.core.limits import VLLM_BELOW, VLLM_FROM

PROTOCOL = 1
PREFIX = "/v1/rollout"
CONNECT_TIMEOUT_S, DISCARD_TIMEOUT_S = 10.0, 15.0
# Everything but generation takes seconds; a server reports an error after waiting 120 s for its workers
# (kit/rollout/server/versions.py). Only the first stage may have to wait until the server has read its NF4 copy.
CHANGE_TIMEOUT_S, FIRST_STAGE_TIMEOUT_S = 130.0, 600.0
CONTINUE = "Then continue with --resume."


class ReplicaError(KitError):
    """A failed request to a replica.

    `status` is the HTTP status, None if no answer came; `text` is the reason; `retry` says whether the same request
    may succeed elsewhere or later: yes for no answer and 5xx, no for 4xx.
    """

    def __init__(self, url: str, action: str, text: str, status: int | None = None, retry: bool = True):
        self.url, self.action, self.text, self.status, self.retry = url, action, text, status, retry
        super().__init__(f"{url}: {action}{f' answered {status}' if status else ''}: {text}")

    @property
    def is_conflict(self) -> bool:
        """Whether the replica works, but for another trainer or on another base; `text` then includes the fix."""
        return self.status == 409


@dataclass(frozen=True)
class Sample:
    """One completion: ids (T,) int32, the sampler's log-probs (T,) float32, "stop" or "length"."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str


def encode_ids(ids: Sequence[int] | np.ndarray) -> str:
    """Token ids as base64 of little-endian int32."""
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes()).decode()


def decode_ids(text: str) -> np.ndarray:
    """(T,) int32 from `encode_ids`; ValueError for anything else."""
    return _decode(text, "<i4")


def encode_floats(values: Sequence[float] | np.ndarray) -> str:
    """Log-probs as base64 of little-endian float32; NaN and infinities survive."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def decode_floats(text: str) -> np.ndarray:
    """(T,) float32 from `encode_floats`; ValueError for anything else."""
    return _decode(text, "<f4")


def _decode(text: str, dtype: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (binascii.Error, TypeError) as error:
        raise ValueError(f"not base64: {error}") from None


def is_tested_vllm(version: str) -> bool:
    """Whether the kit was tested with this vLLM, e.g. "0.31.0" or "0.26.0+cu129"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return bool(numbers) and VLLM_FROM <= tuple(map(int, numbers.groups())) < VLLM_BELOW


def log_name(url: str) -> str:
    """File name of a replica's log: its port, and its host too if it is on another machine that may share the
    directory."""
    parts = urlsplit(url)
    machine = "" if is_loopback(parts.hostname or "") else f"-{(parts.hostname or '').replace(':', '_')}"
    return f"server{machine}-{parts.netloc.rpartition(':')[2]}.log"


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Replica:
    """Routes of one replica as methods; every failure is a `ReplicaError`. Thread-safe.

    `timeout_s` bounds the wait for one generation, and together with `CHANGE_TIMEOUT_S` that for any other answer. The
    API key is read from VLLM_API_KEY, as on the server.
    """

    def __init__(self, url: str, timeout_s: float, connections: int = 256):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.change_timeout_s = min(CHANGE_TIMEOUT_S, timeout_s)
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy variable or a .netrc must not catch the rollouts
        self._http.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._http.mount("http://", _KeepAlive(pool_maxsize=connections))
        self._http.mount("https://", _KeepAlive(pool_maxsize=connections))
        if key := os.environ.get("VLLM_API_KEY"):
            self._http.headers["Authorization"] = f"Bearer {key}"

    def close(self) -> None:
        """Close idle connections; the next request opens new ones. The server closes them too after a few seconds, and
        a request sent at that moment would be lost."""
        self._http.close()

    def info(self, timeout_s: float | None = None) -> dict:
        """Return what the replica holds, serves and supports."""
        return self._ask("GET", "info", timeout_s=timeout_s)

    def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: list[int],
        session: str | None,
        version: int | None,
    ) -> tuple[int | None, list[Sample]]:
        """Return the version that sampled, and `n` completions of one prompt in index order."""
        sampling = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        body = {"request_id": request_id, "token_ids": encode_ids(token_ids), **sampling}
        body |= {"stop_token_ids": stop_token_ids, "session": session, "version": version}
        answer = self._ask("POST", "generate", body=body)
        try:
            samples = [
                Sample(decode_ids(row["token_ids"]), decode_floats(row["logprobs"]), str(row["finish_reason"]))
                for row in answer["samples"]
            ]
            return answer["version"], samples
        except (KeyError, TypeError, ValueError) as error:
            raise self._not_understood("generate", error) from None

    def score(self, sequences: list[Sequence[int]], session: str | None, version: int | None) -> list[np.ndarray]:
        """Return the log-prob of every token after the first, at temperature 1: float32 (len - 1,) per sequence.

        With session and version None, score the base.
        """
        body = {"sequences": [encode_ids(ids) for ids in sequences], "session": session, "version": version}
        answer = self._ask("POST", "score", body=body, timeout_s=self.change_timeout_s)
        try:
            scores = [decode_floats(text) for text in answer["logprobs"]]
            if answer["version"] != version or [len(one) for one in scores] != [len(ids) - 1 for ids in sequences]:
                raise ValueError(f"version {answer['version']!r} or the lengths are not those asked for")
            return scores
        except (KeyError, TypeError, ValueError) as error:
            raise self._not_understood("score", error) from None

    def stage(
        self,
        *,
        way: str,
        run: str,
        session: str,
        version: int,
        base_hash: str,
        path: Path | None = None,
        body: bytes | None = None,
        is_first: bool = False,
    ) -> float:
        """Load an adapter version without serving it, from a directory both sides see or from the file's bytes; return
        the replica's seconds. The first of a session may take up to `FIRST_STAGE_TIMEOUT_S`."""
        where = {"way": way, "run": run, "session": session, "version": version, "base_hash": base_hash}
        limit = min(FIRST_STAGE_TIMEOUT_S, self.timeout_s) if is_first else self.change_timeout_s
        what = {"body": {"path": str(Path(path).resolve())}} if body is None else {"data": body}
        answer = self._ask("POST", "stage", params=where, timeout_s=limit, **what)
        return answer.get("seconds", 0.0)

    def activate(self, session: str, version: int) -> dict:
        """Serve a staged version; return the replica's seconds by part."""
        body = {"session": session, "version": version}
        return self._ask("POST", "activate", body=body, timeout_s=self.change_timeout_s).get("seconds", {})

    def discard(self, session: str, version: int) -> None:
        """Discard a staged version; a no-op if it is not staged."""
        body = {"session": session, "version": version}
        # Short: the end of a run waits for it, even if the replica hangs.
        self._ask("POST", "discard", body=body, timeout_s=min(DISCARD_TIMEOUT_S, self.timeout_s))

    def noise(self, session: str, version: int, sigma: float, seed: int) -> dict:
        """Add noise to the norms of the served version until another is activated; return the replica's seconds by
        part."""
        body = {"session": session, "version": version, "sigma": sigma, "seed": seed}
        return self._ask("POST", "noise", body=body, timeout_s=self.change_timeout_s).get("seconds", {})

    def sleep(self) -> float:
        """Release the GPU memory until `wake`; return the seconds it took."""
        return self._ask("POST", "sleep", timeout_s=self.change_timeout_s).get("seconds", 0.0)

    def wake(self) -> float:
        """Restore weights and KV cache; return the seconds it took."""
        return self._ask("POST", "wake", timeout_s=self.change_timeout_s).get("seconds", 0.0)

    def _ask(
        self,
        method: str,
        action: str,
        body: dict | None = None,
        data: bytes | None = None,
        params: dict | None = None,
        timeout_s: float | None = None,
    ) -> dict:
        limit = timeout_s or self.timeout_s
        headers = {"Content-Type": "application/octet-stream"} if data is not None else None
        try:
            response = self._http.request(
                method,
                f"{self.url}{PREFIX}/{action}",
                params=params,
                json=body,
                data=data,
                headers=headers,
                timeout=(min(CONNECT_TIMEOUT_S, limit), limit),
                allow_redirects=False,
            )
        except requests.Timeout:
            raise ReplicaError(self.url, action, f"no answer within {limit:g} s") from None
        except requests.RequestException as error:
            raise ReplicaError(self.url, action, _reason(error)) from None
        if response.status_code != 200:
            text, status = _error_text(response), response.status_code
            raise ReplicaError(self.url, action, text, status, retry=status >= 500)
        try:
            answer = response.json()
        except ValueError as error:
            raise self._not_understood(action, error) from None
        if not isinstance(answer, dict):
            raise self._not_understood(action, ValueError(f"{answer!r:.60} is not an object"))
        return answer

    def _not_understood(self, action: str, error: Exception) -> ReplicaError:
        reason = f"the answer is not of protocol {PROTOCOL}: {type(error).__name__}: {error}"
        return ReplicaError(self.url, action, reason[:300], retry=False)


class _KeepAlive(HTTPAdapter):
    """Connections that detect a dead peer within half a minute: a generation waits without traffic."""

    def init_poolmanager(self, *arguments: Any, **kwargs: Any) -> None:
        options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        super().init_poolmanager(*arguments, **kwargs, socket_options=options)


def _reason(error: Exception) -> str:
    """Innermost cause of an error: requests wraps urllib3, which wraps the socket's own error."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"[:300]


def _error_text(response: requests.Response) -> str:
    try:
        answer = response.json()
        text = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = text.get("message", text) if isinstance(text, dict) else text
    except ValueError:
        text = response.text
    return str(text).strip()[:600] or "no reason given"
