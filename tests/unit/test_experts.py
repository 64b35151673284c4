"""Mixtures of experts: stored as their matrices would be, computed as transformers and peft do, merged per expert."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kit.core import lora
from kit.core.config.load import load_config
from kit.core.config.schema import PolicyConfig
from kit.core.errors import BadInput
from kit.policy.adapted_experts import targets_as_named, use_adapted_experts
from kit.policy.kept_weights import keeping_weights
from kit.policy.load import adapted_layers, check_base, lora_config
from kit.policy.recompute import use_recompute
from kit.train.setup import describe_experts
from kit.weights.experts import FrozenExperts, experts_of
from kit.weights.frozen_base import BaseCheckpoint, carried_hashes, hash_base, load_base, load_frozen
from kit.weights.layout import expert_matrices
from kit.weights.write_base import Original, write_base
from merge.merge import read_adapter, write_folded
from tests.conftest import CONFIG

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
# Families by model type, with what their configurations call the experts.
FAMILIES = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 64},
    "olmoe": {"num_experts": 8},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    | {"n_shared_experts": 1, "partial_rotary_factor": 1.0},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
    | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    | {"num_key_value_heads": 4, "n_shared_experts": 1},
}


def make_experts(folder: Path, kind: str = "qwen3_moe", **changes) -> Path:
    """Write a random mixture of experts of this family as its checkpoint, without a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | FAMILIES[kind] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    return make_experts(tmp_path_factory.mktemp("experts") / request.param, request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return make_experts(tmp_path_factory.mktemp("experts") / "qwen")


def load(folder: Path, storage: str = "nf4", **keys):
    return load_frozen(folder, storage, dtype="float32", device="cpu", **keys)


def adapted(base: torch.nn.Module, **policy) -> PeftModel:
    """A base with an adapter whose update is not zero, always the same."""
    torch.manual_seed(1)
    with targets_as_named():
        model = get_peft_model(base, lora_config(PolicyConfig(**{"lora_rank": 8, "expert_rank": 4} | policy), base))
    use_adapted_experts(model)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def facts_of(folder: Path, model: torch.nn.Module) -> dict:
    """base.json of a model, with what its checkpoint has besides: the router's buffers of some families."""
    facts = hash_base(model)
    if carried := carried_hashes(folder, None, set(facts["tensors"]), AutoConfig.from_pretrained(folder)):
        facts["carried"] = carried
    return facts


def plain_model(base: BaseCheckpoint) -> torch.nn.Module:
    """transformers' own model with the base's dequantized weights."""
    model = AutoModelForCausalLM.from_config(base.config, dtype=torch.float32)
    state = model.state_dict()
    for name in base.info["tensors"]:
        if (place := base.experts.get(name)) is None:
            state[name].copy_(base.tensor(name))
        else:
            rows = slice(place.part * place.rows, (place.part + 1) * place.rows)
            state[f"{place.module}.{place.name}"][place.expert, rows] = base.tensor(name)
    return model


def ids(count: int = 17) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (2, count), generator=torch.Generator().manual_seed(3))


def scores(model: torch.nn.Module, tokens: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(ids() if tokens is None else tokens).logits


@pytest.mark.parametrize("storage", ["nf4", "fp8", "none"])
def test_the_base_of_every_family_is_read_hashed_and_computed_alike_everywhere(checkpoint, storage, tmp_path):
    model = load(checkpoint, storage)
    facts = facts_of(checkpoint, model)
    written = write_base(Original(checkpoint, "float32", True, "cpu", storage), tmp_path, "x", None)
    assert written["tensors"] == facts["tensors"]
    assert written["quantized"] == facts["quantized"] and written["offsets"] == facts["offsets"]
    assert len([name for name in facts["quantized"] if ".experts." in name]) == 3 * 8 * len(experts_of(model))
    assert written.get("carried") == facts.get("carried")
    base = BaseCheckpoint(checkpoint, facts)
    assert torch.allclose(scores(model), scores(plain_model(base)), atol=2e-5)
    assert hash_base(load_base(base, "cpu"))["hash"] == facts["hash"]


def test_the_plan_names_the_rank_of_experts():
    ranks = {"8": "; experts rank 8", "0": "; experts none"}
    for rank, text in ranks.items():
        assert describe_experts(load_config(CONFIG, ["--policy.expert_rank", rank])) == text
    assert describe_experts(load_config(CONFIG, [])) == ""


def test_few_tokens_dequantize_only_the_experts_that_they_take(qwen, monkeypatch):
    model = load(qwen)
    asked = []
    make = FrozenExperts.dequantized

    def spy(self, name, experts=None):
        asked.append(None if experts is None else len(experts))
        return make(self, name, experts)

    whole = scores(model, ids()[:1])[:, -1]
    monkeypatch.setattr(FrozenExperts, "dequantized", spy)
    cache = model(ids()[:1, :-1], use_cache=True).past_key_values
    asked.clear()
    with torch.no_grad():
        last = model(ids()[:1, -1:], past_key_values=cache).logits[:, -1]
    assert asked == [2] * 4  # two experts of a token, two parameters of two layers
    assert torch.allclose(last, whole, atol=1e-5)


def test_adapters_compute_and_learn_as_peft_does_and_peft_reads_their_file(checkpoint, tmp_path):
    model = adapted(load(checkpoint))
    facts = hash_base(model)
    model(ids()).logits.logsumexp(-1).mean().backward()
    model.save_pretrained(tmp_path)
    reference = plain_model(BaseCheckpoint(checkpoint, facts_of(checkpoint, model)))
    with targets_as_named():  # for shared experts, whose names peft 0.21 takes for those of routed ones
        reference = PeftModel.from_pretrained(reference, tmp_path, is_trainable=True)
    assert torch.allclose(scores(model), scores(reference), atol=2e-5)
    reference(ids()).logits.logsumexp(-1).mean().backward()
    theirs = {name: one.grad for name, one in reference.named_parameters() if one.requires_grad}
    ours = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], atol=1e-4 * theirs[name].abs().max().item() + 1e-7), name
    with model.disable_adapter():
        assert torch.equal(scores(model), scores(load(checkpoint)))
    assert hash_base(model) == facts


