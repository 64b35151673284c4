"""Quantize a merged BF16 checkpoint, tensor by tensor, in the layouts of compressed-tensors and bitsandbytes.

fp8        `float-quantized`: static per-channel weights, dynamic per-token activations.
fp8_block  `float-quantized`: static weights in blocks of 128 x 128, dynamic activations in groups of 128.
fp8_static `float-quantized`: one scale per weight; one static activation scale per layer, from calibration.
w4a16      `pack-quantized`: symmetric INT4, groups of 128 (64 if 128 does not divide), round to nearest.
nvfp4a16   `nvfp4-pack-quantized`: E2M1 in groups of 16 with E4M3 scales and a global scale; weights only.
nvfp4      the same, with FP4 activations by global scales from calibration (calibrated.py).
nf4        bitsandbytes, blocks of 64, double quantization.

Only the layers that the run's base quantizes are quantized, so embeddings, norms and the output embedding stay BF16.
awq is made by llm-compressor from the same checkpoint (calibrated.py). Not covered: GPTQ.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import INT4_GROUPS, int4_group
from kit.core.run_directory import publish, write_manifest
from kit.weights.checkpoint import checkpoint_shards, read_tensor
from kit.weights.frozen_base import BaseCheckpoint
from kit.weights.nf4 import quantize_weight
from kit.weights.shards import write_parts
from merge.merge import Factors, Retained, write_config

LEAST_RETAINED = 0.5  # least share of the update for NF4 to be written without --force
BLOCK = 128  # both sides of a block of fp8_block
FP4_GROUP = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
ZERO_E4M3_SCALE = 0.125  # scale of a group of zeros
# Layers that vLLM fuses into one. It keeps a single global scale for them, so theirs must be equal.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
CHUNK = 1 << 22  # weights compressed at once; packing FP4 takes 48 bytes for each
Parts = dict[str, torch.Tensor]
# Called with (first row, rows in float32 as a reader computes with them), in row order.
Use = Callable[[int, torch.Tensor], None]
# A format maps a BF16 weight (out, in) to what is stored, by suffix of the module's name. It passes the values that a
# reader computes with to its `Use` argument piece by piece: at once they would take more memory than the weight
# itself.
Format = Callable[[torch.Tensor, Use], Parts]
# (compressed-tensors preset, its name for the layout) for every format that it stores
LAYOUTS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "fp8_block": ("FP8_BLOCK", "float-quantized"),
    "fp8_static": ("FP8", "float-quantized"),
    "w4a16": ("W4A16", "pack-quantized"),
    "awq": ("W4A16", "pack-quantized"),
    "nvfp4a16": ("NVFP4A16", "nvfp4-pack-quantized"),
    "nvfp4": ("NVFP4", "nvfp4-pack-quantized"),
}


def _scheme(name: str, group: int | None = None) -> Any:
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, ["Linear"])
    if group is not None:
        scheme.weights.group_size = group
    if name == "FP8":
        # Given a single scale per weight, vLLM 0.31 takes the largest of the layers that it fuses and requantizes the
        # others, through FP16. Repeated for every output channel, the scale is kept as it is.
        scheme.weights = _scheme("FP8_DYNAMIC").weights
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


def read_back(store: Format, weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """Return (what `store` stores of `weight`, the values that a reader of it computes with: (out, in) in float32)."""
    value = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    return store(weight, lambda start, rows: value[start : start + len(rows)].copy_(rows)), value


def _compress(
    weight: torch.Tensor, use: Use, name: str, block: tuple[int, int], peak: torch.Tensor | None = None
) -> Parts:
    """Compress `weight` with one BF16 scale per block of (rows, columns), some rows at a time.

    `peak`, if given, is the largest |weight| that every block's scale is computed for, instead of the block's own.
    """
    from compressed_tensors.compressors.base import BaseCompressor

    preset, layout = LAYOUTS[name]
    group = block[1] if name == "w4a16" else None
    scheme, compressor = _scheme(preset, group), BaseCompressor.get_value_from_registry(layout)

    def compress(rows: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        blocks = rows.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        own = torch.maximum(blocks.amin((1, 3)).abs(), blocks.amax((1, 3)).abs())  # abs() first would copy
        scale = _scales(own if peak is None else peak.expand_as(own), scheme.weights)
        # Readers load scales in the model's dtype, so the codes are computed for the scale as rounded to BF16. The
        # division is in float32, since a BF16 quotient would round twice. A row near 1e-38 has a scale that BF16
        # rounds to 0.
        scale = scale.to(torch.bfloat16)
        scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
        stored = compressor.compress({"weight": rows, "weight_scale": scale.float()}, scheme)
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


def to_fp8(weight: torch.Tensor, use: Use) -> Parts:
    """FP8 (E4M3) codes and one scale per output channel."""
    return _compress(weight, use, "fp8", (1, weight.shape[1]))


def to_fp8_block(weight: torch.Tensor, use: Use) -> Parts:
    """FP8 (E4M3) codes and one scale per block of 128 x 128."""
    return _compress(weight, use, "fp8_block", (BLOCK, BLOCK))


def to_fp8_static(weight: torch.Tensor, use: Use) -> Parts:
    """FP8 (E4M3) codes and the scale of the whole weight, once per output channel."""
    return _compress(weight, use, "fp8_static", (1, weight.shape[1]), weight.abs().max().float())


def to_w4a16(weight: torch.Tensor, use: Use, group: int = INT4_GROUPS[0]) -> Parts:
    """INT4 codes, eight to an int32, and one scale per `group` inputs of an output channel."""
    return _compress(weight, use, "w4a16", (1, group))


def to_nvfp4(weight: torch.Tensor, use: Use, amax: float = 0.0) -> Parts:
    """FP4 (E2M1) codes, two to a byte, one E4M3 scale per 16 inputs of an output channel, one global scale.

    `amax` is the largest |weight| of the other layers that share the global scale.
    A reader computes code · scale / global scale. The global scale is the power of two at or below 448 · 6 / amax, so
    the product is exact in BF16 and all readers hold the same weights, even those that round the global scale to BF16.
    As a shift of exponents, it does not change what the codes stand for, so layers can share it without loss.
    """
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import generate_gparam

    preset, layout = LAYOUTS["nvfp4a16"]
    scheme, compressor = _scheme(preset), BaseCompressor.get_value_from_registry(layout)
    peak = weight.abs().max().float().clamp(min=amax)
    global_scale = generate_gparam(-peak, peak).log2().floor().clamp(-126, 126).exp2()

    def compress(rows: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        groups = rows.unflatten(1, (-1, FP4_GROUP))
        peaks = torch.maximum(groups.amin(-1).abs(), groups.amax(-1).abs())
        scale = _scales(peaks, scheme.weights, global_scale)
        stored = compressor.compress(
            {"weight": rows, "weight_scale": scale, "weight_global_scale": global_scale}, scheme
        )
        return stored, compressor.decompress(dict(stored), scheme)["weight"].float()

    # compressed-tensors compiles its rounding, for which torch starts worker processes that import it again.
    with torch.compiler.set_stance("force_eager"):
        return _by_rows(weight, use, 1, compress)


def to_nf4(weight: torch.Tensor, use: Use) -> Parts:
    """NF4 bytes with their quant state, as bitsandbytes serializes a Linear4bit."""
    from bitsandbytes.functional import dequantize_4bit

    packed, state = quantize_weight(weight, True, None)
    rows = max(1, CHUNK // weight.shape[1])
    for index, chunk in enumerate(dequantize_4bit(packed, state).split(rows)):
        use(index * rows, chunk.float())
    return {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}


# How to store weights, which needs no data. nvfp4 stores the same weights as nvfp4a16; awq is made in calibrated.py.
FORMATS: dict[str, Format] = {
    "fp8": to_fp8,
    "fp8_block": to_fp8_block,
    "fp8_static": to_fp8_static,
    "w4a16": to_w4a16,
    "nvfp4a16": to_nvfp4,
    "nvfp4": to_nvfp4,
    "nf4": to_nf4,
}


def input_scales(format_name: str, peak: float) -> Parts:
    """Stored scales of a layer's inputs, by suffix, for the largest |input| that calibration found.

    The scale of fp8_static is in BF16, like that of its weights: readers load it in the model's dtype. The global
    scale of nvfp4 is in float32, as in llm-compressor.
    """
    if format_name == "fp8_static":
        return {"input_scale": torch.tensor([peak / E4M3_MAX]).to(torch.bfloat16)}
    return {"input_global_scale": torch.tensor([E4M3_MAX * E2M1_MAX / peak])}


def fused_peaks(directory: Path, names: set[str]) -> dict[str, float]:
    """{weight name: largest |weight| over the layers that vLLM fuses with it, itself included}, for fused layers."""
    groups: dict[str, str] = {}
    for name in names:
        parent, _, layer = name.removesuffix(".weight").rpartition(".")
        if fused := next((fused for fused in FUSED if layer in fused), None):
            groups[name] = f"{parent}.{fused[0]}"
    peaks: dict[str, float] = {}
    for name, weight in _tensors(directory, set(groups)):
        peaks[groups[name]] = max(peaks.get(groups[name], 0.0), weight.abs().max().item())
    return {name: peaks[group] for name, group in groups.items()}


def groups_of(base: BaseCheckpoint) -> int:
    """Number of inputs that share a scale in w4a16 and awq of this base."""
    return int4_group(base.shape(name)[1] for name in base.quantized)


def format_for(format_name: str, base: BaseCheckpoint) -> Format:
    """Function that stores this base's layers in a format; the same object for the same format and group."""
    store = FORMATS[format_name]
    return _in_groups(groups_of(base)) if store is to_w4a16 else store


