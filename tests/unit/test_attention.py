"""`model.attn_implementation`: auto takes a kernel that computes what the model's configuration says."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy.load import adapted_layers
from kit.train.setup import resolve_attention
from kit.weights.attention import attention_of
from kit.weights.frozen_base import load_frozen
from merge.verify import load_for_scoring
from tests.conftest import CONFIG
from tests.unit.families import family_config, make_family


@pytest.mark.parametrize(
    ("family", "chosen"), [("llama", "sdpa"), ("bloom", "eager"), ("mpt", "eager"), ("gemma2", "eager")]
)
def test_auto_is_sdpa_where_the_model_has_it_and_says_when_it_is_not(family, chosen, capsys):
    config, facts = load_config(CONFIG, []), family_config(family)
    adapted_layers(config, facts)
    resolve_attention(config, facts)
    assert config.model.attn_implementation == chosen
    assert (f"attention {chosen}" in capsys.readouterr().out) == (chosen != "sdpa")


def test_a_kernel_that_is_named_is_kept(capsys):
    config = load_config(CONFIG, ["--model.attn_implementation=eager"])
    resolve_attention(config, family_config("llama"))
    assert config.model.attn_implementation == "eager" and not capsys.readouterr().out


def test_sdpa_is_refused_where_it_would_leave_out_the_soft_cap():
    facts = family_config("gemma2")
    with pytest.raises(BadInput, match=r"attn_logit_softcapping \(50\).* Use auto or eager"):
        attention_of(facts, "sdpa")
    facts.attn_logit_softcapping = None
    assert attention_of(facts) == attention_of(facts, "sdpa") == "sdpa"


@torch.no_grad()
def test_a_base_and_a_checkpoint_of_gemma_2_compute_with_the_soft_cap(tmp_path):
    config = family_config("gemma2", attn_logit_softcapping=0.5)
    make_family(tmp_path, "gemma2")
    config.save_pretrained(tmp_path)
    ids = torch.arange(24).view(2, 12) + 3
    kernels = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=name).eval()
        for name in ("eager", "sdpa")
    }
    eager, sdpa = (model(ids).logits for model in kernels.values())
    assert (eager - sdpa).abs().max() > 1e-3, "transformers' sdpa has the soft cap now: auto may be sdpa"
    assert AutoConfig.from_pretrained(tmp_path).attn_logit_softcapping == 0.5
    torch.testing.assert_close(load_for_scoring(tmp_path)(ids).logits, eager)
    torch.testing.assert_close(load_frozen(tmp_path, "none", "float32", device="cpu").eval()(ids).logits, eager)