def test_peft_alone_reads_an_adapter_on_routed_experts(qwen, tmp_path):
    model = adapted(load(qwen, "none"))
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    assert torch.allclose(scores(PeftModel.from_pretrained(plain, tmp_path)), scores(model), atol=2e-5)


def test_routers_get_no_adapter_and_are_not_quantized(checkpoint):
    model = adapted(load(checkpoint))
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    gates = ("gate", "shared_expert_gate", "router")
    assert not [name for name in names if {*name.split(".")} & {*gates}]
    assert not [name for name in hash_base(model)["quantized"] if name.split(".")[-1] in gates]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_gives_the_same_gradients(qwen, mode):
    def gradients(recompute: str) -> dict[str, torch.Tensor]:
        model = adapted(load(qwen)).train()
        model.enable_input_require_grads()
        use_recompute(model, load_config(CONFIG, ["--train.recompute", recompute]))
        if recompute != "none":
            model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        model(ids()).logits.logsumexp(-1).mean().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.requires_grad}

    wanted, found = gradients("none"), gradients(mode)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_selective_recomputation_does_not_dequantize_experts_again(qwen, monkeypatch):
    model = adapted(load(qwen)).train()
    model.enable_input_require_grads()
    use_recompute(model, load_config(CONFIG, ["--train.recompute", "selective"]))
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    asked = []
    make = FrozenExperts.dequantized
    monkeypatch.setattr(
        FrozenExperts, "dequantized", lambda self, *args: (asked.append(args[0]), make(self, *args))[1]
    )
    loss = model(ids()).logits.logsumexp(-1).mean()
    assert len(asked) == 4
    loss.backward()
    assert len(asked) == 8  # once forward and once for the gradient of the input


def test_a_merged_checkpoint_computes_what_the_policy_computes(checkpoint, tmp_path):
    model = adapted(load(checkpoint))
    base = BaseCheckpoint(checkpoint, facts_of(checkpoint, model))
    model.save_pretrained(tmp_path / "adapter")
    updates = read_adapter(tmp_path / "adapter", base)
    assert len([name for name in updates if ".experts." in name]) == 3 * 8 * len(experts_of(model))
    (tmp_path / "merged").mkdir()
    assert write_folded(base, updates, tmp_path / "merged") > 0.99
    shutil.copy(checkpoint / "config.json", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    exact = plain_model(base).state_dict()
    for name, update in updates.items():
        place = base.experts.get(name)
        target = exact[name] if place is None else exact[f"{place.module}.{place.name}"][place.expert]
        rows = slice(None) if place is None else slice(place.part * place.rows, (place.part + 1) * place.rows)
        target[rows] += update.delta()
    for name, value in merged.state_dict().items():
        assert torch.equal(value, exact[name].bfloat16().float()), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, tensors: config.update(rank_pattern={}), "has rank 4, its adapter_config.json says 8"),
        (lambda config, tensors: tensors.update(narrow(tensors)), "8 experts of .* need A"),
        (
            lambda config, tensors: config.update(target_parameters=["mlp.gate.weight"]),
            "of bare parameters, only those",
        ),
    ],
)
def test_an_adapter_for_other_experts_is_refused_with_the_shapes(qwen, tmp_path, change, message):
    from safetensors.torch import save_file

    model = adapted(load(qwen))
    model.save_pretrained(tmp_path)
    config, tensors = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadInput, match=message):
        read_adapter(tmp_path, BaseCheckpoint(qwen, hash_base(model)))


