"""How the frozen base is stored (`policy.quantization`): its name, and settings that conflict with it.

Imports no torch.
"""

from kit.core.config.schema import Config

# Names of the base in a sentence, by policy.quantization.
CALLED = {"nf4": "NF4", "fp8": "FP8", "none": "unquantized"}


def faults(config: Config, sharded: str | None) -> list[str]:
    """Settings that conflict with a base that is not in NF4. `sharded` is `sharding_rules.announced()`."""
    found: list[str] = []
    policy = config.policy
    kind = policy.quantization
    if kind == "nf4":
        return found
    if not policy.double_quantization:
        found.append(
            f"policy.double_quantization is false with policy.quantization {kind}: only nf4 has the block scales "
            "that it applies to. Remove it."
        )
    if policy.compute == "fp8" and kind == "none":
        found.append(
            "policy.compute is fp8 with policy.quantization none: every matmul would quantize its weight again. Set "
            "policy.quantization to fp8, which stores those codes, or policy.compute to fused."
        )
    if sharded and kind == "fp8":
        found.append(
            f"policy.quantization is fp8 under {sharded}, which would leave each process only part of the codes that "
            "its matmuls need. Use nf4 or none, or accelerate_configs/ddp.yaml."
        )
    return found


def describe_base(config: Config) -> str:
    """The base in a few words: its source, its storage and its compute dtype."""
    policy, model = config.policy, config.model
    text = f"{model.source}, {policy.quantization}, {model.dtype} compute"
    if policy.quantization != "nf4":
        return text
    return f"{text}, double quantization {'on' if policy.double_quantization else 'off'}"
