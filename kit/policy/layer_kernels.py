"""`policy.kernels`: whose kernels compute norms, rotary embedding and SwiGLU.

torch leaves a model as it is; liger is liger.py, fused is fused_norms.py. Both patch the layers of one model.
"""

import importlib.util
from typing import TYPE_CHECKING

from kit.core.config.schema import Config
from kit.core.errors import BadInput

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

INSTALL = "pip install liger-kernel==0.8.5"
# Models with Llama's RMSNorm casting (product with the weight in 16 bits), rotary embedding of whole heads and SwiGLU.
MODELS = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def check_kernels(config: Config, model_type: str, installed: bool = True) -> None:
    """`BadInput` if `policy.kernels` names kernels that do not support the model or, with `installed`, are not
    installed."""
    kernels = config.policy.kernels
    if kernels == "torch":
        return
    if model_type not in MODELS:
        raise BadInput(
            f"policy.kernels is {kernels} and {config.model.source} is a {model_type}; {', '.join(MODELS)} are known. "
            "Use policy.kernels torch."
        )
    if kernels == "liger" and installed and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput(
            f"policy.kernels is liger and liger-kernel is not installed. On a machine with a GPU: "
            f"{INSTALL}. Else use policy.kernels torch."
        )


def check_gpu(config: Config) -> None:
    """`BadInput` if `policy.kernels` needs a GPU and there is none; not called in a dry run."""
    import torch

    if config.policy.kernels == "liger" and not torch.cuda.is_available():
        raise BadInput(
            "policy.kernels is liger and there is no GPU: its kernels are Triton's. Use policy.kernels torch."
        )


def use_kernels(model: "PreTrainedModel | PeftModel", config: Config) -> dict[str, int]:
    """Patch `model` (transformers', with or without an adapter) with the kernels of `policy.kernels`; return how many
    layers of each kind changed."""
    if config.policy.kernels == "liger":
        from kit.policy.liger import use_liger_kernels

        return use_liger_kernels(model, config)
    if config.policy.kernels == "fused":
        from kit.policy.fused_norms import use_fused_kernels

        return use_fused_kernels(model)
    return {}
