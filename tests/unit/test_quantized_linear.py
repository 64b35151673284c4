"""Quantized LoRA layers: gradients against full-size autograd, what they keep, peaks, recomputation, calibration."""

import collections
import copy
import dataclasses
import itertools
import subprocess

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as peft_layer
from torch.utils.checkpoint import checkpoint

from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import TRAINED as FORMATS
from kit.core.formats import fitted
from kit.policy import quantized_linear
from kit.policy.calibration import batches, calibrate
from kit.policy.kept_weights import keeping_weights
from kit.policy.quantized_linear import (
    STATE,
    quantizer_state,
    quantizers_of,
    quantizers_off,
    restore_quantizers,
    use_quantized_linears,
    write_quantizer_state,
)
from kit.policy.recompute import use_recompute
from kit.weights.frozen_base import dequantize, hash_base, load_nf4
from kit.weights.quantize import effective_weight, fake_quantize_activation, fake_quantize_weight, weight_peak
from merge.quantize import read_back
from tests import sandbox
from tests.unit.test_fused_linear import ROOT, add_adapter, factors, make_layer, relative
from tests.unit.test_plan_activations import (
    as_peft_on_a_gpu,  # noqa: F401
    nf4_policy,
    shape,
)
from tests.unit.test_plan_activations import config as layer_config

INPUTS, OUTPUTS = 256, {"q_proj": 256, "k_proj": 128, "v_proj": 128}
PEAK = 2.5  # of the inputs, below their largest
SIZES = {"odd": 192, "even": 256}  # inputs


def make_group(kind="nf4", dtype=torch.float32, bias=False, adapted=tuple(OUTPUTS)) -> torch.nn.ModuleDict:
    members = {}
    for seed, (name, outputs) in enumerate(OUTPUTS.items()):
        if kind == "nf4":
            layer = make_layer(dtype, inputs=INPUTS, outputs=outputs, bias=bias, seed=seed)
        else:
            torch.manual_seed(seed)
            layer = torch.nn.Linear(INPUTS, outputs, bias=bias, dtype=dtype).requires_grad_(False)
        members[name] = layer if name not in adapted else with_adapter(layer, kind)
    return torch.nn.ModuleDict(members)


def with_adapter(layer, kind):
    if kind == "nf4":
        return add_adapter(layer)
    module = peft_layer.Linear(layer, "default", config=LoraConfig(r=8, lora_alpha=24), r=8, lora_alpha=24)
    torch.nn.init.normal_(module.lora_B["default"].weight, std=0.05)
    return module


def quantize(group, fmt, alone=False):
    made = copy.deepcopy(group)
    for part in [torch.nn.ModuleDict({"layer": one}) for one in made.values()] if alone else [made]:
        use_quantized_linears(part, fmt)
    for one in made.values():
        one.product.input_peak = torch.tensor(PEAK)
    return made


def straight_through(value, quantized):
    return value + (quantized - value).detach()


def full_size(group, x, fmt):
    """{name: y} by autograd through weights of full size, each quantized with its straight-through gradient."""
    weights = {}
    for name, module in group.items():
        layer = getattr(module, "base_layer", module)
        weight = dequantize(layer) if isinstance(layer, bnb.nn.Linear4bit) else layer.weight
        if hasattr(module, "lora_A"):
            a, b = factors(module)
            weight = weight + module.scaling["default"] * (b @ a)
        weights[name] = straight_through(weight, weight.to(torch.bfloat16).to(weight.dtype))
    peak = torch.stack([weight_peak(one, fmt) for one in weights.values()]).amax() if fmt.shares_peak else None
    if fmt.activation is not None:
        x = straight_through(x, fake_quantize_activation(x, fmt.activation, torch.tensor(PEAK)))
    found = {}
    for name, weight in weights.items():
        bias = getattr(group[name], "base_layer", group[name]).bias
        quantized = straight_through(weight, fake_quantize_weight(weight.detach(), fmt, peak))
        found[name] = torch.nn.functional.linear(x, quantized, bias)
    return found


def gradients(group, x, g, call, used=tuple(OUTPUTS)):
    """({name: y}, dx, {parameter: gradient}) of some outputs."""
    x = x.clone().requires_grad_()
    group.zero_grad()
    ys = call(group, x)
    torch.autograd.backward([ys[name] for name in used], [g[name] for name in used])
    found = {name: one.grad for name, one in group.named_parameters() if one.grad is not None}
    return {name: y.detach() for name, y in ys.items()}, x.grad, found


