"""Fused and FP8 linear layers against peft's path and against numbers computed here."""

import copy
from pathlib import Path

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import bnb as peft_bnb
from peft.tuners.lora import layer as peft_layer
from torch.utils.checkpoint import checkpoint

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.plan import memory
from kit.plan.cost import update_seconds
from kit.plan.gpus import CARDS
from kit.plan.shapes import shape_by_size
from kit.policy import fused_linear
from kit.policy.fused_linear import FusedBase, FusedLora, use_fused_linears
from kit.weights import fp8 as weights_fp8
from kit.weights import stored_weight
from kit.weights.frozen_base import dequantize, hash_base, load_nf4
from kit.weights.stored_weight import quantize_rows, weight_of
from merge.quantize import store
from tests.conftest import rehearse

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_layer(dtype=torch.float32, double=True, inputs=128, outputs=96, bias=False, seed=0) -> bnb.nn.Linear4bit:
    torch.manual_seed(seed)
    plain = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    layer = bnb.nn.Linear4bit(
        inputs, outputs, bias=bias, compute_dtype=dtype, compress_statistics=double, quant_type="nf4"
    )
    layer.weight.data, layer.bias = plain.weight.data, plain.bias  # quantized, from this dtype, by the move below
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu").requires_grad_(False)


def add_adapter(layer, dtype=torch.float32, rslora=False, dropout=0.0) -> peft_bnb.Linear4bit:
    config = LoraConfig(r=8, lora_alpha=24, use_rslora=rslora, lora_dropout=dropout)
    module = peft_bnb.Linear4bit(layer, "default", config=config, r=8, lora_alpha=24)
    torch.nn.init.normal_(module.lora_B["default"].weight, std=0.05)
    return module.to(dtype) if dtype != torch.float32 else module


def fuse(module, compute="fused"):
    holder = torch.nn.ModuleDict({"layer": copy.deepcopy(module)})
    assert use_fused_linears(holder, compute) == 1
    return holder["layer"]


def factors(module):
    return module.lora_A["default"].weight, module.lora_B["default"].weight


def run(module, x, g):
    """(y, dx, dA, dB) for an input and the gradient of the output."""
    x = x.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, *(factor.grad for factor in factors(module))


def relative(found, expected) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("rslora", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_layer_gives_what_peft_gives_in_float32_within_1e_5(double, rslora, bias):
    module = add_adapter(make_layer(double=double, bias=bias), rslora=rslora)
    x, g = torch.randn(3, 7, 128), torch.randn(3, 7, 96)
    for found, expected in zip(run(fuse(module), x, g), run(module, x, g), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert relative(found, expected) < 1e-5


def test_a_merged_adapter_is_not_added_again():
    module = torch.nn.ModuleDict({"layer": torch.nn.Linear(128, 96).requires_grad_(False)})
    layer = peft_layer.Linear(module["layer"], "default", config=LoraConfig(r=8, lora_alpha=24), r=8, lora_alpha=24)
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.05)
    module["layer"], x = layer, torch.randn(5, 128)
    expected = layer(x).detach()
    use_fused_linears(module, "fused")
    torch.testing.assert_close(layer(x).detach(), expected)
    layer.merge()
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-5, atol=1e-5)
    layer.unmerge()
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_fused_layer_is_nearer_to_the_exact_sum_in_bfloat16_than_peft(adapter):
    module = add_adapter(make_layer(torch.bfloat16)).to(adapter)
    x, g = torch.randn(5, 40, 128).bfloat16(), torch.randn(5, 40, 96).bfloat16()
    exact = exact_results(module, x, g)
    with torch.autocast("cpu", torch.bfloat16):
        results = run(fuse(module), x, g), run(module, x, g)
    for name, fused, plain, expected in zip(("y", "dx", "dA", "dB"), *results, exact, strict=True):
        assert fused.dtype == plain.dtype
        assert relative(fused, expected) < 0.005, name
        assert relative(fused, expected) < 1.1 * relative(plain, expected), name


