"""Configure vLLM to hold a base in a packed format (`server.weights: w4a16`). Imports no torch.

The base stays in 16 bits on disk. vLLM is given the `quantization_config` of a compressed-tensors checkpoint, so it
builds the format's layers, and a load format of the kit's (`packed_loader.py`), which quantizes each weight as it is
read.
"""

import re
from pathlib import Path
from typing import Any

from kit.core.file_kinds import BASE
from kit.core.formats import QuantFormat, fitted
from kit.core.run_files import read_optional
from kit.rollout.server.adapter_check import checkpoint_shapes

LOAD_FORMAT = "kit_packed"
EXTENSION = "kit.rollout.server.packed_loader.RemergePacked"


def quantized_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """{layer: (out, in)} of the layers that the base in a directory quantizes; empty if it is not written yet."""
    from kit.weights.wrapped import language_name

    quantized = set(read_optional(directory / "base.json", BASE).get("quantized") or ())
    shapes = {language_name(name): shape for name, shape in checkpoint_shapes(directory).items()}
    return {name: shape for name, shape in shapes.items() if name in quantized}


def fitted_to_base(fmt: QuantFormat, directory: Path) -> QuantFormat:
    """`fmt` with a group that divides the inputs of every layer of the base in a directory, as merge stores it."""
    return fitted(fmt, (inputs for _, inputs in quantized_shapes(directory).values()))


def quantization_config(fmt: QuantFormat, directory: Path) -> dict[str, Any]:
    """`quantization_config` of a checkpoint of the base in `fmt`, in the form that merge writes."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    weights |= {"group_size": fitted_to_base(fmt, directory).weight.block[1]}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": unquantized(directory),
    }


def unquantized(directory: Path) -> list[str]:
    """The output layer, and the matrices that the base in a directory stores beside its quantized layers, as patterns:
    vLLM names the parts of a wrapped language model otherwise."""
    from kit.weights.wrapped import language_name

    quantized, shapes = quantized_shapes(directory), checkpoint_shapes(directory)
    others = sorted(name for stored in shapes if (name := language_name(stored)) not in quantized)
    return ["lm_head", *(f"re:(.*\\.)?{re.escape(name.removeprefix('model.'))}$" for name in others)]
