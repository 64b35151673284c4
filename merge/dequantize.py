"""Convert a quantized checkpoint into a plain BF16 one, which can be used as any other base.

Every weight is code · scale in float32, rounded once to BF16. Covers: `fp8` with blocks (Qwen3-8B-FP8 and similar),
compressed-tensors' FP8, INT8 and packed integers (what `python -m merge` writes as fp8, fp8_block and w4a16). The
checkpoint is read tensor by tensor and the model is never loaded, so memory is one tensor plus what decompressing it
takes. transformers 5.17 dequantizes on a CPU while loading, but it quantizes an `fp8` model again when saving it, and
it misreads partial blocks at the end of a weight as smaller blocks. Experts are stored, and converted, one matrix at a
time. Not covered: FP4, other methods, models whose layout differs from that of their checkpoint (but mixtures of
experts that can be trained, and language models in a known wrapper, with the other parts in BF16).
"""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from kit.core.checkpoint_files import quantization_of, read_header
from kit.core.errors import DONE, BadInput, CheckFailed
from kit.core.run_directory import manifest_as_written, publish, write_manifest
from kit.weights.checkpoint import checkpoint_shards, find_checkpoint, read_tensor
from kit.weights.layout import parameter_shapes
from kit.weights.model_files import DEQUANTIZED, read_config, select_shards, without_weights
from kit.weights.read_quantized import StoredWeights
from kit.weights.shards import write_parts
from kit.weights.wrapped import language_config
from kit.weights.write_base import Plan
from merge.export import check_space, recorded, sizes, source_facts
from merge.merge import write_config
from merge.options import dequantize_parser

# Dtypes of the codes as named in a file's header: for quant_method fp8, and for compressed-tensors by its layout.
CODES = {"fp8": "F8_E4M3", "float-quantized": "F8_E4M3", "int-quantized": "I8", "pack-quantized": "I32"}
FLOATS = ("F32", "F16", "BF16")
CODE_NAMES = ("weight", "weight_packed")
CACHE_SCALES = ("k_scale", "v_scale")  # of a quantized KV cache, unrelated to the weights
PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors")
CAN = f"fp8 with weight_block_size, and compressed-tensors in the layouts {', '.join([*CODES][1:])}"


def main(argv: list[str]) -> int:
    arguments = dequantize_parser().parse_args(argv)
    out, source = arguments.out, str(arguments.path or arguments.id)
    check_places(arguments.path, out, arguments.overwrite)
    config = read_config(source, arguments.revision)
    settings = check_quantized(source, config)
    del config.quantization_config
    config = language_config(config)  # from here on, `config` describes the plain model
    plan = plan_model(config)
    check_space(out, plan)
    commit = None if arguments.path else getattr(config, "_commit_hash", None)
    place = find_checkpoint(source, commit or arguments.revision, weights=not arguments.dry_run)
    if arguments.dry_run and arguments.id and not any(place.glob("*.safetensors")):
        print(f"would write {out}: {source}, {sizes(plan)}. A dry run does not download, so weights are not checked")
        return DONE
    checkpoint = QuantizedCheckpoint(place, config, settings, plan)
    what = f"{len(checkpoint.modules)} of {len(plan.shapes)} tensors quantized ({checkpoint.layout}), {sizes(plan)}"
    if arguments.dry_run:
        print(f"would write {out}: {source}, {what}")
        return DONE
    print(f"writing {out}: {source}, {what}", flush=True)
    origin = {
        "model": source if arguments.path is None else str(place.resolve()),
        "revision": arguments.revision or commit,
    }
    write(checkpoint, out, origin, commit, arguments.overwrite)
    print(f"wrote {out}. Use it as any other base: --model.path {out}")
    return DONE


def check_places(source: Path | None, out: Path, overwrite: bool) -> None:
    """Raise `BadInput` if a local source does not exist, or if `out` must not be replaced or contains the source."""
    if source is not None and not source.is_dir():
        raise BadInput(f"--model.path {source} is not a directory (in {Path.cwd()}). Hub ids go into --model.id.")
    if source is not None and out.resolve() in (source.resolve(), *source.resolve().parents):
        raise BadInput(f"--out {out} is where the quantized checkpoint lies ({source}). Choose another place.")
    if out.exists() and not overwrite:
        raise BadInput(f"{out} exists already. Pass --overwrite to replace it, or --out for another place.")
    # A mistyped --out must not delete an unrelated folder.
    if out.exists() and manifest_as_written(out).get("kind") != "checkpoint":
        raise BadInput(f"{out} is not a checkpoint of this kit, so --overwrite keeps it. Choose another place.")


