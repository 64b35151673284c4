"""Quantize a merged BF16 checkpoint, tensor by tensor, in the layouts of compressed-tensors and bitsandbytes.

A format's row in `kit.core.formats` names its layout, `WRITERS` has a function for each layout. Only the layers that
the run's base quantizes are quantized, so embeddings, norms and the output embedding stay BF16. awq is made by
llm-compressor from the same checkpoint (calibrated.py). Not covered: GPTQ.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import FORMATS, QuantFormat, fitted, shape_fault
from kit.core.run_directory import publish, write_manifest
from kit.weights.checkpoint import checkpoint_shards, read_tensor
from kit.weights.frozen_base import BaseCheckpoint
from kit.weights.nf4 import quantize_weight
from kit.weights.plain_linear import OWN_LINEARS
from kit.weights.quantize import E2M1_MAX, E4M3_MAX, ZERO_E4M3_SCALE
from kit.weights.shards import write_parts
from kit.weights.wrapped import carried_modules, wrapper_of
from merge.merge import Factors, Retained, write_config

LEAST_RETAINED = 0.5  # minimum share of the update for NF4 to be written without --force
# Layers that vLLM fuses into one. It keeps a single global scale for them, so theirs must be equal.
FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
FUSED += (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))  # linear attention of Qwen3.5
CHUNK = 1 << 22  # weights compressed at once; packing FP4 takes 48 bytes for each
Parts = dict[str, torch.Tensor]
# Called with (first row, rows in float32 as a reader computes with them), in row order.
Use = Callable[[int, torch.Tensor], None]


def store(fmt: QuantFormat, weight: torch.Tensor, use: Use, peak: float = 0.0) -> Parts:
    """What a checkpoint in `fmt` stores for a BF16 weight (out, in), by suffix of the module's name.

    The values that a reader computes with go to `use`, piece by piece: at once they would take more memory than the
    weight itself. `peak` is the largest |weight| of the other layers that share a scale with this one.
    """
    return WRITERS[fmt.layout](fmt, weight, use, peak)


def read_back(fmt: QuantFormat, weight: torch.Tensor, peak: float = 0.0) -> tuple[Parts, torch.Tensor]:
    """Return (what `fmt` stores of `weight`, the values that a reader of it computes with: (out, in) in float32)."""
    value = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    return store(fmt, weight, lambda start, rows: value[start : start + len(rows)].copy_(rows), peak), value


def _scheme(fmt: QuantFormat) -> Any:
    """compressed-tensors' scheme of a format that it stores."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(fmt.preset, ["Linear"])
    if fmt.weights_preset:
        scheme.weights = preset_name_to_scheme(fmt.weights_preset, ["Linear"]).weights
    if scheme.weights.group_size is not None:
        scheme.weights.group_size = fmt.weight.block[1]
    return scheme


