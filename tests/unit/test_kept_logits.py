"""TRL's log-prob head with its logits kept: the same bits, one product with the head less."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from trl.kernels import chunked_logprob
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.plan import memory, shapes
from kit.plan.gpus import CARDS
from kit.train.kept_logits import KeptLogits, keep_logits
from tests.unit.test_fused_linear import CONFIG

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", 32)
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 100)
    monkeypatch.setattr(utils, "_use_triton", chunked_logprob._use_triton)  # every position is scored
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)


def make(words=330, kind="llama", bias=False):
    torch.manual_seed(0)
    if kind == "gemma2":  # caps its logits
        facts = Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, vocab_size=words, final_logit_softcapping=3.0)
        model = Gemma2ForCausalLM(facts)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=words, tie_word_embeddings=False))
    if bias:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(words))
    model.requires_grad_(False)
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    return model


def score(model, words=330, scored=25, entropy_weight=0.0):
    """Every output of the head, and the gradient of the hidden states."""
    torch.manual_seed(1)
    ids = torch.randint(0, words, (5, 40))
    embedded = torch.randn(5, 40, 16, requires_grad=True)
    labels = ids.clone()
    labels[:, : 40 - scored] = -100
    labels[0] = -100
    out = model(inputs_embeds=embedded, labels=labels, fused_lm_head=True)
    loss = (out.log_probs * torch.linspace(-1, 1, 39)).sum() + entropy_weight * out.entropy.sum()
    loss.backward()
    return [getattr(out, name).detach() for name in OUTPUTS] + [embedded.grad]


@pytest.mark.parametrize(
    ("model", "entropy_weight", "scored"),
    [({}, 0.0, 25), ({"kind": "gemma2"}, 0.0, 25), ({"bias": True}, 0.3, 25), ({}, 0.3, 0)],
    ids=["log-probs", "capped", "bias and entropy", "nothing scored"],
)
def test_outputs_and_gradients_are_trl_s_bit_for_bit(model, entropy_weight, scored):
    made = make(**model)
    expected = score(made, scored=scored, entropy_weight=entropy_weight)
    keep_logits(True)
    found = score(made, scored=scored, entropy_weight=entropy_weight)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert bool(expected[-1].any()) == (scored > 0)


def test_bfloat16_has_the_bits_of_trl_s_too():
    made = make().to(torch.bfloat16)

    def scores():
        with torch.autocast("cpu", torch.bfloat16):
            return score(made)

    expected = scores()
    keep_logits(True)
    assert all(torch.equal(one, other) for one, other in zip(scores(), expected, strict=True))


def test_the_backward_pass_multiplies_with_the_head_once(monkeypatch):
    products, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: products.append(tuple(a.shape)) or product(a, b, **out))
    made = make()
    score(made)
    by_trl = len(products)
    keep_logits(True)
    products.clear()
    score(made)
    assert len(products) == by_trl // 2 == 7 * 4  # 5 x 39 rows in tiles of 32, 330 words in tiles of 100


def test_a_pass_without_gradients_and_a_trained_head_are_trl_s(monkeypatch):
    keep_logits(True)
    made, kept = make(), []
    monkeypatch.setattr(KeptLogits, "forward", staticmethod(recorded(KeptLogits.forward, kept)))
    with torch.no_grad():
        ids = torch.zeros(1, 4, dtype=torch.long)
        made(input_ids=ids, labels=ids, fused_lm_head=True)
    made.lm_head.weight.requires_grad_()
    expected = score(made)
    assert kept == [False, False] and made.lm_head.weight.grad.any()
    keep_logits(False)
    made.lm_head.weight.grad = None
    assert all(torch.equal(one, other) for one, other in zip(score(made), expected, strict=True))


def recorded(forward, kept):
    def run(ctx, *args):
        found = forward(ctx, *args)
        kept.append(ctx.logits is not None)
        return found

    return run


def test_a_second_backward_pass_through_one_graph_is_refused():
    keep_logits(True)
    made = make()
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    out = made(inputs_embeds=hidden, labels=torch.zeros(1, 4, dtype=torch.long), fused_lm_head=True)
    out.log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        out.log_probs.sum().backward()


def test_the_plan_counts_the_logits_at_the_head_s_peak():
    shape = shapes.shape_from_facts(LlamaConfig(**SIZES, vocab_size=150_000).to_dict(), "x")
    plain, kept = (
        load_config(CONFIG, ["--train.keep_logits", value, "--train.recompute", "none"]) for value in ("false", "true")
    )
    card = CARDS["h200"]
    _, scored = memory.micro_batch(kept)
    more = sum(memory.update_parts(shape, kept, card).values()) - sum(memory.update_parts(shape, plain, card).values())
    assert more == pytest.approx(scored * 150_000 * memory.value_bytes(kept) / 2**30, rel=0.01)


def test_a_distillation_refuses_it():
    config = load_config(CONFIG, ["--train.keep_logits", "true", "--distill.teacher", "a/b"])
    with pytest.raises(BadInput, match=r"train\.keep_logits is true in a distillation"):
        check_config(config, 1)
