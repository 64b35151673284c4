"""A SwiGLU MLP and its adapters as one autograd function: `policy.fused_mlp`.

y = down(silu(gate(x)) · up(x)), each of the three with the adapter's part. As modules, `policy.compute` fused and fp8
read and write the outputs of gate and up once more to add the adapter's part, and the gradient of down's input too;
SwiGLU reads them again, and its output is kept for the gradient of down's A. Here the products are kept as the base
gives them, and one kernel of `swiglu_kernel.py` adds the adapter's parts, computes SwiGLU and multiplies its output
with down's A. The kernel of the backward pass recomputes SwiGLU's output where it needs it and multiplies the
gradients with the B of gate and up on the way. So a token keeps (in bytes of the compute dtype) its input and twice
the MLP's width, not three times.

The gradients of gate and up are written over the products kept, SwiGLU's output over the gradient that came from down.
A second backward pass through the same graph is refused.

Values and gradients are those of the modules: the same roundings, adapter sums in another order. The functions here
are the kernels' reference implementation, which computes wherever they do not: on a CPU, and in float32.
"""

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kit.core.config.recompute_rules import ENDS_WITH_RESIDUAL
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.limits import KERNEL_RANK
from kit.policy import fused_norms
from kit.policy.fused_linear import (
    FusedBase,
    FusedLora,
    LowRank,
    add_low_rank,
    fit,
    gradient,
    input_gradient,
    split_parts,
    stack,
)
from kit.policy.recompute import unread_product
from kit.weights.stored_weight import quantize_rows

NAMES = ("gate_proj", "up_proj", "down_proj")


def check_fused_mlp(config: Config, model_config: Any) -> None:
    """`BadInput` if `policy.fused_mlp` is set and the model's MLP is not down(silu(gate(x)) · up(x))."""
    if not config.policy.fused_mlp:
        return
    activation = getattr(model_config, "hidden_act", None)
    if model_config.model_type not in ENDS_WITH_RESIDUAL or activation not in ("silu", "swish"):
        raise BadInput(
            f"policy.fused_mlp is true and {config.model.source} is a {model_config.model_type} with {activation}; "
            f"{', '.join(ENDS_WITH_RESIDUAL)} with silu are known. Set policy.fused_mlp to false."
        )


def use_fused_mlps(model: torch.nn.Module, config: Config) -> int:
    """Make each SwiGLU MLP of `model` one function if `policy.fused_mlp` is set; return how many there are.

    Called after `use_fused_linears`. An MLP's own forward, or that of liger, still computes what a layer leaves to
    peft or bitsandbytes: merged weights, a few tokens in generation. `ValueError` if there is no such MLP.
    """
    if not config.policy.fused_mlp:
        return 0
    changed = 0
    for module in model.modules():
        members = [getattr(module, name, None) for name in NAMES]
        if all(isinstance(member, FusedLora | FusedBase) for member in members):
            module.forward_of_modules = module.forward
            module.forward = types.MethodType(_forward, module)
            changed += 1
    if not changed:
        raise ValueError("policy.fused_mlp found no MLP of gate_proj, up_proj and down_proj in this model")
    return changed


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    members = [getattr(self, name) for name in NAMES]
    settings = [member.settings(x) for member in members]
    if None in settings or not fit(settings[:2]) or settings[2].dtype != settings[0].dtype:
        return self.forward_of_modules(x)
    products = [member.product for member in members]
    scaling = next((one.scaling for one in settings[:2] if one.a is not None), 0.0)
    factors = [factor for one in settings for factor in (one.a, one.b)]
    is_unread = getattr(self.down_proj, "is_unread", False)
    return _Mlp.apply(x, products, (scaling, settings[2].scaling), settings[0].dtype, is_unread, *factors)


