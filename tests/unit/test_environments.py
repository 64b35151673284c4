"""Environments by TRL's contract and tools: what is refused before weights load, calls, rewards, the sandbox."""

import asyncio
import time
import warnings

import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import config_from_dict, load_config, to_dict
from kit.core.errors import BadInput, CheckFailed
from kit.environments.episode import UnknownEpisode
from kit.environments.load import load_environment
from kit.environments.tools import ToolFailed, call_tool
from reward.own import RewardFailed
from tests.conftest import CONFIG
from tests.unit import episode_cases
from tests.unit.episode_cases import HERE, PROMPT, PaidCounter, config

ROW = {"prompt": PROMPT, "gold": "0", "problem_id": "a"}


# The configuration.


def test_an_environment_may_be_given_as_text(tmp_path):
    given = config(factory="a:B", max_turns=3)
    for short in (["--environment", "a:B"], ["--environment=a:B"]):
        assert load_config(CONFIG, [*short, "--environment.max_turns=3"]) == given
    (tmp_path / "run.yaml").write_text(CONFIG.read_text() + "environment: a:B\n")
    assert load_config(tmp_path / "run.yaml", ["--environment.max_turns=3"]) == given
    assert config_from_dict(to_dict(given)) == given
    assert load_config(CONFIG).environment.is_given is False and config(tools="[a:b]").environment.is_given


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"factory": "calculator"}, "environment.factory is 'calculator'. Write it as module:callable"),
        ({"tools": "[pyhton]"}, "environment.tools names 'pyhton'. Write it as module:function, or use python"),
        ({"max_turns": 3}, "environment.max_turns is set and there is no environment"),
        ({"factory": "openenv", "tools": "[a:b]"}, "openenv, whose environments bring their own tools, and environ"),
        ({"tools": "[a:b]", "options": "{a: 1}"}, "environment.options are for environment.factory"),
        ({"factory": "a:B", "max_turns": 0}, "environment.max_turns (0) must be at least 1"),
        (
            {"factory": "a:B", "max_turn_tokens": 41},
            "environment.max_turn_tokens (41) is above rollout.max_completion",
        ),
        ({"factory": "a:B", "tool_timeout_s": 200}, "environment.tool_timeout_s (200) is above environment.episode_"),
        ({"factory": "a:B", "rollout__routing": "replay", "rollout__backend": "server"}, "rollout.routing to own"),
        ({"factory": "a:B", "distill__teacher": "base"}, "in a distillation"),
        ({"factory": "a:B", "train__trl": "{max_tool_calling_iterations: 3}"}, "environment.max_turns bounds"),
        ({"reward__functions": "[]"}, "reward.functions is empty"),
    ],
)
def test_settings_that_conflict_are_refused_by_name(keys, said):
    with pytest.raises(BadInput) as refused:
        check_config(config(**keys), 1)
    assert said in str(refused.value)


def test_episodes_in_process_need_the_whole_base(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match="episodes take turns of their own"):
        check_config(config(factory="a:B"), 1)


def test_what_works_is_not_refused():
    check_config(config(factory="a:B", tools="[python, a:b]", allow_code_execution=True, reward__functions="[]"), 1)


# The factory and the tools.


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"factory": "nowhere:Thing"}, "environment.factory 'nowhere:Thing' cannot be imported"),
        ({"factory": f"{HERE}:Nothing"}, "cannot be imported"),
        ({"factory": f"{HERE}:NUMBER"}, "is a int, not a function"),
        ({"factory": f"{HERE}:NoReset"}, "makes a NoReset without a method reset"),
        ({"factory": f"{HERE}:double"}, "environment.options.number must be set"),
        ({"factory": f"{HERE}:Broken"}, "environment.factory raised RuntimeError: no licence"),
        ({"factory": f"{HERE}:MIXED"}, "some of Counter, PaidCounter have get_reward and some do not"),
        ({"factory": f"{HERE}:BOTH", "options": "{start: 1}"}, "environment.options are for one factory"),
        (
            {"factory": f"{HERE}:Counter", "options": "{strat: 1}"},
            "unknown option. Did you mean environment.options.st",
        ),
        ({"factory": f"{HERE}:Counter", "options": "{start: one}"}, "environment.options.start must be an integer"),
        ({"tools": f"[{HERE}:untyped]"}, "the argument 'number' of untyped has no type"),
        ({"tools": f"[{HERE}:undocumented]"}, "it has no docstring"),
        ({"tools": f"[{HERE}:undescribed]"}, "no description for the argument 'number'"),
        ({"tools": f"[{HERE}:double, {HERE}:double]"}, "environment.tools has several tools named 'double'"),
        ({"tools": "[python]"}, "environment.allow_code_execution to true"),
        ({"factory": f"{HERE}:Counter", "reward__functions": "[]"}, "Counter has no reward of its own"),
    ],
)
def test_what_is_no_environment_is_refused(keys, said):
    with pytest.raises(BadInput) as refused:
        load_environment(config(**keys))
    assert said in str(refused.value)


