"""A frozen NF4 linear layer and its adapter as one autograd function, in BF16 or with the base's products in FP8.

`policy.compute: fused`. y = x Wᵀ + s (x Aᵀ) Bᵀ. W is dequantized for every product, in the forward pass and again in
the backward pass, and let go: what stays is x, which q, k and v share, and x Aᵀ. The adapter's part is added into y in
place; peft's path writes it, its multiple, a copy of the base's product and the sum.

`policy.compute: fp8`. The base's products are FP8 × FP8: W as vLLM's `fp8_per_channel` makes it of the dequantized
weight, so the bytes that a rollout server with that base multiplies with; x per token, as the server. Backward,
dX = g W = (g · s) W₈ with s the scales of W's output channels: with them in the gradient before it is quantized per
token, the same bytes of W serve. The adapter's products, and all gradients of it, stay in the compute dtype.

Written for peft 0.21, bitsandbytes 0.50 and torch 2.11 to 2.13. On a GPU the conversions are `fp8_kernel.py`'s; the
functions here define them. Without one, FP8 products are taken in float32 of the same FP8 numbers: exact and slow.
Not covered: dropout and variants of LoRA, a base that is split over processes, layers that are no Linear4bit.
"""

import warnings
import weakref
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import bnb as peft_bnb
from torch.autograd.function import once_differentiable

from recipes.parts.errors import BadInput

E4M3_MAX = 448.0
LEAST_SCALE = 1 / (E4M3_MAX * 512)  # vLLM's, of weights and activations
# A gradient is smaller than any activation: with vLLM's limit most of it would be zero. Above this one the division by
# the scale is exact in float32.
LEAST_GRADIENT_SCALE = 2.0**-80
MULTIPLE = 16  # torch._scaled_mm takes no other sizes
FEW_TOKENS = 64  # up to these bitsandbytes' own kernel multiplies with the packed bytes and dequantizes nothing
# Layers that are called with the same tensor, in the order of the calls.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
FP8_CAPABILITY = (8, 9)


def check_compute(compute: str, dtype: str) -> None:
    """`BadInput` when `policy.compute` is fp8 and this machine's GPU cannot; without a GPU it is emulated."""
    if compute != "fp8" or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if capability < FP8_CAPABILITY:
        raise BadInput(
            f"policy.compute is fp8 and {torch.cuda.get_device_name()} has no FP8 arithmetic (compute capability "
            f"{capability[0]}.{capability[1]}, needed 8.9). Use fused."
        )
    if dtype != "bfloat16":
        raise BadInput(
            f"policy.compute is fp8 and model.dtype is {dtype}: FP8 products with a scale per row come out in "
            "bfloat16 only. Use model.dtype bfloat16, or policy.compute fused."
        )


def use_fused_linears(model: torch.nn.Module, compute: str) -> int:
    """Make every NF4 linear layer of `model` compute as `compute` (fused or fp8) says; returns how many there are.

    Layers change their class and nothing else: names, tensors, `disable_adapter`, saving and loading stay. `BadInput`
    for an adapter that is not plain LoRA. With fp8, layers with a size that 16 does not divide are computed as fused,
    and a warning counts them.
    """
    memo, changed, odd = SharedInput(), 0, []
    wrapped = {id(module.base_layer) for module in model.modules() if isinstance(module, peft_bnb.Linear4bit)}
    for name, module in model.named_modules():
        if isinstance(module, peft_bnb.Linear4bit):
            _check_plain(name, module)
            module.__class__ = FusedLora
        elif isinstance(module, bnb.nn.Linear4bit) and id(module) not in wrapped:
            module.__class__ = FusedBase
        else:
            continue
        changed += 1
        layer = getattr(module, "base_layer", module)
        fits = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
        if compute == "fp8" and not fits:
            odd.append(name)
        leaf = name.rpartition(".")[2]
        group = next((group for group in SAME_INPUT if leaf in group), ())
        module.product = Product(
            layer, compute == "fp8" and fits, memo if group else None, is_last=bool(group) and leaf == group[-1]
        )
    if odd:
        warnings.warn(
            f"policy.compute fp8: {len(odd)} of {changed} linear layers have a size that {MULTIPLE} does not divide "
            f"and are computed as fused (first: {odd[0]}).",
            stacklevel=2,
        )
    return changed


def _check_plain(name: str, module: Any) -> None:
    for adapter in module.lora_A:
        dropout = getattr(module.lora_dropout[adapter], "p", 0.0)
        if dropout or adapter in module.lora_variant or module.lora_bias.get(adapter):
            raise BadInput(
                f"{name} has LoRA dropout, a bias or a variant of LoRA, which policy.compute fused and fp8 do not "
                "compute. Set policy.compute to plain."
            )