class _Mlp(torch.autograd.Function):
    """down(silu(gate(x)) · up(x)), x (…, in). `products` of gate, up and down; `scalings` of gate and up, and of down;
    `factors` are a (r, in) and b (out, r) of each, both None without an adapter."""

    @staticmethod
    def forward(ctx, x, products, scalings, dtype, is_unread, *factors):
        (*first, last), (*first_b, last_b) = factors[::2], factors[1::2]
        with torch.autocast(x.device.type, enabled=False):
            rows, xa = x.reshape(-1, x.shape[-1]).to(dtype), None
            if any(a is not None for a in first):
                xa = rows @ stack(first, dtype).t()  # (T, Σ r)
            quantized = quantize_rows(rows) if products[0].is_fp8 and len(rows) else None
            gate, up = (product.forward(rows, quantized) for product in products[:2])
            low_g, low_u = _low_ranks(split_parts(xa, first), first_b, scalings[0], dtype)
            act, acta = swiglu(gate, up, low_g, low_u, None if last is None else last.to(dtype))
            quantized = quantize_rows(act) if products[2].is_fp8 and len(rows) else None
            with unread_product() if is_unread else contextlib.nullcontext():
                y = products[2].forward(act, quantized)
                if acta is not None:
                    add_low_rank(y, acta, last_b.to(dtype).t(), scalings[1])
            ctx.save_for_backward(x if xa is not None else None, xa, acta, gate, up, *factors)
            ctx.products, ctx.scalings, ctx.dtype, ctx.is_used = products, scalings, dtype, False
            ctx.x_type, ctx.shape = x.dtype, x.shape
            return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1])).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        if ctx.is_used:
            raise RuntimeError("policy.fused_mlp: a second backward pass, and the first wrote over what was kept.")
        ctx.is_used = True
        x, xa, acta, gate, up, *factors = ctx.saved_tensors
        (*first, last), (*first_b, last_b), needed = factors[::2], factors[1::2], ctx.needs_input_grad[5:]
        dx, found, dtype = None, [None] * len(factors), ctx.dtype
        with torch.autocast(g.device.type, enabled=False):
            g = g.reshape(-1, g.shape[-1]).to(dtype)
            act, low = input_gradient(ctx.products[2:], [g]), None  # SwiGLU's output after `swiglu_gradient`
            if last is not None:
                low = LowRank(g @ last_b.to(dtype), last.to(dtype), ctx.scalings[1])
            low_g, low_u = lows = _low_ranks(split_parts(xa, first), first_b, ctx.scalings[0], dtype)
            parts = [part for part in swiglu_gradient(gate, up, act, low_g, low_u, low) if part is not None]
            if last is not None:
                found[4] = gradient(low.left.t(), act, last.dtype).mul_(low.scaling) if needed[4] else None
                found[5] = gradient(g.t(), acta, last_b.dtype).mul_(low.scaling) if needed[5] else None
            del act
            gb = torch.cat(parts, 1) if len(parts) > 1 else parts[0] if parts else None  # (T, Σ r)
            if ctx.needs_input_grad[0]:
                dx = input_gradient(ctx.products[:2], [gate, up])
                if gb is not None:
                    add_low_rank(dx, gb, stack(first, dtype), ctx.scalings[0])
                dx = torch.ops.aten._unsafe_view(dx, ctx.shape).to(ctx.x_type)
            if any(needed[:4:2]):
                kind = next(a.dtype for a in first if a is not None)
                da = gradient(gb.t(), x.reshape(-1, x.shape[-1]).to(dtype), kind)  # (Σ r, in)
                for n, part in enumerate(split_parts(da.t(), first)):
                    if needed[2 * n]:
                        found[2 * n] = part.t().mul(ctx.scalings[0]).to(first[n].dtype)
            for n, (y, low) in enumerate(zip((gate, up), lows, strict=True)):
                if needed[2 * n + 1]:
                    found[2 * n + 1] = gradient(y.t(), low.left, first_b[n].dtype).mul_(low.scaling)
        return dx, None, None, None, None, *found


def _low_ranks(
    parts: list[torch.Tensor | None], factors: Sequence[torch.Tensor | None], scaling: float, dtype: torch.dtype
) -> list[LowRank | None]:
    """The adapters' parts by x Aᵀ (T, r) and B (n, r); None without an adapter."""
    return [
        None if part is None else LowRank(part, b.to(dtype).t(), scaling)
        for part, b in zip(parts, factors, strict=True)
    ]


def _has_kernel(y: torch.Tensor, *factors: LowRank | torch.Tensor | None) -> bool:
    ranks = [one.left.shape[1] if isinstance(one, LowRank) else len(one) for one in factors if one is not None]
    return y.is_cuda and y.dtype in (torch.bfloat16, torch.float16) and max(ranks, default=0) <= KERNEL_RANK


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, gate_low: LowRank | None, up_low: LowRank | None, a: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(gate) · up (T, n), each of the two with its adapter's part, and its product with aᵀ (T, r), a (r, n)
    the next layer's A; None without a. gate and up (T, n) are left as they are.
    """
    if len(gate) and _has_kernel(gate, gate_low, up_low, a):
        from kit.policy import swiglu_kernel

        return swiglu_kernel.swiglu(gate, up, gate_low, up_low, a)
    return swiglu_in_torch(gate, up, gate_low, up_low, a)


def swiglu_in_torch(
    gate: torch.Tensor, up: torch.Tensor, gate_low: LowRank | None, up_low: LowRank | None, a: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reference implementation of `swiglu`."""
    gate = gate if gate_low is None else gate_low.added_to(gate)
    up = up if up_low is None else up_low.added_to(up)
    act = fused_norms.swiglu_in_torch(gate, up)
    return act, None if a is None else act @ a.t()


def swiglu_gradient(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *lows: LowRank | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Write the gradients of gate and up over these (T, n), and silu(gate) · up over `grad` (T, n), the gradient of
    that without the next adapter's part. `lows` are the parts of gate, up and `grad`. Return the products of both
    gradients with B (T, r); None without an adapter.
    """
    if len(gate) and _has_kernel(gate, *lows):
        from kit.policy import swiglu_kernel

        return swiglu_kernel.swiglu_gradient(gate, up, grad, *lows)
    return swiglu_gradient_in_torch(gate, up, grad, *lows)


def swiglu_gradient_in_torch(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, *lows: LowRank | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Reference implementation of `swiglu_gradient`: in float32, each result rounded once."""
    gate_low, up_low, down_low = lows
    g = gate if gate_low is None else gate_low.added_to(gate)
    u = up if up_low is None else up_low.added_to(up)
    d = grad if down_low is None else down_low.added_to(grad)
    found = *fused_norms.swiglu_gradient_in_torch(g, u, d), fused_norms.swiglu_in_torch(g, u)
    for place, value in zip((gate, up, grad), found, strict=True):
        place.copy_(value)
    by_gate, by_up = (None if low is None else y @ low.right.t() for y, low in ((gate, gate_low), (up, up_low)))
    return by_gate, by_up
