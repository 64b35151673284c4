"""What makes a step smaller or faster, on language models with sliding windows and linear attention, too: the numbers
of doing without, or refused before weights load."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig

from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.policy.fused_linear import use_fused_linears
from kit.policy.host_embedding import check_embeddings
from kit.policy.kept_weights import keeping_weights
from kit.policy.layer_kernels import check_kernels
from kit.policy.load import load_policy_base, lora_config
from kit.policy.packed.packing import check_packing
from kit.policy.recompute import use_recompute
from kit.train.rows import padded_positions
from kit.weights.model_files import unquantized_config
from kit.weights.wrapped import language_config
from tests.conftest import CONFIG
from tests.unit.merge_fixture import shared_folder
from tests.unit.wrapped_models import FAMILIES, make_wrapped

IDS = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(1))  # windows are of 16 tokens
MASK = torch.ones_like(IDS)
MASK[0, :9] = 0
# Families whose language model is one that packs and that liger's kernels know, as a checkpoint of its own.
PLAIN = ("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
LINEAR = {"lfm2": "Lfm2ForCausalLM"}


def configured(path: Path, *keys: str) -> Config:
    return load_config(
        CONFIG,
        ["--model.path", str(path), "--model.dtype", "float32", "--policy.target_modules", "all-linear", *keys],
    )


@cache
def folder_of(family: str) -> Path:
    """Read-only: a tiny checkpoint of a wrapped family or of a plain hybrid one."""
    folder = shared_folder() / f"levers-{family}"
    if family in FAMILIES:
        return make_wrapped(folder, family)
    from transformers import AutoModelForCausalLM

    from tests.unit.wrapped_models import TEXT

    kinds = ["conv", "conv", "full_attention", "conv"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TEXT, layer_types=kinds, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def policy(family: str, compute: str = "plain", recompute: str = "none", fraction: float = 1.0, offload=False) -> Any:
    config = configured(folder_of(family))
    base = load_policy_base(config)
    torch.manual_seed(0)
    model = get_peft_model(base, lora_config(config.policy, base))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=generator)
    config.train.recompute, config.train.recompute_fraction = recompute, fraction
    config.train.recompute_offload = offload
    if compute != "plain":
        use_fused_linears(model, compute)
    use_recompute(model, config)
    if recompute != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def logps_of(model: Any) -> torch.Tensor:
    """(2, 47) log-probs of the tokens, 0 at padding."""
    scores = model(input_ids=IDS, attention_mask=MASK, use_cache=False).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, IDS[:, 1:, None])[..., 0] * MASK[:, 1:]


def step(*how: Any, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the gradients of their sum as one vector."""
    model = policy(*how, **keys)
    logps = logps_of(model)
    logps.sum().backward()
    return logps.detach(), torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
def test_recomputation_is_exact_and_fused_products_are_those_of_peft_to_float32_rounding(family):
    logps, gradients = step(family)
    assert gradients.abs().max() > 0
    for keys in ({"recompute": "full"}, {"recompute": "selective"}, {"recompute": "selective", "fraction": 0.5}):
        found = step(family, **keys)
        assert torch.equal(found[0], logps) and torch.equal(found[1], gradients), keys
    assert torch.equal(step(family, recompute="full", offload=True)[1], gradients)
    for recompute in ("none", "selective"):
        found = step(family, "fused", recompute)
        assert (found[0] - logps).abs().max() < 1e-5
        assert (found[1] - gradients).norm() / gradients.norm() < 2e-6


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
@torch.no_grad()
def test_sampled_tokens_are_scored_alike_with_a_cache_in_a_padded_batch_and_alone(family):
    model = policy(family).eval()
    prompt = {"input_ids": IDS[:, :24], "attention_mask": MASK[:, :24]}
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    made = model.generate(**prompt, **options, output_logits=True, return_dict_in_generate=True)
    sampled = torch.stack(made.logits, 1).log_softmax(-1)  # (2, 20, vocabulary)
    mask = torch.cat([MASK[:, :24], torch.ones(2, 20, dtype=torch.long)], 1)
    where = {"attention_mask": mask, "position_ids": padded_positions(mask)}
    padded = model(input_ids=made.sequences, **where, use_cache=False).logits[:, 23:-1].log_softmax(-1)
    alone = model(input_ids=made.sequences[:1, 9:], use_cache=False).logits[:, 14:-1].log_softmax(-1)
    picked = made.sequences[:, 24:, None]
    assert (sampled.gather(-1, picked) - padded.gather(-1, picked)).abs().max() < 1e-4
    assert (padded[:1].gather(-1, picked[:1]) - alone.gather(-1, picked[:1])).abs().max() < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
@torch.no_grad()
def test_rollouts_that_keep_their_weights_sample_the_same_tokens(family):
    model = policy(family, "fused").eval()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": IDS, "attention_mask": MASK}
    expected = model.generate(**prompt, **options)
    with keeping_weights(model, "always"):
        assert torch.equal(model.generate(**prompt, **options), expected)


@pytest.mark.parametrize("family", [*FAMILIES, *LINEAR])
def test_packs_and_liger_s_kernels_are_for_known_models_only(family):
    path = folder_of(family)
    found = unquantized_config(path)
    config = configured(path, "--train.micro_batch_tokens", "512", "--policy.kernels", "liger")
    if family in PLAIN:
        check_packing(config, found)
        check_kernels(config, found.model_type, installed=False)
        return
    with pytest.raises(BadInput, match=f"{found.model_type} was not compared with the padded pass"):
        check_packing(config, found)
    with pytest.raises(BadInput, match=f"is a {found.model_type}"):
        check_kernels(config, found.model_type, installed=False)


def test_a_scaled_embedding_is_not_kept_on_the_host():
    """Gemma multiplies what it looks up."""
    config = configured(folder_of("gemma3"), "--policy.embeddings", "host")
    found = language_config(AutoConfig.from_pretrained(folder_of("gemma3")))
    found.tie_word_embeddings = False
    with pytest.raises(BadInput, match="Gemma3TextScaledWordEmbedding, does more than look"):
        check_embeddings(config, found)
