"""Packed rows give the log-probs, entropies and gradients of TRL's padded pass, and compute every prompt once."""

import contextlib
import functools
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy.packed.attention import BLOCK, NAME, Segments, block_mask, dense_mask, register
from kit.policy.packed.packing import MODELS, check_packing, make_pack, pack_logps, plan_micro_batches
from tests.conftest import CONFIG

PAD, VOCABULARY, TEMPERATURE = 0, 89, 0.7
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "sliding_window": None,
}
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def tiny(model_type: str = "qwen3", **changes):
    """A random model with TRL's head and an adapter that is not zero."""
    config = AutoConfig.for_model(model_type, **{**SIZE, **changes})
    return adapted(AutoModelForCausalLM.from_config(config))


def adapted(base):
    add_fused_lm_head(base, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def batch(rows: list[tuple[list[int], list[int]]]):
    """TRL's padded tensors: input ids and mask (B, W) and the number C of completion columns."""
    before, after = max(len(p) for p, _ in rows), max(1, *(len(c) for _, c in rows))
    ids = [[PAD] * (before - len(p)) + p + c + [PAD] * (after - len(c)) for p, c in rows]
    real = [[0] * (before - len(p)) + [1] * (len(p) + len(c)) + [0] * (after - len(c)) for p, c in rows]
    return torch.tensor(ids), torch.tensor(real), after


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=count)


def rows_of(prompts: list[int], completions: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """A group for each length of a prompt, its completions of the lengths given, in an order as after a shuffle."""
    made = [
        (tokens(length, seed), tokens(size, 100 * seed + number))
        for seed, (length, sizes) in enumerate(zip(prompts, completions, strict=True))
        for number, size in enumerate(sizes)
    ]
    random.Random(1).shuffle(made)
    return made


ROWS = {
    "groups": rows_of([7, 12, 3], [[5, 9, 1, 12], [4, 4, 8], [6, 11]]),
    "an empty completion": rows_of([6, 4], [[5, 0, 3], [0, 0]]),
    "prompts of one token": rows_of([1, 1, 5], [[4, 7, 2], [3], [1, 1]]),
    "no group": rows_of([5, 8, 2, 9], [[6], [3], [9], [1]]),
    "a completion of one token": rows_of([4], [[1, 1, 1]]),
    "nothing to score": rows_of([4, 6], [[0, 0], [0]]),
}


@pytest.fixture(scope="module")
def stub():
    """What both passes need of a trainer."""
    return SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))


def padded_pass(stub, model, data):
    method = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__
    return method(stub, model, *data, compute_entropy=True)[:2]


def packed_pass(stub, model, data, share: bool):
    return pack_logps(stub, model, make_pack(stub, model, *data, share), True)


def gradients(model, logps, entropies, data) -> torch.Tensor:
    """Gradients of a loss that weights every position differently, padding included."""
    model.zero_grad()
    weight = torch.linspace(-1, 2, logps.numel()).view_as(logps) * data[1][:, -data[2] :]
    ((logps * weight).exp().sum() + (entropies * weight.sin()).sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def assert_equal_passes(stub, model, data, share: bool) -> None:
    wanted, got = padded_pass(stub, model, data), packed_pass(stub, model, data, share)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE)
        assert not ours[data[1][:, -data[2] :] == 0].any()
    ours, theirs = (gradients(model, *values, data) for values in (got, wanted))
    assert (ours - theirs).norm() <= CLOSE * theirs.norm()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_log_probs_entropies_and_gradients_are_those_of_the_padded_pass(stub, model_type, rows, share):
    assert_equal_passes(stub, tiny(model_type).train(), batch(rows), share)


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - {"qwen3", "llama"}))
def test_every_model_that_is_not_refused_gives_the_padded_pass(stub, model_type):
    assert_equal_passes(stub, tiny(model_type).train(), batch(ROWS["groups"]), True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_see_the_same_mask(stub, reentrant):
    model, data = tiny().train(), batch(ROWS["groups"])
    wanted = gradients(model, *packed_pass(stub, model, data, True), data)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_equal_passes(stub, model, data, True)
    got = gradients(model, *packed_pass(stub, model, data, True), data)
    assert (got - wanted).norm() <= CLOSE * wanted.norm()


@pytest.mark.parametrize("share", [True, False])
def test_the_reference_pass(stub, share):
    model, data = tiny().eval(), batch(ROWS["groups"])
    with torch.no_grad(), model.disable_adapter():
        got = packed_pass(stub, model, data, share)
        torch.testing.assert_close(got, padded_pass(stub, model, data), rtol=CLOSE, atol=CLOSE)
    with torch.no_grad():
        assert not torch.allclose(packed_pass(stub, model, data, share)[0], got[0], atol=1e-3), "the adapter is on"


def test_under_autocast_type_and_values_are_those_of_the_padded_pass():
    stub = SimpleNamespace(accelerator=SimpleNamespace(autocast=lambda: torch.autocast("cpu", torch.bfloat16)))
    model, data, products = tiny().eval(), batch(ROWS["groups"]), set()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, args, out: products.add(out.dtype))
    with torch.no_grad():
        for ours, theirs in zip(packed_pass(stub, model, data, True), padded_pass(stub, model, data), strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)
    assert products == {torch.bfloat16}, "both passes are in autocast"


