"""cuDNN's kernels in the place of FlashAttention's: the same merge, sequences filled up with empty ones, few plans.

The kernels run on a GPU only (`bench/cudnn_check.py`). Here cuDNN's package is a stand-in that reads the graph as
it was declared, memory by its address, and computes in float64 what a graph of these tensors is documented to.
"""

import contextlib
import ctypes
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy.packed import attention as packed_attention
from kit.policy.packed import cudnn, flash
from kit.policy.packed.attention import Sequences, mask_kind, row_length
from kit.policy.packed.cudnn import attention, bucket_of, filled_up
from kit.policy.packed.flash import FlashMask, flash_attention
from kit.policy.packed.packing import check_packing
from kit.policy.packed.span import Saved, Span
from tests.conftest import CONFIG
from tests.unit.test_flash_packed import (
    DIM,
    GROUPS,
    HEADS,
    ROW,
    SCALE,
    assert_attention_is_dense,
    backward_stand_in,
    forward_stand_in,
    random_row,
)
from tests.unit.test_packing import SIZE


class Tensor:
    """A tensor of a graph."""

    def __init__(self, dim=None, stride=None, data_type=None):
        self.dim, self.stride, self.type, self.offset = dim, stride, data_type, None

    def __getattr__(self, name):
        def kept(value):
            setattr(self, name.removeprefix("set_"), value)
            return self

        if not name.startswith("set_"):
            raise AttributeError(name)
        return kept


class Graph:
    """Runs on addresses of float64 memory, in which all sequences of a tensor lie one after the other."""

    built = 0

    def __init__(self, **_):
        Graph.built += 1

    def tensor(self, **given):
        return Tensor(**given)

    def sdpa(self, *, generate_stats, name, **given):
        assert generate_stats
        self.given, self.found = given, [Tensor(), Tensor()]
        return self.found

    def sdpa_backward(self, *, name, **given):
        self.given, self.found = given, [Tensor(), Tensor(), Tensor()]
        return self.found

    def validate(self):
        options = self.given
        tensors = [one for one in [*options.values(), *self.found] if isinstance(one, Tensor)]
        assert len({one.uid for one in tensors}) == len(tensors) and options["use_padding_mask"]
        for one in tensors:
            if one in (options["seq_len_q"], options["seq_len_kv"]):
                continue
            batch, heads, length, width = one.dim
            assert one.ragged_offset.dim == [batch + 1, 1, 1, 1]
            assert one.stride == [length * heads * width, width, heads * width, 1]
        assert all(one.output for one in self.found)

    def nothing(self, *_):
        pass

    build_operation_graph = create_execution_plans = check_support = build_plans = nothing

    def get_workspace_size(self):
        return 0

    def execute(self, addresses, workspace, handle):
        given, lengths = self.given, {}
        for name in ("seq_len_q", "seq_len_kv"):
            lengths[name] = read(addresses[given[name].uid], given[name].dim[0], torch.int32).tolist()
        counts_q, counts_k = lengths.values()
        assert max(counts_q) <= given["q"].dim[2] and max(counts_k) <= given["k"].dim[2]

        def part(one, counts):
            """(T, heads, width), after the offsets are seen to be where the sequences lie."""
            batch, heads, _, width = one.dim
            starts = read(addresses[one.ragged_offset.uid], batch + 1, torch.int32).tolist()
            assert starts == [heads * width * sum(counts[:n]) for n in range(batch + 1)]
            dtype = torch.float32 if one.dim[-1] == 1 else torch.float64
            return read(addresses[one.uid], starts[-1], dtype).view(-1, heads, width)

        q, *key_value = part(given["q"], counts_q), part(given["k"], counts_k), part(given["v"], counts_k)
        ends = []
        for counts in (counts_q, counts_k):
            kept = [n for n, _ in enumerate(counts) if counts_q[n]]
            ends.append(torch.tensor([0, *itertools.accumulate(counts[n] for n in kept)], dtype=torch.int32))
        causal = given["use_causal_mask"] or given["use_causal_mask_bottom_right"]
        assert not given["use_causal_mask"] or counts_q == counts_k  # its mask begins at the first key
        span = Span(*ends, max(2, *counts_q), max(counts_k), causal, given["attn_scale"])
        if "dO" in given:
            grad, out, lse = (part(given[name], counts_q) for name in ("dO", "o", "stats"))
            lse = lse[..., 0].t().double().contiguous()
            answers = backward_stand_in(grad, Saved(q, *key_value, out, lse), span)
            places = zip(self.found, (counts_q, counts_k, counts_k), strict=True)
        else:
            out, lse = forward_stand_in(q, *key_value, span)
            answers = out, lse.t()[..., None]
            places = zip(self.found, (counts_q, counts_q), strict=True)
        for (one, counts), answer in zip(places, answers, strict=True):
            part(one, counts).copy_(answer)


