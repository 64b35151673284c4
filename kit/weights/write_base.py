"""Write the dequantized base, and for NF4 an NF4 copy, tensor by tensor from the original checkpoint, without loading
the model. An unquantized base (`policy.quantization: none`) is the original in BF16.

Covers: which weights transformers quantizes, from the model's shapes alone; the facts of `base.json`, equal to those
of the loaded model; safetensors files written in place, by several threads. Memory: tensors of the size of the largest
one, plus what quantizing them takes.
Not covered: models whose parameters are named or laid out differently in their checkpoint (Conv1D), except experts
(`layout.py`) and language models inside known wrappers (`wrapped.py`).
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit.core.checkpoint_files import SINGLE, read_header
from kit.core.errors import BadInput
from kit.core.run_directory import write_json
from kit.weights import fp8
from kit.weights.checkpoint import checkpoint_shards, read_tensor
from kit.weights.frozen_base import base_facts, hash_carried, nf4_facts, plain_facts
from kit.weights.hashing import hash_fp8, hash_quantized, hash_tensor
from kit.weights.layout import expert_matrices, parameter_shapes, unquantized_names
from kit.weights.model_files import model_name, select_shards, unquantized_config, without_weights
from kit.weights.nf4 import BLOCK_SIZE, block_maxima, dequantize_with, one_thread, quantize_weight
from kit.weights.shards import Behind, TensorFile, stored_kinds, write_index

NF4_FOLDER = "nf4"
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Plan:
    """How transformers loads a checkpoint in NF4: shapes, quantized weights, ties. FP8 stores the same layers."""

    shapes: dict[str, tuple[int, ...]]  # of every parameter, in the model's order; a tied one once
    quantized: frozenset[str]  # the weights among them that are stored as `quantization` says
    tied: dict[str, str]  # {additional name that a checkpoint may store: the parameter it is tied to}
    quantization: str = "nf4"

    def weights_bytes(self) -> int:
        """Size of the tensors in BF16."""
        return sum(2 * math.prod(shape) for shape in self.shapes.values())

    def copy_bytes(self) -> int:
        """Size of the tensors of the NF4 copy; 0 for other bases, which have none."""
        if self.quantization != "nf4":
            return 0
        return sum(copy_sizes(self.shapes[name])[0] + 4 * copy_sizes(self.shapes[name])[1] for name in self.quantized)


def copy_sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (packed bytes, block maxima) of a weight in NF4."""
    numel = math.prod(shape)
    return -(-numel // 2), -(-numel // BLOCK_SIZE)


def plan_base(config: Any, quantization: str = "nf4") -> Plan:
    """Plan a base of this storage for a transformers config, using transformers' own quantizer on a model without
    weights.

    `BadInput` if nothing would be quantized, and for Conv1D layers, whose weights it transposes before quantizing.
    """
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    model = without_weights(config)
    matrices, shapes = expert_matrices(model), parameter_shapes(model)
    skipped = unquantized_names(model)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=skipped)
    AutoHfQuantizer.from_config(settings, pre_quantized=False).preprocess_model(model, device_map={"": "cpu"})
    model.tie_weights()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear4bit)}
    if not layers:
        raise BadInput(f"{config.name_or_path or 'the model'} has no linear layer to quantize.")
    for name, module in layers.items():
        if getattr(module, "source_cls", torch.nn.Linear) is not torch.nn.Linear:
            raise BadInput(f"{name} is a {module.source_cls.__name__}: only models of nn.Linear layers are supported.")
    tied = {name: owner for name, owner in model.all_tied_weights_keys.items() if name not in shapes}
    quantized = frozenset(f"{name}.weight" for name in layers) | matrices.keys()
    return Plan(shapes, quantized, tied, quantization)


