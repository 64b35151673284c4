"""Dimensions of a decoder, from its config alone: sizes known by name, a config.json, or the hub's cache."""

import difflib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.formats import find_experts
from kit.plan.sizes import Facts


@dataclass(frozen=True)
class Shape:
    """Dimensions of a dense decoder. Activations are counted as those of a gated MLP.

    `positions` is its longest context in tokens. `qk_norm`: query and key are normalized per head (Qwen3); `qkv_bias`:
    they have biases (Qwen2.5); `gated`: the MLP has a gate.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int
    qk_norm: bool = False
    qkv_bias: bool = False
    gated: bool = True

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of one layer's linear layers, by their last name."""
        h, f, q, kv = self.hidden, self.intermediate, self.q_size, self.kv_size
        attention = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        return attention | ({"gate_proj": (h, f)} if self.gated else {}) | {"up_proj": (h, f), "down_proj": (f, h)}

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers except the output layer: stored as NF4, and as FP8 on a server."""
        return self.layers * sum(ins * outs for ins, outs in self.linears.values())

    @property
    def other_weights(self) -> int:
        """Embedding, output layer, norms and biases: they stay in 16 bits everywhere."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden + self.layers * (norms + biases)

    @property
    def parameters(self) -> int:
        return self.linear_weights + self.other_weights

    @property
    def largest_linear(self) -> int:
        return max(ins * outs for ins, outs in self.linears.values())

    def adapter_weights(self, rank: int, targets: str | list[str]) -> int:
        """Weights of a LoRA on `targets` (all-linear, or last names of linear layers)."""
        chosen = self.targeted(targets)
        return self.layers * sum(rank * sum(self.linears[name]) for name in chosen)

    def targeted(self, targets: str | list[str]) -> list[str]:
        """The linear layers of a decoder layer that get an adapter; raises `BadInput` if a name matches none."""
        if isinstance(targets, str):
            return list(self.linears)
        names = [name.rpartition(".")[2] for name in targets]
        if unknown := sorted(set(names) - set(self.linears)):
            raise BadInput(
                f"policy.target_modules names {unknown[0]!r}; linear layers here are {', '.join(self.linears)}."
            )
        return [name for name in self.linears if name in names]


# Model types of transformers whose MLP is two linear layers without a gate.
UNGATED = ("apertus", "arcee", "biogpt", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi", "starcoder2")
LONGEST = 131072  # if a config.json names no limit
# From the config.json of each model on the hub: what a family has in common, and of each size
# hidden, intermediate, layers, heads, kv_heads, tied
_FAMILIES: dict[str, Facts] = {
    "qwen3": {"head_dim": 128, "vocabulary": 151936, "positions": 40960, "qk_norm": True},
    "qwen2.5": {"vocabulary": 152064, "positions": 32768, "qkv_bias": True},
    "llama3": {"vocabulary": 128256, "positions": 131072},
}
_SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
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
}


def _known(name: str) -> Shape:
    hidden, intermediate, layers, heads, kv_heads, tied = _SIZES[name]
    family = name.partition("-")[0]
    common: dict[str, Any] = {"head_dim": hidden // heads} | _FAMILIES[family]
    if family == "qwen2.5" and tied:
        common["vocabulary"] = 151936
    return Shape(name, hidden, intermediate, layers, heads, kv_heads, tied=tied, **common)


KNOWN = {name: _known(name) for name in _SIZES}
_HUB = (
    (re.compile(r"Qwen/Qwen3-([\d.]+)B(-Base)?"), "qwen3-{}b"),
    (re.compile(r"Qwen/Qwen2\.5-([\d.]+)B(-Instruct)?"), "qwen2.5-{}b"),
    (re.compile(r"meta-llama/(?:Meta-)?Llama-3\.[12]-(\d+)B(-Instruct)?"), "llama3-{}b"),
)
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


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
    """The shape of a run's model; `facts` is its config.json, if it was read already."""
    source = config.model.source
    if facts:
        return shape_from_facts(facts, source)
    config.model.check_path()
    return find_shape(source, config.model.revision)


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
    try:
        facts = json.loads(file.read_text())
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist. Name a model directory, a hub id, or a size (--params 8b).") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} is not JSON: {error}") from None
    if not isinstance(facts, dict):
        raise BadInput(f"{file} must hold a model's configuration; it holds {facts!r:.60}.")
    if all(key in facts for key in _NEEDED) and "tie_word_embeddings" not in facts:
        # A missing key means the default of the model's class, which only transformers knows.
        from transformers import AutoConfig

        facts["tie_word_embeddings"] = AutoConfig.from_pretrained(file.parent).tie_word_embeddings
    return shape_from_facts(facts, source)


def shape_from_facts(facts: Facts, source: str) -> Shape:
    """The shape that a config.json describes; raises a `BadInput` that says why a model is not covered."""
    kind = facts.get("model_type", "unknown")
    if experts := find_experts(facts):
        raise BadInput(
            f"{source} ({kind}) is a mixture of experts ({experts}), which plan and remerge do not cover: only some "
            "of its weights work on a token. Take a dense model."
        )
    if missing := [key for key in _NEEDED if not isinstance(facts.get(key), int)]:
        nested = ", its text part is nested (text_config)" if "text_config" in facts else ""
        raise BadInput(
            f"{source} ({kind}) has no {missing[0]} in its config.json{nested}. The plan covers dense decoders of "
            "attention and MLP: Qwen, Llama and the like."
        )
    heads = facts["num_attention_heads"]
    return Shape(
        name=source,
        hidden=facts["hidden_size"],
        intermediate=facts["intermediate_size"],
        layers=facts["num_hidden_layers"],
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or math.ceil(facts["hidden_size"] / heads),
        vocabulary=facts["vocab_size"],
        tied=bool(facts.get("tie_word_embeddings")),
        positions=facts.get("max_position_embeddings") or LONGEST,
        qk_norm=kind.startswith("qwen3"),
        qkv_bias=kind == "qwen2" or bool(facts.get("attention_bias")),
        gated=kind not in UNGATED,
    )
