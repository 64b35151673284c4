"""What the plan counts for `policy.quant_cfg` and for a teacher: against allocations, and what an H200 measured."""

import dataclasses
import json

import bitsandbytes as bnb
import pytest
import torch

import tests.unit.test_plan_activations as small
from kit.core.errors import BadInput
from kit.core.formats import TRAINED
from kit.plan import cost, memory, quantized, teacher
from kit.plan.fitting import candidates, lay_out
from kit.plan.gpus import CARDS
from kit.plan.layout import make_layout
from kit.plan.recompute import least
from kit.plan.report import counted, summary
from kit.plan.shapes import shape_by_size
from kit.policy import kept_weights, quantized_linear
from kit.weights import quantize, stored_weight
from tests.unit.test_plan_activations import as_on_a_gpu, as_peft_on_a_gpu  # noqa: F401
from tests.unit.test_plan_memory import SHAPE, config

H200, A100 = CARDS["h200"], CARDS["a100-80g"]
SERVED = {"rollout__backend": "server", "server__weights": "bf16", "policy__quant_cfg": "nvfp4a16"}
DISTILLED = SERVED | {"distill__teacher": "base"}
# bench/README.md, "Training for a format": 8 x 2,048 tokens, all linear layers, full recomputation, one H200.
UPDATES = [
    (None, "plain", "torch", 7768, 14.48),
    (None, "fused", "liger", 12114, 13.29),
    ("nvfp4a16", "plain", "liger", 12643, 13.29),
    ("w4a16", "plain", "liger", 12487, 13.29),
    ("fp8", "plain", "liger", 13684, 14.45),
    ("nvfp4", "plain", "liger", 12423, 13.66),
]


def update(fmt, compute="plain", kernels="liger", **keys):
    """The configuration of the measured updates: no reference, the first eighth a prompt."""
    keys = {"rollout__max_prompt_length": 256, "rollout__max_completion_length": 1792, "train__beta": 0.0} | keys
    return config(policy__quant_cfg=fmt, policy__compute=compute, policy__kernels=kernels, **keys)


@pytest.mark.parametrize(("fmt", "compute", "kernels", "speed", "gib"), UPDATES)
def test_updates_in_a_format_are_within_ten_percent_of_what_an_h200_measured(fmt, compute, kernels, speed, gib):
    made = update(fmt, compute, kernels)
    assert memory.allocated(memory.update_parts(SHAPE, made, H200, padded=False)) == pytest.approx(gib, rel=0.1)
    assert 8 * 2048 / cost.update_seconds(SHAPE, made, H200, 8) == pytest.approx(speed, rel=0.1)


# bench/STEP.md, "What is left": 8 x 2,048 tokens whose eighth is one prompt, packed, nothing recomputed, one H200.
LEVERS = [
    ((), 21331, 74.33),
    (("policy__fused_mlp",), 21594, 62.33),
    (("policy__fused_mlp", "train__keep_weights"), 22243, 75.25),
    (("policy__fused_mlp", "train__keep_weights", "train__keep_logits"), 22948, 79.06),
]


@pytest.mark.parametrize(("levers", "speed", "gib"), LEVERS)
def test_what_an_update_keeps_is_within_two_percent_of_what_an_h200_measured(levers, speed, gib):
    packed = {"train__micro_batch_tokens": 256 + 8 * 1792, "train__recompute": "none"}
    made = update(None, "fp8", **packed, **dict.fromkeys(levers, True))
    assert memory.allocated(memory.update_parts(SHAPE, made, H200, padded=False)) == pytest.approx(gib, rel=0.02)
    assert 8 * 2048 / cost.update_seconds(SHAPE, made, H200, 8) == pytest.approx(speed, rel=0.2)


@pytest.fixture
def kernels(monkeypatch):
    """What the kernels of a GPU allocate, without their numbers."""

    def zeros(dtype):
        return lambda layer, *_: torch.zeros(layer.out_features, layer.in_features, dtype=dtype)

    monkeypatch.setattr(quantized_linear, "quantized_weight", zeros(torch.bfloat16))
    monkeypatch.setattr(quantized_linear, "fp8_weight", zeros(torch.float8_e4m3fn))
    sizes = {"fp8": lambda layer: (layer.out_features, 1), "nvfp4": lambda _: ()}  # by the kind of the weights
    monkeypatch.setattr(
        quantized_linear, "effective_peak", lambda layer, *_: torch.ones(sizes[_[-1].weight.kind](layer))
    )
    monkeypatch.setattr(quantized_linear, "fake_quantize_activation", lambda x, *_: torch.empty_like(x))
    monkeypatch.setattr(quantized_linear.Product, "has_fp8_product", lambda self, _: self.quantizers.fmt.name == "fp8")
    monkeypatch.setattr(
        stored_weight,
        "quantize_rows",
        lambda x: (torch.zeros(x.shape, dtype=torch.float8_e4m3fn), torch.ones(len(x), 1)),
    )
    monkeypatch.setattr(
        stored_weight, "scaled_product", lambda x, weight, *others: torch.zeros(len(x), len(weight), dtype=others[-1])
    )


