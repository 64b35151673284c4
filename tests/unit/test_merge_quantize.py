"""The formats: what is stored is what was meant, readers agree, and the retained share tells the truth."""

import contextlib
import json
import math
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kit.core.errors import BadInput
from kit.core.formats import FORMATS, fitted
from kit.core.run_directory import RunDir, read_manifest
from kit.core.run_files import read_json
from kit.weights.frozen_base import BaseCheckpoint, dequantize
from kit.weights.quantize import fake_quantize_weight
from kit.weights.read_quantized import StoredWeights
from kit.weights.shards import PartsFile
from merge import quantize as quantize_module
from merge.merge import read_adapter, write_bf16
from merge.quantize import (
    STORED,
    Refused,
    check_shapes,
    format_of,
    fused_peaks,
    quantization_config,
    quantize_checkpoint,
    read_back,
)
from merge.verify import base_checkpoint, load_for_scoring
from tests.unit.merge_fixture import make_model, make_run, read_all, shared_folder
from tests.unit.test_merge_base import NF4

# Every format can store these layers; fp8_block needs two blocks of 128 across.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PACKED_FP4 = ("nvfp4a16", "nvfp4")
STATIC = ("fp8_static", "nvfp4")  # their activations are rounded by scales of a calibration
PEAK = 16.0  # the largest |input| that is said of every layer; that of down_proj is 14.6


def no_verify(_):
    return None


def wide_run(tied: bool = True) -> RunDir:
    folder = shared_folder() / f"wide-run-{tied}"
    if not folder.exists():
        make_run(folder, make_model(shared_folder() / f"wide-{tied}", tied, **WIDE))
    return RunDir.open(folder)


def merged_run(tied: bool = True):
    """(base, updates, folder of the BF16 checkpoint), made once a session."""
    run, folder = wide_run(tied), shared_folder() / f"wide-merged-{tied}"
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    if not folder.exists():
        write_bf16(base, updates, folder, lambda _: None)
    return base, updates, folder


def quantized(name: str, tied: bool = True):
    """(tensors of the stored checkpoint, its manifest, its folder), made once a session."""
    folder = shared_folder() / f"wide-{name}-{tied}"
    base, updates, merged = merged_run(tied)
    if not folder.exists():
        peaks = dict.fromkeys(base.quantized, PEAK) if name in STATIC else None
        quantize_checkpoint(merged, folder, name, base, updates, no_verify, force=True, input_peaks=peaks)
    return read_all(folder), read_manifest(folder, "checkpoint", deep=True), folder


def e4m3(codes: torch.Tensor) -> np.ndarray:
    """FP8 E4M3 bytes to float64 by sign, exponent and mantissa."""
    byte = codes.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), (byte >> 3) & 15, byte & 7
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode(name: str, tensors: dict, module: str) -> np.ndarray:
    """The weight that a stored module stands for, in numpy, by the format's definition."""
    if name in ("fp8", "fp8_static"):
        assert tensors[f"{module}.weight"].dtype == torch.float8_e4m3fn
        return e4m3(tensors[f"{module}.weight"]) * tensors[f"{module}.weight_scale"].double().numpy()
    if name == "fp8_block":
        scales = tensors[f"{module}.weight_scale"].double().numpy()
        return e4m3(tensors[f"{module}.weight"]) * np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)
    if name in PACKED_FP4:
        packed = tensors[f"{module}.weight_packed"].numpy()
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
        scales = np.repeat(e4m3(tensors[f"{module}.weight_scale"]), 16, axis=1)
        assert tensors[f"{module}.weight_global_scale"].dtype == torch.float32
        return np.where(codes & 8, -1, 1) * E2M1[codes & 7] * scales / tensors[f"{module}.weight_global_scale"].item()
    if name == "w4a16":
        packed = tensors[f"{module}.weight_packed"].numpy().view(np.uint32)
        codes = np.stack([(packed >> (4 * i)) & 15 for i in range(8)], axis=-1).reshape(packed.shape[0], -1)
        scales = np.repeat(tensors[f"{module}.weight_scale"].double().numpy(), 128, axis=1)
        assert tensors[f"{module}.weight_shape"].tolist() == list(codes.shape)
        return (codes.astype(np.int64) - 8) * scales
    facts = json.loads(bytes(tensors[f"{module}.weight.quant_state.bitsandbytes__nf4"].numpy()))
    packed = tensors[f"{module}.weight"].numpy().reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    nested = np.repeat(tensors[f"{module}.weight.nested_absmax"].numpy(), facts["nested_blocksize"])
    absmax = tensors[f"{module}.weight.nested_quant_map"].numpy()[tensors[f"{module}.weight.absmax"].numpy()]
    absmax = absmax * nested[: absmax.size] + facts["nested_offset"]
    return (NF4[codes] * np.repeat(absmax, facts["blocksize"])).reshape(facts["shape"])


