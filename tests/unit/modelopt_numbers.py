"""What nvidia-modelopt makes of weights, and its named configurations; run by .venv-modelopt (`make modelopt`).

Arguments are the files IN and OUT. IN holds {"fp8" | "int4" | "nvfp4" | "input": (value (n, in) float32, amax)}, OUT
{"numbers": {kind: value as quantized}, "configurations": {name: dictionary}}.
"""

import sys

import torch
from modelopt.torch.quantization import config
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.qtensor import NVFP4QTensor

ATTRIBUTES = {
    "fp8": {"num_bits": (4, 3), "axis": 0},
    "int4": {"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}},
    "input": {"num_bits": (4, 3), "axis": None},
}


def quantized(kind: str, value: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    if kind == "nvfp4":  # its quantizer of FP4 needs a GPU; this is what it compresses weights with
        made, scale, second = NVFP4QTensor.quantize(value, 16, weights_scaling_factor_2=amax / (448.0 * 6))
        return made.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    quantizer = TensorQuantizer(QuantizerAttributeConfig(**ATTRIBUTES[kind]))
    quantizer.amax = amax
    return quantizer(value)


def main() -> None:
    given = torch.load(sys.argv[1])
    names = [name for name in dir(config) if name.endswith("_CFG")]
    result = {
        "numbers": {kind: quantized(kind, *pair) for kind, pair in given.items()},
        "configurations": {name: getattr(config, name) for name in names},
    }
    torch.save(result, sys.argv[2])


if __name__ == "__main__":
    main()
