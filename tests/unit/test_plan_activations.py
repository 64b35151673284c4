"""The bytes a token that the plan counts with are those that the recipe's own forward and backward allocate.

Every allocation of small models on the CPU is followed, under the autocast that a GPU run has; attention's kernels are
the CPU's. A change of transformers, peft or bitsandbytes that keeps more or less for the backward pass fails here.
"""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kit.core.config.load import config_from_dict
from kit.plan.decoder import Shape
from kit.plan.gpus import CARDS
from kit.plan.memory import backward_bytes, layer_bytes, update_parts
from kit.policy.fused_linear import use_fused_linears
from kit.policy.fused_mlp import use_fused_mlps
from kit.policy.layer_kernels import use_kernels
from kit.policy.recompute import use_recompute

SEQUENCES, TOKENS = 2, 256
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Allocations(TorchDispatchMode):
    """Bytes that live now and lived at most, of storages made inside; `known` ones are not counted."""

    def __init__(self, known: set[int]):
        super().__init__()
        self.known, self.sizes, self.now, self.peak = known, {}, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if (key := storage._cdata) not in self.sizes and key not in self.known:
                    self.sizes[key] = storage.nbytes()
                    self.now += self.sizes[key]
                    weakref.finalize(storage, self.gone, key)
        self.peak = max(self.peak, self.now)
        return made

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


def nf4_policy(shape: Shape, config: Any) -> torch.nn.Module:
    """A random NF4 model with an adapter and TRL's log-prob head, as the recipe builds them."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
    from trl.trainer.utils import add_fused_lm_head

    from kit.weights.frozen_base import disable_cpu_repacking

    kind = Qwen3Config if shape.qk_norm else Qwen2Config if shape.qkv_bias else LlamaConfig
    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "head_dim": shape.head_dim}
    sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "vocab_size": shape.vocabulary}
    model = AutoModelForCausalLM.from_config(kind(**sizes, num_key_value_heads=shape.kv_heads), dtype=torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            ins, outs, bias = module.in_features, module.out_features, module.bias is not None
            made = bnb.nn.Linear4bit(ins, outs, bias=bias, compute_dtype=torch.bfloat16, quant_type="nf4")
            made.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=made)
            made.bias = module.bias
            model.set_submodule(name, made.to("cpu"))
    disable_cpu_repacking(model)
    model.is_loaded_in_4bit = True
    model.requires_grad_(False)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    policy = config.policy
    model = get_peft_model(
        model, LoraConfig(r=policy.lora_rank, target_modules=policy.target_modules, task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and then A's gradient is
            torch.nn.init.normal_(parameter, std=0.1)
    if policy.compute != "plain":
        use_fused_linears(model, policy.compute)
    use_kernels(model, config)
    use_fused_mlps(model, config)
    use_recompute(model, config)
    if config.train.recompute != "none":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def follow(shape: Shape, config: Any, padded: bool, backward: bool) -> tuple[float, float]:
    """Bytes a token after a forward pass and at the peak of the backward pass."""
    torch.manual_seed(0)
    model = nf4_policy(shape, config)
    known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    for parameter in model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            parts = [state.absmax, state.code, state.offset]
            parts += [state.state2.absmax, state.state2.code] if state.state2 is not None else []
            known |= {t.untyped_storage()._cdata for t in parts if t is not None}
    ids = torch.randint(0, shape.vocabulary, (SEQUENCES, TOKENS))
    mask = torch.ones_like(ids)
    mask[0, : TOKENS // 4 if padded else 0] = 0
    with Allocations(known) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
        kept = seen.now
        if backward:
            out.log_probs.sum().backward()
    return kept / ids.numel(), seen.peak / ids.numel()


def shape(layers: int, **changes: Any) -> Shape:
    sizes = {"hidden": 128, "intermediate": 384, "heads": 8, "kv_heads": 2, "head_dim": 32, "vocabulary": 200}
    return Shape("small", layers=layers, tied=False, positions=4096, **(sizes | {"qk_norm": True} | changes))


def config(targets: Any, recompute: str = "full", fraction: float = 1.0, **policy: Any) -> Any:
    train = {"max_steps": 1, "per_device_train_batch_size": SEQUENCES, "recompute": recompute}
    train |= {"recompute_fraction": fraction}
    rollout = {"max_prompt_length": 1, "max_completion_length": TOKENS - 1}
    policy |= {"target_modules": targets, "lora_rank": 4}
    groups = {"run": {"name": "x"}, "model": {"id": "x"}, "train": train, "rollout": rollout, "policy": policy}
    return config_from_dict(groups)


@pytest.fixture
def as_peft_on_a_gpu(monkeypatch):
    # peft asks about the GPU's autocast and would convert its inputs to float32 under the CPU's. Who names a device is
    # told the truth: autocast itself asks, to put back what was before.
    asked = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: asked(*device) if device else True)


@pytest.fixture(autouse=True)
def as_on_a_gpu(as_peft_on_a_gpu, monkeypatch):
    # Small tiles, so that the layers are the peak.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 64)


@pytest.mark.parametrize(
    ("changes", "targets", "padded"),
    [
        ({}, "all-linear", False),
        ({}, "all-linear", True),
        ({}, ATTENTION, False),
        ({"intermediate": 1024}, "all-linear", False),
        ({"qk_norm": False, "qkv_bias": True}, "all-linear", False),
        ({"qk_norm": False}, ["q_proj", "v_proj"], True),
    ],
    ids=str,
)
def test_a_layer_keeps_what_the_plan_says_for_its_backward_pass(changes, targets, padded):
    keeping = config(targets, "none")
    small, large = (follow(shape(n, **changes), keeping, padded, backward=False)[0] for n in (2, 4))
    predicted = layer_bytes(shape(2, **changes), config(targets), padded) + (2 * TOKENS if padded else 0)
    assert (large - small) / 2 == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]], ids=str)
def test_an_mlp_of_one_function_keeps_what_the_plan_says(targets, is_one):
    keeping = config(targets, "none", compute="fused", fused_mlp=is_one)
    small, large = (follow(shape(n), keeping, False, backward=False)[0] for n in (2, 4))
    assert (large - small) / 2 == pytest.approx(layer_bytes(shape(2), keeping, False), rel=0.05)


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}], ids=str)
def test_norms_with_their_sums_keep_what_the_plan_says(changes, is_one):
    keeping = config("all-linear", "none", compute="fused", kernels="fused", fused_mlp=is_one)
    small, large = (follow(shape(n, **changes), keeping, False, backward=False)[0] for n in (2, 4))
    assert (large - small) / 2 == pytest.approx(layer_bytes(shape(2, **changes), keeping, False), rel=0.05)


@pytest.mark.parametrize(("changes", "targets"), [({}, "all-linear"), ({"intermediate": 512}, "all-linear")], ids=str)
def test_the_backward_pass_with_checkpointing_peaks_where_the_plan_says(changes, targets):
    model = shape(4, **changes)
    _, peak = follow(model, config(targets), False, backward=True)
    found = update_parts(model, config(targets), CARDS["h200"], padded=False)
    checkpoints = found["checkpoints"] * 2**30 / (SEQUENCES * TOKENS)
    predicted = checkpoints + backward_bytes(model, config(targets), padded=False)
    assert peak == pytest.approx(predicted, rel=0.06)
