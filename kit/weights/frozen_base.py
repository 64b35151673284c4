"""The frozen base of a run: load it, hash it, and read its dequantized weights shard by shard.

Covers: loading a causal LM with its linear layers stored in NF4, in FP8 or unquantized (`policy.quantization`), NF4
without the CPU repacking trap; the content hash that the trainer, the server and the merge compare; and reading the
original checkpoint as the dequantized base without ever loading the model. An unquantized base is the original itself,
in the dtype it was trained with.
Not covered: FP4, 8-bit integers, NF4 block sizes other than the one transformers quantizes with.
"""

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kit.core.checkpoint_files import read_header
from kit.core.errors import BadInput, CheckFailed
from kit.weights import fp8
from kit.weights.attention import AUTO, attention_of
from kit.weights.base_dropout import clear_dropout_rates, turn_off_dropout
from kit.weights.checkpoint import find_checkpoint, read_tensor
from kit.weights.experts import FrozenExperts, experts_of, frozen_experts, read_experts
from kit.weights.fp8 import Fp8Linear, store_in_fp8
from kit.weights.gather import is_split, whole, whole_bytes
from kit.weights.hashing import dtype_name, hash_fp8, hash_pairs, hash_quantized, hash_tensor
from kit.weights.initialization import loaded_weights_kept
from kit.weights.layout import ExpertMatrix, expert_matrices, unquantized_names
from kit.weights.model_files import (
    refuse_made_up,
    select_shards,
    unquantized_config,
    without_weights,
)
from kit.weights.nf4 import BLOCK_SIZE, PIECE, block_maxima, dequantize_with, one_thread, quantize_weight
from kit.weights.plain_linear import check_linears, plain_linears
from kit.weights.products import check_products
from kit.weights.wrapped import loading

GATHERED_BYTES = 1 << 29  # of a split base, or one larger tensor, in a process's memory while it is hashed


def load_frozen(
    path: str | Path,
    quantization: str = "nf4",
    dtype: str | torch.dtype = "bfloat16",
    double_quantization: bool = True,
    skip_modules: list[str] | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    quant_storage: torch.dtype = torch.uint8,
    **kwargs: Any,
) -> torch.nn.Module:
    """Load a transformers causal LM whose linear layers (not the output embedding) are stored as `quantization` says:
    nf4 (`load_nf4`), fp8 (`Fp8Linear`) or none. Frozen in every case; arguments and errors as in `load_nf4`.

    `BadInput` also if the checkpoint lacks a parameter of the model. With fp8 the model is read into host memory in
    `dtype`, and the device never holds more of a layer than its codes.
    """
    if quantization == "nf4":
        options: dict[str, Any] = {"skip_modules": skip_modules, "device": device, "revision": revision}
        return load_nf4(path, dtype, double_quantization, quant_storage=quant_storage, **options, **kwargs)
    config = unquantized_config(path, revision)
    device, dtype = device or default_device(), getattr(torch, dtype) if isinstance(dtype, str) else dtype
    place = {"device_map": {"": device}} if quantization == "none" else {}
    blank = without_weights(config)
    with frozen_experts(blank):
        model = _whole_model(path, config=config, revision=revision, dtype=dtype, **place, **kwargs)
    if quantization == "fp8":
        names = [name for name in stored_linears(model) if name not in (skip_modules or ())]
        store_in_fp8(model, names, device)
    read_experts(model, path, revision, quantization, dtype, device, nested=False)
    return model.to(device)


