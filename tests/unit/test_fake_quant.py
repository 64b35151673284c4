"""The numbers that training computes with, against the exported checkpoint's, servers' and nvidia-modelopt's."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.linear_kernels import make_layer
from kit.core.errors import BadInput
from kit.core.formats import TRAINED
from kit.core.modelopt_config import LAYOUTS, NO_LAYOUT, read
from kit.weights import quantize, stored_weight
from kit.weights.quantize import (
    effective_peak,
    effective_weight,
    fake_quantize_activation,
    fake_quantize_weight,
    fp8_weight,
    quantized_weight,
    weight_peak,
)
from merge import quantize as export
from tests import processes, sandbox
from tests.conftest import rehearse

ROOT = Path(__file__).parents[2]
NAMES = list(TRAINED)
SHAPE = (256, 384)


def random_weight(shape=SHAPE, seed=0) -> torch.Tensor:
    torch.manual_seed(seed)
    return (0.02 * torch.randn(shape)).bfloat16()


def zero_rows_and_blocks() -> torch.Tensor:
    weight = random_weight(seed=1)
    weight[7], weight[9, 16:48], weight[:128, 128:256] = 0, 0, 0
    return weight


def one_huge_value() -> torch.Tensor:
    weight = random_weight(seed=2)
    weight[3, 5] = 3e4
    return weight


def small_blocks() -> torch.Tensor:
    return (random_weight(seed=3).float() * torch.logspace(-28, 2, SHAPE[0])[:, None]).bfloat16()


def columns_of_one_sign() -> torch.Tensor:
    weight = random_weight(seed=4).abs()
    weight[:, 1::2] *= -1
    weight[1:3] = weight[1:3].abs()
    return weight


def halves_between_codes() -> torch.Tensor:
    """Blocks of 16 with every multiple of 1/8 of a step between 0 and the largest code, of both signs."""
    steps = torch.arange(SHAPE[1]) / 64 * torch.tensor([1.0, -1.0]).repeat(SHAPE[1] // 2)
    weight = steps.repeat(SHAPE[0], 1)
    weight[:, ::16] = 6.0
    return weight.bfloat16()


WEIGHTS = {
    "random": random_weight,
    "zeros": lambda: torch.zeros(SHAPE, dtype=torch.bfloat16),
    "negative zeros": lambda: -torch.zeros(SHAPE, dtype=torch.bfloat16),
    "zero blocks": zero_rows_and_blocks,
    "one huge value": one_huge_value,
    "small blocks": small_blocks,
    "columns of one sign": columns_of_one_sign,
    "halves between codes": halves_between_codes,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_weight_is_what_a_reader_of_the_exported_checkpoint_computes_with(name, kind):
    weight = WEIGHTS[kind]()
    _, expected = export.read_back(TRAINED[name], weight)
    found = fake_quantize_weight(weight.float(), TRAINED[name], weight_peak(weight, TRAINED[name]))
    assert torch.equal(found, expected)
    assert torch.isfinite(found).all()
    # In the model's dtype the same numbers, rounded once.
    assert torch.equal(fake_quantize_weight(weight, TRAINED[name]), expected.bfloat16())


@pytest.mark.parametrize("name", ["nvfp4a16", "nvfp4"])
def test_layers_that_share_a_global_scale_give_what_the_export_of_both_holds(name):
    weight, fmt = random_weight(), TRAINED[name]
    assert fmt.shares_peak and not TRAINED["fp8_static"].shares_peak
    other = torch.tensor(0.9)
    _, expected = export.read_back(fmt, weight, 0.9)
    assert torch.equal(fake_quantize_weight(weight.float(), fmt, other), expected)
    small = small_blocks()
    _, expected = export.read_back(fmt, small, 0.9)
    peak = torch.maximum(weight_peak(small, fmt), other)
    assert torch.equal(fake_quantize_weight(small.float(), fmt, peak), expected)
    assert not torch.equal(fake_quantize_weight(small.float(), fmt, 4096 * peak), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_a_weight_has_the_shape_that_its_scale_has(name):
    shapes = {"fp8": (SHAPE[0], 1), "fp8_static": (), "nvfp4": (), "nvfp4a16": ()}
    peak = weight_peak(random_weight(), TRAINED[name])
    assert (None if peak is None else tuple(peak.shape)) == shapes.get(name)
    assert peak is None or peak.dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in NAMES if name != "w4a16"])
def test_quantizing_what_is_quantized_changes_nothing(name):
    """w4a16's largest code is 7 or 8 steps of 7.5 to a block's peak, so its second pass finds another scale."""
    weight, fmt = random_weight(), TRAINED[name]
    once = fake_quantize_weight(weight.float(), fmt, weight_peak(weight, fmt))
    peak = weight_peak(once, fmt) if fmt.weight.kind == "fp8" else weight_peak(weight, fmt)
    assert torch.equal(fake_quantize_weight(once, fmt, peak), once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_nf4", [True, False])
def test_the_effective_weight_is_the_merged_one(dtype, is_nf4):
    layer = make_layer(SHAPE, dtype, "cpu")
    base = stored_weight.weight_in_torch(layer)
    if not is_nf4:
        layer = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
        base = layer.weight.data
    a, b = torch.randn(8, SHAPE[1]) / 8, torch.randn(SHAPE[0], 8) / 8
    merged = (base.float() + 2.0 * (b @ a)).bfloat16()
    assert torch.equal(effective_weight(layer, a, b, 2.0), merged.to(dtype))
    assert torch.equal(effective_weight(layer), base.bfloat16().to(dtype))
    for fmt in TRAINED.values():
        peak = weight_peak(merged, fmt)
        found = effective_peak(layer, a, b, 2.0, fmt)
        assert (found is None) == (peak is None) and (peak is None or torch.equal(found, peak))
        _, stored = export.read_back(fmt, merged)
        for given in (None, peak):
            assert torch.equal(quantized_weight(layer, a, b, 2.0, fmt, given), stored.to(dtype)), fmt.name


def test_fp8_codes_and_scales_are_the_bytes_of_the_exported_checkpoint():
    layer = make_layer(SHAPE, torch.bfloat16, "cpu")
    a, b = torch.randn(8, SHAPE[1]) / 8, torch.randn(SHAPE[0], 8) / 8
    merged = effective_weight(layer, a, b, 0.5)
    stored = export.store(TRAINED["fp8"], merged, lambda *_: None)
    peak = weight_peak(merged, TRAINED["fp8"])
    codes = fp8_weight(layer, a, b, 0.5, peak)
    assert torch.equal(codes.view(torch.uint8), stored["weight"].view(torch.uint8))
    assert torch.equal(quantize.bf16_scale(peak, 448.0), stored["weight_scale"].float())


def inputs(tokens=50, columns=256) -> torch.Tensor:
    torch.manual_seed(5)
    x = torch.randn(2, tokens, columns) * torch.logspace(-6, 1, tokens)[:, None]
    x[0, 3], x[1, 4, 17] = 0, 70.0
    return x.bfloat16()


def test_fp4_activations_are_those_of_vllms_emulation():
    """Which on a CPU multiplies by the reciprocal of a product of reciprocals, and on a GPU by one quotient, as we do:
    what is halfway between two codes may go to the other one."""
    emulation = pytest.importorskip("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")
    x, fmt = inputs(1000), TRAINED["nvfp4"].activation
    for peak in (0.5, 10.5, 11.3, 70.0):
        scale = torch.tensor([export.input_scales(TRAINED["nvfp4"], peak)["input_global_scale"].item()])
        expected = emulation.ref_nvfp4_quant_dequant(x.flatten(0, 1), scale, 16).view(x.shape)
        found = fake_quantize_activation(x, fmt, torch.tensor(peak))
        assert found.dtype == torch.bfloat16
        differs = found != expected
        is_power = peak == 10.5  # 448 · 6 / 10.5 = 256: all quotients are exact
        assert differs.float().mean() < (1e-9 if is_power else 1e-3), f"{peak}: {int(differs.sum())} differ"
        steps = (found - expected)[differs].abs() / x[differs].abs()
        assert not len(steps) or steps.max() < 2.02  # 0.5 instead of 0, of 0.25


def test_static_fp8_activations_are_those_of_the_exported_scale():
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    x, peak = inputs().float(), 11.3
    scale = export.input_scales(TRAINED["fp8_static"], peak)["input_scale"].float()
    scheme = preset_name_to_scheme("FP8", ["Linear"]).input_activations
    expected = fake_quantize(x, scale, torch.zeros(1), scheme)
    assert torch.equal(fake_quantize_activation(x, TRAINED["fp8_static"].activation, torch.tensor(peak)), expected)


def e4m3(value: np.ndarray) -> np.ndarray:
    """The nearest numbers of E4M3, ties to even, written out."""
    grid = np.array(
        [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    )
    grid = grid[:127]  # the last one is NaN
    size = np.minimum(np.abs(value), 448)
    upper = np.searchsorted(grid, size).clip(1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    takes_upper = (size - low > high - size) | ((size - low == high - size) & (upper % 2 == 0))
    return np.sign(value) * np.where(takes_upper, high, low)


@pytest.mark.parametrize(("name", "group"), [("fp8", 256), ("fp8_block", 128)])
def test_dynamic_fp8_activations_have_a_scale_for_every_token_or_group(name, group):
    x = inputs()
    found = fake_quantize_activation(x, TRAINED[name].activation)
    groups = x.float().numpy().reshape(-1, group)
    least = np.float32(1 / (448 * 512)) if name == "fp8" else np.float32(1e-10) / np.float32(448)
    scale = np.maximum(np.abs(groups).max(1, keepdims=True) / np.float32(448), least).astype(np.float32)
    expected = (e4m3(groups / scale).astype(np.float32) * scale).reshape(x.shape)
    assert found.dtype == torch.bfloat16 and torch.equal(found, torch.from_numpy(expected).bfloat16())


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("peak", [70.0, 11.3, 0.5])
def test_fp4_activations_have_a_scale_for_every_16_values_and_end_at_the_calibrated_range(peak):
    x = inputs()
    found = (
        fake_quantize_activation(x.float(), TRAINED["nvfp4"].activation, torch.tensor(peak)).numpy().reshape(-1, 16)
    )
    groups, by = x.float().numpy().reshape(-1, 16), np.float32(448 * 6) / np.float32(peak)
    # In vLLM's order of operations; it ends at 448, so what is larger is cut off.
    scale = e4m3(by * (np.abs(groups).max(1, keepdims=True) * np.float32(1 / 6)))
    zero = scale[:, 0] == 0
    assert not found[zero].any() and zero.any()
    scale, groups, codes = scale[~zero], groups[~zero], found[~zero] * by / scale[~zero]
    grid = np.concatenate([-E2M1, E2M1])
    steps = np.clip(groups * by / scale, -6, 6)
    assert np.allclose(np.abs(codes[..., None] - grid).min(-1), 0, atol=1e-4)
    # What lies halfway between two numbers may go to either.
    assert (np.abs(codes - steps) <= np.abs(steps[..., None] - grid).min(-1) + 1e-4).all()
    assert np.abs(found).max() <= peak * 1.00001 and np.isfinite(found).all()


def test_e2m1_has_the_nearest_of_its_numbers_and_ties_go_to_even():
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    value = np.linspace(-7, 7, 14 * 64 + 1)  # with every tie
    distance = np.abs(np.abs(value)[:, None] - grid)
    nearest = distance == distance.min(1, keepdims=True)
    even = np.array([0, 2, 4, 6])
    choice = [max(np.flatnonzero(row), key=lambda one: one in even) for row in nearest]
    expected = np.sign(value) * grid[choice]
    assert np.array_equal(quantize.to_e2m1(torch.from_numpy(value).float()).numpy(), expected)


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory) -> tuple[dict, dict, dict]:
    """Values by kind, the scales that they are quantized with, and what nvidia-modelopt says (modelopt_numbers.py)."""
    python = sandbox.side_environment("modelopt") / "bin/python"
    weight, folder = random_weight((96, 256)).float(), tmp_path_factory.mktemp("modelopt")
    values = {"fp8": weight, "int4": weight, "nvfp4": weight, "input": inputs()[0].float()}
    scales = {
        "fp8": quantize.bf16_scale(weight_peak(weight, TRAINED["fp8"]), 448.0),
        "int4": quantize.bf16_scale(weight.unflatten(1, (-1, 128)).abs().amax(-1).view(-1, 1), 7.5),
        "nvfp4": 1 / quantize.global_scale(weight.abs().max()),
        "input": quantize.bf16_scale(torch.tensor(11.3), 448.0),
    }
    largest = {"fp8": 448, "int4": 7, "nvfp4": 448 * 6, "input": 448}
    torch.save({kind: (values[kind], scales[kind] * largest[kind]) for kind in values}, folder / "in.pt")
    command = [python, "tests/unit/modelopt_numbers.py", folder / "in.pt", folder / "out.pt"]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr[-2000:]
    return values, scales, torch.load(folder / "out.pt", weights_only=False)


def test_numbers_are_those_of_nvidia_modelopt_at_equal_scales(modelopt):
    """Its own are no BF16 numbers and no powers of two, and INT4's are 1/7 of a peak, not 1/7.5. It multiplies by a
    scale's reciprocal, so of FP8 the last bit differs, and what is halfway between two codes may go to the other."""
    values, scales, theirs = modelopt
    ours = {
        "fp8": fake_quantize_weight(values["fp8"], TRAINED["fp8"]),
        "int4": fake_quantize_weight(values["int4"], TRAINED["w4a16"]),
        "nvfp4": fake_quantize_weight(values["nvfp4"], TRAINED["nvfp4a16"]),
        "input": fake_quantize_activation(values["input"], TRAINED["fp8_static"].activation, torch.tensor(11.3)),
    }
    found = theirs["numbers"]
    assert torch.equal(found["nvfp4"], ours["nvfp4"])
    for kind in ("fp8", "int4", "input"):
        other = ~torch.isclose(found[kind], ours[kind], rtol=3e-7, atol=0)
        assert other.float().mean() < 1e-3, f"{kind}: {int(other.sum())} of {other.numel()}"
        if kind == "int4":
            steps = values[kind].view(-1, 128) / scales[kind]
            assert torch.allclose(steps[other.view(-1, 128)].frac().abs(), torch.tensor(0.5), atol=1e-5)


def test_named_configurations_are_what_nvidia_modelopt_has_under_the_name(modelopt):
    named = modelopt[2]["configurations"]
    assert set(named) == {*LAYOUTS, *NO_LAYOUT}
    for name, content in named.items():
        if name in LAYOUTS:
            assert read(content, name).name == LAYOUTS[name]
        else:
            with pytest.raises(BadInput, match="cannot be deployed"):
                read(content, name)


def test_the_gpu_kernels_give_the_numbers_of_their_definitions_in_tritons_interpreter():
    assert "ok      nvfp4a16 weight" in rehearse("bench/fake_quant_check.py", "bits")
