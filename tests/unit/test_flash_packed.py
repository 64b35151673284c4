"""FlashAttention in two parts, merged, is attention with the dense mask of the packed row, backward too.

Its kernels run on a GPU only. Here stand-ins take their place, which compute in float64 what each is documented to:
forward, softmax over the keys given and its log-sum-exp; backward, from the output and log-sum-exp that it is handed.
"""

import itertools
import os
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy.packed import attention as packed_attention
from kit.policy.packed import flash
from kit.policy.packed.attention import NAME, Sequences, dense_mask, mask_kind, register, row_length, segments_of
from kit.policy.packed.flash import FlashMask, flash_attention
from kit.policy.packed.packing import MODELS, check_packing
from kit.policy.recompute import use_recompute
from tests import processes
from tests.conftest import CONFIG
from tests.unit.test_packing import (  # noqa: F401
    CLOSE,
    ROWS,
    SIZE,
    assert_equal_passes,
    batch,
    gradients,
    packed_pass,
    padded_pass,
    stub,
    tiny,
)

HEADS, GROUPS, DIM, SCALE = 6, 2, 8, 0.3
ROW = {
    "two groups, then rows of their own": Sequences([5, 3, 4, 2, 7, 6, 9, 2], [5, 3], [6, 13]),
    "a group and nothing else": Sequences([4, 1, 3], [4], [4]),
    "prompts and completions of one token": Sequences([1, 1, 1, 1, 1], [1, 1], [2, 1]),
    "no shared prompt": Sequences([4, 1, 6], [], []),
    "one row": Sequences([7], [], []),
}


def pairs(query_ends, key_ends):
    """Where each sequence's queries and keys are."""
    assert query_ends.dtype == key_ends.dtype == torch.int32 and len(query_ends) == len(key_ends)
    rows, columns = query_ends.tolist(), key_ends.tolist()
    assert rows[0] == columns[0] == 0
    both = zip(itertools.pairwise(rows), itertools.pairwise(columns), strict=True)
    return [(slice(*row), slice(*column)) for row, column in both]


def heads_of_one(query, key):
    return query.shape[1] // key.shape[1]


def scores(query, key, causal, scale):
    """(H, t, s) of one sequence, -inf where a query comes before a key; every head has its key's."""
    key = key.repeat_interleave(heads_of_one(query, key), 1)
    found = torch.einsum("thd,shd->hts", query, key) * scale
    hidden = torch.ones_like(found[0]).triu(1 + len(key) - len(query)).bool()  # the last query sees all keys
    return found.masked_fill(hidden, -torch.inf) if causal else found


def forward_stand_in(query, key, value, span):
    query_ends, key_ends, longest_query, longest_key, causal, scale = span
    out, lse = torch.full_like(query, torch.nan), query.new_full(query.shape[1::-1], torch.nan)
    for q, k in pairs(query_ends, key_ends):
        assert 0 < q.stop - q.start <= longest_query and 0 < k.stop - k.start <= longest_key and longest_query > 1
        found = scores(query[q], key[k], causal, scale)
        own = value[k].repeat_interleave(heads_of_one(query, value), 1)
        out[q], lse[:, q] = torch.einsum("hts,shd->thd", found.softmax(-1), own), found.logsumexp(-1)
    return out, lse


def backward_stand_in(grad, saved, span):
    query, key, value, out, lse = saved
    query_ends, key_ends, _, _, causal, scale = span
    assert lse.is_contiguous() and lse.shape == (query.shape[1], len(query))
    shared = heads_of_one(query, key)
    dq, dk, dv = (torch.full_like(one, torch.nan) for one in (query, key, value))
    for q, k in pairs(query_ends, key_ends):
        chance = (scores(query[q], key[k], causal, scale) - lse[:, q, None]).exp()
        by_value = torch.einsum("thd,shd->hts", grad[q], value[k].repeat_interleave(shared, 1))
        by_score = chance * (by_value - (grad[q] * out[q]).sum(-1).t()[:, :, None]) * scale
        dq[q] = torch.einsum("hts,shd->thd", by_score, key[k].repeat_interleave(shared, 1))
        for into, weight, other in ((dk, by_score, query), (dv, chance, grad)):
            every = torch.einsum("hts,thd->shd", weight, other[q])
            into[k] = every.unflatten(1, (-1, shared)).sum(2)
    return dq, dk, dv


@pytest.fixture
def calls(monkeypatch):
    """The stand-ins in the kernels' place; how many queries each forward call had."""
    counted = []

    def forward(*args):
        counted.append(len(args[0]))
        return forward_stand_in(*args)

    monkeypatch.setattr(flash, "attention", forward)
    monkeypatch.setattr(flash, "attention_backward", backward_stand_in)
    monkeypatch.setattr(packed_attention, "TYPES", (torch.float32, torch.float64))
    return counted


