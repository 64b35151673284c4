"""vLLM on a CPU serves a merged mixture of experts in BF16, and names what it lacks for the other formats."""

import json
import os
import sys

import pytest
import torch

from eval.machine import missing_kernel
from kit.weights.frozen_base import BaseCheckpoint, hash_base, load_frozen
from merge.merge import write_bf16
from merge.quantize import quantize_checkpoint
from merge.verify import load_for_scoring, log_probs
from tests import processes
from tests.conftest import make_base
from tests.smoke.test_merge_vllm import SERVE

# When vLLM serves one of these, compare it as BF16 is, and change merge/README.md.
REFUSAL = {
    "fp8": "Unsupported FP8 MoE backend: NONE",
    "w4a16": "No WNA16 MoE backend supports the deployment configuration",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with a checkpoint in each format, and in `<name>.json` what vLLM answers or why it does not load it."""
    folder = tmp_path_factory.mktemp("experts")
    source = make_base(folder / "model", "--experts", 8, "--layers", 2, "--steps", 150, "--processes", 1)
    base = BaseCheckpoint(source, hash_base(load_frozen(source, "nf4", dtype="float32", device="cpu")))
    write_bf16(base, {}, folder / "bf16", lambda _: None)
    for name in REFUSAL:
        quantize_checkpoint(folder / "bf16", folder / name, name, base, {}, lambda _: None)
    (folder / "prompts.json").write_text(json.dumps([list(range(3, 60)), list(range(200, 120, -1))]))
    command = [sys.executable, "-c", SERVE, folder / "prompts.json", *(folder / name for name in ("bf16", *REFUSAL))]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = processes.run(list(map(str, command)), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_vllm_on_a_cpu_computes_experts_as_transformers_does(served):
    rows = json.loads((served / "bf16.json").read_text())["rows"]
    batch = [torch.tensor(row["ids"])[None] for row in rows]
    ours = log_probs(load_for_scoring(served / "bf16", "cpu"), batch)
    gaps = [
        (scores.gather(1, ids[0, 1:, None])[:, 0] - torch.tensor(row["logprobs"])).abs()
        for scores, ids, row in zip(ours, batch, rows, strict=True)
    ]
    assert torch.cat(gaps).mean() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSAL)
def test_vllm_on_a_cpu_names_the_formats_in_which_it_has_no_experts(served, name):
    answer = json.loads((served / f"{name}.json").read_text())
    if name == "w4a16" and torch.cpu._is_amx_tile_supported():
        assert answer["rows"], "vLLM has a kernel for processors with AMX, which the kit refuses too"
    else:
        assert REFUSAL[name] in answer["error"]
    assert "in bf16 only" in missing_kernel(served / name)


@pytest.mark.slow
def test_no_kernel_is_missing_for_experts_in_bf16(served):
    assert missing_kernel(served / "bf16") is None
