"""What a server refuses of an adapter by its header and configuration alone, with the reason a user can act on."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from kit.rollout.server.adapter_check import Refused, Room, check, checkpoint_shapes, read_adapter
from tests.unit.fake_engine import LAYERS, adapter_tensors, write_adapter, write_base

Q = "base_model.model.model.layers.0.self_attn.q_proj"
ROOM = Room(frozenset(LAYERS), LAYERS, 8, takes_patterns=True)


def without(*names: str) -> dict:
    return {name: value for name, value in adapter_tensors().items() if name not in names}


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_a_plain_lora_is_accepted(tmp_path):
    check(read_adapter(write_adapter(tmp_path / "a")), ROOM)
    check(read_adapter(write_adapter(tmp_path / "rs", use_rslora=True)), ROOM)
    half = {name: value.astype(np.float16) for name, value in adapter_tensors().items()}
    check(read_adapter(write_adapter(tmp_path / "half", half)), ROOM)
    check(read_adapter(write_adapter(tmp_path / "patterned", rank_pattern={"q_proj": 2}, r=16)), ROOM)
    check(read_adapter(write_adapter(tmp_path / "part", without(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"))), ROOM)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora=False"),
        ({"modules_to_save": ["lm_head"]}, "without them"),
        ({"bias": "lora_only"}, "bias='none'"),
        ({"lora_bias": True}, "bias='none'"),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"target_parameters": ["experts.w1"]}, "bare parameters"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "repeated layers"),
        ({"alora_invocation_tokens": [1, 2]}, "plain LoRA"),
        *(
            ({"init_lora_weights": init}, "default initialization")
            for init in ("pissa", "pissa_niter_4", "OLoRA", "corda", "loftq", "lora_ga")
        ),
        ({"r": 4}, "has rank 2, adapter_config.json says 4"),
        ({"r": None}, "r is None, expected an integer"),
    ],
)
def test_what_s_b_a_does_not_describe_is_refused(tmp_path, config, reason):
    with pytest.raises(Refused, match=reason):
        check(read_adapter(write_adapter(tmp_path / "a", **config)), ROOM)


@pytest.mark.parametrize("patterns", [{"rank_pattern": {"q_proj": 2}, "r": 16}, {"alpha_pattern": {"q_proj": 8}}])
def test_patterns_are_refused_where_vllms_lora_would_scale_every_layer_alike(tmp_path, patterns):
    adapter = read_adapter(write_adapter(tmp_path / "a", **patterns))
    check(adapter, ROOM)
    with pytest.raises(Refused, match=r"_pattern: .*train without it or sync by remerge"):
        check(adapter, replace(ROOM, takes_patterns=False))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "holds no tensor"),
        (without(f"{Q}.lora_B.weight"), "lora_A without the other"),
        ({**adapter_tensors(), f"{Q}.lora_magnitude_vector": zeros(8)}, "not lora_A or lora_B"),
        ({**adapter_tensors(), "base_model.model.lm_head.weight": zeros(9, 6)}, "not lora_A or lora_B"),
        ({**adapter_tensors(), "base_model.model.lm_head.lora_A.weight": zeros(2, 6)}, "it adapts lm_head"),
        ({**adapter_tensors(), "base_model.model.model.embed_tokens.lora_embedding_A": zeros(2, 6)}, "not lora_A"),
        ({**adapter_tensors(), "base_model.model.model.layers.7.q_proj.lora_A.weight": zeros(2, 6)}, "does not have"),
        ({"other.lora_A.weight": zeros(2, 6)}, "not lora_A or lora_B"),
        ({**adapter_tensors(), f"{Q}.lora_A.weight": zeros(2, 5)}, r"for a weight of \(8, 6\)"),
        ({**adapter_tensors(), f"{Q}.lora_B.weight": zeros(8, 3)}, "do not multiply"),
        ({**adapter_tensors(), f"{Q}.lora_A.weight": zeros(12)}, "do not multiply"),
        ({**adapter_tensors(), f"{Q}.lora_A.weight": zeros(2, 6, dtype=np.int8)}, "of type I8"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(tmp_path, tensors, reason):
    with pytest.raises(Refused, match=reason):
        check(read_adapter(write_adapter(tmp_path / "a", tensors)), ROOM)


def test_a_rank_above_the_servers_is_refused_with_both_numbers(tmp_path):
    adapter = read_adapter(write_adapter(tmp_path / "a", adapter_tensors(rank=16), r=16))
    with pytest.raises(Refused, match="rank 16, the server was started with --max-lora-rank 8"):
        check(adapter, ROOM)
    check(adapter, replace(ROOM, max_rank=None))


def test_many_reasons_make_a_short_message(tmp_path):
    tensors = {f"base_model.model.layer{i}.lora_A.weight": zeros(2, 6) for i in range(200)}
    with pytest.raises(Refused) as refused:
        check(read_adapter(write_adapter(tmp_path / "a", tensors)), ROOM)
    assert "and 197 more" in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_is_not_whole_is_refused(tmp_path, cut):
    directory = write_adapter(tmp_path / "a")
    file = directory / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(Refused, match="safetensors"):
        read_adapter(directory)


def test_files_that_are_no_adapter_are_refused(tmp_path):
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").write_bytes((5).to_bytes(8, "little") + b"[1,2]")
    with pytest.raises(Refused, match="not a whole safetensors file"):
        read_adapter(directory)
    for content in ("", "{", "[]", "null"):
        (write_adapter(directory) / "adapter_config.json").write_text(content)
        with pytest.raises(Refused, match=r"adapter_config\.json is not"):
            read_adapter(directory)
    with pytest.raises(Refused, match=r"as this server sees it.*rollout\.transport to body"):
        read_adapter(tmp_path / "absent")


def test_shapes_of_a_checkpoint_leave_out_what_is_no_linear_layer(tmp_path):
    base = write_base(tmp_path / "base")
    save_file({"lm_head.weight": zeros(9, 6), "model.b.bias": zeros(6)}, base / "model-00002.safetensors")
    assert checkpoint_shapes(base) == LAYERS
