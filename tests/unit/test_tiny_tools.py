"""The starting models of the environments: calls are rendered and read, turns add up to ids; the environments."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from kit.core.errors import BadInput
from kit.core.run_directory import read_manifest
from recipes.environments.calculator import Calculator
from recipes.environments.guess import GuessNumber
from recipes.tiny_tools import TASKS, encode, main
from tests import processes

ROOT = Path(__file__).parents[2]
SIZE = ("--hidden", "64", "--layers", "1", "--problems", "300", "--heldout", "40", "--processes", "1")


def made(folder: Path, *options: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_tools.py", "--out", str(folder), *SIZE, *options])
        main()
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of every task, not trained."""
    folder = tmp_path_factory.mktemp("tools")
    return {task: made(folder / task, "--task", task, "--steps", "0") for task in TASKS}


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_seed_gives_the_same_files_and_another_seed_another_model(tmp_path):
    def hashes(folder: Path) -> dict:
        files = read_manifest(folder, "tiny-tools", deep=True)["files"]
        return {name: entry["blake2b"] for name, entry in files.items()}

    steps = ("--task", "calculator", "--steps", "2")
    first = hashes(made(tmp_path / "first", *steps))
    assert hashes(made(tmp_path / "second", *steps)) == first
    other = hashes(made(tmp_path / "third", *steps, "--seed", "1"))
    assert other["model.safetensors"] != first["model.safetensors"] and other["train.jsonl"] != first["train.jsonl"]


@pytest.mark.parametrize("task", TASKS)
def test_the_template_renders_calls_that_transformers_reads(models, task):
    tokenizer = AutoTokenizer.from_pretrained(models[task])
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    rng, turns = random.Random(0), 0
    make, show = TASKS[task]
    for row in make(20, False, rng):
        messages, tools = show(row, rng)
        ids = tokenizer.apply_chat_template(messages[:1], tools=tools, add_generation_prompt=True, return_dict=False)
        for place, message in enumerate(messages[1:], 1):
            rendered = tokenizer.apply_chat_template(
                messages[: place + 1],
                tools=tools,
                add_generation_prompt=message["role"] == "tool",
                return_dict=False,
            )
            assert rendered[: len(ids)] == ids  # what was there is a prefix of the tokens with one message more
            if message["role"] == "assistant":
                end = rendered.index(tokenizer.eos_token_id, len(ids)) + 1
                turn, turns = rendered[len(ids) : end], turns + 1
                assert {"tool_calls": None} | parse_response(tokenizer, turn, ids, tools) == {
                    "tool_calls": None
                } | message
            ids = rendered if message["role"] == "tool" else rendered[:end]
    assert turns >= 30


@pytest.mark.parametrize("task", TASKS)
def test_only_the_assistants_turns_are_learned(models, task):
    tokenizer = AutoTokenizer.from_pretrained(models[task])
    rng = random.Random(0)
    make, show = TASKS[task]
    for row in make(20, False, rng):
        messages, tools = show(row, rng)
        ids, learned = encode(tokenizer, (messages, tools))
        text = tokenizer.decode([token for token, mark in zip(ids, learned, strict=True) if mark])
        turns = [message for message in messages if message["role"] == "assistant"]
        assert text.count("<|im_end|>") == len(turns) and "<|im_start|>" not in text
        assert text.count("<tool_call>") == sum("tool_calls" in turn for turn in turns)
        assert text.endswith(turns[-1]["content"] + "<|im_end|>")


