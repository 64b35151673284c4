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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from eval.artifacts import POLICIES
from eval.backends import Answers, Asking, encode
from eval.generate import Generation, finish, sample_key, special_tokens
from kit.core.errors import BadInput, CheckFailed

CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 4  # for a request that is refused, aborted or answered with one of RETRIED
TIMED_OUT_ATTEMPTS = 2  # for one that times out, which costs the whole time limit
RETRIED = (408, 409, 429, 500, 502, 503, 504)
BACKOFF_S = 1.0
PROBES = 3  # prompts compared before anything is measured
COMPLETIONS = "/v1/chat/completions"
NO_TEXTS = (
    "With rollout.stop a completion is judged through the token that ends it, which only a server with vLLM's "
    "settings return_token_ids and skip_special_tokens shows. Measure the checkpoint with --eval.backend vllm."
)
_TEMPLATE = "Start it on the checkpoint's own directory, without a chat template of its own."
Result = TypeVar("Result")


@dataclass(frozen=True)
class Endpoint:
    """The server that a cell is measured on; `model` None takes the only one that it lists. Times in seconds."""

    url: str
    model: str | None = None
    timeout_s: float = 600.0


def parse_cells(pairs: Sequence[str], option: str) -> dict[tuple[str, str], str]:
    """Parse ["grpo/fp8=http://…"] into {("grpo", "fp8"): "http://…"}; `BadInput` for other forms or duplicates."""
    found: dict[tuple[str, str], str] = {}
    for pair in pairs:
        cell, separator, value = pair.partition("=")
        policy, slash, name = cell.partition("/")
        if not (separator and slash and value) or policy not in POLICIES:
            raise BadInput(
                f"--{option} takes policy/format=value, e.g. grpo/fp8=http://127.0.0.1:8000; it is {pair!r}."
            )
        if (policy, name) in found:
            raise BadInput(f"--{option} names {cell} twice.")
        found[policy, name] = value
    return found


def ask_server(endpoint: Endpoint, place: str | Path, asking: Asking) -> Answers:
    """Return the `Answers` of the server at `endpoint`, whose model has the tokenizer of the checkpoint at `place`.

    `asking.batch_size` requests are in flight at once. `BadInput` if the server fails a check, `CheckFailed` if it
    stops answering.
    """
    with Client(endpoint, place, asking) as client:
        found = in_parallel(len(asking.conversations), asking.batch_size, client.samples_of)
    made = [generation for samples in found for generation in samples]
    return Answers(made, "server", "unknown", client.facts)


def in_parallel(count: int, workers: int, work: Callable[[int], Result]) -> list[Result]:
    """[work(0), …, work(count - 1)], at most `workers` at once; the first error is raised immediately.

    Its threads do not outlive the process: waiting for a server that hangs must not keep a failed or interrupted
    command from ending.
    """
    results: list = [None] * count
    places: queue.SimpleQueue[int] = queue.SimpleQueue()
    errors: list[BaseException] = []
    ended = threading.Semaphore(0)
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


