"""A judge: another model behind an OpenAI-compatible /v1/chat/completions scores each completion.

The request is one user message, made from `prompt_file`: `{question}`, `{completion}`, `{gold}` and `{column}` for any
column of the data are replaced, `{{x}}` stands for a literal `{x}`. The score is the last match of `pattern` in the
reply, or the entry `json_key` of its last JSON object, and is mapped from `scale` to 0..1.

A completion without a score is None, never 0: its request failed, was late, or the reply holds no score within the
scale. `UnknownBudget` counts them by reason. The API key is read from the environment variable `api_key_env`, and no
message contains it.
"""

import asyncio
import hashlib
import json
import math
import os
import re
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from kit.core.errors import BadInput, did_you_mean
from kit.core.file_kinds import JUDGED
from kit.core.progress import beat
from kit.core.run_files import read_object
from reward.answer import message_text
from reward.pool import Verdict
from reward.score import Budget, Messages, Pool, Prompts, Rewards

if TYPE_CHECKING:
    import httpx

    from kit.core.config.schema import Config

KEY = "reward.options.llm_judge"
SCORE = r"(?i)\bscore(?:\s+is)?[\s:=*_]{0,6}(-?\d+(?:\.\d+)?)"
PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
BUILT_IN = ("question", "completion", "gold")  # gold is a column that every run has
PATH = "/chat/completions"
BACKOFF_S, MOST_BACKOFF_S = 0.5, 8.0  # doubled at each retry
PROBE_TIMEOUT_S = 30.0
MAX_REPLY_BYTES = 8 << 20
MAX_JSON_CHARS = 16_384  # at the end of a reply, where its JSON object is looked for
OFTEN = (408, 429, 500, 502, 503, 504)  # HTTP statuses that a retry may cure


async def llm_judge(
    prompts: Prompts,
    completions: Messages,
    *,
    url: str,
    model: str,
    prompt_file: str,
    pattern: str | None = None,
    json_key: str | None = None,
    scale: list[float] | None = None,
    temperature: float = 0.0,
    max_tokens: int = 512,
    body: dict[str, Any] | None = None,
    concurrency: int = 16,
    timeout_s: float = 60.0,
    retries: int = 2,
    cache: str | None = "judge",
    api_key_env: str | None = None,
    pool: Pool = None,
    budget: Budget = None,
    **columns: Any,
) -> Rewards:
    """The judge's score of every completion, mapped from `scale` to 0..1, or None.

    `timeout_s` limits one request; a late one is not repeated, one that the server refuses is, up to `retries` times.
    Equal requests of a call are sent once. With temperature 0 and a `cache`, a resumed run gets the scores of the
    uninterrupted one.
    """
    import httpx

    template = _template(prompt_file)
    key = _key(api_key_env)
    settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(body or {})}
    requests = []
    for index, completion in enumerate(completions):
        known = {name: values[index] for name, values in columns.items() if isinstance(values, list)}
        known |= {"question": _question(prompts[index] if prompts else None), "completion": message_text(completion)}
        requests.append({**settings, "messages": [{"role": "user", "content": filled(template, known)}]})
    names = [_name(request) for request in requests]
    distinct = dict(zip(names, requests, strict=True))
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits) as client:

        async def ask(name: str, request: dict) -> tuple[str | None, str]:
            file = Path(cache) / name[:2] / f"{name}.json" if cache else None
            if file and (reply := await asyncio.to_thread(_cached, file)) is not None:
                return reply, ""
            async with slots:
                reply, reason = await _reply(client, endpoint(url), request, key, timeout_s, retries)
            if file and reply is not None:
                await asyncio.to_thread(_keep, file, reply)
            return reply, reason

        replies = dict(zip(distinct, await asyncio.gather(*(ask(*one) for one in distinct.items())), strict=True))
    low, high = scale or (0.0, 1.0)
    rewards, verdicts, examples = [], [], []
    for name in names:
        reply, reason = replies[name]
        score, reason = (None, reason) if reply is None else scored(reply, pattern, json_key, low, high)
        rewards.append(score)
        verdicts.append(Verdict(None if score is None else True, reason))
        examples.append(f"reply {(reply or '')[-200:]!r}")
    if budget is not None:
        budget.record(verdicts, examples)
    return rewards


