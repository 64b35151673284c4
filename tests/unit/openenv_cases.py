"""The adapter for OpenEnv against servers of the package itself; run by .venv-openenv (tests/unit/test_openenv.py)."""

import asyncio
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kit.core.errors import BadInput, CheckFailed
from kit.environments import openenv
from kit.environments.episode import UnknownEpisode
from kit.environments.openenv import OpenEnvironment
from tests import processes
from tests.unit import openenv_servers

ROW = {"prompt": [{"role": "user", "content": "Guess."}], "problem_id": "a", "number": 5}
SESSIONS = openenv_servers.SESSIONS


def settings(**changed):
    return SimpleNamespace(**{"tool_timeout_s": 5.0, "on_tool_error": "observe"} | changed)


@pytest.fixture(scope="module")
def urls():
    """Address of a server for each environment."""
    ports = {name: processes.free_port() for name in openenv_servers.KINDS}
    for name, port in ports.items():
        openenv_servers.serve(name, port)
    return {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


@pytest.fixture
def start(urls):
    """Start an episode; all are closed at the end."""
    started = []

    def one(name="guess", row=ROW, limits=None, **options):
        started.append(OpenEnvironment(limits or settings(), url=urls[name], **options).start(row))
        return started[-1]

    yield one
    for episode in started:
        episode.close()


def call(name="step", **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def say(text):
    return {"role": "assistant", "content": text}


def respond(episode, reply):
    return asyncio.run(episode.respond(reply))


def said(episode, reply):
    (message,) = respond(episode, reply)
    return message["content"]


def test_the_fields_of_the_action_are_a_tool_and_the_steps_earn_the_reward(start):
    episode = start()
    (tool,) = episode.tools
    assert tool["function"]["name"] == "step" and tool["function"]["description"] == "Guess the number."
    assert tool["function"]["parameters"]["required"] == ["number"]
    assert "metadata" not in tool["function"]["parameters"]["properties"]
    assert episode.prompt[0]["content"].startswith("Guess.\n\nOne of 1 to 9")
    assert ROW["prompt"][0]["content"] == "Guess.", "the row is left as it is"
    assert respond(episode, call(number=1)) == [{"role": "tool", "name": "step", "content": "higher"}]
    assert said(episode, call(number=9)) == "lower"
    assert respond(episode, call(number=5)) == [], "the environment is done"
    assert asyncio.run(episode.reward()) == pytest.approx(0.8)
    assert (episode.tool_calls, episode.failures, episode.done) == (3, {}, True)


def test_calls_after_the_one_that_ends_the_episode_are_not_made(start):
    episode, reply = start(), call(number=5)
    reply["tool_calls"] += call(number=1)["tool_calls"]
    assert respond(episode, reply) == []
    assert (episode.rewards, episode.tool_calls) == ([1.0], 1)


def test_a_turn_without_a_call_ends_the_episode_with_what_it_has_earned(start):
    episode = start()
    assert respond(episode, say("five?")) == []
    assert asyncio.run(episode.reward()) == 0.0
    assert said(episode, call(number=1)) == "higher"
    assert asyncio.run(episode.reward()) == pytest.approx(-0.1)


def test_what_the_model_does_wrong_is_told_it_whatever_tool_errors_are(start):
    for on_tool_error in ("observe", "unknown"):
        episode = start(limits=settings(on_tool_error=on_tool_error))
        assert said(episode, call("stop")) == str({"error": "there is no tool 'stop', there are step"})
        assert said(episode, call(number="five")) == str({"error": "'five' is not of type 'integer'"})
        assert said(episode, call()) == str({"error": "'number' is a required property"})
        assert "'nr' was unexpected" in said(episode, call(number=1, nr=2))
        wrong = call()
        wrong["tool_calls"][0]["function"]["arguments"] = "[1"
        assert said(episode, wrong) == "{'error': 'the arguments are not a JSON object'}"
        assert episode.failures == {"unknown_tool": 1, "arguments": 4}
        assert said(episode, call(number=1)) == "higher", "the session goes on"


def test_an_environment_that_raises_is_told_the_model_or_makes_the_episode_unknown(start):
    episode = start()
    assert said(episode, call(number=0)) == "{'error': 'zero was never an option'}", "as TRL says it"
    assert said(episode, call(number=1)) == "higher"
    assert episode.failures == {"raised": 1}
    with pytest.raises(UnknownEpisode, match="zero was never an option") as caught:
        respond(start(limits=settings(on_tool_error="unknown")), call(number=0))
    assert caught.value.reason == "raised"


def test_a_step_that_takes_too_long_makes_its_episode_unknown_and_no_other_wait(start):
    slow, other = start(limits=settings(tool_timeout_s=2.5)), start()

    async def both():
        started = time.monotonic()
        hangs = asyncio.ensure_future(slow.respond(call(number=-8)))
        answered = await other.respond(call(number=1))
        answered_s = time.monotonic() - started
        with pytest.raises(UnknownEpisode) as caught:
            await hangs
        return answered, answered_s, caught.value.reason, time.monotonic() - started

    answered, answered_s, reason, ended_s = asyncio.run(both())
    assert (answered[0]["content"], reason) == ("higher", "timeout")
    assert answered_s < ended_s < 7, "neither waits for the step of eight seconds"
    with pytest.raises(UnknownEpisode) as caught:  # openenv alone would step in a session that was never reset
        respond(slow, call(number=1))
    assert caught.value.reason == "lost"


def test_a_server_that_dies_makes_its_episodes_unknown_even_if_it_comes_back():
    port = processes.free_port()

    with subprocess.Popen([sys.executable, "-m", "tests.unit.openenv_servers", "guess", str(port)]) as server:
        processes.wait_until(lambda: processes.listens(port), server)
        environment = OpenEnvironment(settings(), url=f"http://127.0.0.1:{port}")
        episode = environment.start(ROW)
        assert said(episode, call(number=1)) == "higher"
        server.kill()
    with pytest.raises(UnknownEpisode) as caught:
        environment.start(ROW)
    assert caught.value.reason == "unreachable"
    openenv_servers.serve("guess", port)
    with pytest.raises(UnknownEpisode) as caught:
        respond(episode, call(number=2))
    assert caught.value.reason == "lost"
    again = environment.start(ROW)
    assert said(again, call(number=1)) == "higher", "new episodes go on"
    again.close()
    episode.close()


def test_a_client_of_the_environment_s_own_converts_actions_and_observations(start):
    episode = start(client="tests.unit.openenv_servers:GuessClient")
    assert "ONE OF 1 TO 9" in episode.prompt[0]["content"]
    assert said(episode, call(number="4")) == "HIGHER", "its action type takes digits for a number"
    assert "valid integer" in said(episode, call(number="five"))
    assert respond(episode, call(number=5)) == [] and asyncio.run(episode.reward()) == pytest.approx(0.9)


def test_the_tools_of_an_mcp_environment_are_called_by_their_names(start):
    episode = start("calculator")
    assert [tool["function"]["name"] for tool in episode.tools] == ["add", "divide"]
    assert episode.tools[0]["function"]["description"] == "Add two numbers."
    assert episode.tools[0]["function"]["parameters"]["properties"]["a"] == {"type": "integer"}
    assert episode.prompt == ROW["prompt"], "its first observation is empty"
    assert said(episode, call("add", a=2, b=3)) == "5"
    assert "division by zero" in said(episode, call("divide", a=1, b=0))
    assert "b" in said(episode, call("add", a=1))
    assert episode.failures == {"raised": 1, "arguments": 1}
    with pytest.raises(UnknownEpisode, match="division by zero"):
        respond(start("calculator", limits=settings(on_tool_error="unknown")), call("divide", a=1, b=0))


def test_the_model_s_text_is_the_action_if_asked_for(start):
    episode = start("echo", action="text")
    assert (episode.tools, episode.prompt) == (None, ROW["prompt"])
    assert respond(episode, say("abc")) == [{"role": "user", "content": "cba"}]
    assert respond(episode, say("end")) == []
    assert asyncio.run(episode.reward()) == 6.0
    last = start("echo", action="text", field="words", reward="last")
    respond(last, say("abcd"))
    respond(last, say("end"))
    assert asyncio.run(last.reward()) == 3.0


def test_an_environment_that_ends_without_a_reward_leaves_it_unknown(start):
    episode = start("unrewarded")
    assert respond(episode, call(number=1)) == []
    assert asyncio.run(episode.reward()) is None


def test_episodes_of_a_problem_begin_alike_and_a_column_seed_is_kept(start):
    def first(**row):
        return start(row={**ROW, "number": None} | row).prompt[0]["content"]

    assert first() == first() != first(problem_id="b")
    assert "(seed 7)" in first(seed=7)


def test_the_model_reads_the_fields_that_are_named(start):
    assert start(observation=["hint"]).prompt[0]["content"].startswith("Guess.\n\nOne of")
    assert '"hint": "One of' in start(observation=["hint", "metadata"]).prompt[0]["content"]
    with pytest.raises(BadInput, match="observation names 'clue', and the observation has metadata, hint"):
        start(observation=["clue"])


def test_a_session_is_free_for_another_episode_once_one_is_closed_and_too_few_end_the_run(urls, monkeypatch):
    environment = OpenEnvironment(settings(), url=urls["guess"])
    episodes = [environment.start(ROW) for _ in range(SESSIONS)]
    for _ in range(3):
        episodes.pop(0).close()
        episodes.append(environment.start(ROW))
    monkeypatch.setattr(openenv, "CONNECT_S", 0.3)
    with pytest.raises(CheckFailed, match=rf"no free session .*{SESSIONS}/{SESSIONS}.* max_concurrent_envs"):
        environment.start(ROW)
    for episode in episodes:
        episode.close()


BAD = {
    "down": ({"url": "http://127.0.0.1:9"}, "no OpenEnv server answers at http://127.0.0.1:9 .* Start it before"),
    "no address": ({"url": "localhost"}, "url is 'localhost', not an address"),
    "no action": ({"server": "no_action"}, "has no fields, so there is nothing the model could do"),
    "field without text": ({"field": "number"}, "only `action: text` uses"),
    "unknown field": ({"action": "text", "field": "word"}, "no field 'word', it has number"),
    "two fields": ({"server": "calculator", "action": "text", "field": "type"}, "also requires tool_name"),
    "no token": ({"token_env": "OPENENV_TOKEN"}, "token_env is 'OPENENV_TOKEN', and that environment variable is not"),
    "no client": ({"client": "json:dumps"}, "'json:dumps' is no subclass of openenv's EnvClient"),
    "no module": ({"client": "nowhere:Client"}, "cannot be imported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_run(urls, name):
    options, message = BAD[name]
    options = {"url": urls[options.get("server", "guess")]} | options
    options.pop("server", None)
    with pytest.raises(BadInput, match=message):
        OpenEnvironment(settings(), **options)


def test_a_page_that_is_no_openenv_server_is_refused(monkeypatch):
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "starting"}')

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(BadInput, match=r"is not healthy, it answers \{'status': 'starting'\}"):
            OpenEnvironment(settings(), url=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
