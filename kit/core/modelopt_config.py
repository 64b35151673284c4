"""Map an nvidia-modelopt configuration to a deployable format, if there is one.

A configuration is a list of (quantizer name pattern, attributes); the last entry that matches a quantizer wins. The
older form is a dictionary. NeMo RL's recipes for quantization-aware RL keep it under `quantize`. The names of version
0.47 are known here; those of other versions are read from the package if it is installed.

The output embedding stays BF16 in every format of the kit, so what a configuration says about it is ignored.
"""

import fnmatch
import importlib.util
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kit.core.errors import BadInput, did_you_mean
from kit.core.formats import TRAINED, ActivationFormat, QuantFormat, WeightFormat
from kit.core.yaml_files import read_yaml

# nvidia-modelopt 0.47 configurations that a layout can store, with the kit's name for that layout.
LAYOUTS = {fmt.modelopt: fmt.name for fmt in TRAINED.values() if fmt.modelopt}
_AWQ = "AWQ searches scales for fixed weights, and training changes them. Use w4a16 or nvfp4a16"
_SEARCH = "it searches scales or parts of fixed weights, and training changes them. Use nvfp4a16 or nvfp4"
_INT8 = "no layout of the kit has INT8. Use fp8"
_MX = "no layout of the kit has MX blocks of 32 with E8M0 scales. Use nvfp4a16, nvfp4 or fp8_block"
_MIXED = "it leaves some linear layers unquantized, and a layout of the kit has one format for all. Use nvfp4a16"
_MOE = "it is for a mixture of experts, and quantizers do not reach experts"
_KV = "it quantizes the KV cache alone, for which server.kv_cache is the key"
# The other configurations of that version, by the reason they cannot be deployed.
_REFUSED = {
    _AWQ: "INT4_AWQ W4A8_AWQ_BETA NVFP4_AWQ_LITE NVFP4_AWQ_CLIP NVFP4_AWQ_FULL",
    _SEARCH: "NVFP4_SVDQUANT_DEFAULT NVFP4_FOUR_OVER_SIX NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN "
    "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP",
    _INT8: "INT8_DEFAULT INT8_SMOOTHQUANT INT8_WEIGHT_ONLY MXINT8_DEFAULT",
    _MX: "MXFP4_DEFAULT MXFP4_MLP_WEIGHT_ONLY MXFP6_DEFAULT MXFP8_DEFAULT W4A8_MXFP4_FP8",
    _MIXED: "NVFP4_MLP_ONLY NVFP4_MLP_WEIGHT_ONLY NVFP4_OMLP_ONLY",
    _MOE: "MAMBA_MOE_FP8_AGGRESSIVE MAMBA_MOE_FP8_CONSERVATIVE MAMBA_MOE_NVFP4_AGGRESSIVE "
    "MAMBA_MOE_NVFP4_CONSERVATIVE NVFP4_EXPERTS_ONLY",
    _KV: "FP8_KV FP8_AFFINE_KV NVFP4_KV NVFP4_AFFINE_KV NVFP4_KV_ROTATE",
    "servers quantize the activations of FP8 blocks too. Use fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY",
    "no layout of the kit has FP4 weights with FP8 activations. Use nvfp4a16 or nvfp4": "W4A8_NVFP4_FP8",
}
NO_LAYOUT = {f"{name}_CFG": why for why, names in _REFUSED.items() for name in names.split()}
PACKAGE = "modelopt.torch.quantization.config"
LINEARS = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
LAYERS = 128  # layer indices that patterns are matched against
# Quantizer attributes that are read below or do not affect the stored numbers; FIXED ones must have these values.
FREE: tuple[str, ...] = (
    "enable",
    "num_bits",
    "axis",
    "block_sizes",
    "type",
    "effective_bits",
    "fake_quant",
    "pass_through_bwd",
)
FREE += ("trt_high_precision_dtype",)
FIXED: dict[str, Any] = {"unsigned": False, "narrow_range": False, "bias": None, "rotate": False, "learn_amax": False}
FIXED |= {"calibrator": "max", "backend": None}
CONTENT_KEYS = ("quant_cfg", "algorithm", "metadata")
ENTRY_KEYS = ("quantizer_name", "parent_class", "enable", "cfg")
BLOCK_KEYS = ("-1", "-2", "type", "scale_bits")
KINDS = ("static", "dynamic")
OF_LINEARS = ("weight_quantizer", "input_quantizer", "output_quantizer")
OF_ATTENTION = tuple(f"{name}_bmm_quantizer" for name in "qkvp")
INT8 = {"num_bits": 8}  # the package's default for a quantizer that no pattern matches
LAST = re.compile(r"(.*[.*])?([^.*]+)\**", re.DOTALL)  # (prefix, last part) of a pattern
NAMED = re.compile(r"e(\d)m(\d)")


