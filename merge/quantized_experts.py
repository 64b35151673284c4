"""Experts of a compressed-tensors checkpoint, in the model that transformers builds.

transformers 5.17 fuses a layer's experts into two parameters. It reads FP8 and INT4 experts into them in BF16, and FP4
codes as if they were weights. It never rounds the inputs of experts: compressed-tensors does so in linear layers
alone. Here every expert's weights are read as its reader computes with them, and its inputs are rounded as a server
rounds them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kit.core.errors import BadInput
from kit.core.formats import ActivationFormat
from kit.weights.layout import expert_matrices, expert_modules, expert_shapes
from kit.weights.model_files import without_weights
from kit.weights.quantize import fake_quantize_activation
from kit.weights.read_quantized import StoredWeights

# compressed-tensors' strategy of rounding FP8 inputs: its format here.
INPUTS = {"token": ActivationFormat("fp8", "token", False), "group": ActivationFormat("fp8", "block", False)}


def read_experts(model: torch.nn.Module, directory: Path, weights: torch.dtype, dtype: torch.dtype) -> None:
    """Give `model` the experts of the compressed-tensors checkpoint in `directory`: dequantized in float32, rounded to
    `weights`, held in `dtype`. Does nothing for a dense model. `BadInput` for inputs rounded in a way that is not
    known here."""
    blank = without_weights(model.config)
    places = expert_matrices(blank)
    if not places:
        return
    stored, modules = StoredWeights(directory), expert_modules(model)
    round_inputs = _rounding(directory, stored.scheme.input_activations)
    device = model.get_input_embeddings().weight.device
    for name, module in modules.items():
        for parameter, shape in expert_shapes(expert_modules(blank)[name]).items():
            value = torch.empty(shape, dtype=dtype, device=device)
            for tensor, place in places.items():
                if (place.module, place.name) == (name, parameter):
                    weight = stored.weight(tensor.removesuffix(".weight"), device)
                    if weight is None:
                        raise BadInput(f"{directory} stores the expert {tensor} unquantized; all or none are read.")
                    first = place.part * place.rows
                    value[place.expert, first : first + place.rows] = weight.to(weights)
            setattr(module, parameter, torch.nn.Parameter(value, requires_grad=False))
        if round_inputs is not None:
            _round_inputs(module, round_inputs)


def _rounding(directory: Path, inputs: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Rounding of a token's inputs that a checkpoint's scheme asks for; None if inputs stay in 16 bits."""
    if inputs is None:
        return None
    strategy = str(getattr(inputs.strategy, "value", inputs.strategy))
    if not inputs.dynamic or inputs.num_bits != 8 or strategy not in INPUTS:
        raise BadInput(
            f"{directory} rounds the inputs of experts to {inputs.num_bits} bits per {strategy}"
            f"{'' if inputs.dynamic else ' by stored ranges'}; FP8 per token or per group of a token is known here."
        )
    return lambda values: fake_quantize_activation(values, INPUTS[strategy])


def _round_inputs(module: torch.nn.Module, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Round what goes into the two products of a module of experts; transformers calls `_apply_gate` between them."""
    gate = module._apply_gate
    module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
    module._apply_gate = lambda products: rounded(gate(products))
