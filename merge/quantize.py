"""Quantize a merged BF16 checkpoint, tensor by tensor: fp8 and w4a16 for vLLM, nf4 for bitsandbytes.

fp8    compressed-tensors `float-quantized`: static per-channel weights, dynamic per-token activations.
w4a16  compressed-tensors `pack-quantized`: symmetric INT4, groups of 128, round to nearest.
nf4    bitsandbytes, blocks of 64, double quantization.

Only the layers that the run's base quantizes are quantized, so embeddings, norms and the output embedding stay BF16.
Not covered: calibrated methods (GPTQ, AWQ), which need data and llm-compressor.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from merge.base import BaseCheckpoint
from merge.checkpoint import checkpoint_shards, read_tensor
from merge.merge import Factors, Retained, write_config
from merge.nf4 import quantize_weight
from merge.shards import write_parts
from recipes.parts.errors import BadInput, CheckFailed
from recipes.parts.rundir import publish, write_manifest

GROUP = 128
LEAST_RETAINED = 0.5  # of the update, for NF4 to be written without --force
Parts = dict[str, torch.Tensor]
# A format maps a BF16 weight (out, in) to what is stored, by suffix of the module's name, and to what a reader of
# that computes with, in float32.
Format = Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]


def _scheme(name: str) -> Any:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    return preset_name_to_scheme(name, ["Linear"])


def _compress(weight: torch.Tensor, preset: str, format_name: str, groups: int) -> tuple[Parts, torch.Tensor]:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, compressor = _scheme(preset), BaseCompressor.get_value_from_registry(format_name)
    grouped = weight.float().reshape(weight.shape[0], groups, -1)
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
    # Readers load scales in the model's dtype, so the codes are made for the scale as BF16 has it; the division is
    # float32, since a BF16 quotient would round twice.
    scale = scale.to(torch.bfloat16)
    stored = compressor.compress({"weight": weight.float(), "weight_scale": scale.float()}, scheme)
    value = compressor.decompress(dict(stored), scheme)["weight"]
    stored["weight_scale"] = scale
    return stored, value


def to_fp8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """FP8 (E4M3) codes and one scale per output channel."""
    return _compress(weight, "FP8_DYNAMIC", "float-quantized", groups=1)


def to_w4a16(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """INT4 codes, eight to an int32, and one scale per 128 inputs of an output channel."""
    return _compress(weight, "W4A16", "pack-quantized", groups=weight.shape[1] // GROUP)


def to_nf4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """NF4 bytes with their quant state, as bitsandbytes serializes a Linear4bit."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state = quantize_weight(weight, True, None)
    parts = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {"weight": packed, **parts}, dequantize_4bit(packed, state).float()


FORMATS: dict[str, Format] = {"fp8": to_fp8, "w4a16": to_w4a16, "nf4": to_nf4}


def quantization_config(format_name: str, ignore: list[str]) -> dict:
    """The `quantization_config` that makes transformers and vLLM read a checkpoint of this format."""
    if format_name == "nf4":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=ignore,
        ).to_dict()
    from compressed_tensors.quantization import QuantizationConfig

    preset, layout = {"fp8": ("FP8_DYNAMIC", "float-quantized"), "w4a16": ("W4A16", "pack-quantized")}[format_name]
    config = QuantizationConfig(
        config_groups={"group_0": _scheme(preset)}, format=layout, ignore=ignore, quantization_status="compressed"
    )
    return config.model_dump(mode="json", exclude_none=True)


def check_shapes(base: BaseCheckpoint, format_name: str) -> None:
    """`BadInput` when a layer's shape does not fit the format; reads headers only."""
    if format_name != "w4a16":
        return
    odd = {name: shape[1] for name in sorted(base.quantized) if (shape := base.shape(name))[1] % GROUP}
    if odd:
        name, width = next(iter(odd.items()))
        raise BadInput(
            f"w4a16 packs groups of {GROUP} inputs, and {len(odd)} of {len(base.quantized)} layers have a number of "
            f"inputs that {GROUP} does not divide ({name}: {width}). Leave w4a16 out; fp8 has no such limit."
        )


