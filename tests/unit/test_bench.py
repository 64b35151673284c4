"""The benchmarks of tests/gpu without their GPU: what they count, and that their levers are the configuration's."""

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(1, str(Path(__file__).parents[1] / "gpu"))
sys.path.insert(1, str(Path(__file__).parents[1] / "gpu/bench"))

import bench_step
import bench_update
from kernel_groups import group_of
from memory_child import SHAPES, parameters
from update_child import Batch
from workload import CONFIG, LEVERS, ROOT, WORKS, linear_weights, step_flops, update_flops

from recipes.parts.config import load_config


@pytest.mark.parametrize("lever", bench_step.VARIANTS)
def test_every_lever_is_made_of_configuration_keys(lever):
    keys = bench_step.levers(lever)
    config = load_config(str(ROOT / CONFIG), [f"--{key}={value}" for key, value in keys.items()])
    for key, value in keys.items():
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == yaml.safe_load(value), key


def test_a_variant_takes_keys_beside_levers():
    found = bench_step.levers("fp8+train.micro_batch_tokens=4096")
    assert found["policy.compute"] == "fp8" and found["train.micro_batch_tokens"] == "4096"
    assert found["train.recompute"] == "full" and bench_step.levers("default") == {}


def test_every_lever_of_the_update_has_a_bound():
    assert bench_update.BOUNDS.keys() == LEVERS.keys()


def test_the_operations_count_every_weight_of_a_linear_layer_twice():
    shape = SHAPES["8b"]
    embedding, norms = 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    assert linear_weights(shape) == parameters("8b") - embedding - norms
    assert update_flops(shape, 0) == 4 * linear_weights(shape)
    # Work A: 128 sequences of 1,274 tokens, update and reference; attention is 1,274 x 4,096 x 36 x 8 of each token.
    attention = WORKS["A"].tokens * 8 * 1274 * 4096 * 36
    assert step_flops(shape, WORKS["A"]) == WORKS["A"].tokens * 6 * linear_weights(shape) + attention


def test_lengths_of_work_b_are_as_announced():
    lengths = WORKS["B"].lengths
    assert lengths == WORKS["B"].lengths and len(lengths) == 128
    assert 300 < sorted(lengths)[64] < 520 and max(lengths) == 2048 and min(lengths) > 20


def test_a_ragged_batch_shares_its_prompt_and_pads_on_the_right():
    ids, mask = Batch.parse("8x64r").tensors("cpu")
    assert (ids[:, :8] == ids[0, :8]).all() and mask.sum(1).tolist() == Batch.parse("8x64r").lengths
    assert (mask.diff() <= 0).all() and mask[0].all() and not mask[7].all()


@pytest.mark.parametrize(
    ("kernel", "operator", "sizes", "group"),
    [
        ("nvjet_tst_128x256", "aten::mm", (16384, 4096), "base products"),
        ("nvjet_tst_128x256", "aten::mm", (16384, 16), "LoRA"),
        ("nvjet_tst_128x256", "aten::mm", (4096, 32768), "head"),
        ("sm90_xmma_gemm_e4m3bf16", "aten::_scaled_mm", (16384, 4096), "base products"),
        ("void flash_fwd_kernel<cutlass::bfloat16_t>", "aten::_flash_attention_forward", (8, 32), "attention"),
        ("_quantize_rows", "_Linear", (), "dequantization"),
        ("multi_tensor_apply_kernel", "aten::_fused_adamw_", (), "optimizer"),
        ("vectorized_elementwise_kernel", "aten::mul", (8, 2048), "norm, rope, activation"),
        ("Memset", "", (), "other"),
    ],
)
def test_kernels_are_grouped_by_what_they_compute(kernel, operator, sizes, group):
    assert group_of(kernel, operator, sizes, 16, {151936, 32768}) == group


class FakeParent:
    """vLLM's ParentRequest as far as the plugin needs it."""

    def __init__(self, n: int):
        self.sampling_params = type("Params", (), {"n": n, "max_tokens": 9, "stop_token_ids": [1], "min_tokens": 0})()

    def get_child_info(self, index: int) -> tuple:
        return f"{index}", self.sampling_params


def test_groups_take_turns_at_the_lengths_whatever_their_order(monkeypatch, tmp_path):
    import types

    import bench_lengths

    module = types.ModuleType("vllm.v1.engine.parallel_sampling")
    module.ParentRequest = type("ParentRequest", (FakeParent,), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "lengths.json").write_text("[1, 2, 3, 4]")
    monkeypatch.setenv("BENCH_LENGTHS", str(tmp_path / "lengths.json"))
    bench_lengths.install()
    bench_lengths.install()
    one, other = module.ParentRequest(2), module.ParentRequest(2)
    calls = [(one, 0), (other, 0), (one, 1), (other, 1)]
    found = [parent.get_child_info(index)[1].max_tokens for parent, index in calls]
    assert found == [1, 3, 2, 4]
    params = module.ParentRequest(2).get_child_info(0)[1]
    assert params.max_tokens == 1 and params.ignore_eos and params.stop_token_ids == []
