"""The server's half of a remerge sync: a vLLM worker that folds each adapter into its own weights, in place.

Loaded with `--worker-extension-cls kit.rollout.server.remerge.Remerge`. Every worker keeps a copy of its shard of the
base's linear layers, as the base is stored: NF4 (from `nf4/` of the base directory), or FP8 or BF16 (`base_copy.py`).
A sync computes dequantize(copy) + s·B·A, rounds it once to the model's dtype and applies the quantization that vLLM
itself applies when it loads a checkpoint, so that the served weights equal those of a fresh load of the merged
checkpoint. Parameters keep their addresses: CUDA graphs stay valid. With server.quant_cfg the weights are those that a
reader of the exported checkpoint computes with (`quantized_fold.py`).

Covers: fused layers (qkv, gate_up), experts (`expert_layers.py`), tensor parallelism, the online FP8 quantizations,
BF16, the copy in GPU or pinned host memory, and linear layers whose FP8 weights vLLM 0.31 repacks for Marlin's kernels
(GPUs older than Ada): the copy is never packed, so a fold quantizes and repacks by vLLM's own loading code. Not
covered: embeddings and the output layer, pipeline parallelism, DoRA, experts in Marlin's kernels. Written for vllm
0.26 to 0.31.
"""

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kit.core import limits, lora
from kit.core.cards import W4A16, W8A8, W8A16, W16A16
from kit.core.checkpoint_files import read_header
from kit.core.file_kinds import ADAPTER_CONFIG, NF4_INDEX
from kit.core.formats import QuantFormat, fitted
from kit.core.run_files import read_object
from kit.rollout.noise import Noise, NoisyNorms
from kit.rollout.protocol import CONFIG, TENSORS, WEIGHTS
from kit.rollout.server import (
    base_copy,
    cpu_sampler,  # noqa: F401 importing it corrects a CPU worker
    expert_layers,
    packed_layers,
    quantized_fold,
)
from kit.rollout.server.expert_layers import is_experts
from kit.rollout.server.shard import Linear, Part
from kit.rollout.server.vllm_types import ExpertLayer, LinearLayer, ModelConfig, ModelRunner, VllmConfig, Worker

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 64
READERS = 4  # threads that read an adapter's file
# Locks of Marlin's kernels, a tensor beside the parameters in vLLM before 0.31; it does not depend on the weight.
SCRATCH = "workspace"
_pinned: "list[torch.Tensor]" = []  # see _host_buffer


class Factors(NamedTuple):
    """Update of one Hugging Face layer on this worker, scale · b · a, or of all its experts of a parameter."""

    a: "torch.Tensor"  # (r, columns), or (E, r, columns)
    b: "torch.Tensor"  # (rows, r), or (E, rows of an expert, r)
    scale: float


@dataclass
class Staged:
    """An adapter's factors by layer, from `read_adapter`, and the layers' largest |input| from calibration (formats
    with static activations)."""

    factors: dict[str, Factors]
    input_peaks: dict[str, float] = field(default_factory=dict)


@dataclass
class State:
    """State that the extension keeps on a worker between calls."""

    linears: list[Linear]
    dtype: "torch.dtype"  # dtype that the copy dequantizes to
    code: "torch.Tensor | None"  # the 16 values of NF4; None for another base
    format: QuantFormat | None = None
    staged: dict[str, Staged] = field(default_factory=dict)
    active: str | None = None
    norms: NoisyNorms | None = None  # set on the first noise request


