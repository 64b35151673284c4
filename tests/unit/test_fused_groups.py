"""Layers with one input as one function: what it computes, when it does not, and what it keeps."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import bnb as peft_bnb
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kit.policy import fused_linear
from kit.policy.fused_linear import use_fused_linears
from kit.weights import fp8, stored_weight
from kit.weights.frozen_base import dequantize
from tests.unit.test_fused_linear import add_adapter, factors, fp8_rows, make_layer, relative
from tests.unit.test_plan_activations import as_peft_on_a_gpu  # noqa: F401
from tests.unit.test_recompute import policy, score

OUTPUTS = {"q_proj": 96, "k_proj": 32, "v_proj": 64}


def make_group(dtype=torch.float32, bias=False, adapted=tuple(OUTPUTS)) -> torch.nn.ModuleDict:
    """Layers as peft makes them."""
    members = {}
    for seed, (name, outputs) in enumerate(OUTPUTS.items()):
        layer = make_layer(dtype, outputs=outputs, bias=bias, seed=seed)
        members[name] = add_adapter(layer) if name in adapted else layer
    return torch.nn.ModuleDict(members)


def fuse(group, compute="fused", alone=False):
    made = copy.deepcopy(group)
    for part in [torch.nn.ModuleDict({"layer": one}) for one in made.values()] if alone else [made]:
        use_fused_linears(part, compute)
    return made


def gradients_of(tokens=11, dtype=torch.float32):
    return {name: torch.randn(tokens, outputs).to(dtype) for name, outputs in OUTPUTS.items()}


def run(group, x, gradients):
    """({name: y}, dx, {name: gradient}) for the gradients of some outputs."""
    x = x.clone().requires_grad_()
    group.zero_grad()
    ys = {name: group[name](x) for name in OUTPUTS}
    torch.autograd.backward([ys[name] for name in gradients], list(gradients.values()))
    found = {name: one.grad for name, one in group.named_parameters() if one.grad is not None}
    return {name: y.detach() for name, y in ys.items()}, x.grad, found


def close(found, expected, bound=1e-5):
    assert found[0].keys() == expected[0].keys() and found[2].keys() == expected[2].keys()
    pairs = [(found[n][key], expected[n][key]) for n in (0, 2) for key in expected[n]]
    for one, other in [*pairs, (found[1], expected[1])]:
        assert one.shape == other.shape and one.dtype == other.dtype
        assert relative(one, other) < bound


def count_functions(monkeypatch) -> list[int]:
    """How many layers each function computed, from now on."""
    counts, apply = [], fused_linear._apply
    monkeypatch.setattr(
        fused_linear, "_apply", lambda modules, *rest: counts.append(len(modules)) or apply(modules, *rest)
    )
    return counts


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adapted", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("k_proj",)])
@pytest.mark.parametrize("used", [("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj"), ("q_proj",)])
def test_a_group_gives_what_peft_gives_in_float32_also_where_an_output_is_not_used(bias, adapted, used, monkeypatch):
    group, x = make_group(bias=bias, adapted=adapted), torch.randn(11, 128)
    gradients = {name: g for name, g in gradients_of().items() if name in used}
    counts = count_functions(monkeypatch)
    close(run(fuse(group), x, gradients), run(group, x, gradients))
    assert counts == [3]


@pytest.mark.parametrize("compute", ["fused", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_layers_alone(compute, dtype):
    group, x = make_group(dtype, bias=True, adapted=()), torch.randn(2, 7, 128).to(dtype)
    one, alone = fuse(group, compute), fuse(group, compute, alone=True)
    for name in OUTPUTS:
        assert torch.equal(one[name](x), alone[name](x))
    group = make_group(dtype)
    one, alone = fuse(group, compute), fuse(group, compute, alone=True)
    for name in OUTPUTS:
        assert relative(one[name](x), alone[name](x)) < (1e-6 if dtype == torch.float32 else 0.003)


@pytest.mark.parametrize("used", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")])
def test_the_fp8_gradient_is_one_product_with_one_scale_a_token_over_the_outputs_that_were_used(used):
    group, x = make_group(), torch.randn(11, 128)
    gradients = {name: g * 10.0**-n for n, (name, g) in enumerate(gradients_of().items()) if name in used}
    _, dx, found = run(fuse(group, "fp8"), x, gradients)
    weights, scaled, exact = [], [], torch.zeros(11, 128).double()
    for name, g in gradients.items():
        weight, by_channel = fp8_rows(dequantize(group[name]).float().numpy(), fp8.LEAST_SCALE)
        weights.append(torch.from_numpy(weight))
        scaled.append(g * torch.from_numpy(by_channel).t())
        a, b = (factor.detach().double() for factor in factors(group[name]))
        exact += 3.0 * (g.double() @ b) @ a
        da = 3.0 * (g.double() @ b).t() @ x.double()
        assert relative(found[f"{name}.lora_A.default.weight"], da) < 1e-6
    codes, by_token = fp8_rows(torch.cat(scaled, 1).numpy(), stored_weight.LEAST_GRADIENT_SCALE)
    exact += (torch.from_numpy(codes).double() @ torch.cat(weights).double()) * torch.from_numpy(by_token)
    assert relative(dx, exact) < 1e-6
    plain = run(group, x, gradients)[1]
    assert 0.01 < relative(dx, plain) < 0.06


def test_the_input_is_quantized_once_and_kept_once(monkeypatch):
    group, x, calls, kept = fuse(make_group(), "fp8"), torch.randn(50, 128, requires_grad=True), [], []
    plain = stored_weight.quantize_rows
    monkeypatch.setattr(fused_linear, "quantize_rows", lambda *a: calls.append(len(a[0])) or plain(*a))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for name in OUTPUTS:
            group[name](x)
    ours = {one.data_ptr() for one in group.parameters()}
    assert calls == [50]
    assert [tuple(one.shape) for one in kept if one.data_ptr() not in ours] == [(50, 128), (50, 24)]


def test_no_output_is_kept_beyond_the_last_layers_call_nor_beyond_the_next_groups():
    group, x = fuse(make_group()), torch.randn(4, 128)
    waiting = group["q_proj"].product.group._waiting
    ys = [group[name](x) for name in OUTPUTS]
    assert waiting.outputs is None
    gone = [weakref.ref(y) for y in ys]
    del ys
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    group["q_proj"](x)
    left = [weakref.ref(y) for _, y in waiting.outputs.values()]
    group["k_proj"](torch.randn(4, 128))  # nobody will take v's
    gc.collect()
    assert waiting.outputs is None and [one() for one in left] == [None] * 2


def test_a_layer_called_again_alone_or_with_another_input_computes_by_itself(monkeypatch):
    group, x, other = fuse(make_group()), torch.randn(4, 128), torch.randn(4, 128)
    expected = {name: fuse(make_group(), alone=True)[name](x).detach() for name in OUTPUTS}
    counts = count_functions(monkeypatch)
    for names, functions in (
        (["q_proj", "k_proj", "v_proj"], [3]),
        (["q_proj", "v_proj", "k_proj"], [3]),
        (["q_proj", "k_proj", "k_proj", "v_proj"], [3, 1, 1]),
        (["k_proj", "v_proj"], [1, 1]),
        (["q_proj", "q_proj", "k_proj", "v_proj"], [3, 3]),
    ):
        counts.clear()
        for name in names:
            torch.testing.assert_close(group[name](x).detach(), expected[name])
        assert counts == functions, names
    counts.clear()
    group["q_proj"](x)
    torch.testing.assert_close(group["k_proj"](other), fuse(make_group(), alone=True)["k_proj"](other))
    assert counts == [3, 1, 1]


def test_what_changed_after_the_first_layers_call_is_seen(monkeypatch):
    group, x = fuse(make_group()), torch.randn(4, 128)
    v = group["v_proj"]
    with torch.no_grad():
        group["q_proj"](x)
        x.mul_(2)
        torch.testing.assert_close(v(x), 2 * v(x / 2))
        group["q_proj"](x)
        before = v(x)
        group["q_proj"](x)
        factors(v)[1].mul_(0)
        after = v(x)
        assert not torch.equal(after, before)
        group["q_proj"](x)
    assert v(x).requires_grad  # computed without a graph, asked for with one
    group["q_proj"](x)
    v.enable_adapters(False)
    assert not v(x).requires_grad
    torch.testing.assert_close(v(x), after)
    counts = count_functions(monkeypatch)
    with torch.inference_mode():
        y = torch.randn(4, 128)  # has no version to tell a change by
        for name in OUTPUTS:
            group[name](y)
    assert counts == [1, 1, 1]


def test_layers_with_different_scalings_compute_alone_and_rightly(monkeypatch):
    group, x = make_group(), torch.randn(11, 128)
    group["k_proj"].scaling["default"] = 0.5
    counts = count_functions(monkeypatch)
    gradients = gradients_of()
    close(run(fuse(group), x, gradients), run(group, x, gradients))
    assert counts == [1, 1, 1]


def test_layers_of_different_ranks_and_one_scaling_are_one_function(monkeypatch):
    """As a rank_pattern makes them."""
    group, x = make_group(), torch.randn(11, 128)
    for name, rank in (("q_proj", 2), ("v_proj", 5)):
        config = LoraConfig(r=rank, lora_alpha=3 * rank)
        group[name] = peft_bnb.Linear4bit(
            group[name].base_layer, "default", config=config, r=rank, lora_alpha=3 * rank
        )
        torch.nn.init.normal_(factors(group[name])[1], std=0.05)
    counts = count_functions(monkeypatch)
    gradients = gradients_of()
    close(run(fuse(group), x, gradients), run(group, x, gradients))
    assert counts == [3]


def test_two_models_may_take_turns(monkeypatch):
    one, other, x = fuse(make_group()), fuse(make_group(), "fp8"), torch.randn(4, 128)
    expected = [{name: fuse(make_group(), way, True)[name](x) for name in OUTPUTS} for way in ("fused", "fp8")]
    counts = count_functions(monkeypatch)
    for name in OUTPUTS:
        for group, wanted in zip((one, other), expected, strict=True):
            torch.testing.assert_close(group[name](x), wanted[name])
    assert counts == [3, 3]


@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_a_group_in_a_checkpoint_that_stops_early_has_the_same_gradients_and_leaves_nothing(compute):
    group, x = fuse(make_group(), compute), torch.randn(6, 128, requires_grad=True)

    def layer(x):
        q, k, v = (group[name](x) for name in OUTPUTS)
        return (q.sin().sum(1) + k.sum(1) * v.sum(1)).sum()

    found = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x.grad = None
        group.zero_grad()
        call(x * 1).backward()
        assert group["q_proj"].product.group._waiting.outputs is None
        found.append([x.grad, *(one.grad for one in group.parameters() if one.grad is not None)])
    assert len(found[0]) == 7 and all(map(torch.equal, *found))


class Names(TorchDispatchMode):
    """The operators that were called."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_peft_on_a_gpu")
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_the_operator_that_adds_the_adapters_part_is_recomputed_and_skipped_as_addmm_is(
    recompute, adapter, monkeypatch
):
    monkeypatch.setattr(fused_linear, "LARGE", 0)
    found = []
    for mode in ("none", recompute):
        model = policy(mode, 2, "fused")
        for one in model.parameters():
            if one.requires_grad:
                one.data = one.data.to(adapter)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Names() as seen:
                score(model).backward()
        assert "kit.add_low_rank_.default" in seen.names
        found.append([one.grad for one in model.parameters() if one.grad is not None])
    assert len(found[0]) == 28 and all(map(torch.equal, *found))
