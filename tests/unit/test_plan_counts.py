"""The plan's arithmetic against counts made here, on a shape and on cards whose figures are easy to count with."""

import dataclasses

import pytest

from kit.plan import cost, memory, quantized, recompute
from kit.plan.coefficients import value
from kit.plan.decoder import Shape
from kit.plan.fitting import lay_out
from kit.plan.gpus import CARDS, Card
from kit.plan.replica import replica_gib
from kit.plan.shapes import shape_by_size, shape_from_facts
from kit.plan.sizes import with_keys
from kit.plan.splitting import splits
from launch.vllm_command import SERVED_RANKS
from tests.unit.test_plan_memory import config

GIB = 2**30
H200 = CARDS["h200"]
EIGHT = shape_by_size("8b")
SMALL = Shape("small", 64, 160, 4, heads=4, kv_heads=2, head_dim=24, vocabulary=1000, tied=False, positions=4096)
# One layer: q, k, v, o and gate, up, down.
WEIGHTS = 64 * 96 + 2 * 64 * 48 + 96 * 64 + 3 * 64 * 160
EDGES = (64 + 96) + 2 * (64 + 48) + (96 + 64) + 3 * (64 + 160)
# Nothing takes time on them but arithmetic, or but moving bytes.
SLOW = Card("slow", 1000, half_tflops=1e-6, gb_per_s=1e9)
NARROW = Card("narrow", 1000, half_tflops=1e9, gb_per_s=1e-3)


def test_weights_are_those_of_the_matrices_norms_and_biases():
    assert SMALL.linear_weights == 4 * WEIGHTS
    assert SMALL.other_weights == 2 * 1000 * 64 + 64 + 4 * 2 * 64
    biased = dataclasses.replace(SMALL, tied=True, qkv_bias=True, qk_norm=True)
    assert biased.other_weights == 1000 * 64 + 64 + 4 * (2 * 64 + 2 * 24 + 96 + 2 * 48)
    assert SMALL.adapter_weights(3, "all-linear") == 4 * 3 * EDGES
    assert SMALL.adapter_weights(3, ["model.layers.0.q_proj", "down_proj"]) == 4 * 3 * ((64 + 96) + (160 + 64))
    assert dataclasses.replace(SMALL, gated=False).linear_weights == 4 * (WEIGHTS - 64 * 160)


def test_what_a_config_json_leaves_out_has_transformers_defaults():
    facts = {"model_type": "llama", "hidden_size": 60, "intermediate_size": 8, "num_hidden_layers": 2}
    facts |= {"num_attention_heads": 4, "vocab_size": 9, "attention_bias": True}
    found = shape_from_facts(facts, "x")
    assert (found.kv_heads, found.head_dim, found.tied, found.qkv_bias, found.qk_norm) == (4, 15, False, True, False)
    assert shape_from_facts(facts | {"num_key_value_heads": 2, "tie_word_embeddings": True}, "x").kv_heads == 2


@pytest.mark.parametrize(
    ("asked", "micro", "accumulation", "tokens"),
    [
        (None, 4, 8, 4 * 100),
        (150, 4, 8, 150),
        (90, 4, 8, 100),  # a row that is longer has a pack of its own
        (1000, 4, 2, 800),  # all rows of a step, of every accumulation
        (10_000, 2, 6, 1200),
    ],
)
def test_a_micro_batch_has_the_rows_or_the_tokens_that_are_there(asked, micro, accumulation, tokens):
    keys = {"train__per_device_train_batch_size": micro, "train__gradient_accumulation_steps": accumulation}
    keys |= {"rollout__max_prompt_length": 70, "rollout__max_completion_length": 30}
    scored = tokens if asked else micro * 30
    assert memory.micro_batch(config(**keys, train__micro_batch_tokens=asked)) == (tokens, scored)


@pytest.mark.parametrize(("mode", "fraction", "masks"), [("none", 1.0, 4), ("full", 1.0, 1), ("full", 0.5, 3)])
def test_a_padded_micro_batch_has_one_mask_of_each_layer_that_keeps_its_activations(mode, fraction, masks):
    same = dataclasses.replace(
        SMALL, kv_heads=4
    )  # keys and values are not repeated, so the masks are all that differs
    made = config(
        train__recompute=mode,
        train__recompute_fraction=fraction,
        train__per_device_train_batch_size=3,
        rollout__max_prompt_length=200,
        rollout__max_completion_length=300,
    )
    with_masks, without = (
        memory.allocated(memory.update_parts(same, made, H200, padded=padded)) for padded in (True, False)
    )
    # One of booleans for all layers, and one in 16 bits each; with layers run again also that of the running one.
    assert with_masks - without == pytest.approx(3 * 500**2 * (1 + 2 * masks) / GIB)


