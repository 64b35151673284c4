"""Remerge workers without vLLM: the weights of every tensor-parallel shard after a sync, noise, and refusals.

The layers stand in for vLLM's by the attributes that kit/rollout/server/remerge.py reads. The expected shards are
computed here, from the whole weights and attention's own rule: query head h of H computes with key head h * K // H of
K.
"""

import contextlib
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file
from torch import nn

from kit.core.formats import FORMATS
from kit.rollout.noise import Noise, NoisyNorms, norms
from kit.rollout.server import remerge
from kit.rollout.server.remerge import Remerge, find_linears
from merge.quantize import read_back

HEAD, HEADS, KV_HEADS, HIDDEN, INTERMEDIATE = 64, 8, 2, 512, 512
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "mlp.router": (128, HIDDEN),
}
LAYER = "model.layers.0."
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
    "mlp.router": ("mlp.router",),
}
RANKS = {"mlp.down_proj": 2}  # of the layers with another rank than 4


# Stand-ins for vLLM's layers.


class LinearBase(nn.Module):
    """Replicated on every worker, as vLLM's own base class has it."""

    def __init__(self, inputs: int, outputs: int, rank: int, ranks: int):
        super().__init__()
        self.input_size, self.output_size, self.tp_rank, self.tp_size = inputs, outputs, rank, ranks
        self.quant_method: Any = Unquantized()

    def allocate(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype), requires_grad=False)