class Client:
    """A server that was checked on entering: it lists the model, answers, and applies the checkpoint's chat template.

    `facts` is what was learned about it. May be used from several threads.
    """

    def __init__(self, endpoint: Endpoint, place: str | Path, asking: Asking):
        self.endpoint, self.asking, self.encoded = endpoint, asking, encode(place, asking)
        self.url = endpoint.url.rstrip("/").removesuffix("/v1")  # OpenAI's own client expects /v1
        self.model, self.facts = "", {"url": self.url}
        self.extra = {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": self.encoded.stops,
            "skip_special_tokens": bool(asking.stop),  # stop texts are searched in text without them
            "return_token_ids": True,
        }
        if asking.stop:
            self.extra["stop"] = [*asking.stop]

    def __enter__(self) -> "Client":
        self.http = _session(self.asking.batch_size)
        listed = self._parsed(self._send("GET", "/v1/models"), "/v1/models")
        models = {str(row.get("id")): row for row in listed.get("data") or [] if isinstance(row, dict)}
        self.model = self.facts["model"] = self._choose(list(models))
        told = models[self.model]
        self.facts |= {key: told[key] for key in ("owned_by", "root") if isinstance(told.get(key), str)}
        if self._refuses(self.extra):
            if self.asking.stop:
                raise BadInput(f"{self.url} refuses the request's settings. {NO_TEXTS}")
            self.extra = {}
            self.facts["refused"] = "top_k, min_p, repetition_penalty, stop_token_ids"
        if self.asking.template_arguments:
            self._pass_arguments()
        for problem in range(min(PROBES, len(self.asking.conversations))):
            self._check_prompt(problem, self._completion(self._probe(problem)), 1)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def samples_of(self, problem: int) -> list[Generation]:
        """The samples of one problem. If the server returns fewer choices than requested, it is asked for the rest."""
        made: list[Generation] = []
        asking = self.asking
        while (wanted := asking.samples - len(made)) > 0:
            seed = sample_key(asking.seed, problem, len(made)) % (1 << 31) if asking.temperature > 0 else None
            request = self._request(problem, asking.max_new_tokens, asking.temperature, wanted, seed)
            answer = self._completion(self._send("POST", COMPLETIONS, request))
            self._check_prompt(problem, answer, wanted)
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))[:wanted]
            if not choices:
                raise CheckFailed(f"{self.url} answered without a completion for problem {problem}.")
            made += [self._generation(problem, choice) for choice in choices]
        return made

    def _pass_arguments(self) -> None:
        """Send `data.chat_template_kwargs` with every request from here on, unless the server rejects the field.

        Record and print a warning if clients that omit the field get another prompt.
        """
        arguments = self.asking.template_arguments
        answer = self._completion(self._probe(0))
        try:
            self._check_prompt(0, answer, 1)
        except BadInput:
            self.facts["without_arguments"] = "another prompt"
            print(
                f"WARNING: clients that do not send chat_template_kwargs {arguments} to {self.url} get a different "
                "prompt from the policy's training. Serve a checkpoint that merge wrote, which has them as defaults.",
                flush=True,
            )
        if self._refuses(extra := self.extra | {"chat_template_kwargs": arguments}):
            self.facts["refused"] = ", ".join(filter(None, [self.facts.get("refused"), "chat_template_kwargs"]))
        else:
            self.extra = extra

    def _refuses(self, extra: dict) -> bool:
        """Whether the server rejects a request with these settings."""
        request = self._request(0, 1, 0.0, 1, None) | extra
        return self._send("POST", COMPLETIONS, request).status_code in (400, 422)

    def _probe(self, problem: int) -> requests.Response:
        return self._send("POST", COMPLETIONS, self._request(problem, 1, 0.0, 1, None))

    def _request(self, problem: int, limit: int, temperature: float, n: int, seed: int | None) -> dict:
        """A chat completion request with every sampling setting explicit."""
        request = {
            "model": self.model,
            "messages": self.asking.conversations[problem],
            "max_tokens": limit,
            "temperature": temperature,
            "top_p": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "n": n,
            "stream": False,
        }
        return request | ({} if seed is None else {"seed": seed}) | self.extra

    def _check_prompt(self, problem: int, answer: dict, n: int) -> None:
        """Raise `BadInput` unless the prompt tokens match those of the checkpoint's tokenizer and chat template."""
        ours, theirs = self.encoded.prompts[problem], answer.get("prompt_token_ids")
        if theirs == ours:
            return
        if isinstance(theirs, list):
            differing = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
            place = next(differing, min(len(theirs), len(ours)))
            near = slice(max(place - 10, 0), place + 10)
            shown, wanted = (self.encoded.tokenizer.decode(ids[near]) for ids in (theirs, ours))
            raise BadInput(
                f"{self.url} encodes a prompt into {len(theirs)} tokens, the checkpoint's tokenizer and chat template "
                f"into {len(ours)}; token {place} is in {shown!r} where {wanted!r} is expected. {_TEMPLATE}"
            )
        count = (answer.get("usage") or {}).get("prompt_tokens")
        if not isinstance(count, int):
            raise BadInput(
                f"{self.url} does not report how many tokens a prompt has (usage.prompt_tokens), so it is "
                "unknown whether it applies the chat template. Measure the checkpoint with --eval.backend vllm."
            )
        if count not in (len(ours), n * len(ours)):  # some count the prompt once for each completion
            raise BadInput(
                f"{self.url} encodes a prompt into {count} tokens, the checkpoint's tokenizer and chat template into "
                f"{len(ours)}: it applies another template or none, or adds a token. {_TEMPLATE}"
            )

    def _generation(self, problem: int, choice: dict) -> Generation:
        """Convert a choice of the server's answer: from its token ids if present, else from its text."""
        tokenizer, ids = self.encoded.tokenizer, choice.get("token_ids")
        if isinstance(ids, list) and ids:
            given = self.encoded.stops, self.asking.max_new_tokens, self.encoded.texts, self.encoded.prompts[problem]
            return finish(tokenizer, ids, *given)
        if self.asking.stop:
            raise BadInput(f"{self.url} returns no token ids. {NO_TEXTS}")
        raw = (choice.get("message") or {}).get("content") or ""
        text = re.sub("|".join(map(re.escape, special_tokens(tokenizer))), "", raw)
        reason, tokens = choice.get("finish_reason"), len(tokenizer(raw, add_special_tokens=False)["input_ids"])
        return Generation(text, raw, tokens, ended=reason == "stop", hit_max_tokens=reason == "length")

    def _choose(self, listed: list[str]) -> str:
        wanted = self.endpoint.model
        if not listed:
            raise BadInput(f"{self.url}/v1/models lists no model.")
        if wanted is None and len(listed) > 1:
            raise BadInput(f"{self.url} serves {', '.join(listed)}. Choose one with --model.")
        if wanted is not None and wanted not in listed:
            raise BadInput(f"{self.url} does not serve {wanted}; it serves {', '.join(listed)}.")
        return wanted or listed[0]

    def _send(self, method: str, path: str, content: dict | None = None) -> requests.Response:
        timeout = (CONNECT_TIMEOUT_S, self.endpoint.timeout_s)
        try:
            return self.http.request(method, self.url + path, json=content, timeout=timeout)
        except requests.exceptions.InvalidURL as error:
            raise BadInput(f"{self.url} is not the URL of a server: {error}") from None
        except (requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema):
            raise BadInput(f"{self.url!r} is not the URL of a server. Write it as http://host:port.") from None
        except requests.exceptions.RequestException as error:
            if "Read timed out" in str(error) or isinstance(error, requests.exceptions.ReadTimeout):
                raise CheckFailed(
                    f"{self.url}{path} did not answer within {self.endpoint.timeout_s:g} s, {TIMED_OUT_ATTEMPTS} "
                    "times. See the server's log; raise rollout.request_timeout_s if it is only slow, or lower "
                    "eval.batch_size."
                ) from None
            raise CheckFailed(f"no answer from {self.url}{path} in {ATTEMPTS} attempts: {_reason(error)}") from None

    def _completion(self, response: requests.Response) -> dict:
        """Return the parsed chat completion; a refusal is an error with the server's message."""
        answer = self._parsed(response, COMPLETIONS)
        if not isinstance(answer.get("choices"), list):
            raise CheckFailed(f"{self.url} answered without choices: {response.text[:200]!r}")
        return answer

    def _parsed(self, response: requests.Response, path: str) -> dict:
        where, status = f"{self.url}{path}", response.status_code
        if status in (401, 403):
            raise BadInput(f"{where} rejected the API key. Set VLLM_API_KEY or OPENAI_API_KEY to the server's.")
        if status >= 500 or status in RETRIED:
            raise CheckFailed(f"{where} answered {status} {ATTEMPTS} times: {_error_in(response)}")
        if status >= 400:
            raise BadInput(f"{where} answered {status}: {_error_in(response)}")
        try:
            answer = response.json()
        except requests.exceptions.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise BadInput(f"{where} is not an OpenAI-compatible server: it answered {response.text[:120]!r}.")
        return answer


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


def _reason(error: Exception) -> str:
    """The innermost reason of a requests error, without its object addresses."""
    while getattr(error, "reason", None) or (error.args and isinstance(error.args[0], Exception)):
        error = getattr(error, "reason", None) or error.args[0]
    return re.sub(r"<[^>]*>:? ?|\w+Connection\([^)]*\): ", "", str(error))


def _error_in(response: requests.Response) -> str:
    """A server's error message: OpenAI's {"error": {"message"}}, else the start of the answer."""
    try:
        answer = response.json()
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (requests.exceptions.JSONDecodeError, AttributeError):
        return response.text[:300]
