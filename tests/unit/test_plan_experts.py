"""The plan of mixtures of experts, wrapped checkpoints, windows and linear attention: against what transformers
builds, what the kit stores and what a forward and backward pass allocate."""

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.plan import cost, memory
from kit.plan.coefficients import value
from kit.plan.decoder import Shape
from kit.plan.fitting import candidates, lay_out
from kit.plan.gpus import CARDS
from kit.plan.report import title
from kit.plan.shapes import DENSE, UNGATED, config_shape, find_shape, shape_by_size, shape_from_facts
from tests.conftest import CONFIG
from tests.unit.test_plan_activations import SEQUENCES, TOKENS, Allocations, as_on_a_gpu, as_peft_on_a_gpu  # noqa: F401
from tests.unit.test_plan_memory import config
from tests.unit.wrapped_models import FAMILIES as WRAPPED
from tests.unit.wrapped_models import make_wrapped

GIB, H200 = 2**30, CARDS["h200"]
MIXTURE = shape_by_size("30b-a3b")
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"intermediate_size": 96, "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 80}
ROUTED = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = [
    ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0]}),
    ("qwen2_moe", SHARED | {"decoder_sparse_step": 2}),
    ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    ("glm4_moe", ROUTED | {"n_shared_experts": 2}),
    ("qwen3_next", SHARED),
    ("qwen3_5_moe_text", SHARED),
    ("qwen3_5_text", {}),
    ("gemma3_text", {}),
    ("gemma2", {}),
]


