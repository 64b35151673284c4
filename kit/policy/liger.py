"""`policy.kernels: liger`: liger-kernel's Triton kernels for RMSNorm, rotary embedding and SwiGLU of a loaded model.

liger-kernel's own `apply_liger_kernel_to_*` also patch transformers' modules, for every model of the process; here
only the layers of one model are patched. TRL's chunked log-prob head and the loss stay. Written for liger-kernel 0.8
and transformers 5.17; `bench/kernels_check.py` compares values and gradients with torch's.

A norm's kernel overwrites the incoming gradient with its own. Nothing else reads it: the outputs of these norms go
only into linear layers or rotary embedding. SwiGLU's kernel overwrites the gate and up projections after their last
use. Both are safe for a recomputed layer (`train.recompute`), because what is overwritten was made, or kept, for that
one run.
"""

import importlib.util
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

from kit.core.config.schema import Config
from kit.core.errors import BadInput

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

INSTALL = "pip install liger-kernel==0.8.5"
# Models with Llama's RMSNorm casting (product with the weight in 16 bits), rotary embedding of whole heads and SwiGLU.
MODELS = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


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
    norms, rotary embeddings and SwiGLUs changed. Those of `fused` are fused_norms.py's.

    liger's rotary embedding kernel works in place. Without a norm between it and the projections (Llama, Qwen2), it
    would overwrite what `train.recompute selective` keeps, so torch's is used there.
    """
    if config.policy.kernels == "torch":
        return {}
    if config.policy.kernels == "fused":
        from kit.policy.fused_norms import use_fused_kernels

        return use_fused_kernels(model)
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    changed = {"norms": 0, "rotary": 0, "swiglu": 0}
    for name, module in list(model.named_modules()):
        leaf, kind = name.rpartition(".")[2], type(module).__name__
        if leaf in NORMS and kind.endswith("RMSNorm"):
            settings = {"offset": 0.0, "casting_mode": "llama", "in_place": True, "row_mode": None}
            for key, value in settings.items():
                setattr(module, key, value)
            module.forward = types.MethodType(LigerRMSNorm.forward, module)
            changed["norms"] += 1
        elif kind.endswith("MLP") and hasattr(module, "gate_proj"):
            module.forward = types.MethodType(LigerSwiGLUMLP.forward, module)
            changed["swiglu"] += 1
        elif kind.endswith("Attention") and (hasattr(module, "q_norm") or config.train.recompute != "selective"):
            module.forward = types.MethodType(with_rotary(type(module).forward, liger_rotary_pos_emb), module)
            changed["rotary"] += 1
    return changed


def with_rotary(forward: types.FunctionType, rotary: Callable) -> types.FunctionType:
    """Copy an attention's forward with `rotary` in place of transformers' `apply_rotary_pos_emb`.

    `ValueError` if it does not call a function of that name, as after a change in transformers.
    """
    if "apply_rotary_pos_emb" not in forward.__code__.co_names:
        raise ValueError(f"{forward.__qualname__} does not call apply_rotary_pos_emb")
    names = forward.__globals__ | {"apply_rotary_pos_emb": rotary}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
