"""`train.packed_attention: cudnn`: cuDNN's attention kernels, written for Hopper, in place of FlashAttention's.

`attention` and `attention_backward` are those of span.py, as flash.py's, which merges them: concatenated sequences,
grouped heads, backward from the output and log-sum-exp of a softmax over more keys.

The kernels are called through cuDNN's own Python package, nvidia-cudnn-frontend. torch has them too
(`aten._cudnn_attention_forward` with cumulative lengths), but torch 2.11 looks up a plan for such a call and never
stores one (MHA.cpp, run_cudnn_SDP_fprop_nestedtensor): each call builds its own, which takes longer than the layer.
Here a plan is built once per `Bucket`, which many rows share, as in NVIDIA's Transformer Engine: sequences are padded
with empty ones, the longest is rounded up to the next `_step`, and tokens to multiples of 4,096.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from kit.core.cards import generation
from kit.core.errors import BadInput
from kit.policy.packed.span import Saved, Span, head_fault

if TYPE_CHECKING:
    import cudnn

LARGEST_HEAD = 128
OLDEST = 90600  # cuDNN 9.6 supports the log-sum-exp of concatenated sequences, and empty sequences
SHORTEST, TOKENS = 512, 4096  # the smallest bucket: longest sequence, tokens
_OFFSETS = 2**31 - 1  # offsets are int32, in elements

# Names of a graph's tensors.
Q, K, V, OUT, LSE, GRAD, DQ, DK, DV, LENGTHS_Q, LENGTHS_K, OFFSETS_Q, OFFSETS_K, OFFSETS_LSE = range(1, 15)


class Bucket(NamedTuple):
    """Key of a cached plan."""

    sequences: int
    longest_query: int
    longest_key: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    dim: int
    dtype: torch.dtype
    causal: bool
    is_joined: bool  # causal, with more keys than queries
    scale: float
    device: int


def fault(head_dim: int) -> str | None:
    """Why cuDNN's kernels cannot serve heads of `head_dim` here, or None; also None without a GPU, if the size is
    supported."""
    if (why := head_fault(head_dim, LARGEST_HEAD)) or not torch.cuda.is_available():
        return why
    if not generation(torch.cuda.get_device_capability()).cudnn:
        return f"{torch.cuda.get_device_name()} is neither Hopper nor a Blackwell of the data centre, which it needs"
    try:
        import cudnn
    except ImportError as error:
        return f"its Python package cannot be imported ({error}; pip install nvidia-cudnn-frontend)"
    if cudnn.backend_version() < OLDEST:
        return f"cuDNN is {cudnn.backend_version()}, older than 9.6 ({OLDEST})"
    return None


def filled_up(lengths: list[int]) -> list[int]:
    """Pad sequence lengths with zeros up to the number of sequences of a bucket."""
    return lengths + [0] * (_step(len(lengths), 1) - len(lengths))


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN's forward, of `filled_up` sequences."""
    query, key, value = (one.contiguous() for one in (query, key, value))
    bucket = bucket_of(query, key, span)
    out = torch.empty_like(query)
    lse = torch.empty(bucket.queries, bucket.heads, dtype=torch.float32, device=query.device)
    tensors = {Q: query, K: key, V: value, OUT: out, LSE: lse}
    _execute(_forward(bucket), tensors | _places(bucket, span), query.device)
    return out, lse[: len(query)].t()


