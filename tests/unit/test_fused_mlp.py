"""An MLP as one function against its modules, which peft's path and `policy.compute` are compared with elsewhere."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from kit.core.config.checks import check_config
from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput
from kit.policy import fused_mlp
from kit.policy.fused_linear import LowRank, use_fused_linears
from kit.policy.fused_mlp import check_fused_mlp, use_fused_mlps
from kit.policy.recompute import use_recompute
from tests.conftest import rehearse
from tests.unit.test_fused_linear import TARGETS, make_layer, relative

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}


def settings(recompute="none", **policy):
    given = {"compute": "fused", "fused_mlp": True, **policy}
    train = {"max_steps": 1, "recompute": recompute}
    return config_from_dict({"run": {"name": "x"}, "model": {"id": "a/b"}, "policy": given, "train": train})


def make(targets=TARGETS, dtype=torch.float32, alpha=24, **lora):
    """Two layers on an NF4 base, both factors of the adapters nonzero."""
    torch.manual_seed(0)
    facts = Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=16, vocab_size=96)
    model = Qwen3ForCausalLM(facts).to(dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            made = make_layer(dtype, inputs=module.in_features, outputs=module.out_features, seed=len(name))
            model.set_submodule(name, made)
    model.requires_grad_(False)
    model.is_loaded_in_4bit = True  # for peft
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=alpha, target_modules=targets, **lora))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn_like(parameter, dtype=torch.float32)
    return model.train()


def prepared(model, compute="fused", is_fused=True, recompute="none"):
    made, config = copy.deepcopy(model), settings(recompute, compute=compute, fused_mlp=is_fused)
    use_fused_linears(made, compute)
    assert use_fused_mlps(made, config) == 2 * is_fused
    use_recompute(made, config)
    if recompute != "none":
        made.gradient_checkpointing_enable()
    return made


def learn(model, dtype=torch.float32):
    """(log-probs, {adapter tensor: gradient}) of a loss on random tokens."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 96, (3, 11))
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=tokens).logits.float()
    (logits.log_softmax(-1) * torch.randn(3, 11, 96)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, bound):
    (logits, gradients), (others, expected_gradients) = found, expected
    assert relative(logits, others) < bound
    assert gradients.keys() == expected_gradients.keys() and gradients
    for name, gradient in gradients.items():
        assert gradient.dtype == expected_gradients[name].dtype
        assert relative(gradient, expected_gradients[name]) < bound, name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compute", ["fused", "fp8"])
def test_losses_and_gradients_are_those_of_the_modules(compute, recompute):
    model = make()
    expected = learn(prepared(model, compute, is_fused=False))
    # In FP8 a last bit of SwiGLU's output may be another code.
    assert_same(learn(prepared(model, compute, recompute=recompute)), expected, 1e-5 if compute == "fused" else 0.02)


@pytest.mark.parametrize(
    "targets", [["gate_proj"], ["up_proj"], ["down_proj"], ["gate_proj", "down_proj"], ["q_proj"]]
)
def test_layers_without_an_adapter_compute_with_the_base_alone(targets):
    model = make(targets)
    assert_same(learn(prepared(model)), learn(prepared(model, is_fused=False)), 1e-5)


def test_gate_and_up_with_other_scalings_are_left_to_their_modules():
    model = make(alpha_pattern={"up_proj": 7}, alpha=24)
    assert_same(learn(prepared(model)), learn(prepared(model, is_fused=False)), 1e-5)


def test_down_may_have_a_scaling_of_its_own(monkeypatch):
    model, calls = make(alpha_pattern={"down_proj": 5}), []
    plain = fused_mlp.swiglu
    monkeypatch.setattr(fused_mlp, "swiglu", lambda *args: calls.append(1) or plain(*args))
    assert_same(learn(prepared(model)), learn(prepared(model, is_fused=False)), 1e-5)
    assert len(calls) == 2


def test_bfloat16_is_as_near_to_float32_as_the_modules_are():
    exact = learn(prepared(make(), is_fused=False))
    model = make(dtype=torch.bfloat16)
    for parameter, other in zip(model.parameters(), make().parameters(), strict=True):
        if parameter.requires_grad:
            assert torch.equal(parameter, other)
    ours = learn(prepared(model), torch.bfloat16)
    modules = learn(prepared(model, is_fused=False), torch.bfloat16)
    for name, gradient in exact[1].items():
        assert relative(ours[1][name], gradient) < 1.1 * relative(modules[1][name], gradient) + 1e-3, name


def test_the_reference_has_no_adapter_and_the_policy_has_it_again():
    model = make()
    ours, modules = prepared(model), prepared(model, is_fused=False)
    tokens = torch.randint(0, 96, (2, 7))
    with torch.no_grad(), ours.disable_adapter(), modules.disable_adapter():
        base = ours(input_ids=tokens).logits
        torch.testing.assert_close(base, modules(input_ids=tokens).logits)
    assert relative(ours(input_ids=tokens).logits, base) > 0.05
    assert_same(learn(ours), learn(modules), 1e-5)


def test_a_merged_adapter_is_left_to_peft():
    model = make()
    ours, modules = prepared(model), prepared(model, is_fused=False)
    tokens = torch.randint(0, 96, (2, 7))
    for one in (ours, modules):
        one.merge_adapter()
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens).logits, modules(input_ids=tokens).logits)


def kept_bytes(model):
    """Bytes that the graph of an MLP of 1,000 tokens keeps, parameters and inputs aside."""
    mlp = model.get_base_model().model.layers[0].mlp
    x, found = torch.randn(1, 1000, 64, requires_grad=True), {}
    known = {one.data_ptr() for one in (*mlp.parameters(), x)}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = mlp(x)
    assert y.requires_grad
    return sum(found.values())


