"""The plan's memory and time: figures against measured ones, and that more of anything never takes less."""

import copy
import json
from pathlib import Path

import pytest

from kit.core.config.load import config_from_dict
from kit.core.errors import BadInput
from kit.plan import cost, memory
from kit.plan.coefficients import TABLE
from kit.plan.compare_points import LIMIT, check, compare, point_config, point_shape, rows_of
from kit.plan.fitting import lay_out
from kit.plan.gpus import CARDS
from kit.plan.shapes import shape_by_size
from tests.conftest import ROOT

H200, SHAPE = CARDS["h200"], shape_by_size("8b")
POINTS = ROOT / "bench/memory_points.json"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def config(**keys):
    """Defaults with `group__key` set."""
    values = {"run": {"name": "x"}, "model": {"id": "x"}, "train": {"max_steps": 1}}
    for key, value in keys.items():
        group, _, name = key.partition("__")
        values.setdefault(group, {})[name] = value
    return config_from_dict(values)


def update_gib(shape=SHAPE, padded=False, **keys):
    return memory.allocated(memory.update_parts(shape, config(**keys), H200, padded=padded))


def server_gib(shape=SHAPE, card=H200, **keys):
    keys = {"rollout__backend": "server", "server__kv_cache_gib": 2.0} | keys
    return sum(memory.server_parts(shape, config(**keys), card).values())


# Peaks of an update of the 8B shape on an H200: GiB, prompt, completion, micro-batch, adapted layers, padded.
# bench/README.md (one card), and the NF4 base with TRL's model path at 8 x and 1 x 2,048 tokens.
MEASURED = [
    (7.5, 64, 2048, 1, "all-linear", False),
    (13.95, 1, 2047, 8, ATTENTION, False),
    (6.87, 1, 2047, 1, ATTENTION, False),
]


@pytest.mark.parametrize(("gib", "prompt", "completion", "micro", "targets", "padded"), MEASURED)
def test_updates_measured_before_the_plan_are_within_ten_percent(gib, prompt, completion, micro, targets, padded):
    keys = {"rollout__max_prompt_length": prompt, "rollout__max_completion_length": completion}
    keys |= {"train__per_device_train_batch_size": micro, "policy__target_modules": targets}
    assert update_gib(padded=padded, **keys) == pytest.approx(gib, rel=LIMIT)


