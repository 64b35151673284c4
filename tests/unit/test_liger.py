"""policy.kernels: what is refused, and which modules of which model change. Stand-ins for liger's functions, as its
Triton kernels need a GPU; bench/kernels_check.py compares those."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from kit.core.config.load import config_from_dict
from kit.core.config.recompute_rules import ENDS_WITH_RESIDUAL
from kit.core.errors import BadInput
from kit.policy.layer_kernels import MODELS, check_gpu, check_kernels, use_kernels

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 50}
KINDS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


def config(kernels: str = "liger", recompute: str = "full") -> Any:
    values = {"run": {"name": "x"}, "model": {"id": "x"}, "policy": {"kernels": kernels}}
    return config_from_dict(values | {"train": {"max_steps": 1, "recompute": recompute}})


@pytest.fixture
def liger(monkeypatch) -> list[str]:
    """A liger_kernel of torch's functions; the list says what was called."""
    called: list[str] = []

    class LigerRMSNorm(torch.nn.Module):
        def forward(self, x):
            called.append("norm")
            assert (self.offset, self.casting_mode, self.in_place, self.row_mode) == (0.0, "llama", True, None)
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(x.dtype)

    class LigerSwiGLUMLP(torch.nn.Module):
        def forward(self, x):
            called.append("swiglu")
            return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def liger_rotary_pos_emb(q, k, cos, sin):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        called.append("rotary")
        return apply_rotary_pos_emb(q, k, cos, sin)

    parts = {"rms_norm": LigerRMSNorm, "swiglu": LigerSwiGLUMLP, "rope": liger_rotary_pos_emb}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, module)
    for name, part in parts.items():
        module = ModuleType(f"liger_kernel.transformers.{name}")
        setattr(module, part.__name__, part)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return called


def make(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KINDS[kind](**SIZES))


@pytest.mark.parametrize(
    ("kind", "recompute", "changed"),
    [
        ("qwen3", "full", {"norms": 9, "rotary": 2, "swiglu": 2}),
        ("qwen3", "selective", {"norms": 9, "rotary": 2, "swiglu": 2}),
        ("qwen2", "full", {"norms": 5, "rotary": 2, "swiglu": 2}),
        ("llama", "none", {"norms": 5, "rotary": 2, "swiglu": 2}),
        ("llama", "selective", {"norms": 5, "rotary": 0, "swiglu": 2}),
    ],
)
def test_norms_rotary_embedding_and_swiglu_of_this_model_change_and_no_other(liger, kind, recompute, changed):
    model, other, ids = make(kind), make(kind), torch.arange(12)[None]
    assert use_kernels(model, config(recompute=recompute)) == changed
    wanted = other(ids).logits
    assert liger == []
    torch.testing.assert_close(model(ids).logits, wanted)
    called = {"norm": changed["norms"], "rotary": changed["rotary"], "swiglu": changed["swiglu"]}
    assert {name: liger.count(name) for name in called} == called
    assert make(kind)(ids).logits.equal(wanted) and len(liger) == sum(called.values())


def test_an_adapter_may_be_on_the_model_and_torch_changes_nothing(liger):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make("qwen3"), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert use_kernels(model, config("torch")) == {}
    assert use_kernels(model, config()) == {"norms": 9, "rotary": 2, "swiglu": 2}
    model(torch.arange(5)[None]).logits.sum().backward()
    assert liger.count("swiglu") == 2


def test_an_attention_that_calls_no_function_of_that_name_is_an_error(liger, monkeypatch):
    model = make("qwen3")
    kind = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", lambda self, hidden: hidden)
    with pytest.raises(ValueError, match="does not call apply_rotary_pos_emb"):
        use_kernels(model, config())


def test_an_unknown_model_is_refused_with_the_known_ones(liger):
    with pytest.raises(BadInput, match="x is a gemma3; llama, mistral, qwen2, qwen2_moe, qwen3, qwen3_moe are known"):
        check_kernels(config(), "gemma3")
    for kind in MODELS:
        check_kernels(config(), kind)
    check_kernels(config("torch"), "gemma3")
    # The output of an expert's last product is read again: the routing weights have a gradient.
    assert {kind for kind in MODELS if not kind.endswith("_moe")} == set(ENDS_WITH_RESIDUAL)


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr("kit.policy.layer_kernels.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"pip install liger-kernel==0\.8\.5"):
        check_kernels(config(), "qwen3")


def test_without_a_gpu_a_run_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BadInput, match="there is no GPU"):
        check_gpu(config())
    check_gpu(config("torch"))


def test_the_command_is_that_of_the_pinned_version():
    from kit.policy.layer_kernels import INSTALL
    from tests.conftest import ROOT

    assert INSTALL.split()[-1] in (ROOT / "requirements-cuda.txt").read_text().split()
