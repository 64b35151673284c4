"""vLLM serves what the merge writes, on a CPU too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from merge.merge import read_adapter, write_bf16
from merge.quantize import quantize_checkpoint
from merge.verify import base_checkpoint, load_for_scoring, log_probs
from tests.unit.test_merge_fixture import shared_run

ROOT = Path(__file__).parents[2]
# Mean |Δlogp|. Random weights amplify the FP8 rounding of the activations, which falls differently after BF16 kernels;
# a wrong scale or a transposed weight gives a mean above 1. W4A16 has no such rounding.
BOUND = {"fp8": 0.15, "w4a16": 0.05}


# Both engines start in one process, after vLLM was imported once.
SERVE = """
import sys
from tests.gpu.merge_formats import serve
for directory in sys.argv[2:]:
    serve(directory, sys.argv[1], directory + ".json")
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """A folder with the checkpoints in BF16 and both formats, and what vLLM answers from those in `<name>.json`."""
    folder = tmp_path_factory.mktemp("formats")
    run = shared_run()
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    write_bf16(base, updates, folder / "bf16", lambda _: {})
    for name in BOUND:
        quantize_checkpoint(folder / "bf16", folder / name, name, base, updates, lambda _: None)
    (folder / "prompts.json").write_text(json.dumps([list(range(3, 60)), list(range(200, 120, -1))]))
    command = [sys.executable, "-c", SERVE, folder / "prompts.json", *(folder / name for name in BOUND)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(BOUND))
def test_vllm_on_a_cpu_loads_what_the_merge_writes_and_agrees_with_transformers(served, name):
    rows = json.loads((served / f"{name}.json").read_text())["rows"]
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
    if name == "w4a16":  # the weights are the same on both sides; the BF16 ones they were rounded from are told apart
        assert distance("bf16") > BOUND[name]