def test_the_bytes_of_nf4_are_those_that_bitsandbytes_stores():
    import torch
    from bitsandbytes.functional import quantize_4bit

    weight = torch.randn(512, 512)
    for double in (True, False):
        packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        stored = packed.nbytes + state.absmax.nbytes + (state.state2.absmax.nbytes if double else 0)
        assert stored / weight.numel() == pytest.approx(memory.nf4_bytes(double))


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "adamw_8bit"])
def test_the_bytes_of_an_optimizer_are_those_that_it_keeps_and_a_resume_finds(optimizer, tmp_path):
    import torch
    from torch.utils._pytree import tree_leaves
    from transformers import Trainer, TrainingArguments

    kind, keys = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(tmp_path, optim=optimizer, use_cpu=True))

    def train(weight, made, seeds):
        for seed in seeds:
            weight.weight.grad = torch.randn(256, 1024, generator=torch.Generator().manual_seed(seed))
            made.step()

    torch.manual_seed(0)
    weight, again = (torch.nn.Linear(1024, 256, bias=False) for _ in range(2))
    made, resumed = kind(weight.parameters(), **keys), kind(again.parameters(), **keys)
    train(weight, made, range(2))
    again.load_state_dict(weight.state_dict())
    torch.save(made.state_dict(), tmp_path / "optimizer.pt")
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=False))
    train(weight, made, range(2, 4))
    train(again, resumed, range(2, 4))
    assert torch.equal(again.weight, weight.weight)
    kept = {one.data_ptr(): one for one in tree_leaves(made.state_dict()["state"]) if isinstance(one, torch.Tensor)}
    stored = sum(one.nbytes for one in kept.values() if one.numel() > 256)  # without step and table of values
    assert stored / weight.weight.numel() == pytest.approx(memory.optimizer_bytes(optimizer, 4))


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({}, {"train__per_device_train_batch_size": 16}),
        ({}, {"rollout__max_completion_length": 512}),
        ({}, {"rollout__max_prompt_length": 1024}),
        ({}, {"train__recompute": "selective"}),
        ({"train__recompute": "selective"}, {"train__recompute": "none"}),
        ({"train__recompute_fraction": 1.0}, {"train__recompute_fraction": 0.5}),
        ({"train__recompute_offload": True}, {}),
        ({"policy__kernels": "liger", "train__recompute": "none"}, {"train__recompute": "none"}),
        ({"policy__compute": "fused", "train__recompute": "none"}, {"train__recompute": "none"}),
        ({"train__micro_batch_tokens": 2048}, {"train__micro_batch_tokens": 4096}),
        ({}, {"policy__lora_rank": 64}),
        ({}, {"policy__double_quantization": False}),
        ({"policy__adapter_dtype": "bfloat16"}, {}),
        ({"policy__target_modules": ATTENTION}, {}),
        ({"train__optimizer": "adamw_8bit"}, {}),
        ({"train__optimizer": "sgd"}, {"train__optimizer": "adamw_8bit"}),
        ({}, {"model__dtype": "float32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", ["0.6b", "8b", "qwen2.5-7b"])
def test_more_of_anything_takes_more_memory_in_the_update(less, more, size):
    assert update_gib(shape_by_size(size), **less) < update_gib(shape_by_size(size), **more)


def test_a_pass_without_gradients_takes_less_than_the_update():
    for size in ("0.6b", "8b", "32b"):
        found = memory.trainer_phases(shape_by_size(size), config(), H200)
        assert memory.allocated(found["log-probs"]) < memory.allocated(found["update"])


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"server__weights": "fp8_per_channel"}, {"server__weights": "bf16"}),
        ({}, {"server__kv_cache_gib": 4.0}),
        ({"server__enforce_eager": True}, {}),
        ({"server__nf4_copy": "host", "server__sleep": True}, {}),
        ({"rollout__sync": "adapter"}, {"rollout__sync": "adapter", "policy__lora_rank": 128}),
        ({"server__tensor_parallel": 2}, {}),
        ({}, {"server__max_num_seqs": 2048}),
    ],
    ids=str,
)
def test_more_of_anything_takes_more_memory_on_a_server(less, more):
    assert server_gib(**less) < server_gib(**more)


def test_without_a_size_the_kv_cache_fills_the_servers_share_of_the_card():
    made = config(rollout__backend="server", server__gpu_memory_utilization=0.5)
    parts = memory.server_parts(SHAPE, made, H200)
    assert sum(parts.values()) == pytest.approx(0.5 * H200.gib)
    small = memory.server_parts(SHAPE, made, CARDS["l4"])
    assert small["KV cache"] == 0


def test_an_fp8_kv_cache_holds_twice_the_sequences():
    assert memory.sequence_gib(SHAPE, config()) == 2 * memory.sequence_gib(SHAPE, config(server__kv_cache="fp8"))


def test_full_precision_needs_more():
    found = memory.full_precision(SHAPE, config(rollout__backend="server"), H200)
    assert found["full fine-tuning"] > found["BF16 LoRA"] > found["this configuration"]
    assert found["full fine-tuning"] > 20 * SHAPE.parameters / memory.GIB


# bench/README.md, 8B shape on one H200: sequences, sync, weights, tokens a second.
SPEED = [
    (64, "remerge", "fp8_per_channel", 12094),
    (256, "remerge", "fp8_per_channel", 21995),
    (512, "remerge", "fp8_per_channel", 24765),
    (64, "adapter", "fp8_per_channel", 9108),
    (256, "adapter", "fp8_per_channel", 16095),
    (512, "adapter", "fp8_per_channel", 20057),
    (64, "remerge", "bf16", 9628),
    (256, "remerge", "bf16", 18301),
    (512, "remerge", "bf16", 20139),
]