class Original:
    """Original checkpoint, to be read as its base.

    Opening reads the headers only, unless the output embedding is stored twice. `BadInput` if the checkpoint is
    already quantized or its tensors are not those of the model that its config.json describes.
    """

    def __init__(
        self,
        directory: Path,
        dtype: str,
        double_quantization: bool,
        device: torch.device | str = "cpu",
        quantization: str = "nf4",
    ):
        self.directory = Path(directory)
        self.dtype: torch.dtype = getattr(torch, dtype)
        # Dtype of the written files. BF16 cannot hold weights that a trainer dequantizes to float16.
        self.written = torch.float16 if self.dtype == torch.float16 else torch.bfloat16
        self.double_quantization = double_quantization
        self.device = device
        config = unquantized_config(self.directory)
        self.plan = plan_base(config, quantization)
        complaint = f"{self.directory} is not the model that its config.json describes"
        selected = select_shards(self.directory, set(self.plan.shapes), config, complaint)
        self.stored, self.carried = selected.stored, selected.carried
        self.shards = {file: names for file, names in selected.shards.items() if names}
        self.files = {name: file for file, names in self.shards.items() for name in names}
        for file, names in self.shards.items():
            tensors = read_header(self.directory / file).tensors
            for name in names:
                if (found := tensors[self.stored[name]][1]) != (wanted := self.plan.shapes[name]):
                    raise BadInput(f"{complaint}: {name} is {found}, it should be {wanted}.")
        self._check_tied(model_name(config))

    def _check_tied(self, rename: Callable[[str], str]) -> None:
        """`BadInput` if a tied weight is stored twice and differs: transformers would load both, vLLM one."""
        for file, names in checkpoint_shards(self.directory).items():
            for stored in (stored for stored in names if rename(stored) in self.plan.tied):
                owner = self.plan.tied[rename(stored)]
                if not torch.equal(self._read(file, stored), self.read(owner)):
                    raise BadInput(
                        f"{self.directory} ties {stored} to {owner} and stores other values for it. Set "
                        "tie_word_embeddings to false in its config.json if they are meant to differ."
                    )

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor as the trainer loads it, before quantization."""
        return self._read(self.files[name], self.stored[name])

    def _read(self, file: str, stored: str) -> torch.Tensor:
        return read_tensor(self.directory / file, stored).to(device=self.device, dtype=self.dtype)


def write_base(source: Original, directory: Path, model: str, revision: str | None) -> dict:
    """Write `model*.safetensors` (BF16, the source's shards), and `nf4/` for NF4, into `directory`; return the content
    of base.json.

    `model` and `revision` are recorded in it as the origin.
    """
    files = {file: source.shards.get(file, []) for file in sorted({*source.files.values(), *source.carried.values()})}
    if len(files) == 1:
        files = {SINGLE: list(source.files)}
    carried = {name: file if len(files) > 1 else SINGLE for name, file in source.carried.items()}
    quantization, quantized = source.plan.quantization, source.plan.quantized
    if quantization == "nf4":
        (directory / NF4_FOLDER).mkdir()
    else:
        facts = plain_facts(quantization, source.dtype, source.device)
    tensors: dict[str, str] = {}
    offsets: dict[str, float] = {}
    largest = 2 * max(math.prod(shape) for shape in source.plan.shapes.values())

    def write_one(name: str, weights: TensorFile, copy: TensorFile | None) -> None:
        nonlocal facts
        tensors[name], state = _write_tensor(source, name, weights, copy)
        if state is not None:
            facts = nf4_facts(state)
            if state.nested:
                offsets[name] = state.offset.item()

    for file, names in files.items():
        started = time.monotonic()
        others = [name for name, place in carried.items() if place == file]
        with (
            _open_pair(source, directory, file, names, others) as (weights, copy),
            one_thread(),
            Behind(largest, THREADS) as behind,
        ):
            for name in others:
                weights.write(name, read_tensor(source.directory / source.carried[name], name))
            for name in names:
                behind.run(2 * math.prod(source.plan.shapes[name]), write_one, name, weights, copy)
        print(f"  {file}: {len(names)} tensors in {time.monotonic() - started:.1f} s", flush=True)
    if len(files) > 1:
        weight_map = {source.stored[name]: file for file, names in files.items() for name in names} | carried
        write_index(directory, weight_map, source.plan.weights_bytes())
    copies = {name: file for file, names in files.items() for name in names if name in quantized}
    if quantization == "nf4":
        write_json(directory / NF4_FOLDER / "index.json", dict(sorted(copies.items())))
    return _info(source, tensors, offsets, facts, model, revision)


def describe_base(source: Original, model: str, revision: str | None) -> dict:
    """Return the content of base.json as `write_base` does, without writing the base: tensors are read and hashed one
    by one."""
    facts = plain_facts(source.plan.quantization, source.dtype, source.device)
    tensors: dict[str, str] = {}
    offsets: dict[str, float] = {}
    for name in source.files:
        value = source.read(name)
        if name not in source.plan.quantized or source.plan.quantization == "none":
            tensors[name] = hash_tensor(value)
        elif source.plan.quantization == "fp8":
            tensors[name] = hash_fp8(*fp8.quantize_weight(value), value.dtype)
        else:
            packed, state = quantize_weight(value, source.double_quantization, None)
            tensors[name], facts = hash_quantized(packed, state), nf4_facts(state)
            if state.nested:
                offsets[name] = state.offset.item()
    return _info(source, tensors, offsets, facts, model, revision)


def outline_base(source: Original, model: str, revision: str | None) -> dict:
    """Return the content of base.json without its hashes: enough for a `BaseCheckpoint` to check names and shapes
    before any tensor is read."""
    facts = plain_facts(source.plan.quantization, source.dtype, source.device)
    return base_facts(dict.fromkeys(source.files, ""), {}, _quantized(source), facts, model, revision) | (
        {"carried": dict.fromkeys(source.carried, "")} if source.carried else {}
    )


def _quantized(source: Original) -> list[str]:
    """Names of the linear layers that formats quantize."""
    return [name.removesuffix(".weight") for name in source.files if name in source.plan.quantized]


def _info(
    source: Original, tensors: dict[str, str], offsets: dict[str, float], facts: dict, model: str, revision: str | None
) -> dict:
    info = base_facts(
        dict(sorted(tensors.items())),
        {name: offsets[name] for name in source.plan.shapes if name in offsets},
        _quantized(source),
        facts,
        model,
        revision,
    )
    return info | ({"carried": hash_carried(source.directory, source.carried.items())} if source.carried else {})


def _write_tensor(source: Original, name: str, weights: TensorFile, copy: TensorFile | None) -> tuple[str, Any]:
    """Write one tensor and, for NF4, its copy; return its hash and its NF4 quant state."""
    value, stored = source.read(name), source.stored[name]
    if name not in source.plan.quantized or source.plan.quantization == "none":
        weights.write(stored, value.to(source.written))
        return hash_tensor(value), None
    if source.plan.quantization == "fp8":
        codes, scale = fp8.quantize_weight(value)
        weights.write(stored, fp8.dequantize_with(codes, scale, value.dtype).to(source.written))
        return hash_fp8(codes, scale, value.dtype), None
    packed, state = quantize_weight(value, source.double_quantization, None)
    del value  # only its NF4 form is needed from here
    absmax = block_maxima(state)
    weights.write(stored, dequantize_with(packed, absmax, state.shape, state.dtype).to(source.written))
    copy.write(f"{name}.packed", packed.reshape(-1))
    copy.write(f"{name}.absmax", absmax)
    return hash_quantized(packed, state), state


@contextlib.contextmanager
def _open_pair(
    source: Original, directory: Path, file: str, names: list[str], carried: list[str]
) -> Iterator[tuple[TensorFile, TensorFile | None]]:
    """Open the BF16 file of a shard, with the tensors `carried` as they are stored, and the file of its NF4 copy; None
    for the copy if the shard has no NF4 weight."""
    shapes = source.plan.shapes
    copied: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name in source.plan.quantized.intersection(names) if source.plan.quantization == "nf4" else ():
        packed, blocks = copy_sizes(shapes[name])
        copied |= {f"{name}.packed": (torch.uint8, (packed,)), f"{name}.absmax": (torch.float32, (blocks,))}
    kinds = {source.stored[name]: (source.written, shapes[name]) for name in names}
    kinds |= stored_kinds(source.directory, {name: source.carried[name] for name in carried})
    weights = TensorFile(directory / file, kinds, {"format": "pt"})
    facts = {"block_size": str(BLOCK_SIZE), "dtype": str(source.dtype).removeprefix("torch.")}
    with (
        weights,
        TensorFile(directory / NF4_FOLDER / file, copied, facts) if copied else contextlib.nullcontext() as copy,
    ):
        yield weights, copy