def read(address, count, dtype):
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


@pytest.fixture
def kernels(monkeypatch):
    names = SimpleNamespace(BFLOAT16="io", HALF="io", FLOAT="float", INT32="int")
    stand_in = SimpleNamespace(
        data_type=names,
        pygraph=Graph,
        heur_mode=SimpleNamespace(A="A"),
        cudnnGraphNotSupportedError=ValueError,
        backend_version=lambda: 91700,
        set_stream=lambda **_: None,
    )
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    monkeypatch.setattr(cudnn, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Graph, "built", 0)
    for made in (cudnn._forward, cudnn._backward):
        made.cache_clear()
    yield stand_in
    for made in (cudnn._forward, cudnn._backward):
        made.cache_clear()


# The log-sum-exp is kept in float32, as the kernels have it.
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("sequences", ROW.values(), ids=ROW.keys())
@pytest.mark.parametrize(("most", "backward"), [(0, ()), (4, ()), (4, ("cudnn",))], ids=["parts", "forward", "both"])
def test_output_and_gradients_are_those_of_the_dense_mask(kernels, monkeypatch, sequences, strided, most, backward):
    monkeypatch.setattr(flash, "MOST_JOINED", most)
    monkeypatch.setattr(flash, "JOINED_BACKWARD", backward)
    assert_attention_is_dense(sequences, strided, ("cudnn", "cudnn"), (1e-6, 1e-5))


def test_rows_of_other_lengths_take_the_plan_of_their_bucket(kernels):
    def run(sequences):
        given = random_row(sum(sequences.lengths))
        flash_attention(*given, FlashMask(*sequences, "cpu", ("cudnn", "cudnn")), SCALE).sum().backward()
        return Graph.built

    assert run(Sequences([2, 1, 4, 2, 7, 6], [2, 1], [6, 13])) == 3  # joined forward; own and shared backward
    assert run(Sequences([1, 2, 9, 1, 8], [1, 2], [10, 8])) == 3
    assert run(Sequences([5, 3, 4, 2, 7, 6], [5, 3], [6, 13])) == 5  # too many keys: own and shared forward
    assert run(Sequences([4, 2, 9, 1, 8], [4, 2], [9, 9])) == 5
    assert run(Sequences([600], [], [])) == 7


def span(longest, sequences=1, scale=None):
    ends = torch.arange(sequences + 1, dtype=torch.int32) * longest
    return Span(ends, ends, longest, longest, True, scale)


