"""A frozen linear layer and its adapter as one autograd function, in BF16 or with the base's products in FP8.

`policy.compute: fused`. y = x Wᵀ + s (x Aᵀ) Bᵀ. Unless W is unquantized, it is dequantized for every product, in the
forward pass and again in the backward pass, and then released. Only x, which q, k and v share, and x Aᵀ are saved. The
adapter's part is added to y in place; peft's path writes it, its multiple, a copy of the base's product and the sum.

`policy.compute: fp8`. The base's products are FP8 × FP8. W is quantized from the dequantized weight as in vLLM's
`fp8_per_channel`, which gives the bytes that a rollout server with that base multiplies with; an FP8 base is used in
its stored bytes. x is quantized per token, as on the server. Backward, dX = g W = (g · s) W₈ with s the scales of W's
output channels: they are multiplied into the gradient before it is quantized per token, so the same bytes of W serve.
The adapter's products, and all its gradients, stay in the compute dtype.

Layers with the same input (q, k, v; gate, up) are one autograd function: the first layer's call computes for all, the
others pick up their precomputed outputs. x is quantized once, and the adapters' products with x, their A's gradients
and their contributions to dX are one product each. With fp8, dX of such a group is one product too,
[g₁ · s₁, g₂ · s₂, …] [W₁; W₂; …]: a token's gradients of all the group's layers share one FP8 scale. A layer that is
called with another input, twice, or with settings that differ from those the first call saw, computes by itself.

Written for peft 0.21, bitsandbytes 0.50 and torch 2.11 to 2.13. On a GPU the conversions are `fp8_kernel.py`'s; the
functions here are their reference implementation. Without a GPU, FP8 products are computed in float32 from the same
FP8 numbers: exact and slow. If the base is split over processes, a decoder layer's weights are there while it computes
(`sharding.py`). Not covered: LoRA dropout and variants.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import bitsandbytes as bnb
import torch
from peft.tuners.lora import bnb as peft_bnb
from peft.tuners.lora import layer as peft_layer
from torch.autograd.function import once_differentiable

from kit.core.errors import BadInput
from kit.core.limits import KERNEL_RANK
from kit.policy.recompute import base_product
from kit.weights.fp8 import LEAST_SCALE, Fp8Linear, row_scales
from kit.weights.frozen_base import stored_linears
from kit.weights.stored_weight import (
    MULTIPLE,
    Layer,
    quantize_gradients,
    quantize_rows,
    scaled_product,
    weight_in_torch,
    weight_of,
)

FEW_TOKENS = 64  # up to this many, bitsandbytes' own kernel multiplies with the packed bytes, without dequantizing
FEW_KEPT = 4  # up to this many, it is faster than a product with a kept weight: it reads a quarter of the bytes
# Layers that are called with the same tensor, in call order.
SAME_INPUT: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SAME_INPUT += (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))  # linear attention of Qwen3.5
# From this many values on, and up to `KERNEL_RANK`, our own kernel adds the adapter's part: cuBLAS reaches half of the
# memory bandwidth there. For smaller outputs the launch costs more.
LARGE = 1 << 24


def use_fused_linears(model: torch.nn.Module, compute: str, keep_weights: bool = False) -> int:
    """Switch every linear layer of `model` that the base stores (`policy.quantization`) to `compute` (fused or fp8);
    return how many there are. With `keep_weights`, FP8 codes are made at a weight's first products only
    (`train.keep_weights`).

    Only the layers' class changes: names, tensors, `disable_adapter`, saving and loading stay. `BadInput` for an
    adapter that is not plain LoRA. With fp8, layers with a size that is not a multiple of 16 are computed as fused,
    and a warning counts them.
    """
    changed, odd = 0, []
    wrapped = {id(module.base_layer) for module in model.modules() if isinstance(module, peft_layer.LoraLayer)}
    stored = {id(model.get_submodule(name)) for name in stored_linears(model)}
    for name, module in model.named_modules():
        layer = module.base_layer if isinstance(module, peft_layer.LoraLayer) else module
        if id(layer) not in stored or id(module) in wrapped:
            continue
        if layer is not module:
            check_plain(name, module)
        module.__class__ = CLASSES[type(module)]
        changed += 1
        fits = layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
        if compute == "fp8" and not fits:
            odd.append(name)
        module.product = Product(layer, compute == "fp8" and fits, keep_weights)
    _make_groups(model)
    if odd:
        warnings.warn(
            f"policy.compute fp8: {len(odd)} of {changed} linear layers have a size that {MULTIPLE} does not divide "
            f"and are computed as fused (first: {odd[0]}).",
            stacklevel=2,
        )
    return changed


def _make_groups(model: torch.nn.Module) -> None:
    waiting = Waiting()
    for members in same_input(model, (FusedLora, FusedBase)):
        products = [member.product for member in members]
        if len({(product.is_fp8, product.layer.in_features) for product in products}) == 1:
            group = Group(members, waiting)
            for product in products:
                product.group = group


def same_input(model: torch.nn.Module, kinds: tuple[type, ...]) -> Iterator[list[torch.nn.Module]]:
    """Yield the layers that are called with the same tensor, in call order, where all are of these kinds."""
    for parent in model.modules():
        for names in SAME_INPUT:
            members = [getattr(parent, name, None) for name in names]
            if all(isinstance(member, kinds) for member in members):
                yield members


def check_plain(name: str, module: peft_layer.LoraLayer) -> None:
    """`BadInput` for an adapter that is not plain LoRA."""
    for adapter in module.lora_A:
        dropout = getattr(module.lora_dropout[adapter], "p", 0.0)
        if dropout or adapter in module.lora_variant or module.lora_bias.get(adapter):
            raise BadInput(
                f"{name} has LoRA dropout, a bias or a variant of LoRA, which policy.compute fused and fp8 and "
                "policy.quant_cfg do not compute. Set policy.compute to plain and leave policy.quant_cfg out."
            )


class Product:
    """Products with one layer's base weight, and the group of layers with the same input that it belongs to."""

    def __init__(self, layer: Layer, is_fp8: bool, keeps: bool = False):
        self.layer, self.is_fp8, self.keeps = layer, is_fp8, keeps
        self.group: Group | None = None
        self._scale: torch.Tensor | None = None
        self._kept: dict[Any, torch.Tensor] = {}  # FP8 codes: (out, in) by None, (in, Σ out) by the layers of `turned`

    @staticmethod
    def compute(*args: Any) -> tuple[torch.Tensor, ...]:
        """Compute the outputs of layers with the same input, with autograd; arguments as in `_Linear`."""
        return _Linear.apply(*args)

    def scale(self) -> torch.Tensor:
        """FP8 scales (out, 1) float32 of the weight; cached, 4 bytes per channel, because computing them takes as long
        as using them. An FP8 layer has its own."""
        if isinstance(self.layer, Fp8Linear):
            return self.layer.weight_scale
        device = self.layer.weight.device
        if self._scale is None or self._scale.device != device:
            with torch.no_grad():
                self._scale = row_scales(weight_in_torch(self.layer), LEAST_SCALE)
        return self._scale

    def codes(self) -> torch.Tensor:
        """FP8 codes (out, in) of the weight, read-only."""
        if not self.keeps:
            return weight_of(self.layer, self.scale())
        if None not in self._kept or self._kept[None].device != self.layer.weight.device:
            self._kept[None] = weight_of(self.layer, self.scale())
        return self._kept[None]

    def forward(self, rows: torch.Tensor, quantized: tuple | None = None) -> torch.Tensor:
        """Return rows · Wᵀ + bias (T, out) of rows (T, in) in the compute dtype. With `quantized`, the result of
        `quantize_rows(rows)`, the product is FP8."""
        bias = self.layer.bias
        if quantized is None:
            weight = weight_of(self.layer).to(rows.dtype)
            with base_product():
                return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(rows.dtype))
        (codes, by_token), scale = quantized, self.scale()
        weight = self.codes()
        with base_product():
            y = scaled_product(codes, weight, by_token, scale.view(1, -1), rows.dtype)
        return y if bias is None else y.add_(bias)


