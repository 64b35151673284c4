"""Experts on remerge workers without vLLM: the weights of every shard after a sync, and refusals.

The layers stand in for vLLM's by the attributes that kit/rollout/server/expert_layers.py reads. What a worker should
hold is computed from the whole weights: tensor parallelism halves an expert's rows of gate and up and the columns of
down; expert parallelism gives each worker whole experts.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bench.random_adapter import random_adapter, save_adapters
from kit.core.file_kinds import BASE
from kit.rollout.server import remerge
from kit.rollout.server.adapter_check import Refused, Room, adapted_modules, check, read_adapter
from kit.weights.nf4 import block_maxima, dequantize_with, quantize_weight
from tests.unit.filled import filled
from tests.unit.test_remerge_workers import LinearBase, Worker, stand_ins  # noqa: F401

EXPERTS, HIDDEN, INNER, MODULE = 4, 128, 256, "model.layers.0.mlp.experts"
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
NAMES = [f"{MODULE}.{expert}.{part}.weight" for expert in range(EXPERTS) for part in SHAPES]


class Method(nn.Module):
    """Keeps the weights as they are loaded, or as codes with a scale per row beside them."""

    def __init__(self, quantized: bool):
        super().__init__()
        self.quantized, self.moe_kernel = quantized, "kernel of the weights loaded first"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.moe_kernel = "kernel of the weights loaded last"
        for name in ("w13_weight", "w2_weight") if self.quantized else ():
            value = getattr(layer, name).data.float()
            scale = value.abs().amax(-1, keepdim=True) / 448
            setattr(layer, name, nn.Parameter((value / scale).to(torch.float8_e4m3fn), requires_grad=False))
            setattr(layer, f"{name}_scale", nn.Parameter(scale, requires_grad=False))


class RoutedExperts(nn.Module):
    """A worker's experts: of `ranks` workers, the `rank`th, split by rows and columns or by expert."""

    def __init__(self, rank: int, ranks: int, by_expert: bool, quantized: bool = False, padded: int = 0):
        super().__init__()
        inner = INNER if by_expert else INNER // ranks
        parallel = {"tp_rank": 0 if by_expert else rank, "tp_size": 1 if by_expert else ranks}
        self.moe_config = SimpleNamespace(
            **parallel,
            intermediate_size_per_partition=inner + padded,
            intermediate_size_per_partition_unpadded=inner,
            hidden_dim_unpadded=HIDDEN,
            has_bias=False,
        )
        self.hidden_size, self.global_num_experts = HIDDEN, EXPERTS
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = SHAPES
        self.local_num_experts, self._expert_map = EXPERTS, None
        if by_expert:  # its experts, in an order of its own
            self.local_num_experts = EXPERTS // ranks
            places = torch.full((EXPERTS,), -1)
            mine = range(rank, EXPERTS, ranks)
            places[list(mine)] = torch.arange(len(mine)).flip(0)
            self._expert_map = places
        self.quant_method = Method(quantized)
        count = self.local_num_experts
        self.w13_weight = nn.Parameter(torch.zeros(count, 2 * inner, HIDDEN, dtype=torch.bfloat16), False)
        self.w2_weight = nn.Parameter(torch.zeros(count, HIDDEN, inner, dtype=torch.bfloat16), False)


@pytest.fixture(autouse=True)
def experts_of_vllm(monkeypatch):
    module = SimpleNamespace(RoutedExperts=RoutedExperts)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe", module)


def write_base(folder: Path) -> dict[str, torch.Tensor]:
    """Write the NF4 copy of random experts, a router and base.json; return the dequantized weights."""
    generator, copies, weights = torch.Generator().manual_seed(0), {}, {}
    for name in NAMES:
        value = torch.randn(*SHAPES[name.split(".")[-2]], generator=generator).bfloat16()
        packed, state = quantize_weight(value, True, None)
        copies |= {f"{name}.packed": packed.reshape(-1), f"{name}.absmax": block_maxima(state)}
        weights[name] = dequantize_with(packed, block_maxima(state), value.shape, torch.bfloat16)
    (folder / "nf4").mkdir(parents=True)
    save_file(copies, folder / "nf4" / "model.safetensors", {"dtype": "bfloat16"})
    (folder / "nf4" / "index.json").write_text(json.dumps(dict.fromkeys(NAMES, "model.safetensors")))
    router = "model.layers.0.mlp.gate"
    facts = {"quantization": {"type": "nf4"}, "quantized": [name.removesuffix(".weight") for name in NAMES]}
    facts["tensors"] = dict.fromkeys([*NAMES, f"{router}.weight"], "a hash")
    (folder / "base.json").write_text(json.dumps(filled(BASE, facts)))
    return weights


def make_worker(rank: int = 0, ranks: int = 1, **how: Any) -> Worker:
    model = nn.Module()
    model.model = nn.Module()
    block = nn.Module()
    block.gate = LinearBase(HIDDEN, EXPERTS, rank, ranks)
    block.gate.allocate(EXPERTS, HIDDEN, torch.bfloat16)
    block.gate.weight.data.fill_(7)
    block.experts = nn.Module()
    block.experts.routed_experts = RoutedExperts(rank, ranks, **{"by_expert": False} | how)
    layer = nn.Module()
    layer.mlp = block
    model.model.layers = nn.ModuleList([layer])
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(model=model)
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    worker.vllm_config = SimpleNamespace(additional_config={}, model_config=SimpleNamespace(quantization=None))
    worker.device = torch.device("cpu")
    return worker


