"""Rules for `server.weights`: it must serve the numbers of `policy.quant_cfg`, and packed weights (`w4a16`) have
requirements of their own."""

from pathlib import Path

from kit.core.checkpoint_files import read_facts
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat, model_fault, packed_format


def served_format(config: Config) -> QuantFormat | None:
    """The format that the replicas compute in: the policy's."""
    return read_quant_format(config.policy.quant_cfg) if config.policy.quant_cfg is not None else None


def packed_of(config: Config) -> QuantFormat | None:
    """The format in which the replicas hold the base packed; None if they do not."""
    return packed_format(config.server.weights) if config.rollout.backend == "server" else None


def faults(config: Config) -> list[str]:
    """Why the replicas would not sample in the numbers of `policy.quant_cfg`; includes an unknown format."""
    policy, server = config.policy, config.server
    packed = _packed(config)
    if policy.quant_cfg is None:
        if server.quant_cfg is None:
            return packed
        return [
            *packed,
            f"server.quant_cfg is {server.quant_cfg} and policy.quant_cfg is not set: the replicas would sample in "
            "numbers that the policy is not trained in. Set policy.quant_cfg to it, or remove server.quant_cfg.",
        ]
    try:
        fmt = read_quant_format(policy.quant_cfg)
        served = read_quant_format(server.quant_cfg, "server.quant_cfg") if server.quant_cfg is not None else fmt
    except BadInput as error:
        return [*packed, str(error)]
    found = []
    if served != fmt:
        found.append(
            f"server.quant_cfg ({server.quant_cfg}) is {served.name} and policy.quant_cfg ({policy.quant_cfg}) is "
            f"{fmt.name}: completions would be sampled by a policy other than the one being trained. Remove "
            "server.quant_cfg, or set it to the same."
        )
    if config.rollout.backend != "server":
        return found
    if server.weights not in fmt.servers:
        served_as = " or ".join(fmt.servers)
        found.append(
            f"server.weights is {server.weights} and policy.quant_cfg {policy.quant_cfg}: {fmt.name} is served as "
            f"{served_as}, and any other quantization would come on top of it. Set server.weights to {served_as}."
        )
    if config.rollout.sync != "remerge":
        found.append(
            f"rollout.sync is {config.rollout.sync} with policy.quant_cfg {policy.quant_cfg}: an unmerged "
            "adapter is not quantized with the weights. Set rollout.sync to remerge."
        )
        return found
    return [*found, *packed]


def _packed(config: Config) -> list[str]:
    """Errors about a base that replicas cannot hold in a packed format; empty if they can."""
    server, path, found = config.server, config.model.path, []
    if (fmt := packed_of(config)) is None:
        return []
    if config.rollout.sync != "remerge":
        found.append(
            f"rollout.sync is {config.rollout.sync} with server.weights {server.weights}: an unmerged adapter on "
            "packed weights was not compared with the trainer. Set rollout.sync to remerge."
        )
    if path and (file := Path(path) / "config.json").is_file() and (fault := model_fault(fmt, read_facts(file))):
        found.append(f"server.weights {server.weights} {fault}. Set server.weights to fp8_per_channel or bf16.")
    return found