@pytest.mark.parametrize("fmt", ["nvfp4a16", "nvfp4", "fp8"])
def test_quantized_layers_keep_and_peak_at_what_the_plan_says(fmt, kernels, monkeypatch):
    before = small.use_recompute

    def prepare(model, made):
        quantized_linear.use_quantized_linears(model, TRAINED[fmt])
        for module in quantized_linear.quantized_layers(model).values():
            module.product.input_peak = torch.ones(())
        return before(model, made)

    monkeypatch.setattr(small, "use_recompute", prepare)
    sizes = {"hidden": 256, "intermediate": 1024, "head_dim": 64}
    made, shape = small.config("all-linear"), small.shape(4, **sizes)
    made.policy.quant_cfg = fmt
    more = quantized.kept_bytes(shape, made, H200)
    kept = [small.follow(small.shape(n, **sizes), small.config("all-linear", "none"), False, False)[0] for n in (2, 4)]
    predicted = memory.layer_bytes(shape, made, False) + more
    assert (kept[1] - kept[0]) / 2 == pytest.approx(predicted, rel=0.02)
    _, peak = small.follow(shape, small.config("all-linear"), False, True)
    predicted = shape.layers * memory.checkpoint_bytes(shape, made) + memory.backward_bytes(shape, made, False)
    assert peak == pytest.approx(predicted + more + quantized.backward_bytes(shape, made, H200), rel=0.06)


@pytest.mark.parametrize("name", TRAINED)
def test_without_the_kernels_a_weight_and_an_input_take_what_the_plan_says(name):
    fmt, layer = TRAINED[name], bnb.nn.Linear4bit(1024, 256, bias=False, compute_dtype=torch.bfloat16)
    weight = torch.randn(256, 1024, dtype=torch.bfloat16)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=layer)
    layer.to("cpu")
    with small.Allocations(set()) as seen:
        made = quantize.quantized_weight(layer, torch.randn(4, 1024), torch.randn(256, 4), 1.0, fmt)
    assert (
        0.9 * quantized.TORCH_WEIGHT[fmt.weight.kind]
        < seen.peak / made.numel()
        < 1.02 * quantized.TORCH_WEIGHT[fmt.weight.kind]
    )
    if fmt.activation is not None:
        x = torch.randn(64, 2048, dtype=torch.bfloat16)
        with small.Allocations(set()) as seen:
            quantize.fake_quantize_activation(x, fmt.activation, torch.ones(()))
        assert seen.peak / x.numel() < quantized.TORCH_INPUT[fmt.activation.kind]


def test_a_card_without_fp8_makes_a_weight_in_pytorch_and_takes_more_memory_and_time():
    made = update("nvfp4a16")
    new, old = (memory.allocated(memory.update_parts(SHAPE, made, card, padded=False)) for card in (H200, A100))
    assert old - new == pytest.approx(SHAPE.largest_linear * (24 - 2) / memory.GIB)
    plain, quantizing = (cost.update_seconds(SHAPE, update(fmt), A100, 8) for fmt in (None, "nvfp4a16"))
    assert quantizing > 1.1 * plain


def test_small_micro_batches_pay_for_the_weights_more_often():
    one, eight = (
        cost.format_seconds(SHAPE, update("nvfp4a16", train__per_device_train_batch_size=n), H200, 8) for n in (1, 8)
    )
    peaks = cost._peak_seconds(SHAPE, update("nvfp4a16"), H200)
    assert one - peaks == pytest.approx(8 * (eight - peaks))
    assert peaks == pytest.approx(0.03, rel=0.3)


def test_a_format_with_input_ranges_has_a_calibration_and_others_have_none():
    phases = {fmt: memory.trainer_phases(SHAPE, update(fmt), H200) for fmt in (None, *TRAINED)}
    assert [fmt for fmt, found in phases.items() if "calibration" in found] == ["fp8_static", "nvfp4"]
    few, many = (
        memory.allocated(memory.calibration_parts(SHAPE, update("nvfp4", policy__quant_batch_size=n), H200))
        for n in (1, 64)
    )
    assert few < many
    prompts = update("nvfp4", rollout__max_prompt_length=100)
    assert quantized.calibration_tokens(prompts) == 8 * 100


