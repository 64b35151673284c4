"""Is the merged checkpoint the policy? Token by token against the NF4 base plus adapter, on the run's own prompts.

Covers: loading any checkpoint the kit writes (bf16, fp8, w4a16, nf4) and the policy for scoring, and the numbers that
decide: mean KL(policy‖merged), largest |Δlogp| of the batch's own tokens, top-1 agreement. Not covered: accuracy,
which is the evaluation's.
"""

from pathlib import Path
from typing import Any

import torch

from merge.base import BaseCheckpoint, disable_cpu_repacking, find_checkpoint, load_base
from recipes.parts.errors import BadInput
from recipes.parts.rundir import RunDir, read_json, read_manifest


def scoring_dtype(device: torch.device | str) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def load_for_scoring(directory: str | Path, device: torch.device | str | None = None) -> torch.nn.Module:
    """A checkpoint of any format, in eval mode, computing in float32 on a CPU and in bfloat16 on a GPU.

    fp8 and w4a16 weights are dequantized at load time (a GPU then holds them as bfloat16); the activations of fp8 are
    still rounded to FP8 at every layer, so what is scored is what a server with FP8 kernels computes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise BadInput(f"no checkpoint at {directory}: it has no config.json.")
    device = torch.device(device) if device is not None else default_device()
    dtype = scoring_dtype(device)
    quantization = getattr(AutoConfig.from_pretrained(directory), "quantization_config", None) or {}
    method = quantization.get("quant_method")
    options: dict[str, Any] = {}
    if method == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map={"": device}, **options)
    if method == "bitsandbytes":
        disable_cpu_repacking(model)
        compute_in(model, dtype)
    return model.eval()


def compute_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Run an NF4 model's forward in `dtype` without touching its NF4 bytes or the dtype they dequantize to."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype, module.compute_type_is_set = dtype, True
    for parameter in model.parameters():
        if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
            parameter.data = parameter.data.to(dtype)


def base_checkpoint(run: RunDir, base: str | Path | None = None, device: Any = None) -> BaseCheckpoint:
    """The original checkpoint of a run: `base` when given, else the one its base.json names."""
    info = read_json(run.base_file)
    return BaseCheckpoint(find_checkpoint(base or info["model"], info.get("revision")), info, device)


def check_adapter_base(adapter: Path, info: dict) -> dict:
    """The manifest of an adapter that was trained on the base of `info` (base.json); `BadInput` for another base."""
    manifest = read_manifest(adapter, "adapter")
    if manifest.get("base_hash") != info["hash"]:
        raise BadInput(
            f"{adapter} was trained on another base: its manifest says base_hash {manifest.get('base_hash')}, the "
            f"run's base.json says {info['hash']}. Pass the run that the adapter comes from."
        )
    return manifest


def load_policy(
    run: RunDir | str | Path,
    adapter: str | Path | None,
    base: str | Path | None = None,
    device: torch.device | str | None = None,
) -> torch.nn.Module:
    """The policy as trained, in eval mode: the run's NF4 base, and `adapter` on it unless that is None.

    Computes in float32 on a CPU and in bfloat16 on a GPU. `BadInput` for an adapter of another base, before weights
    are loaded; `CheckFailed` when the loaded base is not the one of base.json, bit for bit.
    """
    run = run if isinstance(run, RunDir) else RunDir.open(run)
    checkpoint = base_checkpoint(run, base)
    if adapter is not None:
        check_adapter_base(Path(adapter), checkpoint.info)
    device = torch.device(device) if device is not None else default_device()
    model = load_base(checkpoint, device)
    compute_in(model, scoring_dtype(device))
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
        compute_in(model, scoring_dtype(device))
    return model.eval()
