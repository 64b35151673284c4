"""`rollout.keep_weights`: dequantize each weight once per rollout instead of for every product.

Decoding is one product per layer and token, and an NF4 layer dequantizes its whole weight for each of them. Within
`keeping_weights` every layer computes its weight at its first product and multiplies with that tensor until the block
ends: the dequantized base, FP8 codes of it (`policy.compute: fp8`), or the weight with the adapter in a deployment
format (`policy.quant_cfg`).

Exact: the adapter stays unmerged, and the products are those that bitsandbytes, peft and fused_linear.py compute from
the same weight. On a CPU every sampled token and log-prob is bit for bit the same as without. On a GPU bitsandbytes
multiplies a few rows with a kernel that dequantizes on the fly and rounds differently; up to `fused_linear.FEW_KEPT`
rows are left to it, and more are computed as in the update. Packed bytes, quant states and the base's hash are not
touched.

Not covered: bases in FP8 or unquantized without `policy.quant_cfg` (nothing is kept), bases split over processes by
FSDP or ZeRO-3 (never kept; checks.py refuses `always`).
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import bitsandbytes as bnb
import torch
from peft.tuners.lora import bnb as peft_bnb

from kit.policy import fused_linear, quantized_linear
from kit.policy.host_memory import available_gib, release_freed
from kit.weights.experts import FrozenExperts, experts_of
from kit.weights.nf4 import block_maxima
from kit.weights.stored_weight import Layer

ROOM_FOR_KEPT = 0.5  # share of the memory that generation leaves free
GIB = 2**30


class Room(NamedTuple):
    """GiB needed to keep the weights, GiB that this process may still allocate, and whether they are kept."""

    needed_gib: float
    free_gib: float
    is_kept: bool

    def __str__(self) -> str:
        verb = "keep" if self.is_kept else "do not keep"
        size = f"{self.needed_gib:.2f} GiB of {self.free_gib:.1f} GiB free"
        return f"rollouts {verb} the weights they multiply with: {size} (rollout.keep_weights)"


def decoding_gib(model: torch.nn.Module, rows: int, tokens: int) -> float:
    """Peak GiB of generating `rows` sequences of at most `tokens`: the KV cache, which grows by copying one layer's
    part, and four float32 copies of the last logits."""
    facts = model.config.get_text_config()
    heads = getattr(facts, "num_key_value_heads", None) or facts.num_attention_heads
    size = getattr(facts, "head_dim", None) or facts.hidden_size // facts.num_attention_heads
    cache = rows * tokens * 2 * (facts.num_hidden_layers + 1) * heads * size * model.dtype.itemsize
    return (cache + rows * facts.vocab_size * 4 * 4) / GIB


def room_for(model: torch.nn.Module, mode: str = "auto", rows: int = 0, tokens: int = 0) -> Room | None:
    """Return the memory needed to keep the weights of `model`, and whether `mode` (`rollout.keep_weights`) keeps them;
    None if there is nothing to keep. Free memory excludes what generating `rows` sequences of at most `tokens` takes.
    """
    layers, experts = _layers(model), _experts(model)
    if not layers:
        return None
    device = layers[0].weight.device
    is_quantized = quantized_linear.quantizers_of(model) is not None
    size = sum(_bytes(layer, is_quantized) for layer in layers)
    needed = (size + sum(one.dequantized_bytes() for one in experts)) / GIB
    free = max(0.0, free_gib(device) - (decoding_gib(model, rows, tokens) if rows else 0.0))
    return Room(needed, free, mode == "always" or (mode == "auto" and needed <= ROOM_FOR_KEPT * free))


def free_gib(device: torch.device) -> float:
    """GiB that this process may still allocate: on a GPU within `train.max_gpu_gib`, on a host its share of what is
    available to all processes of the run on it."""
    if device.type != "cuda":
        return available_gib() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, total = torch.cuda.mem_get_info(device)
    # Memory that the allocator holds unused is also free to this process.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limit = total * torch.cuda.get_per_process_memory_fraction(device)  # train.max_gpu_gib
    return min(free, limit - torch.cuda.memory_allocated(device)) / GIB


@contextlib.contextmanager
def keeping_weights(
    model: torch.nn.Module, mode: str = "auto", rows: int = 0, tokens: int = 0
) -> Iterator[Room | None]:
    """Keep the weights that `model` multiplies with until the block exits; yields the decision, None if there is
    nothing to keep. Arguments as in `room_for`.

    The weights of `model` must not change within the block, except an adapter's under `policy.quant_cfg`.
    """
    room = room_for(model, mode, rows, tokens)
    if room is None or not room.is_kept:
        yield room
        return
    if (quantizers := quantized_linear.quantizers_of(model)) is not None:
        with quantized_linear.keeping_quantized(model, quantizers):
            yield room
        return
    layers, experts, adapted = _layers(model), _experts(model), _adapted(model)
    try:
        for one in experts:
            one.kept = {}
        for layer in layers:
            layer.kept = {}
            if type(layer) is bnb.nn.Linear4bit:  # fused_linear.py's own classes check `kept` themselves
                layer.__dict__["forward"] = functools.partial(_forward, layer)
        for layer in adapted:
            layer.__dict__["forward"] = functools.partial(_adapted_forward, layer, _plain_adapters(layer))
        yield room
    finally:
        for one in experts:
            one.kept = None
        for layer in layers:
            layer.__dict__.pop("kept", None)
            layer.__dict__.pop("forward", None)
        for layer in adapted:
            layer.__dict__.pop("forward", None)
        if layers[0].weight.device.type == "cpu":
            release_freed()  # otherwise the memory of weights and KV cache stays allocated during the update


def _layers(model: torch.nn.Module) -> list[Layer]:
    """Layers whose weight is computed for every product."""
    if quantized_linear.quantizers_of(model) is not None:
        return [module.product.layer for module in quantized_linear.quantized_layers(model).values()]
    found = [one for one in model.modules() if isinstance(one, bnb.nn.Linear4bit)]
    # Skip layers whose forward something else has replaced.
    return [one for one in found if "forward" not in vars(one) and one.weight.quant_state is not None]


def _adapted(model: torch.nn.Module) -> list[peft_bnb.Linear4bit]:
    """peft's layers around such layers."""
    found = [one for one in model.modules() if type(one) is peft_bnb.Linear4bit]
    return [one for one in found if "forward" not in vars(one) and type(one.base_layer) is bnb.nn.Linear4bit]


