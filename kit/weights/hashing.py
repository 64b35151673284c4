"""Content hashes of tensors, as recorded in base.json."""

import hashlib
import json
from typing import Any

import torch

from kit.weights.shards import tensor_bytes

HASH_BYTES = 1 << 26  # largest slice converted to float32 at once while hashing


def hash_pairs(tensors: dict[str, str]) -> str:
    """Hash of the base: BLAKE2b-256 over the sorted (name, tensor hash) pairs."""
    text = "".join(f"{name} {value}\n" for name, value in sorted(tensors.items()))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def hash_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """BLAKE2b-128 of a tensor's shape and of its values in `dtype` (default: its own) as float32, which represents
    every bfloat16 and float16."""
    digest = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=16)
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), HASH_BYTES // 4):
        digest.update(tensor_bytes(flat[start : start + HASH_BYTES // 4].to(dtype or flat.dtype).float()))
    return digest.hexdigest()


def hash_quantized(packed: torch.Tensor, state: Any) -> str:
    """BLAKE2b-128 of a bitsandbytes 4-bit tensor: its packed bytes and everything that dequantization reads."""
    facts = [state.quant_type, list(state.shape), dtype_name(state.dtype), state.blocksize]
    parts = [packed, state.absmax, state.code]
    if state.nested:
        facts.append(state.state2.blocksize)
        parts += [state.offset, state.state2.absmax, state.state2.code]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for part in parts:
        digest.update(tensor_bytes(part))
    return digest.hexdigest()


def hash_fp8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> str:
    """BLAKE2b-128 of an FP8 weight: codes (out, in), one byte each, scales and the dtype that they dequantize to."""
    facts = ["fp8", list(codes.shape), dtype_name(dtype)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for part in (codes.view(torch.uint8), scale):
        digest.update(tensor_bytes(part))
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
