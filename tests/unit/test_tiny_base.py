"""The starting model of the quickstart: the same from the same seed, held-out problems held out, options checked."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.errors import BadInput
from kit.core.run_directory import read_manifest
from recipes.tiny_base import PEOPLE, STORIES, THINGS, encode_conversations, main, make_problems
from tests import processes

ROOT = Path(__file__).parents[2]
PARTS = ("gate_proj", "up_proj", "down_proj")
SIZE = ("--hidden", "64", "--layers", "1", "--problems", "150", "--heldout", "20", "--processes", "1", "--steps", "3")


def made(folder: Path, *options: str) -> dict[str, str]:
    """Hash of every file that tiny_base wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_base.py", "--out", str(folder), *SIZE, *options])
        main()
    files = read_manifest(folder, "tiny-base", deep=True)["files"]
    return {name: entry["blake2b"] for name, entry in files.items()}


def test_the_same_seed_gives_the_same_files_and_another_seed_another_model(tmp_path):
    first = made(tmp_path / "first")
    torch.rand(7)  # what ran before in the process must not matter
    assert made(tmp_path / "second") == first
    other = made(tmp_path / "third", "--seed", "1")
    assert other["model.safetensors"] != first["model.safetensors"] and other["train.jsonl"] != first["train.jsonl"]
    assert made(tmp_path / "untrained", "--steps", "0")["model.safetensors"] != first["model.safetensors"]


def pair(question: str) -> tuple[int, int]:
    low, high = sorted(map(int, re.findall(r"\d+", question)))
    return low, high


def test_no_held_out_pair_of_numbers_is_trained_on(learning_model_dir, tiny_model_dir):
    for folder in (learning_model_dir, tiny_model_dir):
        rows = {
            name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "heldout")
        }
        trained = {pair(row["question"]) for row in rows["train"]}
        held_out = {pair(row["question"]) for row in rows["heldout"]}
        assert held_out and not trained & held_out
        for row in rows["train"] + rows["heldout"]:
            assert set(row) == {"question", "answer"} and int(row["answer"]) == sum(pair(row["question"]))
        assert len({row["question"] for row in rows["train"]}) == len(rows["train"])


def test_the_model_loads_with_its_template_its_stop_token_and_tied_embeddings(learning_model_dir):
    tokenizer = AutoTokenizer.from_pretrained(learning_model_dir)
    model = AutoModelForCausalLM.from_pretrained(learning_model_dir)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "7 + 15"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\n7 + 15<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.tokenize("15") == ["1", "5"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_mixture_is_stored_expert_by_expert_and_routes_a_token_to_two(tmp_path):
    first = made(tmp_path / "first", "--experts", "4")
    assert made(tmp_path / "second", "--experts", "4") == first
    with safe_open(tmp_path / "first" / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}
    experts = {f"model.layers.0.mlp.experts.{n}.{part}.weight" for n in range(4) for part in PARTS}
    assert experts == {name for name in shapes if ".experts." in name}
    assert {shapes[name] for name in experts} == {(64, 64)} and shapes["model.layers.0.mlp.gate.weight"] == (4, 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    chosen = model.model.layers[0].mlp.gate(torch.randn(5, 64, dtype=torch.bfloat16))[2]
    assert chosen.shape == (5, 2) and model.config.norm_topk_prob
    with pytest.raises(BadInput, match=r"--experts \(1\) must be 0 \(dense\), or 2 or more"):
        made(tmp_path / "third", "--experts", "1")


@pytest.mark.parametrize(
    ("count", "heldout", "limit", "message"),
    [
        (20_000, False, 4, r"--limit 4 allows \d+ training problems, 20,000 were asked for"),
        (500, True, 2, r"--limit 2 allows \d+ held-out problems, 500 were asked for\. Lower --heldout"),
    ],
)
def test_more_problems_than_there_are_is_refused_instead_of_searched_for_without_end(count, heldout, limit, message):
    with pytest.raises(BadInput, match=message):
        make_problems(count, heldout, limit, random.Random(0))


def test_every_possible_problem_can_be_asked_for():
    per_pair = sum((len(PEOPLE) if "who" in story else 1) * len(THINGS) for story in STORIES)
    for limit in range(1, 30):
        try:
            make_problems(10**9, False, limit, random.Random(0))
        except BadInput as error:
            possible = int(re.search(r"allows ([\d,]+)", str(error))[1].replace(",", ""))
        if 0 < possible <= 20 * per_pair:
            assert len(make_problems(possible, False, limit, random.Random(0))) == possible


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "100"], "--hidden (100) must be a multiple of 64."),
        (["--processes", "3"], "--processes (3) must divide --batch (32)."),
        (["--st", "3"], "unrecognized arguments: --st 3"),
    ],
)
def test_options_that_cannot_work_are_refused_and_nothing_is_written(tmp_path, recipe, options, message):
    done = recipe(["--out", str(tmp_path / "out"), *options], "recipes/tiny_base.py")
    assert done.code == 2 and message in done.err
    assert list(tmp_path.iterdir()) == []


def test_two_processes_learn_and_end(tmp_path):
    command = [sys.executable, "recipes/tiny_base.py", "--out", str(tmp_path / "out"), *SIZE, "--processes", "2"]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr
    assert "step 3/3 loss" in done.stdout
    read_manifest(tmp_path / "out", "tiny-base", deep=True)


def test_a_training_process_that_dies_ends_the_command(tmp_path):
    long = [*SIZE[:-1], "5000", "--processes", "2"]
    command = [sys.executable, "recipes/tiny_base.py", "--out", str(tmp_path / "out"), *long]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any("step 100/" in line for line in running.stdout)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    _, err = processes.finish(running)
    assert running.returncode == 1
    assert "a training process ended with exit code" in err
    assert not (tmp_path / "out").exists()


def conversation(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_conversations_of_ones_own_are_learned_in_tokens_of_their_words(tmp_path):
    rows = [conversation(f"due on {day} March", f"2024-03-{day:02d}") for day in range(1, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made(tmp_path / "own", "--rows", str(tmp_path / "rows.jsonl"), "--batch", "8")
    assert not list((tmp_path / "own").glob("*.jsonl")), "no problems"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    assert len(tokenizer("due on March")["input_ids"]) == 3 and len(tokenizer("Tom buys")["input_ids"]) > 3
    ((ids, learned),) = encode_conversations(tokenizer, [rows[4]["messages"]])
    assert tokenizer.decode([one for one, is_learned in zip(ids, learned, strict=True) if is_learned]) == (
        "2024-03-05<|im_end|>"
    )
    assert tokenizer.decode(ids).count("due on 5 March") == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, r"rows\.jsonl:2: no messages that end with the assistant's"),
        ({"messages": conversation("?", "!")["messages"][:1]}, "no messages that end with the assistant's"),
        (conversation("?", 5), r"rows\.jsonl:2: a message has no text as its content"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_with_its_line(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (conversation("a", "b"), row)))
    with pytest.raises(BadInput, match=message):
        made(tmp_path / "own", "--rows", str(tmp_path / "rows.jsonl"))
    assert not (tmp_path / "own").exists()
