"""The frozen base of a trainer as views of the memory in which a rollout server holds it (`server.share_base`).

The model is built without weights, and every parameter becomes a view: FP8 codes and scales are slices of vLLM's fused
layers, embeddings those of its padded vocabulary. Whether they are the base that the trainer would have loaded is for
the caller to check, by the base's hash.
"""

from pathlib import Path

import torch

from kit.core.errors import BadInput
from kit.weights.attention import AUTO, attention_of
from kit.weights.base_dropout import clear_dropout_rates, turn_off_dropout
from kit.weights.fp8 import Fp8Linear
from kit.weights.frozen_base import stored_linears
from kit.weights.model_files import buffer_names, unquantized_config
from kit.weights.plain_linear import plain_linears


def load_shared(
    path: str | Path,
    tensors: dict[str, torch.Tensor],
    dtype: str | torch.dtype = "bfloat16",
    revision: str | None = None,
    device: str | torch.device = "cpu",
    attn_implementation: str = AUTO,
) -> torch.nn.Module:
    """Build the causal LM that `load_frozen` loads from `path` with FP8 linear layers, on the memory of `tensors`: by
    name, as kit/rollout/server/share_base.py describes them, on `device`.

    Reads no weight. `BadInput` for a tensor that is missing or has another shape or dtype.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = unquantized_config(path, revision)
    clear_dropout_rates(config)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    attention = attention_of(config, attn_implementation)
    with init_empty_weights(include_buffers=False), plain_linears(config):  # buffers are computed, not loaded
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    turn_off_dropout(model)
    if names := buffer_names(model):
        raise BadInput(
            f"{path} has buffers in its checkpoint ({sorted(names)[0]}), which the server does not share. Set "
            "server.share_base to false."
        )
    linears = stored_linears(model)
    _fill(model, tensors, {f"{name}.weight" for name in linears})
    for name in linears:
        layer, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
        shape = layer.out_features, layer.in_features
        codes = _taken(tensors, f"{name}.weight", shape, torch.float8_e4m3fn)
        scale = _taken(tensors, f"{name}.weight_scale", (shape[0], 1), torch.float32)
        setattr(parent, name.rpartition(".")[2], Fp8Linear(layer, stored=(codes, scale)))
    try:
        model.generation_config = GenerationConfig.from_pretrained(str(path), revision=revision)
    except OSError:
        pass  # that of the model's config.json stays
    return model.eval().to(device)


def _fill(model: torch.nn.Module, tensors: dict[str, torch.Tensor], besides: set[str]) -> None:
    """Give every parameter but those of `besides` its memory; tied ones share it."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in besides or name in tied:
            continue
        module, _, leaf = name.rpartition(".")
        value = _taken(tensors, name, tuple(parameter.shape), parameter.dtype)
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(value, requires_grad=False))
    model.tie_weights()


def _taken(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of this name, without the rows by which vLLM pads a vocabulary."""
    found = tensors.get(name)
    if found is None or found.dtype != dtype or found.shape[1:] != shape[1:] or len(found) < shape[0]:
        held = "no tensor" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise BadInput(
            f"the server shares {held} as {name}, the trainer needs {dtype} {shape}. Set server.share_base to false."
        )
    return found[: shape[0]]