class _Refused(Exception):
    """Why no layout can store a configuration."""


class _Quantizer(NamedTuple):
    enabled: bool
    attributes: Mapping[str, Any]
    pattern: str  # the one that set it last


def by_name(name: str, key: str) -> QuantFormat | None:
    """Format of one of the package's own configurations; None for an unknown name.

    Raises `BadInput` if it cannot be deployed. `key` is the key of the run's configuration that holds the name.
    """
    if name in LAYOUTS:
        return TRAINED[LAYOUTS[name]]
    if name in NO_LAYOUT:
        raise BadInput(_message(name, NO_LAYOUT[name], key))
    if not name.endswith("_CFG") or importlib.util.find_spec("modelopt") is None:
        return None
    content = getattr(importlib.import_module(PACKAGE), name, None)
    return None if content is None else read(content, name, key)


def read_file(path: Path, key: str) -> QuantFormat:
    """The format that a YAML file describes."""
    names = f"or a name: {', '.join(TRAINED)}, or that of a configuration of nvidia-modelopt"
    try:
        content = read_yaml(path)
    except BadInput as error:
        raise BadInput(f"{key}: {error} Give the path of a YAML file, {names}.") from None
    return read(content, str(path), key)


def read(content: Any, source: str, key: str = "policy.quant_cfg") -> QuantFormat:
    """Format of a configuration; messages name it by its `source` and by the `key` that gave it."""
    try:
        return _format(content)
    except _Refused as refused:
        raise BadInput(_message(source, str(refused), key)) from None


def _message(source: str, reason: str, key: str) -> str:
    end = "" if reason.endswith("?") else "."
    return f"{key}: {source} cannot be deployed: {reason}{end} Formats: {', '.join(TRAINED)}."


def _format(content: Any) -> QuantFormat:
    if isinstance(content, Mapping) and "quantize" in content:
        content = content["quantize"]
    if not isinstance(content, Mapping) or "quant_cfg" not in content:
        keys = content if isinstance(content, Mapping) else ()
        raise _Refused(f"it has no quant_cfg, the list of quantizers{_misspelled(keys, ('quant_cfg', 'quantize'))}")
    if unknown := [key for key in content if key not in CONTENT_KEYS]:
        raise _Refused(
            f"{unknown[0]} is not a key next to quant_cfg and algorithm (expand imports)"
            f"{_hint(unknown[0], CONTENT_KEYS)}"
        )
    algorithm = content.get("algorithm")
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method not in (None, "max"):
        raise _Refused(f"algorithm {method} changes weights or scales after training; only max is possible")
    entries = list(_entries(content["quant_cfg"]))
    _check_patterns(entries)
    inputs, weights = (_of_all_linears(entries, kind) for kind in ("input_quantizer", "weight_quantizer"))
    _check_others(entries)
    weight, activation = _weight(weights), _activation(inputs)
    for fmt in TRAINED.values():
        if fmt.weight == weight and fmt.activation == activation:
            return fmt
    fits = [fmt for fmt in TRAINED.values() if fmt.weight == weight]
    raise _Refused(
        f"{weights.pattern} and {inputs.pattern} together have no layout; with these weights there is "
        f"{', '.join(f'{fmt.name} ({_words(fmt.activation)})' for fmt in fits)}"
    )