class Remerge:
    """Methods that vLLM adds to every worker; called through `collective_rpc`.

    Each returns a plain dictionary, with an `error` key on failure: once a worker raises, vLLM no longer reads the
    answers of the others. A failed `remerge_activate` may have changed some layers; the caller folds again or gives up
    on the server.
    """

    model_runner: ModelRunner  # this and the next three are the worker's
    model_config: ModelConfig
    device: "torch.device"
    vllm_config: VllmConfig

    def remerge_describe(self) -> dict:
        """Return the layers that an adapter may target, by their Hugging Face names."""
        try:
            linears = find_layers(self.model_runner.model)
        except ValueError as error:
            return {"modules": [], "ready": False, "why": str(error)}
        modules = [part.name for one in linears if not is_experts(one) for part in one.parts]
        modules += expert_layers.adapter_modules(linears)
        why = None if linears else "the model has no linear layer that vLLM shards by rows or columns"
        found = {"modules": modules, "ready": hasattr(self, "_remerge"), "why": why}
        return found | {"product": linear_product([linear.layer for linear in linears])}

    def remerge_setup(self, base_dir: str, copy: str) -> dict:
        """Read this worker's shard of the base's copy; `copy` says where it is kept, gpu or host. With a quantization
        format, also serve the base in that format; no request may be in flight."""

        started = time.perf_counter()
        if copy not in ("gpu", "host"):
            return {"error": f"the copy of the base can stay on gpu or host, not {copy!r}"}
        kind, directory = base_copy.storage(Path(base_dir)), Path(base_dir)
        try:
            linears = find_layers(self.model_runner.model)
            routers = expert_layers.unquantized(directory, {part.name for one in linears for part in one.parts})
            linears = [one for one in linears if not {part.name for part in one.parts} <= routers]
            if kind == "nf4":
                dtype, code = read_copy(directory / "nf4", linears, self.device, copy), nf4_code(self.device)
            else:
                code, place = None, functools.partial(_place, device=self.device, copy=copy)
                dtype = base_copy.read(directory, kind, linears, place)
        except Exception as error:
            return {"error": f"the base's copy in {base_dir} cannot be used: {type(error).__name__}: {error}"}
        state = State(linears, dtype, code)
        try:
            state.format = quantized_fold.format_of(self.vllm_config)
            if state.format is not None:
                if held := next((one.name for one in linears if is_experts(one)), None):
                    raise ValueError(f"{state.format.name} does not reach experts ({held})")
                state.format = fitted(state.format, (linear.layer.input_size for linear in linears))
                quantized_fold.check(linears, state.format)
                _write_weights(self, state, Staged({}))
        except Exception as error:
            return {"error": f"the base cannot be quantized: {type(error).__name__}: {error}"}
        self._remerge = state
        _synchronize(self.device)
        size = sum(part.nbytes for linear in linears for part in (linear.packed, linear.absmax) if part is not None)
        return {"linears": len(linears), "gib": size / 2**30, "seconds": time.perf_counter() - started}

    def remerge_stage(self, key: str, path: str) -> dict:
        """Read this worker's shard of an adapter and check that every tensor belongs to a layer."""
        if not hasattr(self, "_remerge"):
            return {"error": "remerge_setup was not called"}
        state = self._remerge
        try:
            adapter = Staged(read_adapter(Path(path), state.linears, self.device))
            if state.format is not None and state.format.needs_calibration:
                adapter.input_peaks = quantized_fold.read_input_peaks(Path(path), state.linears)
        except Exception as error:
            return {"error": f"the adapter in {path} cannot be folded in: {type(error).__name__}: {error}"}
        state.staged[key] = adapter
        return {"tensors": 2 * len(adapter.factors)}

    def remerge_activate(self, key: str) -> dict:
        """Recompute every linear layer with a staged adapter, in place, and remove noise.

        No request may be in flight.
        """

        state = getattr(self, "_remerge", None)
        if state is None or key not in state.staged:
            return {"error": f"no adapter is staged as {key}"}
        started = time.perf_counter()
        try:
            if state.norms is not None:
                state.norms.set(None)
            _write_weights(self, state, state.staged[key])
            _synchronize(self.device)
        except Exception as error:
            return {"error": f"folding {key} in failed: {type(error).__name__}: {error}"}
        state.active = key
        return {"linears": len(state.linears), "seconds": time.perf_counter() - started}

    def remerge_noise(self, sigma: float, seed: int) -> dict:
        """Set noise of this draw on the norms' own scales, in place; 0 removes it. No request may be in flight."""
        import torch

        state = getattr(self, "_remerge", None)
        if state is None:
            return {"error": "remerge_setup was not called"}
        try:
            with torch.inference_mode():
                state.norms = state.norms or NoisyNorms(language_model(self.model_runner.model))
                state.norms.set(Noise(sigma, seed))
        except Exception as error:
            return {"error": f"noise on the norms failed: {type(error).__name__}: {error}"}
        return {"norms": len(state.norms.weights)}

    def remerge_discard(self, key: str) -> dict:
        """Discard a staged adapter; the weights stay as they are."""
        state = getattr(self, "_remerge", None)
        if state is not None:
            state.staged.pop(key, None)
        return {}


