"""Experts in quantized checkpoints: read as stored, their inputs rounded, converted back, refused where no one reads
them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.weights.checkpoint import checkpoint_shards, read_tensor
from kit.weights.frozen_base import BaseCheckpoint, hash_base, load_frozen
from kit.weights.layout import ExpertMatrix
from kit.weights.quantize import fake_quantize_activation, fake_quantize_weight
from merge import dequantize
from merge.merge import write_bf16
from merge.quantize import check_experts, format_of, quantize_checkpoint
from merge.verify import load_for_scoring
from tests.unit.test_experts import make_experts

HELD = ["fp8", "fp8_block", "w4a16", "nvfp4a16"]
REFUSED = {
    "nf4": "bitsandbytes reads the packed weights of experts as if they were plain",
    "awq": "llm-compressor has not been tried on experts",
    "fp8_static": "an expert that no calibration token reaches has none",
    "nvfp4": "an expert that no calibration token reaches has none",
}
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """(base, {format: checkpoint}) of a random mixture of experts."""
    folder = tmp_path_factory.mktemp("formats")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    source = make_experts(folder / "model", **sizes)  # whole blocks of 128 x 128
    base = BaseCheckpoint(source, hash_base(load_frozen(source, "nf4", dtype="float32", device="cpu")))
    places = {"bf16": folder / "bf16", **{name: folder / name for name in HELD}}
    write_bf16(base, {}, places["bf16"], lambda _: None)
    for name in HELD:
        quantize_checkpoint(places["bf16"], places[name], name, base, {}, lambda _: None)
    return base, places


def matrix(model: torch.nn.Module, place: ExpertMatrix) -> torch.Tensor:
    rows = slice(place.part * place.rows, (place.part + 1) * place.rows)
    return getattr(model.get_submodule(place.module), place.name)[place.expert, rows]


@pytest.mark.parametrize("name", HELD)
def test_every_expert_is_read_as_its_format_stores_it(name, merged):
    base, places = merged
    model, fmt = load_for_scoring(places[name]), format_of(base, name)
    plain = load_for_scoring(places["bf16"])
    for expert in base.experts:
        weight = matrix(plain, base.experts[expert])
        # Layers that vLLM fuses share a peak, which moves no code: a global scale is a power of two.
        assert torch.equal(matrix(model, base.experts[expert]), fake_quantize_weight(weight, fmt)), expert


def test_only_linear_layers_and_experts_are_stored_quantized_and_the_router_stays_plain(merged):
    _, places = merged
    for name in HELD:
        stored = {one for names in checkpoint_shards(places[name]).values() for one in names}
        assert "model.layers.0.mlp.gate.weight" in stored
        assert not any(one.startswith("model.layers.0.mlp.gate.weight_") for one in stored)
        codes = "weight" if name.startswith("fp8") else "weight_packed"
        assert f"{EXPERT.removesuffix('.weight')}.{codes}" in stored
        ignored = json.loads((places[name] / "config.json").read_text())["quantization_config"]["ignore"]
        # A router is a linear layer in vLLM, which would look for its scales.
        assert ignored == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_inputs_of_fp8_experts_are_rounded_token_by_token(merged):
    _, places = merged
    model, plain = load_for_scoring(places["fp8"]), load_for_scoring(places["bf16"])
    experts, theirs = model.model.layers[0].mlp.experts, plain.model.layers[0].mlp.experts
    theirs.gate_up_proj.data, theirs.down_proj.data = experts.gate_up_proj.data, experts.down_proj.data
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    chosen, weight = torch.tensor([[2, 7]] * 6), torch.full((6, 2), 0.5)
    form, expected = FORMATS["fp8"].activation, torch.zeros(6, 128)
    for expert in (2, 7):
        gate, up = (fake_quantize_activation(x, form) @ theirs.gate_up_proj[expert].T).chunk(2, -1)
        inner = fake_quantize_activation(torch.nn.functional.silu(gate) * up, form)
        expected += 0.5 * inner @ theirs.down_proj[expert].T
    with torch.no_grad():
        rounded, exact = experts(x, chosen, weight), theirs(x, chosen, weight)
    size = expected.abs().max().item()
    assert torch.allclose(rounded, expected, atol=1e-5 * size)
    assert not torch.allclose(exact, expected, atol=1e-3 * size)


def test_inputs_of_fp8_layers_are_rounded_token_by_token_whatever_their_shape(merged):
    """OPT gives its MLP (T, n), multi-head latent attention (B, 1, T, n); compressed-tensors takes both otherwise."""
    _, places = merged
    layer = load_for_scoring(places["fp8"]).model.layers[0].self_attn.q_proj
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 5)[:, None]
    expected = fake_quantize_activation(x, FORMATS["fp8"].activation) @ layer.weight.T
    with torch.no_grad():
        for shape in ((5, 128), (1, 5, 128), (1, 1, 5, 128)):
            assert torch.allclose(layer(x.view(shape)).view(5, -1), expected, rtol=1e-5, atol=1e-6), shape


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_quantized_experts_become_a_plain_base_again(name, merged, tmp_path):
    base, places = merged
    out = tmp_path / "plain"
    assert dequantize.main(["--model.path", str(places[name]), "--out", str(out)]) == 0
    files = {one: file for file, names in checkpoint_shards(out).items() for one in names}
    wanted = matrix(load_for_scoring(places[name]), base.experts[EXPERT])
    assert torch.equal(read_tensor(out / files[EXPERT], EXPERT), wanted.to(torch.bfloat16))


def test_formats_that_no_reader_computes_experts_in_are_refused_before_a_weight_is_read(merged):
    base, _ = merged
    for name, why in REFUSED.items():
        with pytest.raises(BadInput, match=f"mixture of 8 experts, which cannot be stored as {name}: .*{why}"):
            check_experts(base, name)
    for name in ("bf16", "fp8", "fp8_block", "w4a16", "nvfp4a16"):
        check_experts(base, name)
    dense = SimpleNamespace(experts={})
    for name in FORMATS:
        check_experts(dense, name)


def test_inputs_rounded_in_an_unknown_way_are_refused(merged, tmp_path):
    _, places = merged
    shutil.copytree(places["fp8"], tmp_path / "static")
    file = tmp_path / "static" / "config.json"
    config = json.loads(file.read_text())
    inputs = config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    inputs |= {"dynamic": False, "strategy": "tensor"}
    file.write_text(json.dumps(config))
    with pytest.raises(BadInput, match="inputs of experts to 8 bits per tensor by stored ranges"):
        load_for_scoring(tmp_path / "static")
