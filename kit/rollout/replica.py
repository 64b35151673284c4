"""HTTP client of rollout replicas: the routes of `protocol.py`, asked of one replica or of all at once.

Needs requests and numpy, no torch and no vLLM.
"""

import ipaddress
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast
from urllib.parse import urlsplit

import numpy as np
import requests
from requests.adapters import HTTPAdapter

from kit.core.errors import KitError
from kit.core.limits import VLLM_BELOW, VLLM_FROM
from kit.rollout.protocol import (
    BINARY,
    PREFIX,
    PROTOCOL,
    ROUTES,
    Info,
    Sampling,
    decode_experts,
    decode_floats,
    decode_ids,
    encode_ids,
)

CONNECT_TIMEOUT_S, DISCARD_TIMEOUT_S = 10.0, 15.0
# Everything but generation takes seconds; a server reports an error after waiting 120 s for its workers
# (kit/rollout/server/versions.py). Only the first stage may have to wait until the server has read its NF4 copy.
CHANGE_TIMEOUT_S, FIRST_STAGE_TIMEOUT_S = 130.0, 600.0
PROBE_EVERY_S, PROBE_TIMEOUT_S, PROBES = 5.0, 10.0, 2  # a hanging replica is given up on after at most 30 s
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

    @property
    def is_refusal(self) -> bool:
        """Whether the replica works and refuses this request."""
        return self.status is not None and self.status < 500


class Hangs(ReplicaError):
    """No answer within the request's limit, or to any request: the process or its engine stands still."""


@dataclass(frozen=True)
class Sample:
    """One completion: ids (C,) int32, the sampler's log-probs (C,) float32, "stop" or "length"; with `routing`, the
    experts (T, L, k) int16 that the T tokens of prompt and completion, without its last, took in L layers."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str
    experts: np.ndarray | None = None


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

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.change_timeout_s = min(CHANGE_TIMEOUT_S, timeout_s)
        self._key = os.environ.get("VLLM_API_KEY")
        self._http = self._session()

    def _session(self) -> requests.Session:
        http = requests.Session()
        http.trust_env = False  # a proxy variable or a .netrc must not catch the rollouts
        http.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        http.mount("http://", _KeepAlive())
        http.mount("https://", _KeepAlive())
        if self._key:
            http.headers["Authorization"] = f"Bearer {self._key}"
        return http

    def close(self) -> None:
        """Close idle connections; the next request opens new ones. The server closes them too after a few seconds, and
        a request sent at that moment would be lost."""
        self._http.close()

    def info(self, timeout_s: float | None = None) -> Info:
        """Return what the replica holds, serves and supports."""
        return cast(Info, self._ask("info", timeout_s=timeout_s))

    def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        stop_token_ids: list[int],
        session: str | None,
        version: int | None,
        stop: Sequence[str] = (),
        routing: bool = False,
        **sampling: Unpack[Sampling],
    ) -> tuple[int | None, list[Sample]]:
        """Return the version that sampled, and `n` completions of one prompt in index order; with `routing`, the
        experts that they took, too."""
        body = {"request_id": request_id, "token_ids": encode_ids(token_ids), **sampling}
        body |= {"stop_token_ids": stop_token_ids, "session": session, "version": version}
        body |= {"stop": [*stop]} if stop else {}
        body |= {"routing": True} if routing else {}
        # On a connection of its own: an episode's turns may be as far apart as the server's limit on idle ones, which
        # would be closed just as a request is sent.
        with self._session() as http:
            answer = self._ask("generate", body=body, http=http)
        try:
            samples = [
                Sample(
                    decode_ids(row["token_ids"]),
                    decode_floats(row["logprobs"]),
                    str(row["finish_reason"]),
                    decode_experts(row["experts"]) if routing and row.get("experts") else None,
                )
                for row in answer["samples"]
            ]
            return answer["version"], samples
        except (KeyError, TypeError, ValueError) as error:
            raise self._not_understood("generate", error) from None

    def score(self, sequences: Sequence[Sequence[int]], session: str | None, version: int | None) -> list[np.ndarray]:
        """Return the log-prob of every token after the first, at temperature 1: float32 (len - 1,) per sequence.

        With session and version None, score the base.
        """
        body = {"sequences": [encode_ids(ids) for ids in sequences], "session": session, "version": version}
        answer = self._ask("score", body=body, timeout_s=self.change_timeout_s)
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
        answer = self._ask("stage", params=where, timeout_s=limit, **what)
        return answer.get("seconds", 0.0)

    def activate(self, session: str, version: int) -> dict:
        """Serve a staged version; return the replica's seconds by part."""
        body = {"session": session, "version": version}
        return self._ask("activate", body=body, timeout_s=self.change_timeout_s).get("seconds", {})

    def discard(self, session: str, version: int) -> None:
        """Discard a staged version; a no-op if it is not staged."""
        body = {"session": session, "version": version}
        # Short: the end of a run waits for it, even if the replica hangs.
        self._ask("discard", body=body, timeout_s=min(DISCARD_TIMEOUT_S, self.timeout_s))

    def noise(self, session: str, version: int, sigma: float, seed: int) -> dict:
        """Add noise to the norms of the served version until another is activated; return the replica's seconds by
        part."""
        body = {"session": session, "version": version, "sigma": sigma, "seed": seed}
        return self._ask("noise", body=body, timeout_s=self.change_timeout_s).get("seconds", {})

    def sleep(self) -> float:
        """Release the GPU memory until `wake`; return the seconds it took."""
        return self._ask("sleep", timeout_s=self.change_timeout_s).get("seconds", 0.0)

    def wake(self) -> float:
        """Restore weights and KV cache; return the seconds it took."""
        return self._ask("wake", timeout_s=self.change_timeout_s).get("seconds", 0.0)

    def share(self) -> Path:
        """File on the replica's machine that says where its base lies in memory, for `server.share_base`."""
        answer = self._ask("share", body={}, timeout_s=self.change_timeout_s)
        if not isinstance(path := answer.get("path"), str):
            raise self._not_understood("share", ValueError(f"path is {path!r:.60}"))
        return Path(path)

    def _ask(
        self,
        action: str,
        body: dict | None = None,
        data: bytes | None = None,
        params: dict | None = None,
        timeout_s: float | None = None,
        http: requests.Session | None = None,
    ) -> dict:
        limit = timeout_s or self.timeout_s
        headers = {"Content-Type": BINARY} if data is not None else None
        try:
            response = (http or self._http).request(
                ROUTES[action],
                f"{self.url}{PREFIX}/{action}",
                params=params,
                json=body,
                data=data,
                headers=headers,
                timeout=(min(CONNECT_TIMEOUT_S, limit), limit),
                allow_redirects=False,
            )
        except requests.Timeout:
            raise Hangs(self.url, action, f"no answer within {limit:g} s") from None
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


