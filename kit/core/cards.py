"""What GPUs can do: `GENERATIONS` has a row per compute capability, `CARDS` one per card. Imports no torch.

Configuration, plan, doctor, trainer and server read the rows, so a card's limit is written once. What is served was
read in vLLM 0.31.0: kernels/linear/__init__.py and the `is_supported` of its kernels, quantization/online, platforms/
cuda.py and the attention backends. `kit/core/config/card_rules.py` compares a configuration with a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# For CUDA's multi-process service: the share of a card's multiprocessors, in %, that a process may use.
PART_OF_CARD = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
W8A8, W8A16, W16A16, W4A4, W4A16 = "W8A8", "W8A16", "W16A16", "W4A4", "W4A16"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """GPUs of one compute capability.

    `served` maps `server.weights` to the product that vLLM makes of it: W8A8 quantizes the inputs too, W8A16 (Marlin)
    reads FP8 weights and multiplies in 16 bits, as W4A16 does with INT4 ones. A value that is missing is refused by
    vLLM.
    """

    name: str
    capability: tuple[int, int]
    dtypes: tuple[str, ...]  # model.dtype in which its matmuls are fast
    served: dict[str, str] = field(default_factory=dict)
    trainer_fp8: bool = False  # torch._scaled_mm, and the FP8 kernels of kit/weights
    w4a16: str = ""  # vLLM's kernel for INT4 weights
    nvfp4: str = ""  # what vLLM makes of NVFP4 weights and inputs
    mxfp8: str = ""  # the same of MXFP8, which no key of the kit serves
    attention: str = ""  # vLLM's first choice
    fp8_cache: bool = False  # server.kv_cache fp8
    fp8_cache_wins: bool = False  # measured to be faster by FlashInfer (bench/STEP.md): server.kv_cache fastest
    flash: bool = False  # train.packed_attention flash
    cudnn: bool = False  # train.packed_attention cudnn

    @property
    def number(self) -> str:
        return "{}.{}".format(*self.capability)

    @property
    def is_covered(self) -> bool:
        """Whether the CUDA builds of the kit's requirements have code for it."""
        return bool(self.served)

    def weights_served_as(self, product: str) -> list[str]:
        """Values of `server.weights` that become this product."""
        return [weights for weights, found in self.served.items() if found == product]


_HALF = ("float16", "float32")
_MARLIN = {"fp8_per_tensor": W8A16, "fp8_per_block": W8A16, "w4a16": W4A16, "bf16": W16A16}
_FP8 = {"fp8_per_channel": W8A8, "fp8_per_tensor": W8A8, "fp8_per_block": W8A8, "w4a16": W4A16, "bf16": W16A16}

# CUDA 13, for which torch 2.13 and vLLM 0.31 are built, compiles for 7.5 and newer.
_VOLTA = Generation(name="Volta", capability=(7, 0), dtypes=_HALF)
_TURING = Generation(
    name="Turing",
    capability=(7, 5),
    dtypes=_HALF,
    served=_MARLIN,
    w4a16="Marlin",
    nvfp4=W4A16,
    mxfp8=W8A16,
    attention="Triton",
)
_AMPERE = replace(
    _TURING,
    name="Ampere",
    capability=(8, 0),
    dtypes=("bfloat16", *_HALF),
    attention="FlashAttention 2",
    fp8_cache=True,
    flash=True,
)
# vLLM's W8A8 kernels for FP8 blocks begin at 9.0, and it prefers Marlin's to Triton's.
_ADA = replace(_AMPERE, name="Ada", capability=(8, 9), served=_FP8 | {"fp8_per_block": W8A16}, trainer_fp8=True)
_HOPPER = replace(
    _ADA,
    name="Hopper",
    capability=(9, 0),
    served=_FP8,
    w4a16="Machete",
    attention="FlashAttention 3",
    fp8_cache_wins=True,
    cudnn=True,
)
# cuDNN has no kernels for concatenated sequences on 12.x.
_BLACKWELL = replace(_ADA, name="Blackwell", capability=(12, 0), served=_FP8, nvfp4=W4A4, mxfp8=W8A8)

