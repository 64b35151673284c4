"""Keys that a GPU cannot train or serve with, by the rows of `kit/core/cards.py`. Imports no torch."""

from kit.core.cards import GENERATIONS, W4A4, W4A16, W8A8, W8A16, W16A16, Generation, first_fp8, generation
from kit.core.config.schema import Config
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat, others_than_vllms, packed_format


def multiplies(fmt: QuantFormat, row: Generation) -> bool:
    """Whether a GPU multiplies in the format of `fmt`'s activations; true if they stay in 16 bits."""
    if fmt.activation is None:
        return True
    return row.nvfp4 == W4A4 if fmt.activation.kind == "nvfp4" else row.trainer_fp8


def trainer_faults(config: Config, name: str, capability: tuple[int, int]) -> list[str]:
    """What the trainer of this configuration cannot do on the GPU `name`; empty if nothing."""
    row, policy, train = generation(capability), config.policy, config.train
    who = f"{name} (compute capability {'.'.join(map(str, capability))})"
    if not row.is_covered:
        return [_too_old(who)]
    found = _dtype_faults(config, row, who)
    if policy.compute == "fp8" and not row.trainer_fp8:
        found.append(
            f"policy.compute is fp8 and {who} has no FP8 arithmetic (needed {first_fp8()}). Set policy.compute "
            "to fused."
        )
    elif policy.compute == "fp8" and config.model.dtype != "bfloat16":
        found.append(
            f"policy.compute is fp8 and model.dtype is {config.model.dtype}: FP8 products with a scale per row come "
            "out in bfloat16 only. Use model.dtype bfloat16, or policy.compute fused."
        )
    kernels = train.packed_attention
    if train.micro_batch_tokens is not None and kernels != "flex" and not getattr(row, kernels):
        others = [one for one in ("flash", "flex") if one == "flex" or row.flash]
        found.append(
            f"train.packed_attention is {kernels}, which has no kernels for {who}. Set it to {' or '.join(others)}, "
            "or leave train.micro_batch_tokens out."
        )
    return found


def server_faults(config: Config, name: str, capability: tuple[int, int]) -> list[str]:
    """What a rollout server of this configuration cannot do on the GPU `name`; empty if nothing, or without one."""
    if config.rollout.backend != "server":
        return []
    row, server = generation(capability), config.server
    who = f"{name} (compute capability {'.'.join(map(str, capability))})"
    if not row.is_covered:
        return [_too_old(who)]
    found = _dtype_faults(config, row, who)
    fmt = None if config.policy.quant_cfg is None else read_quant_format(config.policy.quant_cfg)
    product = row.served.get(server.weights)
    if fmt is not None and (fault := format_fault(fmt, name, row)):
        found.append(fault)
    elif product is None:
        found.append(f"server.weights is {server.weights}, which vLLM refuses on {who}. {_instead(row)}")
    if server.kv_cache == "fp8" and not row.fp8_cache:
        found.append(f"server.kv_cache is fp8, which no attention of vLLM supports on {who}. Set it to auto.")
    return found


def served_product(config: Config, capability: tuple[int, int] | None) -> tuple[str, bool]:
    """Return the product of `server.weights` on a GPU (W8A8, W8A16, W4A16 or W16A16; FP8 is W8A8 on unknown GPUs), and
    whether `server.force_w8a16` changes it."""
    weights = config.server.weights
    own = W16A16 if weights == "bf16" else W4A16 if packed_format(weights) else W8A8
    if capability is not None:
        own = generation(capability).served.get(weights, own)
    forced = config.server.force_w8a16 and own != W8A16
    return (W8A16, True) if forced else (own, False)


def format_fault(fmt: QuantFormat, name: str, row: Generation) -> str:
    """Why a server on the GPU `name` cannot sample in `fmt`, whose quantization it leaves to vLLM; empty if it can."""
    if not fmt.by_vllm or row.served.get(fmt.served_as) == W8A8:
        return ""
    needed = next(one.number for one in GENERATIONS if one.served.get(fmt.served_as) == W8A8)
    return (
        f"policy.quant_cfg {fmt.name}: vLLM has no FP8 matmul for {fmt.served_as} on {name} (compute capability "
        f"{row.number}, needed {needed}), so it would not quantize activations as the policy does. Use "
        f"{others_than_vllms()}, whose numbers are served as BF16, or rollout.backend in_process."
    )


def describe(row: Generation) -> str:
    """What GPUs of a compute capability compute and serve, in a line of the doctor."""
    if not row.is_covered:
        return "older than what PyTorch and vLLM for CUDA 13 are built for"
    bf16 = "BF16" if "bfloat16" in row.dtypes else "no BF16 (8.0 and newer)"
    if row.trainer_fp8:
        only = row.weights_served_as(W8A16)
        fp8 = f"FP8, {' and '.join(only)} as weights only" if only else "FP8"
    else:
        fp8 = f"no FP8 ({first_fp8()} and newer)"
    return f"{bf16}, {fp8}, {'NVFP4' if row.nvfp4 == W4A4 else 'NVFP4 as weights only (10.0 multiplies it)'}"


def _dtype_faults(config: Config, row: Generation, who: str) -> list[str]:
    if config.model.dtype in row.dtypes:
        return []
    return [
        f"model.dtype is {config.model.dtype}, which {who} cannot compute in. Set it to {' or '.join(row.dtypes)}."
    ]


def _too_old(who: str) -> str:
    oldest = next(row.number for row in GENERATIONS if row.is_covered)
    return (
        f"{who} is not supported: PyTorch and vLLM for CUDA 13 (requirements-cuda.txt) have no code for it. Use a GPU "
        f"of compute capability {oldest} or newer."
    )


def _instead(row: Generation) -> str:
    named = [f"{weights} ({product})" for weights, product in row.served.items()]
    return f"Served there: {', '.join(named)}. Set server.weights to one of them."