def check_quantized(source: str, config: Any) -> dict:
    """Return the quantization_config of a checkpoint that can be dequantized here; `BadInput` for any other."""
    settings = quantization_of(config)
    if not settings:
        raise BadInput(
            f"{source} is not quantized (no quantization_config in its config.json), so there is nothing to undo: "
            "use it as the base."
        )
    method = settings.get("quant_method")
    why = None
    if method not in DEQUANTIZED:
        why = f"quant_method {method}"
    elif method == "fp8" and not _is_block(settings.get("weight_block_size")):
        why = f"fp8 with weight_block_size {settings.get('weight_block_size')}"
    elif method == "compressed-tensors":
        groups = settings.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        # A group may also be a list of layers under the name of a preset.
        formats = [group.get("format") for group in groups if isinstance(group, dict)]
        layouts = {one or settings.get("format") for one in formats} or {settings.get("format")}
        if len(groups) != 1 or not layouts <= set(CODES) - {"fp8"}:
            names = ", ".join(sorted(map(str, layouts))) or settings.get("format")
            why = f"compressed-tensors with {len(groups)} groups of layers ({names})"
    if why:
        raise BadInput(
            f"{source} is stored as {why}, which cannot be undone here. Supported: {CAN}, of one group of layers. "
            "Name the original 16-bit checkpoint instead."
        )
    return settings


