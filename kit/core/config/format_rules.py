"""How rollout servers serve a policy's format (`policy.quant_cfg`): the same numbers, through `server.weights`."""

from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat


def served_format(config: Config) -> QuantFormat | None:
    """The format that the replicas compute in: the policy's."""
    return read_quant_format(config.policy.quant_cfg) if config.policy.quant_cfg is not None else None


def faults(config: Config) -> list[str]:
    """Why the replicas would not sample in the numbers of `policy.quant_cfg`; includes an unknown format."""
    policy, server = config.policy, config.server
    if policy.quant_cfg is None:
        if server.quant_cfg is None:
            return []
        return [
            f"server.quant_cfg is {server.quant_cfg} and policy.quant_cfg is not set: the replicas would sample in "
            "numbers that the policy is not trained in. Set policy.quant_cfg to it, or remove server.quant_cfg."
        ]
    try:
        fmt = read_quant_format(policy.quant_cfg)
        served = read_quant_format(server.quant_cfg, "server.quant_cfg") if server.quant_cfg is not None else fmt
    except BadInput as error:
        return [str(error)]
    found = []
    if served != fmt:
        found.append(
            f"server.quant_cfg ({server.quant_cfg}) is {served.name} and policy.quant_cfg ({policy.quant_cfg}) is "
            f"{fmt.name}: completions would be sampled by a policy other than the one being trained. Remove "
            "server.quant_cfg, or set it to the same."
        )
    if config.rollout.backend != "server":
        return found
    if server.weights != fmt.served_as:
        found.append(
            f"server.weights is {server.weights} and policy.quant_cfg {policy.quant_cfg}: {fmt.name} is served as "
            f"{fmt.served_as}, and any other quantization would come on top of it. Set server.weights to "
            f"{fmt.served_as}."
        )
    if config.rollout.sync != "remerge":
        found.append(
            f"rollout.sync is {config.rollout.sync} with policy.quant_cfg {policy.quant_cfg}: an unmerged "
            "adapter is not quantized with the weights. Set rollout.sync to remerge."
        )
    return found