@functools.cache
def _in_groups(group: int) -> Format:
    return functools.partial(to_w4a16, group=group)


def quantization_config(format_name: str, ignore: list[str], group: int = INT4_GROUPS[0]) -> dict:
    """The `quantization_config` by which transformers and vLLM read this format; `group` is the group size of INT4."""
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

    preset, layout = LAYOUTS[format_name]
    config = QuantizationConfig(
        config_groups={"group_0": _scheme(preset, group if preset == "W4A16" else None)},
        format=layout,
        ignore=ignore,
        quantization_status="compressed",
    )
    return config.model_dump(mode="json", exclude_none=True)


def check_shapes(base: BaseCheckpoint, format_name: str) -> None:
    """Raise `BadInput` if a layer's shape does not fit the format; reads only headers."""
    shapes = {name: base.shape(name) for name in sorted(base.quantized)}
    int4 = int4_group(inputs for _, inputs in shapes.values())
    group = {"w4a16": int4, "awq": int4, "nvfp4a16": FP4_GROUP, "nvfp4": FP4_GROUP}.get(format_name)
    if group and (odd := [name for name, shape in shapes.items() if shape[1] % group]):
        known = group if group == FP4_GROUP else " or ".join(map(str, INT4_GROUPS))
        raise BadInput(
            f"{format_name} packs groups of {known} inputs, and {len(odd)} of {len(shapes)} layers have a number of "
            f"inputs that {group} does not divide ({odd[0]}: {shapes[odd[0]][1]}). Leave {format_name} out; fp8 has "
            "no such limit."
        )
    if format_name != "fp8_block":
        return
    # compressed-tensors 0.17 dequantizes by shape alone: given a partial block it takes all blocks to be smaller, and
    # it takes a single column of blocks for a scale per output channel; both fail. vLLM 0.31 rejects fused layers in
    # which a block would span two of them.
    odd = [n for n, (rows, columns) in shapes.items() if rows % BLOCK or columns % BLOCK or rows > BLOCK == columns]
    if odd:
        rows, columns = shapes[odd[0]]
        raise BadInput(
            f"fp8_block needs whole blocks of {BLOCK} x {BLOCK}, and more than one across when there is more than one "
            f"down; transformers and vLLM read nothing else. {len(odd)} of {len(shapes)} layers do not have them "
            f"({odd[0]}: {rows} outputs, {columns} inputs). Leave fp8_block out; fp8 has no such limit."
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
    if not updates:
        return None
    store = _by_name(format_name, merged, base) if format_name in FORMATS else None
    retained = Retained()
    for name, weight in _tensors(merged):
        if name in updates:
            before, after = base.tensor(name).to(torch.bfloat16), weight.to(base.device)
            if store is None or name not in base.quantized:
                retained.add(after, before, updates[name].delta(base.device))
                continue
            store(name, after, _project(retained, updates[name], base.device))
            store(name, before, _project(retained, updates[name], base.device, before=True))
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
            f"nf4 of the {base.into} base plus the adapter keeps {share:.1%} of the update, the least is "
            f"{LEAST_RETAINED:.0%}. Serve the adapter on the base it was trained on, or use bf16 or fp8; --force "
            "writes nf4 all the same."
        )
    return (
        f"nf4 of the dequantized NF4 base plus the adapter keeps {share:.1%} of the update, the least is "
        f"{LEAST_RETAINED:.0%}: what is smaller than the steps between NF4 values rounds back to the base. Serve the "
        "adapter on the NF4 base, or use bf16, fp8 or w4a16; or merge with --into original: those weights lie between "
        "NF4 values, so rounding keeps an update in expectation, of another base than the trained one. --force "
        "writes nf4 all the same."
    )