class ColumnParallelLinear(LinearBase):
    def __init__(self, inputs: int, outputs: list[int], rank: int, ranks: int):
        super().__init__(inputs, sum(outputs), rank, ranks)
        self.input_size_per_partition = inputs
        self.output_partition_sizes = [size // ranks for size in outputs]


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(self, rank: int, ranks: int):
        kv_heads, replicas = (KV_HEADS // ranks, 1) if ranks < KV_HEADS else (1, ranks // KV_HEADS)
        sizes = [HEADS * HEAD, kv_heads * HEAD * ranks, kv_heads * HEAD * ranks]
        super().__init__(HIDDEN, sizes, rank, ranks)
        self.num_kv_head_replicas = replicas


class RowParallelLinear(LinearBase):
    def __init__(self, inputs: int, outputs: int, rank: int, ranks: int):
        super().__init__(inputs, outputs, rank, ranks)
        self.input_size_per_partition = inputs // ranks
        self.output_partition_sizes = [outputs]


class Unquantized:
    """Weights stay as they are loaded."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


class PerChannel:
    """Weights become codes and scales, as vLLM's online FP8 makes them."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        scale = layer.weight.data.float().abs().amax(1, keepdim=True) / 448
        codes = (layer.weight.data.float() / scale).to(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    layers = SimpleNamespace(
        LinearBase=LinearBase,
        ColumnParallelLinear=ColumnParallelLinear,
        QKVParallelLinear=QKVParallelLinear,
        RowParallelLinear=RowParallelLinear,
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.linear", layers)
    context = SimpleNamespace(set_current_vllm_config=lambda config: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "vllm.config", context)
    default = SimpleNamespace(set_default_torch_dtype=lambda dtype: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "vllm.utils.torch_utils", default)


class Worker(Remerge):
    """One of `ranks` workers with a layer of a model, in the attributes that the extension reads."""

    def __init__(
        self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.bfloat16, quant_cfg: str | None = None
    ):
        model = nn.Module()
        model.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        made = {
            "self_attn.qkv_proj": QKVParallelLinear(rank, ranks),
            "self_attn.o_proj": RowParallelLinear(HEADS * HEAD, HIDDEN, rank, ranks),
            "mlp.gate_up_proj": ColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, rank, ranks),
            "mlp.down_proj": RowParallelLinear(INTERMEDIATE, HIDDEN, rank, ranks),
            "mlp.router": LinearBase(HIDDEN, 128, rank, ranks),
        }
        for name, layer in made.items():
            rows = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
            layer.allocate(rows, getattr(layer, "input_size_per_partition", layer.input_size), dtype)
            if FORMATS.get(quant_cfg) and FORMATS[quant_cfg].needs_calibration:
                layer.register_buffer("input_peak", torch.zeros(()))
            place = f"{LAYER}{name}{'.base_layer' if name == 'mlp.down_proj' else ''}"  # inside a LoRA layer
            add(model, place, layer)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(model, f"{LAYER}{name}", nn.RMSNorm(HIDDEN))
        self.layers, self.device = made, torch.device("cpu")
        self.model_runner = SimpleNamespace(model=model)
        self.model_config = SimpleNamespace(dtype=dtype, quantization=None)
        options = {"quant_cfg": quant_cfg} if quant_cfg else {}
        self.vllm_config = SimpleNamespace(additional_config=options, model_config=self.model_config)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: layer.weight.data.clone() for name, layer in self.layers.items()}

    def ask(self, method: str, *arguments: Any) -> dict:
        answer = getattr(self, f"remerge_{method}")(*arguments)
        assert "error" not in answer, answer
        return answer


def add(model: nn.Module, name: str, module: nn.Module) -> None:
    *parents, leaf = name.split(".")
    for part in parents:
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    model.add_module(leaf, module)


# Files, and what the workers should make of them.


def random(shape: tuple[int, int], seed: int, size: float = 0.02) -> torch.Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"), torch.bfloat16)


def write_base(folder: Path, dtype: torch.dtype) -> Path:
    """`nf4/` as `python -m merge base` writes it, in two files."""
    (folder / "nf4").mkdir()
    index, files = {}, {"a.safetensors": {}, "b.safetensors": {}}
    for number, (name, shape) in enumerate(SHAPES.items()):
        packed, state = quantize_4bit(random(shape, number).to(dtype), quant_type="nf4", blocksize=64)
        index[f"{LAYER}{name}.weight"] = file = [*files][number % 2]
        files[file] |= {f"{LAYER}{name}.weight.packed": packed.view(-1), f"{LAYER}{name}.weight.absmax": state.absmax}
    for file, tensors in files.items():
        save_file(tensors, folder / "nf4" / file, {"dtype": str(dtype).removeprefix("torch.")})
    (folder / "nf4" / "index.json").write_text(json.dumps(index))
    return folder


@functools.cache
def dequantized(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    found = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        found[name] = dequantize_4bit(*quantize_4bit(random(shape, number).to(dtype), quant_type="nf4", blocksize=64))
    return found


@functools.cache
def factors(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for number, (name, (rows, columns)) in enumerate(SHAPES.items()):
        rank = RANKS.get(name, 4)
        found[name] = random((rank, columns), 10 * seed + number, 0.1), random((rows, rank), 100 * seed + number, 0.1)
    return found


def write_adapter(folder: Path, seed: int, drop: tuple[str, ...] = (), peaks: dict | None = None, **more: Any) -> Path:
    """An adapter of every layer, with rsLoRA and a rank of its own for down_proj."""
    tensors = {}
    for name, (a, b) in factors(seed).items():
        tensors |= {f"base_model.model.{LAYER}{name}.lora_{kind}.weight": one for kind, one in (("A", a), ("B", b))}
    folder.mkdir()
    metadata = {"format": "pt"} | ({"input_peaks": json.dumps(peaks)} if peaks else {})
    kept = {name: one for name, one in (tensors | more).items() if not name.endswith(drop or "-")}
    save_file(kept, folder / "adapter_model.safetensors", metadata)
    config = {"r": 4, "lora_alpha": 6, "use_rslora": True, "rank_pattern": RANKS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(seed: int | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Every whole weight: base + alpha / sqrt(rank) B A, rounded once."""
    found = dict(dequantized(dtype))
    for name, (a, b) in factors(seed).items() if seed is not None else ():
        found[name] = (found[name].float() + 6 / RANKS.get(name, 4) ** 0.5 * (b @ a)).to(dtype)
    return found


def shards(whole: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What a worker computes with: its query heads and the key heads that these need, its share of all else."""
    mine = [head for head in range(HEADS) if head * ranks // HEADS == rank]
    needed = sorted({head * KV_HEADS // HEADS for head in mine})

    def heads(name: str, numbers: list[int]) -> torch.Tensor:
        return torch.cat([whole[name][HEAD * number : HEAD * (number + 1)] for number in numbers])

    found = {"self_attn.qkv_proj": torch.cat([heads("self_attn.q_proj", mine), heads("self_attn.k_proj", needed),
                                              heads("self_attn.v_proj", needed)])}  # fmt: skip
    found["self_attn.o_proj"] = whole["self_attn.o_proj"].chunk(ranks, 1)[rank]
    found["mlp.gate_up_proj"] = torch.cat([whole[f"mlp.{one}_proj"].chunk(ranks)[rank] for one in ("gate", "up")])
    found["mlp.down_proj"] = whole["mlp.down_proj"].chunk(ranks, 1)[rank]
    return found | {"mlp.router": whole["mlp.router"]}


def assert_holds(worker: Worker, expected: dict[str, torch.Tensor]) -> None:
    for name, weight in worker.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=2**-7, atol=1e-7)
        # Rounded once; only the float32 sum's order differs here and there.
        assert (weight == expected[name]).float().mean() > 0.99, name


@pytest.fixture
def synced(base, tmp_path):
    """`synced(rank, ranks)`: a worker with adapters s/1 and s/2 staged, the first one folded in."""
    folders = {seed: write_adapter(tmp_path / str(seed), seed) for seed in (1, 2)}

    def make(rank: int = 0, ranks: int = 1, **options: Any) -> Worker:
        worker = Worker(rank, ranks, **options)
        worker.ask("setup", str(base), "gpu")
        for seed, folder in folders.items():
            assert worker.ask("stage", f"s/{seed}", str(folder)) == {"tensors": 2 * len(SHAPES)}
        worker.ask("activate", "s/1")
        return worker

    return make


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (1, 4), (2, 4), (5, 8)])
def test_every_worker_holds_its_shard_of_the_merged_weights(synced, rank, ranks):
    """With 4 and 8 workers and 2 key heads, several workers hold the same keys and values."""
    worker = synced(rank, ranks)
    assert_holds(worker, shards(merged(1), rank, ranks))
    worker.ask("activate", "s/2")
    assert_holds(worker, shards(merged(2), rank, ranks))


def test_a_draft_model_with_layers_of_the_same_names_stays_what_it_is(synced):
    """vLLM keeps it beside the served model, in the model runner's `drafter`."""
    worker, drafts = synced(), Worker()
    for number, layer in enumerate(drafts.layers.values()):
        layer.weight.data.fill_(number)
    worker.model_runner.drafter = SimpleNamespace(model=drafts.model_runner.model)
    before, modules = drafts.weights(), Worker().ask("describe")["modules"]
    assert worker.ask("describe")["modules"] == modules
    worker.ask("activate", "s/2")
    worker.ask("noise", 0.1, 1)
    assert_holds(worker, shards(merged(2), 0, 1))
    assert all(torch.equal(weight, before[name]) for name, weight in drafts.weights().items())
    assert all((one == 1).all() for one in norms(drafts.model_runner.model).values())


def test_versions_replace_each_other_and_leave_the_copy_as_it_was(synced):
    worker = synced()
    copies = [(linear.packed.clone(), linear.absmax.clone()) for linear in worker._remerge.linears]
    first, addresses = worker.weights(), {name: one.weight.data_ptr() for name, one in worker.layers.items()}
    for key in ("s/2", "s/2", "s/1"):
        worker.ask("activate", key)
    assert all(torch.equal(weight, first[name]) for name, weight in worker.weights().items())
    assert {name: one.weight.data_ptr() for name, one in worker.layers.items()} == addresses, "CUDA graphs read these"
    for linear, (packed, absmax) in zip(worker._remerge.linears, copies, strict=True):
        assert torch.equal(linear.packed, packed) and torch.equal(linear.absmax, absmax)


def test_a_version_is_folded_in_while_it_is_staged_and_no_longer(synced):
    worker = synced()
    before = worker.weights()
    assert worker.ask("discard", "s/2") == worker.ask("discard", "s/7") == {}
    assert [*worker._remerge.staged] == ["s/1"], "its tensors are released"
    for key in ("s/2", "s/7"):
        assert worker.remerge_activate(key) == {"error": f"no adapter is staged as {key}"}
    assert all(torch.equal(weight, before[name]) for name, weight in worker.weights().items())
    for method, arguments in {"stage": ("s/1", "x"), "activate": ("s/1",), "noise": (0.1, 1)}.items():
        assert "error" in getattr(Worker(), f"remerge_{method}")(*arguments), "before it was set up"


def test_a_worker_in_float32_folds_in_float32(tmp_path):
    worker = Worker(dtype=torch.float32)
    (tmp_path / "base").mkdir()
    worker.ask("setup", str(write_base(tmp_path / "base", torch.float32)), "host")
    worker.ask("stage", "s/1", str(write_adapter(tmp_path / "one", 1)))
    worker.ask("activate", "s/1")
    for name, weight in shards(merged(1, torch.float32), 0, 1).items():
        torch.testing.assert_close(worker.layers[name].weight.data, weight, rtol=1e-5, atol=1e-7)


def test_weights_go_through_the_layers_own_quantization(synced):
    worker = synced()
    for layer in worker.layers.values():
        layer.quant_method = PerChannel()
    for key in ("s/2", "s/1"):  # twice: the second finds codes in the place of weights
        worker.ask("activate", key)
    for name, weight in shards(merged(1), 0, 1).items():
        layer = worker.layers[name]
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        torch.testing.assert_close(layer.weight_scale.data, scale, rtol=2**-7, atol=0)
        expected = (weight.float() / layer.weight_scale.data).to(torch.float8_e4m3fn)
        assert (layer.weight.data.float() == expected.float()).float().mean() > 0.98, name


def test_noise_is_on_the_norms_own_scales_and_off_with_the_next_version(synced):
    worker = synced()
    own = {name: one.detach().clone() for name, one in norms(worker.model_runner.model).items()}
    held = lambda: {name: one.detach() for name, one in norms(worker.model_runner.model).items()}  # noqa: E731
    for seed in (3, 4):
        assert worker.ask("noise", 0.1, seed) == {"norms": 2}
    alone = Worker().model_runner.model
    NoisyNorms(alone).set(Noise(0.1, 4))
    for name, scale in norms(alone).items():
        assert torch.equal(held()[name], scale.detach()) and not torch.equal(held()[name], own[name])
    worker.ask("activate", "s/2")
    assert all(torch.equal(held()[name], scale) for name, scale in own.items())
    worker.ask("noise", 0.1, 3)
    worker.ask("noise", 0.0, 3)
    assert all(torch.equal(held()[name], scale) for name, scale in own.items())


@pytest.mark.parametrize(
    ("drop", "more", "reason"),
    [
        (("q_proj.lora_A.weight",), {}, "self_attn.q_proj has one of its two factors only"),
        (("o_proj.lora_B.weight",), {}, "self_attn.o_proj has one of its two factors only"),
        ((), {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 8)}, "no place for base_model.model.lm_head"),
        ((), {f"base_model.model.{LAYER}mlp.router.lora_A.weight": torch.zeros(2, HIDDEN),
              f"base_model.model.{LAYER}mlp.router.lora_B.weight": torch.zeros(128, 2)},
         "mlp.router has rank 2, adapter_config.json says 4"),
        ((), {f"base_model.model.{LAYER}mlp.up_proj.lora_B.weight": torch.zeros(4, 4)},
         r"factors of \(4, 512\) and \(4"),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_the_worker_is_refused_and_changes_nothing(synced, tmp_path, drop, more, reason):
    worker = synced()
    before = worker.weights()
    answer = worker.remerge_stage("s/3", str(write_adapter(tmp_path / "other", 3, drop, **more)))
    assert "cannot be folded in" in answer["error"]
    with pytest.raises(AssertionError, match=reason):
        worker.ask("stage", "s/3", str(tmp_path / "other"))
    assert "s/3" not in worker._remerge.staged
    assert all(torch.equal(weight, before[name]) for name, weight in worker.weights().items())


def test_an_adapter_of_some_layers_leaves_the_others_as_the_base(base, tmp_path):
    worker = Worker(1, 2)
    worker.ask("setup", str(base), "gpu")
    some = ("k_proj.lora_A.weight", "k_proj.lora_B.weight", "up_proj.lora_A.weight", "up_proj.lora_B.weight")
    assert worker.ask("stage", "s/1", str(write_adapter(tmp_path / "some", 1, some))) == {"tensors": 12}
    worker.ask("activate", "s/1")
    whole, plain = merged(1), merged(None)
    for name in ("self_attn.k_proj", "mlp.up_proj"):
        whole[name] = plain[name]
    assert_holds(worker, shards(whole, 1, 2))


def test_a_base_that_does_not_fit_the_worker_is_refused(base, tmp_path):
    assert "gpu or host, not 'disk'" in Worker().remerge_setup(str(base), "disk")["error"]
    assert "merge base" in Worker().remerge_setup(str(tmp_path), "gpu")["error"]
    # 8 heads of 64 on 16 workers: half a block of columns each.
    worker = Worker(0, 8)
    half = RowParallelLinear(HEADS * HEAD, HIDDEN, 0, 16)
    half.allocate(HIDDEN, HEADS * HEAD // 16, torch.bfloat16)
    add(worker.model_runner.model, f"{LAYER}self_attn.o_proj", half)
    assert "32 input columns on this worker, which blocks of 64 do" in worker.remerge_setup(str(base), "gpu")["error"]
    other = Worker()
    other.model_runner.model.packed_modules_mapping["qkv_proj"] = ["q_proj", "k_proj", "w_proj"]
    answer = other.remerge_setup(str(base), "gpu")
    assert f"{LAYER}self_attn.w_proj.weight is not in it" in answer["error"]
    assert "w_proj" in "".join(other.remerge_describe()["modules"]) and not other.remerge_describe()["ready"]


def test_the_layers_that_an_adapter_may_target_are_those_of_the_checkpoint():
    described = Worker(0, 2).remerge_describe()
    assert sorted(described["modules"]) == sorted(f"{LAYER}{name}" for name in SHAPES) and described["why"] is None
    assert [linear.name for linear in find_linears(Worker().model_runner.model)] == [
        f"{LAYER}{name}" for name in FUSED
    ]


def test_layers_inside_a_vision_language_model_have_the_names_of_the_language_model(base):
    alone, worker = Worker(), Worker()
    whole = nn.Module()
    whole.language_model, whole.vision_tower = worker.model_runner.model, Worker().model_runner.model
    worker.model_runner = SimpleNamespace(model=whole)
    assert worker.remerge_describe()["modules"] == alone.remerge_describe()["modules"]
    for one in (worker, alone):
        assert "error" not in one.remerge_setup(str(base), "gpu")
    assert worker.remerge_noise(0.1, 1) == alone.remerge_noise(0.1, 1)


@pytest.mark.parametrize("name", ["nvfp4a16", "w4a16", "fp8_static"])
def test_with_a_format_base_and_adapter_are_served_as_the_export_holds_them(base, tmp_path, name):
    worker = Worker(quant_cfg=name)
    peaks = {f"{LAYER}{layer}": 1.0 + number for number, layer in enumerate(SHAPES)}
    worker.ask("setup", str(base), "gpu")

    def expected(seed: int | None) -> dict[str, torch.Tensor]:
        found = {}
        whole = merged(seed)
        for fused, parts in FUSED.items():
            peak = max(whole[part].abs().max().item() for part in parts) if FORMATS[name].shares_peak else 0.0
            found[fused] = torch.cat([read_back(FORMATS[name], whole[part], peak)[1] for part in parts]).bfloat16()
        return found

    def differing(held: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
        return max((held[fused] != wanted[fused]).float().mean().item() for fused in FUSED)

    assert differing(worker.weights(), expected(None)) == 0, "before any adapter came"
    answer = worker.remerge_stage("s/0", str(write_adapter(tmp_path / "bare", 1)))
    assert ("error" in answer) == FORMATS[name].needs_calibration, "ranges of inputs come with an adapter"
    worker.ask("stage", "s/1", str(write_adapter(tmp_path / "one", 1, peaks=peaks)))
    worker.ask("activate", "s/1")
    assert differing(worker.weights(), expected(1)) < 0.01 < differing(worker.weights(), expected(None))
    if FORMATS[name].needs_calibration:
        held = {fused: layer.input_peak.item() for fused, layer in worker.layers.items()}
        assert held == {fused: max(peaks[f"{LAYER}{part}"] for part in parts) for fused, parts in FUSED.items()}


def test_a_read_that_returns_less_than_asked_for_is_continued(tmp_path, monkeypatch):
    path = write_adapter(tmp_path / "one", 1) / "adapter_model.safetensors"
    expected, preadv = remerge.read_tensors(path, torch.device("cpu")), remerge.os.preadv
    monkeypatch.setattr(remerge.os, "preadv", lambda file, views, start: preadv(file, [views[0][:70_000]], start))
    found = remerge.read_tensors(path, torch.device("cpu"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], one) for name, one in expected.items())
