"""Quantize the inputs of a rollout server's linear layers, for formats with static activations (fp8_static, nvfp4):

    --worker-extension-cls kit.rollout.server.quantized_inputs.RemergeQuantizedInputs

vLLM imports this before it builds the model, and compiles the model afterwards. So every linear layer gets a buffer
with the largest |input| of calibration, at a fixed address, and quantizes its inputs with a single PyTorch operator,
which compilation and CUDA graphs take unchanged. The buffer is 0, and inputs stay unquantized, until the first adapter
brings its ranges. Written for vllm 0.31.
"""

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from kit.core.formats import FORMATS
from kit.rollout.server.quantized_fold import format_of
from kit.rollout.server.remerge import Remerge
from kit.weights.quantize import fake_quantize_activation


class RemergeQuantizedInputs(Remerge):
    """`Remerge` in a process whose linear layers quantize their inputs."""


@torch.library.custom_op("launch::quantize_input", mutates_args=())
def quantize_input(x: torch.Tensor, peak: torch.Tensor, name: str) -> torch.Tensor:
    """Fake-quantize x (…, in) to the activation format of `name`, with `peak` () the largest |x|; x if it is 0."""
    x = x.contiguous()
    value = fake_quantize_activation(x, FORMATS[name].activation, peak.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.where(peak > 0, value, x)


@quantize_input.register_fake
def _(x: torch.Tensor, peak: torch.Tensor, name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


class QuantizedInputs(UnquantizedLinearMethod):
    """Linear products with quantized inputs; `format_name` is set when a layer's weights are created."""

    format_name: str

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().apply(layer, quantize_input(x, layer.input_peak, self.format_name), bias)


def _quantize_inputs() -> None:
    """Make layers that vLLM creates from now on quantize their inputs, if the server's format requires it."""
    create = UnquantizedLinearMethod.create_weights

    @functools.wraps(create)
    def create_weights(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        create(self, layer, *arguments, **options)
        fmt = format_of(get_current_vllm_config())
        if fmt is not None and fmt.needs_calibration:
            layer.register_buffer("input_peak", torch.zeros((), dtype=torch.float32), persistent=False)
            self.__class__, self.format_name = QuantizedInputs, fmt.name

    UnquantizedLinearMethod.create_weights = create_weights


_quantize_inputs()
