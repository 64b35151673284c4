"""`server.kv_cache` on this machine: the flags of vLLM, and their reason.

`fastest` needs compiled kernels of FlashInfer. On Hopper vLLM decodes by its XQA kernel and reads prompts by its
FlashAttention 3 kernel. flashinfer-python has the sources of both, which are built for each model's heads: in package
flashinfer-jit-cache, or by nvcc at the first start, into a folder below the home directory. vLLM takes XQA only with
package flashinfer-cubin, or where it reaches NVIDIA's server. Read in vLLM 0.31 and in FlashInfer 0.6.14, which
vLLM 0.26 requires, to 0.7.0, which vLLM 0.31 does.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from kit.core.config.cache_rules import FASTEST, FLASHINFER, FP8, MODEL_DTYPE, Attention, attention_of, called
from kit.core.config.cache_rules import model_dtype_because as because
from kit.core.config.schema import Config
from kit.core.limits import BATCHED_TOKENS, flashinfer_gib

PYTHON, CUBINS, JIT_CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
# A start with server.kv_cache fastest compiles kernels only if the run waits this long for its servers.
COMPILE_S = 900
# FlashInfer's names of the two kernels (flashinfer/jit/xqa.py, jit/attention/modules.py) for BF16 and an FP8 cache;
# vLLM's versions differ in the page size and in the dtype of a prompt's queries.
DECODE = (
    "xqa_input_bf16_kv_cache_e4m3_output_bf16_page_size_*_head_dim_{head_dim}_head_group_ratio_{ratio}_"
    "use_sliding_window_False_use_spec_dec_False*"
)
PREFILL = (
    "batch_prefill_with_kv_cache_dtype_q_*_dtype_kv_e4m3_dtype_o_bf16_*_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_*"
    "use_swa_False_use_logits_cap_False*"
)


@dataclass(frozen=True)
class FlashInfer:
    """Installed packages of FlashInfer, name and version, folders of compiled kernels, and whether there is a
    compiler. `vouched` is vLLM's variable for cubins that are there without their package."""

    packages: dict[str, str] = field(default_factory=dict)
    compiled: tuple[Path, ...] = ()
    has_compiler: bool = False
    vouched: bool = False

    @property
    def version(self) -> str | None:
        return self.packages.get(PYTHON)

    def has_kernels(self, attention: Attention) -> bool:
        """Whether both kernels of a model's heads are compiled."""
        sizes = {"head_dim": attention.head_dim, "ratio": attention.heads // attention.kv_heads}
        return all(
            any(next(folder.glob(f"{name.format(**sizes)}/*.so"), None) for folder in self.compiled)
            for name in (DECODE, PREFILL)
        )

    def fault(self, attention: Attention, wait_s: float) -> str:
        """Explain why vLLM cannot start by FlashInfer without a long compilation, with the fix; empty if it can."""
        if self.version is None:
            return f"{PYTHON} is not installed. Install vLLM's requirements"
        if CUBINS not in self.packages and not self.vouched:
            return f"{CUBINS} is not installed. Install {CUBINS}=={self.version}"
        for name, found in self.packages.items():
            # The jit cache's version ends with that of CUDA: 0.6.14+cu130.
            if found.partition("+")[0] != self.version.partition("+")[0]:
                return f"{name} {found} is not of {PYTHON} {self.version}. Install the same version of both"
        if self.has_kernels(attention) or (self.has_compiler and wait_s >= COMPILE_S):
            return ""
        group = f"groups of {attention.heads // attention.kv_heads} heads of {attention.head_dim}"
        install = f"Install {JIT_CACHE}=={self.version}"
        if self.has_compiler:
            install += f", or let one start compile them: --rollout.server_wait_s {COMPILE_S}"
        return f"FlashInfer's kernels for {group} are not compiled here. {install}"


@dataclass(frozen=True)
class Choice:
    """Flags of the KV cache: its dtype, the attention backend (None: vLLM's choice), and the reason for both.
    `extra_gib` is what FlashInfer takes beside what vLLM measures."""

    dtype: str
    backend: str | None = None
    reason: str = ""
    extra_gib: float = 0.0

    @property
    def options(self) -> dict[str, str]:
        found = {"kv_cache_dtype": self.dtype}
        return found | {"attention_backend": self.backend} if self.backend else found

    @property
    def text(self) -> str:
        """Dtype, backend and reason in a line."""
        return ", ".join(filter(None, (called(self.dtype, self.backend), self.reason)))


def installed_flashinfer() -> FlashInfer:
    """Find what this environment, which is the servers', has of FlashInfer; nothing is imported."""
    packages: dict[str, str] = {}
    folders: set[Path] = set()
    for one in metadata.distributions():
        name = str(one.metadata["Name"]).replace("_", "-").lower()
        # Before 0.7 one package has the kernels of all GPUs, since then there is one per compute capability.
        has_kernels = name == JIT_CACHE or (name.startswith(f"{JIT_CACHE}-") and "90" in name)
        if name in (PYTHON, CUBINS) or has_kernels:
            packages.setdefault(name, one.version)
        if has_kernels:
            folders |= {
                Path(str(one.locate_file(file))).parents[1] for file in one.files or () if file.suffix == ".so"
            }
    if version := packages.get(PYTHON):
        home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
        # A folder per set of GPUs: 90a, 90a_100a.
        folders |= set((home / ".cache/flashinfer" / version).glob("*90*/cached_ops"))
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    has_nvcc = bool(shutil.which("nvcc")) or os.access(Path(cuda) / "bin/nvcc", os.X_OK)
    return FlashInfer(
        packages=packages,
        compiled=tuple(sorted(folders)),
        has_compiler=has_nvcc and bool(shutil.which("ninja")),
        vouched=os.environ.get("VLLM_HAS_FLASHINFER_CUBIN", "0") not in ("", "0"),
    )


def choose(
    config: Config,
    is_cpu: bool,
    cards: Sequence[tuple[str, tuple[int, int]]],
    model: Mapping[str, Any],
    found: FlashInfer | None = None,
) -> Choice:
    """Resolve `server.kv_cache` for the GPUs of this machine, names and compute capabilities of their kinds, and the
    language model with this config.json. `found` defaults to what is installed."""
    wanted, key = config.server.kv_cache, f"server.kv_cache {FASTEST}"
    if wanted != FASTEST:
        return Choice(wanted)
    if is_cpu:
        return Choice(MODEL_DTYPE, reason=f"{key}: vLLM for CPUs")
    attention = attention_of(model)
    kinds = [capability for _, capability in cards] or [None]
    reason = next((why for kind in kinds if (why := because(config, kind, attention))), "")
    if reason or attention is None:
        return Choice(MODEL_DTYPE, reason=f"{key}: {reason}")
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return Choice(MODEL_DTYPE, reason=f"{key}: VLLM_BATCH_INVARIANT is set, with which vLLM leaves XQA out")
    found = found or installed_flashinfer()
    if fault := found.fault(attention, config.rollout.server_wait_s):
        return Choice(MODEL_DTYPE, reason=f"{key}: {fault} for faster long completions")
    length = config.rollout.max_completion_length
    reason = f"{key}: completions of {length:,} tokens on {cards[0][0]}, {PYTHON} {found.version}"
    if not found.has_kernels(attention):
        reason += ", which compiles its kernels at this start, for minutes"
    tokens = config.server.vllm.get("max_num_batched_tokens") or BATCHED_TOKENS
    return Choice(FP8, FLASHINFER, reason, flashinfer_gib(attention.heads * attention.head_dim, tokens))
