"""The server backend against a stub that misbehaves as servers do."""

import contextlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import GenerationConfig

from eval import server_backend
from eval.backends import Asking
from eval.server_backend import Endpoint, ask_server, parse_cells
from kit.core.errors import BadInput, CheckFailed
from tests import processes
from tests.unit.merge_fixture import byte_tokenizer
from tests.unit.test_eval_generate import ask

TOKENIZER = byte_tokenizer()


def count(messages: list[dict]) -> int:
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(TOKENIZER(rendered, add_special_tokens=False)["input_ids"])


def completion(request: dict, *choices: dict, **more: object) -> dict:
    usage = {"prompt_tokens": count(request["messages"]), "completion_tokens": 5}
    return {"choices": list(choices), "usage": usage, **more}


def choice(text: str, reason: str | None = "stop", index: int = 0, **more: object) -> dict:
    return {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": reason, **more}


def echo(request: dict) -> tuple[int, dict]:
    """A well-behaved server: sample i of a question answers with the question and i."""
    question = request["messages"][-1]["content"]
    return 200, completion(request, *(choice(f"{question} {i}", index=i) for i in range(request["n"])))


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 resets connections of a command that asks for a batch at once


class Stub:
    """An OpenAI-compatible server of this process; `answer(request)` gives status and body of a completion."""

    def __init__(self):
        self.answer, self.models, self.requests, self.keys, stub = echo, ["tiny"], [], [], self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name, "owned_by": "stub"} for name in stub.models]})

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(request)
                stub.keys.append(self.headers.get("Authorization"))
                self.reply(*stub.answer(request))

            def reply(self, status: int, body: dict) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client gave up meanwhile
                    self.wfile.write(content)

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def measured(self) -> list[dict]:
        """The requests after the checks, which ask for one token."""
        return [request for request in self.requests if request["max_tokens"] > 1]


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(server_backend, "BACKOFF_S", 0.0)
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = Stub()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint's tokenizer and generation configuration; a server holds its weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    TOKENIZER.save_pretrained(folder)
    GenerationConfig(eos_token_id=TOKENIZER.eos_token_id, repetition_penalty=1.5).save_pretrained(folder)
    return folder


def measure(stub: Stub, place, timeout_s: float = 20.0, **settings: object):
    return ask_server(Endpoint(stub.url, timeout_s=timeout_s), place, Asking(ask(), 12, **settings))


def test_finish_reasons_say_what_ended_and_what_was_cut(stub, place):
    reasons = iter(["stop", "length", "content_filter", None, "stop"])

    def answer(request: dict) -> tuple[int, dict]:
        return 200, completion(
            request, choice("4<|endoftext|>2", next(reasons) if request["max_tokens"] > 1 else None)
        )

    stub.answer = answer
    answers = measure(stub, place, batch_size=1)
    made = answers.generations
    assert [(one.ended, one.hit_max_tokens) for one in made] == [
        (True, False), (False, True), (False, False), (False, False), (True, False)
    ]  # fmt: skip
    assert {(one.text, one.raw, one.tokens) for one in made} == {("42", "4<|endoftext|>2", 3)}
    assert (answers.engine, answers.dtype, answers.versions["model"]) == ("server", "unknown", "tiny")


def test_samples_come_problem_by_problem_whatever_order_the_server_answers_in(stub, place):
    def answer(request: dict) -> tuple[int, dict]:
        status, body = echo(request)
        time.sleep(0.2 if request["messages"][-1]["content"].startswith("1 + 1") else 0)
        return status, {**body, "choices": body["choices"][::-1]}

    stub.answer = answer
    made = measure(stub, place, temperature=0.7, samples=3).generations
    assert [one.raw for one in made] == [f"{turns[0]['content']} {i}" for turns in ask() for i in range(3)]


def test_a_server_that_ignores_n_is_asked_for_the_rest_with_other_seeds(stub, place):
    stub.answer = lambda request: (200, completion(request, choice(str(request.get("seed")))))
    made = measure(stub, place, temperature=0.7, samples=3).generations
    assert len(made) == len({one.raw for one in made}) == 15
    assert [request["n"] for request in stub.measured()].count(3) == 5


def test_every_sampling_setting_is_sent_and_the_seed_hangs_on_the_problem(stub, place):
    measure(stub, place, temperature=0.7, seed=1)
    first = {request["messages"][-1]["content"]: request["seed"] for request in stub.measured()}
    assert len(set(first.values())) == 5 and all(0 <= seed < 2**31 for seed in first.values())
    for request in stub.requests:
        assert (request["top_p"], request["top_k"], request["min_p"], request["repetition_penalty"]) == (1, -1, 0, 1)
        assert (request["presence_penalty"], request["frequency_penalty"]) == (0, 0)
        assert request["stop_token_ids"] == [TOKENIZER.eos_token_id]
    stub.requests.clear()
    measure(stub, place)
    assert all("seed" not in request and request["temperature"] == 0 for request in stub.requests)