def endpoint(url: str) -> str:
    """The address of chat completions for `url`: a server, its /v1, or the whole address."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(PATH) else f"{path or '/v1'}{PATH}").geturl()


def filled(template: str, known: dict[str, Any]) -> str:
    """The template with `{name}` replaced once by the value of that name.

    Anything but text is written as JSON, and half of a surrogate pair, which no request can carry, as `?`.
    """

    def value(found: re.Match) -> str:
        if found[1] is not None:
            return f"{{{found[1]}}}"
        one = known.get(found[2], "")
        return one if isinstance(one, str) else json.dumps(one, ensure_ascii=False, default=str)

    return PLACE.sub(value, template).encode(errors="replace").decode()


def scored(reply: str, pattern: str | None, json_key: str | None, low: float, high: float) -> tuple[float | None, str]:
    """(score of a reply in 0..1, "judged"), or None and why: "unparseable" or "off the scale"."""
    if json_key is not None:
        found = _last_entry(reply, json_key)
    else:
        *_, match = [None, *re.finditer(pattern or SCORE, reply)]
        found = match[1] if match else None
    try:
        value = float(found)  # true and false are 1 and 0
    except (TypeError, ValueError, OverflowError):
        return None, "unparseable"
    if not low <= value <= high:  # false for NaN
        return None, "off the scale"
    return (value - low) / (high - low), "judged"


def _last_entry(reply: str, key: str) -> Any:
    """The value of `key` in the last JSON object of a text that has it at its top level; None if there is none."""
    reply = reply[-MAX_JSON_CHARS:]
    decoder, found, start = json.JSONDecoder(), None, reply.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            found = value[key] if key in value else found
        start = reply.find("{", end)
    return found


@lru_cache
def _template(prompt_file: str) -> str:
    """The text of the file, read once: a run's requests do not change while it trains."""
    return Path(prompt_file).read_text(encoding="utf-8")


def _question(prompt: str | list[dict] | None) -> str:
    """A prompt without its system message; several messages are each headed by their role."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    asked = [message for message in prompt if message["role"] not in ("system", "developer")]
    if len(asked) == 1:
        return message_text(asked)
    return "\n\n".join(f"{message['role']}: {message_text([message])}" for message in asked)


async def _reply(
    client: "httpx.AsyncClient", address: str, request: dict, key: str | None, timeout_s: float, retries: int
) -> tuple[str | None, str]:
    """(text of the judge's reply, ""), or None and the reason."""
    import httpx

    reason = ""
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MOST_BACKOFF_S))
        try:
            # httpx's limit is for each read, and a server may send a byte now and then.
            async with asyncio.timeout(timeout_s):
                status, body = await _answer(client, address, request, key)
        except (TimeoutError, httpx.TimeoutException):
            return None, "late"
        except (httpx.HTTPError, OSError):
            reason = "no connection"
            continue
        beat()
        if status == 200:
            return _content(body)
        reason = f"HTTP {status}"
        if status not in OFTEN:
            break
    return None, reason


async def _answer(client: "httpx.AsyncClient", address: str, request: dict, key: str | None) -> tuple[int, bytes]:
    """Status and body of the answer; of a body above `MAX_REPLY_BYTES` nothing."""
    headers = _headers(key) | {"Accept-Encoding": "identity"}
    async with client.stream("POST", address, json=request, headers=headers, follow_redirects=False) as response:
        if response.headers.get("Content-Encoding", "identity") != "identity":  # a little may unpack to a lot
            return response.status_code, b""
        body = b""
        async for part in response.aiter_raw():
            body += part
            if len(body) > MAX_REPLY_BYTES:
                return response.status_code, b""
        return response.status_code, body


def _content(body: bytes) -> tuple[str | None, str]:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None, "no reply"
    return (content, "") if isinstance(content, str) and content else (None, "no reply")


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _key(variable: str | None) -> str | None:
    return os.environ.get(variable, "").strip() if variable else None


