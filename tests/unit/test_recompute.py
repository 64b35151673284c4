"""Recomputing less: the same gradients bit for bit, what is kept and done again, the way through TRL, auto."""

import collections
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.core.config.recompute_rules import faults, recomputed_layers
from kit.core.errors import BadInput
from kit.plan import memory
from kit.plan.fitting import candidates, lay_out
from kit.plan.gpus import CARDS
from kit.plan.recompute import resolve
from kit.plan.shapes import shape_by_size
from kit.plan.sizes import with_keys
from kit.policy.recompute import _First, use_recompute
from kit.policy.recompute_offload import HostInputs
from tests.unit.test_plan_activations import as_peft_on_a_gpu, follow, nf4_policy, shape  # noqa: F401
from tests.unit.test_plan_activations import config as layer_config
from tests.unit.test_plan_memory import config

WIDE = {"hidden": 512, "intermediate": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64}
TOKENS = 64
pytestmark = pytest.mark.usefixtures("as_peft_on_a_gpu")


class Operations(TorchDispatchMode):
    """Operations of products and causal attention by operator: 2 · m · k · n, and half of attention's two products."""

    def __init__(self):
        super().__init__()
        self.found: collections.Counter = collections.Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        if name.startswith("bitsandbytes.gemm_4bit"):
            self.found["base", tuple(args[2])] += 2 * args[0].numel() * args[2][0]
        elif name == "aten.mm.default":
            self.found["adapter", None] += 2 * args[0].numel() * args[1].shape[1]
        elif "scaled_dot_product" in name and "backward" not in name:
            self.found["attention", None] += 2 * args[0].numel() * args[0].shape[2]
        return operator(*args, **(kwargs or {}))


def policy(
    recompute: str, layers: int, compute: str = "plain", fraction: float = 1.0, offload: bool = False, **changes: Any
) -> Any:
    torch.manual_seed(0)
    made = layer_config(changes.pop("targets", "all-linear"), "none")
    made.policy.lora_rank = changes.pop("rank", 16)
    model = nf4_policy(shape(layers, **changes), made)
    made.train.recompute, made.train.recompute_fraction, made.policy.compute = recompute, fraction, compute
    made.train.recompute_offload = offload
    if compute != "plain":
        from kit.policy.fused_linear import use_fused_linears

        use_fused_linears(model, compute)
    use_recompute(model, made)
    if recompute != "none":
        model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model