def test_the_prompt_names_the_tool_and_its_parameters_beside_a_system_message(models):
    tokenizer = AutoTokenizer.from_pretrained(models["calculator"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7*8?"}]

    def prompt(messages: list[dict], tools: list | None) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)

    end = "<|im_start|>user\n7*8?<|im_end|>\n<|im_start|>assistant\n"
    tools = [Calculator().calculate, GuessNumber().guess]
    assert prompt(messages[1:], None) == end
    assert prompt(messages, None) == "<|im_start|>system\nBe brief.<|im_end|>\n" + end
    listed = "calculate(expression)\nguess(number)<|im_end|>\n" + end
    assert prompt(messages[1:], tools) == "<|im_start|>system\n" + listed
    assert prompt(messages, tools) == "<|im_start|>system\nBe brief.\n" + listed


def test_no_held_out_pair_of_factors_and_no_held_out_game_is_trained_on(models):
    def factors(row: dict) -> tuple[int, ...]:
        return tuple(sorted(map(int, re.findall(r"\d+", row["question"])[:2])))

    sums = {name: read(models["calculator"], name) for name in ("train", "heldout")}
    assert not {factors(row) for row in sums["train"]} & {factors(row) for row in sums["heldout"]}
    games = {name: read(models["guess"], name) for name in ("train", "heldout")}
    assert not {row["question"] for row in games["train"]} & {row["question"] for row in games["heldout"]}
    assert {int(row["answer"]) for row in games["train"]} == set(range(1, GuessNumber().highest + 1))


@pytest.mark.parametrize(
    "expression, value", [("37*48-5", "1771"), (" 2 + 3 * 4 ", "14"), ("(2+3)*4", "20"), ("007", None), ("0", "0")]
)
def test_the_calculator_evaluates_whole_numbers(expression, value):
    if value is None:
        with pytest.raises(ValueError, match="is not an expression"):
            Calculator().calculate(expression)
    else:
        assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "37*",
        "9**9**9",
        "1/2",
        "1.5+1",
        "True+1",
        "abs(1)",
        "__import__('os')",
        "'a'*9",
        "x",
        "-" * 30 + "1",
        "9" * 41,
    ],
)
def test_the_calculator_refuses_what_is_not_whole_numbers_with_plus_minus_times(expression):
    with pytest.raises(ValueError):
        Calculator().calculate(expression)


@pytest.mark.parametrize(
    "guesses, answers, paid",
    [
        ([7], ["found"], 1.0),
        ([3, 9, 7], ["higher, 4 to 10", "lower, 4 to 8", "found"], 1.0),
        ([5, 2, 99, -1], ["higher, 6 to 10", "higher, 6 to 10", "lower, 6 to 10", "higher, 6 to 10"], 0.0),
        ([1, 2, 3, 4, 7], ["higher, 2 to 10", "higher, 3 to 10", "higher, 4 to 10", "higher, 5 to 10", "found"], 0.0),
        ([7, 8, 7], ["found", "lower, 1 to 7", "found"], 1.0),
        ([], [], 0.0),
    ],
)
def test_a_game_pays_a_find_within_the_guesses_that_count(guesses, answers, paid):
    game = GuessNumber(guesses=4, highest=10)
    for _ in range(2):  # the second game on the same instance, as TRL reuses it
        game.reset(answer="7", problem_id="a column that the game does not know")
        assert [game.guess(number) for number in guesses] == answers
        assert game.get_reward() == paid


@pytest.mark.parametrize(
    "options, named",
    [
        (("--hidden", "100"), "--hidden"),
        (("--processes", "3"), "--processes"),
        (("--problems", "60000"), "--problems"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_written(tmp_path, options, named):
    with pytest.raises(BadInput, match=named):
        made(tmp_path / "model", "--task", "guess", *options)
    assert not (tmp_path / "model").exists()


def test_an_unknown_task_is_refused():
    done = processes.run([sys.executable, "recipes/tiny_tools.py", "--task", "maze"], cwd=ROOT)
    assert done.returncode == 2 and "maze" in done.stderr


@pytest.mark.parametrize("task, environment", [("calculator", Calculator), ("guess", GuessNumber)])
def test_the_environments_run_under_trls_own_trainer(models, task, environment, tmp_path, monkeypatch):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = read(models[task], "train")[:8]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    seen = []

    def answered(environments: list, completions: list, answer: list, **columns: object) -> list[float]:
        seen.extend(environments)
        return [float(turns[-1].get("content") == right) for turns, right in zip(completions, answer, strict=True)]

    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_steps=1,
        max_completion_length=24,
        max_tool_calling_iterations=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(models[task], dtype=torch.float32),
        args=arguments,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(models[task]),
        reward_funcs=[answered],
        environment_factory=environment,
    )
    trainer.train()
    assert trainer.state.global_step == 1 and len(seen) == 4 and all(isinstance(one, environment) for one in seen)
    log = trainer.state.log_history[0]
    assert ("rewards/GuessNumber/mean" in log) == (task == "guess")
