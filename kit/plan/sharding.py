"""Memory of a trainer process that holds a part of the base, split over the processes by FSDP2 or ZeRO-3.

What each of N processes keeps: 1/N of the stored weights, of the 16-bit layers, of the adapter, its gradients and its
optimizer state. The scales of NF4 stay whole. A decoder layer is gathered to compute; FSDP2 gathers the next one
meanwhile, and ZeRO-3 copies the layer's tensors out of what it received. Loading, each process holds the whole base,
under ZeRO-3 also while it generates.
"""

from kit.core.config.schema import Config
from kit.core.config.sharding_rules import ZERO3, announced
from kit.plan import memory
from kit.plan.decoder import Shape
from kit.plan.gpus import Card

SPLIT = ("16-bit layers", "adapter", "optimizer", memory.REFERENCE)
GATHERED = 2  # decoder layers
# Bytes per trained weight in ZeRO-3, whatever policy.adapter_dtype says: the weight in bfloat16, its float32 master
# with AdamW's two moments, the gradient in bfloat16.
ZERO3_BYTES = {"adapter": 2, "optimizer": 12, "gradients": 2}
LOADING = "loading"  # the phase before the base is split


def is_sharded(processes: int) -> bool:
    """Whether `accelerate launch` announces a base that these trainer processes split."""
    return processes > 1 and announced() is not None


def sharded(
    parts: dict[str, float], shape: Shape, config: Config, processes: int, generates: bool = False
) -> dict[str, float]:
    """The parts of a phase, in GiB, with the base split over the processes; `generates`: the trainer does, in this
    phase."""
    policy = config.policy
    name = memory.STORED[policy.quantization]
    codes = shape.linear_weights * (0.5 if policy.quantization == "nf4" else memory.stored_bytes(config)) / memory.GIB
    found = parts | {name: parts[name] - codes + codes / processes}
    for part in SPLIT:
        if part in parts:
            found[part] = parts[part] / processes
    if "gradients" in parts:  # without the second copy that DDP sums them in
        found["gradients"] = parts["gradients"] / 2 / processes
    if announced() == ZERO3:
        trained = memory.adapter_weights(shape, config) / processes / memory.GIB
        found |= {part: count * trained for part, count in ZERO3_BYTES.items() if part in parts}
        if generates:  # everything is gathered, beside the part that a process keeps
            return found | {part: found[part] + parts[part] for part in (name, "16-bit layers", "adapter")}
    found["gathered layers"] = GATHERED * codes / shape.layers
    return found


def loading(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """Parts in GiB while a process reads the base, before it keeps its part."""
    whole = memory.resident(shape, config, card)
    return {name: gib for name, gib in whole.items() if name != "optimizer"}
