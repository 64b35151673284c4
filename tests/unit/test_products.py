"""A GPU that multiplies wrong, as one under CUDA's multi-process service may, is refused before a weight is loaded."""

import re
from types import SimpleNamespace

import pytest
import torch

import kit.policy.load
import kit.weights.frozen_base
from eval import machine
from kit.core.cards import PART_OF_CARD
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.weights import products
from launch.checks import gpu
from launch.checks.children import Outcome
from launch.vllm_command import Installed, plans
from tests.sandbox import ROOT

CONFIG = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml"
CPU = torch.device("cpu")
SIZES = ((4, 64, 96), (40, 64, 96))


@pytest.fixture
def card(monkeypatch):
    """An H200 with 92 of its 132 multiprocessors; its products are the CPU's, of small sizes."""
    monkeypatch.setattr(products, "SHAPES", SIZES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen = SimpleNamespace(name="NVIDIA H200", multi_processor_count=92)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)


def break_few_rows(monkeypatch, value):
    """Replace an eighth of the outputs of a product of few rows."""
    right = torch.nn.functional.linear

    def wrong(x, weight):
        found = right(x, weight)
        if len(x) < 10:
            found[:, ::8] = value
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)


def test_right_products_pass_in_every_dtype_of_a_policy(card):
    assert products.product_fault(CPU) is None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert products.product_error(*SIZES[0], CPU, dtype) < products.LARGEST_ERROR / 4


@pytest.mark.parametrize(("value", "by"), [(0.0, "[2-5][0-9]%"), (float("nan"), "inf%")])
def test_a_wrong_product_names_its_size_and_the_part_of_the_card(card, monkeypatch, value, by):
    break_few_rows(monkeypatch, value)
    monkeypatch.setenv(PART_OF_CARD, "70")
    said = rf"1 of 2 products of NVIDIA H200 are wrong: that of \(4, 64\) and \(64, 96\) in bfloat16 by {by}.* 92 of"
    assert re.match(f"{said}.*{PART_OF_CARD} is 70; leave that variable out", products.product_fault(CPU))
    monkeypatch.delenv(PART_OF_CARD)
    assert "multi-process service keeps it to a part" in products.product_fault(CPU)


def test_a_process_checks_its_card_once_and_a_cpu_never(monkeypatch):
    found = {torch.device("cuda", 0): None, torch.device("cuda", 1): "2 of 2 products are wrong"}
    checked = []
    monkeypatch.setattr(products, "product_fault", lambda device: checked.append(device) or found[device])
    products.check_products.cache_clear()
    for _ in range(2):
        products.check_products(CPU)
        products.check_products(torch.device("cuda", 0))
    assert checked == [torch.device("cuda", 0)]
    with pytest.raises(CheckFailed, match="2 of 2 products are wrong"):
        products.check_products(torch.device("cuda", 1))


def test_a_trainer_checks_its_device_before_it_loads_the_base(monkeypatch):
    def refused(device):
        raise CheckFailed(f"{device} multiplies wrong")

    monkeypatch.setattr(products, "check_products", refused)
    monkeypatch.setattr(kit.policy.load, "load_frozen", lambda *words, **more: pytest.fail("loaded"))
    with pytest.raises(CheckFailed, match="cpu multiplies wrong"):
        kit.policy.load.load_policy_base(load_config(CONFIG, []))


def test_tools_that_choose_a_gpu_check_it_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    checked = []
    monkeypatch.setattr(kit.weights.frozen_base, "check_products", checked.append)
    assert [kit.weights.frozen_base.default_device()] == checked == [torch.device("cuda", 1)]


def test_the_doctor_names_the_variable_that_makes_products_wrong(monkeypatch):
    found = {"name": "NVIDIA H200", "capability": (9, 0), "errors": {"bfloat16": 0.59}}
    facts = {"version": "2.13.0", "cuda": "13.0", "available": True, "devices": [found]}
    monkeypatch.setenv(PART_OF_CARD, "70")
    [row] = gpu.torch_rows(SimpleNamespace(gpus=[SimpleNamespace(driver="580.1")]), Outcome(1.0, facts))
    assert row.status == "fail" and "a bfloat16 product: is off by 59.0%" in row.found
    assert row.fix == f"unset {PART_OF_CARD}"


@pytest.mark.parametrize(("part", "is_refused"), [("70", True), ("50", True), ("100", False), ("", False)])
def test_a_server_on_a_part_of_a_card_is_refused(monkeypatch, part, is_refused):
    monkeypatch.setenv(PART_OF_CARD, part)
    config = load_config(CONFIG, [])

    def refused(kind):
        try:
            plans(config, kind, ["0"])
        except BadInput as error:
            return PART_OF_CARD in str(error)
        return False

    assert refused(Installed("0.31.0", is_cpu=False)) == is_refused
    assert not refused(Installed("0.31.0", is_cpu=True))
    machine.check_vllm()  # the installed one is for CPUs
    monkeypatch.setattr(machine, "is_cpu_build", lambda: False)
    if is_refused:
        with pytest.raises(BadInput, match=f"{PART_OF_CARD} is {part}"):
            machine.check_vllm()
    else:
        machine.check_vllm()