@pytest.mark.parametrize("rank", [1, 2, 16, 20, 64, 100, 500, 512])
@pytest.mark.parametrize("share", [1, 2])
def test_lora_slots_are_two_of_the_rank_that_is_served(rank, share):
    made = config(
        rollout__backend="server", rollout__sync="adapter", policy__lora_rank=rank, server__tensor_parallel=share
    )
    served = next(one for one in sorted(SERVED_RANKS) if one >= rank)
    found = memory.server_parts(SMALL, made, H200)
    assert found["LoRA slots"] == 2 * 4 * served * EDGES * 2 / GIB
    assert "copy of the base" not in found


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize(("weights", "width"), [("bf16", 2), ("fp8_per_channel", 1)])
def test_each_gpu_of_a_replica_holds_its_share(share, weights, width):
    keys = {"rollout__backend": "server", "server__tensor_parallel": share, "server__weights": weights}
    made = config(**keys, server__kv_cache_gib=3.0, server__max_num_seqs=100, server__enforce_eager=True)
    found = memory.server_parts(EIGHT, made, H200)
    linear = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) / share / GIB
    assert found["weights"] == pytest.approx(width * linear)
    assert found["16-bit layers"] == pytest.approx(2 * EIGHT.other_weights / share / GIB)
    # NF4 as it is read there: 4 bits and a float32 for 64 weights, whatever the trainer's double quantization.
    assert found["copy of the base"] == pytest.approx((0.5 + 4 / 64) * linear)
    assert found["folding a layer"] == pytest.approx(4096 * 2 * 12288 * value("fold_bytes") / share / GIB)
    assert found["KV cache"] == 3.0 and "CUDA graphs" not in found
    assert found["context"] == value("server_context_gib")
    # Keys and values of 8 heads of 128 in 36 layers, 2 bytes each, of a prompt of 512 and a completion of 256 tokens.
    assert memory.sequence_gib(EIGHT, made) == pytest.approx(768 * 2 * 36 * 8 * 128 * 2 / share / GIB)
    assert memory.full_cache_gib(EIGHT, made) == pytest.approx(100 * memory.sequence_gib(EIGHT, made))
    host = config(**keys, server__nf4_copy="host", server__sleep=True)
    fetched = memory.server_parts(EIGHT, host, H200)["layers fetched"]
    assert fetched == pytest.approx(value("fetched_share_sleep") * found["copy of the base"])


def test_the_kv_cache_gets_what_other_parts_leave_of_the_servers_share_and_not_what_vllm_does_not_know_of():
    made = config(rollout__backend="server", server__gpu_memory_utilization=0.6, server__nf4_copy="host")
    found = memory.server_parts(EIGHT, made, H200)
    known = {name: gib for name, gib in found.items() if name not in ("KV cache", "layers fetched")}
    assert found["KV cache"] == pytest.approx(0.6 * H200.gib - sum(known.values()), abs=0.3)
    assert found["layers fetched"] > 1
    whole = memory.server_memory(found, made)
    assert whole.high - whole.expected == pytest.approx(found["CUDA graphs"])


def test_a_sleeping_replica_keeps_its_copy():
    assert memory.asleep_memory({"copy of the base": 4.0, "weights": 8.0}).expected == 4.0 + value("asleep_gib")


def test_a_replica_is_counted_as_expected(monkeypatch):
    monkeypatch.setattr("kit.plan.replica.parse_gpus", lambda text: (H200, 1))
    made = config(model__id="Qwen/Qwen3-8B", rollout__backend="server", server__kv_cache_gib=5.0)
    one = memory.server_memory(memory.server_parts(EIGHT, made, H200), made)
    assert one.low < replica_gib(made) == one.expected < one.high
    assert replica_gib(config(model__id="nobody/nothing")) is None


