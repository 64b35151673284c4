"""Quantized layers of a small model: which these are, when they quantize, and what calibration finds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import FORMATS
from kit.core.run_directory import write_manifest
from kit.policy import quantized_linear
from kit.policy.calibration import batches, calibrate, set_input_ranges
from kit.policy.kept_weights import keeping_weights
from kit.policy.quantized_linear import Quantizers, quantizers_of, quantizers_off, use_quantized_linears
from kit.weights.frozen_base import disable_cpu_repacking
from kit.weights.quantize import fake_quantize_activation, fake_quantize_weight
from tests.conftest import CONFIG

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def small_model(
    in_nf4: tuple[str, ...] = ALL, tied: bool = False, adapted: str | list[str] | None = "all-linear"
) -> Any:
    """A decoder layer of random weights, some of them in NF4, with an adapter that is not zero."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 128, "vocab_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in in_nf4:
            made = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False, compute_dtype=torch.float32)
            made.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=made)
            model.set_submodule(name, made.to("cpu"))
    disable_cpu_repacking(model)
    model.requires_grad_(False)
    if adapted is None:
        return model
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=adapted, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter.data, std=0.02)
    return model.eval()


IDS = torch.arange(20).view(2, 10)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


# Which layers, and when.


@pytest.mark.parametrize("adapted", ["all-linear", ["q_proj", "down_proj"], None])
@pytest.mark.parametrize(
    ("in_nf4", "tied", "quantized"),
    [
        (ALL, False, set(ALL)),
        (ALL, True, set(ALL)),
        # What the base leaves unquantized beside NF4, an export leaves so too.
        (("q_proj", "up_proj"), False, {"q_proj", "up_proj"}),
        ((), False, set(ALL)),
        ((), True, set(ALL)),
    ],
)
def test_the_layers_that_an_export_quantizes_are_quantized_and_no_others(in_nf4, tied, quantized, adapted):
    model = small_model(in_nf4, tied, adapted)
    seen: dict[str, tuple] = {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in (*ALL, "lm_head"):
            module.register_forward_hook(lambda m, x, y, leaf=leaf: seen.update({leaf: (m, x[0], y)}))
    assert use_quantized_linears(model, FORMATS["fp8"]) == len(quantized)
    logits(model)
    assert seen.keys() == {*ALL, "lm_head"}
    for leaf, (module, x, y) in seen.items():
        with torch.no_grad(), quantizers_off(model):
            differs = (module(x) - y).abs().max() > 1e-4
        assert differs == (leaf in quantized), leaf


def test_quantizers_that_are_off_stay_off_until_the_outermost_block_ends():
    model = small_model()
    plain = logits(model)
    use_quantized_linears(model, FORMATS["nvfp4a16"])
    quantized = logits(model)
    assert not torch.allclose(plain, quantized, atol=1e-3)
    with quantizers_off(model):
        assert torch.equal(logits(model), plain)
        with quantizers_off(model):
            assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model), plain), "the inner block's end is not the outer one's"
        with pytest.raises(ZeroDivisionError), quantizers_off(model):
            raise ZeroDivisionError
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), quantized)
    with pytest.raises(ZeroDivisionError), quantizers_off(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), quantized)


def test_kept_weights_follow_the_adapter_and_are_let_go():
    model = small_model()
    use_quantized_linears(model, FORMATS["nvfp4a16"])
    factor = next(one for name, one in model.named_parameters() if "down_proj.lora_B" in name)
    before = logits(model)
    with keeping_weights(model):
        assert torch.equal(logits(model), before) and torch.equal(logits(model), before)
        with torch.no_grad():
            factor.mul_(40)
        within = logits(model)
        with torch.no_grad(), model.disable_adapter():
            reference = logits(model)
    layers = quantized_linear.quantized_layers(model).values()
    assert all(one.product._kept is None for one in layers) and len(layers) == 7
    assert torch.equal(logits(model), within) and not torch.allclose(within, before, atol=1e-3)
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(logits(model), reference)
    assert all(one.product._kept is None for one in layers), "outside of the block none is kept"


