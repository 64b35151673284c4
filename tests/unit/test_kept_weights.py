"""`rollout.keep_weights`: kept weights change nothing but the time, and are gone after the block."""

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.core.formats import FORMATS
from kit.plan import memory
from kit.plan.gpus import Card
from kit.plan.shapes import find_shape
from kit.policy import kept_weights
from kit.policy.fused_linear import use_fused_linears
from kit.policy.kept_weights import keeping_weights, room_for
from kit.policy.quantized_linear import use_quantized_linears
from kit.weights.frozen_base import hash_base, load_nf4
from merge.verify import compute_in
from tests.unit.test_fused_linear import CONFIG

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10], [2, 11, 12, 13]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97, attention_bias=True, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    return place


@pytest.fixture
def policy(folder):
    """`policy(dtype, double, compute)`: an NF4 policy whose adapter is not zero."""

    def make(dtype="float32", double=True, compute="plain"):
        model = load_nf4(folder, dtype, double_quantization=double, device="cpu")
        torch.manual_seed(1)
        model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
        if compute != "plain":
            use_fused_linears(model, compute)
        return model

    return make


def sample(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens, and the scores (steps, rows, words) that they were drawn from."""
    torch.manual_seed(5)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "top_k": 0}
    with torch.no_grad():
        made = model.generate(input_ids=IDS, output_scores=True, return_dict_in_generate=True, **settings)
    return made.sequences, torch.stack(made.scores)


@pytest.fixture
def dequantized(monkeypatch):
    """One entry for every weight that bitsandbytes dequantizes."""
    from bitsandbytes.backends.cpu import ops

    made = []
    for kind in ("fp32", "bf16"):
        name = f"cdequantize_blockwise_cpu_nf4_{kind}"
        call = getattr(ops.lib, name)
        monkeypatch.setattr(ops.lib, name, lambda *args, call=call: made.append(1) or call(*args))
    return made


@pytest.mark.parametrize("compute", ["plain", "fused", "fp8"])
@pytest.mark.parametrize(("dtype", "double"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_a_rollout_with_kept_weights_samples_the_same_tokens_from_the_same_scores(policy, dtype, double, compute):
    model = policy(dtype, double, compute)
    tokens, scores = sample(model)
    with keeping_weights(model, "always"):
        kept_tokens, kept_scores = sample(model)
    assert torch.equal(tokens, kept_tokens) and torch.equal(scores, kept_scores)
    assert torch.equal(sample(model)[1], scores), "afterwards too"


@pytest.mark.parametrize("compute", ["plain", "fused"])
def test_every_weight_is_dequantized_once_a_rollout_and_let_go_also_after_an_error(policy, dequantized, compute):
    model = policy(compute=compute)
    sample(model)
    assert len(dequantized) == 14 * 12  # seven layers in two blocks, for each token
    dequantized.clear()
    with keeping_weights(model, "always"):
        sample(model)
        sample(model)
    assert len(dequantized) == 14
    with pytest.raises(ZeroDivisionError), keeping_weights(model, "always"):
        sample(model)
        raise ZeroDivisionError
    for module in model.modules():
        assert not {"kept", "forward"} & vars(module).keys()
    dequantized.clear()
    sample(model)
    assert len(dequantized) == 14 * 12


@pytest.mark.parametrize("compute", ["plain", "fused"])
def test_reference_gradients_and_the_base_s_hash_are_those_without_kept_weights(policy, compute):
    model, labels = policy(compute=compute), IDS
    trained = [one for one in model.parameters() if one.requires_grad]

    def facts():
        with torch.no_grad(), model.disable_adapter():
            reference = model(input_ids=IDS).logits
        loss = model(input_ids=IDS, labels=labels).loss
        return [reference, *torch.autograd.grad(loss, trained)]

    before, whole = facts(), hash_base(model)["hash"]
    with keeping_weights(model, "always"):
        sample(model)
        within = facts()
        assert hash_base(model)["hash"] == whole
    for found in (within, facts()):
        assert all(map(torch.equal, found, before))
    assert hash_base(model)["hash"] == whole and not torch.equal(before[0], model(input_ids=IDS).logits)


def test_what_is_computed_in_another_type_than_stored_is_the_same_too(folder):
    """The eval on a CPU: a base that was stored from BF16 computes in float32."""
    model = load_nf4(folder, "bfloat16", device="cpu")
    compute_in(model, torch.float32)
    _, scores = sample(model)
    with keeping_weights(model):
        assert torch.equal(sample(model)[1], scores)
        kept = [layer.kept for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)]
        assert all(weights.keys() == {torch.float32} for weights in kept) and len(kept) == 14


def test_inference_mode_as_the_eval_has_it_changes_nothing(folder, dequantized):
    model = load_nf4(folder, "float32", device="cpu")
    with torch.inference_mode():
        _, scores = sample(model)
        dequantized.clear()
        with keeping_weights(model):
            assert torch.equal(sample(model)[1], scores)
    assert len(dequantized) == 14


def test_weights_of_a_format_are_kept_by_the_same_block_and_never_means_never(policy):
    model = policy()
    use_quantized_linears(model, FORMATS["fp8"])
    _, scores = sample(model)
    layers = [module.product for module in model.modules() if hasattr(module, "product")]
    for mode, is_kept in (("always", True), ("never", False)):
        with keeping_weights(model, mode) as room:
            assert torch.equal(sample(model)[1], scores) and room.is_kept == is_kept
            assert all((product._kept is not None) == is_kept for product in layers)
        assert all(product._kept is None for product in layers)


def test_a_base_that_is_multiplied_with_as_it_is_stored_keeps_nothing():
    assert room_for(torch.nn.Sequential(torch.nn.Linear(4, 4))) is None
    with keeping_weights(torch.nn.Linear(4, 4), "always") as room:
        assert room is None


def test_automatic_is_half_of_what_generation_leaves_free(policy, monkeypatch):
    model = policy("bfloat16")
    needed = 2 * sum(
        one.in_features * one.out_features for one in model.modules() if isinstance(one, bnb.nn.Linear4bit)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(kept_weights, "decoding_gib", lambda model, rows, tokens: rows * tokens / 4)
    for free, is_kept in ((4.01, True), (3.99, False)):
        monkeypatch.setattr(kept_weights, "available_gib", lambda free=free: free * needed / 2**30 + 2 * 0.25)
        room = room_for(model, "auto", 1, 1)
        assert room.needed_gib == pytest.approx(needed / 2**30) and room.is_kept == is_kept
        assert room.free_gib == pytest.approx(free / 2 * needed / 2**30)
        assert room_for(model, "always", 1, 1).is_kept and not room_for(model, "never", 1, 1).is_kept
        with keeping_weights(model, "auto", 1, 1):
            sample(model)
            assert all(("kept" in vars(one)) == is_kept for one in model.modules() if type(one) is bnb.nn.Linear4bit)
    assert "keep" in str(room) and "do not" in str(room)


def test_what_generation_is_taken_to_need_is_what_the_plan_counts(policy, folder):
    made = load_config(CONFIG, ["--train.per_device_train_batch_size=16", "--rollout.max_prompt_length=1"])
    shape = find_shape(str(folder))
    parts = memory.generation_parts(shape, made, Card("roomy", 1000.0))
    found = kept_weights.decoding_gib(policy(), 16, 1 + made.rollout.max_completion_length)
    assert found == pytest.approx(parts["KV cache"] + parts["sampling"])


@pytest.mark.parametrize(("free", "held", "limit", "found"), [(4, 0, 1, 4), (4, 1, 1, 5), (9, 0, 0.5, 5 - 1.5)])
def test_on_a_gpu_free_is_what_the_card_and_train_max_gpu_gib_leave(monkeypatch, free, held, limit, found):
    cuda = {"mem_get_info": (free * 2**30, 10 * 2**30), "get_per_process_memory_fraction": limit}
    cuda |= {"memory_allocated": 1.5 * 2**30, "memory_reserved": (1.5 + held) * 2**30}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert kept_weights.free_gib(torch.device("cuda")) == pytest.approx(found)


def test_what_cannot_be_kept_is_refused_before_weights_load(monkeypatch):
    always = "--rollout.keep_weights=always"
    check_config(load_config(CONFIG, [always]), 1)
    with pytest.raises(BadInput, match=r"rollout\.keep_weights is always and rollout.backend server"):
        check_config(load_config(CONFIG, [always, "--rollout.backend=server"]), 1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(BadInput, match=r"rollout\.keep_weights is always under FSDP2"):
        check_config(load_config(CONFIG, [always]), 1)
    with pytest.raises(BadInput, match="keep_weights must be one of auto, always, never"):
        load_config(CONFIG, ["--rollout.keep_weights=yes"])
