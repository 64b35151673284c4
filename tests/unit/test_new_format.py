"""A format is added by its row alone: configuration, plan, server, merge and plots read `FORMATS`."""

import subprocess
import sys

from tests.sandbox import ROOT

BEFORE = '    QuantFormat(\n        name="awq"'
ROW = """    QuantFormat(
        name="w4a16_g32",
        stores="transformers and vLLM; INT4 weights in groups of 32",
        bytes_per_weight=0.56,
        color="#000000",
        marker="8",
        weight=WeightFormat("int4", (1, 32)),
        layout="pack-quantized",
        preset="W4A16",
    ),
"""
LOAD = """
import sys, types
import kit.core
module = types.ModuleType("kit.core.formats")
sys.modules[module.__name__] = kit.core.formats = module
exec({source!r}, module.__dict__)
"""
USE = """
import torch
from eval import plots
from eval.artifacts import check_formats
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.formats import FORMATS
from kit.plan import memory, quantized
from kit.plan.gpus import CARDS
from kit.plan.shapes import shape_by_size
from kit.rollout.server.quantized_fold import quantize_rows
from kit.weights.quantize import fake_quantize_weight
from merge.__main__ import parse_arguments
from merge.diagnose import computed
from merge.quantize import quantization_config, read_back

name = "w4a16_g32"
words = [f"--policy.quant_cfg={name}", f"--eval.formats=[bf16,{name}]", f"--eval.gate.format={name}"]
config = load_config("recipes/configs/grpo-tiny-nf4-cpu.yaml", words)
check_config(config, 1)
shape, card = shape_by_size("8b"), CARDS["h200"]
assert quantized.faults(shape, config) == [] and quantized.weight_gib(shape, config, card) > 0
assert parse_arguments(["--run", "runs/x", "--format", name]).format == [name]
weight = (torch.randn(64, 96) * 0.05).bfloat16()  # neither 128 nor 64 divides 96
stored, value = read_back(FORMATS[name], weight)
assert stored["weight_scale"].shape == (64, 3)
assert torch.equal(value.bfloat16(), fake_quantize_weight(weight, FORMATS[name]))
served = torch.empty_like(weight)
quantize_rows(weight, FORMATS[name], None, served)
assert torch.equal(value.bfloat16(), served) and torch.equal(value, computed(FORMATS[name])("", "", weight.float()))
assert quantization_config(FORMATS[name], [])["config_groups"]["group_0"]["weights"]["group_size"] == 32
assert plots.look(name) == ("#000000", "8") and check_formats([name, "bf16"]) == ["bf16", name]
"""


def test_a_row_is_all_that_configuration_plan_server_merge_and_plots_need():
    source = (ROOT / "kit" / "core" / "formats.py").read_text()
    assert source.count(BEFORE) == 1
    code = LOAD.format(source=source.replace(BEFORE, ROW + BEFORE)) + USE
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
