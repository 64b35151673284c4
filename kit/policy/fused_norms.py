"""`policy.kernels: fused`: RMSNorm, residual sums, rotary embedding and SwiGLU of a loaded model.

Autograd functions, each of them one pass over the tokens where torch and liger make several:

- A norm has the gradient of its input alone, as its weight is frozen. It is added to the gradient that comes past the
  norm through the residual sum.
- The sum after attention is computed with the norm that reads it.
- The norm of a query's or key's heads (Qwen3) is computed with their rotary embedding.
- Nothing is kept but the inputs, in the compute dtype.

A norm's gradient is written over the gradient of its output, SwiGLU's over gate and up: nothing else reads these (as
in liger.py), and in a recomputed layer (`train.recompute`) they were made for that one run. A second backward pass
through the same SwiGLU is refused.

Rounded where transformers' Llama and Qwen3 round, except that rotary embedding rounds its sum once, and gradients are
rounded once. The functions here are the reference implementation of the kernels in `norm_kernel.py`, which compute on
a GPU.
"""

import types
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from kit.policy.liger import NORMS, with_rotary

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

HEAD_NORMS = ("q_norm", "k_norm")


def use_fused_kernels(model: "PreTrainedModel | PeftModel") -> dict[str, int]:
    """Patch the layers of `model`, one of layer_kernels.py's `MODELS`; return how many norms, residual sums with their
    norm, rotary embeddings and SwiGLUs changed.

    Only this model's modules change. `ValueError` if a norm's weight is to be trained: it gets no gradient here.
    """
    changed = {"norms": 0, "sums": 0, "rotary": 0, "swiglu": 0}
    for name, module in list(model.named_modules()):
        leaf, kind = name.rpartition(".")[2], type(module).__name__
        if leaf in NORMS and kind.endswith("RMSNorm"):
            if module.weight.requires_grad:
                raise ValueError(f"policy.kernels fused gives norms no gradient, and {name}.weight is to be trained")
            forward = _as_it_is if leaf in HEAD_NORMS else _norm_alone if leaf == "norm" else _sum_and_norm
            module.forward = types.MethodType(forward, module)
            changed["norms"] += 1
        elif kind.endswith("DecoderLayer"):
            module.forward = types.MethodType(_layer, module)
            changed["sums"] += 1
        elif kind.endswith("MLP") and hasattr(module, "gate_proj"):
            module.forward = types.MethodType(_mlp, module)
            changed["swiglu"] += 1
        elif kind.endswith("Attention"):
            rotary = Rotary(getattr(module, "q_norm", None), getattr(module, "k_norm", None))
            module.forward = types.MethodType(with_rotary(type(module).forward, rotary), module)
            changed["rotary"] += 1
    return changed


def _as_it_is(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The norm of each head, left to `Rotary`."""
    return x


def _norm_alone(self: Any, x: torch.Tensor) -> torch.Tensor:
    return _Norm.apply(x, None, self.weight, self.variance_epsilon)[1]


def _sum_and_norm(self: Any, x: torch.Tensor, more: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _Norm.apply(x, more, self.weight, self.variance_epsilon)


def _layer(self: Any, hidden_states: torch.Tensor, **keys: Any) -> torch.Tensor:
    """A decoder layer of Llama's form: h = x + attention(norm(x)), then h + mlp(norm(h))."""
    residual, normed = self.input_layernorm(hidden_states)
    attended, _ = self.self_attn(hidden_states=normed, **keys)
    residual, normed = self.post_attention_layernorm(residual, attended)
    return residual + self.mlp(normed)


def _mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))


