"""The deployment formats that a policy can be trained in, by the kit's name, a name of nvidia-modelopt, or its YAML.

fp8         weights FP8 (E4M3), a scale per output channel; activations FP8, a scale per token.
fp8_block   weights FP8 in blocks of 128 x 128; activations FP8 in groups of 128, scales found as they come.
fp8_static  weights FP8, one scale; activations FP8, one scale that calibration finds.
w4a16       weights INT4, symmetric, groups of 128.
nvfp4a16    weights FP4 (E2M1) in groups of 16 with E4M3 scales under one global scale.
nvfp4       the same, and activations in FP4 like them, under a global scale that calibration finds (W4A4).

Each is a layout that `python -m merge quantize` writes. What the numbers are is in fake_quant.py. Imports no torch.
Not covered: formats without such a layout (INT8, MXFP4, AWQ's scales, formats that differ between layers).
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from recipes.parts.errors import BadInput

GROUPS = {"fp8": 128, "nvfp4": 16}  # of activations, in values that share a scale


@dataclass(frozen=True)
class WeightFormat:
    kind: Literal["fp8", "int4", "nvfp4"]
    block: tuple[int | None, int | None]  # (rows, columns) that share a scale, None = all


@dataclass(frozen=True)
class ActivationFormat:
    kind: Literal["fp8", "nvfp4"]
    per: Literal["token", "tensor", "block"]
    is_static: bool  # its range comes from calibration

    @property
    def group(self) -> int:
        """Inputs of a token that share a scale, of a format per block."""
        return GROUPS[self.kind]


@dataclass(frozen=True)
class QuantFormat:
    name: str  # of `python -m merge quantize`
    weight: WeightFormat
    activation: ActivationFormat | None

    @property
    def needs_calibration(self) -> bool:
        return self.activation is not None and self.activation.is_static

    @property
    def shares_peak(self) -> bool:
        """Whether layers that a server fuses (q, k, v; gate, up) have to take one peak: the largest of theirs."""
        return self.weight.kind == "nvfp4"


FORMATS = {
    one.name: one
    for one in (
        QuantFormat("fp8", WeightFormat("fp8", (1, None)), ActivationFormat("fp8", "token", False)),
        QuantFormat("fp8_block", WeightFormat("fp8", (128, 128)), ActivationFormat("fp8", "block", False)),
        QuantFormat("fp8_static", WeightFormat("fp8", (None, None)), ActivationFormat("fp8", "tensor", True)),
        QuantFormat("w4a16", WeightFormat("int4", (1, 128)), None),
        QuantFormat("nvfp4a16", WeightFormat("nvfp4", (1, 16)), None),
        QuantFormat("nvfp4", WeightFormat("nvfp4", (1, 16)), ActivationFormat("nvfp4", "block", True)),
    )
}
MODELOPT = {
    "FP8_DEFAULT_CFG": "fp8_static",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8",
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": "w4a16",
    "NVFP4_DEFAULT_CFG": "nvfp4",
    "W4A16_NVFP4_CFG": "nvfp4a16",
}


def read_quant_format(text: str) -> QuantFormat:
    """The format of `policy.quant_cfg`: a name or the path of a YAML; `BadInput` when nothing deploys it."""
    name = MODELOPT.get(text, text)
    if name in FORMATS:
        return FORMATS[name]
    names = [*FORMATS, *MODELOPT]
    near = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise BadInput(f"policy.quant_cfg ({text}) is no format and no file.{hint} Known: {', '.join(names)}.")