def load_nf4(
    path: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    double_quantization: bool = True,
    skip_modules: list[str] | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    quant_storage: torch.dtype = torch.uint8,
    **kwargs: Any,
) -> torch.nn.Module:
    """Load a transformers causal LM whose linear layers (not the output embedding) are bitsandbytes NF4.

    `dtype` is the dtype of everything else, the compute dtype and the dtype that the NF4 weights dequantize to.
    `skip_modules` are left unquantized in addition to the output embedding. `device` defaults to CUDA if available.
    `quant_storage` is the dtype that the packed bytes are stored as; the bytes are the same in each. `BadInput`,
    before any weight is read, for a checkpoint that is already quantized.
    """
    from transformers import BitsAndBytesConfig

    config = unquantized_config(path, revision)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    device = device or default_device()
    blank = without_weights(config)
    check_linears(blank, config.model_type)
    skipped = [*unquantized_names(blank), *(skip_modules or ())]
    with one_thread(), frozen_experts(blank):
        model = _whole_model(
            path,
            config=config,
            revision=revision,
            dtype=dtype,
            device_map={"": device},
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=double_quantization,
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_quant_storage=quant_storage,
                # A list replaces transformers' own, which protects the output embedding, so it must include that.
                llm_int8_skip_modules=skipped,
            ),
            **kwargs,
        )
    disable_cpu_repacking(model)
    read_experts(model, path, revision, "nf4", dtype, device, double_quantization)
    return model


def _whole_model(path: str | Path, config: Any, **options: Any) -> torch.nn.Module:
    """Load the model of `config` from `path` without dropout; `BadInput` if the checkpoint lacks one of its
    parameters."""
    from transformers import AutoModelForCausalLM

    clear_dropout_rates(config)
    options["attn_implementation"] = attention_of(config, options.get("attn_implementation", AUTO))
    with loading(config) as names, plain_linears(config), loaded_weights_kept():
        model, found = AutoModelForCausalLM.from_pretrained(
            str(path), output_loading_info=True, **names, **options, trust_remote_code=False
        )
    turn_off_dropout(model)
    refuse_made_up(path, found["missing_keys"], sum(1 for _ in model.parameters()))
    return model


def default_device() -> torch.device:
    """This process's GPU, or the CPU. `CheckFailed` for a GPU that multiplies wrong."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    check_products(device)
    return device


def stored_linears(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers that the base stores as `policy.quantization` says: those in NF4, else those in FP8,
    else all but the output embedding and an adapter's own."""
    from bitsandbytes.nn import Linear4bit

    out = set(unquantized_names(model)) if hasattr(model, "get_output_embeddings") else set()
    found = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name not in out]
    found = [name for name in found if not _is_of_adapter(name)]
    for kind in (Linear4bit, Fp8Linear):
        if chosen := [name for name in found if isinstance(model.get_submodule(name), kind)]:
            return chosen
    return found