def test_generating_in_process_keeps_the_weights_where_half_of_the_free_memory_holds_them():
    assert memory.ROOM_FOR_KEPT == kept_weights.ROOM_FOR_KEPT
    whole = 2 * SHAPE.linear_weights / memory.GIB
    for fmt in ("w4a16", None):
        roomy, tight = (memory.generation_parts(SHAPE, update(fmt), CARDS[name]) for name in ("h200", "rtx4090"))
        assert roomy[memory.KEPT] == pytest.approx(whole)
        assert memory.KEPT not in tight and 0 <= tight.get("weight", 0.0) < 0.2 and ("weight" in tight) == bool(fmt)
        limited = memory.generation_parts(SHAPE, update(fmt, train__max_gpu_gib=24), H200)
        assert memory.KEPT not in limited and limited.get("weight") == tight.get("weight")
        for mode, is_kept in (("never", False), ("always", True)):
            made = update(fmt, rollout__keep_weights=mode)
            assert (memory.KEPT in memory.generation_parts(SHAPE, made, CARDS["h200"])) == is_kept
            assert (memory.KEPT in memory.generation_parts(SHAPE, made, CARDS["rtx4090"])) == is_kept
    codes = memory.generation_parts(SHAPE, update("fp8", rollout__keep_weights="always"), H200)
    assert memory.KEPT not in codes and 0 < codes["weight"] < 0.2  # codes are made for every product
    half = memory.generation_parts(SHAPE, update(None, compute="fp8"), H200)  # a byte each
    assert half[memory.KEPT] == pytest.approx(whole / 2)
    for base in ("fp8", "none"):
        stored = update(None, policy__quantization=base, rollout__keep_weights="always")
        assert memory.KEPT not in memory.generation_parts(SHAPE, stored, H200)
    slow = cost.own_seconds(SHAPE, update("w4a16"), CARDS["rtx4090"], 64)
    assert slow > cost.own_seconds(SHAPE, update(None), CARDS["rtx4090"], 64)
    assert "Rollouts keep dequantized weights" in counted(lay_out(SHAPE, update(None), H200, 1))
    assert counted(lay_out(SHAPE, update(None, rollout__keep_weights="never"), H200, 1)) is None


def served(**keys):
    return lay_out(SHAPE, config(**SERVED | keys), H200, 2)


def test_a_server_holds_what_the_format_is_served_as():
    right = served(server__kv_cache_gib=10.0)
    assert right.fits and right.server["weights"] == pytest.approx(2 * SHAPE.linear_weights / memory.GIB)
    wrong = served(server__weights="fp8_per_channel")
    assert not wrong.fits and "Set server.weights to bf16." in wrong.faults[0]
    with pytest.raises(BadInput, match=r"Set server\.weights to bf16"):  # no matter of memory, and no card changes it
        make_layout(config(**SERVED | {"server__weights": "fp8_per_channel"}), SHAPE, H200, 2)
    folds = {
        fmt: served(policy__quant_cfg=fmt, server__weights=held).server["folding a layer"]
        for fmt, held in (("nvfp4a16", "bf16"), ("fp8", "fp8_per_channel"))
    }
    assert folds["fp8"] - folds["nvfp4a16"] == pytest.approx(4 * 2 * SHAPE.hidden * SHAPE.intermediate / memory.GIB)
    assert not any("server.weights" in keys for keys, _ in candidates(right))


def test_a_card_without_fp8_is_not_told_to_serve_an_fp8_format_in_bf16():
    layout = lay_out(
        SHAPE, config(**SERVED | {"policy__quant_cfg": "fp8", "server__weights": "fp8_per_channel"}), A100, 2
    )
    assert ["Use fp8_static, w4a16" in one for one in layout.faults] == [True]
    assert not any("server.weights" in keys for keys, _ in candidates(layout))


def test_a_shape_that_a_format_does_not_divide_does_not_fit():
    odd = dataclasses.replace(SHAPE, intermediate=12288 + 32)
    layout = lay_out(odd, config(**SERVED | {"policy__quant_cfg": "w4a16"}), H200, 2)
    assert "needs groups of 128 or 64 inputs" in layout.faults[0] and not layout.fits


