"""When `server.kv_cache: fastest` is an FP8 KV cache read by FlashInfer: where bench/STEP.md measured it to be faster,
and only there. Imports no torch.

`model_dtype_because` reads configuration, GPU and model; whether FlashInfer can start is known on the server's machine
only (`launch/kv_cache.py`). The kernels are those of flashinfer-python 0.6 as vLLM 0.26 to 0.31 call them on Hopper.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kit.core.cards import GENERATIONS, W8A8, generation
from kit.core.config.card_rules import served_product
from kit.core.config.schema import Config

FASTEST, MODEL_DTYPE, FP8 = "fastest", "auto", "fp8"  # values of server.kv_cache; the last two are vLLM's
FLASHINFER = "FLASHINFER"  # vLLM's name of the attention backend
# The measured point: tokens of a completion, completions at once on a replica, the dimension of a head.
LONG, AT_ONCE, HEAD_DIM = 4096, 16, 128
# Flags of `server.vllm` that choose the attention's kernels themselves.
ATTENTION_FLAGS = {"attention_backend", "attention_config", "block_size", "decode_context_parallel_size", "dcp"}


@dataclass(frozen=True)
class Attention:
    """A model's attention. `is_plain`: every layer attends to all tokens, with keys and values per head, without sinks
    or capped scores."""

    heads: int
    kv_heads: int
    head_dim: int
    is_plain: bool


def attention_of(facts: Mapping[str, Any]) -> Attention | None:
    """Read the attention of a language model from its config.json; None if that names no heads."""
    heads = facts.get("num_attention_heads")
    if not heads or not facts.get("hidden_size"):
        return None
    has_window = facts.get("sliding_window") and facts.get("use_sliding_window", True)
    others = any(facts.get(key) for key in ("kv_lora_rank", "attn_logit_softcapping", "full_attention_interval"))
    return Attention(
        heads=heads,
        kv_heads=facts.get("num_key_value_heads") or heads,
        head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
        is_plain=not has_window and not others and {*(facts.get("layer_types") or ())} <= {"full_attention"},
    )


def model_dtype_because(config: Config, capability: tuple[int, int] | None, attention: Attention | None) -> str:
    """Explain why `server.kv_cache: fastest` stays in the model's dtype; empty if FP8 by FlashInfer was measured to
    be faster. None stands for a GPU or a model that is not known."""
    server, rollout, policy = config.server, config.rollout, config.policy
    set_by_user = sorted({str(key).replace("-", "_").partition(".")[0] for key in server.vllm} & ATTENTION_FLAGS)
    if set_by_user:
        return f"server.vllm sets {', '.join(set_by_user)}"
    if rollout.max_completion_length < LONG:
        return f"completions of {rollout.max_completion_length} tokens, measured to be faster from {LONG:,}"
    if (count := completions_at_once(config)) < AT_ONCE:
        return f"{count} completions at once on a replica, measured to be faster from {AT_ONCE}"
    if capability is None:
        return "the GPU is not known here"
    if not generation(capability).fp8_cache_wins:
        measured = ", ".join(row.name for row in GENERATIONS if row.fp8_cache_wins)
        return f"compute capability {'.'.join(map(str, capability))}, measured to be faster on {measured} only"
    if policy.quant_cfg is not None:
        return f"policy.quant_cfg {policy.quant_cfg} determines what the replicas round"
    product, _ = served_product(config, capability)
    if product != W8A8:
        return f"server.weights {server.weights} ({product}), measured with FP8 weights and inputs (W8A8)"
    if config.model.dtype == "float16":
        return "model.dtype float16, measured in bfloat16"
    if server.tensor_parallel > 1:
        return f"server.tensor_parallel {server.tensor_parallel}, measured with a GPU per replica"
    if server.speculation != "none":
        return f"server.speculation {server.speculation}, measured without drafts"
    if attention is None:
        return "the model's config.json is not there yet"
    if not attention.is_plain:
        return "the model has layers other than full attention, measured with full attention only"
    if attention.head_dim != HEAD_DIM or attention.heads % attention.kv_heads:
        return f"heads of {attention.head_dim}, measured with heads of {HEAD_DIM}"
    return ""


def completions_at_once(config: Config) -> int:
    """Count the completions of a step on a replica at once, as far as the configuration tells: of one trainer
    process without `train.gpus`."""
    train, server = config.train, config.server
    processes = len(train.gpus or [0])
    step = train.per_device_train_batch_size * train.gradient_accumulation_steps * processes
    return min(server.max_num_seqs, step // max(1, len(config.rollout.server_urls)))


def called(dtype: str, backend: str | None) -> str:
    """Name a KV cache's dtype and its attention, as server, trainer and metrics.jsonl do."""
    return f"{dtype} ({backend})" if backend else dtype
