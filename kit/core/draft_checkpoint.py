"""A checkpoint that drafts tokens for a replica (`server.draft_model`): its size, and why it cannot draft for a base.

Reads config.json, tokenizer.json and the headers of the weights. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.core.checkpoint_files import read_facts, read_header
from kit.core.config.schema import ServerConfig
from kit.core.errors import BadInput
from kit.core.file_kinds import TOKENIZER
from kit.core.formats import EXPERTS
from kit.core.run_files import read_optional

# Heads that were compared with the policy, by the first architecture of their config.json (vLLM 0.26 and 0.31).
HEADS = {
    "eagle": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
}
# Bases that hand their hidden states to such a head in vLLM 0.26 and 0.31, by model_type.
HEAD_BASES = ("llama", "mistral", "qwen2", "qwen3")
# Kinds of layers in `layer_types` that keep keys and values per token: a rejected draft leaves nothing behind.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class DraftCheckpoint:
    """`facts` are those of config.json's language model; `weights` counts parameters."""

    directory: Path
    facts: dict[str, Any]
    weights: int

    def cached_values(self) -> int:
        """Keys and values that its layers keep per token."""
        facts = self.facts
        heads = facts.get("num_attention_heads") or 1
        width = facts.get("head_dim") or (facts.get("hidden_size") or 0) // heads
        return 2 * (facts.get("num_hidden_layers") or 0) * (facts.get("num_key_value_heads") or heads) * width


def draft_directory(server: ServerConfig) -> Path:
    """Directory of `server.draft_model`, as servers name it."""
    return Path(server.draft_model or "").expanduser().resolve()


def read_draft(directory: Path) -> DraftCheckpoint:
    """Read a draft's facts; `BadInput` if the directory holds no checkpoint in safetensors."""
    if not directory.is_dir():
        raise BadInput(f"server.draft_model {directory} is not a directory. Download the checkpoint, or correct it.")
    facts = read_facts(directory / "config.json")
    return DraftCheckpoint(directory, dict(facts.get("text_config") or facts), count_weights(directory))


def count_weights(directory: Path) -> int:
    """Parameters in the safetensors of a directory; `BadInput` if there are none or a file is damaged."""
    count = 0
    for file in sorted(directory.glob("*.safetensors")):
        try:
            count += sum(math.prod(shape) for _, shape in read_header(file).tensors.values())
        except ValueError as error:
            raise BadInput(f"{file} is not a whole safetensors file: {error}. Download it again.") from None
    if not count:
        raise BadInput(f"{directory} has no weights in safetensors. Download the checkpoint again, or convert it.")
    return count


def recurrent_layers(facts: Mapping[str, Any]) -> list[str]:
    """Kinds of layers whose state vLLM does not take back when a draft is rejected: a step without drafts reads a
    stale one (vllm#52942)."""
    return sorted({*(facts.get("layer_types") or ())} - ATTENTION)


def draft_faults(draft: DraftCheckpoint, method: str, base: Path, facts: Mapping[str, Any]) -> list[str]:
    """Explain why a checkpoint cannot draft by `method` for the base in a directory; `facts` of its language model."""
    found, name = [], f"server.draft_model {draft.directory}"
    ours = draft.facts
    if (one := ours.get("vocab_size")) != (two := facts.get("vocab_size")):
        found.append(f"{name} has a vocabulary of {one} tokens, the base of {two}. Take a draft made for this base.")
    if layers := recurrent_layers(ours):
        found.append(f"{name} has layers of {', '.join(layers)}, whose state vLLM does not take back. Take another.")
    if any(ours.get(key) for key in EXPERTS):
        found.append(f"{name} is a mixture of experts, which was not tried as a draft. Take a dense one.")
    if draft.weights >= (whole := count_weights(base)):
        found.append(
            f"{name} has {draft.weights:,} weights, the base {whole:,}: it would cost more than it saves. Take a "
            "smaller one."
        )
    if method in HEADS:
        found += _head_faults(name, ours, method, facts)
    elif _vocabulary(draft.directory) not in (None, _vocabulary(base)):
        found.append(f"{name} has another tokenizer than the base: its ids are other words. Take one of its family.")
    return found


def _head_faults(name: str, ours: Mapping[str, Any], method: str, facts: Mapping[str, Any]) -> list[str]:
    """Explain why a head does not fit the hidden states of a base with `facts`."""
    found = []
    kind = (ours.get("architectures") or [None])[0]
    if kind not in HEADS[method]:
        found.append(
            f"{name} is a {kind}; heads of server.speculation {method} that were compared with the policy are "
            f"{' and '.join(HEADS[method])}."
        )
    if (base := facts.get("model_type")) not in HEAD_BASES:
        found.append(
            f"server.speculation is {method} and the base is a {base}: vLLM gives heads the hidden states of "
            f"{', '.join(HEAD_BASES)}. Set it to ngram, or to draft_model with a small model."
        )
    wanted = ours.get("target_hidden_size") or ours.get("hidden_size")
    if wanted != facts.get("hidden_size"):
        found.append(
            f"{name} reads hidden states of {wanted} values, the base's have {facts.get('hidden_size')}. Take a head "
            "made for this base."
        )
    if method == "eagle3":
        layers, own = facts.get("num_hidden_layers") or 0, ours.get("eagle_config") or {}
        ids = ours.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
        ids = list(ids or (2, layers // 2, layers - 3))  # vLLM's default
        if len(set(ids)) < len(ids) or not all(0 <= one <= layers for one in ids):
            found.append(
                f"{name} reads the hidden states before layers {', '.join(map(str, ids))}, which are not different "
                f"ones of the base's {layers}. Take a head made for this base."
            )
    return found


def _vocabulary(directory: Path) -> dict[str, Any] | None:
    """{token: id} of a directory's tokenizer.json; None without one."""
    return (read_optional(directory / "tokenizer.json", TOKENIZER).get("model") or {}).get("vocab")
