"""Why the adapter is never merged into the NF4 base: what TRL 1.16's own sync does to it, and what ours does not."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eval.generate import Generation
from kit.weights.frozen_base import hash_base
from tests.evidence import stock_merge
from tests.evidence.stock_merge import (
    dequantized,
    greedy_accuracy,
    layers,
    load_policy,
    measure_ours,
    measure_stock,
    read_questions,
    read_weights,
    relative,
    stock_generation,
    trl_sync,
)
from tests.processes import run

pytestmark = pytest.mark.filterwarnings("ignore:.*4-bit linear may get different generations")


@torch.no_grad()
def log_probs(model, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T - 1)
    logits = model(tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.fixture(scope="module")
def stock(learning_model_dir) -> dict:
    """The base after 0, 1, 5 and 20 of TRL's syncs of an adapter of 1 %, and how far the reference has moved."""
    model = load_policy(learning_model_dir, size=0.01)
    tokens = torch.randint(3, 100, (8, 48), generator=torch.Generator().manual_seed(0))
    with model.disable_adapter():
        before = log_probs(model, tokens)
    moved = {}
    rows = {}
    for row in measure_stock(model, [0, 1, 5, 20]):
        rows[row.syncs] = row
        with model.disable_adapter():
            moved[row.syncs] = (log_probs(model, tokens) - before).abs().mean().item()
    return {"rows": rows, "moved": moved}


def test_a_merge_into_nf4_loses_an_update_of_one_percent(stock):
    assert stock["rows"][1].update == pytest.approx(0.01, rel=0.05)
    assert all(row.kept < 0.1 for syncs, row in stock["rows"].items() if syncs), stock["rows"]


def test_every_stock_sync_pushes_the_base_outward(stock):
    rows = stock["rows"]
    assert rows[0].drift == 0
    assert rows[1].drift > 1e-3 and rows[5].drift > 3 * rows[1].drift and rows[20].drift > 3 * rows[5].drift, rows
    # Rounding without a bias would move as many weights towards zero as away from it.
    assert all(row.outward > 0.7 for syncs, row in rows.items() if syncs), rows


def test_stock_syncs_move_the_reference_policy(stock):
    # The reference of the KL is the model with the adapter off, so it has to answer as it did at the start.
    assert stock["moved"][0] == 0
    assert stock["moved"][20] > 2 * stock["moved"][1] > 0, stock["moved"]