@pytest.mark.parametrize(("sequences", "sync", "weights", "speed"), SPEED)
def test_rollouts_are_within_the_stated_range_of_measured_speeds(sequences, sync, weights, speed):
    keys = {"rollout__max_prompt_length": 256, "rollout__max_completion_length": 512, "rollout__sync": sync}
    made = config(**keys, server__weights=weights, server__max_num_seqs=512, rollout__backend="server")
    seconds = cost.served_seconds(SHAPE, made, H200, sequences, cache_gib=58)
    assert sequences * 512 / seconds == pytest.approx(speed, rel=TABLE["time_spread"].value)


def update_range(shape, made, completions):
    """Seconds of an update at least and at most, with a pass more for old log-probs where there is a server: that is
    what was measured."""
    spread, plain = TABLE["time_spread"].value, copy.deepcopy(made)
    plain.train.beta = 0.0
    scored = copy.deepcopy(made)
    scored.train.beta = 0.01

    def seconds(sign):
        found, one, other = (cost.update_seconds(shape, c, H200, completions, sign) for c in (made, scored, plain))
        return found + (one - other if made.rollout.backend == "server" else 0)

    return tuple(seconds(sign) * (1 + sign * spread) for sign in (-1, 1))


def test_updates_are_within_the_stated_range_of_measured_seconds():
    split = config(rollout__backend="server", rollout__max_prompt_length=30, rollout__max_completion_length=512)
    low, high = update_range(SHAPE, split, 64)
    assert low < 8.2 < high
    keys = {"rollout__max_prompt_length": 64, "rollout__max_completion_length": 2048}
    alone = config(rollout__backend="server", train__per_device_train_batch_size=1, **keys)
    low, high = update_range(SHAPE, alone, 8)
    assert low < 4.3 < high
    for one in json.loads(POINTS.read_text())["points"]:
        if one["kind"] != "server":
            low, high = update_range(point_shape(one), point_config(one), one["completions"])
            assert low < one["update_s"] < high, one["shape"]


def one_card(**changes):
    """The card's GiB with the trainer and server of bench/README.md."""
    keys = {"rollout__backend": "server", "rollout__max_prompt_length": 64, "rollout__max_completion_length": 2048}
    keys |= {"server__kv_cache": "fp8", "server__kv_cache_gib": 1.4, "server__max_num_seqs": 8}
    keys |= {"server__nf4_copy": "host", "server__enforce_eager": True, "train__max_gpu_gib": 9.0}
    keys |= {"train__per_device_train_batch_size": 1, "train__gradient_accumulation_steps": 8}
    return lay_out(SHAPE, config(**keys | changes), H200, 1).cards[0].peak.expected


def test_trainer_and_server_on_one_card_are_within_ten_percent():
    assert one_card(server__sleep=True) == pytest.approx(22.6, rel=LIMIT)
    assert one_card(server__sleep=False) == pytest.approx(26.3, rel=LIMIT)


SELECTIVE = {"train__recompute": "selective", "train__micro_batch_tokens": 8192, "model__dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        ({"train__recompute": "none"}, {"train__recompute": "selective"}),
        ({"train__recompute": "selective"}, {"train__recompute": "full"}),
        ({"train__recompute_fraction": 0.5}, {}),
        ({"policy__compute": "fp8"}, {"policy__compute": "fused"}),
        ({"policy__kernels": "liger"}, {}),
        ({"train__micro_batch_tokens": 8192}, {"train__micro_batch_tokens": 8192, "train__share_prompts": False}),
        (SELECTIVE, SELECTIVE | {"train__packed_attention": "flex"}),
    ],
    ids=str,
)
def test_switches_of_a_faster_step_take_less_time(fast, slow):
    keys = {"rollout__max_completion_length": 1024, "rollout__backend": "server"}
    faster, slower = (cost.update_seconds(SHAPE, config(**keys, **one), H200, 64) for one in (fast, slow))
    assert faster < 0.995 * slower