def _name(request: dict) -> str:
    """Name of a request in the cache; the server's address is not part of it."""
    text = json.dumps(request, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _cached(file: Path) -> str | None:
    try:
        return read_object(file, JUDGED)["reply"]
    except BadInput:
        return None  # absent, or damaged: asked again


def _keep(file: Path, reply: str) -> None:
    """Write a reply under a temporary name and rename it: several processes may keep the same one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"reply": reply}), encoding="utf-8")
    os.replace(temporary, file)


def check_options(
    url: str,
    prompt_file: str,
    pattern: str | None,
    json_key: str | None,
    scale: list[float] | None,
    max_tokens: int,
    body: dict[str, Any] | None,
    concurrency: int,
    timeout_s: float,
    retries: int,
    api_key_env: str | None,
    **_: Any,
) -> None:
    """Raise `ValueError` for options that no judge can be asked with."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url is {url.rpartition('@')[2]!r}. Write e.g. http://localhost:8000/v1.")
    if parts.username or parts.password:
        raise ValueError("url holds a user name or a password, which config.json would show. Use api_key_env.")
    if any(re.search("key|token|secret|sig", name, re.IGNORECASE) for name, _ in parse_qsl(parts.query)):
        raise ValueError("url seems to hold a key, which config.json would show. Use api_key_env.")
    if pattern is not None and json_key is not None:
        raise ValueError("pattern and json_key are both set. The score is read by one of them.")
    try:
        has_group = pattern is None or re.compile(pattern).groups > 0
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from None
    if not has_group:
        raise ValueError(f"pattern {pattern!r} has no group. Put the score into parentheses.")
    if scale is not None and (len(scale) != 2 or not all(map(math.isfinite, scale)) or scale[0] >= scale[1]):
        raise ValueError(f"scale is {scale}; it must be the lowest and the highest score, e.g. [1, 10].")
    for name, value in (("max_tokens", max_tokens), ("concurrency", concurrency)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1.")
    if not 0 < timeout_s < math.inf or retries < 0:
        raise ValueError(f"timeout_s ({timeout_s}) must be above 0 and retries ({retries}) at least 0.")
    if body and "messages" in body:
        raise ValueError("body names messages. Write them into prompt_file.")
    if api_key_env is not None and not (key := _key(api_key_env)):
        raise ValueError(f"api_key_env names {api_key_env}, which is not set in the environment.")
    if api_key_env is not None and not (key.isascii() and key.isprintable()):
        raise ValueError(
            f"api_key_env names {api_key_env}, whose value has a character that no HTTP header can carry."
        )
    try:
        template = Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompt_file cannot be read: {error}.") from None
    if "completion" not in places(template):
        raise ValueError(
            f"prompt_file {prompt_file} has no {{completion}}, so the judge would not see what it scores."
        )


def places(template: str) -> list[str]:
    """Names that a template has in single braces."""
    return [found[2] for found in PLACE.finditer(template) if found[2] is not None]


def check_run(config: "Config", columns: Collection[str], *, prompt_file: str, **_: Any) -> None:
    """Raise `BadInput` if the template names what is no column of the run's data."""
    known = [*BUILT_IN, *columns]
    for name in places(Path(prompt_file).read_text(encoding="utf-8")):
        if name not in known:
            raise BadInput(
                f"{KEY}.prompt_file {prompt_file} names {{{name}}}.{did_you_mean(name, known)} There are "
                f"{', '.join(known)}. Write {{{{{name}}}}} for the text {{{name}}}."
            )


def start(*, url: str, model: str, body: dict[str, Any] | None = None, **options: Any) -> None:
    """Ask the judge for one token; `BadInput` if it does not answer."""
    import httpx

    key, address = _key(options.get("api_key_env")), endpoint(url)
    request = {"model": model, "temperature": options.get("temperature", 0.0), "max_tokens": 1, **(body or {})}
    request["messages"] = [{"role": "user", "content": "2 + 40?"}]

    async def probe() -> tuple[int, str]:
        async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S) as client, asyncio.timeout(PROBE_TIMEOUT_S):
            status, body = await _answer(client, address, request, key)
        return status, body.decode(errors="replace")

    try:
        status, text = asyncio.run(probe())
        problem = "" if status == 200 else f"HTTP {status}: {text[:300]}"
        if not problem and "choices" not in text:
            problem = f"no chat completion: {text[:300]}"
    except (httpx.HTTPError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        said = problem.replace(key, "***") if key else problem
        raise BadInput(
            f"{KEY}.url: the judge {model} at {address} does not answer ({' '.join(said.split())}). Start it, or fix "
            "url, model and api_key_env."
        )


llm_judge.check_options = check_options  # type: ignore[attr-defined]
llm_judge.check_run = check_run  # type: ignore[attr-defined]
llm_judge.start = start  # type: ignore[attr-defined]
llm_judge.in_run = ("cache",)  # type: ignore[attr-defined]
