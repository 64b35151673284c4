"""launch.plan recommends nothing that the recipe refuses, whatever the cards, and plans nothing that it refuses."""

import pytest

from launch.plan import make_layout
from launch.planning.fitting import changes, remedy, step_time, with_keys
from launch.planning.gpus import parse_gpus
from launch.planning.shapes import shape_by_size
from launch.planning.splitting import splits
from recipes.parts.checks import check_config
from recipes.parts.config import load_config
from recipes.parts.errors import BadInput
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
