"""An evaluation plays the run's environment: the same turns, limits and rewards as training, in every engine."""

import json
import random
import sys
from dataclasses import replace

import pytest

from eval import vllm_backend
from eval.backends import Asking
from eval.episodes import close_all, episodes_of, play
from eval.score import score
from eval.tasks import scoring_of
from eval.vllm_backend import ask_vllm
from kit.core.config.load import load_config
from kit.core.config.schema import ServerConfig
from kit.core.errors import BadInput
from kit.data.problems import Problem, load_problems
from recipes.tiny_tools import make_games, make_tokenizer, show_game
from tests.conftest import CONFIG

GUESSES = {"Game 1: find my number, 1 to 10.": [5, 8, 7], "Game 3: find my number, 1 to 10.": [4]}  # what is tried


@pytest.fixture(scope="module")
def tokenizer():
    rng = random.Random(0)
    return make_tokenizer([show_game(row, rng) for row in make_games(40, False, rng)], 512)


@pytest.fixture
def config(tmp_path):
    games = [{"question": question, "answer": str(tried[-1])} for question, tried in GUESSES.items()]
    for split, rows in (("train", games[:1]), ("heldout", games)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data.path": tmp_path, "environment": "recipes.environments.guess:GuessNumber", "reward.functions": "[]"}
    keys |= {"rollout.max_prompt_length": 256, "rollout.max_completion_length": 256, "reward.options": "{}"}
    keys |= {"environment.options": "{guesses: 2}", "data.answer_format": "any", "model.path": tmp_path}
    return lambda **more: load_config(CONFIG, [f"--{key}={value}" for key, value in (keys | more).items()])


def problems_of(config) -> list[Problem]:
    return load_problems(config.data, "eval")


class Scripted:
    """A model that guesses `GUESSES` in order, then ends the game; keeps what it was asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def __call__(self, prompts, places, most, starts):
        self.asked.append((prompts, list(places), most, list(starts)))
        return [[*self.turn(ids), 7, 7] for ids in prompts]  # padding behind the stop token

    def turn(self, prompt: list[int]) -> list[int]:
        text = self.tokenizer.decode(prompt)
        tried = next(tried for question, tried in GUESSES.items() if question in text)
        made = text.count("<tool_call>")
        call = {"name": "guess", "arguments": {"number": (tried * 2)[made]}} if made < len(tried) else None
        said = f"<tool_call>{json.dumps(call)}</tool_call>" if call else "Found."
        return [*self.tokenizer(said, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]


def test_a_game_is_played_to_its_end_and_judged_by_its_own_reward(config, tokenizer):
    config = config()
    problems, model = problems_of(config), Scripted(tokenizer)
    episodes = episodes_of(config, problems, 256)
    made = play(episodes, tokenizer, [tokenizer.eos_token_id], 2, model)
    assert [one.text for one in made] == ["Found."] * 4 and all(one.ended for one in made)
    assert made[0].raw.count("higher") == 1 and "higher" not in made[0].said  # the environment's words are not its
    assert made[0].said.count("<tool_call>") == 3
    assert made[0].tokens == sum(made[0].episode.sampled) < len(made[0].episode.completion_ids)
    conversations = [[{"role": "user", "content": one.question}] for one in problems]
    records = score(problems, made, conversations, None, scoring_of(config, owns_reward=True))
    close_all(made)
    # Only the first two guesses count; right is a reward of at least eval.reward_threshold, 1.
    assert [record.reward for record in records] == [0.0, 0.0, 1.0, 1.0]
    assert [record.correct for record in records] == [False, False, True, True]
    assert not any(record.prompt_leak for record in records)


def test_each_turn_goes_on_with_the_random_numbers_of_its_problem_and_sample(config, tokenizer):
    config = config()
    model = Scripted(tokenizer)
    play(episodes_of(config, problems_of(config), 256), tokenizer, [tokenizer.eos_token_id], 2, model)
    assert model.asked[0][1] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert model.asked[-1][1] == [(0, 0), (0, 1)]  # the other game ended earlier
    assert all(starts == [len(ids) for ids in prompts] for prompts, _, _, starts in model.asked)
    assert all(most == 256 - (max(starts) - model.asked[0][3][0]) for _, _, most, starts in model.asked[:1])


def test_an_episode_of_unknown_outcome_is_neither_right_nor_wrong(config, tokenizer, monkeypatch):
    from recipes.environments.guess import GuessNumber

    def hangs(self: object) -> None:
        return None

    monkeypatch.setattr(GuessNumber, "get_reward", hangs)
    config = config()
    problems = problems_of(config)
    made = play(episodes_of(config, problems, 256), tokenizer, [tokenizer.eos_token_id], 1, Scripted(tokenizer))
    records = score(problems, made, [[]] * 2, None, scoring_of(config, owns_reward=True))
    assert [(record.correct, record.reward) for record in records] == [(None, None)] * 2


def judged(completions: list, environments: list, **_: object) -> list[float]:
    """A reward that reads the whole episode and its environment."""
    return [len(messages) / 10 + one.made for messages, one in zip(completions, environments, strict=True)]


def test_a_reward_function_gets_the_episode_and_its_environment(config, tokenizer):
    config = config(**{"eval.reward": f"{__name__}:judged"})
    problems = problems_of(config)
    made = play(episodes_of(config, problems, 256), tokenizer, [tokenizer.eos_token_id], 1, Scripted(tokenizer))
    records = score(problems, made, [[]] * 2, None, scoring_of(config, owns_reward=True))
    assert [record.reward for record in records] == [3 + 0.7, 1 + 0.3]


def test_a_reward_function_decides_nothing_of_an_episode_whose_environment_failed(config, tokenizer):
    config = config(**{"eval.reward": f"{__name__}:judged"})
    problems = problems_of(config)
    made = play(episodes_of(config, problems, 256), tokenizer, [tokenizer.eos_token_id], 1, Scripted(tokenizer))
    made[1] = replace(made[1], episode=replace(made[1].episode, unknown="its tool did not answer"))
    known, unknown = score(problems, made, [[]] * 2, None, scoring_of(config, owns_reward=True))
    assert known.reward == 3 + 0.7 and (unknown.reward, unknown.correct) == (None, None)


def test_what_cannot_take_turns_or_has_no_reward_is_refused_before_anything_loads(config):
    with pytest.raises(BadInput, match=r"eval\.backend server asks for one answer per problem"):
        asked = config(**{"eval.backend": "server"})
        episodes_of(asked, problems_of(asked), 256)
    with pytest.raises(BadInput, match="no environment with a reward of its own"):
        scoring_of(config(**{"eval.reward": "environment"}), owns_reward=False)


# Stands in for eval/vllm_worker.py: guesses as `Scripted` does and counts its rounds.
WORKER = """
import json, sys
sys.path.insert(0, {root!r})
from transformers import AutoTokenizer
from tests.unit.test_eval_episodes import Scripted
request_file, answer_file, rounds = sys.argv[1], sys.argv[2], 0
while True:
    request, rounds = json.load(open(request_file)), rounds + 1
    model = Scripted(AutoTokenizer.from_pretrained(request["model"]))
    rows = [model.turn(ids) for ids in request["prompts"]]
    open(answer_file + ".part", "w").write(json.dumps({{"rows": rows, "dtype": "bfloat16", "version": "0.0"}}))
    import os; os.replace(answer_file + ".part", answer_file)
    open({seen!r}, "a").write(json.dumps([len(rows), request["seeds"], request["max_model_len"]]) + "\\n")
    request_file, answer_file = sys.stdin.readline().strip(), sys.stdin.readline().strip()
"""


def test_vllm_plays_the_same_episodes_round_by_round_in_one_engine(config, tokenizer, tmp_path, monkeypatch):
    from pathlib import Path

    from transformers import GenerationConfig

    place, seen = tmp_path / "checkpoint", tmp_path / "rounds"
    tokenizer.save_pretrained(place)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(place)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(root=str(Path(__file__).parents[2]), seen=str(seen)))
    monkeypatch.setattr(vllm_backend, "WORKER", [sys.executable, str(worker)])
    config = config()
    problems = problems_of(config)
    episodes = episodes_of(config, problems, 256)
    asking = Asking([[{"role": "user", "content": one.question}] for one in problems], 256, 0.7, episodes=episodes)
    answers = ask_vllm(place, asking, ServerConfig(), tmp_path / "log")
    here = play(episodes, tokenizer, [tokenizer.eos_token_id], 1, Scripted(tokenizer))
    assert [one.raw for one in answers.generations] == [one.raw for one in here]
    rounds = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [count for count, _, _ in rounds] == [2, 2, 1, 1]
    seeds = [seed for _, made, _ in rounds for seed in made]
    assert len(set(seeds)) == len(seeds), "two turns share random numbers"
    assert {length for _, _, length in rounds} == {512}
