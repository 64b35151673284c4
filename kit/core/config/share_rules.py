"""Settings that conflict with `server.share_base`, one base in memory for trainer and server. Imports no torch."""

from kit.core.config.schema import Config
from kit.core.config.shared_gpu import is_this_machine

# Keys and the values that a shared base needs, with the reason.
NEEDED: dict[str, tuple[object, str]] = {
    "rollout.backend": ("server", "there is no server whose base could be mapped"),
    "rollout.sync": (
        "adapter",
        "remerge rewrites the server's weights at every sync, and the trainer's base is frozen",
    ),
    "policy.quantization": (
        "fp8",
        "vLLM holds no NF4 weights (0.31 has no loader for them) and FP8 codes as they are",
    ),
    "server.weights": ("fp8_per_channel", "one scale per output channel is what the trainer's FP8 layers store"),
    "model.dtype": ("bfloat16", "embeddings and norms are the server's, which are in bfloat16"),
    "server.tensor_parallel": (1, "each worker would hold only part of every layer"),
    "server.sleep": (
        False,
        "vLLM's sleep mode takes the weights from the card, from a pool that CUDA does not export",
    ),
    "policy.embeddings": ("gpu", "the server holds the embedding on the card anyway"),
}

# Flags of vLLM that `server.vllm` could set, and why its weights could not be mapped then.
NOT_SERVED = {
    "enable_cumem_allocator": "CUDA does not export memory of cumem's pool",
    "cpu_offload_gb": "part of the weights would be in host memory",
    "offload_backend": "part of the weights would be in host memory",
}


def faults(config: Config, processes: int = 1) -> list[str]:
    """Why the base cannot be shared; empty if `server.share_base` is false."""
    if not config.server.share_base:
        return []
    found = []
    for key, (wanted, why) in NEEDED.items():
        group, _, name = key.partition(".")
        if (value := getattr(getattr(config, group), name)) != wanted:
            found.append(f"server.share_base is true and {key} is {_spell(value)}: {why}. Set it to {_spell(wanted)}.")
    for key in config.server.vllm:
        if (why := NOT_SERVED.get(str(key).replace("-", "_"))) is not None:
            found.append(f"server.share_base is true and server.vllm names {key}: {why}. Remove it.")
    if config.rollout.backend == "server":
        found += _places(config.rollout.server_urls)
    if processes > 1:
        found.append(
            f"server.share_base is true and there are {processes} trainer processes: one process maps the base, on "
            "the server's own card. Use accelerate_configs/one_gpu.yaml."
        )
    return found


def _places(urls: list[str]) -> list[str]:
    if len(urls) > 1:
        return [
            f"server.share_base is true and rollout.server_urls names {len(urls)} replicas: the trainer maps the base "
            "of one. Name one."
        ]
    if away := [url for url in urls if not is_this_machine(url)]:
        return [
            f"server.share_base is true and rollout.server_urls names {away[0]}: memory is shared within one machine. "
            "Name the server as http://127.0.0.1:port."
        ]
    return []


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
