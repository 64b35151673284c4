"""Episodes on stand-in replicas: every turn is a request, of a known version, near the turns before it."""

import asyncio
import pickle
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir
from kit.environments.episode import Message
from kit.rollout.client import ServerRollout
from kit.rollout.episode_tokens import EpisodeTokens
from kit.rollout.episodes import EpisodeResult, EpisodeRunner
from kit.rollout.protocol import decode_ids, encode_floats, encode_ids
from kit.train.setup import load_rewards, make_runner
from tests.unit.fake_replica import log_probs
from tests.unit.test_rollout import CONFIG, GROUP, LINEARS, rollout, served, tokenizer, view  # noqa: F401

TURNS = 3
WORD = 7  # what a stand-in replica says, then the stop token


class Game:
    """An `Environment` that answers `turns` - 1 times; `before_answer` is awaited with the row and the turn."""

    name, owns_reward, takes_tools = "game", True, False

    def __init__(self, before_answer: Any = None):
        self.before_answer, self.episodes, self.closed = before_answer, [], 0
        self.lock = threading.Lock()

    def start(self, row: dict) -> SimpleNamespace:
        episode = SimpleNamespace(tools=None, instance=self, tool_calls=0, failures=Counter(), turns=0)
        episode.prompt = [{"role": "user", "content": f"{row['prompt'][0]['content']} You have {TURNS} turns."}]

        async def respond(reply: Message) -> list[Message]:
            episode.turns += 1
            if self.before_answer is not None:
                await self.before_answer(row, episode.turns)
            return [{"role": "user", "content": "again"}] if episode.turns < TURNS else []

        async def reward() -> float:
            return float(row["number"])

        def close() -> None:
            self.closed += 1

        episode.respond, episode.reward, episode.close = respond, reward, close
        with self.lock:
            self.episodes.append(episode)
        return episode


def answer(body: dict) -> dict:
    """WORD and the stop token, whatever is asked."""
    sample = {"token_ids": encode_ids([WORD, 0]), "logprobs": encode_floats([-0.5, -0.25]), "finish_reason": "stop"}
    return {"version": body["version"], "samples": [sample] * body["n"]}


@pytest.fixture
def playing(rollout, tokenizer):  # noqa: F811
    """`playing(n, game, *overrides)`: a rollout over n replicas that runs episodes of a game, at version 1."""

    def make(count: int, game: Game | None = None, *overrides: str, info: dict | None = None) -> ServerRollout:
        keys = ["--environment=game:game", "--rollout.max_completion_length=64", "--rollout.canary_prompts=0"]
        found = served(rollout(count, info, *keys, *overrides))
        found.episodes = EpisodeRunner(game or Game(), EpisodeTokens(tokenizer, {}, takes_tools=False), found.config)
        for fake in found.fakes:
            fake.before["generate"] = answer
        return found

    return make


def rows(groups: int = 4) -> list[dict]:
    """Groups of rows with prompts of their own."""
    return [
        {"prompt": [{"role": "user", "content": f"What is {number} plus {number}?"}], "number": number}
        for number in range(groups)
        for _ in range(GROUP)
    ]


def requests_of(found: ServerRollout) -> list[tuple[int, dict]]:
    """(replica, body) of the generate requests."""
    return [
        (place, body) for place, fake in enumerate(found.fakes) for action, body in fake.bodies if action == "generate"
    ]


def test_a_turn_is_a_request_of_all_tokens_before_it_and_they_are_appended_as_sampled(playing):
    found = playing(2)
    results, _ = found.run_episodes(view(), rows())
    again = found.episodes.tokens.observation_ids([{"role": "user", "content": "again"}])
    turn, longest = [WORD, 0], found.config.rollout.max_completion_length
    for result in results:
        assert result.completion_ids == turn + again + turn + again + turn
        assert result.sampled == [1, 1] + [0] * len(again) + [1, 1] + [0] * len(again) + [1, 1]
        assert result.logps == [-0.5, -0.25] + [0.0] * len(again) + [-0.5, -0.25] + [0.0] * len(again) + [-0.5, -0.25]
        assert result.versions == [1] * TURNS and result.end == "done"
    assert [result.reward for result in results] == [0, 0, 1, 1, 2, 2, 3, 3]
    sent = Counter((tuple(decode_ids(body["token_ids"])), body["max_tokens"]) for _, body in requests_of(found))
    wanted = Counter()
    for result in results:
        for before in (0, 2 + len(again), 2 * (2 + len(again))):
            wanted[tuple(result.prompt_ids + result.completion_ids[:before]), longest - before] += 1
    assert sent == wanted
    assert {body["n"] for _, body in requests_of(found)} == {1}