def _is_of_adapter(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


def disable_cpu_repacking(model: torch.nn.Module) -> None:
    """Keep every Linear4bit's bytes as they are on a CPU with AVX512-BF16.

    On such a CPU bitsandbytes 0.50 repacks the weights in place at the first forward in eval mode. `train()` does not
    undo it: later LoRA gradients are wrong and `dequantize_4bit` returns garbage. Call right after loading.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def dequantize(module: torch.nn.Module) -> torch.Tensor:
    """Return the weight (out, in) that the trainer computes with for a linear layer of a base, in its storage dtype.

    A peft layer is unwrapped first. `CheckFailed` if bitsandbytes has repacked the layer.
    """
    from bitsandbytes.functional import dequantize_4bit

    layer = getattr(module, "base_layer", module)
    if isinstance(layer, Fp8Linear):
        return layer.dequantized()
    weight = layer.weight
    if getattr(weight, "quant_state", None) is None:
        return weight.data
    _check_not_repacked(weight.quant_state, "the layer")
    return dequantize_4bit(weight.data, weight.quant_state)


def _check_not_repacked(state: Any, name: str) -> None:
    if getattr(state, "packing_format_for_cpu", False):
        raise CheckFailed(
            f"{name} was repacked by bitsandbytes for AVX512-BF16, so its bytes are no longer NF4. "
            "Call kit.weights.frozen_base.disable_cpu_repacking(model) right after loading."
        )


def plain_name(name: str) -> str:
    """Name of a parameter or module in the plain Hugging Face model, without wrappers (peft, DDP, compile)."""
    name = name.removeprefix("module.").replace("_orig_mod.", "")
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def hash_base(model: torch.nn.Module) -> dict:
    """Return the content of `base.json` for a model from `load_frozen`: one hash per base tensor and one over all.

    The result is the same for the model alone and wrapped by peft, before and after training; LoRA tensors are left
    out and tied weights counted once. A quantized tensor's hash covers what is stored: NF4's packed bytes and the
    whole quant state, FP8's codes and scales. Any other tensor's hash covers its shape and its values as float32, so
    that upcasting does not count as a change.
    `offsets` holds the mean that double quantization subtracts from the block maxima. It is a float sum whose last bit
    depends on the device, so a reader needs it to quantize to the same bytes.

    If FSDP2 or ZeRO-3 has split the model, every process calls this and gets the same result: tensors are gathered,
    `GATHERED_BYTES` at once, hashed with this process's copy of their quant states, and released.
    """
    quantized, jobs, offsets, facts = [], {}, {}, None
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for group in _groups(model):
            with whole(parameter for _, parameter in group) as values:
                for (full_name, parameter), value in zip(group, values, strict=True):
                    name = plain_name(full_name)
                    state, layer = _quant_state(model, full_name, parameter), _fp8_layer(model, full_name)
                    if state is not None:
                        _check_not_repacked(state, name)
                        facts = nf4_facts(state)
                        if state.nested:
                            offsets[name] = state.offset.item()
                        jobs[name] = pool.submit(hash_quantized, value, state)
                    elif layer is not None:
                        facts = plain_facts("fp8", layer.storage_dtype, parameter.device)
                        jobs[name] = pool.submit(hash_fp8, value, layer.weight_scale, layer.storage_dtype)
                    else:
                        jobs[name] = pool.submit(hash_tensor, value)
                    if state is not None or layer is not None:
                        quantized.append(name.removesuffix(".weight"))
                if is_split(group[0][1]):  # the base as a whole may not fit
                    for full_name, _ in group:
                        jobs[plain_name(full_name)].result()
        for name, experts, place in _expert_weights(model):
            jobs[name] = pool.submit(experts.hash, place.name, place.index)
            quantized.append(name.removesuffix(".weight"))
            if experts.storage == "nf4" and experts.is_nested:
                offsets[name] = getattr(experts, f"{place.name}_offset")[place.index].item()
        tensors = {name: job.result() for name, job in sorted(jobs.items())}
    if facts is None:
        if not (names := stored_linears(model)):
            raise BadInput("the model has no linear layer, so it has no base to hash. Load it with load_frozen.")
        weight = model.get_submodule(names[0]).weight
        facts = plain_facts("none", weight.dtype, weight.device)
        quantized += [plain_name(name) for name in names]
    config = getattr(model, "config", None)
    where = {"model": getattr(config, "_name_or_path", None), "revision": getattr(config, "_commit_hash", None)}
    return base_facts(tensors, offsets, quantized, facts, **where)


def _groups(model: torch.nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the base's (name, parameter) to be hashed together: split ones that make up `GATHERED_BYTES`, any other
    alone. The same groups in every process."""
    group: list[tuple[str, torch.Tensor]] = []
    room = GATHERED_BYTES
    for name, parameter in _named_weights(model):
        if _is_of_adapter(plain_name(name)):
            continue
        if not is_split(parameter):
            yield [(name, parameter)]
            continue
        size = whole_bytes(parameter)
        if group and size > room:
            yield group
            group, room = [], GATHERED_BYTES
        group.append((name, parameter))
        room -= size
    if group:
        yield group


def _named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters, without those of experts, and the weights that kit/policy/host_embedding.py keeps
    out of them."""
    experts = {id(parameter) for one in experts_of(model).values() for parameter in one.parameters()}
    yield from ((name, one) for name, one in model.named_parameters() if id(one) not in experts)
    for name, module in model.named_modules():
        if (weight := getattr(module, "host_weight", None)) is not None:
            yield f"{name}.weight", weight


def _expert_weights(model: torch.nn.Module) -> Iterator[tuple[str, FrozenExperts, ExpertMatrix]]:
    """Yield (name in the checkpoint, module, place) of every expert's matrices."""
    modules = {plain_name(name): one for name, one in experts_of(model).items()}
    if modules:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        for name, place in expert_matrices(base).items():
            yield name, modules[place.module], place


def _quant_state(model: torch.nn.Module, name: str, parameter: torch.Tensor) -> Any:
    """bitsandbytes quant state of a parameter; None if it is not quantized.

    FSDP2 replaces bitsandbytes' parameter with a plain one; the module keeps the state.
    """
    module, _, leaf = name.rpartition(".")
    found = getattr(parameter, "quant_state", None)
    return getattr(model.get_submodule(module), "quant_state", None) if found is None and leaf == "weight" else found


def _fp8_layer(model: torch.nn.Module, name: str) -> Fp8Linear | None:
    """The FP8 layer whose codes a parameter holds, or None."""
    module, _, leaf = name.rpartition(".")
    layer = model.get_submodule(module)
    return layer if leaf == "weight" and isinstance(layer, Fp8Linear) else None


def base_facts(
    tensors: dict[str, str], offsets: dict[str, float], quantized: list[str], facts: dict, model: Any, revision: Any
) -> dict:
    """Content of `base.json`: tensor hashes, offsets and names of the linear layers that are stored as `facts`
    (`nf4_facts`, `plain_facts`) say and that formats quantize. `carried` is added for a checkpoint that has more than
    the model (`hash_carried`)."""
    return {
        "hash": hash_pairs(tensors),
        "model": model,
        "revision": revision,
        "quantization": facts,
        "quantized": sorted(quantized),
        "tensors": tensors,
        "offsets": offsets,
    }


def nf4_facts(state: Any) -> dict:
    """Storage of an NF4 base, from the bitsandbytes quant state of one of its layers."""
    return {
        "type": state.quant_type,
        "double_quantization": state.nested,
        "block_size": state.blocksize,
        "storage_dtype": dtype_name(state.dtype),
        "device": state.absmax.device.type,
    }


def plain_facts(quantization: str, dtype: torch.dtype, device: torch.device | str) -> dict:
    """Storage of a base in FP8 (`quantization` fp8) or unquantized (none)."""
    return {"type": quantization, "storage_dtype": dtype_name(dtype), "device": torch.device(device).type}


def hash_carried(directory: Path, carried: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return {name: hash} of tensors that are copied unchanged, given as (name in the file, file) of `directory`."""
    return {name: hash_tensor(read_tensor(directory / file, name)) for name, file in carried}


def carried_hashes(path: str | Path, revision: str | None, tensors: set[str], config: Any) -> dict[str, str]:
    """`hash_carried` of what the checkpoint at `path`, local or on the hub, has besides the model's `tensors`."""
    directory = find_checkpoint(path, revision)
    selected = select_shards(directory, tensors, config, f"{path} is not the base of this run")
    return hash_carried(directory, selected.carried.items())


class BaseCheckpoint:
    """Read the original checkpoint as the dequantized base that a run was trained on, one tensor at a time.

    `info` is the run's base.json. With `into` "original", the original weights are read instead, once they are
    verified to be those that the base was quantized from. Opening checks names only; `BadInput` if the checkpoint is
    already quantized or its tensors are not the base's. Memory: one tensor in its stored and its dequantized form.
    """

    def __init__(
        self, directory: str | Path, info: dict, device: str | torch.device | None = None, into: str = "dequantized"
    ):
        self.into = into
        self.directory = Path(directory)
        self.info = info
        self.config = unquantized_config(self.directory)
        self.storage = info["quantization"]["type"]
        self.dtype = getattr(torch, info["quantization"]["storage_dtype"])
        # NF4 made on a GPU is remade on a GPU if available: ties may round differently on another device.
        self.device = device or (
            "cuda" if info["quantization"].get("device") == "cuda" and torch.cuda.is_available() else "cpu"
        )
        self.quantized = {f"{name}.weight" for name in info["quantized"]}
        selected = select_shards(self.directory, set(info["tensors"]), self.config, self._stranger())
        self.shards, self.stored, self.carried = selected.shards, selected.stored, selected.carried
        if odd := sorted(self.carried.keys() ^ info.get("carried", {}).keys()):
            where = "it has" if odd[0] in self.carried else "it has no"
            raise BadInput(f"{self._stranger()}: {where} {odd[0]}, unlike the checkpoint of base.json.")
        self.files = {name: file for file, names in self.shards.items() for name in names}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @functools.cached_property
    def experts(self) -> dict[str, ExpertMatrix]:
        """{name in the checkpoint: place in the model} of experts' weights; empty for a dense model."""
        return expert_matrices(without_weights(self.config))

    def _stranger(self) -> str:
        return f"{self.directory} is not the base the adapter was trained on ({self.info.get('model')}, by base.json)"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        if name not in self._shapes:
            tensors = read_header(self.directory / self.files[name]).tensors
            self._shapes |= {one: tensors[self.stored[one]][1] for one in self.shards[self.files[name]]}
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """Read the tensor as stored in the file, on the CPU: mapped pages of the file, no copy."""
        return read_tensor(self.directory / self.files[name], self.stored[name])

    def carry(self, stored: str) -> torch.Tensor:
        """Read a carried tensor, by its name in the file; `CheckFailed` if it is not the one in base.json."""
        value = read_tensor(self.directory / self.carried[stored], stored)
        self._compare(stored, hash_tensor(value), self.info["carried"][stored])
        return value

    def original(self, name: str) -> torch.Tensor:
        """Read the tensor in the dtype that the trainer loaded it in, on the base's device."""
        return self.read(name).to(device=self.device, dtype=self.dtype)

    def unquantized_linears(self) -> list[str]:
        """Linear modules that the base stores unquantized: the output embedding, the run's skipped modules, and
        routers by their names in the files: linear layers in vLLM (0.31), modules of their own in transformers."""
        modules = without_weights(self.config).named_modules()
        linears = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
        linears = [name for name in linears if f"{name}.weight" not in self.quantized]
        return linears + [name for name in self.routers() if name not in linears]

    def routers(self) -> list[str]:
        """Modules beside a layer's experts that the base stores as one unquantized matrix, by their names in the
        files; empty for a dense model."""
        parents = {place.module.rpartition(".")[0] for place in self.experts.values()}
        weights = [name for name in self.files if name.endswith(".weight") and name not in self.quantized]
        beside = [name for name in weights if name.rsplit(".", 2)[0] in parents and len(self.shape(name)) == 2]
        return [self.stored[name].removesuffix(".weight") for name in beside]

    def nf4(self, name: str) -> tuple[torch.Tensor, Any]:
        """Return (packed bytes, quant state) of a base tensor in NF4; `CheckFailed` if its hash is not base.json's."""
        packed, state = self.quantize(name, self.read(name))
        self.check(name, hash_quantized(packed, state))
        return packed, state

    def quantize(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return (packed bytes, quant state) of `value`, the file's tensor `name`, as the trainer quantized it."""
        offset = self.info.get("offsets", {}).get(name)
        double = self.info["quantization"]["double_quantization"]
        return quantize_weight(value, double, offset, self.dtype, self.device)

    def tensor(self, name: str) -> torch.Tensor:
        """Read a base tensor: dequantized for a quantized layer, else the checkpoint's own, in the storage dtype; with
        `into` "original", as the checkpoint stores it. `CheckFailed` if its hash is not the one in base.json."""
        with ThreadPoolExecutor(1) as pool:
            value = BaseTensor(self, name, pool)
            found = value.rows(0, value.count).reshape(self.shape(name))
            value.check()
        return found

    def check(self, name: str, value: str) -> None:
        """`CheckFailed` if `value` is not the hash of `name` in base.json."""
        self._compare(name, value, self.info["tensors"][name])

    def _compare(self, name: str, value: str, expected: str) -> None:
        if value != expected:
            made = f" (NF4 made on {self.info['quantization'].get('device')}, read here on "
            made = f"{made}{torch.device(self.device).type})" if self.storage == "nf4" else ""
            raise CheckFailed(
                f"{self._stranger()}: {name} hashes to {value}, base.json says {expected}. Pass the checkpoint that "
                f"the run was trained on with --base{made}."
            )


class BaseTensor:
    """One tensor of a base, read by rows while `pool` computes its hash.

    `count` rows of `width` values: (out, in) for a weight, (n, 1) for a vector.
    """

    def __init__(self, base: BaseCheckpoint, name: str, pool: ThreadPoolExecutor):
        self.base, self.name = base, name
        value = base.read(name)
        self.count = value.shape[0] if value.ndim else 1
        self.width = value.numel() // max(self.count, 1)
        self.value: torch.Tensor | None = value.reshape(self.count, self.width)
        self.nf4: tuple[torch.Tensor, torch.Tensor] | None = None
        self.fp8: tuple[torch.Tensor, torch.Tensor] | None = None
        if name not in base.quantized or base.storage == "none":
            self.hash = pool.submit(hash_tensor, value, base.dtype)
        elif base.storage == "fp8":
            codes, scale = fp8.quantize_weight(value, base.dtype, base.device)
            self.hash = pool.submit(hash_fp8, codes, scale, base.dtype)
            if base.into == "dequantized":
                self.fp8, self.value = (codes, scale), None
        else:
            packed, state = base.quantize(name, value)
            self.hash = pool.submit(hash_quantized, packed, state)
            if base.into == "dequantized":
                self.nf4, self.value = (packed, block_maxima(state)), None

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of pieces that fit in memory."""
        step = max(PIECE[torch.device(self.base.device).type == "cuda"] // max(self.width, 1), 1)
        # Align pieces to whole blocks, whatever the width.
        step += -step % BLOCK_SIZE
        yield from ((start, min(start + step, self.count)) for start in range(0, self.count, step))

    def rows(self, start: int, stop: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return rows (stop - start, width) on the base's device; for an NF4 weight, `start` is a multiple of 64.

        `device` overrides the device of an unquantized tensor: it needs no arithmetic and can stay on the CPU.
        """
        if self.fp8 is not None:
            codes, scale = self.fp8
            return fp8.dequantize_with(codes[start:stop], scale[start:stop], self.base.dtype)
        if self.nf4 is None:
            value = self.value[start:stop].to(device or self.base.device)
            return value if self.base.into == "original" else value.to(self.base.dtype)
        packed, absmax = self.nf4
        first, last = start * self.width, stop * self.width
        blocks = absmax[first // BLOCK_SIZE : -(-last // BLOCK_SIZE)]
        return dequantize_with(packed[first // 2 : -(-last // 2)], blocks, (stop - start, self.width), self.base.dtype)

    def check(self) -> None:
        """`CheckFailed` if the tensor is not the one in base.json."""
        self.base.check(self.name, self.hash.result())


def dequantized_tensors(
    directory: str | Path, info: dict, device: str | torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every (name, tensor) of the dequantized base, shard by shard; see `BaseCheckpoint` for the checks."""
    base = BaseCheckpoint(directory, info, device)
    for names in base.shards.values():
        for name in names:
            yield name, base.tensor(name)


def load_base(base: BaseCheckpoint, device: str | torch.device | None = None, **kwargs: Any) -> torch.nn.Module:
    """Load the base of a run as a model, in its original storage and with the bytes of its base.json; `CheckFailed` if
    they differ."""
    facts = base.info["quantization"]
    model = load_frozen(
        base.directory,
        base.storage,
        dtype=facts["storage_dtype"],
        skip_modules=base.unquantized_linears(),
        device=device,
        double_quantization=facts.get("double_quantization", True),
        **kwargs,
    )
    _match(model, base)
    return model


def _match(model: torch.nn.Module, base: BaseCheckpoint) -> None:
    """Make a loaded model's bytes match base.json, or raise `CheckFailed`.

    An NF4 layer that differs is first requantized with the recorded offset: NF4 made on another device differs in the
    last bit of that mean.
    """
    from bitsandbytes.nn import Params4bit

    found = hash_base(model)["tensors"]
    for name, value in base.info["tensors"].items():
        if found.get(name) == value:
            continue
        if name not in base.quantized or base.storage != "nf4":
            base.check(name, str(found.get(name)))
        packed, state = base.nf4(name)
        if (place := base.experts.get(name)) is not None:
            model.get_submodule(place.module).restore(place.name, place.index, packed, state)
            continue
        module = model.get_submodule(name.removesuffix(".weight"))
        device = module.weight.device
        state.to(device)
        module.weight = Params4bit(
            packed.to(device),
            requires_grad=False,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type="nf4",
            bnb_quantized=True,
            module=module,
        )
        module.quant_state = state