def test_what_stays_in_the_trainer_is_counted_tensor_by_tensor():
    made = config(policy__lora_rank=5, train__optimizer="adamw_torch")
    found = memory.resident(SMALL, made, H200)
    trained = 4 * 5 * EDGES
    assert found["NF4 weights"] == pytest.approx(4 * WEIGHTS * (0.5 + (1 + 4 / 256) / 64) / GIB)
    assert found["16-bit layers"] == pytest.approx(2 * SMALL.other_weights / GIB)
    assert (found["adapter"], found["optimizer"]) == (4 * trained / GIB, 8 * trained / GIB)
    one, two = (memory.update_parts(SMALL, made, H200, processes=n)["gradients"] for n in (1, 2))
    assert (one, two) == (4 * trained / GIB, 8 * trained / GIB)  # the second time as the bucket that is reduced
    short = memory.update_parts(SMALL, config(policy__lora_rank=5, policy__adapter_dtype="bfloat16"), H200)
    assert short["gradients"] == 2 * trained / GIB
    host = config(policy__embeddings="host")
    assert found["16-bit layers"] - memory.resident(SMALL, host, H200)["16-bit layers"] == 2 * 64_000 / GIB
    on_cpu = Card("cpu", 64)
    assert memory.resident(SMALL, host, on_cpu) == memory.resident(SMALL, config(), on_cpu)


@pytest.mark.parametrize("offload", [False, True])
def test_checkpoints_are_the_inputs_of_the_layers_that_are_run_again(offload):
    made = config(train__recompute_offload=offload, train__per_device_train_batch_size=2)
    found = memory.update_parts(SMALL, made, H200)["checkpoints"]
    assert found == (2 if offload else 4) * 2 * 768 * 2 * 64 / GIB  # of offloaded ones, one moves and one is used


def test_a_process_takes_what_is_allocated_its_context_and_what_moving_parts_fragment():
    parts = {"NF4 weights": 5.0, "optimizer": 1.0, "activations": 0.1, "padding mask": 0.3}
    one, two = (memory.process_memory(parts, H200, n) for n in (1, 2))
    context = value("trainer_context_gib")
    assert (one.low, one.expected, one.high) == pytest.approx([6.4 + context + more for more in (0, 0.4, 0.4)])
    assert two.low - one.low == pytest.approx(value("process_group_gib"))
    large = memory.process_memory(parts | {"activations": 9.0}, H200)
    assert large.high - large.low == pytest.approx(value("fragmentation_high_gib"))
    assert large.expected - large.low == pytest.approx(value("fragmentation_gib"))


def test_a_rollout_in_process_holds_the_cache_of_every_completion_of_the_step():
    keys = {"train__per_device_train_batch_size": 4, "train__gradient_accumulation_steps": 6}
    made = config(**keys, rollout__max_prompt_length=16, rollout__max_completion_length=400)
    found = memory.generation_parts(SMALL, made, H200)
    cache = 24 * 416 * 2 * 4 * 48 * 2 / GIB
    assert found["KV cache"] == pytest.approx(cache)
    assert found["sampling"] == pytest.approx(cache / 4 + 24 * 1000 * 4 * value("sampling_copies") / GIB)
    served = config(rollout__backend="server", rollout__canary_prompts=3)
    # Logits of the three in 16 bits, and of one at a time in float32, twice.
    assert memory.generation_parts(SMALL, served, H200)["canary"] == (3 * 2 + 8) * 256 * 1000 / GIB


def products(keys, completions=24):
    """(products with the base, products with the head, of attention) that an update's time is made of, a token each,
    counted from the seconds on a card that does nothing but multiply."""
    made = config(rollout__max_prompt_length=60, rollout__max_completion_length=40, **keys)
    return cost.update_seconds(SMALL, made, SLOW, completions) * value("update_efficiency") * 1e-6 * 1e12


PACKED = {"train__micro_batch_tokens": 700}


