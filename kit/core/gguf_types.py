"""Types of weights in a GGUF file that `python -m merge gguf` writes. Imports nothing."""

from dataclasses import dataclass

PREFIX = "gguf_"  # of a directory beside the checkpoints, and of a manifest's format


@dataclass(frozen=True)
class GgufType:
    bits: float  # per weight, scales included
    stores: str  # a line of its card
    quantized: bool = False  # by llama-quantize, from a BF16 file


GGUF_TYPES = {
    "bf16": GgufType(16, "the weights are plain BF16"),
    "f16": GgufType(16, "FP16 weights, for machines without BF16"),
    "q8_0": GgufType(8.5, "INT8 weights in blocks of 32, with an FP16 scale each"),
    "q6_k": GgufType(6.56, "6-bit weights in blocks of 256", quantized=True),
    "q5_k_m": GgufType(5.7, "5-bit weights in blocks of 256, some of 6 bits", quantized=True),
    "q4_k_m": GgufType(4.85, "4-bit weights in blocks of 256, some of 6 bits", quantized=True),
}