def test_a_reset_that_needs_what_the_data_has_not_is_refused():
    with pytest.raises(BadInput, match="reset of Needy needs an argument 'secret'; the data has prompt, gold"):
        load_environment(config(factory=f"{HERE}:Needy")).start(ROW)


def test_tools_of_an_environment_and_plain_ones_are_shown_in_trls_order():
    made = load_environment(config(factory=f"{HERE}:Counter", tools=f"[{HERE}:double]"))
    shown = [tool["function"]["name"] for tool in made.start(ROW).tools]
    assert shown == ["double", "add", "fail", "hang", "wait"]
    assert (made.name, made.owns_reward, made.takes_tools) == ("Counter", False, True)


def test_options_reach_the_factory_converted():
    episode = load_environment(config(factory=f"{HERE}:PaidCounter", options="{start: 4}")).start(ROW)
    assert episode.instance.start == 4 and asyncio.run(episode.reward()) == 4.0


def test_the_first_observation_is_appended_to_the_last_message_of_a_copy():
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "gold": "7"}
    prompt = load_environment(config(factory=f"{HERE}:Counter")).start(row).prompt
    assert [m["content"] for m in prompt] == ["s", "q Count to 7."] and row["prompt"][1]["content"] == "q"


def test_a_row_chooses_among_several_factories():
    made = load_environment(config(factory=f"{HERE}:BOTH"))
    assert type(made.start({**ROW, "environment": "paid"}).instance).__name__ == "Counter"
    with pytest.raises(BadInput, match="column environment is 'other'; there are counter, paid"):
        made.start({**ROW, "environment": "other"})


def test_an_instance_is_reset_for_another_episode_and_never_shared():
    made = load_environment(config(factory=f"{HERE}:Counter"))
    first, second = made.start(ROW), made.start(ROW)
    assert first.instance is not second.instance
    first.close()
    third = made.start(ROW)
    assert third.instance is first.instance and third.instance.resets == 2


def respond(episode, *calls):
    return asyncio.run(episode.respond({"role": "assistant", "content": "", "tool_calls": [*calls]}))