def test_buckets():
    def bucket(tokens, sequences, longest, scale=None):
        query, key = torch.empty(tokens, HEADS, DIM), torch.empty(tokens, GROUPS, DIM)
        return bucket_of(query, key, span(longest, len(filled_up([1] * sequences)), scale))

    one = bucket(4000, 8, 512)
    assert one[:8] == (8, 512, 512, 4096, 4096, HEADS, GROUPS, DIM) and one.scale == DIM**-0.5
    assert bucket(1, 7, 2) == one
    assert bucket(4097, 9, 513)[:5] == (12, 768, 768, 8192, 8192)
    assert [len(filled_up([1] * n)) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    query, key = (torch.empty(10**8, heads, DIM, device="meta") for heads in (HEADS, GROUPS))
    for pair in ((query, key), (query[:1], query)):  # a row may have more joined keys than tokens
        with pytest.raises(
            BadInput, match=r"100,000,000 tokens.*count \(44,739,242\)\. Lower train\.micro_batch_tokens"
        ):
            bucket_of(*pair, span(1))


def test_a_graph_that_cudnn_does_not_take_is_refused(kernels, monkeypatch):
    monkeypatch.setattr(Graph, "check_support", lambda *_: (_ for _ in ()).throw(ValueError("no engine")))
    q = random_row(7)
    with pytest.raises(BadInput, match=r"cuDNN 91700 has no kernel.*no engine\. Set it to flash"):
        attention(*q, span(7))


def test_which_attention_a_forward_takes(kernels):
    half, whole = torch.nn.Linear(1, 1, dtype=torch.bfloat16), torch.nn.Linear(1, 1)
    assert [mask_kind(one, torch.device("cuda"), "cudnn") for one in (half, whole)] == ["cudnn", "flex"]
    assert row_length(17, "cudnn") == row_length(17, "flash")
    mask = packed_attention.attention_mask(Sequences([3, 5], [3], [5]), "cudnn", "cpu")
    assert mask.shape == (1, 1, 8, 8) and mask.own[0].tolist() == [0, 3, 8] and mask.shared[2:] == (5, 3, 3, 8)
    assert mask.joined.ends.tolist() == [0, 3, 11] and mask.joined.longest == 8


@pytest.mark.parametrize(
    ("head_dim", "gpu", "said"),
    [
        (136, None, "heads of up to 128 in steps of 8, the model's have 136"),
        (64, (8, 0), "Tesla is neither Hopper nor"),
        (64, (12, 0), "Tesla is neither Hopper nor"),
        (64, "no package", "its Python package cannot be imported"),
        (64, "old", "cuDNN is 90500, older than 9.6"),
        (128, (9, 0), None),
        (128, None, None),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_before_weights_load(kernels, monkeypatch, head_dim, gpu, said):
    from transformers import AutoConfig

    if gpu is not None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        capability = gpu if isinstance(gpu, tuple) else (9, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla")
    if gpu == "no package":
        monkeypatch.setitem(sys.modules, "cudnn", None)
    if gpu == "old":
        kernels.backend_version = lambda: 90500
    config = load_config(CONFIG, ["--train.micro_batch_tokens=512", "--train.packed_attention=cudnn"])
    facts = AutoConfig.for_model("qwen3", **{**SIZE, "head_dim": head_dim})
    if said is None:
        check_packing(config, facts)
        return
    with pytest.raises(BadInput, match=f"train.packed_attention is cudnn.*{said}.*Set it to flash"):
        check_packing(config, facts)


PACKS, HALF = "--train.micro_batch_tokens=512", "--model.dtype=bfloat16"


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("cudnn", [HALF], r"train\.packed_attention is cudnn and train\.micro_batch_tokens is not set: without packs"),
        ("flex", [], r"train\.packed_attention is flex and train\.micro_batch_tokens is not set"),
        ("flash", [], None),
        ("cudnn", [PACKS], r"is cudnn and model\.dtype is float32, .* bfloat16, or train\.packed_attention to flex"),
        ("cudnn", [PACKS, HALF], None),
        ("cudnn", [PACKS, "--model.dtype=float16"], None),
        ("flash", [PACKS], None),
        ("flex", [PACKS], None),
    ],
)
def test_attention_that_would_be_none_or_another_is_refused_by_the_configuration(kind, keys, said):
    config = load_config(CONFIG, [f"--train.packed_attention={kind}", *keys])
    with pytest.raises(BadInput, match=said) if said else contextlib.nullcontext():
        check_config(config, 1)
