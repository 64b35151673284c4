"""One table says what each GPU can do, and what a card cannot do is refused with what it can."""

import itertools
import subprocess
import sys

import pytest
import torch

from kit.core.cards import CARDS, GENERATIONS, W8A8, W8A16, generation
from kit.core.config.card_rules import served_product, server_faults, trainer_faults
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.plan.cards_table import generation_lines
from kit.plan.fitting import lay_out, remedy
from kit.plan.gpus import parse_gpus
from kit.plan.layout import make_layout
from kit.plan.shapes import shape_by_size
from kit.train.trainer import check_card
from launch.checks import steps
from launch.vllm_command import Installed, plans
from tests.sandbox import ROOT

CONFIG = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml"


AMPERE = ["--server.weights=fp8_per_tensor", "--policy.compute=fused"]


def config(**keys):
    return load_config(CONFIG, [f"--{key.replace('__', '.')}={value}" for key, value in keys.items()])


@pytest.mark.parametrize(
    ("card", "keys", "complaint"),
    [
        ("t4", {}, "model.dtype is bfloat16, which t4 (compute capability 7.5) cannot compute in"),
        ("t4", {"model__dtype": "float32", "train__micro_batch_tokens": 4096}, "Set it to flex, or leave"),
        ("v100", {}, "v100-16g (compute capability 7.0) is not supported: PyTorch and vLLM for CUDA 13"),
        ("rtx3090", {"policy__compute": "fp8"}, "no FP8 arithmetic (needed 8.9)"),
        ("h100", {"policy__compute": "fp8", "model__dtype": "float32"}, "bfloat16 only"),
        ("rtx4090", {"train__micro_batch_tokens": 4096, "train__packed_attention": "cudnn"}, "flash or flex"),
        ("rtx5090", {"train__micro_batch_tokens": 4096, "train__packed_attention": "cudnn"}, "flash or flex"),
        ("b200", {"train__micro_batch_tokens": 4096, "train__packed_attention": "cudnn"}, None),
        ("rtx3090", {"train__micro_batch_tokens": 4096, "policy__compute": "fused"}, None),
        ("rtx4090", {"policy__compute": "fp8"}, None),
    ],
)
def test_what_a_card_cannot_train_is_refused_with_what_it_can(card, keys, complaint):
    chosen = parse_gpus(card)[0]
    found = trainer_faults(config(**keys), chosen.name, chosen.capability)
    assert any(complaint in one for one in found) if complaint else found == []


@pytest.mark.parametrize(
    ("card", "keys", "complaint"),
    [
        ("a100", {}, "server.weights is fp8_per_channel, which vLLM refuses on a100-80g (compute capability 8.0)"),
        ("a100", {}, "Served there: fp8_per_tensor (W8A16), fp8_per_block (W8A16), w4a16 (W4A16), bf16 (W16A16)"),
        ("t4", {"model__dtype": "float32", "server__weights": "bf16"}, "server.kv_cache is fp8"),
        ("v100", {}, "not supported"),
        ("rtx4090", {"policy__quant_cfg": "fp8_block", "server__weights": "fp8_per_block"}, "8.9, needed 9.0"),
        ("h200", {"policy__quant_cfg": "fp8_block", "server__weights": "fp8_per_block"}, None),
        ("rtx3090", {"server__weights": "bf16"}, None),
        ("rtx4090", {}, None),
        ("rtx3090", {"server__weights": "fp8_per_tensor"}, None),
        ("rtx3090", {"rollout__backend": "in_process"}, None),
    ],
)
def test_what_a_card_cannot_serve_is_refused_with_what_it_can(card, keys, complaint):
    chosen, made = parse_gpus(card)[0], config(**keys)
    found = server_faults(made, chosen.name, chosen.capability)
    assert any(complaint in one for one in found) if complaint else found == []
    with_cards = [(chosen.name, chosen.capability)]
    if complaint:
        with pytest.raises(BadInput) as refused:  # launch.server, before it starts a replica
            plans(made, Installed("0.31.0", False), ["0"], cards=with_cards)
        assert complaint in str(refused.value)
        assert any(complaint in one for one in lay_out(shape_by_size("8b"), made, chosen, 2).faults)


def test_w8a16_is_called_forced_only_where_the_card_multiplies_fp8():
    forced = config(server__weights="fp8_per_tensor", server__force_w8a16=True)
    assert served_product(forced, (9, 0)) == (W8A16, True) and served_product(forced, (8, 6)) == (W8A16, False)
    plain = config(server__weights="fp8_per_tensor")
    assert served_product(plain, (9, 0)) == (W8A8, False) == served_product(plain, None)
    assert served_product(config(server__weights="bf16"), (8, 6)) == ("W16A16", False)


def test_the_trainer_refuses_its_own_gpu_before_it_loads_a_weight(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(BadInput, match=r"model.dtype is bfloat16, which Tesla T4 .* float16 or float32"):
        check_card(config())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    check_card(config())


@pytest.mark.parametrize(
    ("card", "name", "size", "keys"),
    [
        ("t4", "qwen2.5_1.5b-nf4-gsm8k-1gpu", "qwen2.5-1.5b", ["--model.dtype=float16"]),
        ("rtx3090", "qwen2.5_1.5b-nf4-gsm8k-1gpu", "qwen2.5-1.5b", []),
        ("rtx3090", "qwen3_8b-nf4-fp8-1x24gb", "8b", ["--server.weights=fp8_per_tensor"]),
        ("a100:2", "qwen3_8b-nf4-fp8-gsm8k-2gpu", "8b", AMPERE),
    ],
)
def test_what_the_page_starts_from_on_older_cards_fits_them(card, name, size, keys):
    made = load_config(ROOT / f"recipes/configs/grpo-{name}.yaml", keys)
    layout = make_layout(made, shape_by_size(size), *parse_gpus(card))
    assert layout.fits and layout.faults == []
    page = (ROOT / "recipes/README.md").read_text()
    assert f"| `grpo-{name}` | {'`' + ' '.join(keys).replace('=', ' ') + '`' if keys else 'nothing'} |" in page


def test_a_plan_for_a_card_without_bf16_is_told_to_compute_in_float16():
    made = load_config(ROOT / "recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml", [])
    layout = make_layout(made, shape_by_size("qwen2.5-1.5b"), *parse_gpus("t4"))
    assert not layout.fits and remedy(layout) == {"model.dtype": "float16"}


def test_the_doctor_computes_in_the_dtype_of_the_card(monkeypatch):
    assert steps._half() == "bfloat16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype in (((7, 5), "float16"), ((8, 6), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        assert steps._half() == dtype  # vLLM refuses to serve bfloat16 on a T4


def test_every_card_has_a_row_and_speeds_that_agree_with_it():
    assert all(a.capability < b.capability for a, b in itertools.pairwise(GENERATIONS))
    for card in CARDS.values():
        assert card.generation.capability == card.capability, card.name
        assert (card.fp8_tflops is not None) == card.generation.trainer_fp8, card.name
        assert (W8A8 in card.generation.served.values()) == card.generation.trainer_fp8
    assert generation((10, 3)).number == "10.0" and generation((6, 1)).number == "7.0"


def test_the_page_has_the_table_that_the_plan_prints():
    page = (ROOT / "launch/README.md").read_text()
    assert "\n".join(generation_lines()) in page


def test_a_plan_for_a_named_card_says_what_it_cannot_do():
    words = [sys.executable, "-m", "launch.plan", "--config", str(CONFIG), "--gpu", "t4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "model.dtype is bfloat16, which t4" in " ".join(done.stdout.split())