def find_layers(model: "torch.nn.Module") -> list[Linear]:
    """Find a worker's linear layers and its experts; `ValueError` for experts that remerge does not cover."""
    return find_linears(model) + expert_layers.find_experts(model)


def linear_product(layers: "list[LinearLayer]") -> str:
    """Product of the quantized layers: W4A16, W8A16 (FP8 by Marlin's kernels) or W8A8; W16A16 if none is quantized."""
    if any(packed_layers.group_of(layer) for layer in layers):
        return W4A16
    kernels = [getattr(layer.quant_method, "fp8_linear", None) for layer in layers]
    names = [type(kernel).__name__ for kernel in kernels if kernel is not None]
    return W16A16 if not names else W8A16 if names[0].startswith("MarlinFP8") else W8A8


def language_model(model: "torch.nn.Module") -> "torch.nn.Module":
    """The language model inside a vLLM model with other parts; else `model`."""
    return getattr(model, "language_model", model)


def find_linears(model: "torch.nn.Module") -> list[Linear]:
    """Find a worker's linear layers and, for each, the Hugging Face layers that it consists of.

    In a vision-language model only the language model is searched, and names are relative to it.
    """
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        LinearBase,
        QKVParallelLinear,
        RowParallelLinear,
    )

    model = language_model(model)
    fused = getattr(model, "packed_modules_mapping", {})
    found = []
    for name, layer in model.named_modules():
        if not isinstance(layer, LinearBase) or getattr(layer, "quant_method", None) is None:
            continue
        name = name.removesuffix(".base_layer")  # inside a LoRA layer
        prefix, _, leaf = name.rpartition(".")
        leaves = fused.get(leaf, [leaf])
        columns = getattr(layer, "input_size_per_partition", layer.input_size)
        first_in = layer.tp_rank * columns if isinstance(layer, RowParallelLinear) else 0
        widths = getattr(layer, "output_partition_sizes", [layer.output_size])
        if leaf == "in_proj_qkvz" and len(leaves) == 2 and layer.tp_size == 1:  # Qwen3.5: q, k and v are one layer
            widths = [sum(widths[:-1]), widths[-1]]
        if len(widths) != len(leaves):
            continue
        parts, row = [], 0
        for index, (part, rows) in enumerate(zip(leaves, widths, strict=True)):
            rank = layer.tp_rank if isinstance(layer, ColumnParallelLinear) else 0
            if isinstance(layer, QKVParallelLinear) and index > 0:
                rank //= layer.num_kv_head_replicas
            full = f"{prefix}.{part}" if prefix else part
            parts.append(Part(full, row, rows, rank * rows, first_in))
            row += rows
        found.append(Linear(name, layer, row, columns, parts))
    return found


