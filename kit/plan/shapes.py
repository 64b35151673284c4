"""Dimensions of a decoder, from its config alone: sizes known by name, a config.json, or the hub's cache."""

import difflib
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit.core.checkpoint_files import from_files, read_facts
from kit.core.config.recompute_rules import ENDS_WITH_RESIDUAL
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.formats import find_experts
from kit.core.limits import MOST_LAYERS
from kit.plan.decoder import Experts, LinearAttention, Shape
from kit.plan.sizes import Facts

# Model types of transformers whose MLP is two linear layers without a gate.
UNGATED = ("apertus", "arcee", "biogpt", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2")
FOUR_NORMS = ("gemma2", "gemma3_text", "gemma4_text", "glm4")  # before and after attention and MLP
QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")
# Model types whose layers are attention and an MLP of the sizes that the usual keys say, each with its own weights.
DENSE = (
    *("apertus", "arcee", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma"),
    *("gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "gpt_neox", "granite", "helium"),
    *("hunyuan_v1_dense", "hyperclovax", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat"),
    *("nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    *("qwen3", "qwen3_vl_text", "qwen3_5_text", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma"),
)
# Keys of Gemma 4 that add weights or give some layers other sizes.
UNEVEN = ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block", "num_global_key_value_heads")
# Mixtures of experts whose configurations say in the same keys which layers have how many experts of which size.
EXPERTS_KNOWN = (
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_vl_moe_text"),
    *("mixtral", "olmoe", "flex_olmo", "glm4_moe"),
)
REFUSED = {
    "gpt_oss": "its experts have biases, and weights stored as (in, out) with gate and up interleaved",
}
GATED_VISION = ("pixtral", "qwen2_5_vl")
LAYER_KINDS = ("full_attention", "sliding_attention", "linear_attention")
LONGEST = 131072  # if a config.json names no limit
# From the config.json of each model on the hub: what a family has in common, and of each size
# hidden, intermediate, layers, heads, kv_heads, tied
_FAMILIES: dict[str, Facts] = {
    "qwen3": {"head_dim": 128, "vocabulary": 151936, "positions": 40960, "qk_norm": True},
    "qwen2.5": {"vocabulary": 152064, "positions": 32768, "qkv_bias": True},
    "llama3": {"vocabulary": 128256, "positions": 131072},
    "gemma3": {"vocabulary": 262208, "positions": 131072, "qk_norm": True, "norms": 4, "window": 1024},
    "qwen3.5": {"head_dim": 256, "vocabulary": 248320, "positions": 262144, "qk_norm": True, "query_gate": True},
}
_SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, False),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, True),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, True),
    "qwen2.5-7b": (3584, 18944, 28, 28, 4, False),
    "qwen2.5-14b": (5120, 13824, 48, 40, 8, False),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, False),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, False),
    "llama3-1b": (2048, 8192, 16, 32, 8, True),
    "llama3-3b": (3072, 8192, 28, 24, 8, True),
    "llama3-8b": (4096, 14336, 32, 32, 8, False),
    "llama3-70b": (8192, 28672, 80, 64, 8, False),
    "gemma3-12b": (3840, 15360, 48, 16, 8, True),
    "gemma3-27b": (5376, 21504, 62, 32, 16, True),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, False),
    "qwen3.5-27b": (5120, 17408, 64, 24, 4, False),
}
# Not on the hub's cache here: sizes of Qwen3-30B-A3B are those of bench/experts_step.py; of Qwen3.5-9B the defaults of
# transformers 5.17's class; of Gemma 3 and Qwen3.5-27B those of their published tables, which give the published
# number of weights (tests/unit/test_plan_experts.py). Contexts are the published ones.
_SIGLIP: Facts = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}
_SIGLIP |= {"image_size": 896, "model_type": "siglip_vision_model"}
_QWEN_VISION: Facts = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "depth": 27,
    "patch_size": 16,
    "spatial_merge_size": 2,
}
_QWEN_VISION |= {"temporal_patch_size": 2, "num_position_embeddings": 2304, "model_type": "qwen3_5_vision"}
_PARTS: dict[str, Facts] = {
    "qwen3-30b-a3b": {"experts": Experts(128, 8, 768, layers=48)},
    "gemma3-12b": {"head_dim": 256, "windowed": 40},  # five of six layers
    "gemma3-27b": {"head_dim": 128, "windowed": 52},
    "qwen3.5-9b": {"linear_attention": LinearAttention(24, 16, 32, 128, 128, 4)},
    "qwen3.5-27b": {"linear_attention": LinearAttention(48, 16, 48, 128, 128, 4)},
}


