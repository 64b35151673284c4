"""A base in FP8 or unquantized (`policy.quantization`): its numbers, its gradients, its hash, and what is served."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kit.core.config import base_rules
from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import base_directory
from kit.core.run_files import read_json
from kit.policy.load import check_base_unchanged
from kit.rollout.server import base_copy
from kit.rollout.server.remerge import Linear, Part, State, merged_weight
from kit.weights.fp8 import Fp8Linear, dequantize_with, quantize_weight, store_in_fp8
from kit.weights.frozen_base import BaseCheckpoint, dequantize, dequantized_tensors, hash_base, load_base, load_frozen
from kit.weights.write_base import Original
from merge.export import export
from tests.unit.merge_fixture import LINEARS, read_all, shared_model
from tests.unit.test_merge_stream import ORIGIN, single_model

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
DTYPES = ["float32", "bfloat16"]
# Every number of E4M3 from 0 to 448.
E4M3 = np.array([m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)])
E4M3 = E4M3[:-1]  # the last code is NaN


def fp8_in_numpy(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values / scale rounded to E4M3, scales (out, 1)) of a weight, by search in the table; no torch."""
    scale = np.maximum(np.abs(weight).max(1, keepdims=True).astype(np.float32) / np.float32(448), 1 / (448 * 512))
    wanted = np.abs(weight.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    above = np.clip(np.searchsorted(E4M3, wanted), 1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    # A tie goes to the even code.
    is_high = (wanted - low > high - wanted) | ((wanted - low == high - wanted) & (above % 2 == 0))
    return np.copysign(np.where(is_high, high, low), weight), scale.astype(np.float32)


def weight_of(dtype: torch.dtype, rows: int = 48, columns: int = 96) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * torch.logspace(-6, 2, rows)[:, None]
    weight[3] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_equal_an_independent_computation(dtype):
    weight = weight_of(dtype)
    codes, scale = quantize_weight(weight)
    values, scales = fp8_in_numpy(weight.float().numpy())
    np.testing.assert_array_equal(scale.numpy(), scales)
    np.testing.assert_array_equal(codes.float().numpy(), values)
    expected = torch.from_numpy(values.astype(np.float32) * scales).to(dtype)
    assert torch.equal(dequantize_with(codes, scale, dtype), expected)


def test_a_server_that_quantizes_the_dequantized_weight_holds_the_same_codes():
    codes, scale = quantize_weight(weight_of(torch.bfloat16))
    again, scales = quantize_weight(dequantize_with(codes, scale, torch.bfloat16))
    assert torch.equal(scales, scale) and torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_an_fp8_layer_computes_and_learns_through_the_dequantized_weight(dtype, bias):
    plain = torch.nn.Linear(96, 48, bias=bias).to(dtype)
    layer = Fp8Linear(plain)
    plain.weight.data = layer.dequantized()
    x, gradient = torch.randn(2, 5, 96, dtype=dtype), torch.randn(2, 5, 48, dtype=dtype)
    found, expected = (x.clone().requires_grad_() for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        y = layer(found)
    plain(expected).backward(gradient)
    y.backward(gradient)
    assert torch.equal(y, plain(x)) and torch.equal(found.grad, expected.grad)
    assert not kept, "the backward pass keeps nothing, above all no dequantized weight"
    stored = sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))
    assert stored == 96 * 48 + 4 * 48 + bias * 48 * dtype.itemsize
    assert not any(one.requires_grad for one in layer.parameters())


def test_converting_leaves_each_layer_once():
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    before = list(model)
    store_in_fp8(model, ["0", "2"], "cpu")
    assert [type(one) for one in model] == [Fp8Linear, torch.nn.Linear, Fp8Linear]
    assert before[0].weight is None and before[2].weight is None and before[1] is model[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["fp8", "none"])
@pytest.mark.parametrize("model", [shared_model, single_model], ids=["tied in two shards", "untied in one file"])
def test_loading_reading_and_writing_a_base_are_one(tmp_path, model, kind, dtype):
    loaded = load_frozen(model(), kind, dtype, device="cpu")
    info = hash_base(loaded)
    assert info["quantization"] == {"type": kind, "storage_dtype": dtype, "device": "cpu"}
    assert {name.rpartition(".")[2] for name in info["quantized"]} == set(LINEARS)
    written = export(Original(model(), dtype, True, quantization=kind), tmp_path / "base", ORIGIN, None)
    assert written == info | ORIGIN == read_json(tmp_path / "base/base.json")
    streamed, stored = dict(dequantized_tensors(model(), info)), read_all(tmp_path / "base")
    assert set(streamed) == set(stored) == set(info["tensors"]) and not (tmp_path / "base/nf4").exists()
    for name, parameter in loaded.named_parameters():
        layer = loaded.get_submodule(name.removesuffix(".weight")) if name.endswith(".weight") else None
        expected = dequantize(layer) if isinstance(layer, torch.nn.Linear) else parameter
        assert streamed[name].dtype == expected.dtype and torch.equal(streamed[name], expected), name
        assert torch.equal(stored[name], expected.to(torch.bfloat16)), name
    again = load_base(BaseCheckpoint(model(), info), "cpu")
    assert hash_base(again)["hash"] == info["hash"]


def test_storages_and_types_are_different_bases():
    bases = [(kind, dtype) for kind in ("nf4", "fp8", "none") for dtype in DTYPES]
    hashes = {hash_base(load_frozen(single_model(), kind, dtype, device="cpu"))["hash"] for kind, dtype in bases}
    assert len(hashes) == len(bases)


@pytest.mark.parametrize("kind", ["fp8", "none"])
def test_a_base_keeps_its_hash_through_peft_and_a_step_and_a_changed_byte_shows(kind):
    from peft import LoraConfig, get_peft_model

    model = load_frozen(shared_model(), kind, "bfloat16", device="cpu")
    facts = hash_base(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name for name, one in wrapped.named_parameters() if one.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    optimizer = torch.optim.SGD((one for one in wrapped.parameters() if one.requires_grad), lr=0.1)
    ids = torch.arange(1, 40)[None]
    for _ in range(2):
        wrapped(ids, labels=ids).loss.backward()
        optimizer.step()
    assert all(one.grad.abs().sum() > 0 for name, one in wrapped.named_parameters() if "lora_B" in name)
    assert hash_base(wrapped) == facts
    check_base_unchanged(wrapped, facts)
    layer = model.model.layers[0].mlp.down_proj.base_layer
    layer.weight.data.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(CheckFailed, match=r"1 of .* first .'model.layers.0.mlp.down_proj.weight'"):
        check_base_unchanged(wrapped, facts)


@pytest.mark.parametrize("kind", ["fp8", "none"])
@pytest.mark.parametrize("by_inputs", [None, True, False], ids=["whole", "by inputs", "by outputs"])
def test_a_remerge_is_the_base_and_the_update_rounded_once(tmp_path, kind, by_inputs):
    """Covers a worker's fused layer whole, and either half when two workers split it."""
    export(Original(shared_model(), "bfloat16", True, quantization=kind), tmp_path / "base", ORIGIN, None)
    base = dict(dequantized_tensors(shared_model(), read_json(tmp_path / "base/base.json")))
    names = [f"model.layers.0.self_attn.{leaf}" for leaf in ("q_proj", "k_proj")]
    ranks, parts, factors, expected, row = 1 if by_inputs is None else 2, [], {}, [], 0
    for name in names:
        weight = base[f"{name}.weight"]
        rows, columns = (size // (ranks if split else 1) for size, split in zip(
            weight.shape, (by_inputs is False, bool(by_inputs)), strict=True))  # fmt: skip
        first_out, first_in = (ranks - 1) * rows * (by_inputs is False), (ranks - 1) * columns * bool(by_inputs)
        a, b = torch.randn(4, weight.shape[1]), torch.randn(len(weight), 4) * 0.01
        out, into = slice(first_out, first_out + rows), slice(first_in, first_in + columns)
        parts.append(Part(name, row, rows, first_out, first_in))
        factors[name] = (a[:, into], b[out], 0.5)
        expected.append((weight.float() + 0.5 * (b @ a)).to(torch.bfloat16)[out, into])
        row += rows
    linear = Linear("qkv_proj", SimpleNamespace(input_size=weight.shape[1]), row, columns, parts)
    dtype = base_copy.read(tmp_path / "base", kind, [linear], lambda one: one)
    assert (linear.packed.dtype, linear.absmax is None) == {
        "fp8": (torch.uint8, False),
        "none": (torch.bfloat16, True),
    }[kind]
    state, kept = State([linear], dtype, None), linear.packed.clone()
    for _ in range(2):  # a sync leaves the copy as it was
        found = merged_weight(linear, linear.packed, linear.absmax, state, factors)
        torch.testing.assert_close(found, torch.cat(expected), rtol=2**-7, atol=1e-6)
        assert (found == torch.cat(expected)).float().mean() > 0.99  # float32 sums in another order
        assert torch.equal(linear.packed, kept)
    assert torch.equal(merged_weight(linear, linear.packed, linear.absmax, state, {}), torch.cat(
        [base[f"{part.name}.weight"][part.first_out : part.first_out + part.rows,
                                     part.first_in : part.first_in + columns] for part in parts]))  # fmt: skip


def test_the_copys_size_is_told_before_it_is_read(tmp_path):
    sizes = {}
    for kind in ("nf4", "fp8", "none"):
        export(Original(shared_model(), "bfloat16", True, quantization=kind), tmp_path / kind, ORIGIN, None)
        assert base_copy.storage(tmp_path / kind) == kind and base_copy.has_copy(tmp_path / kind)
        sizes[kind] = base_copy.copy_bytes(tmp_path / kind)
    shapes = [base.shape for name, base in dequantized_tensors(shared_model(), read_json(tmp_path / "none/base.json"))
              if name.split(".")[-2] in LINEARS]  # fmt: skip
    weights = sum(math.prod(shape) for shape in shapes)
    assert sizes["none"] == 2 * weights and sizes["fp8"] == weights + 4 * sum(shape[0] for shape in shapes)
    assert 0.5 * weights < sizes["nf4"] < 0.6 * weights + 20_000


@pytest.mark.parametrize("kind", ["fp8", "none"])
def test_quantizers_see_the_dequantized_base(kind):
    from kit.core.formats import FORMATS
    from kit.policy.quantized_linear import quantizers_off, use_quantized_linears
    from kit.weights.quantize import effective_weight, fake_quantize_weight

    model = load_frozen(shared_model(), kind, "bfloat16", device="cpu")
    plain = load_frozen(shared_model(), "none", "bfloat16", device="cpu")
    layers = [name for name in hash_base(model)["quantized"]]
    for name in layers:
        weight = dequantize(model.get_submodule(name))
        assert torch.equal(effective_weight(model.get_submodule(name)), weight)
        plain.get_submodule(name).weight.data = weight
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        unquantized = plain(ids).logits
        for name in layers:
            weight = plain.get_submodule(name).weight
            weight.data = fake_quantize_weight(weight.data, FORMATS["w4a16"])
        assert use_quantized_linears(model, FORMATS["w4a16"]) == len(layers)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
        with quantizers_off(model):
            torch.testing.assert_close(model(ids).logits, unquantized)


@pytest.mark.parametrize(("kind", "compute"), [("none", "fused"), ("fp8", "fused"), ("fp8", "fp8")])
def test_fused_layers_compute_and_learn_as_peft_does(kind, compute):
    """fp8 up to the rounding of activations and gradients to FP8."""
    from peft import LoraConfig, get_peft_model

    from kit.policy.fused_linear import use_fused_linears

    ids, found, folder = torch.arange(1, 40)[None], {}, single_model()  # made before the seed is set
    for way in ("plain", compute + " "):
        torch.manual_seed(0)
        base = load_frozen(folder, kind, "float32", device="cpu")
        model = get_peft_model(base, LoraConfig(r=4, target_modules=LINEARS[:5], task_type="CAUSAL_LM"))
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.data.normal_(0, 0.02)
        facts = hash_base(model)
        if way != "plain":
            assert use_fused_linears(model, compute) == len(facts["quantized"])
            assert hash_base(model) == facts
        loss = model(ids, labels=ids).loss
        loss.backward()
        with torch.no_grad(), model.disable_adapter():
            reference = model(ids, labels=ids).loss
        gradients = torch.cat([one.grad.flatten() for name, one in model.named_parameters() if "lora_" in name])
        found[way == "plain"] = loss.detach(), reference, gradients
    (loss, reference, gradients), expected = found[False], found[True]
    close = {"rtol": 1e-4} if compute == "fused" else {"rtol": 0.02}
    assert loss.item() == pytest.approx(expected[0].item(), rel=close["rtol"])
    assert reference.item() == pytest.approx(expected[1].item(), rel=close["rtol"])
    off = (gradients - expected[2]).norm() / expected[2].norm()
    assert off < (1e-4 if compute == "fused" else 0.15) and (compute == "fused" or off > 1e-4), off


def test_fp8_products_are_taken_of_the_stored_codes():
    from kit.policy.fused_linear import Product
    from kit.weights.stored_weight import weight_of

    layer = Fp8Linear(torch.nn.Linear(32, 16, dtype=torch.bfloat16))
    product = Product(layer, True)
    assert product.scale() is layer.weight_scale
    codes = weight_of(layer, product.scale())
    assert codes.data_ptr() == layer.weight.data_ptr() and codes.dtype == torch.float8_e4m3fn
    turned = weight_of(layer, product.scale(), transposed=True, out=torch.empty(32, 16, dtype=torch.float8_e4m3fn))
    assert torch.equal(turned.float(), codes.float().t())
    assert torch.equal(weight_of(layer), layer.dequantized())


@pytest.mark.parametrize(
    ("words", "sharded", "complaint"),
    [
        (
            ["--policy.quantization", "fp8", "--policy.double_quantization", "false"],
            None,
            "only nf4 has the block scales",
        ),
        (["--policy.quantization", "none", "--policy.compute", "fp8"], None, "quantize its weight again"),
        (["--policy.quantization", "none", "--policy.compute", "fused"], None, None),
        (["--policy.quantization", "fp8", "--policy.compute", "fp8"], None, None),
        (["--policy.quantization", "fp8"], "FSDP2", "fp8 under FSDP2"),
        (["--policy.quantization", "none"], "FSDP2", None),
        (["--policy.compute", "fp8", "--policy.double_quantization", "false"], "ZeRO-3", None),
    ],
)
def test_what_does_not_go_with_a_storage_is_named(words, sharded, complaint):
    found = base_rules.faults(load_config(CONFIG, words), sharded)
    assert (complaint is None and not found) or complaint in found[0], found


def test_bases_of_one_model_lie_in_different_places():
    places = {base_directory(load_config(CONFIG, ["--policy.quantization", kind])) for kind in ("nf4", "fp8", "none")}
    root = Path("models/bases")
    assert places == {root / "tiny-base", root / "tiny-base-fp8", root / "tiny-base-unquantized"}


def test_a_base_of_another_storage_is_not_reused(tmp_path):
    from launch.vllm_command import check_base
    from merge.export import check_reusable

    words = ["--model.path", str(shared_model()), "--server.base", str(tmp_path / "base")]
    export(Original(shared_model(), "float32", True, quantization="fp8"), tmp_path / "base", ORIGIN, None)
    check_base(load_config(CONFIG, [*words, "--policy.quantization", "fp8"]), CONFIG)
    config = load_config(CONFIG, words)
    with pytest.raises(BadInput, match=r"its policy\.quantization is 'fp8', the configuration says 'nf4'"):
        check_base(config, CONFIG)
    with pytest.raises(BadInput, match=r"its policy\.quantization is 'fp8', the configuration says 'nf4'"):
        check_reusable(tmp_path / "base", config, ORIGIN, None)


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "size", "copied"),
    [
        ("nf4", "bfloat16", "NF4 weights", 0.5 + 1 / 64 + 4 / 64 / 256, 0.5625),
        ("fp8", "bfloat16", "FP8 weights", 1, 1),
        ("none", "bfloat16", "unquantized weights", 2, 2),
        ("none", "float32", "unquantized weights", 4, 2),
    ],
)
def test_the_plan_counts_what_the_base_and_a_workers_copy_take(kind, dtype, name, size, copied):
    from kit.plan import memory
    from kit.plan.gpus import parse_gpus
    from kit.plan.shapes import shape_by_size

    shape, (card, _) = shape_by_size("8b"), parse_gpus("h200")
    config = load_config(CONFIG, ["--policy.quantization", kind, "--model.dtype", dtype])
    weights = shape.linear_weights / 2**30
    assert memory.resident(shape, config, card)[name] == pytest.approx(size * weights)
    assert name in memory.RESIDENT
    assert memory.server_parts(shape, config, card)["copy of the base"] == pytest.approx(copied * weights)