def served(worker: Worker) -> RoutedExperts:
    return worker.model_runner.model.model.layers[0].mlp.experts.routed_experts


def shard(weights: dict[str, torch.Tensor], layer: RoutedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """What a worker should hold of these whole weights: (w13, w2)."""
    config = layer.moe_config
    inner = config.intermediate_size_per_partition_unpadded
    rows = slice(config.tp_rank * inner, (config.tp_rank + 1) * inner)
    table = layer._expert_map
    order = list(range(EXPERTS)) if table is None else [int((table == n).nonzero()) for n in range((table >= 0).sum())]
    part = lambda expert, name: weights[f"{MODULE}.{expert}.{name}.weight"]  # noqa: E731
    first = [torch.cat([part(e, "gate_proj")[rows], part(e, "up_proj")[rows]]) for e in order]
    return torch.stack(first), torch.stack([part(e, "down_proj")[:, rows] for e in order])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by_expert", [False, True])
def test_every_worker_holds_its_shard_of_the_merged_experts_and_gives_the_base_back(tmp_path, ranks, by_expert):
    weights = write_base(tmp_path / "base")
    factors, merged = random_adapter(weights, NAMES, 0.1, 0.1)
    save_adapters(factors, tmp_path)
    for rank in range(ranks):
        worker = make_worker(rank, ranks, by_expert=by_expert)
        described = worker.remerge_describe()
        assert {f"{MODULE}.base_layer", MODULE} <= set(described["modules"]) and described["why"] is None
        answer = worker.remerge_setup(str(tmp_path / "base"), "gpu")
        assert answer.get("linears") == 2, answer
        for place, wanted in (("adapter", merged), ("zero", weights)):
            assert "error" not in worker.remerge_stage(place, str(tmp_path / place))
            assert "error" not in worker.remerge_activate(place)
            for found, expected in zip(
                (served(worker).w13_weight, served(worker).w2_weight), shard(wanted, served(worker)), strict=True
            ):
                assert torch.equal(found, expected)
        assert served(worker).quant_method.moe_kernel == "kernel of the weights loaded last"
        assert (worker.model_runner.model.model.layers[0].mlp.gate.weight == 7).all(), "the router was changed"


def test_quantized_experts_are_those_of_a_fresh_load(tmp_path):
    weights = write_base(tmp_path / "base")
    factors, merged = random_adapter(weights, NAMES, 0.1, 0.1)
    save_adapters(factors, tmp_path)
    worker, fresh = make_worker(quantized=True), RoutedExperts(0, 1, False, True)
    for name, value in zip(("w13_weight", "w2_weight"), shard(merged, fresh), strict=True):
        getattr(fresh, name).data = value
    fresh.quant_method.process_weights_after_loading(fresh)
    worker.remerge_setup(str(tmp_path / "base"), "gpu")
    worker.remerge_stage("adapter", str(tmp_path / "adapter"))
    assert "error" not in worker.remerge_activate("adapter")
    for name, value in fresh.named_parameters():
        assert torch.equal(getattr(served(worker), name).view(torch.uint8), value.view(torch.uint8)), name


def test_an_adapter_without_experts_leaves_them_as_the_base(tmp_path):
    weights = write_base(tmp_path / "base")
    (tmp_path / "none").mkdir()
    save_file({}, tmp_path / "none" / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "none" / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    worker = make_worker()
    worker.remerge_setup(str(tmp_path / "base"), "gpu")
    worker.remerge_stage("none", str(tmp_path / "none"))
    assert "error" not in worker.remerge_activate("none")
    assert torch.equal(served(worker).w13_weight, shard(weights, served(worker))[0])


def test_padded_experts_are_refused():
    assert "vLLM pads its experts" in make_worker(padded=64).remerge_describe()["why"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, tensors: tensors.pop(next(name for name in tensors if "lora_B" in name)), "one of its two"),
        (lambda config, tensors: config.update(r=2), "rank 2 on 4 experts"),
        (lambda config, tensors: config.update(target_parameters=["experts.down_proj"]), "no place for"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_the_worker(tmp_path, change, message):
    weights = write_base(tmp_path / "base")
    factors, _ = random_adapter(weights, NAMES, 0.1, 0.1)
    config = {"r": 4, "lora_alpha": 8, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    change(config, factors)
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    worker = make_worker()
    worker.remerge_setup(str(tmp_path / "base"), "gpu")
    assert message in worker.remerge_stage("adapter", str(tmp_path / "adapter"))["error"]


def test_the_header_of_an_adapter_says_whether_it_is_for_other_experts(tmp_path):
    factors, _ = random_adapter(write_base(tmp_path / "base"), NAMES, 0.1, 0.1)
    save_adapters(factors, tmp_path)
    shapes = {name.removesuffix(".weight"): SHAPES[name.split(".")[-2]] for name in NAMES}
    modules = adapted_modules(shapes)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    adapter = read_adapter(tmp_path / "adapter")
    check(adapter, Room(modules, shapes, None, takes_patterns=True))
    half = {name: shape for name, shape in shapes.items() if ".experts.0." in name or ".experts.1." in name}
    with pytest.raises(Refused, match="rank 4 on 2 experts"):
        check(adapter, Room(modules, half, None, takes_patterns=True))
    with pytest.raises(Refused, match="served merged only; sync by remerge"):
        check(adapter, Room(modules, shapes, 16, takes_patterns=False))
    assert remerge.find_layers(make_worker().model_runner.model)[1].name == f"{MODULE}.gate_up_proj"
