"""The diagnostics' figures against NumPy, what is null instead of NaN, sums over layers, and the verdict's words."""

import json
import math

import numpy as np
import pytest
import scipy.stats
import torch

from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.weights.frozen_base import BaseCheckpoint
from kit.weights.read_quantized import StoredWeights, unscaled
from merge.diagnose import Diagnosis, computed, parse_arguments
from merge.diagnose_layer import distribution, measure_layer, ratio, shuffled
from merge.diagnose_plot import draw
from merge.diagnose_report import markdown
from merge.diagnose_verdict import (
    compare_errors,
    depth,
    error_verdict,
    grouped,
    module_type,
    noise_verdict,
    pool,
    pool_weights,
    summarize,
    verdict,
)
from merge.quantize import WRITERS, read_back
from tests.unit.merge_fixture import alter_adapter, make_model, make_run, shared_model, shared_run

NAME = "model.layers.3.self_attn.q_proj"


def coarse(module, policy, weight):
    """A format that keeps multiples of 0.05."""
    return torch.round(weight / 0.05) * 0.05


def hand_made(out=24, width=256, seed=0):
    """(weight, update) with a heavy tail, an offset mean, and a low-rank update."""
    random = np.random.default_rng(seed)
    weight = random.standard_t(3, (out, width)) * 0.05 + 0.01
    delta = 0.01 * random.normal(size=(out, 2)) @ random.normal(size=(2, width))
    return torch.from_numpy(weight).float(), torch.from_numpy(delta).float()


def layer(name, before, after, update=1.0, size=10.0, control=None, snr=0.5, retained=1.0, fmt="x"):
    """A record of diagnostics.json with one format."""
    error = {"base": before, "grpo": after}
    figures = {"error": error, "snr": snr, "retained": retained, "control_error": control}
    pair = {"base": 0.0, "grpo": 0.0}
    return {
        "name": name,
        "shape": [4, 4],
        "update_norm": update,
        "weight_norm": {"base": size, "grpo": size},
        "relative_update": update / size,
        **{"kurtosis": pair, "outlier_fraction": pair, "beyond_6_medians": pair},
        "formats": {fmt: figures},
    }


def result_of(layers, formats=("x",), into="original"):
    return {
        "date": "2026-11-21T00:00:00+0000",
        "command": ["python", "-m", "merge", "diagnose", "--run", "runs/tiny"],
        "versions": {"torch": "2"},
        "adapter_version": 1,
        "into": into,
        "notes": [],
        "layers": layers,
        **summarize(layers, list(formats)),
    }


