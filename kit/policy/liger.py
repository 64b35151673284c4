"""`policy.kernels: liger`: liger-kernel's Triton kernels for RMSNorm, rotary embedding and SwiGLU of a loaded model.

liger-kernel's own `apply_liger_kernel_to_*` also patch transformers' modules, for every model of the process; here
only the layers of one model are patched. TRL's chunked log-prob head and the loss stay. Written for liger-kernel 0.8
and transformers 5.17; `bench/kernels_check.py` compares values and gradients with torch's.

A norm's kernel overwrites the incoming gradient with its own. Nothing else reads it: the outputs of these norms go
only into linear layers or rotary embedding. SwiGLU's kernel overwrites the gate and up projections after their last
use. Both are safe for a recomputed layer (`train.recompute`), because what is overwritten was made, or kept, for that
one run.
"""

import types
from collections.abc import Callable
from typing import TYPE_CHECKING

from kit.core.config.schema import Config

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


def use_liger_kernels(model: "PreTrainedModel | PeftModel", config: Config) -> dict[str, int]:
    """Patch `model` (transformers', with or without an adapter); return how many norms, rotary embeddings and SwiGLUs
    changed.

    The rotary embedding kernel works in place. Without a norm between it and the projections (Llama, Qwen2), it would
    overwrite what `train.recompute selective` keeps, so torch's is used there.
    """
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