def random_row(length: int, strided: bool = False):
    torch.manual_seed(0)
    shapes = [(heads, length) if strided else (length, heads) for heads in (HEADS, GROUPS, GROUPS)]
    made = [torch.randn(*shape, DIM, dtype=torch.float64) for shape in shapes]
    return [(one.transpose(0, 1) if strided else one).requires_grad_() for one in made]


def assert_attention_is_dense(sequences, strided, kernels, atol):
    """Output and gradients of a packed row, within `atol`, are those of attention with the dense mask."""
    given = random_row(sum(sequences.lengths), strided)
    dense = dense_mask(segments_of(sequences, "cpu"))
    q, k, v = (one.transpose(0, 1)[None] for one in given)
    wanted = scaled_dot_product_attention(q, k, v, dense, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    got = flash_attention(*given, FlashMask(*sequences, "cpu", kernels), SCALE)
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol[0])
    assert got.is_contiguous()
    weight = torch.randn(got.shape[1::-1] + got.shape[2:], dtype=torch.float64).transpose(0, 1)
    for ours, theirs in zip(*(torch.autograd.grad(one, given, weight) for one in (got, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol[1])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sequences", ROW.values(), ids=ROW.keys())
def test_output_and_gradients_are_those_of_the_dense_mask(calls, monkeypatch, sequences, strided):
    monkeypatch.setattr(flash, "MOST_JOINED", 0)
    assert_attention_is_dense(sequences, strided, ("flash", "flash"), (1e-10, 1e-10))
    assert calls == [sum(sequences.lengths), sum(sequences.behind)][: 1 + bool(sequences.prompts)]


@pytest.mark.parametrize("backward", [("flash",), ()], ids=["joined backward", "backward in parts"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sequences", ROW.values(), ids=ROW.keys())
def test_prompts_joined_with_their_segments_are_one_call(calls, monkeypatch, sequences, strided, backward):
    monkeypatch.setattr(flash, "MOST_JOINED", 4)
    monkeypatch.setattr(flash, "JOINED_BACKWARD", backward)
    assert_attention_is_dense(sequences, strided, ("flash", "flash"), (1e-10, 1e-10))
    assert calls == [sum(sequences.lengths)]


@pytest.mark.parametrize(("segments", "is_joined"), [([8, 8, 9, 7], True), ([8, 8], True), ([3, 3, 4], False)])
def test_prompts_are_joined_only_where_that_takes_little_memory(segments, is_joined):
    row = Sequences([4, *segments], [4], [sum(segments)])  # 36, 20 and 14 positions; 52, 28 and 26 joined keys
    assert (FlashMask(*row, "cpu").joined is not None) is is_joined


def test_gradients_reach_the_projections_in_their_layout(calls):
    """As views of what the kernels return: rotary embedding and projections need no copy."""
    sequences = ROW["two groups, then rows of their own"]
    length, seen = sum(sequences.lengths), {}
    projected = [torch.randn(1, length, heads, DIM).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)]
    rows = [(one * 1).transpose(1, 2) for one in projected]  # (B, H, T, D), as the model hands them over
    for name, one in zip("qkv", rows, strict=True):
        one.register_hook(lambda grad, name=name: seen.update({name: grad}))
    output, _ = packed_attention.attention_forward(None, *rows, FlashMask(*sequences, "cpu"), scaling=SCALE)
    output.sum().backward()
    for name, one in zip("qkv", rows, strict=True):
        assert seen[name].shape == one.shape and seen[name].transpose(1, 2).is_contiguous(), name


def test_lengths_say_what_the_dense_mask_shows():
    mask = dense_mask(segments_of(Sequences([2, 1, 2, 3], [2], [3]), "cpu"))[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


def as_on_a_gpu(model, monkeypatch):
    register()
    model.get_base_model().set_attn_implementation(NAME)
    monkeypatch.setattr(packed_attention, "mask_kind", lambda *_: "flash")
    return model


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_the_model_gives_the_padded_pass(calls, monkeypatch, stub, rows, share):  # noqa: F811
    assert_equal_passes(stub, as_on_a_gpu(tiny().train(), monkeypatch), batch(rows), share)
    assert calls[0] % flash.MULTIPLE == 0


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - {"qwen3"}))
def test_every_model_hands_the_mask_through(calls, monkeypatch, stub, model_type):  # noqa: F811
    assert_equal_passes(stub, as_on_a_gpu(tiny(model_type).train(), monkeypatch), batch(ROWS["groups"]), True)
    assert len(calls) == 4  # two layers


@pytest.mark.parametrize(("mode", "forwards"), [("none", 4), ("full", 8), ("selective", 4)])
def test_recomputed_layers_have_the_same_gradients_and_selective_keeps_attention(
    calls,
    monkeypatch,
    stub,  # noqa: F811
    mode,
    forwards,
):
    model, data = as_on_a_gpu(tiny().train(), monkeypatch), batch(ROWS["groups"])
    wanted = gradients(model, *packed_pass(stub, model, data, True), data)
    if mode != "none":
        use_recompute(model, load_config(CONFIG, [f"--train.recompute={mode}"]))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    calls.clear()
    got = gradients(model, *packed_pass(stub, model, data, True), data)
    assert torch.equal(got, wanted) and len(calls) == forwards


def test_a_forward_without_gradients_and_the_adapter_off(calls, monkeypatch, stub):  # noqa: F811
    model, data = tiny().eval(), batch(ROWS["groups"])
    with torch.no_grad(), model.disable_adapter():
        wanted = padded_pass(stub, model, data)
        got = packed_pass(stub, as_on_a_gpu(model, monkeypatch), data, True)
    torch.testing.assert_close(got, wanted, rtol=CLOSE, atol=CLOSE)


def test_which_attention_a_forward_takes(monkeypatch):
    half, whole = torch.nn.Linear(1, 1, dtype=torch.bfloat16), torch.nn.Linear(1, 1)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [mask_kind(half, cpu, one) for one in ("flash", "flex")] == ["dense", "dense"]
    assert [mask_kind(half, gpu, one) for one in ("flash", "flex")] == ["flash", "flex"]
    assert mask_kind(whole, gpu, "flash") == "flex"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", {"cuda": torch.bfloat16}.get)
    assert mask_kind(whole, gpu, "flash") == "flash"
    assert [row_length(tokens, "flash") for tokens in (0, 1, 16, 17)] == [16, 16, 16, 32]
    assert [row_length(tokens, "flex") for tokens in (0, 256, 257)] == [256, 256, 384]


def test_attention_in_float32_is_refused():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(BadInput, match=r"attention is in torch\.float32\. Set it to flex"):
        packed_attention.attention_forward(None, q, q, q, FlashMask([3], [], [], "cpu"))


def test_a_log_sum_exp_of_another_layout_is_refused(monkeypatch):
    monkeypatch.setattr(flash, "attention", lambda query, *_: (query, torch.zeros(1, HEADS, len(query))))
    with pytest.raises(BadInput, match=r"has the shape \(1, 6, 7\), \(6, 7\) was expected. Set"):
        flash_attention(*random_row(7), FlashMask([7], [], [], "cpu"), SCALE)


@pytest.mark.parametrize(
    ("head_dim", "gpu", "said"),
    [
        (264, None, "heads of up to 256 in steps of 8, the model's have 264"),
        (12, None, "the model's have 12"),
        (64, {"is_flash_attention_available": lambda: False}, "comes without its CUDA kernels"),
        (64, {"capability": (7, 5)}, "Tesla is older than Ampere"),
        (64, {}, None),
        (128, None, None),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_before_weights_load(monkeypatch, head_dim, gpu, said):
    from transformers import AutoConfig

    if gpu is not None:
        available = gpu.get("is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu.get("capability", (8, 0)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla")
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", available)
    config = load_config(CONFIG, ["--train.micro_batch_tokens=512", "--train.packed_attention=flash"])
    facts = AutoConfig.for_model("qwen3", **{**SIZE, "head_dim": head_dim})
    if said is None:
        check_packing(config, facts)
        return
    with pytest.raises(BadInput, match=f"train.packed_attention is flash.*{said}.*Set it to flex"):
        check_packing(config, facts)
    config.train.packed_attention = "flex"
    check_packing(config, facts)


MERGE = """
import torch
from kit.policy.packed.flash_kernel import merge_in_place
from kit.policy.packed.flash import merge
torch.manual_seed(0)
for rows, heads, dim in ((5, 3, 24), (3, 32, 128), (2, 40, 256)):
    out, other = torch.randn(2, rows + 4, heads, dim)
    lse, other_lse = 9 * torch.randn(2, heads, rows + 4)
    wanted, wanted_lse = out.clone(), lse.clone()
    some = slice(1, 1 + rows)
    merge(wanted[some], wanted_lse[:, some], other[some], other_lse[:, some])
    merge_in_place(out[some], lse[:, some], other[some], other_lse[:, some].contiguous())
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
"""


def test_the_kernel_merges_as_pytorch_does():
    """In Triton's interpreter, which is chosen when Triton is imported."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = processes.run([sys.executable, "-c", MERGE], env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