def exact_results(module, x, g):
    """y, dx, dA, dB in float64 of the numbers that the layer computes with: its factors in the compute dtype."""
    weight = dequantize(module).double()
    a, b = (factor.detach().to(x.dtype).double() for factor in factors(module))
    rows, g, s = x.double().flatten(0, 1), g.double().flatten(0, 1), module.scaling["default"]
    y = rows @ weight.t() + s * (rows @ a.t()) @ b.t()
    dx = g @ weight + s * (g @ b) @ a
    return y.view(*x.shape[:-1], -1), dx.view(x.shape), s * (g @ b).t() @ rows, s * g.t() @ (rows @ a.t())


def test_gradients_are_those_of_finite_differences():
    layer = make_layer(inputs=64, outputs=16)
    layer.compute_dtype = torch.float64
    module = fuse(add_adapter(layer, torch.float64))
    a, b = (factor.detach().requires_grad_() for factor in factors(module))
    x = torch.randn(2, 3, 64, dtype=torch.float64, requires_grad=True)

    def call(x, a, b):
        return fused_linear._Linear.apply(x, [module.product], module.scaling["default"], torch.float64, a, b)[0]

    assert torch.autograd.gradcheck(call, (x, a, b))


@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_shapes_strides_and_frozen_inputs_change_nothing(compute):
    module = fuse(add_adapter(make_layer()), compute)
    x, g = torch.randn(6, 128), torch.randn(6, 96)
    expected = run(module, x, g)
    wide = torch.randn(6, 192)
    wide[:, ::2] = g
    for input_, gradient in ((x, wide[:, ::2]), (x.view(2, 3, 128), g.view(2, 3, 96)), (x.t().contiguous().t(), g)):
        for found, value in zip(run(module, input_, gradient), expected, strict=True):
            torch.testing.assert_close(found.flatten(), value.flatten())
    module(x).sum().backward()  # an expanded gradient
    ones = run(module, x, torch.ones(6, 96))
    assert torch.isfinite(ones[2]).all()
    for factor in factors(module):
        factor.grad = None
    module(x).backward(g)  # x needs no gradient in the first layer
    torch.testing.assert_close(factors(module)[0].grad, expected[2])
    empty = run(module, torch.randn(0, 4, 128), torch.randn(0, 4, 96))
    assert empty[0].shape == (0, 4, 96) and empty[1].shape == (0, 4, 128)
    assert not empty[2].any() and not empty[3].any()


