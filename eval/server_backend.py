"""Completions from any OpenAI-compatible server by URL, which is checked before it is measured.

Covers: vLLM, SGLang, llama.cpp, TGI and any other with /v1/models and /v1/chat/completions with `usage`. The server
applies the chat template, so its prompt tokens are compared with those of the checkpoint's own tokenizer on every
answer: token by token if the server returns them (vLLM), else by their number. All sampling settings are sent, so that
no default of the server or of the model's generation_config.json applies; those beyond OpenAI's own (top_k, min_p,
repetition_penalty, stop tokens, chat_template_kwargs) are omitted for a server that rejects them.
Not covered: which weights the server holds, which no such server reports.
"""

import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from eval.backends import Answers, Asking, directory_stop_tokens, load_tokenizer
from eval.generate import Generation, finish, render_prompts, sample_key, special_tokens
from kit.core.errors import BadInput, CheckFailed

CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 4  # at a request that is refused, cut off or answered with one of RETRIED
TIMED_OUT_ATTEMPTS = 2  # at one that times out, which costs the whole time limit
RETRIED = (408, 409, 429, 500, 502, 503, 504)
BACKOFF_S = 1.0
PROBES = 3  # prompts compared before anything is measured


@dataclass(frozen=True)
class Endpoint:
    """The server that a cell is measured on; `model` None takes the only one that it lists. Times in seconds."""

    url: str
    model: str | None = None
    timeout_s: float = 600.0


@dataclass
class Client:
    """A checked server: what it accepts and what was learned about it. May be used from several threads."""

    endpoint: Endpoint
    http: requests.Session
    model: str
    extra: dict = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Expected:
    """The tokenizer's side: the token ids that the server must make of the prompts, and the stop tokens."""

    tokenizer: Any
    stops: list[int]
    prompts: list[list[int]]


def parse_cells(pairs: Sequence[str], option: str) -> dict[tuple[str, str], str]:
    """Parse ["grpo/fp8=http://…"] into {("grpo", "fp8"): "http://…"}; `BadInput` for other forms or duplicates."""
    found: dict[tuple[str, str], str] = {}
    for pair in pairs:
        cell, separator, value = pair.partition("=")
        policy, slash, name = cell.partition("/")
        if not (separator and slash and value) or policy not in ("base", "grpo"):
            raise BadInput(
                f"--{option} takes policy/format=value, e.g. grpo/fp8=http://127.0.0.1:8000; it is {pair!r}."
            )
        if (policy, name) in found:
            raise BadInput(f"--{option} names {cell} twice.")
        found[policy, name] = value
    return found


def expected_of(place: str | Path, asking: Asking) -> Expected:
    """The conversations as the checkpoint's own tokenizer and chat template encode them."""
    tokenizer = load_tokenizer(place, asking)
    rendered = render_prompts(tokenizer, asking.conversations, asking.template_arguments)
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Expected(tokenizer, directory_stop_tokens(place, tokenizer, asking), prompts)


def ask_server(endpoint: Endpoint, place: str | Path, asking: Asking) -> Answers:
    """Return the `Answers` of the server at `endpoint`, whose model has the tokenizer of the checkpoint at `place`.

    `asking.batch_size` requests are in flight at once. `BadInput` if the server fails a check, `CheckFailed` if it
    stops answering.
    """
    expected = expected_of(place, asking)
    client = connect(endpoint, expected, asking)
    try:
        found = in_parallel(
            len(asking.conversations), asking.batch_size, lambda problem: _ask(client, expected, asking, problem)
        )
    finally:
        client.http.close()
    made = [generation for samples in found for generation in samples]
    return Answers(made, "server", "unknown", client.facts)


def in_parallel(count: int, workers: int, work: Callable[[int], Any]) -> list:
    """[work(0), …, work(count - 1)], at most `workers` at once; the first error is raised immediately.

    Its threads do not outlive the process: waiting for a server that hangs must not keep a failed or interrupted
    command from ending.
    """
    results: list[Any] = [None] * count
    places, errors, ended = queue.SimpleQueue(), [], threading.Semaphore(0)
    for place in range(count):
        places.put(place)

    def run() -> None:
        while not errors:
            try:
                place = places.get_nowait()
            except queue.Empty:
                return
            try:
                results[place] = work(place)
            except BaseException as error:
                errors.append(error)
            ended.release()

    for _ in range(min(workers, count)):
        threading.Thread(target=run, daemon=True).start()
    for _ in range(count):
        ended.acquire()
        if errors:
            raise errors[0]
    return results


