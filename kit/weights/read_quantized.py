"""Read a layer's weight back from a compressed-tensors checkpoint, as its reader computes with it.

Used for the diagnostics of formats that need calibration, so that they are measured as written, and for making a base
from a quantized checkpoint. AWQ moves scales between a layer and the one before it; the diagnostics undo this
(`unscaled`). Not covered: other layouts (AutoAWQ, ModelOpt's).
"""

from pathlib import Path
from typing import Any

import torch

from kit.core.checkpoint_files import quantization_of
from kit.core.errors import BadInput
from kit.core.file_kinds import MODEL_CONFIG
from kit.core.run_files import read_object
from kit.weights.checkpoint import checkpoint_shards, read_tensor
from kit.weights.wrapped import language_name

SWEEPS = 4  # iterations of the alternating fit; the second already agrees to 1e-4 on AWQ's scales


class StoredWeights:
    """Weights of a quantized checkpoint by module name, one at a time; those of a wrapped language model
    (`wrapped.py`) by its names, too.

    `BadInput`, before any weight is read, for a checkpoint that compressed-tensors did not write.
    """

    def __init__(self, directory: Path):
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.config import CompressionFormat
        from compressed_tensors.quantization import QuantizationConfig

        self.directory = Path(directory)
        settings = quantization_of(read_object(self.directory / "config.json", MODEL_CONFIG))
        if settings.get("quant_method") != "compressed-tensors":
            raise BadInput(
                f"{directory} is stored as {settings.get('quant_method')}; only compressed-tensors weights are read."
            )
        config = QuantizationConfig.model_validate(settings)
        groups = list(config.config_groups.values())
        if len(groups) != 1:
            raise BadInput(f"{directory} has {len(groups)} quantization groups; one for all layers is read.")
        self.scheme = groups[0]
        self.layout: str = CompressionFormat(self.scheme.format or config.format).value
        self.compressor: Any = BaseCompressor.get_value_from_registry(self.layout)
        self.files = {name: file for file, names in checkpoint_shards(self.directory).items() for name in names}
        self.parts: dict[str, list[str]] = {}
        for name in self.files:
            self.parts.setdefault(name.rpartition(".")[0], []).append(name)
        self.parts |= {language_name(module): names for module, names in self.parts.items()}

    def weight(self, module: str, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """Float32 weight (out, in) of a module; None if the checkpoint does not store it quantized."""
        names = self.parts.get(module, [])
        if not any(name.endswith(".weight_scale") for name in names):
            return None
        found = {}
        for name in names:
            part = read_tensor(self.directory / self.files[name], name)
            # Multiplying codes by a scale in 16 bits would round once more than the reader's own kernels do.
            is_short = part.dtype in (torch.bfloat16, torch.float16)
            found[name.rpartition(".")[2]] = part.float() if is_short else part
        found = {key: part.to(device) for key, part in found.items() if key not in ("bias", "input_global_scale")}
        return self.compressor.decompress(found, self.scheme)["weight"].float()


def unscaled(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Remove r and c from `value` ≈ diag(r)·`weight`·diag(c); both are (out, in) float32.

    AWQ multiplies a layer's input columns by scales and divides the layer before it by them, which leaves the model
    unchanged: its cost is the error of value/(r·c). r and c are fitted by alternating least squares, which absorbs
    about (1/out + 1/in)/2 of the error: against the scales that llm-compressor 0.14 left in the norms of a model of
    width 128, errors of .1086 to .1161 came out 1 % lower. Entries that were rounded to zero are left out of the fit:
    a column whose scale is so small that few are left would seem to have a scale of nearly zero.
    """
    known = weight * (value != 0)
    rows = torch.ones_like(weight[:, :1])
    columns = torch.ones_like(weight[:1])
    for _ in range(SWEEPS):
        columns = _fit(value, rows * known, 0)
        rows = _fit(value, known * columns, 1)
    return value / (rows * columns)


def _fit(value: torch.Tensor, model: torch.Tensor, axis: int) -> torch.Tensor:
    """Least-squares factor along `axis` from `model` to `value`; 1 where there is nothing to fit."""
    above = (value * model).sum(axis, keepdim=True)
    below = model.square().sum(axis, keepdim=True)
    return torch.where((below > 0) & (above > 0), above / below, torch.ones_like(below))
