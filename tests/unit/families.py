"""Tiny random checkpoints of dense decoder families, and what the whole path shows for one of them."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.unit.merge_fixture import byte_tokenizer

# Every format's blocks divide 256, and there is more than one block of 128 x 128 across.
SHAPE = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
HEADS = {key: SHAPE[key] for key in SHAPE if key not in ("num_key_value_heads", "head_dim")}
GPT = {"vocab_size": 320, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 256}
LATENT = {**SHAPE, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 128}
LATENT |= {"head_dim": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
SPREAD = 0.08  # standard deviation of the weights: at the usual 0.02 logits are nearly flat
RATE = 0.3  # of every dropout that the family's configuration knows
SPREADS = dict.fromkeys(("biogpt", "xglm"), 0.02)  # these scale their tied embedding
NO_DROPOUT = ("diffllama",)  # refuses any
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2"), SHAPE),
    **dict.fromkeys(("gemma3_text", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense", "hyperclovax"), SHAPE),
    **dict.fromkeys(("jais2", "lfm2", "llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron"), SHAPE),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"), SHAPE),
    **dict.fromkeys(("stablelm", "starcoder2", "vaultgemma", "diffllama", "bitnet", "granite_swa"), SHAPE),
    **dict.fromkeys(("gpt_neox", "persimmon", "biogpt"), HEADS),
    **{family: {**GPT, "rotary_dim": 32} for family in ("gptj", "codegen")},
    **dict.fromkeys(("gpt_bigcode", "gpt2"), GPT),
    "bloom": {"vocab_size": 320, "hidden_size": 256, "n_layer": 2, "n_head": 4},
    "falcon": {**HEADS, "ffn_hidden_size": 256},
    "mpt": {"vocab_size": 320, "d_model": 256, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "opt": {**HEADS, "ffn_dim": 256, "word_embed_proj_dim": 256},
    "gpt_neo": {**HEADS, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xglm": {"vocab_size": 320, "d_model": 256, "num_layers": 2, "attention_heads": 4, "ffn_dim": 256},
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
}


def family_config(family: str, **changes: Any) -> Any:
    """A tiny configuration of a family, every dropout rate that it knows at `RATE`."""
    from transformers import AutoConfig

    tokenizer = byte_tokenizer()
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    tokens["bos_token_id"] = tokens["eos_token_id"]
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **tokens, **changes})
    for name, value in list(vars(config).items()):
        if "drop" in name and type(value) in (int, float) and family not in NO_DROPOUT:
            vars(config)[name] = RATE
    return config


def make_family(folder: Path, family: str) -> Path:
    """A random BF16 checkpoint of a family with a tokenizer and problems."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer, config = byte_tokenizer(), family_config(family)
    tokenizer.bos_token = tokenizer.eos_token  # as in the configuration: not every family takes none
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, SPREADS.get(family, SPREAD))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(8) for b in (1, 25)]
    for split in ("train", "heldout"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward with a spread on any text."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]