def nf4_code(device: "torch.device") -> "torch.Tensor":
    """The 16 values of NF4, (16,) float32."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device=device)


def read_copy(directory: Path, linears: list[Linear], device: "torch.device", copy: str) -> "torch.dtype":
    """Read every linear's NF4 copy; return the dtype that it dequantizes to.

    `ValueError` if a layer has no copy or its shard does not fall on block boundaries.
    """
    import torch
    from safetensors import safe_open

    if not (directory / "index.json").is_file():
        raise ValueError(f"{directory} is not there. Write the base again with `python -m merge base`")
    index = read_object(directory / "index.json", NF4_INDEX)
    files: dict[str, Any] = {}

    def read(tensor: str, file: str) -> torch.Tensor:
        if file not in files:
            files[file] = safe_open(directory / file, framework="pt")
        return files[file].get_tensor(tensor)

    dtype = torch.bfloat16
    for linear in linears:
        if linear.columns % BLOCK_SIZE:
            raise ValueError(
                f"{linear.name} has {linear.columns} input columns on this worker, which blocks of {BLOCK_SIZE} do "
                "not divide. Lower server.tensor_parallel"
            )
        packed, absmax = [], []
        for part in linear.parts:
            weight = f"{part.name}.weight"
            if weight not in index:
                raise ValueError(
                    f"{weight} is not in it: the run left that layer unquantized, or the base is another model's"
                )
            rows = slice(part.first_out, part.first_out + part.rows)
            width = linear.width or linear.layer.input_size
            bytes_ = read(f"{weight}.packed", index[weight]).view(-1, width // 2)
            scales = read(f"{weight}.absmax", index[weight]).view(-1, width // BLOCK_SIZE)
            start, stop = part.first_in, part.first_in + linear.columns
            packed.append(bytes_[rows, start // 2 : stop // 2])
            absmax.append(scales[rows, start // BLOCK_SIZE : stop // BLOCK_SIZE])
            dtype = getattr(torch, (files[index[weight]].metadata() or {}).get("dtype", "bfloat16"))
        linear.packed = _place(torch.cat(packed).reshape(-1), device, copy)
        linear.absmax = _place(torch.cat(absmax).reshape(-1), device, copy)
    return dtype


def _place(tensor: "torch.Tensor", device: "torch.device", copy: str) -> "torch.Tensor":
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory() if copy == "host" else tensor.to(device)


def read_adapter(directory: Path, linears: list[Linear], device: "torch.device") -> dict[str, Factors]:
    """Read {layer: (A (r, columns), B (rows, r), scale)} of this worker's shard, on its device, in the file's dtype.

    One read and one copy to the device for the whole file. `ValueError` for a tensor that belongs to no layer.
    """
    config = read_object(directory / CONFIG, ADAPTER_CONFIG)
    tensors = read_tensors(directory / WEIGHTS, device)
    adapter: dict[str, Factors] = {}
    for linear in linears:
        if is_experts(linear):
            if (found := expert_layers.read_factors(linear, tensors, config, TENSORS)) is not None:
                adapter[linear.name] = Factors(*found)
            continue
        for part in linear.parts:
            a = tensors.pop(f"{TENSORS}{part.name}.lora_A.weight", None)
            b = tensors.pop(f"{TENSORS}{part.name}.lora_B.weight", None)
            if a is None and b is None:
                continue
            if a is None or b is None:
                raise ValueError(f"{part.name} has one of its two factors only")
            a = a[:, part.first_in : part.first_in + linear.columns]
            b = b[part.first_out : part.first_out + part.rows]
            rank = a.shape[0]
            if a.shape[1] != linear.columns or b.shape != (part.rows, rank):
                raise ValueError(f"{part.name} has factors of {tuple(a.shape)} and {tuple(b.shape)}")
            declared = lora.rank_of(config, part.name)
            if rank != declared:
                raise ValueError(f"{part.name} has rank {rank}, adapter_config.json says {declared}")
            adapter[part.name] = Factors(a, b, lora.scale_of(config, part.name))
    if tensors:
        raise ValueError(f"this server has no place for {sorted(tensors)[0]} ({len(tensors)} such tensors)")
    return adapter


def read_tensors(path: Path, device: "torch.device") -> "dict[str, torch.Tensor]":
    """Read the tensors of a safetensors file as views of one buffer on `device`; `ValueError` for a truncated file."""
    import torch

    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    try:
        header = read_header(path)
    except ValueError as error:
        raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from None
    if other := [name for name, (kind, _) in header.tensors.items() if kind not in dtypes]:
        raise ValueError(f"{other[0]} is of type {header.tensors[other[0]][0]}")
    content = _host_buffer(size := path.stat().st_size, device)
    if not _read_into(memoryview(content.numpy()), path):
        raise ValueError(f"{path.name} is not a whole safetensors file")
    sizes = [dtypes[kind].itemsize * math.prod(shape) for kind, shape in header.tensors.values()]
    pieces = content[size - sum(sizes) :].to(device, copy=True).split(sizes)  # behind the header
    found = {}
    for (name, (kind, shape)), piece in zip(header.tensors.items(), pieces, strict=True):
        if piece.storage_offset() % 4:  # a view of another dtype needs an aligned start
            piece = piece.clone()
        found[name] = piece.view(dtypes[kind]).view(shape)
    return found


def _read_into(view: memoryview, path: Path) -> bool:
    """Fill `view` from the start of a file and return whether it was long enough. Uses several threads: one copies the
    file's pages slower than a GPU takes them."""
    size = len(view)
    piece = max(1 << 20, -(-size // READERS))
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(READERS) as pool:

        def read(start: int) -> bool:
            stop = min(start + piece, size)
            while start < stop and (count := os.preadv(file.fileno(), [view[start:stop]], start)):
                start += count
            return start == stop

        return all(pool.map(read, range(0, size, piece)))


def _host_buffer(size: int, device: "torch.device") -> "torch.Tensor":
    """Return (size,) uint8 in host memory; for a GPU, one reused pinned buffer: pinning takes longer than reading."""
    import torch

    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    if len(_pinned) == 0 or len(_pinned[0]) < size:
        _pinned[:] = [torch.empty(size, dtype=torch.uint8, pin_memory=True)]
    return _pinned[0][:size]


def _write_weights(worker: Worker, state: State, adapter: Staged) -> None:
    """Write every linear layer of a worker with an adapter, in place."""
    import torch

    dtype = worker.model_config.dtype
    halves: dict[int, torch.Tensor] = {}  # of layers of experts, whose two parameters are written together
    with torch.inference_mode(), _vllm_context(worker):
        for linear, weight in merged_weights(state, adapter.factors, worker.device):
            if is_experts(linear):
                experts = len(expert_layers.local_experts(cast(ExpertLayer, linear.layer)))
                weight = weight.to(dtype).view(experts, -1, linear.columns)
                if (first := halves.pop(id(linear.layer), None)) is None:
                    halves[id(linear.layer)] = weight
                else:
                    expert_layers.write_experts(linear.layer, first, weight)
            elif packed_layers.group_of(linear.layer):
                write_weight(linear.layer, weight)
            elif state.format is None:
                write_weight(linear.layer, weight.to(dtype))
            else:
                write_weight(linear.layer, quantized_fold.quantized(linear, weight, state.format, dtype))
                quantized_fold.set_input_peak(linear, adapter.input_peaks)


def merged_weights(
    state: State, adapter: dict[str, Factors], device: "torch.device"
) -> "Iterator[tuple[Linear, torch.Tensor]]":
    """Yield (linear, dequantize(copy) + s·B·A (rows, columns)) for every linear of the worker, rounded once."""
    for linear, packed, absmax in _on_device(state.linears, device):
        yield linear, merged_weight(linear, packed, absmax, state, adapter)


def merged_weight(
    linear: Linear,
    packed: "torch.Tensor",
    absmax: "torch.Tensor | None",
    state: State,
    adapter: dict[str, Factors],
) -> "torch.Tensor":
    """Compute one linear's weight (rows, columns) with its parts' updates; for NF4 on a GPU, one kernel per part."""
    import torch

    if not packed.is_cuda or state.code is None:
        if state.code is None:
            weight = base_copy.dequantize(packed, absmax, state.dtype)
        else:
            weight = dequantize(packed, absmax, state.code, (linear.rows, linear.columns), state.dtype)
        if is_experts(linear):
            if (update := adapter.get(linear.name)) is not None:
                expert_layers.add_updates(weight.view(len(update.a), -1, linear.columns), *update)
            return weight
        for part in linear.parts:
            if part.name in adapter:
                add_update(weight[part.row : part.row + part.rows], *adapter[part.name])
        return weight
    from kit.weights.fold_kernel import fold

    weight = torch.empty(linear.rows, linear.columns, dtype=state.dtype, device=packed.device)
    packed, absmax = packed.view(linear.rows, -1), absmax.view(linear.rows, -1)
    if is_experts(linear):
        fold(weight, packed, absmax, state.code, adapter.get(linear.name))
        return weight
    for part in linear.parts:
        rows = slice(part.row, part.row + part.rows)
        fold(weight[rows], packed[rows], absmax[rows], state.code, adapter.get(part.name))
    return weight


def dequantize(
    packed: "torch.Tensor",
    absmax: "torch.Tensor",
    code: "torch.Tensor",
    shape: tuple[int, int],
    dtype: "torch.dtype",
) -> "torch.Tensor":
    """Return the weight that the trainer's bitsandbytes computes with, (rows, columns) in `dtype`."""
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(
        absmax=absmax, shape=torch.Size(shape), code=code, blocksize=BLOCK_SIZE, quant_type="nf4", dtype=dtype
    )
    return dequantize_4bit(packed.view(-1, 1), state)


def add_update(weight: "torch.Tensor", a: "torch.Tensor", b: "torch.Tensor", scale: float) -> None:
    """weight (rows, columns) += scale · b · a, in place, some rows at a time: summed in float32, rounded once."""
    step = max(1, limits.FOLD_CHUNK // weight.shape[1])
    for rows in (slice(at, at + step) for at in range(0, len(weight), step)):
        weight[rows] = weight[rows].float() + scale * (b[rows].float() @ a.float())


def _on_device(
    linears: list[Linear], device: "torch.device"
) -> "Iterator[tuple[Linear, torch.Tensor, torch.Tensor | None]]":
    """Yield every linear with its copy on the device; copies in host memory are fetched one layer ahead."""
    import torch

    if device.type != "cuda" or not linears or linears[0].packed.is_cuda:
        yield from ((linear, linear.packed, linear.absmax) for linear in linears)
        return
    fetching, computing = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def fetch(linear: Linear) -> tuple:
        with torch.cuda.stream(fetching):
            copied = (linear.packed, linear.absmax)
            pair = tuple(None if one is None else one.to(device, non_blocking=True) for one in copied)
        done = torch.cuda.Event()
        done.record(fetching)
        return (*pair, done)

    ahead = fetch(linears[0])
    for index, linear in enumerate(linears):
        packed, absmax, done = ahead
        if index + 1 < len(linears):
            ahead = fetch(linears[index + 1])
        computing.wait_event(done)
        packed.record_stream(computing)
        if absmax is not None:
            absmax.record_stream(computing)
        yield linear, packed, absmax


def write_weight(layer: LinearLayer, weight: "torch.Tensor") -> None:
    """Make a vLLM layer compute with `weight` (rows, columns), applying the layer's own quantization, or that of the
    format that it holds packed.

    On a GPU every parameter keeps its address; `RuntimeError` if its shape or dtype would change.
    """
    from torch import Tensor, nn

    fresh = nn.Module()
    kept = ("_parameters", "_buffers", "_modules", "_already_called_process_weights_after_loading")
    fresh.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in kept})
    if packed_layers.group_of(layer):
        packed_layers.give_weight(fresh, weight)
    else:
        fresh.weight = nn.Parameter(weight, requires_grad=False)
    before = set(fresh.__dict__)
    layer.quant_method.process_weights_after_loading(fresh)
    for name, value in fresh._parameters.items():
        current = getattr(layer, name, None)
        if value is None or current is None or current.shape != value.shape or current.dtype != value.dtype:
            if weight.is_cuda:
                raise RuntimeError(f"{name} of {type(layer).__name__} would change its shape or type")
            setattr(layer, name, value)
        else:
            current.data.copy_(value.data)
    for name, value in fresh.__dict__.items():
        if name in (*kept, packed_layers.SCHEME) or (name in before and value is layer.__dict__.get(name)):
            continue
        if name == SCRATCH and name in layer.__dict__:
            continue
        if weight.is_cuda and isinstance(value, Tensor):
            raise RuntimeError(f"{type(layer.quant_method).__name__} keeps the tensor {name} beside its parameters")
        # Whatever a CPU kernel keeps outside the parameters: packed weights in a closure.
        setattr(layer, name, value)


def _vllm_context(worker: Worker) -> contextlib.ExitStack:
    """Set vLLM's configuration and default dtype, as during model loading."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    stack = contextlib.ExitStack()
    stack.enter_context(set_current_vllm_config(worker.vllm_config))
    stack.enter_context(set_default_torch_dtype(worker.model_config.dtype))
    return stack


def _synchronize(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
