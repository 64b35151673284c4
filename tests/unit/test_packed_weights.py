"""`server.weights: w4a16`: numerics, vLLM's configuration, refused settings, and the memory plan.

That vLLM's layers hold these numbers: test_marlin.py, tests/smoke/test_remerge_tensor_parallel.py.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kit.core.cards import CARDS, GENERATIONS, W4A16, W16A16
from kit.core.config.card_rules import served_product, server_faults
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.formats import FORMATS, TRAINED, fitted, packed_format
from kit.core.processor import multiplies_int4
from kit.plan import cost, memory
from kit.plan.fitting import lay_out
from kit.plan.shapes import shape_by_size
from kit.rollout.server import packed_config, packed_layers, quantized_fold
from kit.weights import quantize
from launch.vllm_command import Installed, plans
from merge.quantize import quantization_config, store
from tests.conftest import CONFIG
from tests.unit.fake_engine import Engine
from tests.unit.test_server_command import CPU, CUDA, config, only

W4 = {"server": {"weights": "w4a16"}}
LAYER = "model.layers.0."
LINEARS = {"self_attn.q_proj": (256, 256), "self_attn.o_proj": (256, 256), "mlp.down_proj": (256, 512)}
OTHERS = {"model.embed_tokens": (320, 256), "model.layers.0.mixer.in_proj_a": (32, 256), "lm_head": (320, 256)}
QWEN3 = {"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def write_base(folder: Path, inner: int = 512, more: dict | None = None) -> Path:
    """A base directory as `python -m merge base` lays it out, with weights of zeros."""
    folder.mkdir()
    linears = LINEARS | {"mlp.down_proj": (256, inner)}
    shapes = {f"{LAYER}{name}": shape for name, shape in linears.items()} | OTHERS
    tensors = {f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors | {"model.norm.weight": torch.zeros(256)}, folder / "model.safetensors")
    facts = {"hash": "ab", "quantized": [f"{LAYER}{name}" for name in linears], "tensors": dict.fromkeys(tensors, "h")}
    facts["quantization"] = {"type": "nf4", "storage_dtype": "bfloat16"}
    (folder / "base.json").write_text(json.dumps(facts))
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"intermediate_size": inner} | (more or {})))
    return folder


def served(base: Path, **server) -> dict:
    """Keys of a configuration whose replicas hold this base in w4a16."""
    return {"server": {"weights": "w4a16", "base": str(base)} | server}


# The numbers.


@pytest.mark.parametrize(("columns", "group"), [(512, 128), (320, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_gives_what_merge_stores_of_the_weight_in_bf16(monkeypatch, columns, group, dtype):
    monkeypatch.setattr(quantize, "PACK_CHUNK", 7 * columns)  # pieces that do not divide the rows
    torch.manual_seed(0)
    weight = (0.03 * torch.randn(40, columns)).to(dtype)
    weight[3, :group], weight[4] = 0, 1e-38 * weight[4]  # a group of zeros, and scales that BF16 rounds to 0
    before = weight.clone()
    packed, scale = quantize.pack_int4(weight, group)
    stored = store(fitted(FORMATS["w4a16"], [columns]), weight.to(torch.bfloat16), lambda *_: None)
    assert torch.equal(packed, stored["weight_packed"]) and torch.equal(scale, stored["weight_scale"])
    assert torch.equal(weight, before)


def test_a_format_with_kernels_of_its_own_can_be_served_either_way():
    assert packed_format("w4a16") is FORMATS["w4a16"] and packed_format("bf16") is packed_format(None) is None
    assert [name for name, fmt in FORMATS.items() if len(fmt.servers) > 1] == ["w4a16"]
    for weights in ("bf16", "w4a16"):
        groups = {"policy": {"quant_cfg": "w4a16"}, "server": {"weights": weights}}
        assert '--additional-config {"quant_cfg": "w4a16"}' in only(plans(config(**groups), CUDA, ["0"]))
    with pytest.raises(BadInput, match=r"w4a16 is served as bf16 or w4a16, .* Set server.weights to bf16 or w4a16"):
        plans(config(policy={"quant_cfg": "w4a16"}), CUDA, ["0"])
    with pytest.raises(BadInput, match="nvfp4a16 is served as bf16, and any other quantization"):
        plans(config(policy={"quant_cfg": "nvfp4a16"}, **W4), CUDA, ["0"])


# vLLM's configuration.


def test_the_server_is_started_on_the_base_in_16_bits_as_a_checkpoint_of_the_format(tmp_path):
    base = write_base(tmp_path / "base")
    (plan,) = plans(config(**served(base)), CUDA, ["0"])
    options = plan.options
    assert options["model"] == str(base) and "quantization" not in options
    assert (options["load_format"], options["worker_extension_cls"]) == (
        packed_config.LOAD_FORMAT,
        packed_config.EXTENSION,
    )
    line = plan.command[plan.command.index("--hf-overrides") + 1]
    assert json.loads(line) == {"quantization_config": packed_config.quantization_config(FORMATS["w4a16"], base)}
    (cpu,) = plans(config(**served(base)), CPU, None)
    assert cpu.environment["VLLM_CPU_INT4_W4A8"] == "0", "vLLM would quantize the inputs on CPUs with AMX"
    assert "VLLM_CPU_INT4_W4A8" not in plan.environment


@pytest.mark.parametrize(("inner", "group"), [(512, 128), (320, 64)])
def test_the_description_is_that_of_a_checkpoint_that_merge_writes(tmp_path, inner, group):
    from compressed_tensors.quantization import QuantizationConfig

    fmt = fitted(FORMATS["w4a16"], [256, inner])
    ours = packed_config.quantization_config(FORMATS["w4a16"], write_base(tmp_path / "base", inner))
    theirs = quantization_config(fmt, ["lm_head"])
    read, wanted = (QuantizationConfig.model_validate(one) for one in (ours, theirs))
    assert read.config_groups["group_0"].weights == wanted.config_groups["group_0"].weights
    assert read.config_groups["group_0"].weights.group_size == group
    assert (read.format, read.quantization_status) == (wanted.format, wanted.quantization_status)


def test_vllm_quantizes_the_layers_that_the_base_quantizes_and_no_others(tmp_path):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    facts = packed_config.quantization_config(FORMATS["w4a16"], write_base(tmp_path / "base"))
    ignored = CompressedTensorsConfig.from_config(facts).ignore
    for name in (f"{LAYER}{one}" for one in LINEARS):
        # vLLM's names of a language model inside a vision-language one begin otherwise.
        assert not should_ignore_layer(name, ignored) and not should_ignore_layer(f"language_model.{name}", ignored)
    for name in ("lm_head", f"{LAYER}mixer.in_proj_a", f"language_model.{LAYER}mixer.in_proj_a"):
        assert should_ignore_layer(name, ignored), name


def test_a_started_server_says_that_it_holds_w4a16_and_needs_the_extension(tmp_path):
    from kit.rollout.server.versions import Versions

    def held(layout: str) -> SimpleNamespace:
        return SimpleNamespace(
            quantization="compressed-tensors", hf_config=SimpleNamespace(quantization_config={"format": layout})
        )

    assert packed_layers.weights_of(held("pack-quantized")) == "w4a16"
    assert packed_layers.weights_of(held("float-quantized")) == "compressed-tensors", "an FP8 checkpoint"
    assert packed_layers.weights_of(SimpleNamespace(quantization="fp8_per_channel")) == "fp8_per_channel"
    engine = Engine(tmp_path / "base", quantization="compressed-tensors")
    engine.vllm_config.model_config.hf_config = held("pack-quantized").hf_config
    assert Versions(engine, None, tmp_path, None, "gpu").extension == packed_config.EXTENSION
    started = SimpleNamespace(additional_config={"quant_cfg": "w4a16"}, model_config=held("pack-quantized"))
    assert quantized_fold.format_of(started) == TRAINED["w4a16"]
    started.additional_config["quant_cfg"] = "nvfp4a16"
    with pytest.raises(ValueError, match="nvfp4a16 is served as bf16, the server was started as w4a16"):
        quantized_fold.format_of(started)


# Refused settings.


@pytest.mark.parametrize(
    ("inner", "more", "server", "vllm", "reason"),
    [
        (512, {}, {}, Installed("0.31.0", True, has_int4=False), "AVX-512, which this one lacks. Use fp8_per_channel"),
        (512, {"num_experts": 8}, {}, CUDA, r"w4a16 does not hold experts \(num_experts 8\).* to fp8_per_channel or"),
        (336, {}, {}, CUDA, r"needs groups of 128 or 64 inputs; 1 of 7 .*\(down_proj: 256 outputs, 336 inputs\)"),
        (512, {}, {"tensor_parallel": 4}, CUDA, r"cuts a group of 128 inputs of .*o_proj \(256 inputs\).*Lower it"),
        (512, {}, {"vllm": {"load_format": "auto"}}, CUDA, "server.vllm names load_format"),
    ],
)
def test_a_base_or_a_processor_without_kernels_is_refused_before_a_server_starts(
    tmp_path, inner, more, server, vllm, reason
):
    base = write_base(tmp_path / "base", inner, more)
    with pytest.raises(BadInput, match=reason):
        plans(config(**served(base, **server)), vllm, None if vllm.is_cpu else list("0123"))


def test_two_workers_share_layers_whose_groups_they_do_not_cut(tmp_path):
    base = write_base(tmp_path / "base")
    assert "--tensor-parallel-size 2" in only(plans(config(**served(base, tensor_parallel=2)), CUDA, ["0", "1"]))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--rollout.sync=adapter"], "unmerged adapter on packed weights was not compared"),
        (["--server.share_base=true"], "server.weights is w4a16: one scale per output channel"),
        (["--server.force_w8a16=true"], "Marlin kernels serve fp8_per_tensor"),
    ],
)
def test_keys_that_conflict_with_packed_weights_are_refused_by_the_trainer(words, reason):
    with pytest.raises(BadInput, match=reason):
        check_config(load_config(CONFIG, ["--rollout.backend=server", "--server.weights=w4a16", *words]), 1)
    check_config(load_config(CONFIG, ["--server.weights=w4a16", "--rollout.sync=adapter"]), 1)  # no server


def test_a_local_model_that_cannot_be_packed_is_refused_by_the_trainer(tmp_path):
    base = write_base(tmp_path / "base", 336)
    words = ["--rollout.backend=server", "--server.weights=w4a16", f"--model.path={base}"]
    with pytest.raises(BadInput, match=r"server.weights w4a16 needs groups of 128 or 64 inputs"):
        check_config(load_config(CONFIG, words), 1)


@pytest.mark.parametrize(("flags", "has"), [("sse4_2 avx2", False), ("avx2 avx512f avx512bw", True)])
def test_the_processor_decides_whether_4_bit_weights_are_multiplied(monkeypatch, flags, has):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert multiplies_int4(f"flags : {flags}") == has
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert multiplies_int4(f"flags : {flags}")


# Cards and the memory plan.


def test_every_card_from_turing_on_serves_w4a16_and_none_is_told_that_it_multiplies_fp8():
    made = config(**W4)
    for row in (row for row in GENERATIONS if row.is_covered):
        assert row.served["w4a16"] == W4A16 and row.w4a16, row.name
        assert served_product(made, row.capability) == (W4A16, False)
        assert not [one for one in server_faults(made, "it", row.capability) if "server.weights" in one]
    assert served_product(made, None) == (W4A16, False)
    assert served_product(config(server={"weights": "bf16"}), None) == (W16A16, False)


def planned(weights: str, **groups):
    return config(
        policy={"quantization": "nf4"} | groups.get("policy", {}),
        server={"weights": weights, "kv_cache_gib": 2.0, "enforce_eager": True},
    )


def test_the_plan_counts_half_of_fp8s_bytes_in_memory_and_in_every_decoding_step():
    shape, card = shape_by_size("8b"), CARDS["a100-80g"]  # which multiplies no FP8: bytes are the difference
    parts = {name: memory.server_parts(shape, planned(name), card) for name in ("bf16", "fp8_per_tensor", "w4a16")}
    gib = {name: found["weights"] for name, found in parts.items()}
    assert gib["w4a16"] == pytest.approx(0.52 * gib["fp8_per_tensor"]) == pytest.approx(0.26 * gib["bf16"])
    assert parts["w4a16"]["copy of the base"] == parts["fp8_per_tensor"]["copy of the base"]
    assert parts["w4a16"]["16-bit layers"] == parts["fp8_per_tensor"]["16-bit layers"]
    seconds = [cost.decode_seconds(shape, planned(name), card, 8) for name in ("bf16", "fp8_per_tensor", "w4a16")]
    assert seconds[0] > seconds[1] > seconds[2]
    saved = shape.linear_weights * 0.48 / (card.gb_per_s * 1e9)
    assert seconds[1] - seconds[2] == pytest.approx(saved, rel=1e-6)


def test_folding_packed_weights_needs_no_copy_in_float32():
    shape, card = shape_by_size("8b"), CARDS["h200"]
    fold = {
        name: memory.server_parts(shape, planned(name, policy={"quant_cfg": fmt}), card)["folding a layer"]
        for name, fmt in (("w4a16", "w4a16"), ("fp8_per_channel", "fp8"), ("bf16", "w4a16"))
    }
    pieces = fold["w4a16"] - fold["bf16"]
    assert 0 < pieces < 0.1 < fold["fp8_per_channel"] - fold["bf16"]


def test_a_shape_that_does_not_divide_into_groups_does_not_fit():
    layout = lay_out(shape_by_size("8b"), planned("w4a16"), CARDS["h200"], 2)
    assert layout.fits and layout.faults == []
    odd = dataclasses.replace(shape_by_size("8b"), intermediate=12320)
    layout = lay_out(odd, planned("w4a16"), CARDS["h200"], 2)
    assert not layout.fits and any("server.weights w4a16 needs groups of 128 or 64" in one for one in layout.faults)