def test_a_teacher_takes_nothing_an_adapter_or_a_second_model():
    def taken(**keys):
        found = memory.resident(SHAPE, config(**SERVED | keys), H200)
        return {name: gib for name, gib in found.items() if name in memory.TEACHER}

    assert taken(distill__teacher="base") == {}
    adapter = 4 * SHAPE.adapter_weights(16, "all-linear") / memory.GIB
    assert taken(distill__teacher_adapter="runs/x") == {"teacher's adapter": pytest.approx(adapter)}
    other, small_one = taken(distill__teacher="Qwen/Qwen3-14B"), shape_by_size("14b")
    assert list(other) == ["teacher's NF4 weights", "teacher's 16-bit layers"]
    assert other["teacher's NF4 weights"] == pytest.approx(
        small_one.linear_weights * memory.nf4_bytes(True) / memory.GIB
    )
    with pytest.raises(BadInput, match=r"^distill\.teacher: the config of someone/else"):
        taken(distill__teacher="someone/else")


def test_the_teachers_shape_is_read_from_its_directory(tmp_path):
    facts = {"model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    facts |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 347}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": True}))
    made = config(**DISTILLED | {"distill__teacher": str(tmp_path)})
    assert teacher.shape_of(SHAPE, made).layers == 4
    assert teacher.states_gib(SHAPE, made, 1000) == 1000 * 512 * 2 / memory.GIB


def test_a_distillation_has_a_teachers_pass_and_no_reference():
    phases = memory.trainer_phases(SHAPE, config(**DISTILLED), H200)
    assert list(phases) == ["rollout", "teacher", "update"]
    assert memory.allocated(phases["teacher"]) < memory.allocated(phases["update"])
    with_beta, without = (cost.update_seconds(SHAPE, config(**DISTILLED, train__beta=b), H200, 64) for b in (0.1, 0.0))
    assert with_beta == without > cost.update_seconds(SHAPE, config(**SERVED, train__beta=0.0), H200, 64)
    large = DISTILLED | {"distill__teacher": "Qwen/Qwen3-14B"}
    assert cost.update_seconds(SHAPE, config(**large), H200, 64) > with_beta
    js = DISTILLED | {"distill__divergence": "js"}
    assert cost.update_seconds(SHAPE, config(**js), H200, 64) > with_beta


def test_the_divergence_takes_the_tiles_that_the_plan_says(monkeypatch):
    from trl.kernels import chunked_divergence

    from kit.train.distill_trainer import Head, divergence

    for name in ("_stats_tile", "_backward_tile", "_addmm_fp32"):
        monkeypatch.setattr(chunked_divergence, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(chunked_divergence, "_project", lambda tile, *_: tile.zero_())
    monkeypatch.setattr(chunked_divergence, "TOKEN_CHUNK_SIZE", 64)
    states, words, hidden = 300, 40_000, 128
    head = Head(torch.zeros(words, hidden, dtype=torch.bfloat16), None, 1.0, None)
    student, other = (torch.zeros(states, hidden, dtype=torch.bfloat16) for _ in range(2))
    there = {one.untyped_storage()._cdata for one in (head.weight, student, other)}
    with small.Allocations(there) as seen:
        divergence(student.requires_grad_(), head, other, head, 1.0, 1.0)[0].sum().backward()
    made = config(**DISTILLED, distill__chunk_tokens=64)
    tiles = teacher.tiles_gib(SHAPE, made, states, H200) * memory.GIB
    assert seen.peak == pytest.approx(tiles + 4 * states * hidden, rel=0.05)


def test_a_teacher_leaves_less_room_and_auto_recomputes_more():
    keys = DISTILLED | {"train__micro_batch_tokens": 17408, "rollout__max_completion_length": 1024}
    own, other = (
        least(SHAPE, config(**keys | {"distill__teacher": name}), CARDS["h100-80g"], 1, 0)
        for name in ("base", "Qwen/Qwen3-32B")
    )
    assert own == ("selective", 0.25) and other == ("selective", 0.75)


def test_the_report_says_what_it_counted():
    assert counted(lay_out(SHAPE, config(rollout__keep_weights="never"), H200, 1)) is None
    text = counted(lay_out(SHAPE, config(**DISTILLED), H200, 2))
    assert text.startswith("Trained for nvfp4a16, served as bf16: each weight is quantized for its matmul")
    assert "Distilled from the base: an update has a pass of the teacher (" in text
    assert "4 matmuls with the student's head and 2 with the teacher's" in text and "not measured" in text
    layout = lay_out(SHAPE, config(**DISTILLED), CARDS["cpu"] if "cpu" in CARDS else CARDS["l4"], 2)
    assert counted(layout) in summary(layout)
