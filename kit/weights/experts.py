"""A layer's frozen experts, stored in NF4, in FP8 or unquantized, and their grouped products.

transformers 5 keeps a layer's experts in two parameters that bitsandbytes does not quantize. `FrozenExperts` stands in
their place from the moment the model is built: it never holds them in 16 bits (unless the base is unquantized), reads
the checkpoint's matrices one at a time and quantizes each as a linear layer's weight (`nf4.py`, `fp8.py`). A product
dequantizes the experts that its tokens take, multiplies all of them in one grouped kernel
(`torch.nn.functional.grouped_mm`) and releases them; nothing of the base is saved for the backward pass, which
dequantizes again. Tokens are sorted by expert once per layer.

Numbers: the routing weights multiply each expert's output, and a token's outputs are summed over its experts in the
order of the router, as transformers' `grouped_mm` does. The adapter's part is added to the base's product before the
activation; its gradients are computed in the compute dtype. Written for transformers 5.17 and torch 2.11 to 2.13.
Not covered: biases, transposed or interleaved weights, a base split over processes (refused by `layout.py` and
`load.check_base`).
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm, pad

from kit.core.errors import BadInput
from kit.core.lora import EXPERT_PARAMETERS
from kit.weights import fp8
from kit.weights.checkpoint import checkpoint_shards, find_checkpoint
from kit.weights.hashing import hash_fp8, hash_quantized, hash_tensor
from kit.weights.layout import PARTS, ExpertMatrix, expert_matrices, expert_modules
from kit.weights.nf4 import BLOCK_SIZE, dequantize_with, quantize_weight

NESTED_BLOCK = 256  # block maxima that share a scale in double quantization, as bitsandbytes quantizes them
# From this many rows per expert on, a product dequantizes all experts instead of looking up which are taken: finding
# out makes the host wait for the GPU.
ALL_TAKEN = 4
ALIGNED = 8  # grouped_mm takes rows of a multiple of 16 bytes


class Update(NamedTuple):
    """An adapter's factors of one parameter, in any dtype: a (E, r, in), b (E, out, r), and their scale."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class FrozenExperts(torch.nn.Module):
    """Experts of one layer. The parameters `gate_up_proj` and `down_proj` hold what is stored, frozen: NF4's packed
    bytes (E·parts, bytes), FP8 codes as uint8 or plain weights (E, out, in). `shapes` are the weights' (E, out, in).
    """

    original: type[torch.nn.Module]  # the class that it stands for, set by `_standing_for`
    _is_hf_initialized = True  # transformers does not initialize what a checkpoint lacks here: `read_experts` fills it
    base_product: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # tags for recomputation

    def __init__(self, config: Any):
        super().__init__()
        with torch.device("meta"):
            model = self.original(config)
        self.shapes = {name: tuple(one.shape) for name, one in model.named_parameters(recurse=False)}
        self.num_experts = self.shapes["down_proj"][0]
        self.act_fn = model.act_fn
        self.storage, self.storage_dtype = "none", torch.get_default_dtype()
        self.compute_dtype: torch.dtype | None = None  # None: the storage dtype
        self.kept: dict[str, torch.Tensor] | None = None  # weights kept for a rollout, see kit/policy/kept_weights.py

    # --- what is stored

    def store(
        self, name: str, matrices: Iterable[torch.Tensor], storage: str, dtype: torch.dtype, device: Any, nested: bool
    ) -> None:
        """Store the parameter `name` from its matrices (rows, columns) in order; `ValueError` in NF4 for matrices
        whose size its blocks do not divide."""
        experts, out, columns = self.shapes[name]
        count, rows = experts * PARTS[name], out // PARTS[name]
        self.storage, self.storage_dtype = storage, dtype
        if storage == "nf4":
            self._store_nf4(name, matrices, (count, rows, columns), device, nested)
            return
        kind = torch.uint8 if storage == "fp8" else dtype
        whole = torch.empty(count, rows, columns, dtype=kind, device=device)
        scales = torch.empty(count, rows, 1, dtype=torch.float32, device=device) if storage == "fp8" else None
        for index, matrix in enumerate(matrices):
            if scales is None:
                whole[index] = matrix.to(device=device, dtype=dtype)
            else:
                codes, scales[index] = fp8.quantize_weight(matrix, dtype, device)
                whole[index] = codes.view(torch.uint8)
        self._set(name, whole.view(experts, out, columns))
        if scales is not None:
            self.register_buffer(f"{name}_scale", scales.view(experts, out, 1), persistent=False)

    def _store_nf4(self, name: str, matrices: Iterable[torch.Tensor], shape: tuple, device: Any, nested: bool) -> None:
        count, rows, columns = shape
        size, blocks = rows * columns, rows * columns // BLOCK_SIZE
        if size % BLOCK_SIZE:
            raise ValueError(f"experts of {rows} x {columns} in NF4: blocks of {BLOCK_SIZE} do not divide {size}")
        packed = torch.empty(count, size // 2, dtype=torch.uint8, device=device)
        groups = -(-blocks // NESTED_BLOCK)
        if nested:
            absmax = torch.zeros(count, groups * NESTED_BLOCK, dtype=torch.uint8, device=device)
            second = torch.zeros(count, groups, dtype=torch.float32, device=device)
            offset = torch.zeros(count, dtype=torch.float32, device=device)
        else:
            absmax = torch.empty(count, blocks, dtype=torch.float32, device=device)
        self._set(name, packed)
        self.register_buffer(f"{name}_absmax", absmax, persistent=False)
        if nested:
            self.register_buffer(f"{name}_absmax2", second, persistent=False)
            self.register_buffer(f"{name}_offset", offset, persistent=False)
        for index, matrix in enumerate(matrices):
            self.restore(name, index, *quantize_weight(matrix, nested, None, self.storage_dtype, device))

    def restore(self, name: str, index: int, packed: torch.Tensor, state: Any) -> None:
        """Store one NF4 matrix from its packed bytes and quant state, as `nf4.quantize_weight` returned them."""
        getattr(self, name).data[index] = packed.view(-1)
        getattr(self, f"{name}_absmax")[index, : state.absmax.numel()] = state.absmax
        if state.nested:
            getattr(self, f"{name}_absmax2")[index] = state.state2.absmax
            getattr(self, f"{name}_offset")[index] = state.offset
        for key, code in (("code", state.code), ("code2", state.state2.code if state.nested else None)):
            if code is not None and not hasattr(self, key):
                self.register_buffer(key, code.to(packed.device), persistent=False)

    def _set(self, name: str, value: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(value, requires_grad=False)
        # peft reads a target parameter's shape here if it is there; that of the packed bytes is not the weight's.
        parameter.ds_shape = torch.Size(self.shapes[name])
        self.register_parameter(name, parameter)

    @property
    def is_nested(self) -> bool:
        return hasattr(self, "code2")

    def _matrix(self, name: str) -> tuple[int, int]:
        """Shape (rows, columns) of one matrix of a parameter."""
        _, out, columns = self.shapes[name]
        return out // PARTS[name], columns

    def quant_state(self, name: str, index: int) -> Any:
        """bitsandbytes quant state of one NF4 matrix, as `nf4.quantize_weight` returned it."""
        from bitsandbytes.functional import QuantState

        rows, columns = self._matrix(name)
        facts = {"shape": torch.Size((rows, columns)), "dtype": self.storage_dtype, "blocksize": BLOCK_SIZE}
        facts |= {"quant_type": "nf4", "code": self.code}
        blocks = rows * columns // BLOCK_SIZE
        absmax = getattr(self, f"{name}_absmax")[index, :blocks]
        if not self.is_nested:
            return QuantState(absmax=absmax, **facts)
        second = getattr(self, f"{name}_absmax2")[index]
        nested = QuantState(absmax=second, code=self.code2, blocksize=NESTED_BLOCK, dtype=torch.float32)
        return QuantState(absmax=absmax, offset=getattr(self, f"{name}_offset")[index], state2=nested, **facts)

    def hash(self, name: str, index: int) -> str:
        """Content hash of one matrix, equal to that of a linear layer with this weight."""
        stored = getattr(self, name).data
        rows, columns = self._matrix(name)
        if self.storage == "nf4":
            return hash_quantized(stored[index].view(-1, 1), self.quant_state(name, index))
        matrix = stored.view(-1, rows, columns)[index]
        if self.storage == "none":
            return hash_tensor(matrix)
        scale = getattr(self, f"{name}_scale").view(-1, rows, 1)[index]
        return hash_fp8(matrix, scale, self.storage_dtype)

    # --- what it computes with

    def dequantized(self, name: str, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Dequantized weight (n, out, in) of a parameter in the storage dtype, of all experts or of `experts` (n,)."""
        if self.kept is not None:
            if name not in self.kept:
                self.kept[name] = self._make(name, None)
            return self.kept[name] if experts is None else self.kept[name][experts]
        return self._make(name, experts)

    def dequantized_bytes(self) -> int:
        """Size of all weights in the storage dtype."""
        return sum(experts * out * columns for experts, out, columns in self.shapes.values()) * (
            self.storage_dtype.itemsize
        )

    def _make(self, name: str, experts: torch.Tensor | None) -> torch.Tensor:
        stored = getattr(self, name).data
        count, out, columns = self.shapes[name]
        if self.storage != "nf4":
            value = stored if experts is None else stored[experts]
            if self.storage == "none":
                return value
            scale = getattr(self, f"{name}_scale")
            scale = scale if experts is None else scale[experts]
            return fp8.dequantize_with(value.view(torch.float8_e4m3fn), scale, self.storage_dtype)
        parts = PARTS[name]
        absmax = self._block_maxima(name)
        if experts is not None:
            count = len(experts)
            stored = stored.view(-1, parts, stored.shape[1])[experts]
            absmax = absmax.view(-1, parts, absmax.shape[1])[experts]
        return dequantize_with(
            stored.reshape(-1, 1), absmax.reshape(-1), (count * out, columns), self.storage_dtype
        ).view(count, out, columns)

    def _block_maxima(self, name: str) -> torch.Tensor:
        """Block maxima (matrices, blocks) in float32; double quantization is undone as bitsandbytes does it."""
        from bitsandbytes.functional import QuantState, dequantize_blockwise

        absmax = getattr(self, f"{name}_absmax")
        if not self.is_nested:
            return absmax
        rows, columns = self._matrix(name)
        second = getattr(self, f"{name}_absmax2").reshape(-1)
        state = QuantState(absmax=second, code=self.code2, blocksize=NESTED_BLOCK, dtype=torch.float32)
        plain = dequantize_blockwise(absmax, state)[:, : rows * columns // BLOCK_SIZE]
        return plain + getattr(self, f"{name}_offset")[:, None]

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        updates: dict[str, Update] | None = None,
    ) -> torch.Tensor:
        """Weighted sum (T, H) of the experts' outputs for hidden states (T, H), experts (T, k) and weights (T, k);
        with `updates`, of the experts plus an adapter."""
        updates, dtype = updates or {}, self.compute_dtype or self.storage_dtype
        tokens, taken = top_k_index.shape
        order = torch.argsort(top_k_index.reshape(-1), stable=True)  # (S,) with S = T k
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts)  # (E,)
        groups = _Groups(counts.cumsum(0, dtype=torch.int32), counts, tokens * taken)
        with torch.autocast(hidden_states.device.type, enabled=False):
            rows = hidden_states.to(dtype)[order // taken]  # (S, H), those of an expert together
            gate, up = self._product(rows, "gate_up_proj", groups, updates).chunk(2, dim=-1)
            rows = self._product(self.act_fn(gate) * up, "down_proj", groups, updates)
            rows = rows * top_k_weights.reshape(-1)[order, None].to(rows.dtype)
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            return rows[back].view(tokens, taken, -1).sum(1).to(hidden_states.dtype)

    def _product(self, rows: torch.Tensor, name: str, groups: "_Groups", updates: dict[str, Update]) -> torch.Tensor:
        update = updates.get(name)
        if update is None:
            return _Grouped.apply(rows, self, name, groups, 0.0, None, None)
        short = -update.a.shape[1] % ALIGNED
        a = pad(update.a.to(rows.dtype), (0, 0, 0, short))
        # grouped_mm takes no transposed stacks.
        b = pad(update.b.to(rows.dtype), (0, short)).contiguous()
        return _Grouped.apply(rows, self, name, groups, update.scaling, a, b)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        return f"{shapes}, {self.storage} of {self.storage_dtype}"


class _Groups(NamedTuple):
    """Rows by expert: `ends` (E,) int32 is where each expert's rows end, `counts` (E,) how many it has."""

    ends: torch.Tensor
    counts: torch.Tensor
    rows: int

    def taken(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The experts to dequantize, None for all, and where the rows of each of them end."""
        if self.rows >= ALL_TAKEN * len(self.counts):
            return None, self.ends
        experts = self.counts.nonzero().view(-1)
        return experts, self.ends[experts]


class _Grouped(torch.autograd.Function):
    """rows · Wₑᵀ + scaling · (rows aₑᵀ) bₑᵀ (S, out) for rows (S, in) sorted by expert e; a (E, r, in), b (E, out, r).

    Saves nothing of the base; without an adapter, nothing but where the groups end.
    """

    @staticmethod
    def forward(ctx, rows, layer, name, groups, scaling, a, b):
        experts, ends = groups.taken()
        with layer.base_product() as is_known:
            # A recomputation whose product is already known needs no weight.
            if is_known:
                weight = rows.new_empty(len(ends), *layer.shapes[name][1:])
            else:
                weight = layer.dequantized(name, experts).to(rows.dtype)
            y = grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        del weight
        xa = None
        if a is not None:
            xa = grouped_mm(rows, a.transpose(1, 2), offs=groups.ends)  # (S, r)
            y.add_(grouped_mm(xa, b.transpose(1, 2), offs=groups.ends), alpha=scaling)
        ctx.layer, ctx.name, ctx.groups, ctx.scaling = layer, name, groups, scaling
        ctx.save_for_backward(None if a is None else rows, xa, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        rows, xa, a, b = ctx.saved_tensors
        groups, da, db, dx = ctx.groups, None, None, None
        gradient = gradient.contiguous()
        if ctx.needs_input_grad[0]:
            experts, ends = groups.taken()
            weight = ctx.layer.dequantized(ctx.name, experts).to(gradient.dtype)
            dx = grouped_mm(gradient, weight, offs=ends)
            del weight
        if a is not None:
            down = grouped_mm(gradient, b, offs=groups.ends)  # (S, r)
            if dx is not None:
                dx.add_(grouped_mm(down, a, offs=groups.ends), alpha=ctx.scaling)
            da = grouped_mm(down.t(), rows, offs=groups.ends).mul_(ctx.scaling)  # (E, r, in)
            db = grouped_mm(gradient.t(), xa, offs=groups.ends).mul_(ctx.scaling)  # (E, out, r)
        return dx, None, None, None, None, da, db


# --- loading


def _standing_for(kind: type[torch.nn.Module]) -> type[FrozenExperts]:
    return type(f"Frozen{kind.__name__}", (FrozenExperts,), {"original": kind})


@contextlib.contextmanager
def frozen_experts(model: torch.nn.Module) -> Iterator[None]:
    """Build models within the block with `FrozenExperts` in the place of the kinds of experts that `model` has.

    The class is replaced in transformers' module of this model alone: transformers' own `register_patch_mapping`
    imports everything that it can find, image processing included.
    """
    kinds = {type(module) for module in expert_modules(model).values()} - {FrozenExperts}
    built, ignored = type(model), getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    for kind in kinds:
        setattr(sys.modules[kind.__module__], kind.__name__, _standing_for(kind))
        # Otherwise every load would report the experts as unexpected.
        names = "|".join(EXPERT_PARAMETERS)
        built._keys_to_ignore_on_load_unexpected = [*(ignored or ()), rf"\.experts\.({names})$"]
    try:
        yield
    finally:
        for kind in kinds:
            setattr(sys.modules[kind.__module__], kind.__name__, kind)
            built._keys_to_ignore_on_load_unexpected = ignored


def read_experts(
    model: torch.nn.Module,
    path: str | Path,
    revision: str | None,
    storage: str,
    dtype: torch.dtype,
    device: torch.device | str,
    nested: bool,
) -> None:
    """Read and quantize the experts of a model that was built within `frozen_experts`, one matrix at a time.

    `BadInput` if the checkpoint lacks one or has one of another shape.
    """
    modules = {name: one for name, one in expert_modules(model).items() if isinstance(one, FrozenExperts)}
    if not modules:
        return
    directory = find_checkpoint(path, revision)
    files = {name: file for file, names in checkpoint_shards(directory).items() for name in names}
    places: dict[tuple[str, str], list[tuple[ExpertMatrix, str]]] = {}
    for stored, place in expert_matrices(model).items():
        places.setdefault((place.module, place.name), []).append((place, stored))
    reader = _Reader(directory, files)
    for (module, name), matrices in places.items():
        matrices.sort(key=lambda pair: pair[0].index)
        modules[module].store(name, (reader.read(*pair) for pair in matrices), storage, dtype, device, nested)


class _Reader:
    """Reads matrices of a checkpoint; the file read last stays open, because opening one parses its whole header."""

    def __init__(self, directory: Path, files: dict[str, str]):
        self.directory, self.files = directory, files
        self.open: tuple[str, Any] = ("", None)

    def read(self, place: ExpertMatrix, stored: str) -> torch.Tensor:
        if (file := self.files.get(stored)) is None:
            raise BadInput(
                f"{self.directory} has no {stored}, which its config.json describes. Name a whole checkpoint."
            )
        if self.open[0] != file:
            self.open = (file, safe_open(self.directory / file, framework="pt"))
        tensor = self.open[1].get_tensor(stored)
        if tuple(tensor.shape) != (place.rows, place.columns):
            wanted = (place.rows, place.columns)
            raise BadInput(f"{self.directory}: {stored} is {tuple(tensor.shape)}, its config.json needs {wanted}.")
        return tensor


def experts_of(model: torch.nn.Module) -> dict[str, FrozenExperts]:
    """Return {name: module} of a model's frozen experts, wrapped by peft or not; empty for a dense model."""
    return {name: one for name, one in model.named_modules() if isinstance(one, FrozenExperts)}