def test_settings_beyond_openais_own_are_left_out_for_a_server_that_refuses_them(stub, place):
    def strict(request: dict) -> tuple[int, dict]:
        if "top_k" in request:
            return 400, {"error": {"message": "Unrecognized request argument supplied: top_k"}}
        return echo(request)

    stub.answer = strict
    answers = measure(stub, place)
    assert len(answers.generations) == 5 and "top_k" in answers.versions["refused"]
    stub.answer = lambda request: (400, {"error": {"message": "max_tokens is too large"}})
    with pytest.raises(BadInput, match="answered 400: max_tokens is too large"):
        measure(stub, place)


def test_token_ids_of_the_server_are_read_as_those_of_the_other_engines(stub, place):
    ids = TOKENIZER("4<|endoftext|>2", add_special_tokens=False)["input_ids"]

    def answer(request: dict) -> tuple[int, dict]:
        ended = request["messages"][-1]["content"].startswith("1 + 1")
        row = [*ids, TOKENIZER.eos_token_id] if ended else ids * 4
        return 200, completion(request, choice("ignored", token_ids=row))

    stub.answer = answer
    made = measure(stub, place).generations
    assert (made[0].text, made[0].raw, made[0].tokens, made[0].ended) == ("42", "4<|endoftext|>2", 3, True)
    assert (made[1].tokens, made[1].ended, made[1].hit_max_tokens) == (12, False, True)


def test_stop_texts_are_sent_and_end_what_is_read_and_need_token_ids(stub, place):
    ids = TOKENIZER("4<|endoftext|>2 and on", add_special_tokens=False)["input_ids"]
    stub.answer = lambda request: (200, completion(request, choice("ignored", token_ids=ids)))
    made = measure(stub, place, stop=["42"]).generations
    assert {(one.text, one.raw, one.tokens, one.ended) for one in made} == {("42", "4<|endoftext|>2", 3, True)}
    # A special token inside it must not hide a stop text from the server.
    assert {(*one["stop"], one["skip_special_tokens"]) for one in stub.requests} == {("42", True)}
    stub.answer = echo
    with pytest.raises(BadInput, match=r"returns no token ids\. With rollout.stop a completion is judged"):
        measure(stub, place, stop=["42"])
    stub.answer = lambda request: (400, {"error": {"message": "Unrecognized request argument supplied: top_k"}})
    with pytest.raises(BadInput, match=r"refuses the request's settings\. With rollout.stop"):
        measure(stub, place, stop=["42"])
    stub.requests.clear()
    with pytest.raises(BadInput, match=r"holds the special token <\|endoftext\|>"):
        measure(stub, place, stop=["4<|endoftext|>"])
    assert not stub.requests


def test_a_fault_that_passes_is_tried_again_and_one_that_stays_is_told(stub, place):
    seen = set()

    def flaky(request: dict) -> tuple[int, dict]:
        question = request["messages"][-1]["content"]
        if request["max_tokens"] > 1 and question not in seen:
            seen.add(question)
            return 503, {"error": {"message": "warming up"}}
        return echo(request)

    stub.answer = flaky
    assert len(measure(stub, place).generations) == 5
    stub.answer = lambda request: (500, {"error": {"message": "CUDA error: out of memory"}})
    with pytest.raises(CheckFailed, match=r"answered 500 4 times: CUDA error: out of memory"):
        measure(stub, place)


def test_a_server_that_hangs_is_given_up_with_the_time_limit_named(stub, place):
    stopped = threading.Event()

    def hang(request: dict) -> tuple[int, dict]:
        if request["max_tokens"] > 1:
            stopped.wait(60)
        return echo(request)

    stub.answer = hang
    started = time.monotonic()
    # The checks before it are answered, so the limit is one that they meet on a loaded machine.
    with pytest.raises(CheckFailed, match=r"did not answer within 2\.5 s, 2 times.*rollout\.request_timeout_s"):
        measure(stub, place, timeout_s=2.5)
    assert time.monotonic() - started < 50  # of 60
    stopped.set()


