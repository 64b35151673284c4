"""A worker's copy of a base not stored in NF4, into which it folds each adapter (`remerge.py`).

Read from the checkpoint that `python -m merge base` wrote. An unquantized base is kept in BF16, 2 bytes per weight.
An FP8 base is kept as codes and scales, 1 byte per weight: quantizing whole rows of the dequantized weight gives
exactly the codes and scales that the trainer stores (kit/weights/fp8.py). Imports torch inside functions.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit.core.file_kinds import BASE
from kit.core.run_files import read_object


def storage(directory: Path) -> str:
    """`policy.quantization` of the base in a directory; nf4 if not recorded."""
    file = directory / "base.json"
    return read_object(file, BASE)["quantization"]["type"] if file.is_file() else "nf4"


def has_copy(directory: Path) -> bool:
    """Whether a base directory has what remerge reads: `nf4/` for an NF4 base, the weights for any other."""
    return storage(directory) != "nf4" or (directory / "nf4" / "index.json").is_file()


def copy_bytes(directory: Path) -> int:
    """Total bytes of the copies that the workers of a replica keep."""
    kind = storage(directory)
    if kind == "nf4":
        return sum(file.stat().st_size for file in directory.glob("nf4/*.safetensors"))
    from kit.core.checkpoint_files import read_header
    from kit.weights.checkpoint import checkpoint_shards
    from kit.weights.wrapped import language_name

    names = {f"{name}.weight" for name in read_object(directory / "base.json", BASE)["quantized"]}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in checkpoint_shards(directory):
        tensors = read_header(directory / file).tensors.items()
        shapes |= {name: shape for stored, (_, shape) in tensors if (name := language_name(stored)) in names}
    return sum(out * width * 2 if kind == "none" else out * (width + 4) for out, width in shapes.values())


def read(directory: Path, kind: str, linears: list[Any], place: Callable[[Any], Any]) -> Any:
    """Read every linear's copy and move it with `place`: `packed` (rows, columns) is BF16 with `absmax` None, or FP8
    codes as uint8 with their scales in `absmax` (rows, 1). Return the dtype that it dequantizes to.

    `ValueError` for a layer that the base lacks.
    """
    import torch

    from kit.weights.checkpoint import checkpoint_shards, read_tensor
    from kit.weights.fp8 import quantize_weight
    from kit.weights.wrapped import language_name

    shards = checkpoint_shards(directory).items()
    files = {language_name(stored): (directory / file, stored) for file, names in shards for stored in names}
    stored = read_object(directory / "base.json", BASE)["quantized"]
    dtype = torch.bfloat16
    for linear in linears:
        packed, scales = [], []
        for part in linear.parts:
            if part.name not in stored:
                raise ValueError(f"{part.name} is not in it: the base is another model's")
            weight = read_tensor(*files[f"{part.name}.weight"])
            dtype = weight.dtype
            weight = weight[part.first_out : part.first_out + part.rows]
            columns = slice(part.first_in, part.first_in + linear.columns)
            if kind == "fp8":
                codes, scale = quantize_weight(weight)
                weight = codes.view(torch.uint8)
                scales.append(scale)
            packed.append(weight[:, columns])
        linear.packed = place(torch.cat(packed))
        linear.absmax = place(torch.cat(scales)) if scales else None
    return dtype


def dequantize(packed: Any, scale: Any, dtype: Any) -> Any:
    """Dequantize a copy to the weight (rows, columns), as a new tensor."""
    import torch

    from kit.weights.fp8 import dequantize_with

    if scale is None:
        return packed.to(dtype, copy=True)
    return dequantize_with(packed.view(torch.float8_e4m3fn), scale, dtype)
