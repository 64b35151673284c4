"""policy.kernels fused: norms, residual sums, rotary embedding and SwiGLU against transformers' own."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from kit.policy import fused_norms
from kit.policy.layer_kernels import MODELS, check_gpu, check_kernels, use_kernels
from kit.policy.recompute import use_recompute
from tests.conftest import rehearse
from tests.unit.test_fused_linear import relative
from tests.unit.test_liger import config

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 80}
KINDS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTURES = {"qwen2_moe": Qwen2MoeConfig, "qwen3_moe": Qwen3MoeConfig}


def make(kind="qwen3", dtype=torch.float32):
    """A policy with an adapter whose norms' weights are not ones."""
    torch.manual_seed(0)
    facts = KINDS[kind](**SIZES) if kind in KINDS else MIXTURES[kind](**SIZES, **EXPERTS)
    model = AutoModelForCausalLM.from_config(facts)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] + ["gate_proj", "up_proj", "down_proj"] * (kind in KINDS)
    model = get_peft_model(model.to(dtype), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn_like(parameter, dtype=torch.float32)
    return model.train()


def prepared(model, kernels="fused", recompute="none"):
    made, settings = copy.deepcopy(model), config(kernels, recompute)
    changed = use_kernels(made, settings)
    use_recompute(made, settings)
    if recompute != "none":
        made.gradient_checkpointing_enable()
    return made, changed


def learn(model, dtype=torch.float32, **given):
    """(logits, {adapter tensor: gradient}) of a loss on random tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 80, (3, 9))
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=tokens, **given).logits.float()
    (logits.log_softmax(-1) * torch.randn(3, 9, 80)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, bound=1e-5):
    (logits, gradients), (others, wanted) = found, expected
    assert relative(logits, others) < bound
    assert gradients.keys() == wanted.keys() and gradients
    for name, gradient in gradients.items():
        assert gradient.dtype == wanted[name].dtype
        assert relative(gradient, wanted[name]) < bound, name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_the_model(kind, recompute):
    model = make(kind)
    made, changed = prepared(model, recompute=recompute)
    norms = 9 if kind.startswith("qwen3") else 5
    assert changed["norms"] == norms and changed["sums"] == changed["rotary"] == 2
    assert_same(learn(made), learn(prepared(model, "torch")[0]))


def test_only_this_model_changes():
    model, other = make(), make()
    expected = learn(other)
    prepared(model)
    use_kernels(model, config("fused"))
    assert torch.equal(learn(other)[0], expected[0])


def test_positions_of_each_row_are_those_given():
    """Left padding: rows with positions of their own, so cosines and sines of their own."""
    positions = torch.stack([torch.arange(9), torch.arange(9).sub(2).clamp(min=0), torch.arange(9) * 3])
    model = make()
    assert_same(
        learn(prepared(model)[0], position_ids=positions), learn(prepared(model, "torch")[0], position_ids=positions)
    )


def test_bfloat16_is_as_near_to_float32_as_the_model_is():
    exact = learn(prepared(make(), "torch")[0])[1]
    model = make(dtype=torch.bfloat16)
    ours, plain = (learn(prepared(model, kernels)[0], torch.bfloat16)[1] for kernels in ("fused", "torch"))
    exact, ours, plain = (torch.cat([one.flatten() for one in found.values()]) for found in (exact, ours, plain))
    assert relative(ours, exact) < 1.1 * relative(plain, exact)


def test_the_reference_has_no_adapter():
    model = make()
    made = prepared(model)[0]
    tokens = torch.randint(0, 80, (2, 7))
    with torch.no_grad(), made.disable_adapter(), model.disable_adapter():
        base = model(input_ids=tokens).logits
        torch.testing.assert_close(made(input_ids=tokens).logits, base)
    assert relative(made(input_ids=tokens).logits, base) > 0.05


def test_cached_generation_gives_the_same_tokens():
    model = make().eval()
    made = prepared(model)[0].eval()
    tokens = torch.randint(3, 80, (2, 5), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = made.generate(**given)
    assert found.shape == (2, 17) and torch.equal(found, model.generate(**given))


def kept_bytes(model):
    """Bytes that a layer's graph of 500 tokens keeps, parameters and inputs aside."""
    layer = model.get_base_model().model.layers[0]
    x, found = torch.randn(1, 500, 64, dtype=torch.bfloat16, requires_grad=True), {}
    angles = model.get_base_model().model.rotary_emb(x, torch.arange(500)[None])
    known = {one.data_ptr() for one in (*layer.parameters(), x, *angles)}

    def pack(tensor):
        if tensor.data_ptr() not in known:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = layer(x, position_embeddings=angles, attention_mask=None)
    assert y.requires_grad
    return sum(found.values())


def test_norms_keep_their_inputs_in_16_bits_only():
    model = make(dtype=torch.bfloat16)
    ours, plain = kept_bytes(prepared(model)[0]), kept_bytes(prepared(model, "torch")[0])
    # Torch keeps a float32 copy and a scale of each norm's input, ours the sum after attention and the heads before
    # their norm; torch keeps silu(gate) besides.
    copies, heads = 2 * (4 * 64 + 4), (4 + 2) * (4 * 16 + 4)
    assert plain - ours == 500 * (copies - 2 * 64 + heads - (4 + 2) * 2 * 16 + 2 * 96)


def test_a_gradient_that_comes_past_the_norm_alone_passes():
    x = torch.randn(3, 8, requires_grad=True)
    h, normed = fused_norms._Norm.apply(x, None, torch.ones(8), 1e-6)
    h.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8)) and normed.requires_grad