def test_without_entropies_there_are_none(stub):
    with torch.no_grad():
        pack = make_pack(stub, model := tiny(), *batch(ROWS["groups"]), True)
        assert pack_logps(stub, model, pack, False)[1] is None


def test_a_row_without_a_prompt_is_refused(stub):
    ids, real, width = batch(ROWS["no group"])
    real[2, :-width] = 0
    with pytest.raises(BadInput, match="row 2 of the batch has no prompt token"):
        packed_pass(stub, tiny(), (ids, real, width), True)


def count_tokens(model) -> list[int]:
    """Tokens of each call of the first layer from here on."""
    sizes: list[int] = []
    layer = model.get_base_model().model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[0] * args[0].shape[1]))
    return sizes


@pytest.mark.parametrize(("share", "wanted"), [(True, 2 * 19 + 16 * 10), (False, 16 * (19 + 10))])
def test_with_eight_completions_a_prompt_the_model_sees_each_prompt_once(stub, share, wanted):
    model, data = tiny(), batch(rows_of([20, 20], [[10] * 8, [10] * 8]))
    sizes = count_tokens(model)
    packed_pass(stub, model, data, share)
    assert sizes == [wanted]
    padded_pass(stub, model, data)
    assert sizes[1] == 16 * 30


def test_an_nf4_base(stub, tiny_model_dir):
    from kit.weights.frozen_base import load_nf4

    model = adapted(load_nf4(tiny_model_dir, dtype="float32", device="cpu")).train()
    assert_equal_passes(stub, model, batch(ROWS["groups"]), True)


def random_segments(length: int, seed: int) -> Segments:
    """Groups of a shared prompt and up to four completions, and single rows, cut at `length`."""
    draw, facts = random.Random(seed), []
    while len(facts) < length:
        start, prompt = len(facts), draw.randint(1, 300)
        facts += [(start, 0, 0)] * prompt
        for _ in range(draw.randint(0, 4)):
            facts += [(len(facts), start, start + prompt)] * draw.randint(1, 300)
    return Segments(*torch.tensor(facts[:length], dtype=torch.int32).T.contiguous())