def attention_backward(
    grad: torch.Tensor, saved: Saved, span: Span
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """cuDNN's backward, of `filled_up` sequences."""
    query, key, value, out, lse = saved
    given = {GRAD: grad, Q: query, K: key, V: value, OUT: out, LSE: lse.t()}
    given = {name: one.contiguous() for name, one in given.items()}
    bucket = bucket_of(given[Q], given[K], span)
    found = {DQ: torch.empty_like(given[Q]), DK: torch.empty_like(given[K]), DV: torch.empty_like(given[V])}
    _execute(_backward(bucket), given | found | _places(bucket, span), query.device)
    return found[DQ], found[DK], found[DV]


def bucket_of(query: torch.Tensor, key: torch.Tensor, span: Span) -> Bucket:
    """Bucket of a call."""
    for one in (query, key):
        if one.numel() > _OFFSETS:
            tokens, heads, dim = one.shape
            raise BadInput(
                f"train.packed_attention is cudnn, and a packed row of {tokens:,} tokens with {heads} heads of {dim} "
                f"is longer than its kernels count ({_OFFSETS // (heads * dim):,}). Lower train.micro_batch_tokens."
            )
    tokens, heads, dim = query.shape
    queries, keys = (-(-one // TOKENS) * TOKENS for one in (tokens, len(key)))
    return Bucket(
        sequences=len(span.query_ends) - 1,
        longest_query=_step(span.longest_query, SHORTEST),
        longest_key=_step(span.longest_key, SHORTEST),
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key.shape[1],
        dim=dim,
        dtype=query.dtype,
        causal=span.causal,
        is_joined=span.causal and span.key_ends is not span.query_ends,
        scale=dim**-0.5 if span.scale is None else span.scale,
        device=query.get_device(),
    )


def _step(number: int, least: int) -> int:
    """Round up to the next of 1, 2, 3, 4, 6, 8, 12, 16, ..., at least `least`."""
    power = 1 << (number - 1).bit_length()
    return max(least, power * 3 // 4 if power * 3 // 4 >= number else power)


def _places(bucket: Bucket, span: Span) -> dict[int, torch.Tensor]:
    """Sequence lengths, and the element offset of each sequence within its tensor."""
    return {
        LENGTHS_Q: span.query_ends.diff(),
        LENGTHS_K: span.key_ends.diff(),
        OFFSETS_Q: span.query_ends * (bucket.heads * bucket.dim),
        OFFSETS_K: span.key_ends * (bucket.key_heads * bucket.dim),
        OFFSETS_LSE: span.query_ends * bucket.heads,
    }


class _Graph:
    """A cuDNN graph under construction: tensors of a bucket by name."""

    def __init__(self, bucket: Bucket):
        import cudnn

        self.bucket, self.types = bucket, cudnn.data_type
        self.io = self.types.BFLOAT16 if bucket.dtype == torch.bfloat16 else self.types.HALF
        self.graph = cudnn.pygraph(
            io_data_type=self.io,
            intermediate_data_type=self.types.FLOAT,
            compute_data_type=self.types.FLOAT,
            handle=_handle(bucket.device),
        )
        b = bucket
        one = [1, 1, 1]
        self.counts = {name: self._tensor(name, [b.sequences, *one], [*one, 1]) for name in (LENGTHS_Q, LENGTHS_K)}
        self.offsets = {
            name: self._tensor(name, [b.sequences + 1, *one], [*one, 1])
            for name in (OFFSETS_Q, OFFSETS_K, OFFSETS_LSE)
        }
        of_query = b.heads, b.longest_query, b.dim, OFFSETS_Q
        of_key = b.key_heads, b.longest_key, b.dim, OFFSETS_K
        # heads, positions of a sequence, width, offsets
        self.shapes = {name: of_query for name in (Q, OUT, GRAD, DQ)} | {name: of_key for name in (K, V, DK, DV)}
        self.shapes[LSE] = b.heads, b.longest_query, 1, OFFSETS_LSE

    def _tensor(self, name: int, dim: list[int], stride: list[int]) -> "cudnn.tensor":
        return self.graph.tensor(dim=dim, stride=stride, data_type=self.types.INT32).set_uid(name)

    def given(self, name: int) -> "cudnn.tensor":
        """Input tensor (N, heads, positions, width), with all heads of a position adjacent in memory."""
        dim, stride, kind, offsets = self._layout(name)
        return self.graph.tensor(dim=dim, stride=stride, data_type=kind).set_uid(name).set_ragged_offset(offsets)

    def answer(self, made: "cudnn.tensor", name: int) -> None:
        dim, stride, kind, offsets = self._layout(name)
        made.set_uid(name).set_output(True).set_data_type(kind)
        made.set_dim(dim).set_stride(stride).set_ragged_offset(offsets)

    def _layout(self, name: int) -> tuple[list[int], list[int], "cudnn.data_type", "cudnn.tensor"]:
        heads, length, width, offsets = self.shapes[name]
        dim, stride = [self.bucket.sequences, heads, length, width], [length * heads * width, width, heads * width, 1]
        return dim, stride, self.types.FLOAT if name == LSE else self.io, self.offsets[offsets]

    def options(self) -> "dict[str, float | bool | cudnn.tensor]":
        return {
            "attn_scale": self.bucket.scale,
            "use_causal_mask": self.bucket.causal and not self.bucket.is_joined,
            "use_causal_mask_bottom_right": self.bucket.is_joined,
            "use_padding_mask": True,
            "seq_len_q": self.counts[LENGTHS_Q],
            "seq_len_kv": self.counts[LENGTHS_K],
        }

    def built(self) -> "cudnn.pygraph":
        import cudnn

        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([cudnn.heur_mode.A])
            self.graph.check_support()
            self.graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            raise BadInput(
                f"train.packed_attention is cudnn, and cuDNN {cudnn.backend_version()} has no kernel for "
                f"{self.bucket}: {error}. Set it to flash."
            ) from error
        return self.graph


@functools.cache
def _forward(bucket: Bucket) -> "cudnn.pygraph":
    made = _Graph(bucket)
    out, lse = made.graph.sdpa(
        **{name: made.given(uid) for name, uid in (("q", Q), ("k", K), ("v", V))},
        generate_stats=True,
        name="attention",
        **made.options(),
    )
    made.answer(out, OUT)
    made.answer(lse, LSE)
    return made.built()


@functools.cache
def _backward(bucket: Bucket) -> "cudnn.pygraph":
    made = _Graph(bucket)
    given = (("q", Q), ("k", K), ("v", V), ("o", OUT), ("dO", GRAD), ("stats", LSE))
    found = made.graph.sdpa_backward(
        **{name: made.given(uid) for name, uid in given},
        max_total_seq_len_q=bucket.queries,  # otherwise the kernels allocate for every sequence at maximum length
        max_total_seq_len_kv=bucket.keys,
        name="attention_backward",
        **made.options(),
    )
    for one, name in zip(found, (DQ, DK, DV), strict=True):
        made.answer(one, name)
    return made.built()


def _execute(graph: "cudnn.pygraph", tensors: dict[int, torch.Tensor], device: torch.device) -> None:
    import cudnn

    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
    handle = _handle(device.index)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph.execute({name: one.data_ptr() for name, one in tensors.items()}, workspace.data_ptr(), handle=handle)


@functools.cache
def _handle(device: int) -> int:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()