# A card of a capability in between has the row below it.
GENERATIONS = (
    _VOLTA,
    _TURING,
    _AMPERE,
    replace(_AMPERE, capability=(8, 6)),
    _ADA,
    _HOPPER,
    replace(_BLACKWELL, capability=(10, 0), attention="FlashInfer", cudnn=True),
    _BLACKWELL,
)


def generation(capability: tuple[int, int]) -> Generation:
    """The row of a compute capability; the oldest one for a GPU that is older than all."""
    return next((row for row in reversed(GENERATIONS) if row.capability <= tuple(capability)), GENERATIONS[0])


def part_fault(environment: Mapping[str, str]) -> str | None:
    """Error text if a vLLM server with this environment would use a part of a card; None if it would not."""
    part = environment.get(PART_OF_CARD, "")
    if not part or part == "100":
        return None
    return (
        f"{PART_OF_CARD} is {part}: on a part of an H200 products were wrong by half without an error (70 %), and "
        "vLLM's were never compared on one. Leave that variable out for servers."
    )


def first_fp8() -> str:
    """The first compute capability with FP8 arithmetic, as a number."""
    return next(row.number for row in GENERATIONS if row.trainer_fp8)


@dataclass(frozen=True)
class Card:
    """One accelerator: the memory that torch sees, dense TFLOP/s in 16 bits (BF16, or FP16 where there is no BF16)
    and in FP8, GB/s of bandwidth, compute capability.

    `fp8_tflops` is None if the card has no FP8 arithmetic; the others are None if unknown (a CPU, another card).
    """

    name: str
    gib: float
    half_tflops: float | None = None
    fp8_tflops: float | None = None
    gb_per_s: float | None = None
    capability: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def generation(self) -> Generation | None:
        return None if self.capability is None else generation(self.capability)


def _cards(*rows: tuple) -> dict[str, Card]:
    return {row[0]: Card(*row) for row in rows}


# Manufacturers' data sheets, without sparsity; memory as torch.cuda.get_device_properties gives it.
CARDS = _cards(
    ("b200", 178.4, 2250, 4500, 8000, (10, 0)),
    ("h200", 139.8, 989, 1979, 4800, (9, 0)),
    ("h100-94g", 93.1, 835, 1671, 3900, (9, 0)),
    ("h100-80g", 79.1, 989, 1979, 3350, (9, 0)),
    ("h100-pcie", 79.1, 756, 1513, 2000, (9, 0)),
    ("a100-80g", 79.1, 312, None, 2039, (8, 0)),
    ("a100-40g", 39.4, 312, None, 1555, (8, 0)),
    ("rtxpro6000", 94.9, 503, 1007, 1792, (12, 0)),
    ("rtx6000ada", 47.4, 364, 728, 960, (8, 9)),
    ("l40s", 44.4, 362, 733, 864, (8, 9)),
    ("a6000", 47.4, 155, None, 768, (8, 6)),
    ("a40", 44.4, 150, None, 696, (8, 6)),
    ("l4", 22.0, 121, 242, 300, (8, 9)),
    ("a10", 22.1, 125, None, 600, (8, 6)),
    ("rtx5090", 31.4, 209, 419, 1792, (12, 0)),
    ("rtx5080", 15.5, 113, 225, 960, (12, 0)),
    ("rtx4090", 23.5, 165, 330, 1008, (8, 9)),
    ("rtx4080", 15.6, 97, 195, 717, (8, 9)),
    ("rtx3090", 23.6, 71, None, 936, (8, 6)),
    ("v100-32g", 31.7, 125, None, 900, (7, 0)),
    ("v100-16g", 15.8, 125, None, 900, (7, 0)),
    ("t4", 14.6, 65, None, 320, (7, 5)),
)