def test_with_overlap_a_step_takes_the_longer_of_rollout_and_update():
    keys = {"rollout__backend": "server", "rollout__max_completion_length": 1024}
    alone, behind = (
        cost.step_time(SHAPE, config(**keys, rollout__overlap=overlap), H200, 128, 1, 1, 40.0)
        for overlap in (False, True)
    )
    assert (alone.rollout, alone.update) == (behind.rollout, behind.update)
    assert behind.step == max(alone.rollout, alone.update) + alone.other < alone.step
    assert behind.low < behind.step < behind.high < alone.high
    shared = cost.step_time(SHAPE, config(**keys, rollout__overlap=True), H200, 128, 1, 1, 40.0, shares=True)
    assert shared == alone and not shared.overlaps


def test_every_coefficient_says_its_unit_and_source():
    for name, one in TABLE.items():
        assert one.value > 0 and one.unit and len(one.source) > 10, name


def point(**changes):
    model = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    model |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    found = {"kind": "trainer", "shape": "8b", "model": model, "micro_batch": 1, "completions": 4}
    found |= {"prompt_tokens": 64, "completion_tokens": 2048, "gradient_checkpointing": True, "beta": 0.01}
    found |= {"lora_rank": 16, "adapter_dtype": "float32", "backend": "server", "peak_gib": 7.5}
    return found | changes


def points_file(folder: Path, *points) -> Path:
    file = folder / "points.json"
    file.write_text(json.dumps({"card": "NVIDIA H200", "date": "2026-11-21", "points": list(points)}))
    return file


def test_check_prints_the_error_and_fails_above_ten_percent(tmp_path, capsys):
    assert check(str(points_file(tmp_path, point())), as_json=False) == 0
    assert "| trainer 8b, 1 x (64 + 2048) |" in capsys.readouterr().out
    assert check(str(points_file(tmp_path, point(), point(peak_gib=9.5))), as_json=False) == 1
    assert "the worst: -" in capsys.readouterr().out
    assert check(str(points_file(tmp_path, point(), point(error="out of memory", peak_gib=None))), as_json=True) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_check_names_a_file_it_cannot_use(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        check(str(tmp_path / "none.json"), as_json=False)
    with pytest.raises(BadInput, match="holds no measured point"):
        check(str(points_file(tmp_path)), as_json=False)
    with pytest.raises(BadInput, match="is not what"):
        check(str(points_file(tmp_path, {"kind": "trainer"})), as_json=False)


def test_a_points_configuration_is_the_one_it_was_measured_with():
    made = point_config(point(kind="server", weights="bf16", sync="adapter", kv_cache_gib=2, max_num_seqs=64))
    assert (made.server.weights, made.rollout.sync, made.server.kv_cache_gib) == ("bf16", "adapter", 2)
    made = point_config(point(micro_batch=4, completions=8, gradient_checkpointing=False, adapter_dtype="bfloat16"))
    assert made.train.recompute == "none" and point_config(point()).train.recompute == "full"
    assert (made.train.gradient_accumulation_steps, made.policy.adapter_dtype) == (2, "bfloat16")
    assert len(rows_of(point(kind="rollout", backend="in_process", rollout_peak_gib=20.0), "NVIDIA H200")) == 2


def test_every_measured_point_is_within_five_percent():
    # The goal is ten; 3.2 is the worst today.
    rows = compare(json.loads(POINTS.read_text()))
    assert len(rows) >= 12
    assert [f"{row.name}: {100 * row.error:+.1f} %" for row in rows if abs(row.error) > 0.05] == []


def test_what_trainer_processes_took_of_the_card_lies_between_low_and_high():
    for one in json.loads(POINTS.read_text())["points"]:
        if one["kind"] != "server":
            phases = memory.trainer_phases(point_shape(one), point_config(one), H200, padded=False)
            found = max(map(lambda parts: memory.process_memory(parts, H200).high, phases.values()))
            expected = max(map(lambda parts: memory.process_memory(parts, H200).expected, phases.values()))
            taken = one["reserved_gib"] + one["context_gib"]
            assert taken <= found
            assert expected == pytest.approx(taken, rel=LIMIT), one["shape"]
