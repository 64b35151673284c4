"""The runner of episodes: limits, time, unknown ones, many at once, and turns in lockstep."""

import pickle
import threading
import time
from collections import Counter as Counts

import pytest

from kit.core.errors import BadInput, CheckFailed
from kit.environments.episode import UnknownEpisode
from kit.environments.trl_contract import TrlEpisode
from kit.rollout.episodes import DONE, LENGTH, TURNS, UNKNOWN, EpisodeResult, Lockstep, rollouts_of, try_first
from kit.rollout.policy_view import Report
from tests.unit import episode_cases
from tests.unit.episode_cases import HERE, PROMPT, Script, call, play, runner, tokenizer

END = "<|im_end|>"
ADD = call("add", number=1) + END


@pytest.mark.parametrize(
    ("keys", "turns", "end"),
    [
        ({}, 4, DONE),
        ({"max_turns": 4}, 4, DONE),
        ({"max_turns": 3}, 3, TURNS),
        ({"max_turns": 1}, 1, TURNS),
        ({"max_turn_tokens": 8}, 1, LENGTH),
        ({"rollout__max_completion_length": 100}, 4, LENGTH),
    ],
)
def test_an_episode_ends_at_its_limits(keys, turns, end):
    (one,) = play(runner(factory=f"{HERE}:Counter", **keys), [[ADD, ADD, ADD, "3" + END]])
    assert (one.turns, one.end, one.is_truncated) == (turns, end, end == LENGTH)
    assert len(one.completion_ids) == len(one.sampled) <= keys.get("rollout__max_completion_length", 2000)
    assert one.sampled[-1] == 1 and one.unknown is None


def test_a_tool_call_that_ends_at_a_stop_text_is_parsed_and_closed_behind_it():
    made = runner(factory=f"{HERE}:Counter", rollout__stop='["</tool_call>"]')
    (closed,) = play(runner(factory=f"{HERE}:Counter"), [[ADD, "3" + END]])
    (one,) = play(made, [[call("add", number=1), "3" + END]])
    assert (one.end, one.turns, one.tool_calls, one.failures) == (DONE, 2, 1, {}) and one.messages == closed.messages
    # The same tokens: the turn's stop token is the first of the answer, so it is not learned.
    assert one.completion_ids == closed.completion_ids
    end = made.tokens.tokenizer.eos_token_id
    assert one.completion_ids.index(end) == one.sampled.index(0) and closed.sampled[one.sampled.index(0)] == 1
    (last,) = play(made, [[call("add", number=1), "</tool_call>"]])
    assert last.end == DONE and last.completion_ids[-1] != end, "nothing follows the last turn"


def test_a_turn_is_whole_if_its_stop_text_ends_at_the_limit():
    texts, most = [["1 2 STOP"]], len(tokenizer()("1 2 STOP")["input_ids"])
    for stop, end in (("[STOP]", DONE), ("[STOPS]", LENGTH)):
        made = runner(factory=f"{HERE}:Counter", rollout__stop=stop, max_turn_tokens=most)
        assert play(made, texts)[0].end == end


def test_a_turn_that_a_limit_cuts_off_is_given_to_the_episode_and_no_other_one(monkeypatch):
    cut = []

    async def note(self, reply):
        cut.append(reply["content"])

    monkeypatch.setattr(TrlEpisode, "cut_off", note)
    texts = [["1 2 3 4 5 6 7 8 9" + END], ["1" + END], [ADD, ADD, ADD]]
    results = play(runner(factory=f"{HERE}:Counter", max_turn_tokens=8), texts[:2])
    assert [one.end for one in results] == [LENGTH, DONE] and len(cut) == 1 and cut[0].startswith("1 2")
    (one,) = play(runner(factory=f"{HERE}:Counter", max_turns=1), texts[2:])
    assert one.end == TURNS and len(cut) == 1, "a turn that is whole was answered"


