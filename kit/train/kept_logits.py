"""TRL's log-prob head with its logits kept for the backward pass: `train.keep_logits`.

TRL's head (`ChunkedLogProbFunction`, trl 1.16) multiplies hidden states with the head in tiles, reduces each tile, and
multiplies again in the backward pass: three products of that size in an update. Here the tiles are parts of one tensor
(N, V) in the compute dtype, which the backward pass turns into the gradient in place: two products, for 2 N V bytes at
the peak. The reductions are TRL's, the tiles have its bits, so log-probs and gradients are the same bit for bit.
"""

import torch
from torch.autograd.function import once_differentiable
from trl.kernels import chunked_logprob
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, ChunkedLogProbFunction
from trl.trainer import utils


def keep_logits(is_kept: bool) -> None:
    """Make TRL's head keep its logits in this process, or not. `ValueError` if TRL calls it by another name."""
    if not hasattr(utils, "_ChunkedLogProbFunction"):
        raise ValueError("trl.trainer.utils has no _ChunkedLogProbFunction; trl 1.16.0 has")
    utils._ChunkedLogProbFunction = KeptLogits if is_kept else ChunkedLogProbFunction


class KeptLogits(ChunkedLogProbFunction):
    """`ChunkedLogProbFunction` for a frozen head; a pass without gradients, or a trained head, is TRL's own."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=OPTIONAL_OUTPUTS,
    ):
        """Arguments and results as TRL's: hidden (N, H), weight (V, H), targets (N,) → five tensors (N,) or None."""
        ctx.logits = None
        if not ctx.needs_input_grad[0] or any(ctx.needs_input_grad[1:3]):
            settings = temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            return ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, *settings)
        ctx.set_materialize_grads(False)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.chunk_size, ctx.kernel_args = (
            chunk_size,
            {
                "logit_scale": logit_scale,
                "softcap": final_logit_softcapping or 1.0,
                "inv_t": 1 / temperature,
                "HAS_SOFTCAP": final_logit_softcapping is not None,
            },
        )
        flags = {f"HAS_{name.upper()}": name in outputs for name in OPTIONAL_OUTPUTS}
        ctx.logits = hidden.new_empty(len(hidden), len(weight), dtype=dtype)
        # Largest logit, Σ exp, Σ z exp, Σ exp², Σ z, largest before the target's, the target's.
        found = [hidden.new_full(targets.shape, first, dtype=torch.float32) for first in _FIRST]
        for rows, columns in _tiles(ctx.logits, chunk_size):
            tile = ctx.logits[rows, columns]
            torch.mm(hidden[rows].to(dtype), weight[columns].to(dtype).t(), out=tile)
            if bias is not None:
                tile.add_(bias[columns].to(dtype))
            fold = chunked_logprob._forward_tile
            if chunked_logprob._use_triton(hidden.device):
                fold = chunked_logprob._forward_kernel[(len(tile),)]
            given = [tile, tile.stride(0), targets[rows], *(one[rows] for one in found), columns.start, tile.shape[1]]
            fold(*given, BLOCK_SIZE=chunked_logprob._BLOCK_SIZE, **flags, **ctx.kernel_args)
        return _results(ctx, hidden, weight, bias, targets, found, outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, *others):
        if ctx.logits is None:
            if not hasattr(ctx, "compute_dtype"):
                raise RuntimeError("train.keep_logits: a second backward pass, and the first wrote over the logits.")
            return ChunkedLogProbFunction.backward(ctx, grad_logprobs, grad_entropy, *others)
        logits, ctx.logits = ctx.logits, None
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        by_logprob, by_entropy = (
            None if one is None else one.float().contiguous() for one in (grad_logprobs, grad_entropy)
        )
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32)
        with utils.maybe_gather_lm_head_ctx(weight, bias):
            for rows, columns in _tiles(logits, ctx.chunk_size):
                tile = logits[rows, columns]
                fold, block = chunked_logprob._backward_tile, chunked_logprob._BLOCK_SIZE
                if chunked_logprob._use_triton(hidden.device):
                    fold = chunked_logprob._backward_kernel[(len(tile), -(-tile.shape[1] // block))]
                absent = log_z[rows]
                given = [targets[rows], log_z[rows], entropy[rows]]
                given += [absent if one is None else one[rows] for one in (by_logprob, by_entropy)]
                flags = {"HAS_LOGPROB_GRAD": by_logprob is not None, "HAS_ENTROPY_GRAD": by_entropy is not None}
                size = columns.start, tile.shape[1]
                fold(tile, tile.stride(0), *given, *size, BLOCK_SIZE=block, **flags, **ctx.kernel_args)
                chunked_logprob._addmm_fp32(grad_hidden[rows], tile, weight[columns].to(tile.dtype))
        return grad_hidden.to(hidden.dtype), *[None] * 8


_FIRST = (-torch.inf, 0.0, 0.0, 0.0, 0.0, -torch.inf, 0.0)


def _tiles(logits: torch.Tensor, width: int) -> list[tuple[slice, slice]]:
    """Rows and columns of TRL's tiles, in its order."""
    (rows, columns), height = logits.shape, chunked_logprob.TOKEN_CHUNK_SIZE
    return [
        (slice(top, min(top + height, rows)), slice(left, min(left + width, columns)))
        for top in range(0, rows, height)
        for left in range(0, columns, width)
    ]


def _results(ctx, hidden, weight, bias, targets, found, outputs):
    """What TRL's forward pass makes of its statistics."""
    largest, sum_exp, x_sum_exp, sq_sum_exp, z_sum, before_target, target = found
    log_z = largest + torch.log(sum_exp)
    entropy = log_z - x_sum_exp / sum_exp if "entropy" in outputs else None
    squares = torch.log(sq_sum_exp) - 2 * torch.log(sum_exp) if "log_sum_sq_probs" in outputs else None
    mean = z_sum / len(weight) if "mean_logits" in outputs else None
    is_top1 = (target >= largest) & (target > before_target) if "is_top1" in outputs else None
    ctx.save_for_backward(hidden, weight, bias, targets, log_z, log_z if entropy is None else entropy)
    ctx.mark_non_differentiable(*(one for one in (squares, mean, is_top1) if one is not None))
    return target - log_z, entropy, squares, mean, is_top1