def built(kind: str, keys: dict[str, Any]) -> tuple[Any, torch.nn.Module]:
    """A transformers config and its model on the meta device."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    facts = CONFIG_MAPPING[kind](**SIZES | keys)
    with torch.device("meta"):
        return facts, AutoModelForCausalLM.from_config(facts)


@pytest.mark.parametrize(("kind", "keys"), FAMILIES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_shape_has_the_weights_that_transformers_builds(kind, keys):
    from kit.weights.layout import expert_matrices, unquantized_names

    facts, model = built(kind, keys)
    shape, others = shape_from_facts(facts.to_dict(), "x"), unquantized_names(model)
    linears = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name not in others]
    experts = sum(one.rows * one.columns for one in expert_matrices(model).values())
    assert shape.linear_weights == sum(one.weight.numel() for one in linears) + experts
    assert shape.parameters == sum(one.numel() for one in model.parameters())
    names = {name.rpartition(".")[2] for name, one in model.named_modules() if one in linears}
    assert set(shape.targeted("all-linear")) == names


# Published numbers of weights in billions: in all, and of the text part or active on a token.
PUBLISHED = {"qwen3-30b-a3b": (30.5, 3.3), "gemma3-12b": (12.187, 11.766), "gemma3-27b": (27.432, 27.009)}
PUBLISHED |= {"qwen3.5-9b": (9.4, 9.0), "qwen3.5-27b": (27.4, 26.9)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_the_table_have_the_published_number_of_weights(name):
    shape, (whole, text) = shape_by_size(name), PUBLISHED[name]
    assert shape.parameters / 1e9 == pytest.approx(whole, rel=0.005)
    assert (shape.active_parameters - shape.vision) / 1e9 == pytest.approx(text, rel=0.02)


def test_the_built_in_qwen3_5_has_the_defaults_of_transformers():
    from transformers import Qwen3_5TextConfig

    shape = shape_from_facts(Qwen3_5TextConfig().to_dict(), "x")
    known = shape_by_size("qwen3.5-9b")
    differing = {"name": "x", "positions": shape.positions, "vision": 0}
    assert dataclasses.replace(known, **differing) == shape


@pytest.mark.parametrize("kind", [kind for kind in DENSE if not kind.endswith("_vl_text")])
def test_a_dense_family_has_the_weights_that_transformers_builds(kind):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    heads = {"num_key_value_heads": 4} if kind in UNGATED else {}  # some have no other
    even = dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0) | {"global_head_dim": 16}
    facts = CONFIG_MAPPING[kind](**SIZES | {"bos_token_id": 1} | heads | (even if kind == "gemma4_text" else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(facts)
    head, shape = model.get_output_embeddings(), shape_from_facts(facts.to_dict(), "x")
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    assert shape.linear_weights == sum(one.weight.numel() for one in linears)
    positions = sum(one.numel() for name, one in model.named_parameters() if "position" in name)
    # Norms of other sizes and biases are not counted.
    assert shape.parameters == pytest.approx(sum(one.numel() for one in model.parameters()) - positions, rel=0.02)


@pytest.mark.parametrize("family", WRAPPED)
def test_a_wrapped_checkpoint_is_planned_as_the_language_model_that_is_trained(family, tmp_path):
    from kit.weights.model_files import unquantized_config, without_weights

    text = unquantized_config(make_wrapped(tmp_path, family))
    model, shape = without_weights(text), find_shape(str(tmp_path))
    head = model.get_output_embeddings()
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    assert shape.linear_weights == sum(one.weight.numel() for one in linears)
    assert shape.parameters - shape.vision == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.005)
    # As a run asks, which has read the configuration of the language model alone.
    run = load_config(CONFIG, [f"--model.path={tmp_path}"])
    assert config_shape(run, text.to_dict()).vision == shape.vision > 0


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3"])
def test_a_wrapped_configuration_gives_its_text_and_the_size_of_its_vision_part(kind, tmp_path):
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text = SIZES | {"tie_word_embeddings": True}
    text = {key: size for key, size in text.items() if key not in ("pad_token_id", "eos_token_id")}
    seen = {"vision_config": {"vision_use_head": False}} if kind == "gemma3" else {}  # as in the published one
    wrapped = CONFIG_MAPPING[kind](text_config=text, **seen)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(wrapped)
    wrapped.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    spoken = sum(size for name, size in sizes.items() if "language_model" in name or "lm_head" in name)
    assert shape.parameters - shape.vision == spoken
    assert shape.vision == pytest.approx(sum(sizes.values()) - spoken, rel=0.05)


def test_the_vision_part_is_held_by_the_server_alone():
    shape, made = shape_by_size("gemma3-12b"), config(rollout__backend="server", server__tensor_parallel=2)
    blind = dataclasses.replace(shape, vision=0)
    assert memory.server_parts(shape, made, H200)["vision weights"] == pytest.approx(2 * shape.vision / 2 / GIB)
    assert "vision weights" not in memory.server_parts(blind, made, H200)
    assert memory.trainer_phases(shape, made, H200) == memory.trainer_phases(blind, made, H200)


REFUSED = [
    ("gpt_oss", {"num_local_experts": 8}, "experts have biases"),
    ("deepseek_v2", {"n_routed_experts": 8, "kv_lora_rank": 32}, "kv_lora_rank 32"),
    ("jamba", {"num_experts": 8}, "which layers have experts is known for"),
    ("lfm2", {"layer_types": ["conv"] * 4}, "none of the .* dense families"),
    ("falcon_h1", {}, "none of the .* dense families"),
    ("llama", {"layer_types": ["chunked_attention"] * 4}, "layer_types have chunked_attention"),
    ("llama", {"layer_types": ["linear_attention"] * 4}, "not the gated delta rule"),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers 2"),
    ("gemma4_text", {"global_head_dim": 32}, "global_head_dim 32"),
]


@pytest.mark.parametrize(("kind", "keys", "complaint"), REFUSED)
def test_a_model_whose_layers_are_not_known_is_refused_with_the_reason(kind, keys, complaint):
    with pytest.raises(BadInput, match=complaint) as caught:
        shape_from_facts(SIZES | keys | {"model_type": kind}, "some/model")
    assert str(caught.value).startswith(f"some/model ({kind}) is not covered by the plan: ")


def test_the_cache_holds_windows_and_states():
    gemma, hybrid = shape_by_size("gemma3-12b"), shape_by_size("qwen3.5-9b")
    token = 2 * 8 * 256 * 2  # keys and values of 8 heads of 256, 2 bytes each
    assert gemma.cached_bytes(1000, 2) == 48 * 1000 * token
    assert gemma.cached_bytes(5000, 2) == (8 * 5000 + 40 * 1024) * token
    state = 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert hybrid.cached_bytes(5000, 2) == 8 * 5000 * 2 * 4 * 256 * 2 + state
    made = config(rollout__max_prompt_length=1000, rollout__max_completion_length=4000)
    assert memory.sequence_gib(gemma, made) == gemma.cached_bytes(5000, 2) / GIB


def test_eager_attention_holds_scores_and_another_kernel_does_not():
    capped = dataclasses.replace(shape_by_size("8b"), soft_cap=True)
    made, length = config(), 768
    scores = 36 * 32 * length * (4 + 2 + 2)

    def kept(shape, **keys):
        return 36 * memory.layer_bytes(shape, config(**keys), padded=True)

    assert made.rollout.max_prompt_length + made.rollout.max_completion_length == length
    assert kept(capped) - kept(shape_by_size("8b")) == pytest.approx(scores)
    assert kept(capped, model__attn_implementation="flash_attention_2") == kept(shape_by_size("8b"))
    plain = kept(shape_by_size("8b"), model__attn_implementation="eager") - kept(shape_by_size("8b"))
    assert plain == pytest.approx(scores * 6 / 8)


def test_attention_is_counted_within_the_window():
    gemma = shape_by_size("gemma3-12b")
    assert gemma.attended_share(1024) == 1
    # Pairs of a causal row of n tokens and a window of w: w n - w²/2, of n²/2.
    assert gemma.attended_share(4096) == pytest.approx((8 + 40 * (2 * 1024 * 4096 - 1024**2) / 4096**2) / 48)
    assert shape_by_size("qwen3.5-9b").attended_share(4096) == 8 / 32
    assert shape_by_size("8b").attended_share(4096) == 1


def test_an_update_multiplies_a_token_with_its_experts_alone():
    dense = dataclasses.replace(MIXTURE, experts=None, intermediate=8 * 768)
    keys = {"train__beta": 0.0, "train__recompute": "none", "rollout__max_completion_length": 2048}
    made = config(**keys)
    slow = dataclasses.replace(H200, half_tflops=1e-3, gb_per_s=1e9)
    one, other = (cost.update_seconds(shape, made, slow, 8) for shape in (MIXTURE, dense))
    assert one == pytest.approx(other, rel=1e-3)
    assert MIXTURE.active_weights == dense.linear_weights


def test_a_decode_step_reads_the_experts_that_its_sequences_take():
    assert MIXTURE.weights_read(1) == pytest.approx(MIXTURE.active_weights)
    assert MIXTURE.weights_read(1000) == pytest.approx(MIXTURE.linear_weights)
    made = config(rollout__backend="server", server__max_num_seqs=512)
    few, many = (cost.decode_seconds(MIXTURE, made, H200, count) for count in (1, 64))
    assert 2 * few < many < 64 * few


def test_a_sync_takes_what_its_adapter_and_the_folded_weights_do():
    made = config(rollout__backend="server", policy__adapter_dtype="bfloat16")
    assert cost.sync_seconds(shape_by_size("8b"), made, H200) == pytest.approx(0.157, rel=0.02)
    few, many = (config(rollout__backend="server", policy__expert_rank=rank) for rank in (4, 8))
    grown = 48 * 128 * 4 * (2048 + 1536 + 768 + 2048)
    assert memory.sync_bytes(MIXTURE, many) - memory.sync_bytes(MIXTURE, few) == 4 * grown
    seconds = cost.sync_seconds(MIXTURE, many, H200) - cost.sync_seconds(MIXTURE, few, H200)
    assert seconds == pytest.approx(4 * grown / 1e9 * value("sync_s_gb"))


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"policy__compute": "fp8"}, "policy.compute fp8 does not reach experts"),
        ({"policy__quant_cfg": "fp8"}, "policy.quant_cfg does not reach experts"),
        ({"rollout__backend": "server", "rollout__sync": "adapter"}, "Set rollout.sync to remerge"),
        ({"policy__lora_dropout": 0.1}, "policy.lora_dropout"),
    ],
)
def test_what_does_not_reach_experts_is_a_fault_of_the_plan(keys, complaint):
    layout = lay_out(MIXTURE, config(**keys), H200, 2)
    assert any(complaint in one for one in layout.faults)
    assert not lay_out(shape_by_size("8b"), config(), H200, 2).faults
    without = config(**keys, policy__expert_rank=0)
    if "adapter" in complaint or "remerge" in complaint or "dropout" in complaint:
        assert not lay_out(MIXTURE, without, H200, 2).faults


def test_a_plan_says_how_many_weights_are_active_and_offers_a_smaller_adapter_on_experts():
    layout = lay_out(MIXTURE, config(policy__expert_rank=8), CARDS["rtx4090"], 1)
    assert "(30.53 B weights, 3.35 B active)" in title(layout)
    assert {"policy.expert_rank": 4} in [keys for keys, _ in candidates(layout)]
    smaller = lay_out(MIXTURE, config(policy__expert_rank=4), CARDS["rtx4090"], 1)
    assert smaller.worst.peak.expected < layout.worst.peak.expected - 2


# --- against real tensors

TRACED = {"hidden_size": 128, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 384, "vocab_size": 200}
TRACED_EXPERTS = EXPERTS | {"moe_intermediate_size": 192}
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
DELTA |= {"linear_num_value_heads": 4}


def run_config(recompute: str, expert_rank: int = 4) -> Any:
    keys = {"train.recompute": recompute, "policy.expert_rank": expert_rank, "policy.lora_rank": 4, "train.beta": 0.0}
    keys |= {"train.per_device_train_batch_size": SEQUENCES, "rollout.group_size": SEQUENCES}
    keys |= {"train.gradient_accumulation_steps": 1, "model.dtype": "bfloat16"}
    keys |= {"rollout.max_prompt_length": 1, "rollout.max_completion_length": TOKENS - 1}
    keys |= {"policy.target_modules": "all-linear"}
    return load_config(CONFIG, [f"--{key}={one}" for key, one in keys.items()])


def policy(kind: str, keys: dict[str, Any], made: Any) -> tuple[Shape, torch.nn.Module]:
    """A random NF4 policy of this family with an adapter, as the recipe loads it."""
    from peft import get_peft_model
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from kit.policy.adapted_experts import targets_as_named, use_adapted_experts
    from kit.policy.load import lora_config, set_adapter_dtype
    from kit.policy.recompute import use_recompute
    from kit.weights.frozen_base import load_frozen

    facts = CONFIG_MAPPING[kind](**SIZES | TRACED | {"tie_word_embeddings": False} | keys)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(facts, dtype=torch.bfloat16).save_pretrained(folder)
        model = load_frozen(folder, "nf4", dtype="bfloat16", device="cpu", double_quantization=True)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    with targets_as_named():
        model = get_peft_model(model, lora_config(made.policy, model))
    set_adapter_dtype(model, "float32")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, and then A's gradient is
            torch.nn.init.normal_(parameter, std=0.1)
    use_adapted_experts(model)
    use_recompute(model, made)
    if made.train.recompute != "none":
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return shape_from_facts(facts.to_dict(), "x"), model.train()


def stored(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, and what bitsandbytes keeps beside a weight."""
    yield from model.parameters()
    yield from model.buffers()
    for parameter in model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def follow(model: torch.nn.Module, backward: bool) -> float:
    """Bytes after a forward pass, or at the peak of the backward pass."""
    ids = torch.randint(2, 96, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with Allocations({one.untyped_storage()._cdata for one in stored(model)}) as seen:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        kept = seen.now
        if backward:
            out.log_probs.sum().backward()
    return seen.peak if backward else kept


SPARSE = ("qwen3_moe", TRACED_EXPERTS)
KEPT = [
    (SPARSE, 4),
    (SPARSE, 0),
    (("qwen2_moe", TRACED_EXPERTS | {"shared_expert_intermediate_size": 256}), 4),
    (("qwen3_5_text", DELTA | {"layer_types": ["linear_attention"]}), 4),
    (("qwen3_5_text", DELTA | {"layer_types": ["full_attention"]}), 4),
    (("gemma3_text", {"sliding_window": 64, "layer_types": ["sliding_attention"]}), 4),
    (("gemma3_text", {"layer_types": ["full_attention"]}), 4),
    (("gemma2", {"layer_types": ["full_attention"]}), 4),  # eager, because it caps scores
]


def of_layers(family: tuple[str, dict], layers: int) -> tuple[str, dict]:
    kind, keys = family
    kinds = {"layer_types": keys["layer_types"] * layers} if "layer_types" in keys else {}
    return kind, keys | kinds | {"num_hidden_layers": layers}


@pytest.mark.parametrize(("family", "expert_rank"), KEPT, ids=str)
def test_a_layer_keeps_what_the_plan_says(family, expert_rank):
    made = run_config("none", expert_rank)
    found = {}
    for layers in (1, 3):
        shape, model = policy(*of_layers(family, layers), made)
        found[layers] = follow(model, backward=False)
    tokens = SEQUENCES * TOKENS
    predicted = tokens * memory.layer_bytes(shape, made, padded=False) + memory.copied_gib(shape, made) * GIB
    if memory.has_window(shape, made):
        predicted += tokens * 2 * TOKENS  # a mask in 16 bits
    assert (found[3] - found[1]) / 2 == pytest.approx(predicted, rel=0.03)


PEAKS = [
    (SPARSE, "full"),
    (SPARSE, "selective"),
    (SPARSE, "none"),
    (("qwen3_moe", TRACED_EXPERTS | {"num_experts_per_tok": 4, "moe_intermediate_size": 768}), "full"),
    (("qwen3_moe", TRACED_EXPERTS | {"mlp_only_layers": [1]}), "full"),
    (("qwen3_5_text", DELTA | {"layer_types": ["linear_attention"]}), "full"),
    (("qwen3_5_text", DELTA | {"layer_types": ["linear_attention"]}), "selective"),
    (("gemma3_text", {"sliding_window": 64, "layer_types": ["sliding_attention"]}), "none"),
    (("gemma3_text", {"layer_types": ["full_attention"]}), "selective"),
    (("gemma2", {"layer_types": ["full_attention"]}), "full"),
]


@pytest.mark.parametrize(("family", "recompute"), PEAKS, ids=str)
def test_the_backward_pass_peaks_where_the_plan_says(family, recompute, monkeypatch):
    made = run_config(recompute)
    shape, model = policy(*of_layers(family, 3), made)
    monkeypatch.setattr(memory, "tile_gib", lambda *given: 0.0)  # the tiles are small here
    parts = memory.update_parts(shape, made, H200, padded=False)
    moving = {name: gib for name, gib in parts.items() if name not in (*memory.RESIDENT, "workspace", "gradients")}
    # The layers before the peak have their gradients by then.
    predicted = sum(moving.values()) + parts["gradients"] * 2 / 3
    assert follow(model, backward=True) / GIB == pytest.approx(predicted, rel=0.08)


def test_few_rows_peak_with_all_experts_of_a_layer_in_16_bits():
    made = run_config("full")
    both, down = memory.stack_gib(MIXTURE, made)
    assert both == 2 * down == pytest.approx(128 * 1536 * 2048 * (2 + 8 / 64) / GIB)
    assert both * 0.9 < memory.experts_gib(MIXTURE, made, 512) < both * 1.1
    # With many rows what they are sorted into is more: eight rows of a token's outputs, three times.
    assert memory.experts_gib(MIXTURE, made, 32768) > 3 * 8 * 32768 * 2048 * 2 / GIB


def test_what_a_loaded_mixture_stores_and_trains_is_what_the_plan_counts():
    from kit.weights.experts import experts_of

    made = run_config("full", expert_rank=3)
    # 128 x 128 weights are 256 blocks: a whole group of double quantization.
    shape, model = policy("qwen3_moe", EXPERTS | {"moe_intermediate_size": 128, "num_hidden_layers": 2}, made)
    linear = 0
    for parameter in model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            linear += parameter.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    experts = 0
    for one in experts_of(model).values():
        buffers = [tensor for name, tensor in one.named_buffers() if name.endswith(("_absmax", "_absmax2"))]
        experts += sum(tensor.nbytes for tensor in (*one.parameters(), *buffers))
    predicted = memory.resident(shape, made, H200)
    assert linear + experts == pytest.approx(predicted["NF4 weights"] * GIB, rel=1e-3)
    assert experts / (2 * 8 * 3 * 128 * 128) == pytest.approx(memory.nf4_bytes(True))
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert memory.adapter_weights(shape, made) == trained
    assert memory.expert_rank(config(policy__lora_rank=32)) == 32


def test_a_server_folds_a_layers_experts_and_moves_rows_of_theirs():
    keys = {"rollout__backend": "server", "server__kv_cache_gib": 2.0}
    made = config(**keys)
    found = memory.server_parts(MIXTURE, made, H200)
    assert found["weights"] == MIXTURE.linear_weights / GIB
    assert found["copy of the base"] == pytest.approx(MIXTURE.linear_weights * (0.5 + 4 / 64) / GIB)
    assert found["folding a layer"] == pytest.approx(128 * 1536 * 2048 * value("fold_bytes") / GIB)
    halves = memory.server_parts(MIXTURE, config(**keys, server__tensor_parallel=2), H200)
    assert halves["folding a layer"] == pytest.approx(found["folding a layer"] / 2)


def test_a_points_file_may_name_the_family_and_the_rank_on_experts():
    from kit.plan.compare_points import point_config, point_shape

    keys = EXPERTS | {"model_type": "qwen3_moe", "tie_word_embeddings": False}
    point = {"kind": "trainer", "shape": "30b-a3b", "model": SIZES | keys, "lora_rank": 16, "expert_rank": 8}
    assert point_shape(point).experts.count == 8
    assert point_config(point).policy.expert_rank == 8


def test_a_file_that_leaves_defaults_out_is_completed_by_transformers(tmp_path):
    facts = {key: size for key, size in (SIZES | EXPERTS).items() if key != "num_experts"}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"model_type": "qwen3_moe", "num_experts": 16}))
    shape = find_shape(str(tmp_path))
    assert (shape.experts.count, shape.experts.taken, shape.experts.layers, shape.tied) == (16, 2, 4, False)
    (tmp_path / "config.json").write_text(json.dumps(facts | {"model_type": "nothing_known", "num_experts": 16}))
    with pytest.raises(BadInput, match="no model config at"):
        find_shape(str(tmp_path))
    assert math.prod(shape.expert_matrices[0]) == 64 * 128