def _words(activation: ActivationFormat | None) -> str:
    if activation is None:
        return "activations not quantized"
    source = "calibrated" if activation.is_static else "dynamic"
    return f"activations {activation.kind} per {activation.per}, {source}"


def _entries(quant_cfg: Any) -> Iterable[tuple[str, str | None, bool | None, Any]]:
    """Yield (pattern, layer class or None, enabled or None, attributes or None) for every entry, in order."""
    if isinstance(quant_cfg, Mapping):  # the older form: `default` comes first wherever it is written
        quant_cfg = [{key: quant_cfg[key]} for key in sorted(quant_cfg, key=lambda key: key != "default")]
    if not isinstance(quant_cfg, list | tuple):
        raise _Refused(f"quant_cfg is {type(quant_cfg).__name__}, neither a list nor a dictionary")
    for raw in quant_cfg:
        entry = raw if isinstance(raw, Mapping) else {}
        if "$import" in entry:
            raise _Refused(f"quant_cfg imports {entry['$import']}, which only the package resolves; expand it")
        if "quantizer_name" in entry:
            name, cfg = entry["quantizer_name"], entry.get("cfg")
            if unknown := [key for key in entry if key not in ENTRY_KEYS]:
                hint = _hint(unknown[0], ENTRY_KEYS)
                raise _Refused(f"{name} has {unknown[0]}, which is not a key of an entry{hint}")
            _check_entry(name, entry.get("enable"), cfg, "cfg ")
            if isinstance(cfg, Mapping) and cfg.get("enable") not in (None, True):
                raise _Refused(f"{name} has enable {cfg['enable']!r:.60} in cfg; enable belongs next to cfg")
            yield name, entry.get("parent_class"), entry.get("enable"), cfg or None
        elif not entry or not all(isinstance(key, str) for key in entry) or set(entry) & set(ENTRY_KEYS):
            near = _misspelled(entry, ("quantizer_name",))
            raise _Refused(f"quant_cfg has the entry {raw!r:.120}, which names no quantizer{near}")
        else:
            for key, value in entry.items():
                if key.startswith("nn.") and isinstance(value, Mapping):
                    yield from (_short(pattern, key, one) for pattern, one in value.items())
                else:
                    yield _short("*" if key == "default" else key, None, value)


def _short(pattern: str, parent: str | None, value: Any) -> tuple[str, str | None, bool | None, Any]:
    """Read an entry of the older form, {pattern: attributes with `enable`}."""
    _check_entry(pattern, value.get("enable") if isinstance(value, Mapping) else None, value)
    if not isinstance(value, Mapping):
        return pattern, parent, None, value
    attributes = {key: one for key, one in value.items() if key != "enable"}
    return pattern, parent, value.get("enable"), attributes or None


