"""Names and files of quantization formats, and what is said about those that nothing deploys."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kit.core import modelopt_config
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.schema import limit_faults
from kit.core.errors import BadInput
from kit.core.format_names import faults, read_quant_format
from kit.core.formats import FORMATS, TRAINED, check_model, check_shapes, fitted_to
from kit.core.modelopt_config import LAYOUTS, NO_LAYOUT, read
from kit.train.setup import check_hardware
from merge.quantize import STORED

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"

E4M3 = {"num_bits": [4, 3], "axis": None}
FP4 = {"num_bits": [2, 1], "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": [4, 3]}, "axis": None}
INT4 = {"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}
PER_TOKEN = {"num_bits": "e4m3", "type": "dynamic", "block_sizes": {-1: None}}
OFF = {"enable": False}


def older(weight, inputs, **others) -> dict:
    """A configuration in the form of a dictionary, as NeMo RL's first nvfp4_a16.yaml had it."""
    quant_cfg = {"*weight_quantizer": weight, "*input_quantizer": inputs, "*output_quantizer": OFF, "*lm_head*": OFF}
    return {"quant_cfg": {**quant_cfg, **others, "default": OFF}, "algorithm": "max"}


def newer(weight, inputs, *others) -> dict:
    """A recipe in the form of a list, as NeMo RL's and nvidia-modelopt's recipes have it."""
    entries = [{"quantizer_name": "*", "enable": False}]
    entries += [{"quantizer_name": "*weight_quantizer", "enable": True, "cfg": weight}]
    entries += [{"quantizer_name": "*input_quantizer", "enable": True, "cfg": inputs}] if inputs else []
    entries += [{"quantizer_name": "*lm_head*", "enable": False}]
    entries += [{"parent_class": "nn.BatchNorm1d", "quantizer_name": "*", "enable": False}]
    return {"metadata": {"recipe_type": "ptq"}, "quantize": {"algorithm": "max", "quant_cfg": [*entries, *others]}}