def test_the_turns_of_a_group_go_to_one_replica_and_the_groups_to_all(playing):
    found = playing(2)
    results, _ = found.run_episodes(view(), rows())
    replicas_of: dict[tuple, set[int]] = {}
    for place, body in requests_of(found):
        ids = decode_ids(body["token_ids"]).tolist()
        (prompt,) = {tuple(one.prompt_ids) for one in results if ids[: len(one.prompt_ids)] == one.prompt_ids}
        replicas_of.setdefault(prompt, set()).add(place)
    assert len(replicas_of) == 4 and all(len(places) == 1 for places in replicas_of.values())
    assert {place for places in replicas_of.values() for place in places} == {0, 1}


def test_a_slow_environment_holds_up_its_own_episode_only(playing):
    done, ended = threading.Event(), []

    async def wait(row: dict, turn: int) -> None:
        if row["number"] == 0 and turn == 1:
            await asyncio.to_thread(done.wait, 30)
        elif turn == TURNS:
            ended.append(row["number"])
            if len(ended) == 3 * GROUP:
                done.set()

    results, _ = playing(1, Game(wait)).run_episodes(view(), rows())
    assert done.is_set() and all(result.end == "done" for result in results)
    assert all(result.environment_s < 30 for result in results), "the others ended before it"


def test_a_turn_that_fails_on_one_replica_is_made_by_the_other(playing):
    found = playing(2)
    calls = []

    def dies(body: dict) -> dict:
        calls.append(body)
        if len(calls) > 3:
            raise ConnectionError
        return answer(body)

    found.fakes[0].before["generate"] = dies
    results, _ = found.run_episodes(view(), rows())
    assert [result.versions for result in results] == [[1] * TURNS] * 8 and len(calls) > 3


def test_a_turn_that_no_replica_makes_ends_the_run_with_their_names(playing):
    found = playing(2)
    for fake in found.fakes:
        fake.refuses["generate"] = (500, "no KV cache left")
    with pytest.raises(CheckFailed, match=r"attempt 2 of at most 2: .*no KV cache left.*--resume") as failed:
        found.run_episodes(view(), rows())
    assert all(fake.url in str(failed.value) for fake in found.fakes)


def test_a_turn_of_another_version_ends_the_run(playing):
    found = playing(1)
    calls = []

    def later(body: dict) -> dict:
        calls.append(body)
        return answer(body) | {"version": 1 if len(calls) < 10 else 7}

    found.fakes[0].before["generate"] = later
    with pytest.raises(CheckFailed, match="sampled from adapter version 7, version 1 was asked for"):
        found.run_episodes(view(), rows())


def test_an_environment_that_fails_ends_the_run_and_leaves_no_turn_waiting(playing):
    async def broken(row: dict, turn: int) -> None:
        raise ValueError("a bug of the game")

    found = playing(1, Game(broken))
    with pytest.raises(CheckFailed, match="ValueError: a bug of the game"):
        found.run_episodes(view(), rows())
    found.episodes.environment.before_answer = None
    assert len(found.run_episodes(view(), rows())[0]) == 8, "the next step finds the loop running"


def test_every_process_gets_its_share_and_only_the_main_one_the_environments(playing, monkeypatch):
    game = Game()
    found, everything = playing(1, game), rows()
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: everything)
    mine, _ = found.run_episodes(view(index=0), everything[:6])
    assert [result.reward for result in mine] == [0, 0, 1, 1, 2, 2]
    assert all(result.episode.instance is game for result in mine)
    assert game.closed == 2, "those of the other process, which cannot see them"
    sent = pickle.dumps(found._all_episodes(everything, [0], GROUP))
    monkeypatch.setattr(
        found, "_broadcast", lambda outcome: outcome.__setitem__(slice(None), [pickle.loads(sent), 1, None])
    )
    theirs, _ = found.run_episodes(view(index=3, is_main=False), everything[6:])
    assert [(result.reward, result.episode) for result in theirs] == [(3.0, None), (3.0, None)]


def test_episodes_that_were_begun_are_taken_and_go_on_in_between(playing):
    found = playing(1, None, "--rollout.overlap=true")
    everything = rows()
    assert "sync" in found.begin_episodes(view(), everything).seconds
    assert found._ahead.version == 1
    results, report = found.run_episodes(view(), everything)
    assert [result.reward for result in results] == [0, 0, 1, 1, 2, 2, 3, 3] and report.seconds["rollout_hidden"] >= 0
    assert len(requests_of(found)) == 8 * TURNS, "nothing is asked for twice"
    found.begin_episodes(view(), everything)
    with pytest.raises(CheckFailed, match="not the 8 that were generated ahead"):
        found.run_episodes(view(), everything[:-GROUP] + rows(1))
    assert "sync" in found.begin_episodes(view(), []).seconds and found._ahead is None


def test_heldout_episodes_leave_those_begun_for_training_alone(playing):
    found = playing(1, None, "--rollout.overlap=true")
    everything = rows()
    found.begin_episodes(view(), everything)
    assert len(found.run_episodes(view(), everything[::GROUP], group=1)[0]) == 4
    assert len(found.run_episodes(view(), everything)[0]) == 8


