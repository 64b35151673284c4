"""Quantize one weight to NF4 piece by piece, exactly as bitsandbytes does, and dequantize it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# transformers 5.17 builds Linear4bit without a block size, so Params4bit's default is the only one it loads.
BLOCK_SIZE = 64
# Values quantized, dequantized or folded at once, on a CPU and on a GPU: whole blocks, whole bytes.
PIECE = (1 << 22, 1 << 24)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Quantize with one CPU thread. Double quantization takes a mean, which is a float sum: its last bit, and so the
    base's hash, would depend on the number of threads (measured with torch 2.13 at 49,152 blocks)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def quantize_weight(
    weight: torch.Tensor,
    double_quantization: bool,
    offset: float | None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, Any]:
    """Return (packed bytes, quant state) of a weight, equal to loading it with transformers in `dtype` on `device`.

    `offset` is the recorded mean of the block maxima (`offsets` in base.json); None computes it on this machine.
    `dtype` and `device` default to the weight's own. Blocks are independent, so the weight is quantized in pieces; on
    a CPU this takes some 20 bytes per value of a piece.
    """
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise

    flat, device, dtype = weight.reshape(-1), device or weight.device, dtype or weight.dtype
    size, step = flat.numel(), PIECE[torch.device(device).type == "cuda"]
    packed = torch.empty((-(-size // 2), 1), dtype=torch.uint8, device=device)
    absmax = torch.empty(-(-size // BLOCK_SIZE), dtype=torch.float32, device=device)
    facts = {"shape": weight.shape, "dtype": dtype, "blocksize": BLOCK_SIZE, "quant_type": "nf4"}
    facts["code"] = get_4bit_type("nf4", device=device)
    with one_thread() if offset is None else contextlib.nullcontext():
        for at in range(0, size, step):
            piece = flat[at : at + step].to(device).to(dtype)
            part, state = quantize_4bit(piece, blocksize=BLOCK_SIZE, compress_statistics=False, quant_type="nf4")
            packed[at // 2 : at // 2 + part.numel()] = part
            absmax[at // BLOCK_SIZE : at // BLOCK_SIZE + state.absmax.numel()] = state.absmax
        if not double_quantization:
            return packed, QuantState(absmax=absmax, **facts)
        mean = absmax.mean() if offset is None else torch.tensor(offset, dtype=absmax.dtype, device=device)
        nested_absmax, nested = quantize_blockwise(absmax - mean, blocksize=256)
    return packed, QuantState(absmax=nested_absmax, offset=mean, state2=nested, **facts)


def block_maxima(state: Any) -> torch.Tensor:
    """Float32 block maxima (blocks,) of a quant state; double quantization is undone as bitsandbytes does it."""
    from bitsandbytes.functional import dequantize_blockwise

    if not state.nested:
        return state.absmax
    return (dequantize_blockwise(state.absmax, state.state2) + state.offset).float()


def dequantize_with(packed: torch.Tensor, absmax: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Weight of `shape` in the storage dtype, dequantized from its packed bytes and plain block maxima."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    plain = QuantState(absmax, shape=torch.Size(shape), dtype=dtype, blocksize=BLOCK_SIZE, quant_type="nf4")
    return dequantize_4bit(packed, plain)