def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The factors of half of the experts of the first layer."""
    key = next(name for name in tensors if name.endswith("experts.lora_A.weight"))
    return {key: tensors[key][: len(tensors[key]) // 2, :-1].contiguous()}


def test_wrappers_in_an_adapter_file_are_named_by_their_parameters():
    both = {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}
    one = {"target_parameters": ["experts.gate_up_proj"]}
    assert lora.expert_parameter(both, "m.experts.base_layer") == "m.experts.gate_up_proj"
    assert lora.expert_parameter(both, "m.experts") == "m.experts.down_proj"
    assert lora.expert_parameter(one, "m.experts") == "m.experts.gate_up_proj"
    assert lora.expert_parameter(both, "m.q_proj") is None and lora.expert_parameter({}, "m.experts") is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--policy.compute", "fp8"], "policy.compute fp8 does not reach experts"),
        (["--policy.lora_dropout", "0.1"], "cannot be applied to experts"),
        (["--policy.quant_cfg", "fp8"], "policy.quant_cfg does not reach experts"),
        (["--policy.target_modules", '["q_proj", "gate"]'], "routers stay frozen"),
        (["--rollout.backend", "server", "--rollout.sync", "adapter"], "Set rollout.sync to remerge"),
        (["--server.share_base", "true"], "layouts of its own. Set server.share_base to false"),
    ],
)
def test_settings_that_do_not_reach_experts_are_refused(qwen, keys, message):
    with pytest.raises(BadInput, match=message):
        check_base(load_config(CONFIG, ["--model.path", str(qwen), *keys]))


def test_experts_of_a_size_that_blocks_do_not_divide_need_another_storage(tmp_path):
    folder = make_experts(tmp_path, moe_intermediate_size=20, hidden_size=40)
    with pytest.raises(BadInput, match="20 x 40, which NF4's blocks of 64 do not divide"):
        check_base(load_config(CONFIG, ["--model.path", str(folder)]))
    check_base(load_config(CONFIG, ["--model.path", str(folder), "--policy.quantization", "none"]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt_oss", "gpt_oss is a mixture of experts that cannot be trained here: .*have the parameters"),
        ("granitemoe", "granitemoe"),
    ],
)
def test_experts_that_no_rule_knows_are_refused_by_name(kind, message, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match=message):
        check_base(load_config(CONFIG, ["--model.path", str(tmp_path)]))


def test_an_adapter_on_attention_alone_leaves_experts_without_one(qwen):
    config = load_config(CONFIG, ["--model.path", str(qwen), "--policy.expert_rank", "0"])
    facts = check_base(config)
    assert not [name for name in adapted_layers(config, facts) if "experts" in name]
    assert lora_config(config.policy, load(qwen)).target_parameters is None
    config.policy.expert_rank = None
    names = [name for name in adapted_layers(config, facts) if "experts" in name]
    assert names[:2] == ["model.layers.0.mlp.experts.base_layer", "model.layers.0.mlp.experts"]


def test_every_expert_has_a_place(qwen):
    places = expert_matrices(load(qwen))
    place = places["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert (place.module, place.name, place.expert, place.part) == ("model.layers.1.mlp.experts", "gate_up_proj", 3, 1)
    assert (place.rows, place.columns) == (128, 64)


def test_weights_kept_for_a_rollout_give_the_same_scores_and_are_released(qwen):
    model = adapted(load(qwen))
    before = scores(model)
    with keeping_weights(model, "always") as room:
        assert torch.equal(scores(model), before)
        kept = [one.kept for one in experts_of(model).values()]
        assert all(set(one) == {"gate_up_proj", "down_proj"} for one in kept)
    experts = sum(4 * 8 * 3 * 128 * 64 for _ in kept)
    assert room.needed_gib * 2**30 == experts + sum(4 * 64 * (64 + 32 + 32 + 64) for _ in kept)
    assert all(one.kept is None for one in experts_of(model).values())


@pytest.mark.parametrize("rank", [1, 8, 12])
def test_ranks_of_every_size_multiply(qwen, rank, tmp_path):
    model = adapted(load(qwen, "none"), expert_rank=rank)
    model(ids()).logits.sum().backward()
    assert all(one.grad.isfinite().all() for one in model.parameters() if one.requires_grad)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    assert torch.allclose(scores(PeftModel.from_pretrained(plain, tmp_path)), scores(model), atol=2e-5)