def _experts(model: torch.nn.Module) -> list[FrozenExperts]:
    """Experts whose weights are dequantized for every product."""
    return [one for one in experts_of(model).values() if one.storage == "nf4"]


def _bytes(layer: Layer, is_quantized: bool) -> int:
    dtype = getattr(layer, "compute_dtype", None) or getattr(layer, "storage_dtype", None)
    if dtype is None:
        state = getattr(layer.weight, "quant_state", None)
        dtype = layer.weight.dtype if state is None else state.dtype
    product = getattr(layer, "product", None)
    is_fp8 = not is_quantized and getattr(product, "is_fp8", False)
    return layer.in_features * layer.out_features * (1 if is_fp8 else dtype.itemsize)


def _forward(layer: bnb.nn.Linear4bit, x: torch.Tensor) -> torch.Tensor:
    """bitsandbytes' `Linear4bit.forward` (0.50) with the kept weight. Falls back to the layer's own forward if a
    gradient is needed, and for a few rows on a GPU."""
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or getattr(layer.bias, "requires_grad", False))
    if needs_gradient or not layer.compute_type_is_set or fused_linear.is_few(x, fused_linear.FEW_KEPT):
        return type(layer).forward(layer, x)
    dtype = layer.compute_dtype or x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return torch.nn.functional.linear(x.to(dtype), _weight(layer, dtype), bias).to(x.dtype)


class _Adapter:
    """One plain adapter of a layer, y += scaling · (x Aᵀ) Bᵀ, and its factors in the dtype of the products."""

    def __init__(self, module: peft_bnb.Linear4bit, name: str):
        self.down, self.up = module.lora_A[name].weight, module.lora_B[name].weight
        self.scaling = module.scaling[name]
        # Multiplying by a power of two rounds nothing, so B may be scaled in place of its products.
        self.is_exact = math.frexp(self.scaling)[0] == 0.5
        self._kept: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's contribution for x, as peft computes it."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.down.dtype
        if dtype not in self._kept:
            up = self.up * self.scaling if self.is_exact else self.up
            self._kept[dtype] = self.down.to(dtype), up.to(dtype)
        down, up = self._kept[dtype]
        update = torch.nn.functional.linear(torch.nn.functional.linear(x, down), up)
        return update if self.is_exact else update.mul_(self.scaling)


def _plain_adapters(module: peft_bnb.Linear4bit) -> dict[str, _Adapter]:
    """The adapters of a layer without dropout, bias or a variant of LoRA."""
    return {
        name: _Adapter(module, name)
        for name in module.lora_A
        if name not in module.lora_variant
        and not getattr(module.lora_dropout[name], "p", 0.0)
        and module.lora_B[name].bias is None
    }


def _adapted_forward(
    module: peft_bnb.Linear4bit, plain: dict[str, _Adapter], x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """peft's `Linear4bit.forward` (0.21) without gradients, for one adapter of `plain`: the same sums without the copy
    of the base's output, and fewer calls of modules. Falls back to peft's otherwise."""
    names = module.active_adapters
    is_one = len(names) == 1 and names[0] in plain and not (module.disable_adapters or module.merged)
    if not is_one or args or kwargs or torch.is_grad_enabled():
        return type(module).forward(module, x, *args, **kwargs)
    y, adapter = module.base_layer.forward(x), plain[names[0]]
    if torch.is_autocast_enabled():
        update = adapter.update(x)
    else:
        update = adapter.update(module._cast_input_dtype(x, adapter.down.dtype)).to(y.dtype)
    return y.add_(update) if update.dtype == y.dtype else y + update


def _weight(layer: bnb.nn.Linear4bit, dtype: torch.dtype) -> torch.Tensor:
    """Weight (out, in), dequantized directly to `dtype` as in bitsandbytes' product."""
    if dtype not in layer.kept:
        state = layer.weight.quant_state
        layer.kept[dtype] = torch.ops.bitsandbytes.dequantize_4bit.default(
            layer.weight.data.view(-1, 1), block_maxima(state), state.blocksize, state.quant_type, state.shape, dtype
        )
    return layer.kept[dtype]