def test_stock_trl_streams_packed_bytes_without_their_quant_state(learning_model_dir):
    model = load_policy(learning_model_dir)
    shapes = {name: layer.base_layer.weight.quant_state.shape for name, layer in layers(model).items()}
    sent = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stock_generation(model)._iter_named_params()}
    for name, (rows, columns) in shapes.items():
        assert sent[f"{name}.weight"] == (torch.uint8, (rows * columns // 2, 1))
    assert not any(word in name for name in sent for word in ("absmax", "quant", "lora")), sorted(sent)


def test_the_first_stock_sync_merges_twice(learning_model_dir):
    once, first = (load_policy(learning_model_dir) for _ in range(2))
    start = read_weights(once)
    trl_sync(once)
    trl_sync(once)
    generation = stock_generation(first)
    receive = SimpleNamespace(update_named_params=lambda _, named: list(named), reset_prefix_cache=lambda: None)
    generation.vllm_client = receive
    generation.sync_weights()
    after = read_weights(first)
    assert all(torch.equal(weight, after[name]) for name, weight in read_weights(once).items())
    assert relative({name: after[name] - start[name] for name in start}, start) > 0


def test_a_stock_sync_that_fails_leaves_the_adapter_merged(learning_model_dir):
    model = load_policy(learning_model_dir)
    stream = stock_generation(model)._iter_named_params()
    next(stream)
    with pytest.raises(ConnectionError):
        stream.throw(ConnectionError("the server went away"))
    assert all(layer.merged for layer in layers(model).values())


def on_training_problems(model, base: Path) -> Callable[[], float]:
    """The share of 200 problems that `model` answers right: it was trained on them for seconds, and gets 0.62."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    asked = read_questions(base / "train.jsonl", 200)
    return lambda: greedy_accuracy(model, tokenizer, asked)


def test_stock_syncs_of_a_growing_adapter_cost_the_accuracy_and_ours_do_not(learning_model_dir):
    model = load_policy(learning_model_dir, size=0.1)
    accuracy = on_training_problems(model, learning_model_dir)
    ours = measure_ours(model, learning_model_dir, 60, accuracy, grow=60)
    start, half, end = measure_stock(model, [0, 30, 60], accuracy, grow=60)
    # Adapters of three seeds: 0.62 at the start, 0.39 to 0.58 after 30 and none right after 60, adapter on or off.
    assert start.accuracy_off > 0.3 and start.accuracy_on == start.accuracy_off
    for side in ("accuracy_on", "accuracy_off"):
        assert getattr(end, side) < min(getattr(half, side), 0.4 * start.accuracy_off), (start, half, end)
    assert ours.accuracy_off == start.accuracy_off, "the reference answers as it did"
    assert ours.accuracy_on > 0.75 * start.accuracy_off, (
        "0.60 to 0.71: a random adapter of this size alone harms little"
    )


def test_our_syncs_leave_the_base_and_carry_the_whole_update(learning_model_dir):
    model = load_policy(learning_model_dir, size=0.03)
    before = hash_base(model)["hash"]
    ours = measure_ours(model, learning_model_dir, syncs=20)
    assert ours.base_unchanged and hash_base(model)["hash"] == before
    assert ours.kept_bf16 == pytest.approx(1.0, abs=0.01)
    # On layers of 64 inputs: one block a row, so few values that FP8 rounds alike. Wide layers keep 0.99 and more.
    assert ours.kept_fp8 > 0.97


def test_dequantized_copies_are_the_same_policy_and_leave_the_base_as_it_was(learning_model_dir):
    model = load_policy(learning_model_dir, size=0.1)
    tokens = torch.randint(3, 100, (4, 32), generator=torch.Generator().manual_seed(0))
    stored, before = log_probs(model, tokens), hash_base(model)["hash"]
    with model.disable_adapter():
        stored_off = log_probs(model, tokens)
    with dequantized(model):
        copied = log_probs(model, tokens)
        with model.disable_adapter():
            copied_off = log_probs(model, tokens)
    assert torch.allclose(copied, stored, atol=1e-4) and torch.allclose(copied_off, stored_off, atol=1e-4)
    assert (stored - stored_off).abs().max() > 0.01, "the adapter changes what the model says"
    assert hash_base(model)["hash"] == before


def test_a_bfloat16_base_can_be_judged_after_a_stock_sync(learning_model_dir):
    model, tokens = load_policy(learning_model_dir, dtype="bfloat16"), torch.arange(3, 51)[None]
    trl_sync(model, read=False)
    stored = log_probs(model, tokens)
    with dequantized(model):
        assert torch.allclose(log_probs(model, tokens), stored, atol=1e-2)


@pytest.mark.parametrize(("form", "right"), [("boxed", 1), ("stated", 2), ("lenient", 3)])
def test_answers_count_in_the_form_that_was_asked_for(tmp_path, monkeypatch, form, right):
    said = ["\\boxed{8}", "The answer is 8.", "So he has 3 + 5 = 8 apples.", "The answer is 9."]
    rows = [{"Body": f"Tom has {n} hats and 3 apples", "Question": "And 5 more?", "Answer": 8.0} for n in range(4)]
    file = tmp_path / "svamp.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = read_questions(file, 4, prompt_suffix="\nGo.", form=form)
    assert asked.conversations[1] == [{"role": "user", "content": "Tom has 1 hats and 3 apples. And 5 more?\nGo."}]
    monkeypatch.setattr(stock_merge, "generate", lambda *_: [Generation(text, text, 9, True, False) for text in said])
    assert greedy_accuracy(None, None, asked) == right / 4


def test_the_command_writes_every_number_with_intervals(learning_model_dir, tmp_path):
    rows = [json.loads(line) for line in (learning_model_dir / "heldout.jsonl").read_text().splitlines()[:12]]
    problems, out = tmp_path / "problems.jsonl", tmp_path / "found.json"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        sys.executable,
        "tests/evidence/stock_merge.py",
        "--base",
        learning_model_dir,
        "--problems_file",
        problems,
    ]
    done = run([*command, "--device", "cpu", "--syncs", "0", "2", "--grow", "2", "--json", out, "--problems", "10"])
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["problems"] == 10 and found["ours"]["base_unchanged"] and found["ours"]["syncs"] == 2
    start, end = found["stock"]
    assert (start["syncs"], end["syncs"]) == (0, 2) and end["drift"] > start["drift"] == 0
    assert start["accuracy_off"] == found["ours"]["accuracy_off"], "both begin with the same base"
    for row in (found["ours"], start, end):
        low, high = row["accuracy_on_interval"]
        assert low <= row["accuracy_on"] <= high < 1.001 and high - low > 0.2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--adapter", "nowhere"], "--adapter nowhere holds no adapter_config.json"),
        (["--json", "nowhere/x.json"], "there is no directory"),
        (["--problems_file", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_what_is_missing_is_said_before_a_weight_is_loaded(learning_model_dir, words, said):
    command = [sys.executable, "tests/evidence/stock_merge.py", "--base", learning_model_dir, "--device", "cpu"]
    done = run([*command, *words])
    assert done.returncode == 2 and said in done.stderr, done.stderr
