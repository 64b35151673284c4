"""A GPU shared by a trainer process and rollout servers: who uses it, and whether both fit."""

import os
import socket
from urllib.parse import urlsplit

from kit.core.config.schema import Config


def replicas_beside_trainer(config: Config) -> int:
    """Largest number of replicas that share one GPU with a trainer process on this machine, by the configuration.

    Without server.gpus the replicas take the visible GPUs in order, and so do the trainer processes.
    """
    if config.rollout.backend != "server":
        return 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in shown.split(",")] if shown else [str(number) for number in range(64)]
    ours = names[: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
    theirs = names if config.server.gpus is None else [str(gpu) for gpu in config.server.gpus]
    each = config.server.tensor_parallel
    here = [number for number, url in enumerate(config.rollout.server_urls) if is_this_machine(url)]
    return max((sum(gpu in theirs[n * each : (n + 1) * each] for n in here) for gpu in ours), default=0)


def is_this_machine(url: str) -> bool:
    """Whether a server's URL names this machine, by name or as a loopback address."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host in ("localhost", "::1", "0.0.0.0", socket.gethostname()) or host.startswith("127.")


def describe_split(config: Config) -> str | None:
    """One line on how trainer and replicas share a GPU; None if they do not."""
    replicas, server = replicas_beside_trainer(config), config.server
    if not replicas:
        return None
    part = f"{server.gpu_memory_utilization:g} of the GPU"
    if server.kv_cache_gib is not None:
        part = f"its weights and {server.kv_cache_gib:g} GiB of KV cache"
    asleep = ", and sleeps while the trainer updates" if server.sleep else ""
    limit = config.train.max_gpu_gib
    trainer = "what it needs (train.max_gpu_gib is not set)" if limit is None else f"at most {limit:g} GiB"
    who = "a replica" if replicas == 1 else f"each of {replicas} replicas"
    return f"the trainer and {who} share a GPU: the replica takes {part}{asleep}, the trainer {trainer}"


def split_fault(config: Config, card_gib: float, replica_gib: float | None = None) -> str | None:
    """Error if the trainer's limit and the replicas' part exceed a shared GPU; None if they fit.

    `replica_gib` is the plan's figure for a replica with `server.kv_cache_gib`; None if the plan does not know the
    model, and then only the KV cache is counted. A sleeping replica is not counted: its part and the trainer's peak
    are not held at the same time.
    """
    limit, server, replicas = config.train.max_gpu_gib, config.server, replicas_beside_trainer(config)
    if limit is None or not replicas or server.sleep:
        return None
    if server.kv_cache_gib is not None:
        part, key = server.kv_cache_gib, f"server.kv_cache_gib ({server.kv_cache_gib:g})"
        if replica_gib is not None:
            part, key = replica_gib, f"{key} with weights and all else ({replica_gib:.1f} GiB)"
    else:
        part = server.gpu_memory_utilization * card_gib
        key = f"server.gpu_memory_utilization ({server.gpu_memory_utilization:g}, {part:.1f} GiB)"
    if limit + replicas * part <= card_gib:
        return None
    return (
        f"train.max_gpu_gib ({limit:g}) and {key} of {replicas} replica{'s' * (replicas > 1)} on the same GPU exceed "
        f"its {card_gib:.1f} GiB. Lower one of them, or name other GPUs in server.gpus."
    )