def _is_block(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


def plan_model(config: Any) -> Plan:
    """Return the parameters of the model that a config describes; `BadInput` if transformers cannot build it."""
    try:
        model = without_weights(config)
    except (ImportError, ValueError) as error:
        raise BadInput(f"{config.name_or_path} cannot be built: {str(error).splitlines()[0]}") from None
    return Plan(parameter_shapes(model), frozenset(), {}, "none")


class QuantizedCheckpoint:
    """A checkpoint that is stored quantized, read one tensor at a time as the plain weights that it represents.

    `config` describes the plain model, `settings` is the checkpoint's quantization_config. `modules` are the quantized
    ones, `shards` is {file: plain tensors}. Opening reads only headers; `BadInput` if the tensors are not those of the
    model, or if a scale does not fit its codes.
    """

    def __init__(self, directory: Path, config: Any, settings: dict, plan: Plan):
        self.directory, self.settings, self.shapes = directory, settings, plan.shapes
        listed = checkpoint_shards(directory)
        self.headers = {
            name: facts for file in listed for name, facts in read_header(directory / file).tensors.items()
        }
        self.files = {name: file for file, names in listed.items() for name in names}
        self.stored: StoredWeights | None = None
        self.args: Any = None  # compressed-tensors' QuantizationArgs of the weights
        self.block, self.scale, self.layout = settings.get("weight_block_size"), "weight_scale_inv", "fp8"
        if settings["quant_method"] == "compressed-tensors":
            self._open_stored()
        ending = f".{self.scale}"
        self.modules = {name.removesuffix(ending) for name in self.files if name.endswith(ending)}
        self.codes = {f"{name.rpartition('.')[0]}.weight": name for name in self.files if self._is_code(name)}
        if not self.modules:
            raise BadInput(f"{directory} holds no {self.scale}, so none of its weights is stored as {self.layout}.")
        self.shards = {
            file: [plain for name in names if (plain := self._plain(name))] for file, names in listed.items()
        }
        complaint = f"{directory} is not the model that its config.json describes"
        selected = select_shards(directory, set(self.shapes), config, complaint, self.shards)
        self.shapes = {selected.stored[name]: shape for name, shape in self.shapes.items()}
        for name in (name for names in self.shards.values() for name in names):
            self._check(name, complaint)

    def _open_stored(self) -> None:
        try:
            self.stored = StoredWeights(self.directory)
        except (ValueError, KeyError) as error:  # pydantic's error, and that of an unknown preset
            raise BadInput(f"{self.directory}: quantization_config: {str(error).splitlines()[0]}") from None
        if (args := self.stored.scheme.weights) is None:
            raise BadInput(f"{self.directory} has no quantized weights: its quantization_config is of inputs alone.")
        self.args = args
        self.layout = self.stored.layout
        self.scale = "weight_scale"
        self.block = self.args.block_structure if self.args.strategy == "block" else None

    def _is_code(self, name: str) -> bool:
        module, _, part = name.rpartition(".")
        return module in self.modules and part in CODE_NAMES

    def _plain(self, name: str) -> str | None:
        """Name of the plain tensor that a stored one is or encodes; None for scales and other auxiliary tensors."""
        module, _, part = name.rpartition(".")
        if self._is_code(name):
            return f"{module}.weight"
        return None if part in CACHE_SCALES or (module in self.modules and part != "bias") else name

    def _check(self, name: str, complaint: str) -> None:
        """Raise `BadInput` if the shape or type of a plain tensor, or of its scale, is wrong."""
        wanted = self.shapes.get(name)
        kind, shape = self.headers[self.codes.get(name, name)]
        if name not in self.codes:
            if kind not in FLOATS:
                beside = f"{name.rpartition('.')[0]}.{self.scale}"
                raise BadInput(f"{self.directory} stores {name} as {kind} without a scale ({beside}).")
        elif kind != CODES[self.layout]:
            raise BadInput(f"{self.directory} stores {name} as {kind}; {self.layout} has {CODES[self.layout]}.")
        packed = name in self.codes and self.layout == "pack-quantized"
        if wanted is not None and (shape[:1] if packed else shape) != (wanted[:1] if packed else wanted):
            raise BadInput(f"{complaint}: {name} is {shape}, expected {wanted}.")
        if name not in self.codes:
            return
        scale = name.removesuffix("weight") + self.scale
        kind, found = self.headers[scale]
        fits = self._grids(wanted or shape)
        if kind not in FLOATS or found not in fits:
            raise BadInput(
                f"{self.directory}: {scale} is {kind} of shape {found}; {self.layout} of a weight of "
                f"{wanted or shape} has {' or '.join(map(str, fits)) or 'none'}, in {', '.join(FLOATS)}."
            )

    def _grids(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Valid shapes for the scales of a weight (out, in). compressed-tensors 0.17 infers from the shape alone what
        a scale applies to, so any other shape would be multiplied with the wrong codes."""
        if self.block is not None:
            return [tuple(-(-size // side) for size, side in zip(shape, self.block, strict=True))]
        if self.args.strategy == "group":
            return [(shape[0], shape[1] // self.args.group_size)]  # no scale has this shape if a group is partial
        grids: dict[str, list] = {"channel": [(shape[0], 1)], "tensor": [(1,), ()]}
        return grids.get(self.args.strategy, [])

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor in BF16."""
        if name not in self.codes:
            return self._read(name).to(torch.bfloat16)
        module = name.removesuffix(".weight")
        if self.block is not None:
            return dequantize_blocks(self._read(name), self._read(f"{module}.{self.scale}"), self.block)
        weight = self.stored.weight(module).to(torch.bfloat16)
        if weight.shape != self.shapes.get(name, weight.shape):
            raise CheckFailed(f"{self.directory}: {name} unpacks to {tuple(weight.shape)}, not {self.shapes[name]}.")
        return weight

    def _read(self, name: str) -> torch.Tensor:
        return read_tensor(self.directory / self.files[name], name)


def dequantize_blocks(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return codes (out, in) · scale (⌈out/rows⌉, ⌈in/columns⌉) for blocks of (rows, columns), multiplied in float32
    and rounded once to BF16. The float32 product covers one row of blocks at a time."""
    weight = torch.empty(codes.shape, dtype=torch.bfloat16)
    factors = scale.float().repeat_interleave(block[1], 1)[:, : codes.shape[1]]
    for part, rows, factor in zip(weight.split(block[0]), codes.split(block[0]), factors, strict=True):
        part.copy_(rows.float() * factor)
    return weight


def write(checkpoint: QuantizedCheckpoint, out: Path, origin: dict, commit: str | None, overwrite: bool) -> dict:
    """Publish a quantized checkpoint in BF16 at `out`; return its manifest.

    `origin` is the model and revision to record. `commit` is that of a hub model, None for a local one, whose files
    are recorded instead. `CheckFailed`, with `out` left as it was, if the disk is full or a file changes meanwhile.
    """
    directory = checkpoint.directory
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    with publish(out, overwrite) as partial, recorded(directory, commit) as files:
        write_parts(partial, checkpoint.shards, lambda name: {name: checkpoint.tensor(name)})
        write_config(directory, partial, None)
        return write_manifest(
            partial,
            "checkpoint",
            format="bf16",
            **origin,
            source=source_facts(directory, commit, files),
            quantization_config=checkpoint.settings,
            method="code x scale in float32, rounded once to bfloat16",
            dequantized=sorted(checkpoint.modules),
            versions={"python": platform.python_version(), **versions},
        )