def test_nothing_but_the_input_and_its_product_with_a_is_kept_for_the_backward_pass():
    kept = []
    module = fuse(add_adapter(make_layer()), "fp8")
    x = torch.randn(50, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    ours = {factor.data_ptr() for factor in factors(module)}
    kept = [tensor for tensor in kept if tensor.data_ptr() not in ours]
    assert [tuple(tensor.shape) for tensor in kept] == [(50, 128), (50, 8)]
    assert kept[0].data_ptr() == x.data_ptr()


# FP8, by numbers computed in numpy from the format's definition.

# Non-negative values by code: 4 bits of exponent, 3 of mantissa; code 127 is NaN.
E4M3 = np.array([(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8)][:127])


def fp8_rows(value: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """FP8 values and scales of the rows of `value` (float32), one scale per row; ties go to the even code."""
    scale = np.maximum(np.abs(value).max(1, keepdims=True) / np.float32(448), np.float32(floor))
    quotient = np.abs(value / scale)
    middle = (E4M3[1:] + E4M3[:-1]) / 2
    code = np.searchsorted(middle, quotient)
    is_tie = quotient == middle[np.minimum(code, len(middle) - 1)]
    return np.copysign(E4M3[code + (is_tie & (code % 2 == 1))], value).astype(np.float32), scale


def test_fp8_rows_are_what_the_format_defines_also_for_zeros_tiny_and_broken_values():
    x = torch.randn(40, 96) * torch.logspace(-12, 3, 40)[:, None]
    x[3] = 0
    for floor in (weights_fp8.LEAST_SCALE, stored_weight.LEAST_GRADIENT_SCALE):
        codes, scale = quantize_rows(x, floor)
        expected, scales = fp8_rows(x.numpy(), floor)
        assert np.array_equal(codes.float().numpy(), expected) and np.array_equal(scale.numpy(), scales)
    x[5, 7], x[6, 7] = torch.nan, torch.inf
    codes, scale = quantize_rows(x)
    assert not torch.isfinite((codes.float() * scale)[5:7].sum(1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_fp8_layer_multiplies_the_codes_that_are_its_definition(dtype, bias):
    module = add_adapter(make_layer(dtype, bias=bias))
    fp8 = fuse(module, "fp8")
    x, g = torch.randn(9, 128).to(dtype), torch.randn(9, 96).to(dtype)
    y, dx, da, db = run(fp8, x, g)
    weight, by_channel = fp8_rows(dequantize(module).float().numpy(), weights_fp8.LEAST_SCALE)
    codes, by_token = fp8_rows(x.float().numpy(), weights_fp8.LEAST_SCALE)
    a, b = (factor.detach().to(dtype).double().numpy() for factor in factors(module))
    s, rows, gradient = module.scaling["default"], x.double().numpy(), g.double().numpy()
    expected = (codes @ weight.T) * by_token * by_channel.T + s * (rows @ a.T) @ b.T
    if bias:
        expected = expected + module.base_layer.bias.double().numpy()
    codes, by_token = fp8_rows(g.float().numpy() * by_channel.T, stored_weight.LEAST_GRADIENT_SCALE)
    down = (codes @ weight) * by_token + s * (gradient @ b) @ a
    bound = 1e-6 if dtype == torch.float32 else 0.004
    assert relative(y, torch.from_numpy(expected)) < bound
    assert relative(dx, torch.from_numpy(down)) < bound
    for found, value in zip((da, db), exact_results(module, x[None], g[None])[2:], strict=True):
        assert relative(found, value) < bound  # the adapter's gradients are not quantized


def test_fp8_products_are_within_5_percent_of_the_unquantized_ones_both_ways():
    module = make_layer(torch.bfloat16, inputs=512, outputs=256)
    x, g = torch.randn(64, 512).bfloat16(), (1e-7 * torch.randn(64, 256)).bfloat16()
    product = fuse(module, "fp8").product
    weight = dequantize(module)
    assert 0.02 < relative(product.forward(x, quantize_rows(x)), x @ weight.t()) < 0.05
    assert 0.02 < relative(fused_linear.input_gradient([product], [g]), g @ weight) < 0.05


def test_fp8_weight_has_the_bytes_that_vllm_and_for_rounded_scales_the_merge_make_of_the_base(learning_model_dir):
    model = load_nf4(learning_model_dir, dtype="bfloat16", device="cpu")
    from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel

    use_fused_linears(model, "fp8")
    layers = [module for module in model.modules() if isinstance(module, FusedBase)]
    assert len(layers) == 14
    for layer in layers:
        weight = dequantize(layer)
        scale = _fp8_channel_scale(weight.abs().amax(1, keepdim=True))
        served = _fp8_quant_per_channel(weight, scale)
        ours = weight_of(layer, layer.product.scale())
        assert torch.equal(layer.product.scale(), scale)
        assert torch.equal(ours.view(torch.uint8), served.view(torch.uint8))
        # The merge stores its scales in bfloat16 and makes its codes for those.
        merged = store(FORMATS["fp8"], weight, lambda *_: None)
        assert torch.equal(merged["weight_scale"], scale.bfloat16())
        codes = weights_fp8.to_e4m3(weight, merged["weight_scale"].float())
        assert torch.equal(merged["weight"].view(torch.uint8), codes.view(torch.uint8))
        turned = weight_of(layer, scale, transposed=True)
        assert torch.equal(turned.view(torch.uint8), ours.view(torch.uint8).t())


def test_layers_that_16_does_not_divide_are_computed_as_fused_and_counted():
    odd = {"odd": (72, 40), "outputs": (128, 40), "inputs": (72, 96)}
    layers = {name: make_layer(inputs=inputs, outputs=outputs) for name, (inputs, outputs) in odd.items()}
    holder = torch.nn.ModuleDict({"good": make_layer(), **layers})
    with pytest.warns(UserWarning, match=r"3 of 4 linear layers .* 16 does not divide .*first: odd"):
        assert use_fused_linears(holder, "fp8") == 4
    for name, (inputs, _) in odd.items():
        x = torch.randn(3, inputs)
        torch.testing.assert_close(holder[name](x), x @ dequantize(holder[name]).t())


def test_an_adapter_with_dropout_is_refused():
    with pytest.raises(BadInput, match=r"layer has LoRA dropout.*Set policy.compute to plain"):
        fuse(add_adapter(make_layer(), dropout=0.1))


# A whole model.


@pytest.fixture(scope="module")
def small(learning_model_dir):
    """`small(compute, dtype, adapter dtype)`: the policy as the trainer makes it; the same adapter each time."""

    def make(compute="plain", dtype="float32", adapter=torch.float32, double=True, targets=TARGETS):
        base = load_nf4(learning_model_dir, dtype=dtype, device="cpu", double_quantization=double)
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter)
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter.data, std=0.02)
        if compute != "plain":
            assert use_fused_linears(model, compute) == 14
        return model

    return make


def loss_and_gradients(model, autocast=False, checkpointing=False, seed=2):
    torch.manual_seed(seed)
    ids = torch.randint(0, 300, (3, 20))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train().zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_fused_model_has_the_loss_and_gradients_of_the_plain_one(small, double, checkpointing):
    loss, gradients = loss_and_gradients(small(double=double))
    found, ours = loss_and_gradients(small("fused", double=double), checkpointing=checkpointing)
    assert abs(found - loss) < 1e-5 * loss and relative(ours, gradients) < 1e-5


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_a_fused_model_in_bfloat16_differs_as_rounding_does(small, adapter):
    exact, plain, fused = small(), small(dtype="bfloat16", adapter=adapter), small("fused", "bfloat16", adapter)
    errors = []
    for seed in range(8):  # of one batch either has up to 1.7 times the other's error
        loss, truth = loss_and_gradients(exact, seed=seed)
        _, gradients = loss_and_gradients(plain, autocast=True, seed=seed)
        found, ours = loss_and_gradients(fused, autocast=True, seed=seed)
        assert abs(found - loss) < 0.01 * loss
        errors.append((relative(ours, truth), relative(gradients, truth)))
    ours, theirs = map(sum, zip(*errors, strict=True))
    assert ours < 1.4 * theirs, errors


def test_an_fp8_model_repeats_itself_under_checkpointing_and_stays_near_the_plain_one(small):
    loss, gradients = loss_and_gradients(small())
    found, ours = loss_and_gradients(small("fp8"))
    again, recomputed = loss_and_gradients(small("fp8"), checkpointing=True)
    assert found == again and torch.equal(ours, recomputed)
    assert abs(found - loss) < 0.02 * loss and 0.005 < relative(ours, gradients) < 0.15


@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_the_base_its_hash_the_names_and_the_reference_are_those_of_the_plain_model(small, compute, tmp_path):
    plain, model = small(), small(compute)
    assert hash_base(model)["hash"] == hash_base(plain)["hash"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids = torch.randint(0, 300, (2, 9))
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        reference, expected = model(input_ids=ids).logits, plain(input_ids=ids).logits
    assert relative(reference, expected) < (1e-5 if compute == "fused" else 0.2)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, reference)
    assert type(model.get_base_model().lm_head) is torch.nn.Linear
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 28 and all(torch.isfinite(value).all() for value in saved.values())


def test_layers_without_an_adapter_are_fused_too(small):
    model = small("fused", targets=["q_proj", "v_proj"])
    found = [[isinstance(module, kind) for module in model.modules()].count(True) for kind in (FusedLora, FusedBase)]
    assert found == [4, 10]
    loss, gradients = loss_and_gradients(small(targets=["q_proj", "v_proj"]))
    found, ours = loss_and_gradients(model)
    assert abs(found - loss) < 1e-5 * loss and relative(ours, gradients) < 1e-5


def test_the_layer_works_in_a_checkpoint_of_its_own_and_forgets_its_input():
    modules = torch.nn.ModuleDict({"q_proj": add_adapter(make_layer()), "k_proj": add_adapter(make_layer(seed=1))})
    use_fused_linears(modules, "fp8")
    x = torch.randn(6, 128, requires_grad=True)
    checkpoint(lambda x: modules["q_proj"](x) + modules["k_proj"](x), x * 1, use_reentrant=False).sum().backward()
    inside = x.grad.clone()
    x.grad = None
    (modules["q_proj"](x) + modules["k_proj"](x)).sum().backward()
    assert torch.equal(inside, x.grad)


# What is refused, and the kernels.


@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_dropout_is_refused_before_anything_loads(compute):
    keys = {"policy.compute": compute, "policy.lora_dropout": 0.1}
    with pytest.raises(BadInput, match=rf"policy.lora_dropout \(0.1\) with policy.compute {compute}"):
        check_config(load_config(CONFIG, overrides(keys)), 1)


def overrides(keys: dict) -> list[str]:
    return [part for key, value in keys.items() for part in (f"--{key}", str(value))]


def test_the_gpu_kernels_give_the_bits_of_their_definitions_in_tritons_interpreter():
    assert "ok      unpack to FP8, transposed" in rehearse("bench/linear_check.py", "kernels")


def three_layers():
    """q, k, v on one input and an output layer of a small attention, with adapters."""
    parts = {name: add_adapter(make_layer(seed=seed)) for seed, name in enumerate(("q_proj", "k_proj", "v_proj"))}
    return torch.nn.ModuleDict({**parts, "o_proj": add_adapter(make_layer(inputs=96, outputs=64, seed=9))})


def learn_twice(held):
    """Outputs and gradients of two passes, the second without the gradient of v."""
    torch.manual_seed(0)
    x, found = torch.randn(5, 128, requires_grad=True), []
    for names in (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj")):
        for parameter in held.parameters():
            parameter.grad = None
        x.grad = None
        ys = [held[name](x) for name in ("q_proj", "k_proj", "v_proj")]
        y = held["o_proj"](sum(y for name, y in zip(("q_proj", "k_proj", "v_proj"), ys, strict=True) if name in names))
        y.square().sum().backward()
        found += [y.detach(), x.grad.clone(), *(p.grad.clone() for p in held.parameters() if p.grad is not None)]
    return found


def test_kept_codes_give_the_same_bits_and_are_made_once(monkeypatch):
    made, weight_of = [], fused_linear.weight_of
    monkeypatch.setattr(
        fused_linear, "weight_of", lambda *args, **keys: made.append(args[0]) or weight_of(*args, **keys)
    )
    found = {}
    for keeps in (False, True):
        held = three_layers()
        assert use_fused_linears(held, "fp8", keeps) == 4
        made.clear()
        found[keeps] = learn_twice(held)
        # Four forward products and as many parts of backward products, in each pass; the set without v is not kept.
        assert len(made) == (4 + 4 + 4 + 3 if not keeps else 4 + 4 + 2)
    assert len(found[True]) == len(found[False]) > 10
    assert all(torch.equal(one, other) for one, other in zip(found[True], found[False], strict=True))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"policy.compute": "fused"}, "policy.compute fused and policy.quantization nf4"),
        ({"policy.compute": "fp8", "policy.quantization": "fp8"}, "policy.compute fp8 and policy.quantization fp8"),
    ],
)
def test_kept_codes_are_refused_where_none_are_made(keys, said):
    with pytest.raises(BadInput, match=f"train.keep_weights is true with {said}"):
        check_config(load_config(CONFIG, overrides(keys | {"train.keep_weights": "true"})), 1)


