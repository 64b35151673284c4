"""What a server has to be for a policy with a quantization format: its command line, and what is refused."""

import pytest

from kit.core.config.checks import check_config
from kit.core.config.format_rules import faults, served_format
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.formats import TRAINED
from launch import server
from launch.vllm_command import plans
from tests.conftest import CONFIG
from tests.unit.test_server_command import CUDA, config, only


@pytest.mark.parametrize(
    ("quant_cfg", "weights", "extension", "name"),
    [
        ("W4A16_NVFP4_CFG", "bf16", "kit.rollout.server.remerge.Remerge", "nvfp4a16"),
        ("w4a16", "bf16", "kit.rollout.server.remerge.Remerge", "w4a16"),
        ("nvfp4", "bf16", "kit.rollout.server.quantized_inputs.RemergeQuantizedInputs", "nvfp4"),
        ("FP8_DEFAULT_CFG", "bf16", "kit.rollout.server.quantized_inputs.RemergeQuantizedInputs", "fp8_static"),
        ("fp8", "fp8_per_channel", "kit.rollout.server.remerge.Remerge", "fp8"),
        ("fp8_block", "fp8_per_block", "kit.rollout.server.remerge.Remerge", "fp8_block"),
    ],
)
def test_a_format_decides_how_the_server_is_started(quant_cfg, weights, extension, name):
    made = config(policy={"quant_cfg": quant_cfg}, server={"weights": weights})
    command = only(plans(made, CUDA, ["0"]))
    assert f"--worker-extension-cls {extension} " in command
    assert f'--additional-config {{"quant_cfg": "{name}"}}' in command
    assert (f"--quantization {weights}" in command) == TRAINED[name].by_vllm
    assert "additional" not in only(plans(config(), CUDA, ["0"])), "a server without a format gets no quant_cfg"


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({"server": {"quant_cfg": "fp8"}}, "policy.quant_cfg is not set"),
        ({"policy": {"quant_cfg": "fp8"}, "server": {"quant_cfg": "w4a16"}}, "sampled by a policy other than"),
        ({"policy": {"quant_cfg": "nvfp4"}, "server": {"quant_cfg": "nvpf4"}}, r"server.quant_cfg \(nvpf4\) is no"),
        ({"policy": {"quant_cfg": "fp8"}, "server": {"quant_cfg": "awq"}}, r"server.quant_cfg \(awq\) is a format"),
        ({"policy": {"quant_cfg": "fp8"}, "server": {"quant_cfg": "a/b"}}, "server.quant_cfg: no YAML file at a/b"),
        (
            {"policy": {"quant_cfg": "fp8"}, "server": {"quant_cfg": "FP8_KV_CFG"}},
            "server.quant_cfg: FP8_KV_CFG cannot",
        ),
        ({"policy": {"quant_cfg": "nvfp4"}}, "Set server.weights to bf16"),
        ({"policy": {"quant_cfg": "fp8_static"}}, "Set server.weights to bf16"),
        ({"policy": {"quant_cfg": "fp8_block"}}, "Set server.weights to fp8_per_block"),
        ({"policy": {"quant_cfg": "fp8"}, "server": {"weights": "bf16"}}, "Set server.weights to fp8_per_channel"),
        ({"policy": {"quant_cfg": "fp8"}, "rollout": {"sync": "adapter"}}, "Set rollout.sync to remerge"),
        ({"policy": {"quant_cfg": "nvfp4a61"}}, "Did you mean nvfp4a16"),
    ],
)
def test_a_server_in_other_numbers_is_refused_by_server_and_trainer(groups, reason):
    with pytest.raises(BadInput, match=reason):
        plans(config(**groups), CUDA, ["0"])
    words = [f"--{group}.{key}={value}" for group, keys in groups.items() for key, value in keys.items()]
    weights = (
        [] if any(word.startswith("--server.weights") for word in words) else ["--server.weights=fp8_per_channel"]
    )
    with pytest.raises(BadInput, match=reason):
        check_config(load_config(CONFIG, ["--rollout.backend=server", *weights, *words]), 1)


def test_the_same_format_by_another_name_is_the_same():
    made = config(policy={"quant_cfg": "NVFP4_DEFAULT_CFG"}, server={"quant_cfg": "nvfp4", "weights": "bf16"})
    assert faults(made) == [] and served_format(made) == TRAINED["nvfp4"]


def test_a_flag_that_would_hide_the_format_is_refused():
    made = config(policy={"quant_cfg": "fp8"}, server={"vllm": {"additional-config": {"x": 1}}})
    with pytest.raises(BadInput, match="tells the workers the format"):
        plans(made, CUDA, ["0"])
    plans(config(server={"vllm": {"additional-config": {"x": 1}}}), CUDA, ["0"])


def test_a_started_server_in_another_format_is_told():
    info = {"base_hash": "ab", "logprobs_mode": "processed_logprobs", "max_model_len": 128, "sync": ["remerge"]}
    info |= {"weights": "fp8_per_channel", "quant_cfg": "fp8"}
    assert server.differences(config(policy={"quant_cfg": "fp8"}), {"base_hash": "ab"}, info) == []
    (found,) = server.differences(config(), {"base_hash": "ab"}, info)
    assert found == "it computes in fp8, policy.quant_cfg says None"
