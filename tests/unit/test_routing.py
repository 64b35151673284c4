"""Experts of the sampler, compared with the trainer's own and replayed in their place."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy.load import check_base
from kit.policy.packed.packing import make_pack, pack_logps
from kit.policy.recompute import use_recompute
from kit.policy.routing import UNKNOWN, Routing, routed, use_routing, weights_of
from kit.rollout.generation import experts_fault
from kit.rollout.protocol import decode_experts, encode_experts
from kit.rollout.replica import Sample
from kit.train.mismatch import routing_figures
from kit.train.rows import padded_logps
from kit.train.sampling import expert_rows
from tests.conftest import CONFIG
from tests.unit.test_experts import adapted, ids, load, make_experts, scores

LAYERS, TAKEN, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_experts(tmp_path_factory.mktemp("routing") / "qwen")


def with_routing(folder) -> torch.nn.Module:
    model = adapted(load(folder, "none"))
    assert use_routing(model) == LAYERS
    return model


def counts() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.float64)


def own_experts(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Experts (N, L, k) that the model's own routers choose."""
    found: list[torch.Tensor] = []
    gates = [one for name, one in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(lambda _, __, out: found.append(out[2])) for gate in gates]
    scores(model, tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1).to(torch.int16)


def test_replaying_the_own_choice_changes_nothing_and_counts_no_difference(folder):
    model, tally = with_routing(folder), counts()
    experts = own_experts(model, ids())
    with routed(Routing(experts.flip(-1), True, tally)):  # the order of a set does not matter
        found = scores(model)
    assert torch.allclose(found, scores(model), atol=1e-5)
    assert tally.tolist() == [0, LAYERS * ids().numel(), 0, ids().numel()]


def test_other_experts_are_taken_when_replayed_and_only_counted_when_compared(folder):
    model, tally = with_routing(folder), counts()
    experts = own_experts(model, ids())
    # The second token of the batch goes to other experts in the last layer; of the third nothing is known.
    other = [one for one in range(EXPERTS) if one not in experts[1, 1].tolist()][:TAKEN]
    experts[1, 1] = torch.tensor(other, dtype=torch.int16)
    experts[2] = UNKNOWN
    plain = scores(model)
    with routed(Routing(experts, False, tally)):
        assert torch.equal(scores(model), plain)
    assert tally.tolist() == [1, LAYERS * (ids().numel() - 1), 1, ids().numel() - 1]
    with routed(Routing(experts, True, None)):
        changed = (scores(model) - plain).abs().amax(dim=-1) > 1e-4
    # The last layer's experts of a token are seen by no other token.
    assert changed.nonzero().tolist() == [[0, 1]]
    assert routing_figures(tally) == {
        "sampler_routing_delta": 1 / (LAYERS * 33),
        "sampler_routing_delta_tokens": 1 / 33,
    }
    assert set(routing_figures(counts()).values()) == {None}


