"""Memory of a trainer process that holds a part of the base, split over the processes by FSDP2.

What each of N processes keeps: 1/N of the stored weights, of the 16-bit layers, of the adapter, its gradients and its
optimizer state. The scales of NF4 stay whole. A decoder layer is gathered to compute, and the next one meanwhile.
Loading, each process holds the whole base. ZeRO-3 is planned as if the base were whole.
"""

from kit.core.config.schema import Config
from kit.core.config.sharding_rules import FSDP2, announced
from kit.plan import memory
from kit.plan.decoder import Shape
from kit.plan.gpus import Card

SPLIT = ("16-bit layers", "adapter", "optimizer", memory.REFERENCE)
GATHERED = 2  # decoder layers
LOADING = "loading"  # the phase before the base is split


def is_sharded(processes: int) -> bool:
    """Whether `accelerate launch` announces a base that these trainer processes split."""
    return processes > 1 and announced() == FSDP2


def sharded(parts: dict[str, float], shape: Shape, config: Config, processes: int) -> dict[str, float]:
    """The parts of a phase, in GiB, with the base split over the processes."""
    policy = config.policy
    name = memory.STORED[policy.quantization]
    codes = shape.linear_weights * (0.5 if policy.quantization == "nf4" else memory.stored_bytes(config)) / memory.GIB
    found = parts | {name: parts[name] - codes + codes / processes}
    for part in SPLIT:
        if part in parts:
            found[part] = parts[part] / processes
    if "gradients" in parts:  # without the second copy that DDP sums them in
        found["gradients"] = parts["gradients"] / 2 / processes
    found["gathered layers"] = GATHERED * codes / shape.layers
    return found


def loading(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """Parts in GiB while a process reads the base, before it keeps its part."""
    whole = memory.resident(shape, config, card)
    return {name: gib for name, gib in whole.items() if name != "optimizer"}