class Refused(CheckFailed):
    """A format that would lose what it is asked to carry; the other formats of the same command go on.

    `share` is the part of the update that it would keep.
    """

    def __init__(self, message: str, share: float | None):
        super().__init__(message)
        self.share = share


def retained_share(merged: Path, format_name: str, base: BaseCheckpoint, updates: dict[str, Factors]) -> float | None:
    """What `format_name` would keep of the update folded into the BF16 checkpoint `merged`; writes nothing.

    None when there is no update, or all of it is zero.
    """
    if not updates:
        return None
    store = FORMATS.get(format_name)
    retained = Retained()
    for name, weight in _tensors(merged):
        if name in updates:
            before, after = base.tensor(name).to(torch.bfloat16), weight.to(base.device)
            if store is not None and name in base.quantized:
                before, after = store(before)[1], store(after)[1]
            retained.add(after, before, updates[name].delta(base.device))
    return retained.share()


def _nf4_loses(share: float, base: BaseCheckpoint) -> str:
    if base.into == "original":
        return (
            f"nf4 of the original base plus the adapter keeps {share:.1%} of the update, the least is "
            f"{LEAST_RETAINED:.0%}. Serve the adapter on the NF4 base, or use bf16 or fp8; --force writes nf4 all the "
            "same."
        )
    return (
        f"nf4 of the dequantized NF4 base plus the adapter keeps {share:.1%} of the update, the least is "
        f"{LEAST_RETAINED:.0%}: what is smaller than the steps between NF4 values rounds back to the base. Serve the "
        "adapter on the NF4 base, or use bf16, fp8 or w4a16; or merge with --into original: those weights lie between "
        "NF4 values, so rounding keeps an update in expectation, of another base than the trained one. --force "
        "writes nf4 all the same."
    )


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in checkpoint_shards(directory).items():
        for name in names:
            yield name, read_tensor(directory / file, name)


def quantize_checkpoint(
    merged: Path,
    final: Path,
    format_name: str,
    base: BaseCheckpoint,
    updates: dict[str, Factors],
    verify: Callable[[Path], dict | None],
    overwrite: bool = False,
    force: bool = False,
    **manifest: Any,
) -> dict:
    """Publish the BF16 checkpoint `merged` in another format at `final`; return the manifest.

    `updates` is what was folded into `merged`, for the retained share. `verify` scores the directory before it is
    published; what it returns goes into the manifest. `Refused`, with the retained share, for NF4 that keeps less than
    `LEAST_RETAINED` of the update, unless `force`: on a base that was NF4 already, an update smaller than the steps
    between NF4 values rounds away. An adapter that learned nothing (all of its update is zero) has nothing to lose
    and is written.
    Memory: what is stored of two tensors, and what quantizing one takes.
    """
    share = retained_share(merged, format_name, base, updates) if format_name == "nf4" and not force else None
    if share is not None and not share >= LEAST_RETAINED:
        raise Refused(_nf4_loses(share, base), share)
    store = FORMATS[format_name]
    retained = Retained()

    shards = checkpoint_shards(merged)
    files = {name: file for file, names in shards.items() for name in names}

    def parts(name: str) -> Parts:
        weight = read_tensor(merged / files[name], name)
        if name not in base.quantized:
            return {name: weight}
        stored, value = store(weight.to(base.device))
        if name in updates:
            before = store(base.tensor(name).to(torch.bfloat16))[1]
            retained.add(value, before, updates[name].delta(base.device))
        return {f"{name.removesuffix('.weight')}.{key}": part for key, part in stored.items()}

    with publish(final, overwrite) as partial:
        write_parts(partial, shards, parts)
        write_config(merged, partial, quantization_config(format_name, base.unquantized_linears()))
        manifest |= {"format": format_name, "retained_update": retained.share(), "verify": verify(partial)}
        return write_manifest(partial, "checkpoint", **manifest)