@pytest.mark.parametrize("seed", range(4))
def test_the_block_mask_of_the_gpu_is_the_dense_mask_of_the_cpu(seed):
    length = BLOCK * (3 + 4 * seed)
    segments = random_segments(length, seed)
    mask, dense = block_mask(segments), dense_mask(segments)[0, 0]
    position = torch.arange(length)
    assert torch.equal(mask.mask_mod(0, 0, position[:, None], position[None, :]), dense)
    blocks = dense.view(length // BLOCK, BLOCK, length // BLOCK, BLOCK).transpose(1, 2).sum((2, 3))
    for counts, indices, chosen in (
        (mask.kv_num_blocks, mask.kv_indices, (blocks > 0) & (blocks < BLOCK**2)),
        (mask.full_kv_num_blocks, mask.full_kv_indices, blocks == BLOCK**2),
    ):
        for query, row in enumerate(chosen):
            listed = indices[0, 0, query, : counts[0, 0, query]].tolist()
            assert listed == row.nonzero().flatten().tolist()


# tests/conftest.py switches torch.compile off.
compiling = torch._dynamo.config.patch(disable=False)


@compiling
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_through_the_model_gives_the_padded_pass(stub, monkeypatch):
    """What a GPU does, uncompiled, which on a CPU has no backward pass."""
    from kit.policy.packed import attention as packed_attention

    model = tiny(head_dim=16).eval()
    data = batch(rows_of([60, 50], [[30, 40, 10], [20, 48]]))  # 256 positions with shared prompts
    with torch.no_grad():
        before = padded_pass(stub, model, data)
        said = model.generate(data[0], attention_mask=data[1], max_new_tokens=6, do_sample=False)
        register()
        model.get_base_model().set_attn_implementation(NAME)
        assert torch.equal(padded_pass(stub, model, data)[0], before[0]), "sdpa is no longer sdpa"
        assert torch.equal(model.generate(data[0], attention_mask=data[1], max_new_tokens=6, do_sample=False), said)
        monkeypatch.setattr(packed_attention, "mask_kind", lambda *_: "flex")
        monkeypatch.setattr(packed_attention, "_compiled", lambda: packed_attention._flex)
        got = packed_pass(stub, model, data, True)
    torch.testing.assert_close(got, before, rtol=CLOSE, atol=CLOSE)


@compiling
def test_one_compiled_kernel_serves_rows_of_every_length(monkeypatch):
    from kit.policy.packed import attention as packed_attention

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **keys: compile_it(function, backend=backend, **keys))
    monkeypatch.setattr(packed_attention, "_compiled", functools.cache(packed_attention._compiled.__wrapped__))
    torch._dynamo.reset()
    for seed, length in enumerate((512, 256, 384, 1024)):  # at first as many blocks as heads
        q, k, v = (torch.randn(1, length, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
        segments = random_segments(length, seed)
        got = packed_attention.attention_forward(None, q, k, v, block_mask(segments), scaling=0.2)[0].transpose(1, 2)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense_mask(segments), scale=0.2)
        torch.testing.assert_close(got, wanted, rtol=CLOSE, atol=CLOSE)
    assert len(graphs) == 1


def packed_size(plan: list[int], prompts: list[tuple], lengths: list[int], share: bool) -> int:
    filled = [row for row in plan if lengths[row]]
    copies = {prompts[row] for row in filled} if share else [prompts[row] for row in filled]
    return sum(len(prompt) - 1 for prompt in copies) + sum(lengths[row] for row in filled)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_a_plan_has_every_row_once_keeps_the_budget_and_repeats_itself(seed, share):
    draw = random.Random(seed)
    prompts, lengths = [], []
    for number in range(draw.randint(1, 6)):
        prompt = (number, *tokens(draw.randint(0, 40), seed))
        for _ in range(draw.choice([1, 2, 8])):
            prompts.append(prompt)
            lengths.append(draw.choice([0, 1, draw.randint(1, 60), draw.randint(1, 200)]))
    budget = draw.choice([1, 50, 120, 400])
    plan = plan_micro_batches(prompts, lengths, budget, share)
    assert plan == plan_micro_batches(prompts, lengths, budget, share)
    assert sorted(row for rows in plan for row in rows) == list(range(len(prompts)))
    assert all(plan)
    sizes = [packed_size(rows, prompts, lengths, share) for rows in plan]
    assert all(
        size <= budget or sum(1 for row in rows if lengths[row]) == 1 for size, rows in zip(sizes, plan, strict=True)
    )
    assert sizes == sorted(sizes, reverse=True)
    assert len(plan) == 1 or sizes[-1] + sizes[-2] > budget, "two of them fit into one"


def test_a_group_that_fits_stays_together_and_a_larger_one_is_split():
    prompts, lengths = [(1, 2, 3)] * 4 + [(4, 5)] * 4, [10] * 4 + [30] * 4
    assert plan_micro_batches(prompts, lengths, 62, True) == [[4, 5], [6, 7], [0, 1, 2, 3]]
    assert plan_micro_batches(prompts, [0, 10, 0, 10, 30, 30, 30, 30], 62, True)[0] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("gemma3_text", {}, "gemma3_text was not compared with the padded pass"),
        ("mistral", {"sliding_window": 64}, "layers that see a window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "see a window"),
        ("qwen3", {"attn": "flash_attention_2"}, "attn_implementation is 'flash_attention_2'"),
    ],
)
def test_a_model_that_packing_would_change_is_refused(model_type, changes, said):
    attention = changes.pop("attn", "sdpa")
    config = load_config(CONFIG, [f"--model.attn_implementation={attention}", "--train.micro_batch_tokens=512"])
    facts = AutoConfig.for_model(model_type, **{**SIZE, **changes})
    with pytest.raises(BadInput, match=f"train.micro_batch_tokens: .*{said}.*Leave it out"):
        check_packing(config, facts)
    config.train.micro_batch_tokens = None
    check_packing(config, facts)