def test_the_gradients_are_those_of_autograd():
    torch.manual_seed(0)
    x, more, past, grad = (torch.randn(5, 12, dtype=torch.float32) for _ in range(4))
    weight = torch.rand(12) + 0.5
    one, other = x.clone().requires_grad_(), more.clone().requires_grad_()
    h, y = fused_norms.norm_in_torch(one, other, weight, 1e-5)
    torch.autograd.backward([h, y], [past, grad])
    found = fused_norms.norm_gradient_in_torch(grad, past, h.detach(), weight, 1e-5)
    torch.testing.assert_close(found, one.grad)
    torch.testing.assert_close(found, other.grad)
    heads, grad = torch.randn(2, 3, 4, 12), torch.randn(2, 3, 4, 12)
    cos, sin = torch.rand(2, 4, 12), torch.rand(2, 4, 12)
    for by in (None, weight):
        leaf = heads.clone().requires_grad_()
        fused_norms.rotate_in_torch(leaf, by, 1e-5, cos, sin).backward(grad)
        found = fused_norms.rotate_gradient_in_torch(grad, None if by is None else heads, by, 1e-5, cos, sin)
        torch.testing.assert_close(found, leaf.grad)


def test_a_second_backward_pass_through_one_swiglu_is_refused():
    gate, up = (torch.randn(2, 8, requires_grad=True) * 1 for _ in range(2))
    y = fused_norms._SwiGlu.apply(gate, up).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        y.backward()


def test_a_norm_that_is_to_be_trained_is_refused():
    model = make()
    model.get_base_model().model.norm.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"model\.norm\.weight is to be trained"):
        use_kernels(model, config("fused"))


def test_no_gpu_and_no_package_is_needed_and_other_models_are_refused(monkeypatch):
    from kit.core.errors import BadInput

    monkeypatch.setattr("kit.policy.layer_kernels.importlib.util.find_spec", lambda name: None)
    for kind in MODELS:
        check_kernels(config("fused"), kind)
    check_gpu(config("fused"))
    with pytest.raises(BadInput, match="x is a gemma3; llama, mistral"):
        check_kernels(config("fused"), "gemma3")


def test_the_gpu_kernels_give_the_numbers_of_their_definitions_in_tritons_interpreter():
    assert "ok      of the heads' norm, gradient, (2, 3, 5, 32)" in rehearse("bench/kernels_check.py", "kernels")


def test_the_check_of_whole_layers_runs():
    assert "ok      2 x 64, fused, fused, selective" in rehearse("bench/kernels_check.py", "layers")


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_for_gpus_and_hold_a_row_in_registers(capability, tmp_path):
    """Ampere, Hopper, Blackwell: what the interpreter runs may not compile. Triton brings its assembler."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kit.policy import norm_kernel as kernels

    normed, rotated = (kernels._norm, kernels._norm_gradient), (kernels._rotate, kernels._rotate_gradient)
    for kernel in (*normed, *rotated, kernels._swiglu, kernels._swiglu_gradient):
        names = [one.name for one in kernel.params]
        values = {"COLUMNS": 8192, "POSITIONS": 1, "HEADS": kernels.HEAD_ROWS, "HALF": 64, "TILE": kernels.TILE}
        values |= {name: True for name in names if name.startswith("HAS_")}
        signature = {name: "constexpr" if name in values else kind_of(name) for name in names}
        constants = {(names.index(name),): value for name, value in values.items() if name in names}
        source = ASTSource(kernel, signature, constants)
        warps = kernels._warps(8192) if "COLUMNS" in names else 4
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(tmp_path / "kernel.cubin")]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.search(r"STACK:0\b", usage) and re.search(r"LOCAL:0\b", usage), usage


def kind_of(argument):
    if argument == "eps":
        return "fp32"
    is_number = argument.endswith("_stride") or argument in ("columns", "rows", "positions", "heads", "half", "count")
    return "i32" if is_number else "*bf16"
