"""TRL's log-prob head on a CPU in small tiles: the same numbers, less memory, and only what is scored."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import chunked_logprob
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from kit.policy.host_memory import peak_resident_gib, reset_peak_resident
from kit.train.head_tiles import ROWS, use_host_tiles

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", chunked_logprob.TOKEN_CHUNK_SIZE)
    monkeypatch.setattr(utils, "_use_triton", chunked_logprob._use_triton)


def scores(rows: int, words: int, kept: int) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies and the hidden states' gradients of `rows` x 40 tokens, the last `kept` of them scored."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=words, tie_word_embeddings=True))
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids = torch.randint(0, words, (rows, 40))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    labels = ids.clone()
    labels[:, :-kept] = -100
    labels[0] = -100  # a row that is all padding
    out = model(inputs_embeds=embedded, labels=labels, fused_lm_head=True)
    (out.log_probs * torch.linspace(-1, 1, 39)).sum().backward()
    return out.log_probs.detach(), out.entropy.detach(), embedded.grad


def test_log_probs_entropies_and_gradients_are_trl_s():
    expected = scores(rows=12, words=1000, kept=25)
    use_host_tiles(CPU)
    for found, wanted in zip(scores(rows=12, words=1000, kept=25), expected, strict=True):
        assert found.shape == wanted.shape and (found - wanted).norm() <= 1e-6 * wanted.norm()
    assert expected[0][0].abs().sum() == 0 and expected[0][1:, -25:].abs().min() > 0


def test_only_positions_with_a_label_are_multiplied_with_the_head_a_tile_at_a_time(monkeypatch):
    seen, product = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **out: seen.append(a.shape[0]) or product(a, b, **out))
    use_host_tiles(CPU)
    scores(rows=12, words=1000, kept=25)
    tiles = [ROWS, ROWS, 11 * 25 - 2 * ROWS]
    assert seen == tiles * 2  # forward and backward
    assert scores(rows=1, words=50, kept=5)[2].abs().sum() == 0, "a batch in which nothing is scored"


def test_a_vocabulary_of_49152_is_not_paid_for_several_times():
    use_host_tiles(CPU)
    scores(rows=2, words=49152, kept=39)  # what the first call of a process loads
    reset_peak_resident()
    before = peak_resident_gib()
    scores(rows=30, words=49152, kept=39)
    whole = 29 * 39 * 49152 * 4 / 2**30  # the logits of all scored positions
    assert peak_resident_gib() - before < 0.25 + 0.01 and whole > 0.2


def test_a_gpu_keeps_trl_s_own_tiles(monkeypatch):
    before = 4096, lambda *_: True
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", before[0])
    monkeypatch.setattr(utils, "_use_triton", before[1])
    use_host_tiles(torch.device("cuda"))
    assert (chunked_logprob.TOKEN_CHUNK_SIZE, utils._use_triton) == before