def test_a_command_does_not_wait_for_requests_under_way_when_one_fails(stub, place):
    """Four requests hang for longer than the test; the fifth is refused."""
    script = """
import sys
from eval.backends import Asking
from eval.server_backend import Endpoint, ask_server
from tests.unit.test_eval_generate import ask
ask_server(Endpoint(sys.argv[1]), sys.argv[2], Asking(ask(), 12))
"""
    stopped = threading.Event()

    def answer(request: dict) -> tuple[int, dict]:
        if request["max_tokens"] > 1 and request["messages"][-1]["content"] != "2 + 2?":
            stopped.wait(120)
        return (400, {"error": "no"}) if request["max_tokens"] > 1 else echo(request)

    stub.answer = answer
    command = [sys.executable, "-c", script, stub.url, str(place)]
    done = processes.run(command)
    stopped.set()
    assert done.returncode == 1 and "answered 400: no" in done.stderr


@pytest.mark.parametrize(("off", "question"), [(-9, ""), (1, ""), (2, ""), (1, "2 + 2?")])
def test_another_chat_template_is_told_by_the_number_of_prompt_tokens(stub, place, off, question):
    """For every question before anything is measured, for a late one on its own answer."""

    def other(request: dict) -> tuple[int, dict]:
        more = off if question in request["messages"][-1]["content"] else 0
        return 200, {**completion(request, choice("4")), "usage": {"prompt_tokens": count(request["messages"]) + more}}

    stub.answer = other
    with pytest.raises(BadInput, match=r"into \d+ tokens, .* another template or none"):
        measure(stub, place)
    assert bool(stub.measured()) == bool(question)


def test_another_chat_template_of_the_same_length_is_told_by_the_tokens(stub, place):
    def other(request: dict) -> tuple[int, dict]:
        rendered = TOKENIZER.apply_chat_template(request["messages"], tokenize=False, add_generation_prompt=True)
        ids = TOKENIZER(rendered.replace("user", "User"), add_special_tokens=False)["input_ids"]
        return 200, completion(request, choice("4"), prompt_token_ids=ids)

    stub.answer = other
    with pytest.raises(BadInput, match=r"token 1 is in .*User.* where .*user.* is expected"):
        measure(stub, place)
    assert not stub.measured()


def test_a_server_that_counts_no_tokens_cannot_be_checked(stub, place):
    stub.answer = lambda request: (200, {"choices": [choice("4")]})
    with pytest.raises(BadInput, match=r"usage\.prompt_tokens"):
        measure(stub, place)


def test_the_model_must_be_one_that_the_server_lists(stub, place):
    stub.models = ["base", "grpo"]
    with pytest.raises(BadInput, match=r"serves base, grpo\. Choose one with --model"):
        measure(stub, place)
    with pytest.raises(BadInput, match="does not serve grqo; it serves base, grpo"):
        ask_server(Endpoint(stub.url, "grqo"), place, Asking(ask(), 12))
    ask_server(Endpoint(stub.url + "/v1/", "grpo"), place, Asking(ask(), 12))
    assert {request["model"] for request in stub.requests} == {"grpo"}
    stub.models = []
    with pytest.raises(BadInput, match="lists no model"):
        measure(stub, place)


def test_the_key_is_sent_and_a_wrong_one_is_told(stub, place, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    measure(stub, place)
    assert set(stub.keys) == {"Bearer sk-mine"}
    stub.answer = lambda request: (401, {"error": {"message": "no"}})
    with pytest.raises(BadInput, match=r"rejected the API key\. Set VLLM_API_KEY or OPENAI_API_KEY") as caught:
        measure(stub, place)
    assert "sk-mine" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        (
            "http://127.0.0.1:9",
            CheckFailed,
            r"no answer from http://127\.0\.0\.1:9/v1/models in 4 attempts: .*refused",
        ),
        ("127.0.0.1:8000", BadInput, "not the URL of a server"),
        ("ftp://127.0.0.1", BadInput, "Write it as http://host:port"),
    ],
)
def test_a_server_that_is_not_there_is_named(stub, place, url, error, message):
    with pytest.raises(error, match=message):
        ask_server(Endpoint(url), place, Asking(ask(), 12))


def test_cells_are_named_by_policy_and_format():
    assert parse_cells(["grpo/fp8=http://a:1/?x=y", "base/fp8=http://b:2"], "url") == {
        ("grpo", "fp8"): "http://a:1/?x=y",
        ("base", "fp8"): "http://b:2",
    }
    for wrong in (["http://a:1"], ["fp8=http://a:1"], ["sft/fp8=http://a:1"], ["grpo/fp8="]):
        with pytest.raises(BadInput, match="policy/format=value"):
            parse_cells(wrong, "url")
    with pytest.raises(BadInput, match="grpo/fp8 twice"):
        parse_cells(["grpo/fp8=a", "grpo/fp8=b"], "url")