def test_a_token_keeps_twice_the_width_of_the_mlp():
    model = make()
    ours, modules = kept_bytes(prepared(model)), kept_bytes(prepared(model, is_fused=False))
    ranks = 4 * 1000 * 3 * 8
    assert ours == 4 * 1000 * 2 * 192 + ranks
    assert modules >= ours + 4 * 1000 * 192


def test_a_second_backward_pass_through_one_graph_is_refused():
    mlp = prepared(make()).get_base_model().model.layers[0].mlp
    y = mlp(torch.randn(2, 64, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        y.backward()


def test_no_tokens_give_no_outputs_and_zero_gradients():
    for compute in ("fused", "fp8"):
        mlp = prepared(make(), compute).get_base_model().model.layers[0].mlp
        x = torch.randn(0, 64, requires_grad=True)
        mlp(x).sum().backward()
        assert x.grad.shape == (0, 64)
        assert not mlp.gate_proj.lora_A["default"].weight.grad.any()


def test_the_gradient_is_that_of_autograd():
    """The hand-written backward pass, in float64."""
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(5, 6, dtype=torch.float64) for _ in range(3))
    low = [LowRank(torch.randn(5, 2).double(), torch.randn(2, 6).double(), 0.5) for _ in range(3)]
    g, u = gate.clone().requires_grad_(), up.clone().requires_grad_()
    act = torch.nn.functional.silu(low[0].added_to(g)) * low[1].added_to(u)
    act.backward(low[2].added_to(grad))
    parts = fused_mlp.swiglu_gradient_in_torch(gate, up, grad, *low)
    for found, expected in ((gate, g.grad), (up, u.grad), (grad, act.detach())):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # computed in float32
    torch.testing.assert_close(parts[0], g.grad @ low[0].right.t(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts[1], u.grad @ low[1].right.t(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"compute": "plain"}, "policy.fused_mlp is true with policy.compute plain"),
        ({"lora_rank": 128}, "policy.fused_mlp is true with policy.lora_rank 128"),
    ],
)
def test_settings_that_it_does_not_compute_are_refused(policy, said):
    with pytest.raises(BadInput, match=said):
        check_config(settings(**policy), 1)


def test_other_mlps_are_refused():
    with pytest.raises(BadInput, match="a/b is a gemma with gelu"):
        check_fused_mlp(settings(), type("Facts", (), {"model_type": "gemma", "hidden_act": "gelu"}))
    with pytest.raises(BadInput, match="a/b is a llama with gelu"):
        check_fused_mlp(settings(), type("Facts", (), {"model_type": "llama", "hidden_act": "gelu"}))
    check_fused_mlp(settings(), Qwen3Config())
    with pytest.raises(ValueError, match="found no MLP"):
        use_fused_mlps(torch.nn.Linear(2, 2), settings())


def test_the_gpu_kernels_give_the_numbers_of_their_definitions_in_tritons_interpreter():
    assert "ok      its gradient, 70 x 200" in rehearse("bench/mlp_check.py", "kernels")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_for_gpus_and_hold_their_tiles_in_registers(capability, tmp_path):
    """Ampere, Hopper, Blackwell: what the interpreter runs may not compile. Triton brings its assembler."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kit.policy import swiglu_kernel as kernels

    for kernel in (kernels._swiglu, kernels._swiglu_gradient):
        names, values = [one.name for one in kernel.params], {"GATE_RANK": 16, "UP_RANK": 16, "DOWN_RANK": 16}
        values |= {name: getattr(kernels, name) for name in ("ROWS", "COLUMNS", "RANGE", "STAGES")}
        if kernel is kernels._swiglu_gradient:
            values["COLUMNS"] = kernels.gradient_columns(capability // 10)
        values |= {name: True for name in names if name.startswith("HAS_")}
        values |= {name: 1 for name in ("gate_right_stride", "up_right_stride", "down_step")}  # as Triton does for 1s
        signature = {name: "constexpr" if name in values else kind_of(name) for name in names}
        constants = {(names.index(name),): value for name, value in values.items() if name in names}
        # Pointers, sizes and strides that 16 divides, as those of real models.
        aligned = {
            (n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if is_aligned(signature[name], name)
        }
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": kernels.WARPS, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.metadata.shared < 99 * 1024  # what a consumer card has
        (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(tmp_path / "kernel.cubin")]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


def is_aligned(kind, argument):
    return kind.startswith("*") or (kind == "i32" and not argument.endswith("_step"))


def kind_of(argument):
    if argument.endswith("_sums") or argument == "sums":
        return "*fp32"
    if argument.endswith(("_stride", "_step", "_rank")) or argument in ("rows", "columns"):
        return "i32"
    return "fp32" if argument.endswith("_scaling") else "*bf16"


@pytest.mark.parametrize(("recompute", "runs"), [("none", 0), ("full", 2), ("selective", 2)])
def test_a_second_run_does_not_compute_the_last_product(recompute, runs, monkeypatch):
    """Neither run multiplies down's weight more often than the first run and the backward pass need."""
    model, products, marked = prepared(make(), recompute=recompute), [], []
    unread = fused_mlp.unread_product
    monkeypatch.setattr(fused_mlp, "unread_product", lambda: marked.append(1) or unread())
    downs = [layer.mlp.down_proj.product for layer in model.get_base_model().model.layers]
    assert all(one.layer.out_features == 64 and one.layer.in_features == 192 for one in downs)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]
            if "mm" in str(operator) and (33, 192) in shapes and (192, 64) in shapes:
                products.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Count():
        learn(model)
    # Of two layers: one product each, and the input's gradient from gate and from up, which has the same shapes.
    assert len(marked) == 2 * runs and len(products) == 2 + 4