def _scales(peaks: torch.Tensor, args: Any, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Scales of blocks with these largest |weight|, as compressed-tensors' `calculate_qparams` computes them on a CPU.

    That function divides by a number, which PyTorch on a GPU turns into a multiplication by the reciprocal. A tie
    between two E4M3 or BF16 scales then rounds to the wrong side, and the weights are not those that were trained
    with.
    """
    from compressed_tensors.quantization.utils import calculate_range

    low, high = calculate_range(args, peaks.device)
    scales = peaks / ((high - low) / 2)
    if global_scale is not None:
        scales = global_scale * scales
    if args.scale_dtype is not None:  # E4M3
        scales = scales.clamp(max=E4M3_MAX).to(args.scale_dtype).to(scales.dtype)
    zero = ZERO_E4M3_SCALE if args.scale_dtype is not None else torch.finfo(scales.dtype).eps
    return torch.where(scales == 0, zero, scales)


def _block_peaks(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Largest |weight| of each block (out / rows, in / columns)."""
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return torch.maximum(blocks.amin((1, 3)).abs(), blocks.amax((1, 3)).abs())  # abs() first would copy


def _write_scaled(fmt: QuantFormat, weight: torch.Tensor, use: Use, _: float) -> Parts:
    """FP8 or INT4 codes with a BF16 scale per block; one for the whole weight is repeated for every output channel."""
    from compressed_tensors.compressors.base import BaseCompressor

    rows, columns = fmt.weight.block
    block = rows or 1, columns or weight.shape[1]
    peak = weight.abs().max().float() if rows is None else None
    scheme, compressor = _scheme(fmt), BaseCompressor.get_value_from_registry(fmt.layout)

    def compress(chunk: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        own = _block_peaks(chunk, *block)
        scale = _scales(own if peak is None else peak.expand_as(own), scheme.weights)
        # Readers load scales in the model's dtype, so the codes are computed for the scale as rounded to BF16. The
        # division is in float32, since a BF16 quotient would round twice. A row near 1e-38 has a scale that BF16
        # rounds to 0.
        scale = scale.to(torch.bfloat16)
        scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
        stored = compressor.compress({"weight": chunk, "weight_scale": scale.float()}, scheme)
        value = compressor.decompress(dict(stored), scheme)["weight"]
        stored["weight_scale"] = scale
        return stored, value

    return _by_rows(weight, use, block[0], compress)


def _by_rows(
    weight: torch.Tensor, use: Use, step: int, compress: Callable[[torch.Tensor], tuple[Parts, Any]]
) -> Parts:
    """Run `compress` over chunks of rows (float32, a multiple of `step`) and concatenate what it stores."""
    rows = max(step, CHUNK // weight.shape[1] // step * step)
    chunks: list[Parts] = []
    for index, chunk in enumerate(weight.split(rows)):
        parts, computed = compress(chunk.float())
        chunks.append(parts)
        use(index * rows, computed)
    # Only a global scale and the shape are of the whole weight.
    stored = {
        key: torch.cat([parts[key] for parts in chunks]) if part.ndim == 2 else part for key, part in chunks[0].items()
    }
    if "weight_shape" in stored:
        stored["weight_shape"] = torch.tensor(weight.shape, dtype=stored["weight_shape"].dtype)
    return stored


def _write_nvfp4(fmt: QuantFormat, weight: torch.Tensor, use: Use, peak: float) -> Parts:
    """FP4 (E2M1) codes, two to a byte, one E4M3 scale per group of an output channel, one global scale.

    A reader computes code · scale / global scale. The global scale is the power of two at or below 448 · 6 / amax, so
    the product is exact in BF16 and all readers hold the same weights, even those that round the global scale to BF16.
    As a shift of exponents, it does not change what the codes stand for, so layers can share it without loss.
    """
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import generate_gparam

    scheme, compressor = _scheme(fmt), BaseCompressor.get_value_from_registry(fmt.layout)
    largest = weight.abs().max().float().clamp(min=peak)
    global_scale = generate_gparam(-largest, largest).log2().floor().clamp(-126, 126).exp2()

    def compress(chunk: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        scale = _scales(_block_peaks(chunk, *fmt.weight.block), scheme.weights, global_scale)
        stored = compressor.compress(
            {"weight": chunk, "weight_scale": scale, "weight_global_scale": global_scale}, scheme
        )
        return stored, compressor.decompress(dict(stored), scheme)["weight"].float()

    # compressed-tensors compiles its rounding, for which torch starts worker processes that import it again.
    with torch.compiler.set_stance("force_eager"):
        return _by_rows(weight, use, 1, compress)


def _write_nf4(_: QuantFormat, weight: torch.Tensor, use: Use, __: float) -> Parts:
    """NF4 bytes with their quant state, as bitsandbytes serializes a Linear4bit."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state = quantize_weight(weight, True, None)
    rows = max(1, CHUNK // weight.shape[1])
    for index, chunk in enumerate(dequantize_4bit(packed, state).split(rows)):
        use(index * rows, chunk.float())
    return {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}


WRITERS: dict[str, Callable[[QuantFormat, torch.Tensor, Use, float], Parts]] = {
    "float-quantized": _write_scaled,
    "pack-quantized": _write_scaled,
    "nvfp4-pack-quantized": _write_nvfp4,
    "bitsandbytes": _write_nf4,
}
# Formats that are written from the weights alone, apart from the ranges of a layer's inputs.
STORED = {name: fmt for name, fmt in FORMATS.items() if fmt.layout in WRITERS and not fmt.needs_llmcompressor}


def input_scales(fmt: QuantFormat, peak: float) -> Parts:
    """Stored scales of a layer's inputs, by suffix, for the largest |input| that calibration found.

    An FP8 scale is in BF16, like that of the weights: readers load it in the model's dtype. The global scale of FP4 is
    in float32, as in llm-compressor.
    """
    if fmt.activation.kind == "fp8":
        return {"input_scale": torch.tensor([peak / E4M3_MAX]).to(torch.bfloat16)}
    return {"input_global_scale": torch.tensor([E4M3_MAX * E2M1_MAX / peak])}


def fused_peaks(directory: Path, base: BaseCheckpoint) -> dict[str, float]:
    """{weight name: largest |weight| over the layers that vLLM fuses with it, itself included}, for fused layers of a
    BF16 checkpoint that was merged into `base`."""
    groups: dict[str, str] = {}
    for name in base.quantized:
        parent, _, layer = name.removesuffix(".weight").rpartition(".")
        if fused := next((fused for fused in FUSED if layer in fused), None):
            groups[name] = f"{parent}.{fused[0]}"
    peaks: dict[str, float] = {}
    for name, weight in _tensors(directory, base, set(groups)):
        peaks[groups[name]] = max(peaks.get(groups[name], 0.0), weight.abs().max().item())
    return {name: peaks[group] for name, group in groups.items()}


def format_of(base: BaseCheckpoint, name: str) -> QuantFormat:
    """The format as a checkpoint of this base stores it, with a group that divides the inputs of all its layers."""
    return fitted(FORMATS[name], (base.shape(weight)[1] for weight in base.quantized))


def quantization_config(fmt: QuantFormat, ignore: list[str]) -> dict:
    """The `quantization_config` by which transformers and vLLM read this format."""
    if fmt.layout == "bitsandbytes":
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=ignore,
        ).to_dict()
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig(
        config_groups={"group_0": _scheme(fmt)}, format=fmt.layout, ignore=ignore, quantization_status="compressed"
    )
    return config.model_dump(mode="json", exclude_none=True)


def ignored_modules(base: BaseCheckpoint, fmt: QuantFormat) -> list[str]:
    """What `quantization_config` names as unquantized: the base's unquantized linear layers and, inside a wrapper,
    everything outside the language model.

    transformers and vLLM put a wrapper's parts under names of their own, so patterns take them at any depth;
    bitsandbytes' readers compare names, with `model.` in transformers and without in vLLM.
    """
    linears = base.unquantized_linears()
    if wrapper_of(base.config) is None:
        return linears
    parts = carried_modules(base.carried)
    if fmt.layout == "bitsandbytes":
        return [*linears, *parts, *(f"model.{part}" for part in parts)]
    return [f"re:(.*\\.)?{re.escape(one)}(\\..*)?$" for one in [*linears, *parts]]


def check_shapes(base: BaseCheckpoint, name: str) -> None:
    """Raise `BadInput` if the format cannot store this kind of layers or their shapes, or cannot be made of a wrapped
    language model; reads only headers."""
    if FORMATS[name].layout == "bitsandbytes" and (own := OWN_LINEARS.get(base.config.model_type)):
        raise BadInput(
            f"transformers does not read {name} into {base.config.model_type}'s own linear layers ({own}). Leave "
            f"{name} out; serve the adapter on the base, or use fp8 or w4a16."
        )
    if FORMATS[name].needs_llmcompressor and (kind := wrapper_of(base.config)):
        raise BadInput(
            f"{name}: llm-compressor was not tried on a language model inside a {kind} checkpoint. Leave {name} out; "
            "w4a16 has the same layout."
        )
    if fault := shape_fault(FORMATS[name], {weight: base.shape(weight) for weight in sorted(base.quantized)}):
        raise BadInput(f"{name} {fault}. Leave {name} out; fp8 has no such limit.")


def check_experts(base: BaseCheckpoint, name: str) -> None:
    """Raise `BadInput` if no reader computes with a mixture of experts in this format; reads only headers."""
    fmt, why = FORMATS[name], ""
    if not base.experts:
        return
    if fmt.layout == "bitsandbytes":
        why = "transformers 5.17 with bitsandbytes reads the packed weights of experts as if they were plain ones"
    elif fmt.needs_llmcompressor:
        why = "llm-compressor has not been tried on experts"
    elif fmt.needs_calibration:
        why = "its input ranges are those of linear layers, and an expert that no calibration token reaches has none"
    if why:
        others = [one for one, fmt in STORED.items() if fmt.weight and not fmt.needs_data]
        experts = 1 + max(place.expert for place in base.experts.values())
        raise BadInput(
            f"{base.config.model_type} is a mixture of {experts} experts, "
            f"which cannot be stored as {name}: {why}. Leave {name} out; bf16, {', '.join(others)} hold experts."
        )


class Refused(CheckFailed):
    """A format that cannot be written, or would lose the update; the other formats of the same command go on.

    `share` is the share of the update that it would keep, if known.
    """

    def __init__(self, message: str, share: float | None = None):
        super().__init__(message)
        self.share = share


def retained_share(merged: Path, format_name: str, base: BaseCheckpoint, updates: dict[str, Factors]) -> float | None:
    """Share of the update folded into the BF16 checkpoint `merged` that `format_name` would keep; writes nothing.

    None if there is no update, or if all of it is zero.
    """
    retained, save = Retained(), _store_by_name(format_name, merged, base)
    for name, weight in _tensors(merged, base, set(updates)):
        before, after = base.tensor(name).to(torch.bfloat16), weight.to(base.device)
        if name not in base.quantized:
            retained.add(after, before, updates[name].delta(base.device))
            continue
        save(name, after, _project(retained, updates[name], base.device))
        save(name, before, _project(retained, updates[name], base.device, before=True))
    return retained.share()


def _project(retained: Retained, update: Factors, device: torch.device | str, before: bool = False) -> Use:
    """Return a `Use` that adds rows to `retained` as they are computed.

    <Q(W+Δ) − Q(W), Δ> is the difference of two such sums.
    """
    a, b = (part.to(device, torch.float32) for part in (update.a, update.b))

    def use(start: int, rows: torch.Tensor) -> None:
        retained.project(rows, update.scale * (b[start : start + len(rows)] @ a), before)

    return use


def _nf4_loses(share: float, base: BaseCheckpoint) -> str:
    if base.into == "original" or base.storage != "nf4":
        return (
            f"nf4 of the {base.into} base plus the adapter keeps {share:.1%} of the update, the minimum is "
            f"{LEAST_RETAINED:.0%}. Serve the adapter on the base it was trained on, or use bf16 or fp8; --force "
            "writes nf4 all the same."
        )
    return (
        f"nf4 of the dequantized NF4 base plus the adapter keeps {share:.1%} of the update, the minimum is "
        f"{LEAST_RETAINED:.0%}: changes below the steps between NF4 values round back to the base. Serve the "
        "adapter on the NF4 base, or use bf16, fp8 or w4a16; or merge with --into original: those weights lie between "
        "NF4 values, so rounding keeps an update in expectation, of another base than the trained one. --force "
        "writes nf4 all the same."
    )


def _store_by_name(name: str, merged: Path, base: BaseCheckpoint) -> Callable[[str, torch.Tensor, Use], Parts]:
    """`store` as a function of a weight's name and the weight."""
    fmt = format_of(base, name)
    peaks = fused_peaks(merged, base) if fmt.shares_peak else {}
    return lambda weight_name, weight, use: store(fmt, weight, use, peaks.get(weight_name, 0.0))


def _tensors(directory: Path, base: BaseCheckpoint, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the model, tensor) of a checkpoint that was merged into `base`."""
    names = {stored: name for name, stored in base.stored.items() if name in wanted}
    for file, found in checkpoint_shards(directory).items():
        for stored in found:
            if stored in names:
                yield names[stored], read_tensor(directory / file, stored)


def quantize_checkpoint(
    merged: Path,
    final: Path,
    format_name: str,
    base: BaseCheckpoint,
    updates: dict[str, Factors],
    verify: Callable[[Path], dict | None],
    overwrite: bool = False,
    force: bool = False,
    input_peaks: dict[str, float] | None = None,
    **manifest: Any,
) -> dict:
    """Publish the BF16 checkpoint `merged` in another format at `final`; return the manifest.

    `updates` are those folded into `merged`, for the retained share. `verify` scores the directory before it is
    published; its result goes into the manifest. `Refused`, with the retained share, for NF4 that keeps less than
    `LEAST_RETAINED` of the update, unless `force`: on a base that already was NF4, an update smaller than the steps
    between NF4 values rounds away. An adapter that learned nothing (its update is all zero) has nothing to lose and is
    written. `input_peaks`, for fp8_static and nvfp4, is the largest |input| of every quantized layer, by the name of
    its weight. Memory: the stored form of two tensors, and what quantizing one takes.
    """
    share = retained_share(merged, format_name, base, updates) if format_name == "nf4" and not force else None
    if share is not None and not share >= LEAST_RETAINED:
        raise Refused(_nf4_loses(share, base), share)
    fmt, save = format_of(base, format_name), _store_by_name(format_name, merged, base)
    retained = Retained()
    shards = checkpoint_shards(merged)
    files = {name: file for file, names in shards.items() for name in names}

    names = {stored: name for name, stored in base.stored.items()}

    def parts(stored_name: str) -> Parts:
        weight, name = read_tensor(merged / files[stored_name], stored_name), names.get(stored_name)
        if name not in base.quantized:
            return {stored_name: weight}
        weight = weight.to(base.device)
        if name in updates:
            stored = save(name, weight, _project(retained, updates[name], base.device))
            del weight
            before = base.tensor(name).to(torch.bfloat16)
            save(name, before, _project(retained, updates[name], base.device, before=True))
        else:
            stored = save(name, weight, lambda *_: None)
        if input_peaks is not None:
            stored |= input_scales(fmt, input_peaks[name])
        return {f"{stored_name.removesuffix('.weight')}.{key}": part for key, part in stored.items()}

    with publish(final, overwrite) as partial:
        write_parts(partial, shards, parts)
        write_config(merged, partial, quantization_config(fmt, ignored_modules(base, fmt)))
        manifest |= {"format": format_name, "retained_update": retained.share(), "verify": verify(partial)}
        return write_manifest(partial, "checkpoint", **manifest)
