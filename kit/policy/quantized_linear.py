"""`policy.quant_cfg`: linear layers that compute with the numbers of the deployed checkpoint and train through them.

y = x̂ Ŵᵀ, with Ŵ the base and the adapter as the format stores them, Q(base + s·B·A) (quantize.py), and x̂ the input
as the format's server quantizes it, or x itself if only weights are quantized. Backward, both quantizations pass the
gradient straight through:

    dX = g Ŵ        dB = s · gᵀ (x̂ Aᵀ)        dA = s · (g B)ᵀ x̂

which is the gradient of the merged weight, s · gᵀ x̂, decomposed by the chain rule of B·A: only Ŵ has size (out, in),
and it is recomputed for every product and released. Only x̂ is saved. Layers with the same input (q, k, v; gate, up)
are one function, so x is quantized and saved once; Group and Waiting are fused_linear.py's. With the adapter off the
base is quantized in the same way: the reference is the deployed base, and the KL to it begins at 0.

A weight's peak is cached until the adapter changes: 4 bytes, or 4 per channel. A static input range is measured once
(calibration.py) and is the state that checkpoints and adapters carry.

`fp8` on a GPU with FP8 arithmetic multiplies the FP8 codes; other formats, and a CPU, multiply in the compute dtype.
Works on bitsandbytes' NF4 layers, FP8 layers and unquantized layers. Not covered: LoRA dropout and variants, several
adapters. If the base is split over processes, a decoder layer's weights are there while it computes, and peaks are
kept from one update to the next (`forget_peaks`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.lora import bnb as peft_bnb
from peft.tuners.lora import layer as peft_layer
from torch.autograd.function import once_differentiable

from kit.core.cards import generation
from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import QuantFormat, check_shapes, fitted
from kit.policy import fused_linear
from kit.policy.fused_linear import Group, LinearLayer, Settings, Waiting
from kit.policy.recompute import base_product, is_answered
from kit.weights import stored_weight
from kit.weights.fp8 import Fp8Linear
from kit.weights.frozen_base import plain_name
from kit.weights.quantize import (
    E4M3_MAX,
    bf16_scale,
    effective_peak,
    fake_quantize_activation,
    fp8_weight,
    quantized_weight,
)

STATE = "quantizer.safetensors"  # next to an adapter and in a checkpoint
AMAX = ".input_amax"  # suffix of the layer's name in it
WATCHED = ("quant_clip_fraction", "quant_peak_ratio")  # keys of metrics.jsonl
WATCHED_TOKENS = 256  # tokens per layer call in which values beyond the range are counted


class Quantizers:
    """Shared state of one model's quantized layers: the format, whether they quantize, and range statistics."""

    def __init__(self, fmt: QuantFormat, is_split: bool = False):
        self.fmt, self.is_on, self.keeps_weights = fmt, True, False
        self.is_split = is_split  # the adapter's tensors are gathered for each pass: their versions say nothing
        self._beyond: torch.Tensor | None = None  # (values beyond the calibrated range, largest |x| / range)
        self._seen = 0

    def watch(self, rows: torch.Tensor, peak: torch.Tensor) -> None:
        """Count values of rows (T, in) beyond ± peak, in a sample of the rows."""
        if not rows.numel():
            return
        sample = rows[:: -(-len(rows) // WATCHED_TOKENS)].abs()
        found = torch.stack([(sample > peak).sum().float(), (sample.amax() / peak).float()])
        if self._beyond is None:
            self._beyond = found
        else:
            self._beyond = torch.stack([self._beyond[0] + found[0], torch.maximum(self._beyond[1], found[1])])
        self._seen += sample.numel()

    def watched(self) -> dict[str, float]:
        """Return the statistics since the last call and reset them; empty without static input ranges."""
        if self._beyond is None:
            return {}
        beyond, largest = self._beyond.tolist()
        seen, self._beyond, self._seen = self._seen, None, 0
        return dict(zip(WATCHED, (beyond / seen, largest), strict=True))


class Product:
    """Quantized product of one layer; replaces linear.Product."""

    is_fp8 = False

    def __init__(self, module: torch.nn.Module, quantizers: Quantizers):
        self.module, self.quantizers = module, quantizers
        self.layer = getattr(module, "base_layer", module)
        self.group: Group | None = None
        self.fused = [self]  # layers that a server fuses with this one
        self.input_peak: torch.Tensor | None = None
        self._peaks: dict[bool, tuple[tuple, torch.Tensor | None]] = {}  # with the adapter, and without
        self._shared: dict[bool, tuple[list, torch.Tensor]] = {}
        self._kept: tuple[tuple, torch.Tensor] | None = None

    @staticmethod
    def compute(*args: Any) -> tuple[torch.Tensor, ...]:
        return _QuantizedLinear.apply(*args)

    def forget(self) -> None:
        """Recompute the weight's peak at the next product, regardless of the adapter tensors' versions."""
        self._peaks.pop(True, None)
        self._kept = None

    def peak(self, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float) -> torch.Tensor | None:
        """Peak of the weight with these factors, or of all fused layers if the format requires it."""
        own = self._own_peak(a, b, scaling)
        if own is None or not self.quantizers.fmt.shares_peak or len(self.fused) == 1:
            return own
        # If this layer has no adapter, the others may still compute with theirs.
        is_adapted = a is not None or any(one.has_adapter_on() for one in self.fused if one is not self)
        peaks = [own if one is self else one._own_peak(*one.factors(is_adapted)) for one in self.fused]
        known = self._shared.get(is_adapted)
        if known is None or any(one is not other for one, other in zip(known[0], peaks, strict=True)):
            known = self._shared[is_adapted] = peaks, torch.stack(peaks).amax(0)
        return known[1]

    def has_adapter_on(self) -> bool:
        """Whether the layer has an adapter and it is enabled."""
        return hasattr(self.module, "lora_A") and not self.module.disable_adapters

    def factors(self, with_adapter: bool) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        """Return a (r, in), b (out, r) and the scaling of the layer's adapter; (None, None, 0.0) without one."""
        name = next(iter(getattr(self.module, "lora_A", ())), None)
        if not with_adapter or name is None:
            return None, None, 0.0
        return self.module.lora_A[name].weight, self.module.lora_B[name].weight, self.module.scaling[name]

    def _own_peak(self, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float) -> torch.Tensor | None:
        key, known = self._version(a, b, scaling), self._peaks.get(a is not None)
        if known is None or known[0] != key:
            peak = effective_peak(self.layer, a, b, scaling, self.quantizers.fmt)
            known = self._peaks[a is not None] = key, peak
        return known[1]

    def _version(self, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float) -> tuple:
        if self.quantizers.is_split:  # what was computed holds until `forget`
            return (scaling,)
        # Not the object's id: a tensor saved for the backward pass may come back as another object.
        return (*((one.data_ptr(), one._version) for one in (a, b) if one is not None), scaling)

    def weight(
        self, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """Ŵ (out, in) in the compute dtype."""
        key = (*self._version(a, b, scaling), dtype)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        fmt = self.quantizers.fmt
        weight = quantized_weight(self.layer, a, b, scaling, fmt, self.peak(a, b, scaling)).to(dtype)
        if self.quantizers.keeps_weights:
            self._kept = key, weight
        return weight

    def input(self, rows: torch.Tensor, is_watched: bool) -> torch.Tensor:
        """x̂ (T, in) of rows (T, in)."""
        fmt = self.quantizers.fmt.activation
        if fmt is None:
            return rows
        if fmt.is_static and self.input_peak is None:
            raise CheckFailed(f"a layer of format {self.quantizers.fmt.name} has no input range: calibrate it first.")
        if fmt.is_static and is_watched:
            self.quantizers.watch(rows, self.input_peak)
        return fake_quantize_activation(rows, fmt, self.input_peak)

    def forward(
        self, rows: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        """Return rows · Ŵᵀ + bias (T, out) of already quantized rows (T, in) in the compute dtype."""
        shape, bias = (self.layer.out_features, self.layer.in_features), self.layer.bias
        # A recomputation whose product is already known needs no weight.
        weight = rows.new_empty(shape) if is_answered() else self.weight(a, b, scaling, rows.dtype)
        with base_product():
            return torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(rows.dtype))

    def has_fp8_product(self, rows: torch.Tensor) -> bool:
        """Whether the product multiplies FP8 codes."""
        if self.quantizers.fmt.name != "fp8" or not rows.is_cuda or rows.dtype != torch.bfloat16 or not len(rows):
            return False
        sizes = self.layer.in_features, self.layer.out_features
        row = generation(torch.cuda.get_device_capability(rows.device))
        return row.trainer_fp8 and not any(size % stored_weight.MULTIPLE for size in sizes)

    def fp8_forward(
        self, quantized: tuple, a: torch.Tensor | None, b: torch.Tensor | None, scaling: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """`forward` computed from `linear.quantize_rows(rows)` and the codes of Ŵ."""
        codes, by_token = quantized
        shape, bias = (self.layer.out_features, self.layer.in_features), self.layer.bias
        peak = self.peak(a, b, scaling)
        scale = bf16_scale(peak, E4M3_MAX)  # (out, 1)
        weight = codes.new_empty(shape) if is_answered() else fp8_weight(self.layer, a, b, scaling, peak)
        with base_product():
            y = stored_weight.scaled_product(codes, weight, by_token, scale.view(1, -1), dtype)
        return y if bias is None else y.add_(bias)


class _QuantizedLinear(torch.autograd.Function):
    """x̂ Ŵᵀ for every product, x (…, in); arguments as in linear._Linear."""

    @staticmethod
    def forward(ctx, x, products, scaling, dtype, *factors):
        down, up, first = factors[::2], factors[1::2], products[0]
        with torch.autocast(x.device.type, enabled=False):
            rows, outputs = x.reshape(-1, x.shape[-1]).to(dtype), []
            kept: tuple[torch.Tensor, ...]
            if all(product.has_fp8_product(rows) for product in products):
                kept = stored_weight.quantize_rows(rows)
                ys = [p.fp8_forward(kept, a, b, scaling, dtype) for p, a, b in zip(products, down, up, strict=True)]
            else:
                kept = (first.input(rows, any(ctx.needs_input_grad)),)
                ys = [p.forward(kept[0], a, b, scaling) for p, a, b in zip(products, down, up, strict=True)]
                if first.quantizers.fmt.activation is None:
                    kept = (x,)  # already in memory
            for y in ys:
                # Not a view: autograd would not let a layer change it in place.
                outputs.append(torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])).to(x.dtype))
            ctx.kept = len(kept) if any(ctx.needs_input_grad[4:]) else 0
            ctx.save_for_backward(*kept[: ctx.kept], *factors)
            ctx.set_materialize_grads(False)
            ctx.scaling, ctx.products, ctx.dtype, ctx.x_type, ctx.shape = scaling, products, dtype, x.dtype, x.shape
            return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        saved, dtype, scaling = ctx.saved_tensors, ctx.dtype, ctx.scaling
        kept, factors, needed = saved[: ctx.kept], saved[ctx.kept :], ctx.needs_input_grad[4:]
        down, up, dx, found = factors[::2], factors[1::2], None, [None] * len(factors)
        with torch.autocast(ctx.products[0].layer.weight.device.type, enabled=False):
            gs = {n: g.reshape(-1, g.shape[-1]).to(dtype) for n, g in enumerate(gradients) if g is not None}
            if ctx.needs_input_grad[0]:
                for n, g in gs.items():
                    weight = ctx.products[n].weight(down[n], up[n], scaling, dtype)
                    dx = g @ weight if dx is None else dx.addmm_(g, weight)
                    del weight
                if dx is not None:
                    dx = torch.ops.aten._unsafe_view(dx, ctx.shape).to(ctx.x_type)
            adapted = [n for n in gs if needed[2 * n] or needed[2 * n + 1]]
            if adapted:
                rows = _rows(kept, dtype)  # x̂ (T, in)
                stacked = torch.cat([down[n].to(dtype) for n in adapted])  # (Σ r, in)
                sizes = [len(down[n]) for n in adapted]
                xa = (rows @ stacked.t()).split(sizes, dim=1)  # (T, r) each
                gb = torch.cat([gs[n] @ up[n].to(dtype) for n in adapted], 1)  # (T, Σ r)
                da = fused_linear.gradient(gb.t(), rows, down[adapted[0]].dtype).split(sizes)
                for n, part, own in zip(adapted, xa, da, strict=True):
                    found[2 * n] = own.mul(scaling).to(down[n].dtype) if needed[2 * n] else None
                    if needed[2 * n + 1]:
                        found[2 * n + 1] = fused_linear.gradient(gs[n].t(), part, up[n].dtype).mul_(scaling)
        return dx, None, None, None, *found


def _rows(kept: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    """x̂ (T, in) from what was saved: x̂ itself, or FP8 codes and their scales."""
    if len(kept) == 2:
        return (kept[0].float() * kept[1]).to(dtype)
    return kept[0].reshape(-1, kept[0].shape[-1]).to(dtype)


class Quantized(LinearLayer):
    """Mixin before a layer's own class: its products are quantized, except within `quantizers_off`."""

    product: Product

    def settings(self, x: torch.Tensor) -> Settings:
        """Settings of this call."""
        layer = self.product.layer
        dtype = getattr(layer, "compute_dtype", None) or (x.dtype if _is_4bit(layer) else layer.weight.dtype)
        if not hasattr(self, "lora_A") or self.disable_adapters:
            return Settings(None, None, 0.0, dtype)
        if self.merged or len(self.active_adapters) > 1:
            raise CheckFailed("a quantized layer computes with one adapter that is not merged, or with none.")
        a, b, scaling = self.product.factors(bool(self.active_adapters))
        return Settings(a, b, scaling, dtype)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.product.quantizers.is_on:
            return super().forward(x, *args, **kwargs)
        if args or kwargs:
            raise CheckFailed("a quantized layer takes its input alone, no adapter by row.")
        return fused_linear.output_of(self, x, self.settings(x))


CLASSES = fused_linear.mixed(
    Quantized, peft_bnb.Linear4bit, peft_layer.Linear, bnb.nn.Linear4bit, Fp8Linear, torch.nn.Linear
)


def use_quantized_linears(model: torch.nn.Module, fmt: QuantFormat, is_split: bool = False) -> int:
    """Make the linear layers that a checkpoint of format `fmt` quantizes compute with its numbers; return how many.
    `is_split`: processes will hold parts of the weights, so whoever changes the adapter calls `forget_peaks`.

    These are the NF4 layers of an NF4 base, else all linear layers but the output embedding. Only the layers' class
    changes: names, tensors, `disable_adapter`, saving and loading stay. `BadInput` for an adapter that is not plain
    LoRA and for a shape that the format does not divide.
    """
    layers = quantized_layers(model)
    shapes = {plain_name(name): _shape(module) for name, module in layers.items()}
    check_shapes(fmt, shapes)
    quantizers = Quantizers(fitted(fmt, (inputs for _, inputs in shapes.values())), is_split)
    for name, module in layers.items():
        if hasattr(module, "lora_A"):
            fused_linear.check_plain(name, module)
        if "forward" in vars(module):
            raise ValueError(f"{name} has a forward of its own already, which would go on computing unquantized")
        module.__class__ = CLASSES[type(module)]
        module.product = Product(module, quantizers)
    _make_groups(model)
    return len(layers)


def quantized_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that `use_quantized_linears` changes or has changed, by their name in `model`; the peft layer if there is
    an adapter."""
    found = {name: one for name, one in model.named_modules() if isinstance(one, Quantized)}
    if found:
        return found
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    wrapped = {id(part) for one in model.modules() if isinstance(one, peft_layer.LoraLayer) for part in one.modules()}
    wrapped -= {id(one) for one in model.modules() if isinstance(one, peft_layer.LoraLayer)}
    for name, module in model.named_modules():
        if type(module) in CLASSES and id(module) not in wrapped and module is not head:
            found[name] = module
    if any(_is_4bit(getattr(one, "base_layer", one)) for one in found.values()):
        found = {name: one for name, one in found.items() if _is_4bit(getattr(one, "base_layer", one))}
    return found


def _is_4bit(layer: torch.nn.Module) -> bool:
    return isinstance(layer, bnb.nn.Linear4bit)


def _shape(module: torch.nn.Module) -> tuple[int, int]:
    layer = getattr(module, "base_layer", module)
    return layer.out_features, layer.in_features


def _make_groups(model: torch.nn.Module) -> None:
    waiting = Waiting()
    for members in fused_linear.same_input(model, (Quantized,)):
        products, group = [member.product for member in members], Group(members, waiting)
        for product in products:
            product.group, product.fused = group, products


def quantizers_of(model: torch.nn.Module) -> Quantizers | None:
    """Shared state of the quantized layers of `model`; None if it has none."""
    return next((one.product.quantizers for one in model.modules() if isinstance(one, Quantized)), None)


@contextlib.contextmanager
def quantizers_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute with the unquantized base and adapter within the block, by peft's path; a no-op if none is quantized."""
    quantizers = quantizers_of(model)
    if quantizers is None:
        yield
        return
    before, quantizers.is_on = quantizers.is_on, False
    try:
        yield
    finally:
        quantizers.is_on = before


@contextlib.contextmanager
def keeping_quantized(model: torch.nn.Module, quantizers: Quantizers) -> Iterator[None]:
    """Compute every quantized weight only once within the block, not for every product; `kept_weights.keeping_weights`
    checks whether there is room."""
    quantizers.keeps_weights = True
    try:
        yield
    finally:
        quantizers.keeps_weights = False
        for module in quantized_layers(model).values():
            module.product._kept = None


def forget_peaks(model: torch.nn.Module) -> None:
    """Recompute the peaks of weights with the adapter: for split weights, and for optimizers that bypass the tensors'
    version counter."""
    for module in quantized_layers(model).values():
        module.product.forget()


def quantizer_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {"<layer in the plain model>.input_amax": () float32 on the CPU} for formats with static input ranges,
    once calibrated; else empty. Weight peaks follow from the weights."""
    named = {plain_name(name): module.product.input_peak for name, module in quantized_layers(model).items()}
    return {f"{name}{AMAX}": peak.float().cpu().clone() for name, peak in named.items() if peak is not None}


def load_quantizer_state(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Set the input ranges; `BadInput` if the state does not belong to this model's layers and format."""
    layers, quantizers = quantized_layers(model), quantizers_of(model)
    wanted = {f"{plain_name(name)}{AMAX}" for name in layers} if quantizers.fmt.needs_calibration else set()
    if odd := sorted(wanted ^ state.keys()):
        raise BadInput(
            f"the quantizer state has {len(state)} input ranges, format {quantizers.fmt.name} of this model has "
            f"{len(wanted)} (first difference: {odd[0]}). Take the state that belongs to this run."
        )
    for name, module in layers.items() if wanted else ():
        product = module.product
        product.input_peak = state[f"{plain_name(name)}{AMAX}"].to(product.layer.weight.device, torch.float32)


def write_quantizer_state(model: torch.nn.Module, directory: Path) -> dict[str, str]:
    """Write the state into `directory` and return its manifest entries: the format and the state's hash. Writes and
    returns nothing for a model without quantized layers."""
    from safetensors.torch import save_file

    from kit.weights.frozen_base import hash_pairs, hash_tensor

    quantizers = quantizers_of(model)
    if quantizers is None:
        return {}
    state = quantizer_state(model)
    save_file(state, directory / STATE, metadata={"quant_cfg": quantizers.fmt.name})
    content = hash_pairs({name: hash_tensor(value) for name, value in state.items()})
    return {"quant_cfg": quantizers.fmt.name, "quantizer_hash": content}


def read_quantizer_state(directory: Path) -> tuple[str | None, dict[str, torch.Tensor]]:
    """Read (format name, state) written by `write_quantizer_state`; `BadInput` if there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(directory) / STATE, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}
            return (file.metadata() or {}).get("quant_cfg"), state
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{directory} has no quantizer state that can be read: {error}.") from None


def restore_quantizers(model: torch.nn.Module, directory: str | Path) -> None:
    """Set the input ranges that were written into `directory`; `BadInput` if they are of another format."""
    name, state = read_quantizer_state(Path(directory))
    if name != (fmt := quantizers_of(model).fmt).name:
        raise BadInput(f"{directory} was written for format {name}, this policy computes in {fmt.name}.")
    load_quantizer_state(model, state)
