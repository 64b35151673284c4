"""Settings that conflict with `train.sequence_parallel`, refused before a model loads."""

import pytest
from transformers import Qwen3Config

from kit.core.config.checks import check_config
from kit.core.errors import BadInput
from kit.plan.memory import micro_batch
from kit.policy.packed.packing import check_packing
from tests.unit.test_checks import configuration, refusal

SPLIT = {"train__sequence_parallel": 2, "train__micro_batch_tokens": 100}


@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"train__micro_batch_tokens": "null"}, 2, "train.sequence_parallel (2) without train.micro_batch_tokens"),
        ({}, 3, "train.sequence_parallel (2) does not divide the 3 processes of accelerate launch"),
        ({}, 1, "does not divide the 1 process of"),
        ({"policy__lora_dropout": 0.1}, 2, "with policy.lora_dropout (0.1): each process would draw the same mask"),
        ({"rollout__routing": "replay"}, 2, "with rollout.routing replay"),
        ({"train__sequence_parallel": 0}, 2, "train.sequence_parallel"),
    ],
)
def test_what_cannot_be_split_is_refused(changes, processes, said):
    assert said in refusal(processes, **{**SPLIT, **changes})


def test_a_pack_of_all_processes_has_to_hold_the_longest_completion():
    rollout = configuration().rollout
    longest = rollout.max_prompt_length + rollout.max_completion_length
    least = -(-longest // 2)
    check_config(configuration(**{**SPLIT, "train__micro_batch_tokens": least}), 2)
    said = refusal(2, **{**SPLIT, "train__micro_batch_tokens": least - 1})
    assert f"train.micro_batch_tokens ({least - 1}) x train.sequence_parallel (2) is below" in said
    assert f"Use {least} or more." in said


@pytest.mark.parametrize(
    ("heads", "key_heads", "said"),
    [
        (6, 6, "6 attention heads do not divide over 4"),
        (12, 6, "6 heads of keys and values neither divide"),
        (8, 2, ""),
    ],
)
def test_heads_have_to_divide(heads, key_heads, said):
    config = configuration(**{**SPLIT, "train__sequence_parallel": 4, "train__packed_attention": "flex"})
    facts = Qwen3Config(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=16, layer_types=None)
    if not said:
        check_packing(config, facts)
        return
    with pytest.raises(BadInput, match=said):
        check_packing(config, facts)


def test_the_plan_counts_the_part_that_a_process_computes():
    longest = configuration().rollout.max_prompt_length + configuration().rollout.max_completion_length
    whole = micro_batch(configuration(train__micro_batch_tokens=1))
    assert whole == (longest, longest), "a longer row gets a pack of its own"
    part = micro_batch(configuration(train__micro_batch_tokens=1, train__sequence_parallel=2))
    assert part == (-(-longest // 2),) * 2