def test_kept_codes_are_refused_on_a_split_base(monkeypatch):
    keys = {"policy.compute": "fp8", "train.keep_weights": "true"}
    check_config(load_config(CONFIG, overrides(keys)), 1)
    monkeypatch.setattr("kit.core.config.sharding_rules.announced", lambda: "FSDP2")
    with pytest.raises(BadInput, match=r"train\.keep_weights is true under FSDP2"):
        check_config(load_config(CONFIG, overrides(keys)), 1)


def test_the_plan_counts_the_kept_codes_in_every_phase():
    shape, card = shape_by_size("8b"), CARDS["h200"]
    plain, kept = (
        load_config(CONFIG, overrides({"policy.compute": "fp8", "train.keep_weights": value}))
        for value in ("false", "true")
    )
    assert memory.kept_gib(shape, plain, card, 0.0) > 0
    assert memory.kept_gib(shape, kept, card, 0.0) == 0, "rollouts in process use the codes that are there"
    plain.rollout.keep_weights = "never"
    phases = [memory.trainer_phases(shape, config, card) for config in (plain, kept)]
    for name, parts in phases[0].items():
        more = memory.allocated(phases[1][name]) - memory.allocated(parts)
        assert more == pytest.approx(2 * shape.linear_weights / 2**30), name
    for config in (plain, kept):  # long completions, so that the host's launches are not the bound
        config.rollout.max_completion_length = 2048
    assert update_seconds(shape, kept, card, 64) < update_seconds(shape, plain, card, 64)