BLOCKS = {"num_bits": [4, 3], "block_sizes": {-1: 128, -2: 128}}
NAMED_FP4 = {"block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}, "num_bits": "e2m1"}
CONFIGURATIONS = {
    "nvfp4a16": [
        newer(NAMED_FP4, None),
        older(FP4, OFF),
        {"quant_cfg": {"*weight_quantizer": FP4, "*input_quantizer": OFF}},
    ],
    "nvfp4": [newer(NAMED_FP4, NAMED_FP4), {"quant_cfg": {"*weight_quantizer": FP4, "*input_quantizer": FP4}}],
    "fp8_static": [newer({"num_bits": "e4m3", "axis": None}, {"num_bits": "e4m3"})],
    "fp8": [newer({"num_bits": "e4m3", "axis": 0}, PER_TOKEN)],
    "fp8_block": [newer(BLOCKS, {"num_bits": [4, 3], "block_sizes": {-1: 128, "type": "dynamic"}})],
    "w4a16": [newer(INT4, None), {"quant_cfg": {"nn.Linear": {"*weight_quantizer": INT4, "*input_quantizer": OFF}}}],
}


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        read_quant_format(text)
    return str(caught.value)


def reason(content) -> str:
    with pytest.raises(BadInput) as caught:
        read(content, "a.yaml")
    return str(caught.value)


def test_every_format_is_one_that_merge_writes():
    assert set(TRAINED) <= set(STORED)
    for name, fmt in TRAINED.items():
        assert read_quant_format(name) is fmt and fmt.name == name
    assert [name for name, fmt in TRAINED.items() if fmt.needs_calibration] == ["fp8_static", "nvfp4"]


def test_reading_a_format_imports_no_torch():
    code = "import sys; from kit.core.format_names import read_quant_format as read; read('NVFP4_DEFAULT_CFG')"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


NEAREST = [("nvfp8", "nvfp4"), ("W4A16", "w4a16"), ("nvfp4_default", "NVFP4")]
NEAREST += [("int4", "w4a16?"), ("INT4", "w4a16?"), ("int4_awq", "INT4_BLOCKWISE"), ("fp4", "nvfp4a16?")]
NEAREST += [("INT4_CFG", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG?"), ("int8", "fp8?"), ("w4a4", "nvfp4?"), ("w8a8", "fp8?")]


@pytest.mark.parametrize(("text", "nearest"), NEAREST)
def test_an_unknown_name_is_refused_with_the_nearest(text, nearest):
    assert f"policy.quant_cfg ({text}) is not a format" in refusal(text)
    assert f"Did you mean {nearest}" in refusal(text)


@pytest.mark.parametrize(
    ("text", "fix"),
    [("bf16", "Leave policy.quant_cfg out"), ("nf4", "policy.quantization"), ("awq", "Train for w4a16")],
)
def test_a_format_of_the_merge_that_is_not_trained_for_is_refused_with_what_to_do(text, fix):
    assert set(FORMATS) == {*TRAINED, "bf16", "nf4", "awq"}
    message = refusal(text)
    assert f"policy.quant_cfg ({text}) is a format of the merge that no run is trained for" in message
    assert fix in message and "Did you mean" not in message


def test_a_name_like_no_other_is_refused_with_all():
    message = refusal("xyzzy")
    assert "Did you mean" not in message and all(name in message for name in (*TRAINED, *LAYOUTS))


@pytest.mark.parametrize("name", ["INT8_DEFAULT_CFG", "INT4_AWQ_CFG", "MXFP4_DEFAULT_CFG", "NVFP4_KV_CFG"])
def test_a_configuration_of_modelopt_without_a_layout_is_refused_with_the_reason(name):
    assert f"{name} cannot be deployed: {NO_LAYOUT[name]}" in refusal(name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_yaml_in_modelopts_form_is_the_format_that_it_describes(name, tmp_path):
    for number, content in enumerate(CONFIGURATIONS[name]):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(content))
        assert read_quant_format(str(file)) is FORMATS[name]


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    missing = refusal("none.yaml")
    assert f"policy.quant_cfg: no YAML file at none.yaml (seen from {Path.cwd()})" in missing
    assert "the path of a YAML file, or a name: fp8, fp8_block" in missing
    assert "none.yaml cannot be read as a YAML file: Not a directory" in refusal(__file__ + "/none.yaml")
    assert f"{tmp_path} cannot be read as a YAML file: it is a directory. Give the path of a YAML file" in refusal(
        str(tmp_path)
    )
    (tmp_path / "date.yaml").write_text("quant_cfg: 2026-13-01")
    assert "date.yaml cannot be deployed: quant_cfg is str" in refusal(str(tmp_path / "date.yaml"))
    (tmp_path / "a.yaml").write_text("quant_cfg: [")
    assert "a.yaml is not YAML" in refusal(str(tmp_path / "a.yaml"))
    (tmp_path / "b.yaml").write_text("- 1")
    assert "it has no quant_cfg" in refusal(str(tmp_path / "b.yaml"))


MLP_ONLY = newer(NAMED_FP4, None, {"quantizer_name": "*self_attn*", "enable": False})
ONE_LAYER = newer(NAMED_FP4, None, {"quantizer_name": "*.layers.18.*", "enable": False})
KV_CACHE = newer(E4M3, E4M3, {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": "e4m3"}})
OUTPUTS = newer(E4M3, E4M3, {"quantizer_name": "*output_quantizer", "cfg": {"num_bits": "e4m3"}})
TWICE = newer([INT4, E4M3], None)
REFUSED = [
    (newer({"num_bits": 8, "axis": 0}, None), "*weight_quantizer has num_bits 8"),
    (newer({"num_bits": 4, "block_sizes": {-1: 32}}, None), "block_sizes {-1: 32}"),
    (newer({**FP4, "block_sizes": {-1: 32, "scale_bits": [8, 0]}}, None), "scale_bits (8, 0)"),
    (newer(E4M3, {"num_bits": [4, 3], "type": "dynamic"}), "type dynamic; inputs can be"),
    (newer(E4M3, None), "with these weights there is fp8_static (activations fp8 per tensor, calibrated)"),
    (newer(FP4, E4M3), "nvfp4a16 (activations not quantized), nvfp4 (activations nvfp4 per block, calibrated)"),
    ({"quant_cfg": [{"quantizer_name": "*", "enable": False}]}, "* disables the weights' quantizers"),
    (MLP_ONLY, "*weight_quantizer makes model.layers.0.mlp.gate_proj.weight_quantizer differ"),
    (ONE_LAYER, "*.layers.18.* makes model.layers.18.self_attn.q_proj.weight_quantizer differ"),
    (KV_CACHE, "server.kv_cache"),
    (OUTPUTS, "*output_quantizer quantizes model.layers.0.self_attn.q_proj.output_quantizer"),
    (TWICE, "quantizes several times in a row"),
    (newer({**INT4, "narrow_range": True}, None), "narrow_range: True"),
    (newer({**INT4, "rotate": True}, None), "rotate: True"),
    (newer({**INT4, "colour": "red"}, None), "colour: 'red'"),
    (newer({**INT4, "block_sizes": {-1: 128, "kind": "static"}}, None), "valid keys are -1, -2, type, scale_bits"),
    ({"quant_cfg": {"*weight_quantizer": FP4}}, "no pattern for input_quantizer has num_bits 8"),
    ({"quant_cfg": [{"$import": "base"}]}, "imports base"),
    ({"quant_cfg": ["fp8"]}, "the entry 'fp8', which names no quantizer"),
    ({"quant_cfg": [{"quantizer_name": "*", "enabled": True}]}, "enabled, which is not a key"),
    ({"quant_cfg": "fp8"}, "neither a list nor a dictionary"),
    ({"quant_cfg": [], "imports": {}}, "imports is not a key next to quant_cfg and algorithm"),
    ({**older(INT4, OFF), "algorithm": {"method": "awq_lite"}}, "algorithm awq_lite"),
    ({}, "it has no quant_cfg"),
    (5, "it has no quant_cfg"),
    ({"quant_cfg": {"*weight_quantizer": "fp8"}}, "*weight_quantizer has 'fp8', which must be attributes by their"),
    ({"quant_cfg": {"nn.Linear": {5: INT4}}}, "quant_cfg has 5 for a quantizer's name, which must be text"),
    ({"quant_cfg": [], 5: 1, "x": 1}, "5 is not a key next to quant_cfg and algorithm"),
    ({"quant_cfg": [{"quantizer_name": "*", 5: 1, "x": 1}]}, "* has 5, which is not a key of an entry"),
    (newer(INT4, None, {"quantizer_name": "*", "enable": "false"}), "* has enable 'false'; enable must be true or"),
    (older(INT4, {"enable": "false"}), "*input_quantizer has enable 'false'; enable must be true or false"),
    # Misspelled keys and patterns.
    ({"quant_cgf": []}, "no quant_cfg, the list of quantizers. quant_cgf is not a key. Did you mean quant_cfg?"),
    ({"quant_cfg": [], "algoritm": "max"}, "(expand imports). Did you mean algorithm?"),
    (older({**INT4, "enabel": True}, OFF), "has enabel: True, which no layout has. Did you mean enable?"),
    ({"quant_cfg": [{"quantizer_name": "*", "enabel": True}]}, "is not a key of an entry. Did you mean enable?"),
    ({"quant_cfg": [{"quantiser_name": "*", "cfg": 1}]}, "quantiser_name is not a key. Did you mean quantizer_name?"),
    (
        {"quant_cfg": {"*weigth_quantizer": INT4}},
        "*weigth_quantizer matches no quantizer. Did you mean *weight_quantizer?",
    ),
    ({"quant_cfg": {"*mlp.input_quantiser*": OFF}}, "matches no quantizer. Did you mean *mlp.input_quantizer?"),
]
OF_WEIGHTS = [  # attributes of *weight_quantizer, and what is said about it
    (5, "cfg 5, which must be attributes by their names"),
    ({"block_sizes": 16}, "block_sizes 16, which must be sizes by dimension, as in {-1: 16}"),
    ({"block_sizes": "{-1: 16}"}, "block_sizes '{-1: 16}', which must be sizes by dimension"),
    ({"block_sizes": {"type": {"a": 1}}}, "type {'a': 1}; type must be static or dynamic"),
    ({"block_sizes": {float("inf"): 1}}, "inf in block_sizes; valid keys are -1, -2, type, scale_bits"),
    (
        {"block_sizes": {-1: 16, "scale_bit": 8}},
        "'scale_bit' in block_sizes; valid keys are -1, -2, type, scale_bits. ",
    ),
    ({"type": ["dynamic"]}, "type ['dynamic']; type must be static or dynamic"),
    ({"num_bits": "4"}, "num_bits '4', axis None"),
    ({"num_bits": "e4m3", "axis": False}, "num_bits (4, 3), axis False"),
    ({"enable": False}, "enable False in cfg; enable belongs next to cfg"),
    ({"num_bitz": 4}, "num_bitz: 4, which no layout has. Did you mean num_bits?"),
    ({"block_size": 16}, "block_size: 16, which no layout has. Did you mean block_sizes?"),
]
REFUSED += [(newer(attributes, None), f"*weight_quantizer has {said}") for attributes, said in OF_WEIGHTS]


@pytest.mark.parametrize(("content", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_a_configuration_that_nothing_deploys_is_refused_with_the_key(content, said):
    message = reason(content)
    assert said in message and "a.yaml cannot be deployed" in message and "Formats: fp8, " in message


def test_the_last_pattern_that_fits_counts():
    """As in the package: an entry with attributes replaces all of them, one without only switches."""
    entries = CONFIGURATIONS["nvfp4a16"][0]["quantize"]["quant_cfg"]
    again = [*entries, {"quantizer_name": "*weight_quantizer", "cfg": INT4}]
    assert read({"quant_cfg": again}, "").name == "w4a16"
    switched = [*entries, {"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight*", "enable": True}]
    assert read({"quant_cfg": switched}, "").name == "nvfp4a16"


@pytest.mark.parametrize("pattern", ["*softmax_quantizer", "*experts.gate_up_proj_weight_quantizer", "*.router.*"])
def test_patterns_for_layers_that_only_other_models_have_are_no_misspelled_ones(pattern):
    assert read(newer(NAMED_FP4, None, {"quantizer_name": pattern, "enable": False}), "").name == "nvfp4a16"


def test_a_name_of_another_version_is_read_from_the_package(monkeypatch):
    class Package:
        NEWER_CFG = newer(NAMED_FP4, None)["quantize"]

    monkeypatch.setattr(modelopt_config.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(modelopt_config.importlib, "import_module", lambda name: Package)
    assert read_quant_format("NEWER_CFG").name == "nvfp4a16"
    assert "is not a format" in refusal("OTHER_CFG")


QWEN3_8B = {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
QWEN3_8B |= {"num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("name", TRAINED)
def test_dense_qwen_and_llama_shapes_have_all_formats(name):
    check_model(FORMATS[name], QWEN3_8B)
    check_model(FORMATS[name], QWEN3_8B | {"model_type": "llama", "intermediate_size": 14336, "head_dim": None})


def test_a_mixture_of_experts_is_refused_with_the_reason():
    with pytest.raises(
        BadInput, match=r"\(qwen3_moe\) is a mixture of experts \(num_experts 128\).*Take a dense model"
    ):
        check_model(FORMATS["nvfp4a16"], QWEN3_8B | {"model_type": "qwen3_moe", "num_experts": 128})


def test_a_model_whose_text_part_is_nested_is_read_there():
    nested = {"model_type": "qwen3_5", "text_config": QWEN3_8B}
    check_model(FORMATS["w4a16"], nested)
    with pytest.raises(BadInput, match=r"\(qwen3_5\) is a mixture of experts \(num_experts 256\)"):
        check_model(FORMATS["w4a16"], nested | {"text_config": QWEN3_8B | {"num_experts": 256}})
    with pytest.raises(BadInput, match="groups of 128 or 64 inputs"):
        check_model(FORMATS["w4a16"], nested | {"text_config": QWEN3_8B | {"intermediate_size": 12320}})
    narrow = fitted_to(FORMATS["w4a16"], nested | {"text_config": QWEN3_8B | {"intermediate_size": 12352}})
    assert narrow.weight.block == (1, 64) and fitted_to(FORMATS["w4a16"], nested).weight.block == (1, 128)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "w4a16",
            {"intermediate_size": 12320},
            r"groups of 128 or 64 inputs; 1 of 7 .*down_proj: 4096 outputs, 12320 inputs",
        ),
        ("nvfp4", {"head_dim": 100, "num_attention_heads": 33}, r"groups of 16 inputs; 1 of 7 .*o_proj"),
        (
            "fp8_block",
            {"num_key_value_heads": 1, "head_dim": 64},
            r"blocks of 128 x 128.* 2 of 7 .*k_proj: 64 outputs",
        ),
    ],
)
def test_sizes_that_the_blocks_do_not_divide_are_refused_with_the_layer(name, changes, said):
    with pytest.raises(BadInput, match=said):
        check_model(FORMATS[name], QWEN3_8B | changes)
    check_model(FORMATS["fp8"], QWEN3_8B | changes)


def test_fp8_blocks_need_more_than_one_across_when_there_is_more_than_one_down():
    check_shapes(FORMATS["fp8_block"], {"k_proj": (128, 128), "q_proj": (256, 256)})
    with pytest.raises(BadInput, match="more than one across"):
        check_shapes(FORMATS["fp8_block"], {"gate_proj": (384, 128)})


def test_a_gpu_without_fp8_samples_in_formats_that_are_served_as_bf16_and_trains_in_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    refused = []
    for name, fmt in TRAINED.items():
        check_hardware(fmt, "in_process")
        try:
            check_hardware(fmt, "server")
        except BadInput as error:
            assert "A100" in str(error) and f"8.0, needed {'9.0' if name == 'fp8_block' else '8.9'}" in str(error)
            refused.append(name)
    assert refused == ["fp8", "fp8_block"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_hardware(FORMATS["fp8"], "server")
    with pytest.raises(BadInput, match=r"no FP8 matmul for fp8_per_block .*8\.9, needed 9\.0"):  # Marlin's, W8A16
        check_hardware(FORMATS["fp8_block"], "server")


def configuration(**keys):
    return load_config(CONFIG, [part for key, value in keys.items() for part in (f"--policy.{key}", str(value))])


def test_counts_of_the_calibration_and_the_local_models_sizes_are_checked_before_anything_loads(tmp_path):
    assert faults(configuration()) == []
    assert faults(configuration(quant_cfg="nvfp4")) == []
    found = limit_faults(configuration(quant_cfg="nvfp4", quant_calib_size=0, quant_sequence_length=0))
    assert found == [f"policy.quant_{key} (0) must be at least 1." for key in ("calib_size", "sequence_length")]
    config = configuration(quant_cfg="w4a16")
    config.model.path = str(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_local_experts": 8}')
    assert "mixture of experts (num_local_experts 8)" in faults(config)[0]
    with pytest.raises(BadInput, match="mixture of experts"):
        check_config(config, 1)