def connect(endpoint: Endpoint, expected: Expected, asking: Asking) -> Client:
    """Connect to a server and check that it lists the model, answers, and applies the checkpoint's chat template."""
    http = _session(asking.batch_size)
    client = Client(endpoint, http, "", facts={"url": base_url(endpoint.url)})
    listed = _json(client, "GET", "/v1/models")
    models = {str(row.get("id")): row for row in listed.get("data") or [] if isinstance(row, dict)}
    client.model = _choose(endpoint, list(models))
    client.facts["model"] = client.model
    for key in ("owned_by", "root"):
        if isinstance(value := models[client.model].get(key), str):
            client.facts[key] = value
    client.extra = {
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": expected.stops,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    if _probe(client, asking.conversations[0]).status_code in (400, 422):
        client.extra = {}
        client.facts["refused"] = "top_k, min_p, repetition_penalty, stop_token_ids"
    if asking.template_arguments:
        _pass_arguments(client, expected, asking)
    for problem in range(min(PROBES, len(asking.conversations))):
        answer = _read(client, _probe(client, asking.conversations[problem]))
        check_prompt(client, expected, problem, answer, 1)
    return client


def _pass_arguments(client: Client, expected: Expected, asking: Asking) -> None:
    """Send `data.chat_template_kwargs` with every request from here on, unless the server rejects the field.

    Record and print a warning if clients that omit the field get another prompt.
    """
    answer = _read(client, _probe(client, asking.conversations[0]))
    try:
        check_prompt(client, expected, 0, answer, 1)
    except BadInput:
        client.facts["without_arguments"] = "another prompt"
        print(
            f"WARNING: clients that do not send chat_template_kwargs {asking.template_arguments} to "
            f"{client.facts['url']} ask another prompt than the policy was trained on. Serve a checkpoint that merge "
            "wrote, which has them as defaults.",
            flush=True,
        )
    plain = client.extra
    client.extra = plain | {"chat_template_kwargs": asking.template_arguments}
    if _probe(client, asking.conversations[0]).status_code in (400, 422):
        client.extra = plain
        client.facts["refused"] = ", ".join(filter(None, [client.facts.get("refused"), "chat_template_kwargs"]))


def _probe(client: Client, conversation: list[dict]) -> requests.Response:
    return _post(client, body(client, conversation, 1, 0.0, 1, None))


def body(client: Client, conversation: list[dict], limit: int, temperature: float, n: int, seed: int | None) -> dict:
    """A chat completion request with every sampling setting explicit."""
    request = {
        "model": client.model,
        "messages": conversation,
        "max_tokens": limit,
        "temperature": temperature,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": n,
        "stream": False,
    }
    return request | ({} if seed is None else {"seed": seed}) | client.extra


def check_prompt(client: Client, expected: Expected, problem: int, answer: dict, n: int) -> None:
    """Raise `BadInput` unless the prompt tokens match those of the checkpoint's tokenizer and chat template."""
    ours = expected.prompts[problem]
    theirs = answer.get("prompt_token_ids")
    if isinstance(theirs, list):
        if theirs == ours:
            return
        place = next(
            (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours))
        )
        shown = expected.tokenizer.decode(theirs[max(place - 10, 0) : place + 10])
        wanted = expected.tokenizer.decode(ours[max(place - 10, 0) : place + 10])
        raise BadInput(
            f"{client.facts['url']} makes {len(theirs)} tokens of a prompt of which the checkpoint's tokenizer and "
            f"chat template make {len(ours)}; at token {place} stands {shown!r} where {wanted!r} belongs. "
            f"{_TEMPLATE}"
        )
    count = (answer.get("usage") or {}).get("prompt_tokens")
    if not isinstance(count, int):
        raise BadInput(
            f"{client.facts['url']} does not say how many tokens a prompt has (usage.prompt_tokens), so whether it "
            "applies the chat template cannot be checked. Measure the checkpoint with --eval.backend vllm."
        )
    if count not in (len(ours), n * len(ours)):  # some count the prompt once for each completion
        raise BadInput(
            f"{client.facts['url']} makes {count} tokens of a prompt of which the checkpoint's tokenizer and chat "
            f"template make {len(ours)}: it applies another template or none, or adds a token. {_TEMPLATE}"
        )


_TEMPLATE = "Start it on the checkpoint's own directory, without a chat template of its own."


def _ask(client: Client, expected: Expected, asking: Asking, problem: int) -> list[Generation]:
    """The samples of one problem. If the server returns fewer choices than requested, the rest is requested again."""
    made: list[Generation] = []
    while len(made) < asking.samples:
        wanted = asking.samples - len(made)
        seed = sample_key(asking.seed, problem, len(made)) % (1 << 31) if asking.temperature > 0 else None
        request = body(client, asking.conversations[problem], asking.max_new_tokens, asking.temperature, wanted, seed)
        answer = _read(client, _post(client, request))
        check_prompt(client, expected, problem, answer, wanted)
        choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))[:wanted]
        if not choices:
            raise CheckFailed(f"{client.facts['url']} answered without a completion for problem {problem}.")
        made += [to_generation(client, expected, choice, asking.max_new_tokens) for choice in choices]
    return made


