"""Dropout: the base has none whatever its configuration says, and the adapter's own is on in the loss alone."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.policy.adapter_dropout import adapter_dropouts
from kit.weights.base_dropout import clear_dropout_rates, turn_off_dropout
from kit.weights.frozen_base import load_frozen

COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
HIDDEN |= {"max_position_embeddings": 64}
LLAMA = {**HIDDEN, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
DECODER = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64}
FAMILIES: dict[str, dict] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2"), LLAMA
    ),
    **dict.fromkeys(("phi", "phi3", "stablelm", "starcoder2", "persimmon", "cohere", "glm", "nemotron"), LLAMA),
    **dict.fromkeys(("smollm3", "gpt_neox", "biogpt"), HIDDEN),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen", "openai-gpt"), GPT2),
    "opt": {**HIDDEN, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": BLOOM,
    "falcon": {**HIDDEN, "multi_query": True},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "gpt_neo": {**HIDDEN, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xglm": DECODER,
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48, "n_positions": 64},
}


def with_dropout(family: str, rate: float = 0.3) -> Any:
    """A tiny model's configuration with every rate that its family knows set to `rate`."""

    def visit(config: Any) -> None:
        for name, value in list(vars(config).items()):
            if "drop" in name and type(value) in (int, float):
                vars(config)[name] = rate
            elif hasattr(value, "to_dict"):
                visit(value)

    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    visit(config)
    return config


def build(config: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def twice(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of two forwards over the same tokens."""
    ids = torch.arange(24).view(2, 12) + 3
    return model(ids).logits, model(ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_computes_in_training_mode_what_it_computes_in_eval_mode(family):
    config = with_dropout(family)
    first, second = twice(build(config).train())
    assert not first.equal(second), "the family's dropout was on"
    clear_dropout_rates(config)
    model = build(config)
    turn_off_dropout(model)
    first, second = twice(model.train())
    assert first.equal(second) and first.equal(twice(model.eval())[0])


@pytest.mark.parametrize("family", ["gpt_bigcode", "gpt2", "bloom"])
def test_dropout_that_a_model_makes_of_its_own_accord_is_turned_off_too(family):
    model = build(with_dropout(family)).train()
    turn_off_dropout(model)
    assert torch.equal(*twice(model))


@pytest.mark.parametrize("quantization", ["nf4", "fp8", "none"])
def test_a_loaded_base_has_no_dropout(tmp_path, quantization):
    build(with_dropout("opt")).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).dropout == 0.3
    model = load_frozen(tmp_path, quantization, dtype="float32", device="cpu").train()
    assert torch.equal(*twice(model))
    assert model.config.dropout == model.config.attention_dropout == 0.0


@pytest.fixture(scope="module")
def trained(build_trainer, recipe_arguments, tiny_model_dir, tmp_path_factory):
    """`trained({key: value})`: a trainer with LoRA dropout and an adapter that changes what the base says."""

    def make(changes: dict) -> Any:
        keys = {"policy.lora_dropout": 0.5, "train.num_iterations": 2, "train.max_steps": 4, **changes}
        arguments = recipe_arguments(tiny_model_dir, tmp_path_factory.mktemp("dropout") / "run", keys)

        def by_length(completions: list, **others: Any) -> list[float]:
            return [len(one[0]["content"]) % 7 / 7 for one in completions]

        trainer = build_trainer(arguments, rewards=[by_length])
        torch.manual_seed(0)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.05 * torch.randn_like(parameter)
        return trainer

    return make


PACKED = {"train.per_device_train_batch_size": 8, "train.gradient_accumulation_steps": 2}
PACKED |= {"train.micro_batch_tokens": 88}


@pytest.mark.parametrize("changes", [{}, PACKED], ids=["padded", "packed"])
def test_the_adapters_dropout_is_on_in_the_loss_and_off_where_the_policy_samples(trained, changes, monkeypatch):
    trainer, rates = trained(changes), []
    layers = adapter_dropouts(trainer.model)
    assert len(layers) == 14 and layers[0].p == 0.5
    generate = type(trainer)._generate_single_turn

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates.append({layer.p for layer in layers})
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(trainer), "_generate_single_turn", sample)
    rows = next(iter(trainer.get_train_dataloader()))
    model, scored = trainer.model, []
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    score = trainer.policy_step.score

    def watch(model: Any, rows: dict) -> tuple:
        found = score(model, rows)
        scored.append(found[0].detach())
        return found

    monkeypatch.setattr(trainer.policy_step, "score", watch)
    for _ in range(2):
        model.zero_grad()
        trainer.training_step(model, rows, None)
    assert rates == [{0.0}] and {layer.p for layer in layers} == {0.5}
    half = len(scored) // 2
    first, second = scored[:half], scored[half:]
    assert all(map(torch.equal, first, second)), "a batch used again has the same masks, so its ratio is 1"
    if half > 1:
        assert trainer._buffered_inputs[0]["dropout_seed"] is not None
    with torch.no_grad():
        batch = trainer._buffered_inputs[0]
        ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
        drawn = [trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)[0] for _ in range(2)]
    assert not drawn[0].equal(drawn[1]), "outside of a batch each forward draws its own"


def test_a_policy_that_has_not_moved_has_no_kl_with_dropout_on(trained):
    trainer = trained({})
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    rows = next(iter(trainer.get_train_dataloader()))
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, rows, None)
    assert trainer._metrics["train"]["kl"] == [0.0] and trainer._metrics["train"]["clip_ratio/region_mean"] == [0.0]