@pytest.mark.parametrize(
    ("keys", "passes", "tokens", "pairs"),
    [
        ({"train__beta": 0.0}, 2, 24 * 100, 24 * 100**2),
        ({"train__beta": 0.1}, 3, 24 * 100, 24 * 100**2),
        ({"train__beta": 0.1, "train__num_iterations": 4}, 2.25, 24 * 100, 24 * 100**2),
        # A group's prompt is there once: a completion attends to it and to itself.
        (PACKED | {"train__beta": 0.0}, 2, 24 * 40 + 3 * 60, 24 * (40**2 + 2 * 40 * 60) + 3 * 60**2),
        (PACKED | {"train__beta": 0.0, "train__share_prompts": False}, 2, 24 * 100, 24 * 100**2),
    ],
    ids=str,
)
def test_the_arithmetic_of_an_update_is_that_of_its_passes(keys, passes, tokens, pairs):
    linear, head = 2 * 4 * WEIGHTS * tokens, 2 * 1000 * 64 * 24 * 40
    attention = 2 * 4 * 96 * pairs  # two products of 96 values a pair, half of them masked
    without = products(keys | {"train__recompute": "none"})
    assert without == pytest.approx(passes * (linear + head + attention), rel=1e-3)
    # Run again: all but the last product of a layer, and never the head.
    again = linear * (1 - 64 * 160 / WEIGHTS) + attention
    assert products(keys) - without == pytest.approx(again, rel=1e-3)
    half = products(keys | {"train__recompute_fraction": 0.5})
    assert half - without == pytest.approx(again / 2, rel=1e-3)


def served_seconds(completions=64, cache=1000.0, card=NARROW, **keys):
    made = config(rollout__max_prompt_length=256, rollout__max_completion_length=512, **keys)
    return cost.served_seconds(EIGHT, made, card, completions, cache_gib=cache)


def test_a_served_rollout_reads_the_weights_and_the_cache_for_every_token():
    keys = {"server__weights": "bf16", "server__max_num_seqs": 64}
    weights = 2 * (EIGHT.linear_weights + 151936 * 4096)
    cache = (256 + 512 / 2) * 147456 / value("decode_bandwidth")  # at half of the completion, on average
    token = (weights + 64 * cache) / 1e6
    assert served_seconds(**keys) == pytest.approx(512 * token, rel=1e-3)
    waves = 2 * 512 * (weights + 33 * cache) / 1e6  # 66 in two waves, as there are places for 64
    assert served_seconds(66, **keys) == pytest.approx(waves, rel=1e-3)
    room = 16.5 * 768 * 147456 / GIB  # and here, as the cache holds 16
    assert served_seconds(cache=room, **keys) == pytest.approx(4 * 512 * (weights + 16 * cache) / 1e6, rel=1e-3)
    assert served_seconds(**keys, server__tensor_parallel=2) == pytest.approx(256 * token, rel=1e-3)
    slower = served_seconds(**keys, rollout__sync="adapter") / served_seconds(**keys)
    assert slower == pytest.approx(value("adapter_slowdown"), rel=1e-3)


def test_a_served_rollout_reads_each_prompt_once_a_group():
    keys = {"server__weights": "bf16", "rollout__group_size": 8}
    found = served_seconds(card=SLOW, **keys)
    prompts = 2 * EIGHT.linear_weights * 256 * 64 / 8
    tokens = 512 * 64 * 2 * (EIGHT.linear_weights + 151936 * 4096)
    assert found == pytest.approx((prompts + tokens) / (value("decode_efficiency_bf16") * 1e6), rel=1e-3)


@pytest.mark.parametrize("iterations", [1, 4])
def test_a_step_is_shared_by_the_trainers_and_the_replicas(iterations):
    keys = {"rollout__backend": "server", "server__sleep": True, "train__num_iterations": iterations}
    made = config(**keys)
    found = cost.step_time(EIGHT, made, H200, 130, trainers=4, replicas=2, cache_gib=40.0)
    assert found.rollout == cost.served_seconds(EIGHT, made, H200, 65, 40.0) / iterations
    assert found.update == cost.update_seconds(EIGHT, made, H200, 33)  # of the process that has the most
    assert found.other == pytest.approx((cost.sync_seconds(EIGHT, made, H200) + value("sleep_s")) / iterations)
    assert found.low < found.step < found.high


FULL = {"train__micro_batch_tokens": 16384, "rollout__max_prompt_length": 1, "rollout__max_completion_length": 2047}


