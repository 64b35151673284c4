"""`policy.kernels: liger`: RMSNorm, rotary embedding and SwiGLU of a loaded model by liger-kernel's Triton kernels.

liger-kernel's own `apply_liger_kernel_to_*` also put their kernels into transformers' modules, for every model of the
process; here they go into the layers of one model. TRL's chunked log-prob head and the loss stay. Written for
liger-kernel 0.8 and transformers 5.17; `bench/kernels_check.py` compares values and gradients with torch's.

A norm's kernel writes its gradient over the one it is given, which nothing else reads: the answers of these norms go
into linear layers or rotary embedding only. SwiGLU's does so with gate and up projections, after their last use. Both
hold for a layer that is run again (`train.recompute`), as what it writes to was made, or kept, for that one run.
"""

import importlib.util
import types
from typing import Any

from kit.core.config.schema import Config
from kit.core.errors import BadInput

INSTALL = "pip install liger-kernel==0.8.5"
# Models of RMSNorm as Llama casts it (product with the weight in 16 bits), rotary embedding of whole heads and SwiGLU.
MODELS = ("llama", "mistral", "qwen2", "qwen3")
NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


def check_kernels(config: Config, model_type: str, installed: bool = True) -> None:
    """`BadInput` when `policy.kernels` names kernels that do not know the model or, with `installed`, are not
    installed."""
    if config.policy.kernels == "torch":
        return
    if model_type not in MODELS:
        raise BadInput(
            f"policy.kernels is liger and {config.model.source} is a {model_type}; {', '.join(MODELS)} are known. Use "
            "policy.kernels torch."
        )
    if installed and importlib.util.find_spec("liger_kernel") is None:
        raise BadInput(
            f"policy.kernels is liger and liger-kernel is not installed. On a machine with a GPU: "
            f"{INSTALL}. Else use policy.kernels torch."
        )


def check_gpu(config: Config) -> None:
    """`BadInput` when `policy.kernels` needs a GPU and there is none; for a run, not for a dry one."""
    import torch

    if config.policy.kernels == "liger" and not torch.cuda.is_available():
        raise BadInput(
            "policy.kernels is liger and there is no GPU: its kernels are Triton's. Use policy.kernels torch."
        )


def use_kernels(model: Any, config: Config) -> dict[str, int]:
    """Give `model` (transformers', with or without an adapter) the kernels of `policy.kernels`; returns how many
    norms, rotary embeddings and SwiGLUs changed.

    Rotary embedding works in place. Without a norm between it and the projections (Llama, Qwen2), that would be on
    what `train.recompute selective` keeps, so there torch's stays.
    """
    if config.policy.kernels == "torch":
        return {}
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
            module.forward = types.MethodType(_with_rotary(type(module).forward, liger_rotary_pos_emb), module)
            changed["rotary"] += 1
    return changed


def _with_rotary(forward: Any, rotary: Any) -> types.FunctionType:
    """An attention's forward that finds `rotary` under the name by which it calls transformers' function.

    `ValueError` when it does not call it by that name, as after a change of transformers.
    """
    if "apply_rotary_pos_emb" not in forward.__code__.co_names:
        raise ValueError(f"{forward.__qualname__} does not call apply_rotary_pos_emb")
    names = forward.__globals__ | {"apply_rotary_pos_emb": rotary}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