@pytest.mark.parametrize("fmt", ["coarse", "w4a16", "fp8", "bf16"])
def test_every_figure_of_a_layer_equals_its_definition_in_numpy(fmt):
    weight, delta = hand_made()
    rounded = lambda m, p, w: w.bfloat16().float()  # noqa: E731
    readers = {"coarse": coarse, "bf16": rounded}
    if fmt not in readers:
        readers[fmt] = lambda m, p, w: read_back(FORMATS[fmt], w.bfloat16())[1]
    found = measure_layer(NAME, weight, delta, {fmt: readers[fmt]})

    w, d = weight.double().numpy(), delta.double().numpy()
    after = (weight + delta).double().numpy()  # the merge's own float32 sum
    q, q_after = (readers[fmt]("", "", torch.from_numpy(x).float()).double().numpy() for x in (w, after))
    norm = np.linalg.norm
    assert found["shape"] == [24, 256]
    assert found["update_norm"] == pytest.approx(norm(d), rel=1e-6)
    assert found["relative_update"] == pytest.approx(norm(d) / norm(w), rel=1e-6)
    assert found["weight_norm"]["grpo"] == pytest.approx(norm(after), rel=1e-6)
    for policy, x in (("base", w), ("grpo", after)):
        assert found["kurtosis"][policy] == pytest.approx(scipy.stats.kurtosis(x, axis=None), rel=1e-5)
        assert found["outlier_fraction"][policy] == (np.abs(x) > 6 * x.std()).mean() > 0
        # torch takes the lower of the two middle values
        middle = np.sort(np.abs(x), axis=None)[x.size // 2 - 1]
        assert found["beyond_6_medians"][policy] == (np.abs(x) > 6 * middle).mean() > 0
    figures = found["formats"][fmt]
    assert figures["error"]["base"] == pytest.approx(norm(q - w) / norm(w), rel=1e-5)
    assert figures["error"]["grpo"] == pytest.approx(norm(q_after - after) / norm(after), rel=1e-5)
    assert figures["snr"] == pytest.approx(norm(d) / norm(q_after - after), rel=1e-5)
    assert figures["retained"] == pytest.approx(((q_after - q) * d).sum() / (d * d).sum(), rel=1e-5)


def test_the_control_is_the_error_of_the_weights_plus_the_shuffled_update():
    weight, delta = hand_made()
    found = measure_layer(NAME, weight, delta, {"coarse": coarse})["formats"]["coarse"]
    twin = (weight + shuffled(NAME, delta)).double().numpy()
    value = coarse("", "", torch.from_numpy(twin)).numpy()
    assert found["control_error"] == pytest.approx(np.linalg.norm(value - twin) / np.linalg.norm(twin), rel=1e-4)
    without = measure_layer(NAME, weight, delta, {"coarse": coarse}, control=False)["formats"]["coarse"]
    assert without == {**found, "control_error": None}


def test_a_shuffled_update_has_the_same_entries_and_singular_values_at_other_places():
    _, delta = hand_made()
    other = shuffled(NAME, delta)
    assert torch.equal(other.flatten().sort()[0], delta.flatten().sort()[0])
    values = [torch.linalg.svdvals(x.double())[:2] for x in (delta, other)]
    torch.testing.assert_close(*values)
    assert torch.equal(other, shuffled(NAME, delta))
    for axis in (0, 1):  # both rows and columns lie in another order
        norms = [torch.linalg.norm(x, dim=axis) for x in (delta, other)]
        torch.testing.assert_close(*(n.sort()[0] for n in norms))
        assert not torch.allclose(*norms)
    assert abs((other * delta).sum() / (delta * delta).sum()) < 0.3


@pytest.mark.parametrize("delta", [None, torch.zeros(24, 256)], ids=["not adapted", "adapter of zero"])
def test_no_update_gives_null_and_never_nan(delta):
    weight, _ = hand_made()
    found = measure_layer(NAME, weight, delta, {"coarse": coarse})
    json.dumps(found, allow_nan=False)
    assert (found["update_norm"], found["relative_update"]) == (0.0, 0.0)
    figures = found["formats"]["coarse"]
    assert figures["snr"] is figures["retained"] is figures["control_error"] is None
    assert figures["error"]["base"] == figures["error"]["grpo"] > 0
    assert found["kurtosis"]["base"] == found["kurtosis"]["grpo"]


def test_a_layer_that_is_all_outliers_and_one_without_spread():
    weight = 1 + 0.01 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = distribution(weight)
    assert found["outlier_fraction"] == 1.0
    assert found["beyond_6_medians"] == 0.0
    assert abs(found["kurtosis"]) < 0.3
    nothing = {"kurtosis": None, "outlier_fraction": None, "beyond_6_medians": None}
    assert distribution(torch.full((7, 9), 0.1)) == nothing
    assert distribution(torch.zeros(7, 9)) == nothing


def test_weights_near_the_end_of_float32_keep_their_kurtosis():
    weight, _ = hand_made()
    ordinary = distribution(weight)
    assert distribution(weight * 1e-12)["kurtosis"] == pytest.approx(ordinary["kurtosis"], rel=1e-4)
    assert distribution(weight * 1e12)["outlier_fraction"] == ordinary["outlier_fraction"]


def test_what_has_no_divisor_is_null():
    exact = {"exact": lambda m, p, w: w}
    weight, delta = hand_made()
    figures = measure_layer(NAME, weight, delta, exact)["formats"]["exact"]
    assert (figures["error"], figures["snr"]) == ({"base": 0.0, "grpo": 0.0}, None)
    assert figures["retained"] == pytest.approx(1, rel=1e-4)
    empty = measure_layer(NAME, torch.zeros(4, 8), torch.ones(4, 8), exact)
    json.dumps(empty, allow_nan=False)
    assert empty["relative_update"] is None
    assert empty["formats"]["exact"]["error"]["base"] is None
    assert ratio(1.0, 0.0) is ratio(None, 1.0) is ratio(math.inf, 1.0) is ratio(1.0, None) is None


def test_formats_that_store_the_same_weights_are_computed_once(monkeypatch):
    calls = []

    def store(_, weight, use, __):
        calls.append(weight.dtype)
        use(0, weight.float())
        return {}

    weight, delta = hand_made()
    monkeypatch.setitem(WRITERS, "nvfp4-pack-quantized", store)
    readers = {"one": computed(FORMATS["nvfp4"]), "two": computed(FORMATS["nvfp4a16"])}
    found = measure_layer(NAME, weight, delta, readers)["formats"]
    assert list(found) == ["one", "two"] and found["one"] == found["two"]
    assert calls == [torch.bfloat16] * 3  # before, after, shuffled


def test_a_format_whose_base_is_unknown_still_has_its_error_after_rl():
    weight, delta = hand_made()
    only_after = {"x": lambda m, policy, w: coarse(m, policy, w) if policy == "grpo" else None}
    figures = measure_layer(NAME, weight, delta, only_after)["formats"]["x"]
    assert figures["error"]["base"] is figures["retained"] is figures["control_error"] is None
    assert figures["error"]["grpo"] > 0 < figures["snr"]
    assert pool([measure_layer(NAME, weight, delta, only_after)], "x")["error"]["base"] is None


def test_pooled_figures_are_those_of_the_layers_as_one_tensor():
    parts = [hand_made(seed=1), hand_made(out=60, seed=2)]
    parts[1] = (parts[1][0] * 7, parts[1][1] * 3)
    records = [measure_layer(f"model.layers.{i}.mlp.up_proj", *part, {"c": coarse}) for i, part in enumerate(parts)]
    whole = measure_layer("all", *(torch.cat(rows) for rows in zip(*parts, strict=True)), {"c": coarse}, False)
    found = pool(records, "c")
    assert found["error"] == pytest.approx(whole["formats"]["c"]["error"], rel=1e-5)
    for key in ("snr", "retained"):
        assert found[key] == pytest.approx(whole["formats"]["c"][key], rel=1e-5)
    weights = pool_weights(records)
    assert weights["relative_update"] == pytest.approx(whole["relative_update"], rel=1e-5)
    shares = [record["outlier_fraction"]["base"] for record in records]
    expected = (24 * shares[0] + 60 * shares[1]) / 84
    assert weights["outlier_fraction"]["base"] == pytest.approx(expected)


def test_an_unadapted_layer_counts_for_the_error_and_not_for_the_noise_that_the_update_meets():
    records = [layer("layers.0.q_proj", 0.1, 0.2), layer("layers.0.k_proj", 0.3, 0.3, 0.0, snr=None, retained=None)]
    found = pool(records, "x")
    assert found["error"]["base"] == pytest.approx(math.sqrt((0.1**2 + 0.3**2) / 2))
    assert found["snr"] == pytest.approx(1 / (0.2 * 10))
    assert compare_errors(records, "x", ("base", "grpo"))["layers"] == 1


def test_paired_comparison_counts_layers_tests_signs_and_resamples_decoder_layers():
    names = [f"model.layers.{i}.mlp.{m}_proj" for i in range(10) for m in ("up", "down")]
    records = [layer(n, 0.1, 0.1 * (0.98 if i == 0 else 1.03 + 0.001 * i)) for i, n in enumerate(names)]
    found = compare_errors(records, "x", ("base", "grpo"))
    assert (found["larger"], found["smaller"], found["layers"]) == (19, 1, 20)
    assert (found["unit"], found["units"]) == ("decoder layer", 10)
    assert found["sign_test_p"] == pytest.approx(2 * (1 + 20) / 2**20)
    after = np.array([record["formats"]["x"]["error"]["grpo"] for record in records])
    assert found["change"] == pytest.approx(np.sqrt((after**2).mean()) / 0.1 - 1)
    # The same percentile bootstrap, drawn another way.
    squares, random = (after**2).reshape(10, 2).sum(1), np.random.default_rng(5)
    means = squares[random.integers(0, 10, (20_000, 10))].sum(1) / 20
    low, high = np.quantile(np.sqrt(means) / 0.1 - 1, [0.025, 0.975])
    assert found["interval"] == pytest.approx([low, high], abs=1e-3)
    few = compare_errors(records[:6], "x", ("base", "grpo"))
    assert (few["unit"], few["units"]) == ("linear layer", 6)


def test_a_comparison_of_nothing_is_none_and_one_layer_has_no_interval():
    assert compare_errors([layer("a.0.q_proj", None, 0.1)], "x", ("base", "grpo")) is None
    assert compare_errors([layer("a.0.q_proj", 0.0, 0.1)], "x", ("base", "grpo")) is None
    assert compare_errors([layer("a.0.q_proj", 0.1, 0.1, update=0.0)], "x", ("base", "grpo")) is None
    one = compare_errors([layer("a.0.q_proj", 0.1, 0.1)], "x", ("base", "grpo"))
    assert (one["interval"], one["sign_test_p"], one["change"]) == (None, None, 0.0)


def stack(change, spread=0.0, control=None, before=0.1, depths=12):
    """Records whose error changes by `change`, in half of the layers by ± `spread` more."""
    found = []
    for i in range(depths):
        after = before * (1 + change + (spread if i % 2 else -spread))
        shuffled_error = None if control is None else before * (1 + control)
        found.append(layer(f"model.layers.{i}.mlp.up_proj", before, after, control=shuffled_error))
    return found


def lone(change, size):
    """One record of a far larger layer: most layers do not speak for most of the weights."""
    return [layer("model.layers.99.mlp.up_proj", 0.1, 0.1 * (1 + change), size=size)]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (stack(0.05, control=0.0), "It quantizes less cleanly. A shuffled update of the same size does not"),
        (stack(0.05, control=0.05), "It quantizes less cleanly. So does a shuffled update of the same size"),
        (stack(0.05), "It quantizes less cleanly."),
        (stack(-0.05), "It quantizes more cleanly."),
        (stack(0.004), "less cleanly, by under 1 % of the error: small"),
        (stack(0.01, 0.05), "No evidence of a change that the layers share"),
        (stack(0.05, depths=3), "No evidence of a change that the layers share"),
        ([*stack(0.05), *lone(-0.05, 1000.0)], "larger in 12 of 13 layers, sign test p 0.0034. No evidence"),
        (stack(0.0, before=0.0), "nothing to compare"),
        ([layer("layers.0.q_proj", None, 0.1)], "not known"),
        ([layer("layers.0.q_proj", 0.001, 0.1)], "says nothing about training"),
    ],
)
def test_the_verdict_on_the_error_says_what_the_layers_show(records, words):
    found = summarize(records, ["x"])
    assert words in error_verdict("x", found["summary"]["x"], found["comparison"]["x"])


