"""FP8 weights with one scale per output channel, and a frozen linear layer that stores one.

The numbers are those of vLLM's `fp8_per_channel`: a float32 scale, a row's largest |value| / 448, and E4M3 codes. All
computation uses the dequantized weight, codes · scale rounded to the model's dtype. In BF16 a row's largest value
round-trips exactly and a rounded value maps back to its own code, so quantizing the dequantized weight gives the same
scales and codes: a server that quantizes it on load holds what the trainer holds.
"""

import torch
from torch.autograd.function import once_differentiable

from kit.weights.nf4 import PIECE

E4M3_MAX = 448.0
LEAST_SCALE = 1 / (E4M3_MAX * 512)  # vLLM's floor for weights and activations


def row_scales(value: torch.Tensor, floor: float) -> torch.Tensor:
    """FP8 scale of each row of (T, n): its largest |value| / 448, at least `floor`; (T, 1) float32."""
    low, high = value.aminmax(dim=1, keepdim=True)
    peak = torch.maximum(low.abs(), high.abs()).float()
    # Divide by a tensor: with a Python number, PyTorch multiplies by its reciprocal.
    return (peak / torch.full((), E4M3_MAX, device=value.device)).clamp_min(floor)


def to_e4m3(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 codes of value (T, n) / scale (T, 1), divided in float32."""
    return (value.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes (out, in) float8_e4m3fn, scale (out, 1) float32) of a weight (out, in) in `dtype` on `device`,
    which default to its own. Works in pieces that take 8 bytes per value."""
    where = torch.device(device or weight.device)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=where)
    scale = torch.empty(len(weight), 1, dtype=torch.float32, device=where)
    step = max(1, PIECE[where.type == "cuda"] // max(weight.shape[1], 1))
    for at in range(0, len(weight), step):
        piece = weight[at : at + step].to(device=where, dtype=dtype or weight.dtype)
        scale[at : at + step] = row_scales(piece, LEAST_SCALE)
        codes[at : at + step] = to_e4m3(piece, scale[at : at + step])
    return codes, scale


def dequantize_with(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes (out, in) · scale (out, 1), multiplied in float32 and rounded once to `dtype`."""
    weight = codes.to(dtype)  # exact
    return torch.mul(weight, scale, out=weight)


class Fp8Linear(torch.nn.Linear):
    """A frozen linear layer whose weight is stored in FP8, in half of BF16's memory.

    `weight` (out, in) holds the codes as uint8, which nothing casts or trains; `weight_scale` (out, 1) is float32.
    Every product dequantizes the weight and releases it; nothing is saved for the backward pass.
    """

    def __init__(
        self,
        layer: torch.nn.Linear,
        device: torch.device | str | None = None,
        stored: tuple[torch.Tensor, torch.Tensor] | None = None,
    ):
        """Quantize a layer onto `device`, or take its codes and scales as they are `stored` elsewhere."""
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, scale = stored or quantize_weight(layer.weight.data, device=device)
        self.weight = torch.nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        if layer.bias is not None:
            self.bias = torch.nn.Parameter(layer.bias.data.to(codes.device), requires_grad=False)
        # Dtype that the codes dequantize to, and dtype that products are computed in.
        self.storage_dtype = self.compute_dtype = layer.weight.dtype

    @property
    def codes(self) -> torch.Tensor:
        """(out, in) float8_e4m3fn."""
        return self.weight.data.view(torch.float8_e4m3fn)

    def dequantized(self) -> torch.Tensor:
        """Weight (out, in) that the layer computes with, in its storage dtype."""
        return dequantize_with(self.codes, self.weight_scale, self.storage_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, FP8 of {self.storage_dtype}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.x_type, dtype = layer, x.dtype, layer.compute_dtype
        with torch.autocast(x.device.type, enabled=False):
            bias = None if layer.bias is None else layer.bias.to(dtype)
            return torch.nn.functional.linear(x.to(dtype), layer.dequantized().to(dtype), bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        layer, dtype = ctx.layer, ctx.layer.compute_dtype
        with torch.autocast(gradient.device.type, enabled=False):
            return (gradient.to(dtype) @ layer.dequantized().to(dtype)).to(ctx.x_type), None


def store_in_fp8(model: torch.nn.Module, names: list[str], device: torch.device | str) -> None:
    """Replace each of these linear layers with an `Fp8Linear` on `device`, one at a time, so that at most one layer is
    in memory twice."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        setattr(model.get_submodule(parent), leaf, Fp8Linear(layer, device))
        layer.weight = None  # other references to the layer must not keep its memory alive
