"""Fold a LoRA adapter into the dequantized base: W = dequantize(base) + s·B·A, as a BF16 checkpoint.

The sum is taken in float32 and rounded once. Covers: rsLoRA, rank and alpha patterns, tied embeddings. Refused with a
reason: DoRA, modules_to_save, trained biases, adapters that change the base (PiSSA and similar), embedding adapters.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kit.core import lora
from kit.core.errors import BadInput
from kit.core.file_kinds import ADAPTER_CONFIG, MODEL_CONFIG
from kit.core.run_directory import publish, write_manifest
from kit.core.run_files import read_object
from kit.policy.adapter_files import language_key
from kit.weights.frozen_base import BaseCheckpoint, BaseTensor
from kit.weights.layout import expert_factors
from kit.weights.nf4 import PIECE
from kit.weights.shards import Behind, TensorFile, flush, name_files, stored_kinds
from kit.weights.wrapped import wrapper_of
from merge.chat_template import check_defaults, set_defaults

# Files that make a checkpoint usable besides its weights, by the names that transformers 5 and earlier versions write.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "additional_chat_templates",
)
WRITE_BYTES = 1 << 27  # most bytes waiting to be written


@dataclass(frozen=True)
class Factors:
    """One module's update: `scale` · `b` (out, r) · `a` (r, in)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def delta(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The update (out, in) in float32."""
        return self.scale * (self.b.to(device, torch.float32) @ self.a.to(device, torch.float32))


def read_adapter(directory: Path, base: BaseCheckpoint) -> dict[str, Factors]:
    """Read a peft LoRA adapter directory as {weight name in the plain model: its update}.

    `BadInput`, before any base weight is read, for an adapter that s·B·A does not describe, and for tensors that name
    a module missing from the base or whose shapes do not fit.
    """
    directory = Path(directory)
    config = read_object(directory / "adapter_config.json", ADAPTER_CONFIG)
    if not (directory / "adapter_model.safetensors").is_file():
        raise BadInput(f"{directory} has no adapter_model.safetensors.")
    if why := lora.reasons(config, getattr(base.config, "tie_word_embeddings", False)):
        raise BadInput(f"{directory} cannot be merged: {'; '.join(why)}.")
    found: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
        for stored in file.keys():
            key = language_key(stored) if wrapper_of(base.config) else stored
            if _is_frozen_copy(key, file.get_tensor(stored), base):
                continue
            module, factor = _split_key(directory, key)
            found.setdefault(module, {})[factor] = file.get_tensor(stored)
    if not found:
        raise BadInput(f"{directory} holds no LoRA tensor.")
    updates: dict[str, Factors] = {}
    for module, pair in found.items():
        if (parameter := lora.expert_parameter(config, module)) is not None:
            updates |= _expert_factors(directory, parameter, pair, config, base)
        else:
            updates[f"{module}.weight"] = _factors(directory, module, pair, config, base)
    return updates


def _expert_factors(
    directory: Path, parameter: str, pair: dict, config: dict, base: BaseCheckpoint
) -> dict[str, Factors]:
    """Factors of every expert's matrices in a fused parameter."""
    a, b = _whole(directory, parameter, pair)
    try:
        found = expert_factors(base.experts, parameter, a, b)
    except ValueError as error:
        raise BadInput(f"{directory}: {error}.") from None
    if not found:
        raise BadInput(f"{directory} names {parameter}, which the base {base.directory} does not have.")
    rank, scale = lora.rank_of(config, parameter), lora.scale_of(config, parameter)
    if (stored := next(iter(found.values()))[0].shape[0]) != rank:
        raise BadInput(f"{directory}: {parameter} has rank {stored}, its adapter_config.json says {rank}.")
    return {name: Factors(*factors, scale) for name, factors in found.items()}


def _whole(directory: Path, module: str, pair: dict) -> tuple[torch.Tensor, torch.Tensor]:
    if missing := {"lora_A", "lora_B"} - set(pair):
        raise BadInput(f"{directory} has {module} without {missing.pop()}: the file is incomplete.")
    return pair["lora_A"], pair["lora_B"]


def _is_frozen_copy(key: str, tensor: torch.Tensor, base: BaseCheckpoint) -> bool:
    """Whether a tensor is an unchanged copy of a base weight: peft saves the embeddings too when an adapter targets
    one, or when it cannot tell whether the vocabulary was resized."""
    name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
    if name not in base.files or tuple(tensor.shape) != base.shape(name):
        return False
    return torch.equal(base.read(name).to(tensor.dtype), tensor)


def _split_key(directory: Path, key: str) -> tuple[str, str]:
    module, _, factor = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
    if factor not in ("lora_A", "lora_B"):
        raise BadInput(
            f"{directory} holds {key}, which is not a LoRA factor of a linear layer, nor a copy of the base's weight. "
            "Only lora_A and lora_B merge: train with a plain LoraConfig on linear layers, without new tokens, and "
            "save with save_embedding_layers=False."
        )
    return module, factor


def _factors(directory: Path, module: str, pair: dict, config: dict, base: BaseCheckpoint) -> Factors:
    if f"{module}.weight" not in base.files:
        raise BadInput(f"{directory} names {module}, which the base {base.directory} does not have.")
    a, b = _whole(directory, module, pair)
    rank = lora.rank_of(config, module)
    shape = base.shape(f"{module}.weight")
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        raise BadInput(
            f"{directory}: {module} has A {tuple(a.shape)} and B {tuple(b.shape)}; rank {rank} on a weight of "
            f"{tuple(shape)} needs A {(rank, shape[1])} and B {(shape[0], rank)}."
        )
    return Factors(a, b, lora.scale_of(config, module))


