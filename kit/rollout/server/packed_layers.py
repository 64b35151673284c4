"""`server.weights: w4a16`: a worker's layers in vLLM's W4A16 kernels (Machete, Marlin; on CPUs with AVX-512 its own).

They are the layers that vLLM builds for a compressed-tensors checkpoint (`packed_config.py`), filled with the numbers
that `python -m merge --format w4a16` stores. vLLM's own loading code repacks codes and scales for its kernel, and a
fold has it do the same on a layer without parameters (`remerge.write_weight`). Imports torch inside functions. Written
for vllm 0.26 to 0.31.
"""

import copy
from typing import TYPE_CHECKING, Any

from kit.core.formats import ROWS
from kit.rollout.server.vllm_types import ModelConfig

if TYPE_CHECKING:
    import torch

SCHEME = "scheme"  # attribute of a layer with vLLM's description of its numbers, and the kernel


def group_of(layer: Any) -> int | None:
    """Inputs that share a scale in a W4A16 layer of vLLM; None for any other layer."""
    scheme = getattr(layer, SCHEME, None)
    is_int4 = type(scheme).__name__ == "CompressedTensorsWNA16" and scheme.num_bits == 4 and scheme.symmetric
    return scheme.group_size if is_int4 else None


def weights_of(model_config: ModelConfig) -> str | None:
    """`server.weights` that a server was started with; None for weights that vLLM does not quantize."""
    held = model_config.quantization
    if held == "compressed-tensors":
        layout = (getattr(model_config.hf_config, "quantization_config", None) or {}).get("format")
        return next((fmt.kernels for fmt in ROWS if fmt.kernels and fmt.layout == layout), held)
    return held


def give_weight(fresh: Any, weight: "torch.Tensor") -> None:
    """Give `fresh`, a copy of a W4A16 layer without parameters, those of a checkpoint with `weight` (rows, columns),
    which vLLM has not repacked yet.

    It gets a scheme and a kernel of its own: vLLM 0.26 keeps a scratch tensor in the kernel whose address is in CUDA
    graphs, and repacking replaces it. The kernel is of the layer's kind, whatever vLLM would choose now.
    """
    import torch

    from kit.weights.quantize import pack_int4

    packed, scale = pack_int4(weight, fresh.scheme.group_size)
    fresh.scheme, kernel = copy.copy(fresh.scheme), copy.copy(fresh.scheme.kernel)
    with torch.device(weight.device):
        fresh.scheme.create_weights(
            layer=fresh,
            output_size=fresh.output_size,
            input_size=fresh.input_size,
            output_partition_sizes=fresh.output_partition_sizes,
            input_size_per_partition=fresh.input_size_per_partition,
            params_dtype=fresh.params_dtype,
            weight_loader=None,
        )
    fresh.scheme.kernel = kernel
    fresh.weight_packed.data, fresh.weight_scale.data = packed, scale.to(fresh.params_dtype)
    del fresh.weight_shape  # of a fused layer's last part; no kernel reads it
