"""An adapter's configuration: the rank and scale of a module are peft's, and what s·B·A does not describe is named."""

import math
import sys
from pathlib import Path

import pytest

from recipes.parts.lora import OTHER_KINDS, rank_of, reasons, scale_of
from tests import processes

ROOT = Path(__file__).parents[2]
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj"]}
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "module", "rank", "scale"),
    [
        ({}, Q0, 8, 2.0),
        ({"use_rslora": True}, Q0, 8, 16 / math.sqrt(8)),
        ({"rank_pattern": {"q_proj": 4}}, Q0, 4, 4.0),
        ({"rank_pattern": {"q_proj": 4}, "use_rslora": True}, Q0, 4, 8.0),
        ({"alpha_pattern": {"q_proj": 40}}, Q0, 8, 5.0),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, Q0, 8, 2.0),
        ({"rank_pattern": {"layers.1.self_attn.q_proj": 2}}, Q1, 2, 8.0),
        ({"rank_pattern": {"proj": 2}}, Q0, 8, 2.0),  # a whole part of the name, not any end of it
        ({"rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2, "q_proj": 4}}, Q0, 2, 8.0),  # the first that fits
        ({"alpha_pattern": {Q0: 8}, "rank_pattern": {"q_proj": 4}}, Q0, 4, 2.0),
        ({"rank_pattern": None, "alpha_pattern": None}, Q0, 8, 2.0),
    ],
)
def test_rank_and_scale_of_a_module_are_those_of_peft(changes, module, rank, scale):
    config = PLAIN | changes
    assert (rank_of(config, module), scale_of(config, module)) == (rank, pytest.approx(scale))
    from peft.utils.other import get_pattern_key

    for patterns, default, found in (
        (config.get("rank_pattern") or {}, 8, rank),
        (config.get("alpha_pattern") or {}, 16, None),
    ):
        theirs = patterns.get(get_pattern_key(patterns, module), default)
        assert found in (None, theirs)


def test_a_plain_adapter_has_no_reason_against_it():
    assert reasons(PLAIN) == reasons(PLAIN, tied=True) == []
    assert reasons(PLAIN | dict.fromkeys(OTHER_KINDS)) == []
    assert reasons(PLAIN | {"init_lora_weights": "gaussian"}) == []
    assert reasons(PLAIN | {"target_modules": ["lm_head"]}) == []


@pytest.mark.parametrize(
    ("changes", "tied", "reason"),
    [
        ({"use_dora": True}, False, "DoRA rescales"),
        ({"peft_type": "LOHA"}, False, "peft_type is 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, False, "modules_to_save"),
        ({"bias": "all"}, False, "trained biases"),
        ({"lora_bias": True}, False, "trained biases"),
        *(
            ({"init_lora_weights": name}, False, "rewrites the base")
            for name in ("PiSSA_niter_4", "pissa", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"target_modules": ["lm_head"]}, True, "shares its weight"),
        ({"lora_alpha": None}, False, "holds None, and the scale needs a number"),
        ({"lora_alpha": "16"}, False, "holds '16'"),
        ({"alpha_pattern": {"q_proj": True}}, False, "holds True"),
        *(({key: True}, False, f"{key}: ") for key in OTHER_KINDS),
    ],
)
def test_what_s_b_a_does_not_describe_is_named(changes, tied, reason):
    (found,) = reasons(PLAIN | changes, tied)
    assert reason in found


def test_every_reason_is_given_at_once():
    assert len(reasons({**PLAIN, "use_dora": True, "bias": "all", "init_lora_weights": "olora"})) == 3


@pytest.mark.parametrize("module", ["recipes.parts.lora", "launch.remerge", "launch.adapter_file"])
def test_the_server_and_its_workers_import_neither_torch_nor_peft_for_it(module):
    program = f"import sys, {module}\nprint(sorted({{'torch', 'peft'}} & set(sys.modules)))"
    done = processes.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