def asked(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_instance_in_which_a_call_still_hangs_is_not_used_again():
    made = load_environment(config(factory=f"{HERE}:Counter", tool_timeout_s=0.1))
    episode = made.start(ROW)
    respond(episode, asked("hang", seconds=1.0))
    episode.close()
    assert made.start(ROW).instance is not episode.instance


@pytest.mark.parametrize(
    ("call", "reason", "text"),
    [
        (asked("fail"), "raised", "no such thing"),
        (asked("nothing"), "unknown_tool", "Tool nothing not found."),
        (asked("add", numbers=1), "arguments", "Counter.add() got an unexpected keyword argument 'numbers'"),
        (asked("add"), "arguments", "Counter.add() missing 1 required positional argument: 'number'"),
        ({"type": "custom", "name": "add"}, "unsupported", "Unsupported tool call type: custom"),
    ],
)
@pytest.mark.parametrize("policy", ["observe", "unknown"])
def test_a_failed_call_is_counted_by_reason(call, reason, text, policy):
    episode = load_environment(config(factory=f"{HERE}:Counter", on_tool_error=policy)).start(ROW)
    if policy == "unknown" and reason == "raised":  # a fault of the tool; the others are the model's
        with pytest.raises(UnknownEpisode) as unknown:
            respond(episode, call)
        assert unknown.value.reason == "tool_raised"
    else:
        (message,) = respond(episode, call)
        assert message["role"] == "tool" and message["content"] == str({"error": text})
    assert episode.failures == {reason: 1} and episode.tool_calls == 1


def test_an_unknown_episode_leaves_no_coroutine_behind():
    episode = load_environment(config(factory=f"{HERE}:Counter", on_tool_error="unknown")).start(ROW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnknownEpisode):
            respond(episode, asked("wait", seconds=0.0), asked("fail"))


@pytest.mark.parametrize("kind", ["PaidCounter", "LatePaidCounter"])
def test_a_plain_or_async_get_reward_is_the_environments_reward(kind):
    made = load_environment(config(factory=f"{HERE}:{kind}", reward__functions="[]"))
    assert (made.name, made.owns_reward) == (kind, True)
    episode = made.start(ROW)
    assert asyncio.run(episode.reward()) == {"PaidCounter": 0.0, "LatePaidCounter": 1.0}[kind]


@pytest.mark.parametrize(("value", "error"), [("much", CheckFailed), (ZeroDivisionError("x"), RewardFailed)])
def test_a_get_reward_that_returns_no_number_or_raises_ends_the_run(monkeypatch, value, error):
    def get_reward(self):
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(PaidCounter, "get_reward", get_reward)
    with pytest.raises(error, match="get_reward of PaidCounter"):
        asyncio.run(load_environment(config(factory=f"{HERE}:PaidCounter")).start(ROW).reward())


def test_a_tools_own_timeout_is_not_taken_for_the_limit():
    def slow() -> str:
        raise TimeoutError("its own")

    async def late() -> str:
        raise TimeoutError("its own")

    for tool in (slow, late):
        with pytest.raises(Exception, match="its own") as failed:
            asyncio.run(call_tool(tool, {}, 5.0))
        assert failed.value.reason == "raised"


# Code of the model.


@pytest.fixture(scope="module")
def python():
    made = load_environment(config(tools="[python]", allow_code_execution=True, tool_timeout_s=4))
    assert made.name == "tools" and made.start(ROW).instance is None
    return made


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("x = 6", "(no output)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("open('/etc/passwd').read()", "Error"),
        ("import socket; socket.socket()", "Error"),
        ("import os; os.environ['HOME'] and len(os.environ) < 5", "True"),
        ("print('a' * 100000)", "a" * 10_000),
    ],
)
def test_code_runs_in_the_sandbox_and_its_output_is_read(python, code, printed):
    (message,) = respond(python.start(ROW), asked("python", code=code))
    assert printed in message["content"] and len(message["content"]) <= 10_000


@pytest.mark.parametrize(("code", "reason"), [("while True: pass", "timeout"), ("import os; os._exit(0)", "killed")])
def test_code_that_hangs_or_dies_is_a_failed_call(python, code, reason):
    episode = python.start(ROW)
    (message,) = respond(episode, asked("python", code=code))
    assert "error" in message["content"] and episode.failures == {reason: 1}


def test_the_cases_of_this_file_are_of_trls_contract():
    for one in (episode_cases.Counter, PaidCounter, episode_cases.LatePaidCounter):
        assert callable(one().reset) and one().reset() is None


def test_a_result_that_was_there_in_time_counts_also_if_the_event_loop_notices_late():
    def quick() -> str:
        time.sleep(0.05)
        return "done"

    def slow() -> str:
        time.sleep(0.8)
        return "late"

    async def busy(tool, limit_s: float) -> str:
        called = asyncio.create_task(call_tool(tool, {}, limit_s))
        await asyncio.sleep(0.01)
        time.sleep(limit_s + 0.5)  # what parsing and rendering for hundreds of episodes do to the loop
        return await called

    assert asyncio.run(busy(quick, 2.5)) == "done"
    with pytest.raises(ToolFailed, match="slow took longer than"):
        asyncio.run(busy(slow, 0.5))
