"""Tiny random vision-language models, saved by transformers, for the tests of wrapped language models."""

from pathlib import Path
from typing import Any

import torch

from tests.unit.merge_fixture import byte_tokenizer

TEXT: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 8}
VISION |= {"num_attention_heads": 2, "image_size": 32}
QWEN_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8}
QWEN_VISION |= {"out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2}
LINEAR |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32}
YARN |= {"llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

# {family: (model_type, text part, vision part, is tied)}
FAMILIES: dict[str, tuple[str, dict, dict, bool]] = {
    "gemma3": ("gemma3", WINDOWED, {**VISION, "model_type": "siglip_vision_model"}, True),
    "gemma4": (
        "gemma4",
        {**WINDOWED, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
        True,
    ),
    "mistral3": ("mistral3", {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral"}, False),
    "ministral3": (
        "mistral3",
        {"model_type": "ministral3", "sliding_window": None, "rope_parameters": YARN},
        {"model_type": "pixtral"},
        False,
    ),
    "qwen2_vl": ("qwen2_vl", ROPE, {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}, False),
    "qwen2_5_vl": ("qwen2_5_vl", ROPE, {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]}, False),
    "qwen3_vl": (
        "qwen3_vl",
        ROPE,
        {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        True,
    ),
    "qwen3_5": ("qwen3_5", LINEAR, {**QWEN_VISION, "num_position_embeddings": 16}, False),
}
WHOLE_VISION = {"mistral3": VISION, "ministral3": VISION, "qwen2_vl": {"hidden_size": 64, "spatial_merge_size": 2}}
WHOLE_VISION["qwen2_vl"] |= {"temporal_patch_size": 2}


def make_wrapped(
    folder: Path,
    family: str,
    seed: int = 0,
    spread: float = 0.08,
    dtype=torch.bfloat16,
    tokenizer: Any = None,
    **text_keys: Any,
) -> Path:
    """A random checkpoint of `family` (weights of standard deviation `spread`) in two shards, as transformers saves
    it, with a byte-level tokenizer by default and a file of its image processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    kind, text, vision, tied = FAMILIES[family]
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.save_pretrained(folder)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    own = {"mm_tokens_per_image": 4} if kind == "gemma3" else {"audio_config": None} if kind == "gemma4" else {}
    config = AutoConfig.for_model(
        kind,
        text_config=TEXT | special | text | text_keys,
        vision_config=WHOLE_VISION.get(family, {}) | vision,
        tie_word_embeddings=tied,
        **own,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "vision" not in name and "visual" not in name:
                parameter.normal_(0.0, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # Gemma 4's, which begin as ones
                buffer.uniform_(0.5, 1.5)
    model.generation_config = GenerationConfig(**special)
    size = sum(p.numel() * p.element_size() for p in model.to(dtype).parameters())
    model.save_pretrained(folder, max_shard_size=int(size * 0.6))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "tiny"}\n')
    return folder


def load_whole(folder: Path, **options: Any) -> Any:
    """The whole model, as transformers loads it, in eval mode."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
