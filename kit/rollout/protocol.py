"""What a trainer and its rollout servers agree on: routes, fields of requests and answers, layout of an adapter file.

Both halves import it: `replica.py` asks what `server/endpoint.py` answers, and `adapter_file.py` writes what the
server reads. Token ids travel as base64 of little-endian int32 and log-probs as base64 of little-endian float32, so a
NaN arrives as a NaN and no number is formatted and parsed again. Needs numpy to encode, no torch and no vLLM.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

if TYPE_CHECKING:
    import numpy as np

PROTOCOL = 2
PREFIX = "/v1/rollout"  # below /v1, so vLLM's API key guards it
# Route -> HTTP method.
ROUTES = {"info": "GET"} | dict.fromkeys(
    ("generate", "score", "stage", "activate", "discard", "noise", "sleep", "wake", "share"), "POST"
)
BINARY = "application/octet-stream"  # content type of a stage request whose body is the adapter file
Way = Literal["adapter", "remerge"]  # how a server serves an adapter
WAYS: tuple[Way, ...] = get_args(Way)

# An adapter directory, and the metadata of its weights: the text of adapter_config.json, so that the file alone is an
# adapter; for a quantized policy also the format's name and JSON {layer: largest |input|}.
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
CONFIG_TEXT, QUANT_CFG, INPUT_PEAKS = "adapter_config", "quant_cfg", "input_peaks"
TENSORS = "base_model.model."  # then layer.lora_A.weight, layer.lora_B.weight


class Sampling(TypedDict):
    """Fields of a generate request that say how to sample; `stop_token_ids` and `stop`, the stop texts, are
    optional."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int


NUMBERS: dict[str, type | tuple[type, ...]] = {
    "n": int,
    "max_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
}


class Served(TypedDict):
    """The version that a server serves."""

    way: Way
    session: str
    version: int


class Speculation(TypedDict):
    """Settings of a server's speculative decoding (`server.speculation` and its keys)."""

    method: str
    draft_tokens: int
    ngram_min: int  # 0, and so is the next, unless n-grams draft
    ngram_max: int
    model: str | None  # directory of the checkpoint that drafts


class Drafted(TypedDict):
    """Tokens since the start of a server: drafted, accepted among them, and generated in all."""

    drafted: int
    accepted: int
    generated: int


class Info(TypedDict):
    """Answer of `info`: what a server holds, serves and supports."""

    protocol: int
    vllm: str
    model: str
    base_hash: str | None
    weights: str  # vLLM's quantization, bf16 or float32
    product: str | None  # what remerge's workers multiply: W8A8, W8A16, W16A16; None: not known
    is_forced: bool  # server.force_w8a16
    quant_cfg: str | None
    kv_cache: str  # vLLM's name of the dtype
    attention_backend: str | None  # set for the server, e.g. FLASHINFER; None: vLLM's choice
    prefix_caching: bool  # whether a prompt computes only what the KV cache lacks
    speculation: Speculation | None
    drafted: Drafted | None  # None: no speculation, or no counters
    logprobs_mode: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    tokenizer_hash: str | None
    tensor_parallel: int
    sync: list[Way]
    refused: dict[Way, str]  # why a way is not in `sync`
    max_lora_rank: int | None
    modules: list[str] | None  # layers that an adapter may target in every way; None: not known
    served: Served | None
    noise: dict[str, float] | None
    damaged: str | None
    sleep_enabled: bool
    asleep: bool
    pid: int


def encode_ids(ids: "Sequence[int] | np.ndarray") -> str:
    """Token ids as base64 of little-endian int32."""
    return _encode(ids, "<i4")


def decode_ids(text: str) -> "np.ndarray":
    """(T,) int32 from `encode_ids`; ValueError for anything else."""
    return _decode(text, "<i4")


def encode_floats(values: "Sequence[float] | np.ndarray") -> str:
    """Log-probs as base64 of little-endian float32; NaN and infinities survive."""
    return _encode(values, "<f4")


def decode_floats(text: str) -> "np.ndarray":
    """(T,) float32 from `encode_floats`; ValueError for anything else."""
    return _decode(text, "<f4")


class Experts(TypedDict):
    """Experts that a sample's tokens took: base64 of little-endian int16, and the shape (T, L, k): tokens that the
    model read (prompt and completion, without its last), decoder layers in order (what those without experts have is
    not read), experts of a token."""

    data: str
    shape: list[int]


def encode_experts(values: "np.ndarray") -> Experts:
    """Experts (T, L, k) of one sample."""
    return {"data": _encode(values, "<i2"), "shape": list(values.shape)}


def decode_experts(found: Experts) -> "np.ndarray":
    """(T, L, k) int16 from `encode_experts`; ValueError for anything else."""
    if not isinstance(found, dict) or len(shape := list(found.get("shape") or ())) != 3:
        raise ValueError("experts have no shape (T, L, k)")
    return _decode(found.get("data", ""), "<i2").reshape(shape)


def _encode(values: "Sequence[float] | np.ndarray", dtype: str) -> str:
    import numpy as np

    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode()


def _decode(text: str, dtype: str) -> "np.ndarray":
    import numpy as np

    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (binascii.Error, TypeError) as error:
        raise ValueError(f"not base64: {error}") from None
