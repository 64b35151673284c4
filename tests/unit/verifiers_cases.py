"""The adapter for verifiers with classes of the package; run by .venv-verifiers (tests/unit/test_verifiers.py)."""

import asyncio
import json
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput, CheckFailed
from kit.data.problems import load_problems
from kit.environments import tools
from kit.environments.episode import UnknownEpisode
from kit.environments.verifiers import VerifiersEnvironment, rows
from recipes import verifiers_rows
from tests.unit import verifiers_environments

SYSTEM = {"role": "system", "content": "Be brief."}
PROMPT = [SYSTEM, {"role": "user", "content": "What is 1 plus 1?"}]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """An environment's module is found by its name, as an installed one is."""
    monkeypatch.syspath_prepend(str(verifiers_environments.__file__).rpartition("/")[0])


def settings(**changed):
    return SimpleNamespace(**{"tool_timeout_s": 2.5, "on_tool_error": "observe", "episode_timeout_s": 20.0} | changed)


def load(kind, limits=None, **args):
    return VerifiersEnvironment(limits or settings(), id="verifiers-environments", args={"kind": kind, **args})


@pytest.fixture
def start():
    """Start an episode on a row of the environment's own data; all are closed at the end."""
    started = []

    def one(kind, limits=None, row=0, **args):
        environment = load(kind, limits, **args)
        started.append(environment.start(list(rows(environment.verifiers, "train"))[row]))
        return started[-1]

    yield one
    for episode in started:
        episode.close()


def say(text):
    return {"role": "assistant", "content": text}


def call(*calls):
    found = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": found}


def respond(episode, reply):
    return asyncio.run(episode.respond(reply))


def reward(episode):
    return asyncio.run(episode.reward())


def test_one_turn_is_scored_by_the_rubric(start):
    assert load("single").owns_reward and not load("single").takes_tools
    for text, expected in (("it is 2", 1.0), ("it is 3", 0.0)):
        episode = start("single")
        assert (episode.prompt, episode.tools) == (PROMPT, None)
        assert respond(episode, say(text)) == []
        assert reward(episode) == expected
        assert episode.instance["completion"][0].content == text, "the State is there for reward functions"