def test_a_turn_gets_what_is_left_of_the_episode_and_no_more_than_its_own_limit():
    made = runner(factory=f"{HERE}:Counter", rollout__max_completion_length=100, max_turn_tokens=60)
    script = Script(made.tokens.tokenizer, [[ADD, ADD, "2" + END]])
    (one,) = made.submit([{"prompt": PROMPT, "gold": "0"}], script, [2]).result(30)
    asked = [most for _, _, most in script.asked]
    starts = [before - len(one.prompt_ids) for _, before, _ in script.asked]
    assert asked == [min(60, 100 - start) for start in starts] and starts[0] == 0 < starts[1]


def test_an_answer_that_fills_the_episode_ends_it_without_another_turn():
    texts = [[ADD, "1" + END]]
    (whole,) = play(runner(factory=f"{HERE}:Counter"), texts)
    full = len(whole.completion_ids) - 2
    for room, kept in ((full, 1), (full - 1, 0)):
        (one,) = play(runner(factory=f"{HERE}:Counter", rollout__max_completion_length=room), texts)
        assert one.end == LENGTH and one.turns == 1 and len(one.messages) == 1 + kept


def test_a_long_answer_is_cut_in_the_tokens_too():
    texts = [[call("fail") + END, "0" + END]]
    (one,) = play(runner(factory=f"{HERE}:Counter", max_observation_tokens=3), texts)
    whole = str({"error": "no such thing"})
    shown, _, note = one.messages[1]["content"].partition(" [cut: ")
    assert whole.startswith(shown) and len(tokenizer()(shown)["input_ids"]) == 3
    assert note == f"{len(shown)} of {len(whole)} characters]"
    assert f"{shown} [cut: {note}" in tokenizer().decode(one.completion_ids)


@pytest.mark.parametrize("most", ["null", 20])
def test_an_answer_of_megabytes_holds_up_nobody(most, monkeypatch):
    made = runner(factory=f"{HERE}:Counter", max_observation_tokens=most)
    monkeypatch.setattr(episode_cases.Counter, "add", lambda self, number: "the same words " * 1_000_000)
    started = time.monotonic()
    (one,) = play(made, [[ADD, "1" + END]])
    assert time.monotonic() - started < 10, "its 14 MB as tokens take 30 s"
    assert (one.end, one.turns) == ((LENGTH, 1) if most == "null" else (DONE, 2))


def test_slow_tools_hold_up_their_own_episodes_only():
    texts = [[call("hang", seconds=3.0) + END, "slow" + END] for _ in range(8)] + [[ADD, "fast" + END]] * 8
    made = runner(factory=f"{HERE}:Counter")
    script, order = Script(made.tokens.tokenizer, texts), []
    script.leave = order.append
    started = time.monotonic()
    results = made.submit([{"prompt": PROMPT, "gold": "0"} for _ in texts], script, [2]).result(30)
    assert time.monotonic() - started < 8 * 3.0, "one after another"
    assert set(order[:8]) == set(range(8, 16)), "fast ones end first"
    assert [one.messages[-1]["content"] for one in results] == ["slow"] * 8 + ["fast"] * 8


def test_a_call_is_in_time_however_long_the_turns_of_others_take_to_read(monkeypatch):
    """A turn takes 75 ms to parse, in 40 episodes: 3 s in which an instant call must not run out of 2.5 s."""
    made = runner(factory=f"{HERE}:PaidCounter", tool_timeout_s=2.5)
    read = made.tokens.reply

    def slowly(*arguments):
        ended = time.monotonic() + 0.075
        while time.monotonic() < ended:  # computes, as a parser does
            pass
        return read(*arguments)

    monkeypatch.setattr(made.tokens, "reply", slowly)
    results = play(made, [[ADD, "1" + END]] * 40)
    assert [one.failures for one in results] == [{}] * 40
    assert max(one.environment_s for one in results) < 2.5