class Retained:
    """The share of an update that survives a format: <Q(W+Δ) − Q(W), Δ> / <Δ, Δ>, summed over all layers.

    1 is all of it; 0 means that the quantized checkpoint is the quantized base.
    """

    def __init__(self) -> None:
        self.kept = 0.0
        self.whole = 0.0

    def add(self, after: torch.Tensor, before: torch.Tensor, delta: torch.Tensor) -> None:
        """Add a layer piece by piece: whole, it would take 24 bytes per value in double precision."""
        step = PIECE[delta.device.type == "cuda"]
        for parts in zip(*(value.reshape(-1).split(step) for value in (after, before, delta)), strict=True):
            changed, wanted = (parts[0].float() - parts[1].float()).double(), parts[2].double()
            self.kept += (changed * wanted).sum().item()
            self.whole += (wanted**2).sum().item()

    def project(self, rows: torch.Tensor, delta: torch.Tensor, before: bool) -> None:
        """Add rows of a layer after the update or, with `before`, subtract the same rows before it.

        Each row is to be added once and subtracted once.
        """
        wanted = delta.double()
        share = (rows.double() * wanted).sum().item()
        self.kept += -share if before else share
        self.whole += 0.0 if before else (wanted**2).sum().item()

    def share(self) -> float | None:
        """The share kept; None if there is no update at all."""
        return self.kept / self.whole if self.whole else None


def fold(base: BaseTensor, update: Factors | None, retained: Retained) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index of the first value, piece) of the merged tensor, in BF16 on the CPU, in order.

    Each piece is the float32 sum of the base's rows and their update, rounded once. `retained` accumulates how much of
    the update survives the rounding.
    """
    device = base.base.device
    a, b = (None, None) if update is None else (part.to(device, torch.float32) for part in (update.a, update.b))
    for start, stop in base.pieces():
        value = base.rows(start, stop, "cpu" if update is None else None)
        merged = value.to(torch.bfloat16)
        if update is not None:
            before, delta = merged, update.scale * (b[start:stop] @ a)
            merged = (value.float() + delta).to(torch.bfloat16)
            retained.add(merged, before, delta)
        yield start * base.width, merged.cpu()


def write_bf16(
    base: BaseCheckpoint,
    updates: dict[str, Factors],
    final: Path,
    verify: Callable[[Path], dict | None],
    overwrite: bool = False,
    **manifest: Any,
) -> dict:
    """Publish the merged BF16 checkpoint at `final` with the source's sharding; return its manifest.

    `verify` scores the directory before it is published: its result goes into the manifest, and an exception keeps the
    checkpoint from being published. `chat_template_kwargs` of the manifest become the chat template's defaults. On any
    failure `final` is left as it was.
    Memory: one tensor in 16 bits, its stored form, and what is being written (`WRITE_BYTES`).
    """
    with publish(final, overwrite) as partial:
        share = write_folded(base, updates, partial)
        write_config(base.directory, partial, None)
        if arguments := manifest.get("chat_template_kwargs"):
            set_defaults(partial, arguments)
            check_defaults(base.directory, partial, arguments)
        manifest |= {"format": "bf16", "into": base.into, "retained_update": share, "verify": verify(partial)}
        return write_manifest(partial, "checkpoint", **manifest)


def write_folded(base: BaseCheckpoint, updates: dict[str, Factors], directory: Path) -> float | None:
    """Write the tensors of the merged checkpoint; return the share of the update that BF16 keeps.

    While a piece is folded, one thread writes the previous ones and another hashes the base tensor. `CheckFailed` if
    the disk is full or a base tensor does not match base.json.
    """
    shards = {file: base.shards.get(file, []) for file in sorted({*base.files.values(), *base.carried.values()})}
    retained, total = Retained(), 0
    weight_map: dict[str, str] = {}
    with Behind(WRITE_BYTES) as writer, Behind() as disk, ThreadPoolExecutor(1) as hashing:
        for file, names in shards.items():
            carried = {name: place for name, place in base.carried.items() if place == file}
            tensors = {base.stored[name]: (torch.bfloat16, base.shape(name)) for name in names}
            tensors |= stored_kinds(base.directory, carried)
            weight_map |= dict.fromkeys(tensors, file)
            with TensorFile(directory / file, tensors, {"format": "pt"}) as out:
                for stored in carried:
                    value = base.carry(stored)
                    total += value.nbytes
                    writer.run(value.nbytes, out.write, stored, value)
                for name in names:
                    tensor = BaseTensor(base, name, hashing)
                    for at, piece in fold(tensor, updates.get(name), retained):
                        total += piece.nbytes
                        writer.run(piece.nbytes, out.write, base.stored[name], piece, at)
                    tensor.check()
                writer.wait()
            disk.run(0, flush, directory / file)
    name_files(directory, weight_map, total)
    return retained.share()


def write_config(source: Path, directory: Path, quantization: dict | None, dtype: str = "bfloat16") -> None:
    """Copy `source`'s config.json (`dtype`, and `quantization` as its only quantization_config) and its companions."""
    config = read_object(source / "config.json", MODEL_CONFIG)
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    if "dtype" in (config.get("text_config") or {}):
        config["text_config"]["dtype"] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COMPANIONS:
        if (source / name).is_dir():
            # File by file: copytree's own error has no errno to tell a full disk from other faults.
            for file in sorted((source / name).rglob("*")):
                if file.is_file():
                    target = directory / file.relative_to(source)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(file, target)
        elif (source / name).is_file():
            shutil.copy(source / name, directory / name)
