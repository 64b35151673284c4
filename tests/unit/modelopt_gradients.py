"""Run by .venv-modelopt: gradients of a LoRA layer whose merged weight nvidia-modelopt's TensorQuantizer quantizes.

Arguments are the files IN and OUT. IN holds base (out, in), a, b, scaling, x (T, in), g (T, out), float32; OUT, by
format, the gradients of x, a and b. Its quantizer of FP4 needs a GPU and is left out.
"""

import sys

import torch
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer

ATTRIBUTES = {
    "fp8": {"num_bits": (4, 3), "axis": 0},
    "w4a16": {"num_bits": 4, "block_sizes": {-1: 128}},
}

given, found = torch.load(sys.argv[1]), {}
for name, attributes in ATTRIBUTES.items():
    quantizer = TensorQuantizer(QuantizerAttributeConfig(**attributes))
    x, a, b = (given[key].clone().requires_grad_() for key in ("x", "a", "b"))
    weight = given["base"] + given["scaling"] * (b @ a)
    (x @ quantizer(weight).t()).backward(given["g"])
    found[name] = {"x": x.grad, "a": a.grad, "b": b.grad}
torch.save(found, sys.argv[2])
