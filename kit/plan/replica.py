"""GPU memory that a replica takes, for callers that check a configuration without a plan."""

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.plan import memory
from kit.plan.gpus import parse_gpus
from kit.plan.shapes import config_shape
from kit.plan.sizes import Facts


def replica_gib(config: Config, facts: Facts | None = None) -> float | None:
    """GiB that the plan expects on each GPU of a replica on this machine; None for an unknown model.

    `facts` is the model's config.json, if it was read already.
    """
    try:
        shape = config_shape(config, facts)
        parts = memory.server_parts(shape, config, parse_gpus("auto")[0])
    except BadInput:
        return None
    return memory.server_memory(parts, config).expected