def test_an_episode_out_of_time_is_unknown_and_the_others_go_on():
    texts = [[call("hang", seconds=25) + END], [call("wait", seconds=25) + END], [ADD, "1" + END]]
    made = runner(factory=f"{HERE}:PaidCounter", tool_timeout_s=2.5, episode_timeout_s=2.5)
    started = time.monotonic()
    hung, waiting, fine = play(made, texts)
    assert time.monotonic() - started < 20
    assert (fine.end, fine.unknown, fine.reward) == (DONE, None, 1.0)
    for one in (hung, waiting):
        # Which of the two limits is first decides whether the model still reads that the call failed.
        assert one.unknown == "episode_timeout" and one.end == UNKNOWN and one.reward is None
        assert one.sampled and one.versions == [3]


@pytest.mark.parametrize(("policy", "unknown"), [("observe", None), ("unknown", "tool_timeout")])
@pytest.mark.parametrize("name", ["hang", "wait"])
def test_a_call_out_of_time_is_read_by_the_model_or_ends_the_episode(policy, unknown, name):
    texts = [[call(name, seconds=3) + END, "so be it" + END]]
    made = runner(factory=f"{HERE}:PaidCounter", tool_timeout_s=0.2, on_tool_error=policy)
    (one,) = play(made, texts)
    assert one.unknown == unknown and one.failures == {"timeout": 1} and one.tool_calls == 1
    if unknown is None:
        assert one.messages[1]["content"] == str({"error": f"{name} took longer than 0.2 s"}) and one.reward == 0.0
    else:
        assert one.reward is None and one.end == UNKNOWN


def test_an_episode_that_cannot_start_has_a_prompt_and_one_token_that_is_not_learned():
    class Fails:
        name, owns_reward, takes_tools = "fails", True, False

        def start(self, row):
            raise UnknownEpisode("server", "down")

    made = runner(factory=f"{HERE}:Counter")
    made.environment = Fails()
    (one,) = play(made, [["never" + END]])
    assert (one.end, one.unknown, one.turns, one.reward) == (UNKNOWN, "server", 0, None)
    assert one.prompt_ids and one.completion_ids == [2] and one.sampled == [0]
    assert one.messages == [{"role": "assistant", "content": ""}]


def test_a_prompt_that_outgrows_its_limit_is_unknown_and_cut():
    made = runner(factory=f"{HERE}:Counter", rollout__max_prompt_length=20)
    long, short = play(
        made, [["x" + END], ["y" + END]], [{"prompt": PROMPT, "gold": gold} for gold in ("9" * 30, "0")]
    )
    assert long.unknown == "prompt_too_long" and len(long.prompt_ids) == 20 and short.unknown == "prompt_too_long"


def test_an_error_of_an_environment_ends_all_episodes():
    class Wrong:
        name, owns_reward, takes_tools = "wrong", False, False

        def start(self, row):
            if row["gold"] == "1":
                raise ZeroDivisionError("a fault of the environment")
            time.sleep(0.05)
            raise UnknownEpisode("slow")

    made = runner(factory=f"{HERE}:Counter")
    made.environment = Wrong()
    script = Script(made.tokens.tokenizer, [[], []])
    with pytest.raises(ZeroDivisionError):
        made.submit([{"prompt": PROMPT, "gold": gold} for gold in "01"], script, [2]).result(30)


def generator(made, texts, batches):
    """What a policy in this process says, by how much each episode has said already."""
    ids = [[made.tokens.tokenizer(text, add_special_tokens=False)["input_ids"] for text in one] for one in texts]
    said = Counts()

    def generate(asks):
        assert threading.current_thread() is threading.main_thread()
        batches.append(len(asks))
        live = [n for n in range(len(texts)) if said[n] < len(ids[n])]
        assert [ask.episode for ask in asks] == live, "those that wait, in their order"
        turns = [ids[n][said[n]] for n in live]
        said.update(live)
        return turns

    return generate


def test_lockstep_generates_for_all_live_episodes_together_and_in_order():
    made, batches = runner(factory=f"{HERE}:Counter"), []
    waits = [(0.2, 2), (0.1, 2), (0.0, 1)]  # the last episodes are the first to wait for a turn
    texts = [[call("wait", seconds=s) + END] * calls + [f"{n}{END}"] for n, (s, calls) in enumerate(waits)]
    rows = [{"prompt": PROMPT, "gold": "0"} for _ in texts]
    results = made.sample_here(rows, generator(made, texts, batches), 7, [2])
    assert [one.messages[-1]["content"] for one in results] == ["0", "1", "2"]
    assert batches == [3, 3, 2] and {v for one in results for v in one.versions} == {7}
    assert all(one.logps is None for one in results)