# ‖stored − merged‖ / ‖merged‖ of a layer of Gaussian weights, and how the logits have to go with those of BF16.
FIDELITY = {"fp8": (0.03, 0.99), "fp8_block": (0.03, 0.98), "fp8_static": (0.03, 0.98), "w4a16": (0.15, 0.9)}
FIDELITY |= {"nvfp4a16": (0.1, 0.9), "nvfp4": (0.1, 0.85), "nf4": (0.03, 0.95)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", STORED)
def test_transformers_computes_with_the_stored_weights_and_they_are_near_the_merged_ones(name, tied):
    tensors, _, folder = quantized(name, tied)
    base, _, merged = merged_run(tied)
    originals = read_all(merged)
    model = load_for_scoring(folder, "cpu")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        logits = model(ids).logits
    for weight_name in base.quantized:
        module = weight_name.removesuffix(".weight")
        stored = decode(name, tensors, module)
        layer = model.get_submodule(module)
        if name == "nf4":
            loaded = dequantize(layer).float().numpy()
            np.testing.assert_allclose(loaded, stored, rtol=2**-8, atol=1e-9)  # it dequantizes to BF16
        else:
            np.testing.assert_array_equal(layer.weight.detach().double().numpy(), stored)
        exact = originals[weight_name].double().numpy()
        error = np.linalg.norm(stored - exact) / np.linalg.norm(exact)
        assert error < FIDELITY[name][0], (weight_name, error)
    for untouched in set(originals) - base.quantized:
        assert torch.equal(tensors[untouched], originals[untouched]), untouched
    reference = load_for_scoring(merged, "cpu")(ids).logits.detach()
    correlation = torch.corrcoef(torch.stack([logits.flatten(), reference.flatten()]))[0, 1].item()
    assert correlation > FIDELITY[name][1]


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_static", "w4a16", "nvfp4a16"])
def test_rounding_is_to_the_nearest_code(name):
    torch.manual_seed(0)
    weight = (torch.randn(128, 256) * 0.05).bfloat16()
    stored, value = read_back(FORMATS[name], weight)
    assert value.dtype == torch.float32
    exact = weight.double().numpy()
    assert np.array_equal(value.double().numpy(), decode(name, {f"m.{k}": v for k, v in stored.items()}, "m"))
    if name.startswith("fp8"):
        codes = e4m3(torch.arange(256, dtype=torch.uint8))
        grid, block = np.unique(codes[np.abs(codes) <= 448]), (128 if name == "fp8_block" else 1, 128)
    elif name == "w4a16":
        grid, block = np.arange(-8, 8), (1, 128)
    else:
        grid, block = np.concatenate([-E2M1, E2M1]), (1, 16)
    scale = stored["weight_scale"].double().numpy()
    if name in ("fp8", "fp8_static"):
        block = (1, 256)
    if name == "nvfp4a16":
        scale = scale / stored["weight_global_scale"].item()
    scale = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)
    nearest = np.abs((exact / scale)[..., None] - grid).min(-1) * scale
    error = np.abs(value.double().numpy() - exact)
    # A quotient in float32 may fall on the other side of a tie; both sides are then equally near.
    np.testing.assert_allclose(error, nearest, rtol=1e-5, atol=1e-9)


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The entry of the ascending `grid` that is nearest to each value; a tie goes to the even place."""
    distance = np.abs(values[..., None] - grid)
    first = distance.argmin(-1)
    after = np.minimum(first + 1, grid.size - 1)
    tie = np.take_along_axis(distance, after[..., None], -1) == np.take_along_axis(distance, first[..., None], -1)
    return grid[np.where(tie[..., 0] & (first % 2 == 1), after, first)]


def test_nvfp4_is_what_its_definition_gives():
    torch.manual_seed(0)
    weight = (torch.randn(64, 512) * torch.logspace(-3, 0, 64)[:, None]).bfloat16()
    stored, value = read_back(FORMATS["nvfp4a16"], weight)
    exact = weight.double().numpy()
    global_scale = 2.0 ** np.floor(np.log2(448 * 6 / np.abs(exact).max()))
    assert stored["weight_global_scale"].tolist() == [global_scale]
    groups = exact.reshape(64, -1, 16)
    wanted = np.abs(groups).max(-1) / 6 * global_scale
    scale = nearest(wanted, e4m3(torch.arange(127, dtype=torch.uint8))) / global_scale
    expected = np.sign(groups) * nearest(np.abs(groups) / scale[..., None], E2M1) * scale[..., None]
    np.testing.assert_array_equal(value.double().numpy(), expected.reshape(exact.shape))
    error = np.linalg.norm(expected.reshape(exact.shape) - exact) / np.linalg.norm(exact)
    assert 0.08 < error < 0.1  # 9.5 % is what FP4 in groups of 16 loses on Gaussian weights


def test_a_shared_global_scale_does_not_change_what_nvfp4_stands_for():
    torch.manual_seed(0)
    weight = (torch.randn(64, 256) * 0.05).bfloat16()
    alone, value = read_back(FORMATS["nvfp4a16"], weight)
    shared, same = read_back(FORMATS["nvfp4a16"], weight, 1.7)
    assert alone["weight_global_scale"] > 4 * shared["weight_global_scale"]
    assert torch.equal(value, same)
    assert torch.equal(value.bfloat16().float(), value)  # exact in BF16, which transformers dequantizes it to


def test_layers_that_vllm_fuses_have_one_global_scale():
    tensors, _, _ = quantized("nvfp4a16")
    originals = read_all(merged_run()[2])
    for layer in range(2):
        for fused in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
            names = [f"model.layers.{layer}.{module}" for module in fused]
            peak = max(originals[f"{name}.weight"].abs().max().item() for name in names)
            expected = 2.0 ** np.floor(np.log2(448 * 6 / peak))
            assert [tensors[f"{name}.weight_global_scale"].item() for name in names] == [expected] * len(names)


@pytest.mark.parametrize("name", STORED)
def test_weights_in_chunks_are_stored_as_in_one_piece(name, monkeypatch):
    torch.manual_seed(0)
    weight = (torch.randn(384, 256) * 0.05).bfloat16()
    (whole, value) = read_back(FORMATS[name], weight)
    monkeypatch.setattr(quantize_module, "CHUNK", 200 * 256)
    (chunked, same) = read_back(FORMATS[name], weight)
    assert torch.equal(value, same)
    assert whole.keys() == chunked.keys()
    for key, part in whole.items():
        assert part.dtype == chunked[key].dtype
        assert torch.equal(part.view(torch.uint8), chunked[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_static", "w4a16", "nvfp4a16"])
@pytest.mark.parametrize("size", [1e-36, 1e-38, 2e-39])
def test_a_row_whose_scale_bf16_rounds_to_zero_is_read_back_as_numbers(name, size):
    """And as those that a policy trained for the format computed with."""
    weight = torch.zeros(256, 256, dtype=torch.bfloat16)
    weight[:128] = torch.linspace(-size, size, 256).to(torch.bfloat16)
    _, value = read_back(FORMATS[name], weight)
    assert value.isfinite().all() and value.abs().max() <= 2 * size and (value[128:] == 0).all()
    assert torch.equal(value.to(torch.bfloat16), fake_quantize_weight(weight, FORMATS[name]))


def test_nvfp4_stores_the_scale_of_the_inputs_that_calibration_found():
    tensors, manifest, _ = quantized("nvfp4")
    assert "input_peaks" not in manifest
    alone = quantized("nvfp4a16")[0]
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("input_global_scale")}
    assert scales.keys() == {
        f"{name.removesuffix('.weight')}.input_global_scale" for name in merged_run()[0].quantized
    }
    assert all(scale.tolist() == [pytest.approx(448 * 6 / PEAK)] for scale in scales.values())
    assert {name for name in tensors if name not in scales} == alone.keys()
    assert all(torch.equal(tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in alone.items())


def test_fp8_static_stores_one_scale_for_a_weight_and_one_for_its_inputs():
    tensors, _, _ = quantized("fp8_static")
    originals = read_all(merged_run()[2])
    for name in merged_run()[0].quantized:
        module = name.removesuffix(".weight")
        peak = originals[name].abs().max().float()
        assert tensors[f"{module}.weight_scale"].unique().tolist() == [(peak / 448).bfloat16()]
        assert tensors[f"{module}.input_scale"].tolist() == [torch.tensor(PEAK / 448).bfloat16()]


def test_config_names_the_format_and_leaves_the_output_embedding_out():
    expected = {"fp8": "float-quantized", "fp8_block": "float-quantized", "w4a16": "pack-quantized"}
    expected["fp8_static"] = "float-quantized"
    expected |= dict.fromkeys(PACKED_FP4, "nvfp4-pack-quantized")
    rounded = {"fp8": (True, "token", None), "fp8_block": (True, "group", 128), "nvfp4": ("local", "tensor_group", 16)}
    rounded["fp8_static"] = (False, "tensor", None)
    for name in STORED:
        _, manifest, folder = quantized(name, tied=False)
        config = json.loads((folder / "config.json").read_text())
        assert config["dtype"] == "bfloat16"
        settings = config["quantization_config"]
        assert manifest["format"] == name
        if name == "nf4":
            assert settings["llm_int8_skip_modules"] == ["lm_head"]
            continue
        assert (settings["quant_method"], settings["format"]) == ("compressed-tensors", expected[name])
        assert settings["ignore"] == ["lm_head"]
        activations = settings["config_groups"]["group_0"].get("input_activations")
        found = activations and tuple(activations.get(key) for key in ("dynamic", "strategy", "group_size"))
        assert found == rounded.get(name)


def test_update_survives_every_format_but_nf4():
    shares = {name: quantized(name)[1]["retained_update"] for name in STORED}
    assert shares["fp8"] == pytest.approx(1, abs=0.05)
    assert shares["fp8_block"] == pytest.approx(1, abs=0.05)
    assert shares["fp8_static"] == pytest.approx(1, abs=0.05)
    assert shares["nvfp4a16"] == shares["nvfp4"] > 0.6
    assert shares["w4a16"] == pytest.approx(1, abs=0.3)
    assert shares["nf4"] < 0.15


def test_retained_share_equals_its_definition_computed_from_the_files():
    base, updates, _ = merged_run()
    after = quantized("w4a16")[0]
    plain = shared_folder() / "base-bf16"
    write_bf16(base, {}, plain, lambda _: {})
    quantize_checkpoint(plain, shared_folder() / "base-w4a16", "w4a16", base, {}, no_verify)
    before = read_all(shared_folder() / "base-w4a16")
    kept = whole = 0.0
    for name, update in updates.items():
        module = name.removesuffix(".weight")
        delta = update.scale * (update.b.double() @ update.a.double()).numpy()
        kept += ((decode("w4a16", after, module) - decode("w4a16", before, module)) * delta).sum()
        whole += (delta**2).sum()
    assert quantized("w4a16")[1]["retained_update"] == pytest.approx(kept / whole, rel=1e-5)


def test_nf4_of_the_policy_is_refused_with_the_share_and_leaves_nothing(tmp_path):
    base, updates, merged = merged_run()
    with pytest.raises(Refused, match=r"keeps \d+\.\d% of the update.*--force") as refused:
        quantize_checkpoint(merged, tmp_path / "nf4", "nf4", base, updates, no_verify)
    assert refused.value.exit_code == 1
    assert refused.value.share == pytest.approx(quantized("nf4")[1]["retained_update"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("least", "written"), [(1.0, True), (1.001, False)])
def test_nf4_is_written_at_the_bound_and_refused_below_it(tmp_path, monkeypatch, least, written):
    assert quantize_module.LEAST_RETAINED == 0.5
    base, updates, merged = merged_run()
    share = quantized("nf4")[1]["retained_update"]
    monkeypatch.setattr(quantize_module, "LEAST_RETAINED", share * least)
    with contextlib.nullcontext() if written else pytest.raises(Refused):
        quantize_checkpoint(merged, tmp_path / "nf4", "nf4", base, updates, no_verify)
    assert (tmp_path / "nf4" / "manifest.json").exists() is written


def test_nf4_of_the_original_base_keeps_the_update_and_is_written(tmp_path):
    run = wide_run()
    base = BaseCheckpoint(shared_folder() / "wide-True", read_json(run.base_file), into="original")
    updates = read_adapter(run.newest_adapter(), base)
    write_bf16(base, updates, tmp_path / "bf16", lambda _: {})
    made = quantize_checkpoint(tmp_path / "bf16", tmp_path / "nf4", "nf4", base, updates, no_verify)
    assert made["retained_update"] > 0.5 > quantized("nf4")[1]["retained_update"]


def test_an_adapter_that_learned_nothing_has_nothing_to_lose(tmp_path):
    base, updates, _ = merged_run()
    idle = {name: replace(update, b=torch.zeros_like(update.b)) for name, update in updates.items()}
    write_bf16(base, idle, tmp_path / "bf16", lambda _: {})
    for name, updates in (("nf4", idle), ("fp8", idle), ("nf4-base", {})):
        made = quantize_checkpoint(tmp_path / "bf16", tmp_path / name, name[:3], base, updates, no_verify)
        assert made["retained_update"] is None


def test_the_parts_of_two_tensors_are_in_memory_and_not_those_of_a_shard(tmp_path, monkeypatch):
    base, _, merged = merged_run()
    stored: list[list[weakref.ref]] = []
    most, store, write = 0, quantize_module.WRITERS["float-quantized"], PartsFile.write

    def watched(*given):
        nonlocal most
        most = max(most, sum(any(part() is not None for part in parts) for parts in stored))
        parts = store(*given)
        stored.append([weakref.ref(part) for part in parts.values()])
        return parts

    def slow(*arguments):
        time.sleep(0.01)  # a disk slower than quantizing
        write(*arguments)

    monkeypatch.setitem(quantize_module.WRITERS, "float-quantized", watched)
    monkeypatch.setattr(PartsFile, "write", slow)
    quantize_checkpoint(merged, tmp_path / "fp8", "fp8", base, {}, no_verify)
    assert len(stored) == len(base.quantized) == 14
    assert 0 < most <= 2


class Shapes:
    """What `check_shapes` asks of a base."""

    def __init__(self, **shapes):
        self.shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
        self.quantized = set(self.shapes)
        self.shape = self.shapes.__getitem__
        self.config = SimpleNamespace(model_type="qwen3")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "w4a16",
            (384, 336),
            r"needs groups of 128 or 64 .* 1 of 2 .*\(odd\.weight: .* 336 inputs\).*Leave w4a16 out",
        ),
        ("awq", (384, 336), r"awq needs groups of 128 or 64 .*\(odd\.weight: "),
        ("nvfp4a16", (384, 40), r"nvfp4a16 needs groups of 16 .*\(odd\.weight: "),
        ("nvfp4", (384, 40), r"nvfp4 needs groups of 16 .*\(odd\.weight: "),
        ("fp8_block", (320, 384), r"blocks of 128 x 128.* 1 of 2 .*\(odd\.weight: 320 outputs, 384 inputs\)"),
        ("fp8_block", (384, 320), r"odd\.weight: 384 outputs, 320 inputs"),
        ("fp8_block", (256, 128), r"more than one across.*odd\.weight: 256 outputs, 128 inputs"),
    ],
)
def test_a_shape_that_a_format_cannot_store_is_bad_input(name, shape, message):
    with pytest.raises(BadInput, match=message):
        check_shapes(Shapes(fine=(256, 256), odd=shape), name)
    check_shapes(Shapes(fine=(256, 256), odd=shape), "fp8")
    check_shapes(Shapes(fine=(256, 256)), name)


@pytest.mark.parametrize(("inputs", "group"), [((128, 384), 128), ((576, 1536), 64), ((64,), 64), ((336,), 128)])
def test_int4_has_one_group_for_all_layers_and_the_largest_that_divides_them(inputs, group, tmp_path):
    base = Shapes(**{f"layer{size}": (64, size) for size in inputs})
    fmt = fitted(FORMATS["w4a16"], inputs)
    assert fmt == format_of(base, "w4a16") and fmt.name == "w4a16" and fmt.weight.block == (1, group)
    assert fitted(FORMATS["nvfp4"], inputs) is FORMATS["nvfp4"]
    if any(size % group for size in inputs):
        return
    config = quantization_config(fmt, [])
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == group
    weight = (torch.randn(64, inputs[0], generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    stored, value = read_back(fmt, weight)
    assert stored["weight_scale"].shape == (64, inputs[0] // group)
    # What a policy trains in, and what a reader of the checkpoint's configuration computes with.
    assert torch.equal(value, fake_quantize_weight(weight.float(), fmt))
    save_file({f"m.q_proj.{key}": part for key, part in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert torch.equal(StoredWeights(tmp_path).weight("m.q_proj"), value)


@pytest.mark.parametrize("shape", [(320, 384), (384, 320), (256, 128)])
def test_compressed_tensors_cannot_read_the_blocks_that_are_refused(shape):
    # When this fails, upstream reads them, and check_shapes can let them through.
    from compressed_tensors.compressors.base import BaseCompressor

    scale = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 0.5)
    stored = {"weight": torch.ones(shape).to(torch.float8_e4m3fn), "weight_scale": scale}
    with pytest.raises(RuntimeError, match="must match the size"):
        scheme = quantize_module._scheme(FORMATS["fp8_block"])
        BaseCompressor.get_value_from_registry("float-quantized").decompress(stored, scheme)


def test_nf4_that_keeps_no_number_of_the_update_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_module, "retained_share", lambda *_: float("nan"))
    base = SimpleNamespace(into="dequantized", storage="nf4")
    with pytest.raises(Refused, match="keeps nan% of the update"):
        quantize_checkpoint(tmp_path, tmp_path / "nf4", "nf4", base, {}, no_verify)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_static", "nvfp4a16", "nvfp4"])
def test_a_scale_is_made_for_the_largest_value_of_either_sign(name):
    torch.manual_seed(0)
    weight = torch.randn(256, 256).abs().bfloat16()  # of which all largest values are positive
    (stored, value), (mirrored, other) = (read_back(FORMATS[name], one) for one in (weight, -weight))
    assert torch.equal(value, -other) and torch.equal(stored["weight_scale"], mirrored["weight_scale"])
    assert (value - weight.float()).norm() < 0.12 * weight.float().norm()


@pytest.mark.parametrize("peak", [1.0, 1.3, 1.9, 2.7, 0.011, 350.0])
def test_the_global_scale_of_nvfp4_is_the_power_of_two_at_or_below_its_range(peak):
    weight = torch.full((16, 32), -0.25 * peak).bfloat16()
    weight[3, 5] = peak
    most = 448 * 6 / weight.float().abs().max().item()
    found = read_back(FORMATS["nvfp4"], weight)[0]["weight_global_scale"].item()
    assert found <= most < 2 * found and math.log2(found).is_integer()


@pytest.mark.parametrize("largest", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj"])
def test_fused_layers_share_the_largest_weight_of_any_of_them(tmp_path, largest):
    names = {
        kind: f"model.layers.0.x.{kind}.weight" for kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    }
    names["o_proj"] = "model.layers.0.x.o_proj.weight"
    tensors = {name: torch.full((2, 2), -3.0 if kind == largest else 1.0) for kind, name in names.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    base = SimpleNamespace(quantized=set(names.values()), stored={name: name for name in names.values()})
    found = fused_peaks(tmp_path, base)
    groups = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
    assert found == {names[kind]: 3.0 if largest in group else 1.0 for group in groups for kind in group}