# What the numbers are. fp8_kernel.py does the same on a GPU.


def row_scales(value: torch.Tensor, floor: float) -> torch.Tensor:
    """The FP8 scale of every row of (T, n): its largest |value| / 448, at least `floor`; (T, 1) float32."""
    low, high = value.aminmax(dim=1, keepdim=True)
    peak = torch.maximum(low.abs(), high.abs()).float()
    # A tensor as divisor: with a number, PyTorch multiplies by its reciprocal.
    return (peak / torch.full((), E4M3_MAX, device=value.device)).clamp_min(floor)


def to_e4m3(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 codes of value (T, n) / scale (T, 1), divided in float32."""
    return (value.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_rows(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 codes (T, n), scale (T, 1)) of x (T, n), or of x · by_column (n values, float32), one scale per row.

    With the defaults, vLLM's dynamic quantization per token.
    """
    if x.is_cuda:
        from recipes.parts import fp8_kernel

        if x.shape[1] <= fp8_kernel.WIDEST:
            return fp8_kernel.quantize_rows(x, floor, by_column)
    return quantize_rows_in_torch(x, floor, by_column)


def quantize_rows_in_torch(
    x: torch.Tensor, floor: float = LEAST_SCALE, by_column: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantize_rows` is to return."""
    value = x if by_column is None else x.float() * by_column.view(1, -1)
    scale = row_scales(value, floor)
    return to_e4m3(value, scale), scale


def weight_of(layer: bnb.nn.Linear4bit, scale: torch.Tensor | None = None, transposed: bool = False) -> torch.Tensor:
    """The dequantized weight (out, in) in its storage dtype; with `scale` (out, 1), FP8 codes of weight / scale,
    stored as (in, out) when `transposed`."""
    packed, state = layer.weight.data, layer.weight.quant_state
    if packed.is_cuda and state.quant_type == "nf4" and not state.shape[1] % state.blocksize:
        from recipes.parts import fp8_kernel

        blocks = (state.blocksize, state.state2.blocksize if state.nested else fp8_kernel.NESTED_BLOCK)
        if blocks == (fp8_kernel.BLOCK_SIZE, fp8_kernel.NESTED_BLOCK):
            return fp8_kernel.unpack(packed, state, scale, transposed)
    return weight_in_torch(layer, scale, transposed)


def weight_in_torch(
    layer: bnb.nn.Linear4bit, scale: torch.Tensor | None = None, transposed: bool = False
) -> torch.Tensor:
    """What `weight_of` is to return."""
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    if scale is None:
        return weight
    codes = to_e4m3(weight, scale)
    return codes.t().contiguous() if transposed else codes


def scaled_product(
    left: torch.Tensor, right: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(left · rightᵀ) · rows · columns in `dtype`: left (T, k), right (n, k) in FP8, rows (T, 1), columns (1, n)."""
    if left.is_cuda:
        # Fast accumulation is what the server's kernel uses, and torch's kernels for scales per row are slow without.
        return torch._scaled_mm(left, right.t(), rows, columns, out_dtype=dtype, use_fast_accum=True)
    return ((left.float() @ right.float().t()) * rows * columns).to(dtype)


class SharedInput:
    """The FP8 form of the last input, for the other layers that are called with the same tensor; kept until the last
    of them took it, and never longer than the next input's."""

    def __init__(self) -> None:
        self._kept: tuple | None = None

    def quantize(self, x: torch.Tensor, rows: torch.Tensor, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`quantize_rows(rows)`, `rows` being x (…, n) as (T, n) in the compute dtype."""
        version = None if x.is_inference() else x._version
        kept, found = self._kept, None
        if kept is not None and version is not None and kept[0]() is x and kept[1:3] == (version, rows.dtype):
            found = kept[3]
        found = found or quantize_rows(rows)
        self._kept = None if is_last or version is None else (weakref.ref(x), version, rows.dtype, found)
        return found


class Product:
    """The products of one layer's base with an input and with a gradient, both (T, n) in the compute dtype."""

    def __init__(self, layer: bnb.nn.Linear4bit, is_fp8: bool, memo: SharedInput | None, is_last: bool):
        self.layer, self.is_fp8, self._memo, self._is_last = layer, is_fp8, memo, is_last
        self._scale: torch.Tensor | None = None

    def scale(self) -> torch.Tensor:
        """(out, 1) float32; kept, 4 bytes a channel, because finding it takes as long as using it."""
        device = self.layer.weight.device
        if self._scale is None or self._scale.device != device:
            with torch.no_grad():
                self._scale = row_scales(weight_in_torch(self.layer), LEAST_SCALE)
        return self._scale

    def quantized(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._memo is None:
            return quantize_rows(rows)
        return self._memo.quantize(x, rows, self._is_last)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """rows · Wᵀ + bias (T, out); `rows` is x as (T, in)."""
        bias = self.layer.bias
        if not self.is_fp8 or not len(rows):
            weight = weight_of(self.layer).to(rows.dtype)
            return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(rows.dtype))
        codes, by_token = self.quantized(x, rows)
        scale = self.scale()
        y = scaled_product(codes, weight_of(self.layer, scale), by_token, scale.view(1, -1), rows.dtype)
        return y if bias is None else y.add_(bias)

    def backward(self, g: torch.Tensor) -> torch.Tensor:
        """g · W (T, in)."""
        if not self.is_fp8 or not len(g):
            return g @ weight_of(self.layer).to(g.dtype)
        scale = self.scale()
        codes, by_token = quantize_rows(g, LEAST_GRADIENT_SCALE, scale)
        weight = weight_of(self.layer, scale, transposed=True)
        return scaled_product(codes, weight, by_token, scale.new_ones(1, len(weight)), g.dtype)


class _Linear(torch.autograd.Function):
    """base(x) + scaling · (x aᵀ) bᵀ, or base(x) where a and b are None; x (…, in), a (r, in), b (out, r)."""

    @staticmethod
    def forward(ctx, x, a, b, scaling, product, dtype):
        with torch.autocast(x.device.type, enabled=False):
            rows, xa = x.reshape(-1, x.shape[-1]).to(dtype), None
            y = product.forward(x, rows)
            if a is not None:
                xa = rows @ a.to(dtype).t()  # (T, r)
                y.addmm_(xa, b.to(dtype).t(), alpha=scaling)
            ctx.save_for_backward(x if a is not None else None, a, b, xa)
            ctx.scaling, ctx.product, ctx.dtype, ctx.x_type, ctx.shape = scaling, product, dtype, x.dtype, x.shape
            # Not a view: autograd would refuse to let a layer change it in place.
            return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, a, b, xa = ctx.saved_tensors
        dx = da = db = gb = None
        with torch.autocast(g.device.type, enabled=False):
            g = g.reshape(-1, g.shape[-1]).to(ctx.dtype)
            if a is not None:
                gb = g @ b.to(ctx.dtype)  # (T, r)
            if ctx.needs_input_grad[0]:
                dx = ctx.product.backward(g)
                if a is not None:
                    dx.addmm_(gb, a.to(ctx.dtype), alpha=ctx.scaling)
                dx = torch.ops.aten._unsafe_view(dx, ctx.shape).to(ctx.x_type)
            if ctx.needs_input_grad[1]:
                rows = x.reshape(-1, x.shape[-1]).to(ctx.dtype)
                da = _gradient(gb.t(), rows, ctx.scaling, a.dtype)
            if ctx.needs_input_grad[2]:
                db = _gradient(g.t(), xa, ctx.scaling, b.dtype)
        return dx, da, db, None, None, None


def _gradient(left: torch.Tensor, right: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """scaling · left · right in `dtype`; a float32 gradient is not rounded to the compute dtype on its way."""
    if left.is_cuda and dtype == torch.float32 and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype).mul_(scaling)
    return (left @ right).to(dtype).mul_(scaling)


def _takes_own_kernel(product: Product, x: torch.Tensor) -> bool:
    """Whether bitsandbytes multiplies a few tokens, as in generation, faster than after dequantizing all of W."""
    few = x.is_cuda and x.numel() <= FEW_TOKENS * x.shape[-1]
    return few and not product.is_fp8 and not torch.is_grad_enabled()


class FusedLora(peft_bnb.Linear4bit):
    """peft's layer with this module's products; merged weights and adapters per row stay peft's."""

    product: Product

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A] if not self.disable_adapters else []
        if args or kwargs or self.merged or len(active) > 1 or _takes_own_kernel(self.product, x):
            return super().forward(x, *args, **kwargs)
        dtype = self.product.layer.compute_dtype or x.dtype
        if not active:
            return _Linear.apply(x, None, None, 0.0, self.product, dtype)
        a, b = self.lora_A[active[0]].weight, self.lora_B[active[0]].weight
        return _Linear.apply(x, a, b, self.scaling[active[0]], self.product, dtype)


class FusedBase(bnb.nn.Linear4bit):
    """A linear layer without an adapter."""

    product: Product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _takes_own_kernel(self.product, x):
            return super().forward(x)
        return _Linear.apply(x, None, None, 0.0, self.product, self.compute_dtype or x.dtype)