def vision_weights(facts: Facts, hidden: int) -> int:
    """Weights of a vision transformer and its projection to `hidden` values, from its `vision_config`.

    Norms and the projection's own layout are left out: within 5 % of what transformers builds.
    """
    h = facts.get("embed_dim") or facts.get("hidden_size")
    inner = facts.get("intermediate_size") or int((h or 0) * facts.get("mlp_ratio", 0))
    layers = facts.get("num_hidden_layers") or facts.get("depth")
    if not (h and inner and layers):
        return 0
    kind = facts.get("model_type", "")
    merged = facts.get("spatial_merge_size") or 1
    patch = facts.get("patch_size") or 14
    found = layers * (4 * h * h + (2 + kind.startswith(GATED_VISION)) * h * inner)
    found += 3 * patch**2 * (facts.get("temporal_patch_size") or 1) * h
    positions = facts.get("num_position_embeddings") or 0
    if kind.startswith("siglip"):
        positions = (facts["image_size"] // patch) ** 2
    wide, hidden = h * merged**2, facts.get("out_hidden_size") or hidden
    projections = 1 + len(facts.get("deepstack_visual_indexes") or ())
    return found + positions * h + projections * ((wide * wide if merged > 1 else 0) + wide * hidden)


def _known(name: str) -> Shape:
    hidden, intermediate, layers, heads, kv_heads, tied = _SIZES[name]
    family = name.partition("-")[0]
    common: dict[str, Any] = {"head_dim": hidden // heads} | _FAMILIES[family] | _PARTS.get(name, {})
    if family == "qwen2.5" and tied:
        common["vocabulary"] = 151936
    common["skips_down"] = family in ("qwen3", "qwen2.5", "llama3") and "experts" not in common
    if vision := {"gemma3": _SIGLIP, "qwen3.5": _QWEN_VISION}.get(family):
        common["vision"] = vision_weights(vision, hidden)
    return Shape(name, hidden, intermediate, layers, heads, kv_heads, tied=tied, **common)


KNOWN = {name: _known(name) for name in _SIZES}
_HUB = (
    (re.compile(r"Qwen/Qwen3-([\d.]+)B(-Base)?"), "qwen3-{}b"),
    (re.compile(r"Qwen/Qwen3-(30)B-A3B(-Base)?"), "qwen3-{}b-a3b"),
    (re.compile(r"Qwen/Qwen3\.5-([\d.]+)B(-Base)?"), "qwen3.5-{}b"),
    (re.compile(r"Qwen/Qwen2\.5-([\d.]+)B(-Instruct)?"), "qwen2.5-{}b"),
    (re.compile(r"meta-llama/(?:Meta-)?Llama-3\.[12]-(\d+)B(-Instruct)?"), "llama3-{}b"),
    (re.compile(r"google/gemma-3-(\d+)b-(?:it|pt)()"), "gemma3-{}b"),
)
_SIZES_OF_MORE = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def shape_by_size(text: str) -> Shape:
    """The shape of a size (`8b`: Qwen3's if it exists) or of a family and size (`llama3-8b`)."""
    key = text.lower()
    if key not in KNOWN:
        key = next((name for name in KNOWN if name.endswith(f"-{key}")), key)
    if key in KNOWN:
        return KNOWN[key]
    sizes = [name.rpartition("-")[2] for name in KNOWN]
    near = difflib.get_close_matches(key, [*KNOWN, *sizes], n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise BadInput(
        f"--params {text} is no known size. {hint}Known: {', '.join(KNOWN)}; a size alone means the first. "
        "For other models name a directory with a config.json: --model DIRECTORY."
    )


def find_shape(source: str, revision: str | None = None) -> Shape:
    """The shape of a model directory, of a well-known hub id, or of a hub id whose config.json is in the cache."""
    if Path(source).is_dir() or source.startswith((".", "/")):
        return _from_file(Path(source) / "config.json", source)
    for pattern, name in _HUB:
        if (match := pattern.fullmatch(source)) and (key := name.format(match[1])) in KNOWN:
            return replace(KNOWN[key], name=source)
    if cached := _cached(source, revision):
        return _from_file(cached, source)
    raise BadInput(
        f"the config of {source} is neither known nor in the hub's cache, and nothing is downloaded here. Name the "
        f"size of a similar model (--params 8b), or a directory (--model DIRECTORY), or fetch it once: "
        f"hf download {source} config.json"
    )


def config_shape(config: Config, facts: Facts | None = None) -> Shape:
    """The shape of a run's model; `facts` is its config.json or its language model's, if it was read already."""
    source, revision = config.model.source, config.model.revision
    if facts:
        shape = shape_from_facts(facts, source)
        return shape if shape.vision else replace(shape, vision=_vision_beside(source, revision, shape.hidden))
    config.model.check_path()
    return find_shape(source, revision)


def _vision_beside(source: str, revision: str | None, hidden: int) -> int:
    """Weights of the vision part in a model's config.json, in a directory or the hub's cache; 0 if there is none."""
    file = Path(source) / "config.json" if Path(source).is_dir() else _cached(source, revision)
    try:
        facts = read_facts(file) if file else {}
    except BadInput:
        return 0
    return vision_weights(facts.get("vision_config") or {}, hidden)


def _cached(source: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _from_file(file: Path, source: str) -> Shape:
    if not file.exists():
        raise BadInput(f"{file} does not exist. Name a model directory, a hub id, or a size (--params 8b).")
    facts = read_facts(file)
    return shape_from_facts(_completed(facts, file), source)


def _completed(facts: Facts, file: Path) -> Facts:
    """The content of a config.json with the defaults of the model's class, which only transformers knows, where the
    shape depends on keys that a file may leave out."""
    is_plain = not (facts.get("text_config") or find_experts(facts)) and "layer_types" not in facts
    is_plain = is_plain and not any(facts.get(key) for key in ("sliding_window", "full_attention_interval"))
    if is_plain and (not all(key in facts for key in _NEEDED) or "tie_word_embeddings" in facts):
        return facts
    from transformers import AutoConfig

    return from_files(
        "model config", file, lambda: AutoConfig.from_pretrained(file.parent, trust_remote_code=False).to_dict()
    )


def shape_from_facts(facts: Facts, source: str) -> Shape:
    """The shape that a config.json describes; raises a `BadInput` that says why a model is not covered.

    A wrapped configuration (`text_config`) gives the shape of its language model, with the weights of its
    `vision_config`.
    """
    inner = facts.get("text_config") or facts
    kind = inner.get("model_type", "unknown") if isinstance(inner, dict) else None
    if not isinstance(kind, str):
        raise BadInput(f"{source}: its config.json has the model_type {kind!r:.60}, which must be text.")
    if why := _too_large(facts) or _not_covered(inner):
        raise BadInput(f"{source} ({kind}) is not covered by the plan: {why}.")
    try:
        return _shape(facts, inner, kind, source)
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{source}: its config.json has values of the wrong type ({reason:.200}).") from None


def _shape(whole: Facts, facts: Facts, kind: str, source: str) -> Shape:
    heads, layers, kinds = facts["num_attention_heads"], facts["num_hidden_layers"], _layer_kinds(facts)
    tied = whole.get("tie_word_embeddings", facts.get("tie_word_embeddings"))
    return Shape(
        name=source,
        hidden=facts["hidden_size"],
        intermediate=facts.get("intermediate_size") or 0,
        layers=layers,
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or math.ceil(facts["hidden_size"] / heads),
        vocabulary=facts["vocab_size"],
        tied=bool(tied),
        positions=facts.get("max_position_embeddings") or LONGEST,
        qk_norm=kind.startswith(("qwen3", "gemma3", "gemma4")) or bool(facts.get("use_qk_norm")),
        qkv_bias=kind in QKV_BIAS or bool(facts.get("attention_bias")),
        gated=kind not in UNGATED,
        query_gate=kind.startswith(("qwen3_5", "qwen3_next")),
        norms=4 if kind in FOUR_NORMS else 2,
        window=facts.get("sliding_window") or 0,
        windowed=kinds["sliding_attention"],
        experts=_experts(facts) if find_experts(facts) else None,
        linear_attention=_linear_attention(facts, kinds["linear_attention"]),
        vision=vision_weights(whole.get("vision_config") or {}, facts["hidden_size"]),
        skips_down=kind in ENDS_WITH_RESIDUAL,
        soft_cap=bool(facts.get("attn_logit_softcapping")),
    )


def _too_large(facts: Any) -> str | None:
    """Which number of a config.json no model has: the plan counts layers, and multiplies sizes as floats."""
    for key, value in facts.items():
        if isinstance(value, dict) and (why := _too_large(value)):
            return why
        if isinstance(value, int | float) and not abs(value) < 2**31:
            return f"its config.json has {key} {value!r:.40}, which is no size of a model"
        if key in ("num_hidden_layers", "depth") and isinstance(value, int) and value > MOST_LAYERS:
            return f"its config.json has {key} {value:,}, more than {MOST_LAYERS:,}"
    return None


def _not_covered(facts: Facts) -> str | None:
    """Why the plan does not cover a model; None if it does."""
    kind, experts = facts.get("model_type", "unknown"), find_experts(facts)
    if missing := [key for key in _NEEDED if not _is_size(facts.get(key))]:
        return f"its config.json has no {missing[0]}, so it is no decoder of attention and MLP like Qwen or Llama"
    if not experts and not _is_size(facts.get("intermediate_size")):
        return "its config.json has no intermediate_size, the width of its MLP"
    for key in _SIZES_OF_MORE:
        if facts.get(key) and not _is_size(facts[key]):
            return f"its config.json has {key} {facts[key]!r:.60}, which is no number of at least 1"
    if kind in REFUSED:
        return REFUSED[kind]
    if facts.get("kv_lora_rank"):
        return f"its attention keeps a latent of keys and values (kv_lora_rank {facts['kv_lora_rank']})"
    if experts and kind not in EXPERTS_KNOWN:
        known = ", ".join(EXPERTS_KNOWN)
        return f"it is a mixture of experts ({experts}), and which layers have experts is known for {known} only"
    if not experts and kind not in DENSE:
        return f"it is none of the {len(DENSE)} dense families whose layers are known (DENSE in kit/plan/shapes.py)"
    if uneven := [key for key in UNEVEN if facts.get(key)]:
        return f"its layers differ in size or have weights beside attention and MLP ({uneven[0]} {facts[uneven[0]]})"
    if facts.get("global_head_dim") not in (None, facts.get("head_dim")):
        return f"its layers differ in the size of their heads (global_head_dim {facts['global_head_dim']})"
    if unknown := sorted(set(_layer_kinds(facts)) - set(LAYER_KINDS)):
        return f"its layer_types have {unknown[0]}; known are {', '.join(LAYER_KINDS)}"
    if _layer_kinds(facts)["linear_attention"] and not facts.get("linear_num_value_heads"):
        return "its linear attention is not the gated delta rule (linear_num_value_heads) of Qwen3.5 and Qwen3-Next"
    return None


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _layer_kinds(facts: Facts) -> Counter[str]:
    """Layers by kind of attention; `layer_types`, or all windowed if the model has a window, or all full."""
    has_window = bool(facts.get("sliding_window")) and facts.get("use_sliding_window") is not False
    if kinds := facts.get("layer_types"):
        found: Counter[str] = Counter(kinds)
        if not has_window:
            found["full_attention"] += found.pop("sliding_attention", 0)
        return found
    return Counter({"sliding_attention" if has_window else "full_attention": facts["num_hidden_layers"]})


def _experts(facts: Facts) -> Experts:
    """The routed experts of a model of `EXPERTS_KNOWN`."""
    layers, width = facts["num_hidden_layers"], facts.get("moe_intermediate_size") or facts["intermediate_size"]
    step, dense = facts.get("decoder_sparse_step") or 1, facts.get("mlp_only_layers") or []
    first = facts.get("first_k_dense_replace") or 0
    sparse = [n for n in range(first, layers) if n not in dense and (n + 1) % step == 0]
    counts = (facts.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    shared = facts.get("shared_expert_intermediate_size") or (facts.get("n_shared_experts") or 0) * width
    gated = bool(facts.get("shared_expert_intermediate_size"))
    count = next(int(one) for one in counts if one)
    return Experts(count, facts["num_experts_per_tok"], width, len(sparse), shared, gated)


def _linear_attention(facts: Facts, layers: int) -> LinearAttention | None:
    if not layers:
        return None
    return LinearAttention(
        layers,
        key_heads=facts["linear_num_key_heads"],
        value_heads=facts["linear_num_value_heads"],
        key_dim=facts["linear_key_head_dim"],
        value_dim=facts["linear_value_head_dim"],
        kernel=facts["linear_conv_kernel_dim"],
        fused=facts["model_type"] == "qwen3_next",
    )