def input_gradient(products: list[Product], gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return Σ gᵢ · Wᵢ (T, in) of layers with the same input, gᵢ (T, outᵢ) in the compute dtype."""
    first, dtype = products[0], gradients[0].dtype
    if not first.is_fp8 or not len(gradients[0]):
        dx = gradients[0] @ weight_of(first.layer).to(dtype)
        for product, g in zip(products[1:], gradients[1:], strict=True):
            dx.addmm_(g, weight_of(product.layer).to(dtype))
        return dx
    codes, by_token = quantize_gradients(gradients, [product.scale() for product in products])
    weight = turned(products)
    return scaled_product(codes, weight, by_token, by_token.new_ones(1, len(weight)), dtype)


def turned(products: list[Product]) -> torch.Tensor:
    """FP8 codes (in, Σ out) of [W₁; W₂; …] transposed, of layers with the same input; read-only."""
    first, key = products[0], tuple(id(product) for product in products)
    if (found := first._kept.get(key)) is not None and found.device == first.layer.weight.device:
        return found
    scales = [product.scale() for product in products]
    sizes = [len(scale) for scale in scales]
    device = first.layer.weight.device
    weight = torch.empty(first.layer.in_features, sum(sizes), dtype=torch.float8_e4m3fn, device=device)
    for product, scale, part in zip(products, scales, weight.split(sizes, dim=1), strict=True):
        weight_of(product.layer, scale, transposed=True, out=part)
    if first.keeps and all(other is None or other == key for other in first._kept):  # one set of layers, the usual
        first._kept[key] = weight
    return weight


class _Linear(torch.autograd.Function):
    """base(x) + scaling · (x aᵀ) bᵀ for every product, x (…, in). `factors` are a (r, in), b (out, r) of the first
    product, then of the second, …; both None for a product without an adapter."""

    @staticmethod
    def forward(ctx, x, products, scaling, dtype, *factors):
        down, up = factors[::2], factors[1::2]
        with torch.autocast(x.device.type, enabled=False):
            rows, xa, outputs = x.reshape(-1, x.shape[-1]).to(dtype), None, []
            if any(a is not None for a in down):
                xa = rows @ stack(down, dtype).t()  # (T, Σ r)
            quantized = quantize_rows(rows) if products[0].is_fp8 and len(rows) else None
            for product, b, part in zip(products, up, split_parts(xa, down), strict=True):
                y = product.forward(rows, quantized)
                if b is not None:
                    add_low_rank(y, part, b.to(dtype).t(), scaling)
                # Not a view: autograd would not let a layer change it in place.
                outputs.append(torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])).to(x.dtype))
            ctx.save_for_backward(x if xa is not None else None, xa, *factors)
            ctx.set_materialize_grads(False)
            ctx.scaling, ctx.products, ctx.dtype, ctx.x_type, ctx.shape = scaling, products, dtype, x.dtype, x.shape
            return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        x, xa, *factors = ctx.saved_tensors
        down, up, needed = factors[::2], factors[1::2], ctx.needs_input_grad[4:]
        dx, found = None, [None] * len(factors)
        with torch.autocast(ctx.products[0].layer.weight.device.type, enabled=False):
            gs = {n: g.reshape(-1, g.shape[-1]).to(ctx.dtype) for n, g in enumerate(gradients) if g is not None}
            adapted = [n for n in gs if down[n] is not None]
            factor = [down[n] for n in adapted]
            if adapted:
                parts = [gs[n] @ up[n].to(ctx.dtype) for n in adapted]
                gb = torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # (T, Σ r)
            if ctx.needs_input_grad[0] and gs:
                dx = input_gradient([ctx.products[n] for n in gs], list(gs.values()))
                if adapted:
                    add_low_rank(dx, gb, stack(factor, ctx.dtype), ctx.scaling)
                dx = torch.ops.aten._unsafe_view(dx, ctx.shape).to(ctx.x_type)
            if any(needed[2 * n] for n in adapted):
                rows = x.reshape(-1, x.shape[-1]).to(ctx.dtype)
                da = gradient(gb.t(), rows, factor[0].dtype)
                for n, part in zip(adapted, da.split([len(a) for a in factor]), strict=True):
                    found[2 * n] = part.mul(ctx.scaling).to(down[n].dtype) if needed[2 * n] else None
            for n in adapted:
                if needed[2 * n + 1]:
                    part = split_parts(xa, down)[n]
                    found[2 * n + 1] = gradient(gs[n].t(), part, up[n].dtype).mul_(ctx.scaling)
        return dx, None, None, None, *found


def stack(factors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
    """Stack factors (r, in) to (Σ r, in), skipping those that are None."""
    given = [one.to(dtype) for one in factors if one is not None]
    return torch.cat(given) if len(given) > 1 else given[0]


def split_parts(stacked: torch.Tensor | None, factors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Columns of `stacked` (T, Σ r) that belong to each of the factors (r, in); None for those that are None."""
    parts, first = [], 0
    for one in factors:
        size = 0 if one is None else len(one)
        parts.append(None if one is None else stacked[:, first : first + size])
        first += size
    return parts


class LowRank(NamedTuple):
    """An adapter's part of an output: scaling · left · right, left (T, r), right (r, n), in the compute dtype."""

    left: torch.Tensor
    right: torch.Tensor
    scaling: float

    def added_to(self, y: torch.Tensor) -> torch.Tensor:
        return y.addmm(self.left, self.right, alpha=self.scaling)


def add_low_rank(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> None:
    """y += scaling · left · right in place: y (T, n), left (T, r), right (r, n)."""
    if y.numel() < LARGE or left.shape[1] > KERNEL_RANK or y.dtype not in (torch.bfloat16, torch.float16):
        y.addmm_(left, right, alpha=scaling)
    else:
        torch.ops.kit.add_low_rank_(y, left, right, scaling)


# A registered operator, so that recompute.py sees that it modifies a kept output.
_library = torch.library.Library("kit", "FRAGMENT")
_library.define("add_low_rank_(Tensor(a!) y, Tensor left, Tensor right, float scaling) -> Tensor(a!)")


@torch.library.impl(_library, "add_low_rank_", "CompositeExplicitAutograd")
def _add_low_rank(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> torch.Tensor:
    if not y.is_cuda:
        return y.addmm_(left, right, alpha=scaling)
    from kit.weights import fp8_kernel

    fp8_kernel.add_low_rank(y, left, right, scaling)
    return y


def gradient(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left · right in `dtype`; a float32 gradient is never rounded to the compute dtype."""
    if left.is_cuda and dtype == torch.float32 and left.dtype != dtype:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


class Settings(NamedTuple):
    """Settings of one layer call: the adapter's factors, both None without one, scaling and compute dtype."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float
    dtype: torch.dtype

    def versions(self) -> tuple:
        factors = [(id(one), one._version) for one in (self.a, self.b) if one is not None]
        return (*factors, self.scaling, self.dtype)


class Waiting:
    """Precomputed outputs of one layer group; discarded when another group runs."""

    outputs: dict[int, tuple[tuple, torch.Tensor]] | None = None  # {layer's index: (its settings' versions, y)}
    taken_from: tuple = ()


class Group:
    """Layers that are called one after the other with the same tensor."""

    def __init__(self, members: list, waiting: Waiting):
        self._members, self._waiting = members, waiting

    def output(self, module: torch.nn.Module, x: torch.Tensor, settings: Settings) -> torch.Tensor:
        number = next(n for n, member in enumerate(self._members) if member is module)
        waiting, state = self._waiting, (self, None if x.is_inference() else x._version, torch.is_grad_enabled())
        if waiting.outputs and waiting.taken_from[0]() is x and waiting.taken_from[1:] == state:
            versions, y = waiting.outputs.pop(number, (None, None))
            if not waiting.outputs:
                waiting.outputs = None
            if versions == settings.versions():
                return y
        waiting.outputs = None
        together = [] if number or x.is_inference() else [member.settings(x) for member in self._members]
        if not fit(together):
            return _apply([module], x, [settings])[0]
        first, *others = _apply(self._members, x, together)
        waiting.outputs = {n: (together[n].versions(), y) for n, y in enumerate(others, start=1)}
        waiting.taken_from = (weakref.ref(x), *state)
        return first


def fit(together: list[Settings | None]) -> bool:
    """Whether layers can be one function: the same dtype, and the same scaling for those with an adapter."""
    if not together or None in together or len({one.dtype for one in together}) > 1:
        return False
    return len({one.scaling for one in together if one.a is not None}) <= 1


def _apply(modules: list, x: torch.Tensor, settings: list[Settings]) -> tuple[torch.Tensor, ...]:
    scaling = next((one.scaling for one in settings if one.a is not None), 0.0)
    factors = [factor for one in settings for factor in (one.a, one.b)]
    products = [module.product for module in modules]
    return products[0].compute(x, products, scaling, settings[0].dtype, *factors)


def output_of(module: torch.nn.Module, x: torch.Tensor, settings: Settings) -> torch.Tensor:
    group = module.product.group
    return group.output(module, x, settings) if group else _apply([module], x, [settings])[0]


def _takes_own_kernel(product: Product, x: torch.Tensor) -> bool:
    """Whether bitsandbytes' kernel for a few tokens, as in generation, is faster than dequantizing all of W."""
    few = is_few(x, FEW_TOKENS if vars(product.layer).get("kept") is None else FEW_KEPT)
    return few and isinstance(product.layer, bnb.nn.Linear4bit) and not product.is_fp8 and not torch.is_grad_enabled()


def is_few(x: torch.Tensor, tokens: int) -> bool:
    """Whether x (…, in) is on a GPU and has at most `tokens` rows."""
    return x.is_cuda and x.numel() <= tokens * x.shape[-1]


def compute_dtype(layer: Layer, x: torch.Tensor) -> torch.dtype:
    """Dtype that a layer's products with x are computed in."""
    is_stored = isinstance(layer, bnb.nn.Linear4bit | Fp8Linear)
    return layer.compute_dtype or x.dtype if is_stored else layer.weight.dtype


if TYPE_CHECKING:  # the methods and attributes of the layer that it stands before
    LinearLayer: TypeAlias = peft_layer.Linear
else:
    LinearLayer = object


class FusedLora(LinearLayer):
    """peft's layer with this module's products; merged weights and per-row adapters are left to peft."""

    product: Product

    def settings(self, x: torch.Tensor) -> Settings | None:
        """Settings of this call; None if it is left to peft."""
        active = [name for name in self.active_adapters if name in self.lora_A] if not self.disable_adapters else []
        if self.merged or len(active) > 1 or _takes_own_kernel(self.product, x):
            return None
        dtype = compute_dtype(self.product.layer, x)
        if not active:
            return Settings(None, None, 0.0, dtype)
        return Settings(self.lora_A[active[0]].weight, self.lora_B[active[0]].weight, self.scaling[active[0]], dtype)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        settings = None if args or kwargs else self.settings(x)
        return super().forward(x, *args, **kwargs) if settings is None else output_of(self, x, settings)


class FusedBase(LinearLayer):
    """A linear layer without an adapter."""

    product: Product

    def settings(self, x: torch.Tensor) -> Settings | None:
        """Settings of this call; None if it is left to bitsandbytes."""
        if _takes_own_kernel(self.product, x):
            return None
        return Settings(None, None, 0.0, compute_dtype(self, x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = self.settings(x)
        return super().forward(x) if settings is None else output_of(self, x, settings)


def mixed(mixin: type, *kinds: type) -> dict[type, type]:
    """{layer class: its subclass with the mixin before it}."""
    return {kind: type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {}) for kind in kinds}


CLASSES = mixed(FusedLora, peft_bnb.Linear4bit, peft_layer.Linear)
CLASSES |= mixed(FusedBase, bnb.nn.Linear4bit, Fp8Linear, torch.nn.Linear)