def _by_name(format_name: str, merged: Path, base: BaseCheckpoint) -> Callable[[str, torch.Tensor, Use], Parts]:
    """The format as a function of a weight's name and the weight."""
    store = format_for(format_name, base)
    if store is not to_nvfp4:
        return lambda _, weight, use: store(weight, use)
    peaks = fused_peaks(merged, base.quantized)
    return lambda name, weight, use: to_nvfp4(weight, use, peaks.get(name, 0.0))


def _tensors(directory: Path, wanted: set[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in checkpoint_shards(directory).items():
        for name in names if wanted is None else [name for name in names if name in wanted]:
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
    store = _by_name(format_name, merged, base)
    retained = Retained()
    shards = checkpoint_shards(merged)
    files = {name: file for file, names in shards.items() for name in names}

    def parts(name: str) -> Parts:
        weight = read_tensor(merged / files[name], name)
        if name not in base.quantized:
            return {name: weight}
        weight = weight.to(base.device)
        if name in updates:
            stored = store(name, weight, _project(retained, updates[name], base.device))
            del weight
            before = base.tensor(name).to(torch.bfloat16)
            store(name, before, _project(retained, updates[name], base.device, before=True))
        else:
            stored = store(name, weight, lambda *_: None)
        if input_peaks is not None:
            stored |= input_scales(format_name, input_peaks[name])
        return {f"{name.removesuffix('.weight')}.{key}": part for key, part in stored.items()}

    with publish(final, overwrite) as partial:
        write_parts(partial, shards, parts)
        write_config(merged, partial, quantization_config(format_name, base.unquantized_linears(), groups_of(base)))
        manifest |= {"format": format_name, "retained_update": retained.share(), "verify": verify(partial)}
        return write_manifest(partial, "checkpoint", **manifest)
