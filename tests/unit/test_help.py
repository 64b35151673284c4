"""`--help` of a recipe: what a field takes stands in its line."""

import dataclasses
import typing

from transformers.training_args import OptimizerNames

from eval.tasks import scoring_of
from kit.core import formats
from kit.core.config import choices
from kit.core.config.checks import check_config
from kit.core.config.field_types import spell_type
from kit.core.config.load import FIRST, describe, load_config
from kit.core.config.load import leaves as keys_of
from kit.core.config.schema import Config
from kit.core.errors import KitError
from reward import REWARDS, reward_functions
from tests.conftest import CONFIG


def leaves(kind=Config, prefix=""):
    """(key, type) of every field that takes text."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")
        elif not isinstance(hint, type) or hint is str:
            yield f"{prefix}{name}", hint


def refusal(key, value):
    """What a recipe says about `value` before it looks for model and data; empty when it says nothing."""
    try:
        config = load_config(CONFIG, [f"--{key}={value}"])
        check_config(config, 1)
        reward_functions(config.reward)
        scoring_of(config)
    except KitError as error:
        return str(error)
    return ""


# No closed set: what a value must look like stands in the message.
OPEN = {"rollout.server_urls": "http://127.0.0.1:8000", "policy.target_modules": "all-linear, or names"}
OPEN |= {"environment.factory": "module:callable", "environment.tools": "module:function, or python"}
OPEN |= {"reward.answer_form": "with {answer} in its place"}
OPEN |= {"environment.factory": "or openenv, verifiers", "environment.tools": "as module:function, or python"}
OPEN |= {"server.draft_model": "directory of the checkpoint that drafts"}


def described() -> dict[str, str]:
    """The line of each key."""
    return {line.split()[0]: line for line in describe().splitlines() if line.startswith("  ")}


def test_help_names_the_choices_of_every_key_that_refuses_a_made_up_text():
    lines = described()
    refused = {}
    for key, hint in leaves():
        value = "[made-up]" if typing.get_origin(hint) is list else "made-up"
        if any(word in spell_type(hint) for word in ("text", "one of", "any of")):
            refused[key] = refusal(key, value)
    refused = {key: text for key, text in refused.items() if key in text or key.rpartition(".")[2] in text}
    assert {"train.loss_type", "train.lr_scheduler", "rollout.correction", "server.weights"} <= refused.keys()
    assert {"train.optimizer", "policy.reference", "watch.report_to", "eval.reward", "reward.functions"} <= set(
        refused
    )
    silent = [key for key in refused if " of " not in lines[key].partition("):")[0] and key not in OPEN]
    assert silent == [], "their lines name no choices"
    assert all(text in lines[key] for key, text in OPEN.items())
    for key, named in {
        "policy.quant_cfg": formats.TRAINED,
        "server.quant_cfg": formats.TRAINED,
        "reward.functions": REWARDS,
        "eval.reward": REWARDS,
        "eval.formats": formats.FORMATS,
        "train.optimizer": [name.value for name in OptimizerNames],
        "train.loss_type": ("dr_grpo", "dapo", "grpo", "gspo", "cispo", "sapo"),
        "train.scale_rewards": ("group", "batch", "none"),
        "watch.report_to": choices.TRACKERS,
    }.items():
        assert f" of {', '.join(named)})" in lines[key], key
    assert "longer: dropped, up to data.max_bad_fraction" in lines["rollout.max_prompt_length"]


def test_help_has_every_key_once_and_the_ten_that_matter_first():
    listed = [line.split()[0] for line in describe().splitlines() if line.startswith("  ")]
    assert sorted(listed) == sorted(keys_of())
    assert tuple(listed[:10]) == FIRST and describe().startswith("The keys that matter first:")
    required = {key for key, line in described().items() if "(required)" in line}
    assert required <= {*FIRST}


def test_help_uses_the_words_of_the_field():
    lines = described()
    for key, words in {
        "train.recompute": "gradient checkpointing",
        "policy.compute": "matmuls",
        "rollout.overlap": "off-policy lag",
        "rollout.correction": "importance sampling correction",
        "rollout.group_size": "num_generations",
        "train.beta": "KL coefficient",
        "train.micro_batch_tokens": "sequence packing",
        "train.per_device_train_batch_size": "micro-batch",
        "train.mask_truncated": "overlong filtering",
        "train.recompute_offload": "activation offloading",
    }.items():
        assert words in lines[key], key


def test_a_default_is_printed_as_one_would_write_it():
    lines = described()
    assert "(default null)" in lines["train.gpus"] and "(default false)" in lines["train.mask_truncated"]
    assert (
        "(default [math]; some of math, " in lines["reward.functions"]
        and "(default empty)" in lines["data.prompt_suffix"]
    )