@pytest.mark.parametrize(
    ("snr", "retained", "words"),
    [
        (3.0, 0.99, "above the quantization noise (‖Δ‖/noise 3;"),
        (0.2, 1.0, "not directed against it"),
        (0.2, 0.05, "most of what was learned is rounded away"),
        (0.2, 0.7, "70.0 % of it is kept."),
        (0.2, None, "below the quantization noise"),
        (None, None, "is unknown"),
    ],
)
def test_the_verdict_on_the_noise_tells_smaller_from_lost(snr, retained, words):
    text = noise_verdict("x", {"snr": snr, "retained": retained}, {"layers_above_noise": 0}, 7)
    assert words in text


def test_the_whole_verdict_is_cautious_and_silent_without_an_update():
    lines = verdict(result_of(stack(0.05, control=0.0), into="dequantized"))
    assert "Layers of one model are not independent" in lines[-1]
    assert "Weight error is not accuracy" in lines[-1]
    assert "--into original" in lines[-2]
    assert not any("--into original" in line for line in verdict(result_of(stack(0.05))))
    idle = [layer("layers.0.q_proj", 0.1, 0.1, 0.0, snr=None, retained=None)]
    assert verdict(result_of(idle)) == [
        "The adapter changes none of the 1 layers, so there is nothing to say about training."
    ]


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    [
        ("model.layers.3.self_attn.q_proj", "q", 3),
        ("model.layers.11.mlp.gate_proj", "gate", 11),
        ("model.layers.2.mlp.experts.7.down_proj", "down", 2),
        ("transformer.h.4.attn.c_attn", "c_attn", 4),
        ("lm_head", "lm_head", -1),
    ],
)
def test_module_type_and_depth_are_read_from_the_name(name, kind, place):
    assert (module_type(name), depth(name)) == (kind, place)