class Rotary:
    """Rotary embedding of queries and keys, or of their heads' norms, in place of `apply_rotary_pos_emb`."""

    def __init__(self, query_norm: torch.nn.Module | None, key_norm: torch.nn.Module | None):
        self.norms = query_norm, key_norm

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **keys: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (B, H, T, D) and keys (B, G, T, D), cos and sin (B or 1, T, D)."""
        found = []
        for x, norm in zip((q, k), self.norms, strict=True):
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
            found.append(_Rotate.apply(x, weight, eps, cos, sin))
        return found[0], found[1]


class _Norm(torch.autograd.Function):
    """(h, norm(h)) of h = x, or x + more, both (…, n)."""

    @staticmethod
    def forward(ctx, x, more, weight, eps):
        h, y = norm(x, more, weight, eps)
        ctx.save_for_backward(h, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.has_more = eps, more is not None
        return h, y

    @staticmethod
    @once_differentiable
    def backward(ctx, past, grad):
        h, weight = ctx.saved_tensors
        dx = past if grad is None else norm_gradient(grad, past, h, weight, ctx.eps)
        return dx, dx if ctx.has_more else None, None, None


class _Rotate(torch.autograd.Function):
    """Rotary embedding of x (B, H, T, D), or of its heads' norms with `weight` (D,)."""

    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        ctx.save_for_backward(None if weight is None else x, weight, cos, sin)
        ctx.eps = eps
        return rotate(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, cos, sin = ctx.saved_tensors
        return rotate_gradient(grad, x, weight, ctx.eps, cos, sin), None, None, None, None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) · up (…, n)."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        ctx.is_used = False
        return swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        if ctx.is_used:
            raise RuntimeError("policy.kernels fused: a second backward pass, and the first wrote over what was kept.")
        ctx.is_used = True
        gate, up = ctx.saved_tensors
        return swiglu_gradient(gate, up, grad)


def norm(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return h = x, or x + `more`, and its RMSNorm (…, n)."""
    if x.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.norm(x, more, weight, eps)
    return norm_in_torch(x, more, weight, eps)


def norm_in_torch(
    x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `norm`."""
    h = x if more is None else x + more
    wide = h.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return h, weight.to(h.dtype) * wide.to(h.dtype)


def norm_gradient(
    grad: torch.Tensor, past: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of h from that of its norm and `past`, its other one; may be written over `grad`."""
    if h.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.norm_gradient(grad, past, h, weight, eps)
    return norm_gradient_in_torch(grad, past, h, weight, eps)


def norm_gradient_in_torch(
    grad: torch.Tensor, past: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Reference implementation of `norm_gradient`: in float32, rounded once."""
    wide, grad = h.float(), grad.float() * weight.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    found = scale * (grad - wide * (scale.square() * (grad * wide).mean(-1, keepdim=True)))
    return (found if past is None else found + past.float()).to(h.dtype)


def rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Return the rotary embedding (B, H, T, D) of x, or of the RMSNorm of each head with `weight` (D,); cos and sin
    (B or 1, T, D)."""
    if x.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.rotate(x, weight, eps, cos, sin)
    return rotate_in_torch(x, weight, eps, cos, sin)


def rotate_in_torch(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Reference implementation of `rotate`: the embedding in float32, rounded once."""
    y = (x if weight is None else norm_in_torch(x, None, weight, eps)[1]).float()
    return (y * cos[:, None].float() + _turned(y) * sin[:, None].float()).to(x.dtype)


def rotate_gradient(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of x (B, H, T, D); x is None without a norm. May be written over `grad`."""
    if grad.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.rotate_gradient(grad, x, weight, eps, cos, sin)
    return rotate_gradient_in_torch(grad, x, weight, eps, cos, sin)


def rotate_gradient_in_torch(
    grad: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Reference implementation of `rotate_gradient`: in float32, rounded once."""
    wide = grad.float()
    wide = wide * cos[:, None].float() - _turned(wide * sin[:, None].float())
    if x is None or weight is None:
        return wide.to(grad.dtype)
    return norm_gradient_in_torch(wide, None, x, weight, eps)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """(-x₂, x₁) of x = (x₁, x₂)."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up (…, n)."""
    if gate.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.swiglu(gate.contiguous(), up.contiguous())
    return swiglu_in_torch(gate, up)


def swiglu_in_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Reference implementation of `swiglu`."""
    return torch.nn.functional.silu(gate) * up


def swiglu_gradient(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up (…, n); may be written over these."""
    if gate.is_cuda:
        from kit.policy import norm_kernel

        return norm_kernel.swiglu_gradient(gate.contiguous(), up.contiguous(), grad.contiguous())
    return swiglu_gradient_in_torch(gate, up, grad)


def swiglu_gradient_in_torch(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `swiglu_gradient`: in float32, rounded once."""
    g, u, d = (one.float() for one in (gate, up, grad))
    share = torch.sigmoid(g)
    silu = g * share
    return (d * u * (silu * (1 - share) + share)).to(gate.dtype), (d * silu).to(up.dtype)
