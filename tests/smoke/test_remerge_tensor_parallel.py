"""A remerge under tensor parallelism: two workers, each with its shard of the base and of the adapter; and one into
W4A16 layers by one worker and by two."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kit.core.processor import INPUTS_IN_16_BITS
from merge.export import main as merge_base
from tests import int4_kernel, processes
from tests.conftest import ROOT, make_base
from tests.unit.merge_fixture import byte_tokenizer
from tests.unit.test_experts import make_experts

SCRIPT = Path(__file__).with_name("remerge_two_workers.py")
MORE = ("qwen2_moe", "olmoe")


def scores_of(folder: Path, model: Path, weights: str, workers: int = 2) -> dict[str, np.ndarray]:
    """Scores of workers that serve `model` in `weights`: loaded from the merged checkpoint, re-merged to the base and
    back; for packed weights also loaded from the base."""
    keys = ["--config", "recipes/configs/grpo-tiny-nf4-cpu.yaml", f"--model.path={model}", "--model.dtype=bfloat16"]
    assert merge_base([*keys, "--out", str(folder / "base")]) == 0
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests/start:{int4_kernel.plugin(folder / 'plugin')}",
        **INPUTS_IN_16_BITS,
        # In a process of the engine's own, as users start it, nothing asks for AMX before the first 4-bit product.
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(weights == "w4a16" and workers == 1)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(SCRIPT), str(folder), weights, str(workers)]
    done = processes.run(command, cwd=folder, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SCORES ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    return {name: np.array(values) for name, values in json.loads(lines[-1][7:]).items()}


@pytest.mark.slow
def test_two_workers_serve_what_a_fresh_load_of_the_merged_checkpoint_serves(tmp_path):
    # Wide enough that half of every layer is whole blocks of 64.
    size = ("--hidden", 128, "--layers", 2, "--problems", 200, "--heldout", 40, "--steps", 0)
    model = make_base(tmp_path / "model", *size)
    scores = scores_of(tmp_path, model, "fp8_per_channel")
    assert np.array_equal(scores["adapter"], scores["fresh"])
    assert np.abs(scores["zero"] - scores["fresh"]).mean() > 0.1, "the base is not the merged checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_w4a16_layers_hold_what_merge_stores_after_a_fold_and_after_loading_the_base(tmp_path, workers):
    """Wide enough that half of every layer is whole groups of 128."""
    size = ("--hidden", 256, "--layers", 2, "--problems", 200, "--heldout", 40, "--steps", 0)
    scores = scores_of(tmp_path, make_base(tmp_path / "model", *size), "w4a16", workers)
    assert np.array_equal(scores["adapter"], scores["fresh"]), "a fold, against the checkpoint that merge stores"
    assert np.array_equal(scores["base"], scores["zero"]), "the base as loaded, against the adapter taken out again"
    assert np.abs(scores["zero"] - scores["fresh"]).mean() > 0.1, "the base is not the merged checkpoint"


@pytest.mark.slow
# Each starts two servers of two workers: a minute.
@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.sweep) for one in MORE)])
def test_experts_split_over_two_workers_are_those_of_a_fresh_load(tmp_path, kind):
    shared = {"shared_expert_intermediate_size": 128} if kind == "qwen2_moe" else {}
    model = make_experts(tmp_path / "model", kind, moe_intermediate_size=128, hidden_size=128, head_dim=32, **shared)
    byte_tokenizer().save_pretrained(model)
    scores = scores_of(tmp_path, model, "bf16")
    assert np.array_equal(scores["adapter"], scores["fresh"])
    assert np.abs(scores["zero"] - scores["fresh"]).mean() > 0.1, "the base is not the merged checkpoint"