def silences(
    replica: Replica, action: str, has_work: Callable[[], bool], finished: threading.Event
) -> Iterator[ReplicaError]:
    """Yield an error whenever a replica that has work answers nothing at all, until `finished`: its process hangs, its
    connections stay open."""
    silent = 0
    while not finished.wait(PROBE_EVERY_S):
        error = None
        if has_work():
            try:
                replica.info(timeout_s=PROBE_TIMEOUT_S)
            except ReplicaError as found:
                error = found if found.status is None else None
        silent = silent + 1 if error else 0
        if silent >= PROBES:
            text = f"it takes requests and answers none, not even {error.action}: {error.text}"
            yield Hangs(replica.url, action, text)


def ask_all(
    replicas: list[Replica], call: Callable[[Replica], Any], probe: str | None = None
) -> tuple[dict[str, Any], dict[str, ReplicaError]]:
    """Send one request to every replica at once; return the answers by URL and the failures by URL.

    With `probe`, the name of the request, a hanging replica is given up on as in `silences`; without, the request's
    own timeout applies.
    """
    results: queue.SimpleQueue = queue.SimpleQueue()
    finished = {replica.url: threading.Event() for replica in replicas}

    def request(replica: Replica) -> None:
        try:
            results.put((replica.url, True, call(replica)))
        except Exception as error:
            results.put((replica.url, False, error))

    def watch(replica: Replica) -> None:
        for error in silences(replica, probe, lambda: True, finished[replica.url]):
            results.put((replica.url, False, error))
            return

    for replica in replicas:
        for work in (request, watch) if probe else (request,):
            # Not a pool: it would wait for a hanging request.
            threading.Thread(target=work, args=(replica,), daemon=True).start()
    outcomes: dict[str, tuple[bool, Any]] = {}
    while len(outcomes) < len(finished):
        url, is_answer, outcome = results.get()
        finished[url].set()
        outcomes.setdefault(url, (is_answer, outcome))
    failed = {url: outcomes[url][1] for url in finished if not outcomes[url][0]}
    for error in failed.values():
        if not isinstance(error, ReplicaError):
            raise error
    return {url: outcomes[url][1] for url in finished if outcomes[url][0]}, failed


class _KeepAlive(HTTPAdapter):
    """Connections that detect a dead peer within half a minute: a generation waits without traffic."""

    def init_poolmanager(self, *arguments: Any, **kwargs: Any) -> None:
        options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        super().init_poolmanager(*arguments, **kwargs, socket_options=options)


def _reason(error: BaseException) -> str:
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
