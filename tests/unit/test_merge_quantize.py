"""The formats: what is stored is what was meant, readers agree, and the retained share tells the truth."""

import contextlib
import json
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from merge import quantize as quantize_module
from merge.base import BaseCheckpoint, dequantize, hash_nf4_model, load_nf4
from merge.merge import read_adapter, write_bf16
from merge.quantize import FORMATS, Refused, check_shapes, quantize_checkpoint, retained_share
from merge.shards import PartsFile
from merge.verify import base_checkpoint, load_for_scoring
from recipes.parts.errors import BadInput
from recipes.parts.rundir import read_json, read_manifest
from tests.unit.test_merge_base import NF4
from tests.unit.test_merge_fixture import make_model, shared_folder, shared_model, shared_run


def no_verify(_):
    return None


def merged_run(tied: bool = True):
    """(base, updates, folder of the BF16 checkpoint), made once a session."""
    run, folder = shared_run(tied), shared_folder() / f"merged-{tied}"
    base = base_checkpoint(run)
    updates = read_adapter(run.newest_adapter(), base)
    if not folder.exists():
        write_bf16(base, updates, folder, lambda _: {"retained_update": None, "verify": None})
    return base, updates, folder


def quantized(name: str, tied: bool = True):
    """(tensors of the stored checkpoint, its manifest, its folder), made once a session."""
    folder = shared_folder() / f"{name}-{tied}"
    base, updates, merged = merged_run(tied)
    if not folder.exists():
        quantize_checkpoint(merged, folder, name, base, updates, no_verify, force=True)
    return tensors_in(folder), read_manifest(folder, "checkpoint", deep=True), folder