def test_what_lies_beyond_a_range_is_counted_over_all_calls_and_tokens():
    quantizers = Quantizers(FORMATS["nvfp4"])
    rows = torch.full((1024, 4), 0.5)
    rows[512:, 0] = -3.0  # of half of the tokens a quarter
    quantizers.watch(rows, torch.tensor(1.0))
    found = quantizers.watched()
    assert found == {"quant_clip_fraction": pytest.approx(1 / 8), "quant_peak_ratio": 3.0}
    assert quantizers.watched() == {}
    for value in (0.5, 2.0, 1.0):  # a third is beyond; on the range is within
        quantizers.watch(torch.full((10, 4), value), torch.tensor(1.0))
    quantizers.watch(torch.zeros(0, 4), torch.tensor(1.0))
    assert quantizers.watched() == {"quant_clip_fraction": pytest.approx(1 / 3), "quant_peak_ratio": 2.0}
    quantizers.watch(torch.full((10, 4), 0.25), torch.tensor(1.0))
    assert quantizers.watched() == {"quant_clip_fraction": 0.0, "quant_peak_ratio": 0.25}


# The ranges.


def test_values_beyond_a_range_are_counted_in_updates_and_in_nothing_else():
    model = toy([1.0, -4.0], "nvfp4")
    calibrate(model, whole([0]))
    beyond = torch.tensor([[1, 1, 1]])
    with torch.no_grad():
        model(beyond)
    assert quantizers_of(model).watched() == {}
    model.embed.weight.requires_grad_(True)
    model(beyond)
    found = quantizers_of(model).watched()
    assert found["quant_peak_ratio"] > 2 and 0 < found["quant_clip_fraction"] < 1


class Toy(nn.Module):
    """Two layers on an embedding: `values` are the largest inputs, by token id."""

    device = torch.device("cpu")

    def __init__(self, values: list[float], dropout: float = 0.0, unused: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(len(values), 128)
        self.embed.weight.data = 0.5 * torch.rand(len(values), 128) * torch.tensor(values).abs()[:, None]
        self.embed.weight.data[:, 3] = torch.tensor(values)
        self.dropout, self.first, self.second = nn.Dropout(dropout), nn.Linear(128, 128), nn.Linear(128, 128)
        if unused:
            self.third = nn.Linear(128, 128)

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        return self.second(self.first(self.dropout(self.embed(input_ids))))


def toy(values: list[float], name: str = "fp8_static", **options: Any) -> Toy:
    model = Toy(values, **options)
    use_quantized_linears(model, FORMATS[name])
    return model


def whole(*rows: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(ids := torch.tensor([row]), torch.ones_like(ids, dtype=torch.bool)) for row in rows]


VALUES = [1.0, -4.0, 2.0, 900.0]


def ranges(model: Toy) -> tuple[float, float]:
    found = quantized_linear.quantizer_state(model)
    return found["first.input_amax"].item(), found["second.input_amax"].item()


def measured(ids: list[int]) -> tuple[float, float]:
    """The largest |input| of both layers as the unquantized model has them."""
    plain = Toy(VALUES)
    with torch.no_grad():
        x = plain.embed(torch.tensor(ids))
        return x.abs().max().item(), plain.first(x).abs().max().item()


def test_a_range_is_the_largest_input_of_the_unquantized_layers_over_all_batches():
    model = toy(VALUES)
    calibrate(model, whole([0, 2], [1, 0], [0, 0]))
    assert ranges(model) == pytest.approx(measured([0, 1, 2]), rel=1e-6)
    assert ranges(model)[0] == 4.0, "of a negative input"


def test_padding_is_no_input():
    model, ids = toy(VALUES), torch.tensor([[0, 1, 2], [2, 3, 3]])
    calibrate(model, [(ids, torch.tensor([[True, True, True], [True, False, False]]))])
    assert ranges(model) == pytest.approx(measured([0, 1, 2]), rel=1e-6)


def test_prompts_come_in_batches_each_once_with_their_own_tokens_marked():
    prompts = [[0, 1, 2], [2], [], [1, 1], [0, 2, 1, 1], [2, 2]]
    found = []
    for ids, real in batches(prompts, 2, "cpu"):
        assert len(ids) <= 2 and ids.shape == real.shape
        found += [row[mask].tolist() for row, mask in zip(ids, real, strict=True)]
        assert all(mask.tolist() == sorted(mask.tolist(), reverse=True) for mask in real), "padded on the right"
    assert sorted(found) == sorted(filter(None, prompts))


def test_calibration_is_without_dropout_and_leaves_the_model_as_it_was():
    model = toy(VALUES, dropout=0.5).train()
    calibrate(model, whole([0, 1], [2, 0]))
    assert ranges(model) == pytest.approx(measured([0, 1, 2]), rel=1e-6)
    assert model.training and quantizers_of(model).is_on
    assert not any(one._forward_pre_hooks for one in model.modules())
    with pytest.raises(IndexError):
        calibrate(toy(VALUES), whole([99]))
    evaluated = toy(VALUES).eval()
    calibrate(evaluated, whole([0]))
    assert not evaluated.training


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0])
def test_a_range_that_is_no_range_is_refused(value):
    with pytest.raises(CheckFailed, match="have no usable input over the calibration prompts"):
        calibrate(toy([1.0, value]), whole([1] if value == 0 else [0, 1]))