def test_groups_keep_the_usual_order_of_modules_and_of_depths():
    names = [f"model.layers.{i}.x.{m}_proj" for i in (10, 2) for m in ("down", "zz", "q", "v")]
    records = [layer(name, 0.1, 0.1) for name in names]
    assert list(grouped(records, module_type)) == ["q", "v", "down", "zz"]
    assert list(grouped(records, depth)) == ["2", "10"]


@pytest.mark.parametrize("name", ["w4a16", "fp8"])
def test_stored_weights_are_what_the_format_said_its_reader_computes_with(name, tmp_path):
    from safetensors.torch import save_file

    from merge.quantize import quantization_config

    weight = hand_made()[0].bfloat16()
    parts, value = read_back(FORMATS[name], weight)
    save_file({f"m.q_proj.{key}": part for key, part in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config(FORMATS[name], [])}))
    stored = StoredWeights(tmp_path)
    torch.testing.assert_close(stored.weight("m.q_proj"), value, rtol=0, atol=0)
    assert stored.weight("m.k_proj") is None


def test_a_checkpoint_of_another_layout_is_not_read(tmp_path):
    for settings in ({}, {"quantization_config": {"quant_method": "bitsandbytes"}}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(BadInput, match="only compressed-tensors weights are read"):
            StoredWeights(tmp_path)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_scales_between_layers_are_taken_out_and_the_error_stays(spread):
    random = np.random.default_rng(3)
    weight = torch.from_numpy(random.normal(size=(192, 256)) * 0.05).float()
    rows, columns = (torch.from_numpy(np.exp(spread * random.normal(size=n))).float() for n in (192, 256))
    scaled = rows[:, None] * weight * columns
    value = read_back(FORMATS["w4a16"], scaled.bfloat16())[1]
    found, known = unscaled(value, weight), value / (rows[:, None] * columns)
    errors = [(torch.linalg.norm(x - weight) / torch.linalg.norm(weight)).item() for x in (found, known)]
    # At a spread of 1, which no calibration gives, most of some columns rounds to zero and a third of W is lost.
    assert errors[0] == pytest.approx(errors[1], rel=0.03 if spread < 1 else 0.35)
    assert errors[1] > 0.05
    torch.testing.assert_close(unscaled(weight.clone(), weight), weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "/nowhere/run"], "no run directory"),
        (["--formats", "fp9"], "fp9 is not a format"),
        (["--formats", "awq"], "awq needs more than the weights.*--policy grpo --format awq"),
        (["--layers", "("], "not a regular expression"),
        (["--layers", "conv"], "none of the 14 quantized layers"),
        (["--base", "/nowhere/base"], "no checkpoint at"),
        (["--adapter", "stranger"], "trained on another base"),
        (["--adapter", "dora"], "DoRA"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_wrong_input_is_refused_before_any_weight_is_read(arguments, message, tmp_path, monkeypatch):
    run = shared_run()
    changes = {"stranger": {"base_hash": "0" * 64}, "dora": {"config": {"use_dora": True}}}
    if arguments[-1] in changes:
        arguments = ["--adapter", str(alter_adapter(run, tmp_path / "adapter", **changes[arguments[-1]]))]

    def no_weights(*_):
        raise AssertionError("a base weight was read")

    for reader in ("tensor", "read"):
        monkeypatch.setattr(BaseCheckpoint, reader, no_weights)
    own = [] if "--run" in arguments else ["--run", str(run.path)]
    with pytest.raises(BadInput, match=message):
        Diagnosis(parse_arguments([*own, *arguments]))


def test_an_update_of_a_layer_that_stays_unquantized_is_noted(tmp_path):
    run = make_run(tmp_path / "run", shared_model(False), target_modules=["lm_head", "q_proj"])
    found = Diagnosis(parse_arguments(["--run", str(run.path), "--formats", "fp8"]))
    assert found.notes == ["the adapter changes 1 layers that no format quantizes, which are left out: lm_head.weight"]
    assert sum(layer["update_norm"] > 0 for layer in found.layers()) == 2


def test_the_original_base_is_measured_only_when_it_is_the_run_s_own(tmp_path):
    from kit.core.errors import CheckFailed

    other = make_model(tmp_path / "other", seed=9)
    arguments = ["--run", str(shared_run().path), "--formats", "fp8", "--into", "original"]
    with pytest.raises(CheckFailed, match="is not the base"):
        Diagnosis(parse_arguments([*arguments, "--base", str(other)])).layers()
    found = Diagnosis(parse_arguments([*arguments, "--base", str(shared_model())])).layers()
    assert len(found) == 14


@pytest.mark.parametrize(
    "records",
    [
        stack(0.05),
        stack(0.0)[:1],
        [layer("lm_head", 0.1, 0.1, 0.0, snr=None)],
        [layer(f"model.layers.{i}.mlp.experts.{e}.up_proj", 0.1, 0.11) for i in range(40) for e in range(3)],
    ],
    ids=["usual", "one layer", "no update", "experts"],
)
def test_picture_and_markdown_are_made_of_any_result(records, tmp_path):
    result = result_of(records)
    result["verdict"] = verdict(result)
    draw(result, tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"
    assert [file.name for file in tmp_path.iterdir()] == ["d.png"]
    text = markdown(result, "d.png")
    assert "| x |" in text and "![per layer](d.png)" in text and "nan" not in text