def tensors_in(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def e4m3(codes: torch.Tensor) -> np.ndarray:
    """FP8 E4M3 bytes to float64 by sign, exponent and mantissa."""
    byte = codes.view(torch.uint8).numpy().astype(np.int64)
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), (byte >> 3) & 15, byte & 7
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode(name: str, tensors: dict, module: str) -> np.ndarray:
    """The weight that a stored module stands for, in numpy, by the format's definition."""
    if name == "fp8":
        assert tensors[f"{module}.weight"].dtype == torch.float8_e4m3fn
        return e4m3(tensors[f"{module}.weight"]) * tensors[f"{module}.weight_scale"].double().numpy()
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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", list(FORMATS))
def test_transformers_computes_with_the_stored_weights_and_they_are_near_the_merged_ones(name, tied):
    tensors, _, folder = quantized(name, tied)
    base, _, merged = merged_run(tied)
    originals = tensors_in(merged)
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
        assert error < {"fp8": 0.03, "w4a16": 0.15, "nf4": 0.03}[name], (weight_name, error)
    for untouched in set(originals) - base.quantized:
        assert torch.equal(tensors[untouched], originals[untouched]), untouched
    reference = load_for_scoring(merged, "cpu")(ids).logits.detach()
    correlation = torch.corrcoef(torch.stack([logits.flatten(), reference.flatten()]))[0, 1].item()
    assert correlation > {"fp8": 0.99, "w4a16": 0.9, "nf4": 0.95}[name]


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_rounding_is_to_the_nearest_code(name):
    torch.manual_seed(0)
    weight = (torch.randn(8, 256) * 0.05).bfloat16()
    stored, value = FORMATS[name](weight)
    assert value.dtype == torch.float32
    exact = weight.double().numpy()
    assert np.array_equal(value.double().numpy(), decode(name, {f"m.{k}": v for k, v in stored.items()}, "m"))
    scale = stored["weight_scale"].double().numpy()
    if name == "fp8":
        codes = e4m3(torch.arange(256, dtype=torch.uint8))
        grid = np.unique(codes[np.abs(codes) <= 448]) * 1.0
        nearest = np.abs((exact / scale)[..., None] - grid).min(-1) * scale
    else:
        scale = np.repeat(scale, 128, axis=1)
        nearest = np.abs((exact / scale)[..., None] - np.arange(-8, 8)).min(-1) * scale
    error = np.abs(value.double().numpy() - exact)
    # A quotient in float32 may fall on the other side of a tie; both sides are then equally near.
    np.testing.assert_allclose(error, nearest, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_a_row_of_zeros_stays_zero(name):
    weight = torch.zeros(4, 256, dtype=torch.bfloat16)
    weight[1] = 0.5
    _, value = FORMATS[name](weight)
    assert torch.isfinite(value).all()
    assert (value[0] == 0).all()
    assert value[1] == pytest.approx(torch.full((256,), 0.5), rel=0.07)


def test_config_names_the_format_and_leaves_the_output_embedding_out():
    expected = {"fp8": "float-quantized", "w4a16": "pack-quantized"}
    for name in FORMATS:
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
        assert (activations is not None and activations["dynamic"] and activations["strategy"] == "token") is (
            name == "fp8"
        )


def test_update_survives_bf16_fp8_and_w4a16_and_not_nf4():
    shares = {name: quantized(name)[1]["retained_update"] for name in FORMATS}
    assert shares["fp8"] == pytest.approx(1, abs=0.05)
    assert shares["w4a16"] == pytest.approx(1, abs=0.3)
    assert shares["nf4"] < 0.15


def test_retained_share_equals_its_definition_computed_from_the_files():
    base, updates, _ = merged_run()
    after = quantized("w4a16")[0]
    plain = shared_folder() / "base-bf16"
    write_bf16(base, {}, plain, lambda _: {})
    quantize_checkpoint(plain, shared_folder() / "base-w4a16", "w4a16", base, {}, no_verify)
    before = tensors_in(shared_folder() / "base-w4a16")
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
    base, updates, merged = merged_run()
    share = quantized("nf4")[1]["retained_update"]
    monkeypatch.setattr(quantize_module, "LEAST_RETAINED", share * least)
    with contextlib.nullcontext() if written else pytest.raises(Refused):
        quantize_checkpoint(merged, tmp_path / "nf4", "nf4", base, updates, no_verify)
    assert (tmp_path / "nf4" / "manifest.json").exists() is written


def test_half_of_the_update_is_the_least_that_nf4_has_to_keep():
    assert quantize_module.LEAST_RETAINED == 0.5


def test_nf4_of_the_original_base_keeps_the_update_and_is_written(tmp_path):
    run = shared_run()
    base = BaseCheckpoint(shared_model(), read_json(run.base_file), into="original")
    updates = read_adapter(run.newest_adapter(), base)
    write_bf16(base, updates, tmp_path / "bf16", lambda _: {})
    made = quantize_checkpoint(tmp_path / "bf16", tmp_path / "nf4", "nf4", base, updates, no_verify)
    assert made["retained_update"] > 0.5 > quantized("nf4")[1]["retained_update"]


def test_nf4_of_the_base_alone_has_no_update_to_lose(tmp_path):
    base, _, merged = merged_run()
    assert quantize_checkpoint(merged, tmp_path / "nf4", "nf4", base, {}, no_verify)["retained_update"] is None


def test_an_adapter_that_learned_nothing_has_nothing_to_lose(tmp_path):
    base, updates, _ = merged_run()
    idle = {name: replace(update, b=torch.zeros_like(update.b)) for name, update in updates.items()}
    write_bf16(base, idle, tmp_path / "bf16", lambda _: {})
    for name in FORMATS:
        made = quantize_checkpoint(tmp_path / "bf16", tmp_path / name, name, base, idle, no_verify)
        assert made["retained_update"] is None
        assert read_manifest(tmp_path / name, "checkpoint", deep=True)["format"] == name


def test_the_share_of_no_update_reads_no_tensor(tmp_path):
    assert retained_share(tmp_path / "nowhere", "nf4", merged_run()[0], {}) is None


def test_the_parts_of_two_tensors_are_in_memory_and_not_those_of_a_shard(tmp_path, monkeypatch):
    base, _, merged = merged_run()
    stored: list[list[weakref.ref]] = []
    most, to_fp8, write = 0, FORMATS["fp8"], PartsFile.write

    def watched(weight):
        nonlocal most
        most = max(most, sum(any(part() is not None for part in parts) for parts in stored))
        parts, value = to_fp8(weight)
        stored.append([weakref.ref(part) for part in parts.values()])
        return parts, value

    def slow(*arguments):
        time.sleep(0.01)  # a disk slower than quantizing
        write(*arguments)

    monkeypatch.setitem(FORMATS, "fp8", watched)
    monkeypatch.setattr(PartsFile, "write", slow)
    quantize_checkpoint(merged, tmp_path / "fp8", "fp8", base, {}, no_verify)
    assert len(stored) == len(base.quantized) == 14
    assert 0 < most <= 2


def test_w4a16_of_a_width_that_128_does_not_divide_is_bad_input(tmp_path):
    folder = make_model(tmp_path / "odd", intermediate_size=320)
    base = BaseCheckpoint(folder, hash_nf4_model(load_nf4(folder, device="cpu")))
    with pytest.raises(BadInput, match=r"2 of 14 layers .*down_proj\.weight: 320"):
        check_shapes(base, "w4a16")
    check_shapes(base, "fp8")