def _hint(key: Any, known: Iterable[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """The nearest valid name, as a sentence to append to another one."""
    hint = did_you_mean(str(key), known, prefix, cutoff)
    return f".{hint}" if hint else ""


def _misspelled(keys: Iterable[Any], missing: Iterable[str]) -> str:
    """Hint for the first of `keys` that may be a misspelling of a missing key."""
    return next((f". {key} is not a key{hint}" for key in keys if (hint := _hint(key, missing))), "")


def _check_entry(pattern: Any, enabled: Any, attributes: Any, key: str = "") -> None:
    if not isinstance(pattern, str):
        raise _Refused(f"quant_cfg has {pattern!r:.60} for a quantizer's name, which must be text")
    if not isinstance(enabled, bool | None):
        raise _Refused(f"{pattern} has enable {enabled!r:.60}; enable must be true or false")
    if not isinstance(attributes, Mapping | list | tuple | None):
        raise _Refused(f"{pattern} has {key}{attributes!r:.60}, which must be attributes by their names")


def _check_patterns(entries: list) -> None:
    """Refuse a pattern that matches no quantizer if it looks misspelled.

    Others are common: they target layers that only some models have.
    """
    for pattern, *_ in entries:
        parts = LAST.fullmatch(pattern)
        start, last = parts.groups(default="") if parts else ("", "")
        if last.endswith((*OF_LINEARS, *OF_ATTENTION)):
            continue
        hint = _hint(last, (*OF_LINEARS, *OF_ATTENTION), start, cutoff=0.8)
        if hint and not any(fnmatch.fnmatchcase(name, pattern) for name in _quantizers()):
            raise _Refused(f"{pattern} matches no quantizer{hint}")


def _quantizers() -> Iterable[str]:
    """Names of all quantizers in a decoder's layers."""
    for layer in range(LAYERS):
        of_linears = itertools.product(LINEARS, OF_LINEARS)
        of_attention = (("self_attn", kind) for kind in OF_ATTENTION)
        yield from (f"model.layers.{layer}.{module}.{kind}" for module, kind in (*of_linears, *of_attention))


def _apply(entries: list, name: str, state: _Quantizer) -> _Quantizer:
    """State of a linear layer's quantizer after all entries."""
    for pattern, parent, enabled, attributes in entries:
        if parent not in (None, "nn.Linear") or not fnmatch.fnmatchcase(name, pattern):
            continue
        if attributes is not None:
            state = _Quantizer(enabled is not False, attributes, pattern)
        elif enabled is not None:
            state = _Quantizer(enabled, state.attributes, pattern)
    return state


def _of_all_linears(entries: list, kind: str) -> _Quantizer:
    """The quantizer shared by every linear layer's weight or input; refused if they differ."""
    first = None
    for layer, linear in itertools.product(range(LAYERS), LINEARS):
        module = f"model.layers.{layer}.{linear}"
        found = _apply(entries, f"{module}.{kind}", _Quantizer(True, INT8, f"no pattern for {kind}"))
        first = first or (module, found)
        if found[:2] != first[1][:2] and (found.enabled or first[1].enabled):
            raise _Refused(
                f"{found.pattern} makes {module}.{kind} differ from that of {first[0]}; a layout has one format for "
                "all linear layers of the decoder"
            )
    return first[1]


def _check_others(entries: list) -> None:
    """Refuse quantized outputs and quantized operands of attention (the KV cache)."""
    names = [f"model.layers.0.{linear}.output_quantizer" for linear in LINEARS]
    names += [f"model.layers.0.self_attn.{name}_bmm_quantizer" for name in "qkv"]
    for name in names:
        found = _apply(entries, name, _Quantizer(False, INT8, ""))
        if found.enabled:
            hint = ", and the KV cache has a key of its own, server.kv_cache" if "bmm" in name else ""
            raise _Refused(f"{found.pattern} quantizes {name}; a layout has weights and inputs of layers{hint}")


def _attributes(found: _Quantizer) -> tuple[Any, dict[int, int], Any, Any]:
    """(bits, {dimension: block}, bits of the block scales, whether ranges are dynamic)."""
    if not isinstance(found.attributes, Mapping):
        raise _Refused(f"{found.pattern} quantizes several times in a row; a layout quantizes once")
    for key, value in found.attributes.items():
        if key not in FREE and (key not in FIXED or value not in (FIXED[key], None)):
            hint = "" if key in FIXED else _hint(key, (*FREE, *FIXED))
            raise _Refused(f"{found.pattern} has {key}: {value!r:.60}, which no layout has{hint}")
    blocks, sizes = _blocks(found), {}
    kinds = [found.attributes.get("type"), blocks.pop("type", None)]
    if wrong := [kind for kind in kinds if kind not in (*KINDS, None)]:
        raise _Refused(f"{found.pattern} has type {wrong[0]!r:.60}; type must be {' or '.join(KINDS)}")
    scale_bits = _bits(blocks.pop("scale_bits", None))
    for key, size in blocks.items():
        try:
            sizes[int(key)] = size
        except (TypeError, ValueError, OverflowError):
            raise _Refused(
                f"{found.pattern} has {key!r} in block_sizes; valid keys are {', '.join(BLOCK_KEYS)}"
                f"{_hint(key, BLOCK_KEYS)}"
            ) from None
    return _bits(found.attributes.get("num_bits", 8)), sizes, scale_bits, "dynamic" in kinds


def _written(found: _Quantizer) -> str:
    bits, blocks, scale_bits, _ = _attributes(found)
    words = f"num_bits {bits!r}, axis {found.attributes.get('axis')!r}, block_sizes {blocks or None}"
    return f"{found.pattern} has {words}, scale_bits {scale_bits!r}"


def _blocks(found: _Quantizer) -> dict[Any, Any]:
    blocks = found.attributes.get("block_sizes")
    if not isinstance(blocks, Mapping | None):
        raise _Refused(
            f"{found.pattern} has block_sizes {blocks!r:.60}, which must be sizes by dimension, as in {{-1: 16}}"
        )
    return dict(blocks or {})


def _bits(value: Any) -> Any:
    """(exponent, mantissa) bits of a float format, however it is written; other values unchanged."""
    if isinstance(value, str) and (named := NAMED.fullmatch(value.lower())):
        return int(named[1]), int(named[2])
    return tuple(value) if isinstance(value, list | tuple) else value


def _weight(found: _Quantizer) -> WeightFormat:
    if not found.enabled:
        raise _Refused(
            f"{found.pattern} disables the weights' quantizers, no entry after it enables "
            "*weight_quantizer, and every layout quantizes weights"
        )
    bits, blocks, scale_bits, _ = _attributes(found)
    axis = found.attributes.get("axis")
    axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
    if bits == (4, 3) and scale_bits is None:
        if not blocks and axis in (None, 0, -2) and axis is not False:
            return WeightFormat("fp8", (None, None) if axis is None else (1, None))
        if blocks == {-1: 128, -2: 128}:
            return WeightFormat("fp8", (128, 128))
    if bits == 4 and blocks == {-1: 128} and scale_bits is None:
        return WeightFormat("int4", (1, 128))
    if bits == (2, 1) and blocks == {-1: 16} and scale_bits == (4, 3):
        return WeightFormat("nvfp4", (1, 16))
    raise _Refused(
        f"{_written(found)}; "
        "weights can be (4, 3) with axis null or 0 or blocks {-1: 128, -2: 128}, 4 with blocks {-1: 128}, or (2, 1) "
        "with blocks {-1: 16, scale_bits: (4, 3)}"
    )


def _activation(found: _Quantizer) -> ActivationFormat | None:
    if not found.enabled:
        return None
    bits, blocks, scale_bits, is_dynamic = _attributes(found)
    axis = found.attributes.get("axis")
    if bits == (4, 3) and axis is None and scale_bits is None:
        if not blocks and not is_dynamic:
            return ActivationFormat("fp8", "tensor", True)
        if blocks == {-1: None} and is_dynamic:
            return ActivationFormat("fp8", "token", False)
        if blocks == {-1: 128} and is_dynamic:
            return ActivationFormat("fp8", "block", False)
    if bits == (2, 1) and axis is None and blocks == {-1: 16} and scale_bits == (4, 3) and is_dynamic:
        return ActivationFormat("nvfp4", "block", True)
    raise _Refused(
        f"{_written(found)}, "
        f"type {'dynamic' if is_dynamic else 'static'}; inputs can be disabled, (4, 3) for the whole tensor and "
        "static, (4, 3) with blocks {-1: null} or {-1: 128} and dynamic, or (2, 1) with blocks {-1: 16, type: "
        "dynamic, scale_bits: (4, 3)}"
    )