def test_a_language_model_inside_another_is_refused():
    config = load_config(CONFIG, ["--train.micro_batch_tokens=512"])
    inner = AutoConfig.for_model("qwen2", **SIZE)
    outer = SimpleNamespace(model_type="llava", get_text_config=lambda: inner)
    with pytest.raises(BadInput, match="llava was not compared with the padded pass"):
        check_packing(config, outer)


@pytest.mark.parametrize(("hidden", "heads", "head_dim", "fits"), [(32, 4, None, True), (30, 5, None, False)])
@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_a_width_of_heads_that_no_field_names_is_that_of_the_hidden_size(hidden, heads, head_dim, fits, attention):
    config = load_config(CONFIG, ["--train.micro_batch_tokens=512", f"--train.packed_attention={attention}"])
    size = {name: value for name, value in SIZE.items() if name != "head_dim"}
    facts = AutoConfig.for_model("qwen2", **size | {"hidden_size": hidden, "num_attention_heads": heads})
    facts.head_dim = head_dim
    if fits:
        check_packing(config, facts)
        return
    with pytest.raises(BadInput, match=f"heads of up to .* in steps of 8, the model's have {hidden // heads}"):
        check_packing(config, facts)


@pytest.mark.parametrize("share", [True, False])
def test_a_micro_batch_is_filled_to_its_last_token_and_a_row_over_the_budget_is_alone(share):
    # 3 tokens of a prompt but its last, 5 of a completion.
    prompts, lengths = [(1, 2, 3, 4)] * 2 + [(5, 6, 7, 8)] * 2, [5, 5, 5, 5]
    exact = 13 if share else 16
    assert len(plan_micro_batches(prompts, lengths, 2 * exact, share)) == 1
    assert len(plan_micro_batches(prompts, lengths, 2 * exact - 1, share)) == 2
    assert plan_micro_batches(prompts, lengths, exact, share) == [[0, 1], [2, 3]]
    assert plan_micro_batches(prompts, lengths, exact - 1, share) == [[0], [1], [2], [3]]
    assert plan_micro_batches(prompts, lengths, 1, share) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_that_packs_is_let_through(model_type):
    config = load_config(CONFIG, ["--train.micro_batch_tokens=512"])
    check_packing(config, AutoConfig.for_model(model_type, **SIZE))


def test_the_recipe_refuses_before_weights_load(recipe, recipe_arguments, tiny_model_dir, tmp_path):
    changes = {"train.micro_batch_tokens": 2048, "model.attn_implementation": "eager"}
    done = recipe(recipe_arguments(tiny_model_dir, tmp_path / "run", changes, ("--dry_run",)))
    assert done.code == 2 and "model.attn_implementation is 'eager', and packed rows need sdpa" in done.err
    del changes["model.attn_implementation"]
    assert recipe(recipe_arguments(tiny_model_dir, tmp_path / "run", changes, ("--dry_run",))).code == 0
