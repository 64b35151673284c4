"""How rollout servers serve the format of a policy (`policy.quant_cfg`): the same numbers, by `server.weights`."""

from recipes.parts.config import Config
from recipes.parts.errors import BadInput
from recipes.parts.quant_format import QuantFormat, read_quant_format

# Formats that vLLM's own quantization serves, and `server.weights`; others are BF16 weights that hold their numbers.
BY_VLLM = {"fp8": "fp8_per_channel", "fp8_block": "fp8_per_block"}


def served_weights(fmt: QuantFormat) -> str:
    """The `server.weights` that a format needs."""
    return BY_VLLM.get(fmt.name, "bf16")


def served_format(config: Config) -> QuantFormat | None:
    """The format that the replicas compute in: the policy's."""
    return read_quant_format(config.policy.quant_cfg) if config.policy.quant_cfg is not None else None


def problems(config: Config) -> list[str]:
    """Why `server.weights` cannot serve `policy.quant_cfg`; nothing where there is no server or no such format."""
    try:
        fmt = served_format(config)
    except BadInput:
        return []  # quant_format.problems says so
    if fmt is None or config.rollout.backend != "server" or config.server.weights == served_weights(fmt):
        return []
    return [
        f"server.weights is {config.server.weights} and policy.quant_cfg {config.policy.quant_cfg}: {fmt.name} is "
        f"served as {served_weights(fmt)}, and any other quantization would come on top of it. Set server.weights to "
        f"{served_weights(fmt)}."
    ]