def test_weights_of_replayed_experts_have_the_router_s_gradient(folder):
    model = with_routing(folder)
    router = model.get_base_model().model.layers[0].mlp.gate
    states = torch.randn(5, 64, requires_grad=True)
    logits, weights, chosen = type(router).forward(router, states)
    assert torch.allclose(weights_of(router, logits, chosen, weights.dtype), weights, atol=1e-6)
    weights_of(router, logits, (chosen + 1) % EXPERTS, weights.dtype)[:, 0].sum().backward()
    assert states.grad.abs().max() > 0


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_layer_takes_the_experts_of_its_first_run(folder, mode):
    def gradients(recompute: str) -> dict[str, torch.Tensor]:
        model = with_routing(folder).train()
        experts = torch.randint(0, EXPERTS, (ids().numel(), LAYERS, 1), generator=torch.Generator().manual_seed(5))
        experts = torch.cat([experts, (experts + 1) % EXPERTS], dim=-1).to(torch.int16)
        model.enable_input_require_grads()
        use_recompute(model, load_config(CONFIG, ["--train.recompute", recompute]))
        if recompute != "none":
            model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        tally = counts()
        with routed(Routing(experts, True, tally)):
            loss = model(ids()).logits.logsumexp(-1).mean()
        loss.backward()  # outside of the block, as in a step
        assert tally[1] == LAYERS * ids().numel()  # a recomputation counts nothing
        return {name: one.grad for name, one in model.named_parameters() if one.requires_grad}

    wanted, found = gradients("none"), gradients(mode)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_padded_rows_and_packs_replay_the_same_experts(folder):
    model = with_routing(folder)
    add_fused_lm_head(model.get_base_model(), temperature=1.0, outputs=("log_probs", "entropy"))
    prompts, completions = [[5, 6, 7], [5, 6, 7], [8, 9]], [[10, 11, 12], [13], [14, 15]]
    lengths = [len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)]
    draw = np.random.default_rng(0)
    experts = [np.stack([draw.permutation(EXPERTS)[:TAKEN] for _ in range(n * LAYERS)]) for n in lengths]
    experts = [one.reshape(n, LAYERS, TAKEN) for one, n in zip(experts, lengths, strict=True)]
    experts[1][:2] = experts[0][:2]  # a shared prompt is read once
    rows = expert_rows(experts, [3, 3, 2], 3, 3)
    assert rows.shape == (3, 6, LAYERS, TAKEN) and (rows[2, 0] == UNKNOWN).all() and (rows[2, 1] >= 0).all()
    tokens = torch.tensor([[5, 6, 7, 10, 11, 12], [5, 6, 7, 13, 0, 0], [0, 8, 9, 14, 15, 0]])
    mask = (tokens > 0).long()
    whole = SimpleNamespace(autocast=torch.no_grad, unwrap_model=lambda one: one)
    stub = SimpleNamespace(accelerator=SimpleNamespace(autocast=torch.no_grad, device=torch.device("cpu")))
    replayed = Routing(rows.flatten(0, 1), True, None)
    padded, _ = padded_logps(whole, model, tokens, mask, 3, True, replayed)
    from kit.policy.packed.attention import use_packed_attention

    use_packed_attention(model.get_base_model())
    for share in (False, True):
        tally = counts()
        pack = make_pack(stub, model, tokens, mask, 3, share)
        packed, _ = pack_logps(stub, model, pack, True, Routing(rows.flatten(0, 1), True, tally))
        assert torch.allclose(packed[mask[:, 3:].bool()], padded[mask[:, 3:].bool()], atol=1e-5)
        assert tally[3] == sum(lengths) - (2 if share else 0)
    own, _ = pack_logps(stub, model, make_pack(stub, model, tokens, mask, 3, False), True)
    assert not torch.allclose(own[mask[:, 3:].bool()], padded[mask[:, 3:].bool()], atol=1e-3)


def test_experts_travel_and_an_answer_without_them_is_refused():
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    assert np.array_equal(decode_experts(encode_experts(experts)), experts)
    with pytest.raises(ValueError, match="shape"):
        decode_experts({"data": "", "shape": [3]})
    with pytest.raises(ValueError):
        decode_experts({"data": encode_experts(experts)["data"], "shape": [3, 2, 3]})
    sample = Sample(np.array([1, 2]), np.zeros(2), "stop", experts)
    assert experts_fault([sample], 2) is None
    assert "of 3 tokens, the model read 4" in experts_fault([sample], 3)
    assert "no experts" in experts_fault([Sample(np.array([1]), np.zeros(1), "stop")], 2)


def test_routers_of_another_kind_and_dense_models_are_refused(tiny_model_dir, folder, tmp_path):
    with pytest.raises(BadInput, match=r"routing is replay and .* has no experts"):
        config = load_config(CONFIG, ["--model.path", str(tiny_model_dir), "--rollout.routing", "replay"])
        check_base(config)
    with pytest.raises(BadInput, match="samples with its own routers"):
        check_config(load_config(CONFIG, ["--model.path", str(folder), "--rollout.routing", "replay"]), 1)
    model = load(folder, "none")
    model.model.layers[0].mlp.gate.norm_topk_prob = not model.model.layers[0].mlp.gate.norm_topk_prob
    use_routing(model)  # both kinds of weights are known
    for router in (model.model.layers[1].mlp.gate,):
        router.__class__ = type("Sigmoid", (type(router),), {"forward": sigmoid})
    with pytest.raises(BadInput, match="Sigmoid does not weight its experts by a softmax"):
        use_routing(model)


def sigmoid(self, states):
    logits = torch.nn.functional.linear(states, self.weight)
    value, chosen = logits.sigmoid().topk(self.top_k, dim=-1)
    return logits, value, chosen


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "olmoe", "qwen3_moe"])
def test_routers_of_every_known_family_can_be_replayed(kind):
    config = AutoConfig.for_model(kind, hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=32)
    router = AutoModelForCausalLM.from_config(config).model.layers[0].mlp.gate
    torch.nn.init.normal_(router.weight)
    logits, weights, chosen = router(torch.randn(4, 64))
    assert torch.allclose(weights_of(router, logits, chosen, weights.dtype), weights, atol=1e-5)
