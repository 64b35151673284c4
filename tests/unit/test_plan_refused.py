"""launch.plan recommends nothing that the recipe refuses, whatever the cards, and plans nothing that it refuses."""

import re
import sys

import pytest

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput, run_command
from kit.plan.fitting import changes, largest_completion, remedy, step_time
from kit.plan.gpus import parse_gpus
from kit.plan.layout import make_layout
from kit.plan.shapes import shape_by_size
from kit.plan.sizes import with_keys
from kit.plan.splitting import splits
from launch.plan import main
from tests.conftest import ROOT

CONFIGS = ROOT / "recipes/configs"
ONE, TWO = (CONFIGS / f"grpo-qwen3_8b-nf4-fp8-{name}.yaml" for name in ("1x24gb", "gsm8k-2gpu"))
EIGHT, OWN = (
    CONFIGS / f"grpo-{name}.yaml" for name in ("qwen3_8b-nf4-fp8-deepmath-8gpu", "qwen2.5_1.5b-nf4-gsm8k-1gpu")
)
CARDS = ("h200:1", "h200:2", "rtx4080:1", "rtx4090:1", "rtx4090:2", "h200:8", "l40s:8")
# Keys that the plan changes, or that rule out what it changes.
KEYS = [
    [],
    ["--rollout.overlap", "true"],
    ["--rollout.overlap", "true", "--server.sleep", "false"],
    ["--policy.compute", "fp8", "--train.micro_batch_tokens", "6000"],
    ["--train.gradient_accumulation_steps", "3", "--rollout.group_size", "6", "--train.max_steps", "10"],
    ["--policy.lora_rank", "16", "--train.optimizer", "lomo", "--train.gradient_accumulation_steps", "1"],
]


def plan(path, cards, *overrides):
    return make_layout(load_config(path, list(overrides)), shape_by_size("8b"), *parse_gpus(cards))


def recommended(layout):
    """Keys and trainer processes of everything that the plan tells to set."""
    found = [(one.keys, one.trainers) for one in splits(layout)]
    found += [(one.keys, None) for one in changes(layout)]
    return found + [(keys, None) for keys in [remedy(layout)] if keys]


@pytest.mark.parametrize("path", [ONE, TWO, EIGHT, OWN], ids=lambda path: path.stem)
@pytest.mark.parametrize("keys", KEYS, ids=" ".join)
def test_what_the_plan_recommends_the_recipe_takes(path, keys):
    for cards in CARDS:
        try:
            layout = plan(path, cards, *keys)
        except BadInput:  # too few cards for the lists of the YAML, or refused as it is
            continue
        for changed, trainers in recommended(layout):
            made = with_keys(layout.config, changed)
            check_config(made, trainers or make_layout(made, layout.shape, layout.card, layout.count).processes)


def test_the_longest_completion_fits_into_a_pack_as_it_is():
    layout = plan(TWO, "h200:2", "--train.micro_batch_tokens", "2100")
    tokens = largest_completion(layout)
    assert tokens == (2100 - 512) // 128 * 128
    check_config(with_keys(layout.config, {"rollout.max_completion_length": tokens}), layout.processes)


def test_what_sleeps_or_samples_in_the_trainer_is_recommended_without_overlap():
    layout = plan(TWO, "rtx4090:2", "--rollout.overlap", "true")
    keys = remedy(layout)
    assert keys["server.sleep"] and keys["rollout.overlap"] is False
    own = next(one for one in splits(layout) if not one.servers)
    assert own.fits and own.keys["rollout.overlap"] is False
    alone = plan(ONE, "h200", "--rollout.overlap", "true", "--server.sleep", "false")
    assert all(one.keys["rollout.overlap"] is False for one in splits(alone))
    assert not any("rollout.overlap" in one.keys for one in splits(plan(TWO, "rtx4090:2")))


def test_cards_that_train_and_serve_take_the_sum_and_others_the_longer_half():
    strict, overlapped = (step_time(plan(TWO, "h200:2", "--rollout.overlap", word)) for word in ("false", "true"))
    assert overlapped == strict
    apart = ["--train.gpus", "[0]", "--server.gpus", "[1]", "--rollout.server_urls", "[http://127.0.0.1:8000]"]
    strict, overlapped = (
        step_time(plan(TWO, "h200:2", *apart, "--rollout.overlap", word)) for word in ("false", "true")
    )
    assert overlapped.overlaps and overlapped.step == max(strict.rollout, strict.update) + strict.other < strict.step
    found = {(one.trainers, one.servers): one.time for one in splits(plan(TWO, "h200:2", "--rollout.overlap", "true"))}
    assert found[1, 1].overlaps and not found[2, 2].overlaps and found[2, 2].step < found[1, 1].step


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--train.micro_batch_tokens 0", "train.micro_batch_tokens (0) must be at least 1."),
        ("--train.micro_batch_tokens -5", "train.micro_batch_tokens (-5) must be at least 1."),
        ("--train.micro_batch_tokens 100", "train.micro_batch_tokens (100) is below .* = 1536.* Use 1536 or more."),
        ("--train.recompute_fraction 7", "train.recompute_fraction (7) must be above 0 and at most 1."),
        ("--train.recompute_fraction -1", "train.recompute_fraction (-1) must be above 0 and at most 1."),
        ("--train.optimizer adamw_tobch", "train.optimizer is adamw_tobch.* Did you mean adamw_torch?"),
        ("--train.recompute none --train.recompute_offload true", "train.recompute_offload moves what .* Set it to"),
        ("--train.num_iterations 0", "train.num_iterations (0) must be at least 1."),
        ("--train.num_iterations 2", "train.max_steps (467) must be a multiple of train.num_iterations (2)"),
        ("--rollout.overlap true --server.sleep true", "rollout.overlap and server.sleep are both true"),
        ("--rollout.overlap true --rollout.backend in_process", "Set rollout.backend to server, or rollout.overlap"),
        ("--rollout.group_size 7", "rollout.group_size (7) must divide the generation batch .* = 128"),
    ],
)
def test_what_the_recipe_refuses_is_bad_input_of_the_plan_too(words, complaint, monkeypatch, capsys):
    arguments = ["--config", str(TWO), "--params", "8b", "--gpu", "h200:2", *words.split()]
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert re.search(re.escape(complaint).replace(r"\.\*", ".*"), said.err)


def test_on_a_cpu_whose_number_of_processes_the_launcher_says_any_batch_is_planned():
    keys = ["--train.per_device_train_batch_size", "4", "--train.gradient_accumulation_steps", "1"]
    keys += ["--train.gpus", "null", "--rollout.group_size", "8"]
    assert plan(OWN, "cpu", *keys).completions == 4
    with pytest.raises(BadInput, match="must divide the generation batch"):
        plan(OWN, "h200", *keys)


def test_a_distillation_is_refused_as_its_recipe_does():
    path, keys = CONFIGS / "distill-qwen3_8b-qat-nvfp4a16-2gpu.yaml", ["--distill.js_beta", "2"]
    assert plan(path, "h200:2").fits
    with pytest.raises(BadInput, match=r"js_beta \(2.0\) must be between 0 and 1"):
        plan(path, "h200:2", *keys)
