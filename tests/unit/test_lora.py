"""An adapter's configuration: the rank and scale of a module are peft's, and what s·B·A does not describe is named."""

import json
import math
import sys
from pathlib import Path

import pytest

from kit.core.lora import OTHER_KINDS, UNDERSTOOD, rank_of, reasons, scale_of
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


def test_every_setting_of_peft_is_understood_or_refused_by_name():
    from peft import LoraConfig

    keys = set(LoraConfig(r=4).to_dict()) | {"runtime_config"}
    assert keys == UNDERSTOOD | set(OTHER_KINDS), "look at what peft's new setting does to the weights"
    (found,) = reasons(PLAIN | {"use_tomorrows_lora": {"groups": 2}})
    assert found.startswith("use_tomorrows_lora ({'groups': 2}): this version does not know")
    assert reasons(PLAIN | {"use_tomorrows_lora": None, "another": False}) == []
    assert len(reasons({**PLAIN, "use_dora": True, "bias": "all", "init_lora_weights": "olora"})) == 3


LAYERS = {f"layers.{number}.{name}": (12, 8) for number in range(2) for name in ("q_proj", "up_proj")}
RIGHT = [
    {},
    {"use_rslora": True},
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": False},
    {"init_lora_weights": "orthogonal"},
    {"rank_pattern": {"layers.1.q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    {"rank_pattern": {r"layers\.0\..*": 6}, "use_rslora": True},
    {"exclude_modules": ["up_proj"]},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["up_proj"]},
    {"lora_dropout": 0.5},
]


@pytest.mark.parametrize("settings", RIGHT, ids=repr)
def test_what_is_not_refused_adds_what_peft_adds(settings, tmp_path):
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file

    from merge.merge import Factors

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict({name: torch.nn.Linear(8, 12) for name in ("q_proj", "up_proj")}) for _ in range(2)
            )

    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], **settings}
    model = get_peft_model(Model(), LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    config, tensors = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert reasons(config) == []
    adapted = {name for name in LAYERS if f"base_model.model.{name}.lora_A.weight" in tensors}
    assert len(tensors) == 2 * len(adapted) > 0
    for name in adapted:
        a, b = (tensors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
        assert len(a) == rank_of(config, name)
        theirs = model.get_submodule(f"base_model.model.{name}").get_delta_weight("default")
        torch.testing.assert_close(Factors(a, b, scale_of(config, name)).delta(), theirs)


def test_the_server_and_its_workers_import_neither_torch_nor_peft_for_it():
    program = "import sys, kit.core.lora, kit.rollout.server.remerge, kit.rollout.server.adapter_check\n"
    program += "print(sorted({'torch', 'peft'} & set(sys.modules)))"
    done = processes.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