def test_tools_are_offered_called_and_answered(start):
    episode = start("tool")
    assert [tool["function"]["name"] for tool in episode.tools] == ["add", "sleep"]
    assert episode.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert respond(episode, call(("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 5}))) == [
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": "7"},
    ]
    assert respond(episode, say("so it is 2")) == []
    assert (reward(episode), episode.tool_calls, episode.failures) == (1.0, 2, {})
    assert episode.instance["metrics"]["add_calls"] == 2.0


def test_a_failed_call_is_an_answer_and_a_slow_one_is_cut_off_in_time(start):
    episode, started = start("tool"), time.monotonic()
    calls = (
        ("add", {"a": 13, "b": 1}),
        ("add", {"a": 1}),
        ("sub", {}),
        ("add", {"a": 99, "b": 1}),
        ("sleep", {"seconds": 15}),
    )
    answers = [message["content"] for message in respond(episode, call(*calls))]
    assert answers[0] == "unlucky" and "'b'" in answers[1] and "sub" in answers[2]
    assert answers[3:] == ["add took longer than 2.5 s", "sleep took longer than 2.5 s"]
    assert time.monotonic() - started < 12
    assert episode.failures == {"raised": 1, "arguments": 1, "unknown_tool": 1, "timeout": 2}
    assert respond(episode, say("2")) == [] and reward(episode) == 1.0


@pytest.mark.parametrize(("arguments", "reason"), [({"a": 13, "b": 1}, "raised"), ({"a": 99, "b": 1}, "timeout")])
def test_a_failed_call_makes_the_episode_unknown_if_asked_for(start, arguments, reason):
    episode = start("tool", settings(on_tool_error="unknown"))
    assert "'b'" in respond(episode, call(("add", {"a": 1})))[0]["content"], "the model's own mistake is an answer"
    with pytest.raises(UnknownEpisode) as caught:
        respond(episode, call(("add", arguments)))
    assert caught.value.reason == reason


def test_too_many_hanging_tools_end_the_run_although_verifiers_catches_everything(start, monkeypatch):
    monkeypatch.setattr(tools, "MOST_HUNG", 0)
    with pytest.raises(CheckFailed, match="hang, far beyond"):
        respond(start("tool"), call(("add", {"a": 1, "b": 1})))


def test_several_turns_run_until_the_environment_stops(start):
    episode = start("guess", row=1)
    assert respond(episode, say("1")) == [{"role": "user", "content": "higher"}]
    assert respond(episode, say("9")) == [{"role": "user", "content": "lower"}]
    assert respond(episode, say("4")) == []
    assert reward(episode) == pytest.approx(0.8)
    final = start("guess")
    assert respond(final, say("end")) == []
    assert reward(final) == pytest.approx(-0.1)
    assert final.instance["completion"][-1].content == "over"


def test_an_episode_that_a_limit_ends_is_scored_with_what_it_has(start):
    cut = start("single")
    asyncio.run(cut.cut_off(say("it is 2")))
    assert reward(cut) == 1.0 and cut.instance["is_truncated"]
    turns = start("guess", row=1)
    respond(turns, say("1"))
    assert reward(turns) == pytest.approx(-0.1)
    assert [message.content for message in turns.instance["completion"]] == ["1"]
    asked = start("tool")
    asyncio.run(asked.cut_off(call(("add", {"a": 13, "b": 1}))))
    assert (reward(asked), asked.failures) == (0.0, {}), "no tool is called after the limit"


@pytest.mark.parametrize(("said", "reason"), [("raise", "raised"), ("infra", "raised"), ("hang", "timeout")])
def test_an_environment_that_fails_makes_the_episode_unknown(start, said, reason):
    episode = start("guess")
    with pytest.raises(UnknownEpisode) as caught:
        respond(episode, say(said))
    assert (caught.value.reason, episode.failures) == (reason, {reason: 1})


def test_a_reward_function_that_raises_is_unknown_and_not_0(start):
    episode = start("broken")
    assert respond(episode, say("2")) == []
    with pytest.raises(UnknownEpisode, match="broken raised RuntimeError: the judge is down"):
        reward(episode)


def test_episodes_do_not_wait_for_each_other(start):
    slow, quick = start("tool", settings(tool_timeout_s=4.5)), start("tool")

    async def both():
        hangs = asyncio.ensure_future(slow.respond(call(("add", {"a": 99, "b": 1}))))
        started = time.monotonic()
        await quick.respond(call(("add", {"a": 1, "b": 1})))
        quick_s = time.monotonic() - started
        return quick_s, (await hangs)[0]["content"]

    quick_s, answer = asyncio.run(both())
    assert quick_s < 4.0 and answer == "add took longer than 4.5 s"


def test_a_group_routes_rows_to_its_environments(start):
    guess, tool = start("several", row=0), start("several", row=5)
    assert load("several").takes_tools
    assert guess.tools is None and len(tool.tools) == 2
    assert respond(guess, say("2")) == [] and reward(guess) == 1.0
    assert respond(tool, say("it is 6")) == [] and reward(tool) == 1.0


def test_a_row_of_other_data_brings_its_reference_as_answer_and_its_columns():
    row = {"prompt": PROMPT, "gold": "7", "problem_id": "a", "info": None}
    episode = load("single").start(row)
    assert respond(episode, say("it is 7")) == [] and reward(episode) == 1.0
    assert episode.instance["input"]["problem_id"] == "a"
    episode.close()


def test_closing_an_episode_cleans_up_whatever_it_waits_for(start):
    episode = start("cleaned")
    episode.close()
    cleaned, deadline = sys.modules["verifiers_environments"].CLEANED, time.monotonic() + 10
    while not cleaned and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cleaned == ["state"]


def test_a_history_that_is_rewritten_ends_the_run(start):
    with pytest.raises(CheckFailed, match="rewrites earlier messages"):
        respond(start("rewrites"), say("1"))


def test_the_process_keeps_its_signal_handlers():
    def own(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, own)
    try:
        load("single")
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_data_of_an_environment_is_written_with_the_configuration_that_reads_it(tmp_path, monkeypatch, capsys):
    def write(*words):
        monkeypatch.setattr(sys, "argv", ["verifiers_rows", "verifiers-environments", *map(str, words)])
        verifiers_rows.main()

    write("--args", "{kind: tool}", "--out", tmp_path / "rows")
    written = [json.loads(line) for line in (tmp_path / "rows/train.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in written] == ["2", "4", "6"] and written[0]["prompt"] == PROMPT
    said = capsys.readouterr().out
    data = yaml.safe_load(said[said.index("data:") :])["data"]
    problems = load_problems(DataConfig(**data), "train")
    assert [problem.messages for problem in problems] == [row["prompt"] for row in written]
    assert problems[2].columns["example_id"] == 2 and problems[2].gold == "6"
    with pytest.raises(BadInput, match="exists already"):
        write("--out", tmp_path / "rows")
    with pytest.raises(BadInput, match="--args must be a group of arguments"):
        write("--args", "hard", "--out", tmp_path / "more")


BAD = {
    "no module": ({"id": "nowhere"}, "cannot be imported: ModuleNotFoundError"),
    "no environment": ({"id": "json"}, "has no attribute 'load_environment'"),
    "unknown argument": ({"args": {"kinds": "tool"}}, "args.kinds: unknown option. Did you mean .*args.kind"),
    "wrong type": ({"args": {"kind": 3}}, "args.kind must be text, it is 3"),
    "raises": ({"args": {"kind": "raises"}}, "cannot be loaded: RuntimeError: .*no such difficulty"),
    "group rewards": ({"args": {"kind": "group"}}, "scores whole groups"),
    "another kind": ({"args": {"kind": "nothing"}}, "is a verifiers_environments.Other. A run can train on"),
    "sampling": ({"args": {"kind": "sampling"}}, "the sampling argument 'stop'"),
    "text": ({"args": {"kind": "text"}}, "plain text"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_the_run(name):
    options, message = BAD[name]
    with pytest.raises((BadInput, CheckFailed), match=message):
        environment = VerifiersEnvironment(settings(), **{"id": "verifiers-environments"} | options)
        environment.start(next(rows(environment.verifiers, "train")))


def test_tools_that_only_a_row_brings_are_refused():
    tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    with pytest.raises(CheckFailed, match=r"info\.tool_defs"):
        load("single").start({"prompt": PROMPT, "info": {"tool_defs": [tool]}})


def test_another_version_of_verifiers_is_named(monkeypatch):
    from kit.environments import verifiers as adapter

    monkeypatch.setattr(adapter.importlib, "import_module", lambda name: SimpleNamespace(__version__="0.4.0"))
    with pytest.raises(BadInput, match=r"verifiers 0\.4\.0 has no MultiTurnEnv. Install 0\.3\.1"):
        load("single")