def to_generation(client: Client, expected: Expected, choice: dict, max_new_tokens: int) -> Generation:
    """Convert a choice of the server's answer to a `Generation`: from its token ids if present, else from its text."""
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids:
        return finish(expected.tokenizer, ids, expected.stops, max_new_tokens)
    raw = (choice.get("message") or {}).get("content") or ""
    text = re.sub("|".join(map(re.escape, special_tokens(expected.tokenizer))), "", raw)
    reason = choice.get("finish_reason")
    tokens = len(expected.tokenizer(raw, add_special_tokens=False)["input_ids"])
    return Generation(text, raw, tokens, ended=reason == "stop", hit_max_tokens=reason == "length")


def base_url(url: str) -> str:
    """The URL without the /v1 suffix that OpenAI's own client expects."""
    return url.rstrip("/").removesuffix("/v1")


def _session(connections: int) -> requests.Session:
    http = requests.Session()
    http.trust_env = False  # a proxy variable or a .netrc must not intercept the requests
    http.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
    retry = Retry(
        total=ATTEMPTS - 1,
        read=TIMED_OUT_ATTEMPTS - 1,
        status_forcelist=RETRIED,
        allowed_methods=None,  # requesting a completion twice does no harm
        backoff_factor=BACKOFF_S,
        raise_on_status=False,
    )
    for scheme in ("http://", "https://"):
        http.mount(scheme, HTTPAdapter(pool_maxsize=max(connections, 1), max_retries=retry))
    if key := os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY"):
        http.headers["Authorization"] = f"Bearer {key}"
    return http


def _send(client: Client, method: str, path: str, content: dict | None) -> requests.Response:
    url = client.facts["url"]
    try:
        return client.http.request(
            method, url + path, json=content, timeout=(CONNECT_TIMEOUT_S, client.endpoint.timeout_s)
        )
    except requests.exceptions.InvalidURL as error:
        raise BadInput(f"{url} is no URL of a server: {error}") from None
    except (requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
        raise BadInput(f"{url!r} is no URL of a server. Write it as http://host:port.") from None
    except requests.exceptions.RequestException as error:
        if "Read timed out" in str(error) or isinstance(error, requests.exceptions.ReadTimeout):
            raise CheckFailed(
                f"{url}{path} did not answer within {client.endpoint.timeout_s:g} s, {TIMED_OUT_ATTEMPTS} times. Look "
                "at the server's log; raise rollout.request_timeout_s when it is only slow, or lower eval.batch_size."
            ) from None
        raise CheckFailed(f"no answer from {url}{path} in {ATTEMPTS} attempts: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """The innermost reason of a requests error, without its object addresses."""
    while getattr(error, "reason", None) or (error.args and isinstance(error.args[0], Exception)):
        error = getattr(error, "reason", None) or error.args[0]
    return re.sub(r"<[^>]*>:? ?|\w+Connection\([^)]*\): ", "", str(error))


def _post(client: Client, content: dict) -> requests.Response:
    return _send(client, "POST", "/v1/chat/completions", content)


def _json(client: Client, method: str, path: str) -> dict:
    return _parsed(client, _send(client, method, path, None), path)


def _read(client: Client, response: requests.Response) -> dict:
    """Return the parsed chat completion; a refusal is an error with the server's message."""
    answer = _parsed(client, response, "/v1/chat/completions")
    if not isinstance(answer.get("choices"), list):
        raise CheckFailed(f"{client.facts['url']} answered without choices: {response.text[:200]!r}")
    return answer


def _parsed(client: Client, response: requests.Response, path: str) -> dict:
    where = f"{client.facts['url']}{path}"
    if response.status_code in (401, 403):
        raise BadInput(f"{where} wants another API key. Set VLLM_API_KEY or OPENAI_API_KEY to the server's.")
    if response.status_code >= 500 or response.status_code in RETRIED:
        raise CheckFailed(f"{where} answered {response.status_code} {ATTEMPTS} times: {_said(response)}")
    if response.status_code >= 400:
        raise BadInput(f"{where} answered {response.status_code}: {_said(response)}")
    try:
        answer = response.json()
    except requests.exceptions.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise BadInput(f"{where} is no OpenAI-compatible server: it answered {response.text[:120]!r}.")
    return answer


def _said(response: requests.Response) -> str:
    """A server's error message: OpenAI's {"error": {"message"}}, else the start of the answer."""
    try:
        answer = response.json()
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (requests.exceptions.JSONDecodeError, AttributeError):
        return response.text[:300]


def _choose(endpoint: Endpoint, listed: list[str]) -> str:
    url = base_url(endpoint.url)
    if not listed:
        raise BadInput(f"{url}/v1/models lists no model.")
    if endpoint.model is None and len(listed) > 1:
        raise BadInput(f"{url} serves {', '.join(listed)}. Say which is meant with --model.")
    if endpoint.model is not None and endpoint.model not in listed:
        raise BadInput(f"{url} does not serve {endpoint.model}; it serves {', '.join(listed)}.")
    return endpoint.model or listed[0]
