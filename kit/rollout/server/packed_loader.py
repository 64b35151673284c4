"""Load a base in 16 bits into the packed layers of `server.weights: w4a16`:

    --worker-extension-cls kit.rollout.server.packed_loader.RemergePacked --load-format kit_packed

vLLM imports this before it loads the model, with a `quantization_config` from `packed_config.py`. Each weight that the
base quantizes is replaced by its codes and scales while it is read, so at most one of them is in memory in 16 bits.
Written for vllm 0.26 to 0.31.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kit.core.file_kinds import BASE
from kit.core.run_files import read_object
from kit.rollout.server.amx import allow_amx
from kit.rollout.server.packed_config import LOAD_FORMAT
from kit.rollout.server.remerge import Remerge
from kit.weights.quantize import pack_int4
from kit.weights.wrapped import language_name

allow_amx()


class RemergePacked(Remerge):
    """`Remerge` in a process that can load a base into packed layers."""


@register_model_loader(LOAD_FORMAT)
class PackedLoader(DefaultModelLoader):
    """vLLM's loader of safetensors files, with packed weights."""

    def __init__(self, load_config: Any):
        load_config = copy.copy(load_config)
        load_config.load_format = "safetensors"
        super().__init__(load_config)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a checkpoint in the format, made of the base's."""
        quantized = set(read_object(Path(model_config.model) / "base.json", BASE)["quantized"])
        (group,) = model_config.hf_config.quantization_config["config_groups"].values()
        device = next(model.parameters()).device
        for name, weight in super().get_all_weights(model_config, model):
            module = name.removesuffix(".weight")
            if language_name(module) not in quantized or module == name:
                yield name, weight
                continue
            packed, scale = pack_int4(weight.to(device), group["weights"]["group_size"])
            yield f"{module}.weight_packed", packed
            yield f"{module}.weight_scale", scale