def test_an_infinite_input_of_one_layer_is_refused_whatever_the_others_have():
    model = toy([1.0])
    hook = model.second.register_forward_pre_hook(lambda m, x: (x[0] / 0,))
    with pytest.raises(CheckFailed, match=r"1 of 2 layers .*first: second"):
        calibrate(model, whole([0]))
    hook.remove()
    with pytest.raises(CheckFailed, match=r"1 of 3 layers .*first: third"):
        calibrate(toy([1.0], unused=True), whole([0]))


def test_ranges_are_applied_and_are_needed():
    model, fmt = toy(VALUES), FORMATS["fp8_static"]
    ids = torch.tensor([[0, 1, 2]])
    with pytest.raises(CheckFailed, match="calibrate it first"):
        model(ids)
    calibrate(model, whole([0, 1, 2]))
    plain = Toy(VALUES)
    x = plain.embed(ids)
    for layer, peak in zip((plain.first, plain.second), ranges(model), strict=True):
        rounded = layer.weight.data.bfloat16().float()  # merging writes BF16
        x = fake_quantize_activation(x, fmt.activation, torch.tensor(peak))
        x = nn.functional.linear(x, fake_quantize_weight(rounded, fmt), layer.bias)
    torch.testing.assert_close(model(ids), x, rtol=1e-5, atol=1e-5)


@pytest.fixture
def kept(tmp_path) -> Callable[..., Path]:
    """`kept(format)`: an adapter directory with the ranges of a model calibrated with the largest token."""

    def make(name: str | None = "fp8_static") -> Path:
        model = toy(VALUES, name or "fp8")
        calibrate(model, whole([0, 3]))
        facts = quantized_linear.write_quantizer_state(model, tmp_path)
        write_manifest(tmp_path, "adapter", **(facts if name else {}))
        return tmp_path

    return make


@pytest.mark.parametrize("trained", ["fp8_static", None])
def test_an_adapter_trained_for_a_format_brings_its_ranges_and_a_plain_one_is_calibrated(kept, trained):
    config = load_config(CONFIG, [f"--policy.init_adapter={kept(trained)}", "--policy.quant_cfg=fp8_static"])
    model = toy(VALUES)
    said = set_input_ranges(config, model, [[0, 1], [2]])
    wanted = measured([0, 3] if trained else [0, 1, 2])
    assert ranges(model) == pytest.approx(wanted, rel=1e-6) and said.startswith(
        "input ranges of" if trained else "cal"
    )


def test_ranges_of_another_format_or_of_other_layers_are_refused(kept):
    folder = kept("fp8_static")
    with pytest.raises(BadInput, match="written for format fp8_static, this policy computes in nvfp4"):
        quantized_linear.restore_quantizers(toy(VALUES, "nvfp4"), folder)
    for unused, has in ((True, "has 2 input ranges, .* has 3"), (False, "has 1 input ranges, .* has 2")):
        model, state = toy(VALUES, unused=unused), quantized_linear.read_quantizer_state(folder)[1]
        if not unused:
            del state["second.input_amax"]
        with pytest.raises(BadInput, match=has):
            quantized_linear.load_quantizer_state(model, state)
    with pytest.raises(BadInput, match=r"has 2 input ranges, .* has 0"):
        quantized_linear.load_quantizer_state(toy(VALUES, "fp8"), quantized_linear.read_quantizer_state(folder)[1])


def test_the_hash_of_the_state_knows_every_range(tmp_path):
    hashes = set()
    for ids in ([0], [0, 1], [0, 1, 2, 3], [0]):
        calibrate(model := toy(VALUES), whole(ids))
        facts = quantized_linear.write_quantizer_state(model, tmp_path)
        hashes.add(facts["quantizer_hash"])
        assert facts["quant_cfg"] == "fp8_static"
    assert len(hashes) == 3