def score(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 200, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum()


def gradients(*args: Any, **keys: Any) -> dict[str, torch.Tensor]:
    model = policy(*args, **keys)
    score(model).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


QWEN2, LLAMA = {"qk_norm": False, "qkv_bias": True}, {"qk_norm": False, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("compute", "model"),
    [("plain", {}), ("plain", QWEN2), ("plain", LLAMA), ("fused", {}), ("fused", QWEN2), ("fp8", QWEN2)],
    ids=["qwen3", "qwen2", "llama", "qwen3, fused", "qwen2, fused", "qwen2, fp8"],
)
def test_gradients_are_those_of_keeping_everything_bit_for_bit(compute, model):
    wanted = gradients("none", 2, compute, **model)
    assert min(one.abs().max() for one in wanted.values()) > 0
    for recompute, fraction in (("full", 1.0), ("selective", 1.0), ("selective", 0.5)):
        found = gradients(recompute, 2, compute, fraction, **model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), (recompute, fraction)


def again(recompute: str) -> dict:
    """What the backward pass of a layer does more than without recomputation, as a share of the forward pass."""

    def backward(layers: int, mode: str) -> tuple[collections.Counter, collections.Counter]:
        model = policy(mode, layers, **WIDE)
        with Operations() as forward:
            loss = score(model)
        with Operations() as seen:
            loss.backward()
        return forward.found, seen.found

    (first, none), (_, more) = backward(1, "none"), backward(1, recompute)
    total = sum(first.values())
    return {key: (more[key] - none[key]) / total for key in more.keys() | none.keys() if more[key] != none[key]}


def test_what_is_done_again_is_what_the_docstring_says():
    full, selective = again("full"), again("selective")
    assert ("base", (512, 1536)) not in full and ("base", (1536, 512)) in full  # down_proj's answer is not read
    assert set(selective) == {("adapter", None)}
    # 64 tokens here, 256 there: attention is a small share of both.
    assert sum(full.values()) == pytest.approx(0.76, abs=0.02)
    assert sum(selective.values()) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(("recompute", "kept"), [("none", 24448), ("selective", 10784), ("full", 1024)])
def test_what_a_layer_keeps_is_what_the_docstring_and_the_plan_say(recompute, kept):
    made = layer_config("all-linear", recompute)
    made.policy.lora_rank = 16
    small, large = (follow(shape(n, **WIDE), made, False, backward=False)[0] for n in (2, 3))
    assert large - small == pytest.approx(kept, rel=0.001)
    planned = memory.layer_bytes if recompute == "none" else lambda *args: memory.checkpoint_bytes(*args[:2])
    assert planned(shape(2, **WIDE), made, False) == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("compute", ["plain", "fused"])
@pytest.mark.parametrize(
    ("targets", "rank"), [("all-linear", 16), ("all-linear", 64), ("all-linear", 32), (["k_proj"], 16)]
)
def test_selective_keeps_attention_and_all_products_with_the_base_but_the_last(compute, targets, rank, monkeypatch):
    """Whatever the adapter's sizes: k_proj has 64 outputs; and where q_proj's call computes k_proj's adapter, too."""
    kept: list[list] = []
    monkeypatch.setattr("kit.policy.recompute._First", lambda outputs: kept.append(outputs) or _First(outputs))
    score(policy("selective", 2, compute, targets=targets, rank=rank))
    assert [len(outputs) for outputs in kept] == [7, 7]


def test_a_share_of_the_layers_is_evenly_spread_and_rounded_up():
    assert recomputed_layers(4, 1.0) == [0, 1, 2, 3]
    assert recomputed_layers(4, 0.5) == [1, 3]
    assert recomputed_layers(36, 0.25) == [3, 7, 11, 15, 19, 23, 27, 31, 35]
    assert recomputed_layers(3, 0.01) == [2]
    for layers in (2, 7, 36):
        for fraction in (0.1, 0.3, 0.75, 0.99):
            assert layers * fraction <= len(recomputed_layers(layers, fraction)) < layers * fraction + 1


def test_trl_turns_it_off_for_a_pass_without_gradients_and_on_again_as_it_was():
    from trl.models.utils import disable_gradient_checkpointing

    model = policy("selective", 4, fraction=0.5)
    layers = model.get_base_model().model.layers
    with torch.no_grad(), disable_gradient_checkpointing(model, None):
        assert not any(layer.gradient_checkpointing for layer in layers)
        score(model)
    assert [layer.gradient_checkpointing for layer in layers] == [False, True, False, True]
    assert "context_fn" in layers[1]._gradient_checkpointing_func.keywords


@pytest.mark.parametrize(("recompute", "fraction"), [("full", 1.0), ("selective", 0.5)])
def test_inputs_of_layers_may_wait_in_host_memory(recompute, fraction, monkeypatch):
    away: list[Any] = []
    pack = HostInputs.pack

    def packed(inputs, tensor):
        away.append((tensor.data_ptr(), tensor.shape, pack(inputs, tensor)))
        return away[-1][-1]

    monkeypatch.setattr(HostInputs, "pack", packed)
    wanted, model = gradients("none", 4), policy(recompute, 4, fraction=fraction, offload=True)
    for _ in range(2):  # a second pass finds nothing of the first
        model.zero_grad()
        away.clear()
        score(model).backward()
        assert [shape for _, shape, _ in away] == [(2, TOKENS, 128)] * int(4 * fraction)
        found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(one.fetched is None and one.host.data_ptr() != address for address, _, one in away)


def test_an_input_comes_back_one_ahead_and_is_let_go():
    inputs, tensors = HostInputs(), [torch.full((2,), float(n), requires_grad=True) for n in range(3)]
    waiting = [inputs.pack(one) for one in tensors]
    assert inputs.unpack(waiting[2]).tolist() == [2, 2]
    assert waiting[1].fetched is not None and waiting[0].fetched is None
    gone = weakref.ref(waiting[0])
    del waiting[0]
    assert gone() is None  # nothing but the graph keeps it
    assert inputs.unpack(waiting[0]).tolist() == [1, 1] and inputs.unpack(waiting[0]).tolist() == [1, 1]


@pytest.mark.parametrize("stays", [torch.ones(2), torch.empty(0, requires_grad=True)])
def test_what_all_layers_share_and_what_is_empty_stay_where_they_are(stays):
    inputs = HostInputs()
    assert inputs.pack(stays) is stays and inputs.unpack(stays) is stays


def test_the_host_stays_a_layer_ahead_of_the_card():
    class Event:
        is_over = False

        def synchronize(self):
            self.is_over = True

    inputs, events = HostInputs(), [Event() for _ in range(4)]
    for count, event in enumerate(events):
        inputs._stay_close(event)
        assert [one.is_over for one in events] == [n < count for n in range(4)]


def test_without_the_residual_at_its_end_a_layers_last_product_is_done_again(monkeypatch):
    monkeypatch.setattr("kit.policy.recompute.ENDS_WITH_RESIDUAL", ())
    assert ("base", (512, 1536)) in again("full")


def test_what_is_kept_must_not_be_changed_by_others():
    model = policy("selective", 2)
    layer = model.get_base_model().model.layers[1]
    layer.self_attn.k_proj.base_layer.register_forward_hook(lambda module, args, out: out.mul_(2))
    with pytest.raises(RuntimeError, match="changes what is kept"):
        score(model)


@pytest.mark.parametrize(
    ("keys", "splits", "said"),
    [
        ({"train__recompute_fraction": 0.0}, None, "above 0 and at most 1"),
        ({"train__recompute_fraction": 1.5}, None, "above 0 and at most 1"),
        ({"train__recompute_fraction": 0.0, "train__recompute": "none"}, None, "above 0 and at most 1"),
        (
            {"train__recompute_fraction": 0.5, "train__recompute": "none"},
            None,
            "train.recompute_fraction (0.5) has no effect: train.recompute is none, which applies to no layer. Leave",
        ),
        (
            {"train__recompute_fraction": 0.25, "train__recompute": "auto"},
            None,
            "(0.25) has no effect: train.recompute is auto, which chooses a share itself. Leave",
        ),
        ({"train__recompute": "selective"}, "ZeRO-3", "Use full"),
        (
            {
                "train__recompute": "selective",
                "train__trl": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            },
            None,
            "use_reentrant uses a checkpoint that cannot be selective",
        ),
        ({"train__trl": {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}}, None, "recompute_fraction instead"),
        ({"train__trl": {"gradient_checkpointing_kwargs": {"offload": True}}}, None, "recompute_offload instead"),
        ({"train__recompute": "none", "train__recompute_offload": True}, None, "Set it to full"),
        ({"train__recompute_offload": True}, "ZeRO-3", "not tested with ZeRO-3"),
        ({"train__trl": {"gradient_checkpointing_kwargs": "x"}}, None, "must be a group of keys"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(keys, splits, said):
    (found,) = faults(config(**keys), splits)
    assert said in found
    assert faults(config(), splits) == []


@pytest.mark.parametrize(("mode", "fraction"), [("auto", 1.0), ("none", 1.0), ("selective", 0.5), ("full", 0.5)])
def test_what_the_plan_proposes_is_not_refused(mode, fraction):
    keys = {"train__recompute": mode, "train__recompute_fraction": fraction, "train__max_gpu_gib": 20.0}
    asked = config(**keys, **(EIGHT | {"rollout__max_completion_length": 8191}))
    layout = lay_out(shape_by_size("8b"), asked, CARDS["rtx4090"], 2)
    changes = [keys for keys, _ in candidates(layout)]
    # auto takes a mode and a share with what offload saves counted.
    assert ({"train.recompute_offload": True} in changes) == (mode != "none")
    for keys in changes:
        assert faults(with_keys(asked, keys), None) == [], keys


def test_the_key_that_was_there_before_is_refused_with_the_one_to_write():
    for value, now in ((True, "train.recompute: full"), (False, "train.recompute: none")):
        with pytest.raises(BadInput, match=f"gradient_checkpointing no longer exists. Use {now} instead"):
            config(train__gradient_checkpointing=value)


EIGHT = {"rollout__max_prompt_length": 1, "rollout__max_completion_length": 2047, "rollout__backend": "server"}


def test_auto_is_resolved_in_the_configuration_and_said(monkeypatch):
    facts = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    facts |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    made = config(**EIGHT, train__recompute="auto")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert "recompute none (auto: cpu" in resolve(made, facts, 1)
    assert made.train.recompute == "none"
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr("kit.plan.recompute.parse_gpus", lambda text: (CARDS["rtx4090"], 1))
    made = config(**EIGHT, train__recompute="auto")
    assert resolve(made, facts, 1).startswith(f"recompute {made.train.recompute}")
    assert made.train.recompute == "full"
    assert "does not know the model" in resolve(config(train__recompute="auto"), {"num_experts": 8}, 1)
    with pytest.raises(ValueError, match="not resolved"):
        use_recompute(SimpleNamespace(), config(train__recompute="auto"))


def test_a_run_learns_the_same_with_less_kept_and_says_what_auto_took(
    recipe, recipe_arguments, learning_model_dir, tmp_path
):
    """Two steps of the recipe with packs and fused layers; the reference's pass turns checkpointing off and on."""
    from safetensors.torch import load_file

    adapters = {}
    for recompute in ("auto", "selective"):
        keys = {"train.max_steps": 2, "train.recompute": recompute}
        keys |= {"train.recompute_fraction": 0.5} if recompute == "selective" else {}
        keys |= {"policy.compute": "fused", "train.micro_batch_tokens": 256, "train.beta": 0.1}
        done = recipe(recipe_arguments(learning_model_dir, tmp_path / recompute, keys))
        assert done.code == 0, done.err
        assert ("recompute none (auto: cpu" in done.out) == (recompute == "auto")
        written = json.loads((tmp_path / recompute / "config.json").read_text())["config"]["train"]
        assert written["recompute"] == ("none" if recompute == "auto" else recompute)
        adapters[recompute] = load_file(tmp_path / recompute / "adapters/v000002/adapter_model.safetensors")
    assert any(one.abs().max() > 0 for name, one in adapters["auto"].items() if "lora_B" in name)
    assert all(torch.equal(one, adapters["selective"][name]) for name, one in adapters["auto"].items())
