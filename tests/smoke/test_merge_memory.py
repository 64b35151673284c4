"""Merging and quantizing hold a tensor or two, never a shard: measured on one shard of small tensors."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from kit.core.run_files import read_json
from kit.weights.write_base import plan_base
from tests import processes
from tests.unit.merge_fixture import shared_model

ROOT = Path(__file__).parents[2]
LIMIT = 40 << 20
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 18, "layer_types": None}
WIDE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "layer_types": None}
# What is freed goes back at once; else a peak counts, by chance, what the allocator keeps for later.
GIVES_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
GIVES_BACK["PYTHONPATH"] = ""  # without tests/start, which delays garbage collections
BYTES = 13  # a weight of the largest layer, at most; 12.0 were measured, 18 when its values are held in float32
PEAKS = """
import json, sys
from pathlib import Path
import torch
from kit.weights.frozen_base import BaseCheckpoint
from merge.merge import Factors, write_bf16
from merge.quantize import quantize_checkpoint
from kit.weights.write_base import Original, write_base

def resident(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def peak(call):
    open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again
    before = resident("VmRSS:")
    call()
    return resident("VmHWM:") - before

def prepare(model):
    out = Path(f"{model}-dequantized")
    out.mkdir()
    base = BaseCheckpoint(model, write_base(Original(model, "bfloat16", True), out, "x", None))
    updates = {}
    for name in sorted(base.quantized)[::4]:
        rows, columns = base.shape(name)
        updates[name] = Factors(torch.randn(4, columns) * 0.01, torch.randn(rows, 4) * 0.01, 2.0)
    return base, updates

def merge(base, updates, into):
    write_bf16(base, updates, Path(f"{base.directory}-{into}"), lambda _: {})

def quantize(base, updates, name):
    merged = Path(f"{base.directory}-dequantized-bf16")
    quantize_checkpoint(merged, Path(f"{base.directory}-{name}"), name, base, updates, lambda _: None)

found = {}
for model in map(Path, sys.argv[1:3]):  # a small one first: what libraries take once is no part of the second's peak
    base, updates = prepare(model)
    found["bf16"] = peak(lambda: merge(base, updates, "dequantized-bf16"))
    found["fp8"] = peak(lambda: quantize(base, updates, "fp8"))
    base.into = "original"
    found["bf16 of the original"] = peak(lambda: merge(base, {}, "original-bf16"))
base, updates = prepare(Path(sys.argv[3]))
merge(base, updates, "dequantized-bf16")
found["fp8, wide"] = peak(lambda: quantize(base, updates, "fp8"))
print(json.dumps(found))
"""


def make(folder: Path, shape: dict) -> Path:
    """A random checkpoint of this shape in one file."""
    shutil.copytree(shared_model(), folder, ignore=shutil.ignore_patterns("model*"))
    config = {**read_json(folder / "config.json"), **shape, "max_window_layers": shape["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    values = torch.randn(shape["hidden_size"] * shape["intermediate_size"]).mul(0.05).bfloat16()
    shapes = plan_base(AutoConfig.from_pretrained(folder)).shapes
    tensors = {name: values[: math.prod(shape)].view(shape).clone() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """{what: bytes above what the process held before} of every way to write a checkpoint."""
    folder = tmp_path_factory.mktemp("memory")
    small = shutil.copytree(shared_model(), folder / "small")
    # Many layers with tensors of at most 1 MiB, 61 MB in one file; then one layer with tensors of 32 MiB.
    large = make(folder / "large", LARGE)
    wide = make(folder / "wide", WIDE)
    assert (large / "model.safetensors").stat().st_size > 1.4 * LIMIT
    done = processes.run([sys.executable, "-c", PEAKS, str(small), str(large), str(wide)], env=os.environ | GIVES_BACK)
    shutil.rmtree(large)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["bf16", "bf16 of the original", "fp8"])
def test_a_checkpoint_is_written_without_holding_a_shard(peaks, what):
    # The largest tensor has 1 MiB in BF16; files are hashed by blocks of 4 MiB in as many threads as there are cores.
    assert peaks[what] < LIMIT, f"{peaks[what] / 2**20:.0f} MiB"


def test_quantizing_a_wide_layer_holds_its_bytes_a_few_times(peaks):
    weights = WIDE["hidden_size"] * WIDE["intermediate_size"]
    assert peaks["fp8, wide"] < BYTES * weights, f"{peaks['fp8, wide'] / weights:.1f} bytes a weight"