def test_an_error_of_the_background_is_raised_where_the_episodes_are_taken(playing):
    found = playing(1, None, "--rollout.overlap=true", "--rollout.retries=0")
    found.fakes[0].refuses["generate"] = (500, "no KV cache left")
    found.begin_episodes(view(), rows())
    with pytest.raises(CheckFailed, match="no KV cache left"):
        found.run_episodes(view(), rows())


def test_a_replica_without_prefix_cache_is_named_at_the_start(playing, capsys):
    found = playing(2, info={"prefix_caching": False})
    out = capsys.readouterr().out
    assert all(
        f"{fake.url} has no prefix cache: it computes each turn's whole context again" in out for fake in found.fakes
    )
    for fake in found.fakes:
        fake.info["prefix_caching"] = True
    found.check(LINEARS, 316)
    assert "prefix cache" not in capsys.readouterr().out


def test_replicas_sleep_after_the_last_turn_of_a_step(playing, monkeypatch):
    found = playing(2, None, "--server.sleep=true", info={"sleep_enabled": True})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for fake in found.fakes:
        fake.calls.clear()
    for _ in range(2):
        found.run_episodes(view(), rows())
        assert all(fake.asleep for fake in found.fakes)
    calls = found.fakes[0].calls
    assert calls.count("wake") == 1 and calls.count("sleep") == 2 and calls[-1] == "sleep"
    assert "generate" in calls[calls.index("wake") :] and "generate" in calls[: calls.index("sleep")]


def test_the_canary_scores_what_the_model_read_and_its_first_turn_and_no_answer_of_the_environment(playing):
    found = playing(1, None, "--rollout.canary_prompts=3")
    found.sync.served = None
    scored = []

    def score(sequences: list, is_adapted: bool = True) -> list[np.ndarray]:
        scored.append(sequences)
        return [log_probs(ids, policy.version if is_adapted else 0) for ids in sequences]

    def write(folder: Path, version: int) -> Path:
        folder.mkdir(parents=True)
        return folder

    policy = view(1, score=score, adapter=lambda: SimpleNamespace(base_hash="ab" * 32, write=write))
    first, _ = found.run_episodes(policy, rows())
    assert [len(sequences) for sequences in scored] == [3, 3], "three prompts, by policy and base, before any turn"
    policy.version = 2
    found.run_episodes(policy, rows())
    kept = found.sync.scorer.most_tokens // 2
    assert scored[-1] == [[*one.prompt_ids[-kept:], WORD, 0] for one in first[: 3 * GROUP : GROUP]]


def test_other_processes_wait_longer_than_all_turns_of_a_step_can_take(playing, monkeypatch):
    keys = ["max_in_flight=1", "retries=3", "request_timeout_s=7", "server_wait_s=11"]
    more = ["--watch.eval_problems=5", "--environment.max_turns=6", "--environment.episode_timeout_s=900"]
    found = playing(1, None, *(f"--rollout.{key}" for key in keys), *more)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    train = found.config.train
    episodes = 2 * train.per_device_train_batch_size * train.gradient_accumulation_steps + 5
    assert found.longest_s >= 11 + 900 + 7 * (6 * episodes * 4 + 7)


def test_a_result_travels_without_its_environment():
    result = EpisodeResult(prompt_ids=[1], completion_ids=[2], sampled=[1], episode=threading.Lock())
    assert pickle.loads(pickle.dumps(result)) == EpisodeResult(prompt_ids=[1], completion_ids=[2], sampled=[1])
    assert result.episode is not None


def judged(completions: list, environments: list, **columns: Any) -> list[float]:
    """A reward function that looks at the environments."""
    return [1.0] * len(completions)


def test_a_reward_that_takes_environments_needs_them_in_its_process(tiny_model_dir, tmp_path):
    keys = ["--environment=game:game", f"--data.path={tiny_model_dir}", "--reward.options={}"]
    keys += ["--reward.functions=['tests.unit.test_server_episodes:judged']"]
    on_servers = load_config(CONFIG, [*keys, "--rollout.backend=server"])
    with pytest.raises(
        BadInput, match=r"judged' takes environments, .* all of 2 processes are in the main one.*get_reward"
    ):
        load_rewards(on_servers, RunDir(tmp_path), True, 2)
    assert load_rewards(on_servers, RunDir(tmp_path), True, 1)[1] == [1.0]
    assert load_rewards(load_config(CONFIG, keys), RunDir(tmp_path), True, 2)[1] == [1.0], "in process they are"


def test_episodes_have_a_tokenizer_of_their_own(playing, tokenizer):  # noqa: F811
    """They run in a thread beside the trainer's, and a fast tokenizer is not made for two."""
    found = make_runner(playing(1).config, Game(), tokenizer).tokens
    assert found.tokenizer is not tokenizer
    message = [{"role": "user", "content": "What is 1 plus 1?"}]
    assert found.prompt_ids(message, None) == EpisodeTokens(tokenizer, {}, False).prompt_ids(message, None)
