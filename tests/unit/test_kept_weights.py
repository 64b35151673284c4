"""`rollout.keep_weights`: kept weights change nothing but the time, and are gone after the block."""

import copy
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model

from merge.base import disable_cpu_repacking, hash_base, load_nf4
from merge.verify import compute_in
from recipes.parts import kept_weights
from recipes.parts.checks import check_config
from recipes.parts.config import load_config
from recipes.parts.errors import BadInput
from recipes.parts.kept_weights import keeping_weights, room_for
from recipes.parts.linear import use_fused_linears
from recipes.parts.qat import use_quantized_linears
from recipes.parts.quant_format import FORMATS
from tests.unit.test_linear import CONFIG

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [2, 11, 12, 13]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97, attention_bias=True, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture
def policy(folder):
    """`policy(dtype, double, compute)`: an NF4 policy whose adapter is not zero."""

    def make(dtype="float32", double=True, compute="plain"):
        model = load_nf4(folder, dtype, double_quantization=double, device="cpu")
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        if compute != "plain":
            use_fused_linears(model, compute)
        return model

    return make


def sample(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens, and the scores (steps, rows, words) that they were drawn from."""
    torch.manual_seed(5)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "top_k": 0}
    with torch.no_grad():
        made = model.generate(input_ids=IDS, output_scores=True, return_dict_in_generate=True, **settings)
    return made.sequences, torch.stack(made.scores)


def dequantizations(monkeypatch) -> list:
    """What bitsandbytes dequantizes from now on, a name each."""
    made, original = [], torch.ops.bitsandbytes.dequantize_4bit.default
    library = torch.library.Library("bitsandbytes", "IMPL")
    del library
    from bitsandbytes.backends.cpu import ops

    for kind in ("fp32", "bf16"):
        name = f"cdequantize_blockwise_cpu_nf4_{kind}"
        call = getattr(ops.lib, name)
        monkeypatch.setattr(ops.lib, name, lambda *args, call=call: made.append(1) or call(*args), raising=False)
    return made


@pytest.mark.parametrize("compute", ["plain", "fused", "fp8"])
@pytest.mark.parametrize(("dtype", "double"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_a_rollout_with_kept_weights_samples_the_same_tokens_from_the_same_scores(policy, dtype, double, compute):
    model = policy(dtype, double, compute)
    tokens, scores = sample(model)
    with keeping_weights(model, "always"):
        kept_tokens, kept_scores = sample(model)
    assert torch.equal(tokens, kept_tokens) and torch.equal(scores, kept_scores)
    assert torch.equal(sample(model)[1], scores), "afterwards too"