def plainly(group, x):
    return {name: group[name](x) for name in OUTPUTS}


def through_checkpoint(group, x):
    return dict(
        zip(OUTPUTS, checkpoint(lambda x: tuple(plainly(group, x).values()), x, use_reentrant=False), strict=True)
    )


def close(found, expected, bound):
    assert found[0].keys() == expected[0].keys() and found[2].keys() == expected[2].keys()
    pairs = [(found[n][key], expected[n][key]) for n in (0, 2) for key in expected[n]]
    for one, other in [*pairs, (found[1], expected[1])]:
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative(one, other) < bound


def sample(dtype=torch.float32):
    torch.manual_seed(7)
    return torch.randn(2, 9, INPUTS).to(dtype), {name: torch.randn(2, 9, n).to(dtype) for name, n in OUTPUTS.items()}


@pytest.mark.parametrize("call", [plainly, through_checkpoint])
@pytest.mark.parametrize("kind", ["nf4", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_straight_through_estimation_at_full_size(name, kind, call):
    fmt, group, (x, g) = FORMATS[name], make_group(kind, bias=True), sample()
    expected = gradients(group, x, g, lambda group, x: full_size(group, x, fmt))
    close(gradients(quantize(group, fmt), x, g, call), expected, 1e-5)
    unquantized = gradients(group, x, g, plainly)
    assert relative(expected[0]["q_proj"], unquantized[0]["q_proj"]) > 0.005  # what is compared is quantized
    assert relative(expected[1], unquantized[1]) > 0.005


@pytest.mark.parametrize("name", ["nvfp4a16", "fp8_static"])
@pytest.mark.parametrize("adapted", [("q_proj", "v_proj"), ("k_proj",), ()])
@pytest.mark.parametrize("used", [("k_proj",), ("q_proj", "v_proj")])
def test_layers_without_an_adapter_and_outputs_that_nobody_uses_change_nothing(name, adapted, used):
    fmt, group, (x, g) = FORMATS[name], make_group(adapted=adapted), sample()
    expected = gradients(group, x, g, lambda group, x: full_size(group, x, fmt), used)
    close(gradients(quantize(group, fmt), x, g, plainly, used), expected, 1e-5)


@pytest.mark.parametrize("adapted", [tuple(OUTPUTS), ("q_proj", "v_proj"), ("k_proj",), ()])
def test_fused_layers_have_one_global_scale_with_the_adapter_and_without_as_the_export_has(adapted):
    group = make_group("bf16", torch.bfloat16, adapted=adapted)
    keys = group["k_proj"]
    getattr(keys, "base_layer", keys).weight.data.mul_(1e-5)  # so small that scales under that of all three lose bits
    with torch.no_grad():
        for name in adapted:
            factors(group[name])[1].mul_(0 if name == "k_proj" else 20)
    made = quantize(group, FORMATS["nvfp4a16"])
    for is_on in (True, False):
        for name in adapted:
            made[name].enable_adapters(is_on)
        weights = {}
        for name, module in made.items():
            a, b, scaling, _ = module.settings(torch.ones(1, INPUTS))
            found = module.product.weight(a, b, scaling, torch.float32)
            weights[name] = effective_weight(module.product.layer, a, b, scaling), found
        largest = max(weight.abs().max().item() for weight, _ in weights.values())
        for weight, found in weights.values():
            assert torch.equal(found, read_back(FORMATS["nvfp4a16"], weight, largest)[1])
        alone, found = weights["k_proj"]
        assert not torch.equal(found, read_back(FORMATS["nvfp4a16"], alone)[1])


@pytest.mark.parametrize("name", FORMATS)
def test_no_token_at_all_is_no_error(name):
    group = quantize(make_group(), FORMATS[name])
    x = torch.zeros(0, INPUTS, requires_grad=True)
    ys = plainly(group, x)
    assert {key: tuple(y.shape) for key, y in ys.items()} == {key: (0, n) for key, n in OUTPUTS.items()}
    torch.autograd.backward([y.sum() for y in ys.values()])
    assert x.grad.shape == x.shape and quantizers_of(group).watched() == {}


@pytest.mark.parametrize("name", FORMATS)
def test_in_bfloat16_the_gradients_are_within_rounding(name):
    fmt, group, (x, g) = FORMATS[name], make_group(dtype=torch.bfloat16), sample(torch.bfloat16)
    exact = make_group()
    for name_, module in exact.items():
        module.base_layer = group[name_].base_layer
        module.load_state_dict(group[name_].state_dict(), strict=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(quantize(group, fmt), x, g, plainly)
    wide = {key: value.float() for key, value in g.items()}
    expected = gradients(exact, x.float(), wide, lambda group, x: full_size_float(group, x, fmt))
    for one, other in [(found[1], expected[1]), *((found[2][key], expected[2][key]) for key in expected[2])]:
        assert relative(one, other) < 0.02


def full_size_float(group, x, fmt):
    """As `full_size`, with NF4 weights that dequantize to bfloat16 taken as float32."""
    plain = torch.nn.ModuleDict()
    for name, module in group.items():
        layer = torch.nn.Linear(INPUTS, OUTPUTS[name], bias=False).requires_grad_(False)
        layer.weight.data = dequantize(module.base_layer).float()
        plain[name] = with_adapter(layer, "bf16")
        plain[name].lora_A, plain[name].lora_B = module.lora_A, module.lora_B
    return full_size(plain, x, fmt)


def test_nvidia_modelopt_s_quantizer_gives_the_same_gradients(tmp_path):
    python = sandbox.side_environment("modelopt") / "bin/python"
    module, (x, g) = make_group()["k_proj"], sample()
    x, g = x.flatten(0, 1), g["k_proj"].flatten(0, 1)
    a, b = (factor.detach() for factor in factors(module))
    given = {
        "base": dequantize(module.base_layer),
        "a": a,
        "b": b,
        "scaling": module.scaling["default"],
        "x": x,
        "g": g,
    }
    torch.save(given, tmp_path / "in.pt")
    command = [python, "tests/unit/modelopt_gradients.py", tmp_path / "in.pt", tmp_path / "out.pt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, theirs in torch.load(tmp_path / "out.pt").items():
        fmt = dataclasses.replace(FORMATS[name], activation=None)
        group = torch.nn.ModuleDict({"k_proj": copy.deepcopy(module)})
        use_quantized_linears(group, fmt)
        x_, layer = x.clone().requires_grad_(), group["k_proj"]
        layer(x_).backward(g)
        for found, key in zip((factor.grad for factor in factors(layer)), "ab", strict=True):
            assert relative(found, theirs[key]) < 1e-5, (name, key)  # x, g and the other factor alone decide
        # Its scales are others (for INT4 a fifteenth larger), so its weight is another rounding of the same.
        unquantized = g @ (given["base"] + given["scaling"] * (b @ a))
        assert relative(x_.grad, theirs["x"]) < 1.5 * relative(x_.grad, unquantized), name


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_of_a_weight_s_size_is_kept_for_the_backward_pass(name):
    fmt, (x, g) = FORMATS[name], sample()
    group, kept = quantize(make_group(), fmt), []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ys = plainly(group, x)
    ours = {factor.data_ptr() for module in group.values() for factor in factors(module)}
    (only,) = [tensor for tensor in kept if tensor.data_ptr() not in ours]  # one input for three layers
    assert only.numel() == x.numel()
    assert (only.data_ptr() == x.data_ptr()) == (fmt.activation is None)
    torch.autograd.backward(list(ys.values()), list(g.values()))
    for module in group.values():
        held = [value for value in vars(module.product).values() if isinstance(value, torch.Tensor)]
        assert module.product._kept is None and all(tensor.numel() == 1 for tensor in held)
        assert all(peak is None or peak.numel() <= 256 for _, peak in module.product._peaks.values())


def test_a_layer_alone_computes_what_it_does_in_its_group_where_no_scale_is_shared():
    group, (x, g) = make_group(), sample()
    for name in ("fp8", "w4a16", "fp8_static"):
        together, alone = (quantize(group, FORMATS[name], alone) for alone in (False, True))
        assert all(module.product.group is None for module in alone.values()), name
        close(gradients(alone, x, g, plainly), gradients(together, x, g, plainly), 1e-6)


def count_peaks(monkeypatch) -> list:
    calls, peak = [], quantized_linear.effective_peak
    monkeypatch.setattr(quantized_linear, "effective_peak", lambda *args: calls.append(1) or peak(*args))
    return calls


def test_a_peak_is_found_again_when_the_adapter_changed_and_not_before(monkeypatch):
    calls, (x, g) = count_peaks(monkeypatch), sample()
    group = quantize(make_group(), FORMATS["nvfp4a16"])
    for _ in range(2):
        gradients(group, x, g, through_checkpoint)
    assert len(calls) == 3
    k = group["k_proj"].product
    before = k.peak(*k.factors(True))
    with torch.no_grad():
        factors(group["q_proj"])[1].mul_(40)  # its peak is that of k and v too
    assert k.peak(*k.factors(True)) > 2 * before and len(calls) == 4
    factors(group["v_proj"])[1].data.mul_(1.5)  # past its version, as DeepSpeed does
    plainly(group, x)
    assert len(calls) == 4
    quantized_linear.forget_peaks(group)
    plainly(group, x)
    assert len(calls) == 7


def test_merged_weights_and_shapes_that_a_format_cannot_store_are_refused():
    group, (x, _) = make_group(), sample()
    made = quantize(group, FORMATS["fp8"])
    made["q_proj"].merged_adapters.append("default")
    with pytest.raises(CheckFailed, match="one adapter that is not merged"):
        made["q_proj"](x)
    odd = torch.nn.ModuleDict({"layer": make_layer(inputs=160, outputs=64)})
    with pytest.raises(BadInput, match="w4a16 needs groups of 128 or 64 inputs; 1 of 1"):
        use_quantized_linears(odd, FORMATS["w4a16"])
    group["q_proj"].forward = group["q_proj"].forward  # as use_recompute does
    with pytest.raises(ValueError, match="q_proj has a forward of its own"):
        use_quantized_linears(group, FORMATS["fp8"])
    with pytest.raises(BadInput, match=r"LoRA dropout.*policy.quant_cfg"):
        use_quantized_linears(torch.nn.ModuleDict({"layer": add_adapter(make_layer(), dropout=0.1)}), FORMATS["fp8"])


def test_the_check_for_a_gpu_can_be_rehearsed():
    from bench import linear_kernels, qat_check

    qat_check.check_errors("cpu", qat_check.SMALL, 16)
    assert linear_kernels.missed == [] and len(qat_check.tables[-1].splitlines()) == 1 + len(FORMATS)


# A whole model.


@pytest.fixture(scope="module")
def small(learning_model_dir):
    """`small(format name)`: the policy as the trainer makes it, the same adapter each time, zero unless `learned`."""

    def make(name=None, learned=True, dtype="float32"):
        base = load_nf4(learning_model_dir, dtype=dtype, device="cpu")
        torch.manual_seed(1)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for key, parameter in model.named_parameters():
            if "lora_B" in key and learned:
                torch.nn.init.normal_(parameter.data, std=0.02)
        if name is not None:
            assert use_quantized_linears(model, FORMATS[name]) == 14
        return model

    return make


def token_ids(rows=3, length=20):
    return torch.randint(5, 300, (rows, length), generator=torch.Generator().manual_seed(2))


def calibrated(model, ids=None):
    ids = token_ids() if ids is None else ids
    calibrate(model, [(ids, torch.ones_like(ids, dtype=torch.bool))])
    return model


@pytest.mark.parametrize("name", ["fp8", "fp8_static", "nvfp4a16", "nvfp4"])
def test_before_the_first_update_the_policy_is_the_reference_which_is_quantized_too(small, name):
    model, ids = calibrated(small(name, learned=False)), token_ids()
    with torch.no_grad():
        policy = model(input_ids=ids).logits
        with model.disable_adapter():
            assert torch.equal(model(input_ids=ids).logits, policy)
        with quantizers_off(model):
            plain = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, policy)
    assert torch.equal(plain, small(learned=False)(input_ids=ids).logits)
    assert relative(policy, plain) > 0.01


def test_the_base_its_hash_and_every_name_are_those_of_the_plain_model(small):
    plain, model = small(), small("nvfp4")
    assert hash_base(model)["hash"] == hash_base(plain)["hash"]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model.get_base_model().lm_head) is torch.nn.Linear
    assert quantizers_of(plain) is None and quantizers_of(model).fmt is FORMATS["nvfp4"]


def test_generation_makes_every_weight_once_and_keeps_none(small, monkeypatch):
    model, made = small("nvfp4a16"), []
    original = quantized_linear.quantized_weight
    monkeypatch.setattr(quantized_linear, "quantized_weight", lambda *args: made.append(1) or original(*args))
    with torch.no_grad():
        slowly = model.generate(input_ids=token_ids(), max_new_tokens=6, do_sample=False)
        count = len(made)
        with keeping_weights(model):
            assert torch.equal(model.generate(input_ids=token_ids(), max_new_tokens=6, do_sample=False), slowly)
    assert count > len(made) - count == 14
    assert all(module.product._kept is None for module in quantized_linear.quantized_layers(model).values())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranges_are_the_largest_inputs_of_the_unquantized_policy_whatever_the_batches(small, size):
    """With its adapter, which is not zero where policy.init_adapter brings one."""
    prompts = [row[: 3 + 4 * n].tolist() for n, row in enumerate(token_ids(5, 24))]
    plain, peaks = small(), {}

    def watch(name):
        def hook(_, inputs):
            peaks[name] = max(peaks.get(name, 0.0), inputs[0].abs().max().item())

        return hook

    for name, module in plain.named_modules():
        if isinstance(module, bnb.nn.Linear4bit) and "base_layer" in name:
            module.register_forward_pre_hook(watch(name.removeprefix("base_model.model.").replace(".base_layer", "")))
    for ids in prompts:
        plain(input_ids=torch.tensor([ids]))
    state = calibrate(small("nvfp4"), batches(prompts, size, "cpu"))
    assert {name.removesuffix(".input_amax") for name in state} == peaks.keys() and len(peaks) == 14
    for name, peak in peaks.items():
        assert state[f"{name}.input_amax"].item() == pytest.approx(peak, rel=1e-4)
    of_the_base = calibrate(small("nvfp4", learned=False), batches(prompts, size, "cpu"))
    assert max(abs(of_the_base[name] / peak - 1) for name, peak in state.items()) > 0.01


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4a16"])
def test_the_state_comes_back_bit_for_bit(small, name, tmp_path):
    model = calibrated(small(name))
    facts = write_quantizer_state(model, tmp_path)
    assert facts["quant_cfg"] == name and (tmp_path / STATE).is_file()
    other = small(name)
    restore_quantizers(other, tmp_path)
    assert write_quantizer_state(other, tmp_path) == facts
    assert quantizer_state(other).keys() == quantizer_state(model).keys()
    assert len(quantizer_state(other)) == (14 if name == "nvfp4" else 0)
    for key, value in quantizer_state(model).items():
        assert torch.equal(quantizer_state(other)[key], value)
    with torch.no_grad():
        assert torch.equal(other(input_ids=token_ids()).logits, model(input_ids=token_ids()).logits)
    with pytest.raises(BadInput, match="has no quantizer state"):
        restore_quantizers(model, tmp_path / "none")
    assert write_quantizer_state(small(), tmp_path) == {}


# Recomputation.


def recomputing(mode: str, name: str):
    torch.manual_seed(0)
    made = layer_config("all-linear", "none")
    made.policy.lora_rank = 16
    model = nf4_policy(shape(2, hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64), made)
    made.train.recompute = mode
    use_quantized_linears(model, FORMATS[name])
    with torch.autocast("cpu", torch.bfloat16):  # as the test tells peft
        calibrated(model, token_ids() % 200)
    use_recompute(model, made)
    if mode != "none":
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


@pytest.mark.usefixtures("as_peft_on_a_gpu")
@pytest.mark.parametrize("name", ["nvfp4", "fp8", "fp8_block"])
def test_every_recomputation_has_the_same_gradients_and_makes_no_weight_for_a_known_answer(name, monkeypatch):
    found, made = {}, collections.Counter()
    original, mode = quantized_linear.quantized_weight, "none"
    monkeypatch.setattr(quantized_linear, "quantized_weight", lambda *args: made.update([mode]) or original(*args))
    for mode in ("none", "full", "selective"):
        model = recomputing(mode, name)
        made.clear() if mode == "none" else None
        ids = token_ids() % 200
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found[mode] = {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
    for mode, key in itertools.product(("full", "selective"), found["none"]):
        assert torch.equal(found[mode][key], found["none"][key]), (mode, key)
    # Forward and backward of 14 layers; a second run of all but down_proj; of none.
    assert made == {"none": 28, "full": 28 + 12, "selective": 28}


def test_int4_groups_are_those_of_the_checkpoint():
    layers = torch.nn.ModuleDict({name: make_layer(inputs=size, outputs=64) for name, size in SIZES.items()})
    weights = {name: dequantize(layer).to(torch.bfloat16) for name, layer in layers.items()}
    use_quantized_linears(layers, FORMATS["w4a16"])
    fmt = fitted(FORMATS["w4a16"], SIZES.values())  # 192 is no multiple of 128
    for name, layer in layers.items():
        _, stored = read_back(fmt, weights[name])
        assert torch.equal(layer(torch.eye(SIZES[name])).T, stored)