def test_an_error_while_generating_ends_the_episodes_and_the_next_step_works():
    made = runner(factory=f"{HERE}:Counter")
    rows = [{"prompt": PROMPT, "gold": "0"}] * 3

    def fails(asks):
        raise MemoryError

    with pytest.raises(MemoryError):
        made.sample_here(rows, fails, 0, [2])
    assert len(made.sample_here(rows, generator(made, [["1" + END]] * 3, []), 0, [2])) == 3


def test_episodes_that_cannot_start_do_not_hold_up_a_step():
    made = runner(factory=f"{HERE}:Counter")
    start = made.environment.start

    def sometimes(row):
        if row["gold"] == "1":
            raise UnknownEpisode("server")
        return start(row)

    made.environment.start = sometimes
    rows = [{"prompt": PROMPT, "gold": gold} for gold in "1011"]
    assert [one.unknown for one in made.sample_here(rows, lambda asks: [[5, 2]], 0, [2])] == [
        *("server", None, "server", "server")
    ]
    none = made.sample_here(rows[:1], lambda asks: pytest.fail("nobody asked"), 0, [2])
    assert none[0].unknown == "server"


def test_lockstep_hands_over_nothing_while_one_episode_works():
    sampler = Lockstep(2, 0)
    sampler._waiting = [None]
    sampler._hand_over()
    assert sampler._batches.empty()


def test_results_travel_without_the_environment_they_ran_in():
    (one,) = play(runner(factory=f"{HERE}:PaidCounter"), [[ADD, "1" + END]])
    again = pickle.loads(pickle.dumps(one))
    assert again.episode is None and one.episode is not None
    assert (again.completion_ids, again.reward, again.versions) == (one.completion_ids, 1.0, one.versions)


def test_rollouts_have_log_probs_for_every_episode_or_for_none():
    failed = EpisodeResult(prompt_ids=[1], completion_ids=[2], sampled=[0])
    good = EpisodeResult(prompt_ids=[1], completion_ids=[3, 2], sampled=[1, 1], logps=[-1.0, -2.0], versions=[4])
    made = rollouts_of([failed, good], 4, Report({}, {}), has_logps=True)
    assert made.logps == [[0.0], [-1.0, -2.0]] and made.token_ids == [[2], [3, 2]]
    assert rollouts_of([failed], 4, Report({}, {}), has_logps=True).logps == [[0.0]]
    assert rollouts_of([good], 4, Report({}, {}), has_logps=False).logps is None


def test_the_first_problem_is_tried_before_anything_is_loaded():
    made = runner(factory=f"{HERE}:Counter")
    added = try_first(made, {"prompt": PROMPT, "gold": "7"})
    plain = made.tokens.prompt_ids(PROMPT, None)
    assert added == len(made.tokens.prompt_ids(PROMPT, made.environment._schemas[None])) - len(plain) + len(
        tokenizer()(" Count to 7.")["input_ids"]
    )
    small = runner(factory=f"{HERE}:Counter", rollout__max_prompt_length=20)
    with pytest.raises(BadInput, match=r"prompt of the first problem has \d+ tokens.*max_prompt_length is 20. Raise"):
        try_first(small, {"prompt": PROMPT, "gold": "7"})
    assert len(made.environment._idle[None]) == 1, "given back"


def test_hanging_calls_are_bounded(monkeypatch):
    monkeypatch.setattr("kit.environments.tools.MOST_HUNG", 3)
    monkeypatch.setattr("kit.environments.tools._abandoned", [])
    made = runner(factory=f"{HERE}:Counter", tool_timeout_s=0.05)
    play(made, [[call("hang", seconds=60) + END, "1" + END]] * 3)
    with pytest.raises(CheckFailed, match="3 calls of tools or environments hang"):
        play(made, [["1" + END]])
