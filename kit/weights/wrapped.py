"""Language models inside larger checkpoints: vision-language models, of which only the language model is trained.

The trainer builds the causal LM of the wrapper's text part alone, so that a policy is a text model like any other:
`language_config` gives its transformers config, `language_name` the name that it has for a tensor of the checkpoint's
files. Everything else in the files (vision tower, projector, layers for multi-token prediction) is carried: hashed,
copied unchanged into every checkpoint that is written, never loaded, quantized or trained.

Covers: text in, text out. Not covered: images in prompts; wrappers of mixtures of experts, whose checkpoints store
them fused; other wrappers than those of `LANGUAGE`, each of which a test compares with transformers' own class.
"""

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from kit.core.errors import BadInput

# {model_type of the wrapper: model_type of the causal LM that computes the same on text; None: its own text part's}.
# On text alone the three position axes of Qwen's multimodal rotary embedding are equal: it is the plain one.
LANGUAGE: dict[str, str | None] = {
    "gemma3": None,
    "gemma4": None,
    "mistral3": None,
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_5": None,
}
MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved")
# {pattern of a name in the files: its replacement in the causal LM}, in the form that `from_pretrained` takes.
KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}


def language_config(config: Any) -> Any:
    """Return the transformers config of the causal LM that the trainer builds; `config` itself if nothing wraps it.

    `BadInput` for a wrapper that is not covered.
    """
    text = config.get_text_config()
    if text is config:
        return config
    kind = config.model_type
    if kind not in LANGUAGE:
        raise BadInput(
            f"{config.name_or_path} ({kind}) wraps a language model in other parts, and how its files name it is "
            f"known for {', '.join(LANGUAGE)} only. Take one of these, or a checkpoint of the language model alone."
        )
    if (plain := LANGUAGE[kind]) is None:
        found = copy.deepcopy(text)
    else:
        from transformers import CONFIG_MAPPING

        values = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        rope = values.get("rope_parameters") or {}
        values["rope_parameters"] = {key: value for key, value in rope.items() if key not in MULTIMODAL_ROPE}
        found = CONFIG_MAPPING[plain].from_dict(values)
    # The wrapper's own class goes by the wrapper's flag, whatever the text part says.
    found.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    found.dtype = config.dtype
    found.name_or_path, found._commit_hash = config.name_or_path, getattr(config, "_commit_hash", None)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        found.quantization_config = quantized
    found.wrapper = kind
    return found


def wrapper_of(config: Any) -> str | None:
    """model_type of the wrapper of a causal LM with the config `config` (from `language_config`); None if none."""
    return getattr(config, "wrapper", None)


def language_name(stored: str) -> str:
    """Name that the causal LM has for a tensor or module of a wrapper's files; unchanged if it is of another part."""
    for pattern, replacement in KEY_MAPPING.items():
        if (name := re.sub(pattern, replacement, stored)) != stored:
            return name
    return stored


def is_of_language(stored: str, wanted: Iterable[str]) -> bool:
    """Whether a tensor of a wrapper's files lies within the causal LM whose parameters are `wanted`."""
    parts = {_part(name) for name in wanted} | {"lm_head"}
    return language_name(stored) != stored or _part(stored) in parts


def _part(name: str) -> str:
    """`model.layers` of `model.layers.0.mlp.up_proj.weight`, `visual` of `visual.blocks.0.norm1.weight`."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "model" else first


def carried_modules(carried: Iterable[str]) -> list[str]:
    """Names of the parts that these tensors of a wrapper's files belong to, without `model.`: `vision_tower`, …"""
    return sorted({_part(name).removeprefix("model.") for name in carried if not language_name(name) != name})


@contextlib.contextmanager
def loading(config: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments of `AutoModelForCausalLM.from_pretrained` that load the causal LM of `config`; within the block,
    transformers does not list the wrapper's other tensors as unexpected."""
    from transformers.utils import logging

    if wrapper_of(config) is None:
        yield {"config": config}
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield {"config": config, "key_mapping": KEY_MAPPING}
    finally:
        logging.set_verbosity(before)