def test_room_for_recompute_is_what_the_replicas_high_figures_leave():
    """The cards are made as large as an update without recomputation and its replicas need, and a little smaller."""
    made = config(**FULL, rollout__backend="server", server__kv_cache_gib=10.0)
    parts = memory.server_parts(EIGHT, made, H200)
    kept = recompute.set_recompute(made, "none", 1.0)
    update = memory.process_memory(memory.update_parts(EIGHT, kept, H200, 2), H200, 2).high
    for sleep, server in ((False, memory.server_memory(parts, made)), (True, memory.asleep_memory(parts))):
        made.server.sleep = sleep
        for replicas in (0, 1, 2):
            for gib, mode in ((update + replicas * server.high + 0.01, "none"), (-0.01, "selective")):
                gib = gib if gib > 0 else update + replicas * server.high - 0.01
                card = dataclasses.replace(H200, gib=gib)
                assert recompute.least(EIGHT, made, card, 2, replicas)[0] == mode, (sleep, replicas, gib)


def test_the_limit_of_torchs_allocator_does_not_hold_the_context():
    made = config(**FULL)
    kept = recompute.set_recompute(made, "none", 1.0)
    one = memory.process_memory(memory.update_parts(EIGHT, kept, H200), H200)
    limit = one.high - value("trainer_context_gib")
    for more, mode in ((0.01, "none"), (-0.01, "selective")):
        made.train.max_gpu_gib = limit + more
        assert recompute.least(EIGHT, made, H200, 1, 0)[0] == mode


def test_small_layers_wait_for_the_host_and_its_pace_is_the_range():
    made = config(train__beta=0.0, train__recompute="none", train__per_device_train_batch_size=2)
    slow = value("launch_spread")
    seconds = [cost.update_seconds(SMALL, made, H200, 7, sign) for sign in (-1, 0, 1)]
    assert seconds == pytest.approx([4 * 2 * 4 * value("launch_s") * (1 + sign * slow) for sign in (-1, 0, 1)])
    found = cost.step_time(SMALL, made, H200, 7, trainers=1, replicas=0, cache_gib=0.0)
    spread = value("time_spread")
    assert found.low == pytest.approx((found.rollout + seconds[0]) * (1 - spread))
    assert found.high == pytest.approx((found.rollout + seconds[2]) * (1 + spread))


@pytest.mark.parametrize("fmt", ["w4a16", None])
def test_weights_are_kept_up_to_half_of_what_generation_leaves_free(fmt):
    made, whole = config(policy__quant_cfg=fmt), 2 * EIGHT.linear_weights / GIB
    for more, kept in ((1.01, whole), (0.99, 0.0)):
        made.train.max_gpu_gib = 7 + 2 * whole * more
        assert memory.kept_gib(EIGHT, made, H200, 7.0) == kept


def test_a_calibration_batch_is_no_larger_than_the_calibration():
    keys = {"policy__quant_cfg": "nvfp4", "policy__quant_batch_size": 8, "policy__quant_sequence_length": 100}
    assert quantized.calibration_tokens(config(**keys, policy__quant_calib_size=3)) == 3 * 100
    assert quantized.calibration_tokens(config(**keys, policy__quant_calib_size=64)) == 8 * 100


def test_every_split_takes_all_completions_of_the_step():
    keys = {"train__per_device_train_batch_size": 4, "train__gradient_accumulation_steps": 9}
    layout = lay_out(EIGHT, config(**keys, rollout__group_size=6), H200, 6)  # 36 completions on each card
    found = splits(layout)
    assert {one.trainers for one in found} == {1, 2, 3, 4, 6} and layout.completions == 216
    for one in found:
        micro = one.keys["train.per_device_train_batch_size"]
        assert one.trainers * micro * one.keys["train.gradient_accumulation_steps"] == 216 and micro <= 4


def test_what_fits_comes_before_what_is_faster():
    found = splits(lay_out(EIGHT, config(), CARDS["a100-80g"], 4))  # whose servers could not hold FP8
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    fitting, other = ([one.time.step for one in found if one.fits == fits] for fits in (True, False))
    assert fitting == sorted(fitting) and min(other) < max(fitting)


def test_trainer_context_and_server_of_a_shared_card_fit_on_it():
    layout = lay_out(EIGHT, config(train__per_device_train_batch_size=8), CARDS["h100-80g"], 2)
    shared = next(one for one in splits(layout) if one.trainers == one.servers == 2)
    made = with_keys(layout.config, shared.keys)
    server = memory.server_memory(memory.server_parts(EIGHT, made, layout.card), made).high
    context = value("trainer_context_gib") + value("process_group_gib")
    left = layout.card.gib - server - context - made.train.max_gpu_gib
    assert 0 <= left < 1
