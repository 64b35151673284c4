"""Estimate GPU memory of the trainer and of a rollout server before anything is loaded, in GiB.

Arithmetic on a shape and a configuration. Imports no torch.

Covers the base as it is stored, the adapter with gradients and optimizer, activations with every `train.recompute`,
fused and FP8 linear layers, quantized ones (quantized.py), a teacher (teacher.py), liger's kernels, micro-batches of
rows and of tokens, TRL's tiled log-prob head, the reference pass, in-process generation; on the server weights, KV
cache, CUDA graphs, LoRA slots, the copy of the base, vision weights, a draft model. Of experts: a layer's in 16 bits,
rows by expert, copies of their factors. Not covered: sharded bases (sharding.py), host memory beside a GPU, how
unevenly tokens choose.

Bytes per token were counted by tracing every allocation of the recipe's own forward and backward (transformers 5.17,
peft 0.21.2, bitsandbytes 0.50.2 under autocast), varying one dimension of the shape at a time.
"""

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kit.core.config.base_rules import CALLED
from kit.core.config.cache_rules import FASTEST, Attention, model_dtype_because
from kit.core.config.recompute_rules import recomputed_layers
from kit.core.config.schema import Config
from kit.core.config.sharding_rules import announced
from kit.core.config.speculation_rules import BY_MODEL
from kit.core.draft_checkpoint import DraftCheckpoint, draft_directory, read_draft
from kit.core.errors import BadInput
from kit.core.formats import packed_format, served_bytes
from kit.core.limits import FOLD_CHUNK, FORMAT_GIB, PACK_CHUNK, SERVED_RANKS, draft_gib, flashinfer_gib, fold_gib
from kit.plan import quantized, teacher
from kit.plan.coefficients import value
from kit.plan.decoder import Experts, LinearAttention, Shape
from kit.plan.gpus import Card
from kit.plan.sizes import is_flex, least_pack, process_completions, row_tokens, value_bytes

GIB = 2**30
NF4_BLOCK, SCALE_BLOCK = 64, 256
STORED = {kind: f"{name} weights" for kind, name in CALLED.items()}  # the base's linear layers
# What stays allocated between phases; everything else comes and goes.
TEACHER = (*(f"teacher's {name}" for name in STORED.values()), "teacher's 16-bit layers", "teacher's adapter")
REFERENCE = "reference's adapter"  # policy.reference: init_adapter
RESIDENT = (*STORED.values(), "16-bit layers", "adapter", "optimizer", "context", "process group", *TEACHER)
CODES = "FP8 codes of the base"
RESIDENT = (*RESIDENT, REFERENCE, CODES)
CANARY_TOKENS = 256  # kit/rollout/canary_scores.py
RANK_ALIGNED = 8  # kit/weights/experts.py: factors of experts are padded to a multiple of it
ROW_INDEX = 26  # bytes per token and expert taken: places in and out of the sorted order, routing weight
# The gated delta rule, traced as everything per token: bytes per value of its queries and keys, of its values, and per
# head; copies of its convolution's channels; gradients per value. And copies of a gated query.
DELTA_QUERY, DELTA_VALUE, DELTA_HEAD, DELTA_MIXED, DELTA_GRADIENTS, GATED_QUERY = 36, 27, 950, 2, 11, 3
EAGER_GRADIENTS = 2.5  # per attention score, in the compute dtype; traced
DELTA_CHUNK = 64  # tokens; transformers 5.17 keeps two float32 states per chunk
ROOM_FOR_KEPT = 0.5  # kept_weights.py: share of the memory that generation leaves free
KEPT = "kept weights"
DRAFTS = "logits of drafts"  # of a server with server.speculation
FLASHINFER = "FlashInfer"  # buffers of a server that may choose it (server.kv_cache fastest)
DRAFT_MODEL = "draft model"  # weights of server.draft_model; its KV cache is part of a sequence's


@dataclass(frozen=True)
class Estimate:
    """GiB without fragmentation, as expected, and with the worst fragmentation that was measured."""

    low: float
    expected: float
    high: float

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(self.low + other.low, self.expected + other.expected, self.high + other.high)


def nf4_bytes(double_quantization: bool) -> float:
    """Bytes per weight: 4 bits, and a float32 scale per 64 weights or an 8-bit one with a float32 per 256 of those."""
    scale = 1 + 4 / SCALE_BLOCK if double_quantization else 4
    return 0.5 + scale / NF4_BLOCK


def stored_bytes(config: Config, double_quantization: bool | None = None) -> float:
    """Bytes per weight of the base's linear layers; the few scales of FP8 are left out.

    `double_quantization` of NF4 defaults to the configured value.
    """
    policy = config.policy
    if policy.quantization == "nf4":
        return nf4_bytes(policy.double_quantization if double_quantization is None else double_quantization)
    return 1 if policy.quantization == "fp8" else value_bytes(config)


def copy_bytes(config: Config) -> float:
    """Bytes per weight of the copy that a replica's workers keep for remerge: BF16 for an unquantized base."""
    return min(stored_bytes(config, double_quantization=False), 2)


def optimizer_bytes(optimizer: str, adapter_bytes: int) -> float:
    """Bytes of optimizer state per trained weight: two moments for Adam.

    bitsandbytes' 8-bit optimizers, paged or not, have a float32 scale per 256 of them, and keep tensors below 4,096
    weights in float32, of which an adapter has few.
    """
    if "sgd" in optimizer:
        return 0
    return 2 * (1 + 4 / 256) if "8bit" in optimizer else 2 * adapter_bytes


class Part(NamedTuple):
    """Attention or MLP of one kind, in so many decoder layers: bytes per token.

    `kept` for the backward pass, apart from norms; `products`: the part of it that selective keeps too, outputs of
    attention and of matmuls with the base, except a last one that is not read again; `gradients` alive at the peak of
    its backward pass.
    """

    layers: int
    kept: float
    products: float
    gradients: float


def _ranks(shape: Shape, config: Config, names: set[str], layers: int) -> float:
    """Bytes per token of x Aᵀ for the linear layers of these names in one of `layers`; quantized layers recompute
    it."""
    copies = 0 if config.policy.quant_cfg else 2 if config.policy.compute == "plain" else 1
    targets = shape.targeted(config.policy.target_modules)
    count = len({one.name for one in shape.linears if one.name in names and one.name in targets and layers})
    return copies * value_bytes(config) * count * config.policy.lora_rank


def _attention_parts(shape: Shape, config: Config, padded: bool) -> list[Part]:
    narrow, normed = value_bytes(config), _normed_bytes(config)
    targets = set(shape.targeted(config.policy.target_modules))
    hidden = narrow * bool({"q_proj", "k_proj", "v_proj"} & targets)  # an adapter keeps its input
    query = (2 + GATED_QUERY * shape.query_gate) * narrow + (normed if shape.qk_norm else 0)
    key = normed if shape.qk_norm else 0
    kept: float = hidden * shape.hidden + query * shape.q_size + key * shape.kv_size
    kept += _ranks(shape, config, {"q_proj", "k_proj", "v_proj", "o_proj"}, shape.attention_layers)
    products = 0.0
    if config.train.recompute == "selective":
        outs = shape.q_size * (1 + shape.query_gate) + 2 * shape.kv_size + shape.hidden
        # FlexAttention, an option for packs, is recomputed.
        is_kept = not (config.train.micro_batch_tokens and is_flex(config)) and not is_eager(shape, config)
        products = narrow * outs + (narrow * shape.q_size + 4 * shape.heads) * is_kept
    found, gradients = [], 0.0
    if is_eager(shape, config):  # probabilities in float32 and as they are multiplied, and capped scores
        scores = shape.heads * row_tokens(config)
        padded, kept = True, kept + scores * (4 + narrow * (1 + shape.soft_cap))
        gradients = EAGER_GRADIENTS * narrow * scores
    layers = ((shape.attention_layers - shape.windowed, padded), (shape.windowed, padded or has_window(shape, config)))
    for count, masked in layers:
        # With a mask keys and values are repeated for every head.
        size = shape.q_size if masked else shape.kv_size
        found.append(Part(count, kept + 2 * narrow * size, products, gradients))
    if (linear := shape.linear_attention) is not None:
        found.append(_linear_attention_part(shape, config, linear))
    return [one for one in found if one.layers]


def is_eager(shape: Shape, config: Config) -> bool:
    """Whether attention holds its scores, (heads, tokens, tokens) a row, in memory."""
    asked = config.model.attn_implementation
    return asked == "eager" or (asked == "auto" and shape.soft_cap)


def has_window(shape: Shape, config: Config) -> bool:
    """Whether rows are longer than the window of some layers, so that these have a mask without padding, too."""
    is_packed = config.train.micro_batch_tokens is not None
    return shape.windowed > 0 and row_tokens(config) > shape.window and not is_packed


def _linear_attention_part(shape: Shape, config: Config, linear: LinearAttention) -> Part:
    """The gated delta rule as transformers computes it in PyTorch, in float32 and in chunks of 64 tokens."""
    narrow, names = value_bytes(config), {one.name for one in linear.linears(shape.hidden)}
    kept: float = (
        narrow * shape.hidden * bool((names - {"out_proj"}) & set(shape.targeted(config.policy.target_modules)))
    )
    queries = linear.value_heads * linear.key_dim  # repeated for every head of values
    kept += DELTA_QUERY * queries + DELTA_VALUE * linear.value_size + DELTA_HEAD * linear.value_heads
    kept += DELTA_MIXED * narrow * linear.mixed + 8 * queries * linear.value_dim / DELTA_CHUNK
    kept += _ranks(shape, config, names, linear.layers)
    products = 0.0
    if config.train.recompute == "selective":
        products = narrow * sum(one.outs for one in linear.linears(shape.hidden))
    return Part(linear.layers, kept, products, DELTA_GRADIENTS * (queries + linear.value_size))


def _mlp_part(shape: Shape, config: Config, width: int, layers: int) -> Part:
    narrow, keeps_silu = value_bytes(config), config.policy.kernels == "torch"
    targets = set(shape.targeted(config.policy.target_modules))
    # Kernels other than torch's recompute silu(gate).
    kept: float = narrow * bool({"gate_proj", "up_proj"} & targets) * shape.hidden
    # One function keeps the products of gate and up, and recomputes down's input too.
    kept += narrow * (2 if config.policy.fused_mlp else (3 if keeps_silu else 2) + ("down_proj" in targets)) * width
    kept += _ranks(shape, config, {"gate_proj", "up_proj", "down_proj"}, layers)
    products = 0.0
    if config.train.recompute == "selective":
        products = narrow * (2 * width + shape.hidden * (not shape.skips_down))
    return Part(layers, kept, products, 2 * narrow * width)


def _experts_part(shape: Shape, config: Config, experts: Experts) -> Part:
    """Routed experts as kit/weights/experts.py computes them, with the expert that every token takes."""
    narrow, inner, rank = value_bytes(config), experts.intermediate, _padded_rank(config)
    # Rows by expert: gate and up, silu(gate), what the routing weights multiply; inputs if they have adapters.
    row = 3 * inner + shape.hidden + bool(rank) * (shape.hidden + inner) + 2 * rank
    kept: float = experts.taken * (narrow * row + ROW_INDEX) + (4 + narrow) * experts.count
    products = 0.0
    if config.train.recompute == "selective":
        products = experts.taken * narrow * (2 * inner + shape.hidden)
    if experts.shared:
        one = _mlp_part(shape, config, experts.shared, experts.layers)
        kept += one.kept + narrow * shape.hidden
        products += one.products
    return Part(experts.layers, kept, products, 0.0)


def _padded_rank(config: Config) -> int:
    """Rank of the experts' factors as they are multiplied."""
    return -(-expert_rank(config) // RANK_ALIGNED) * RANK_ALIGNED


def copied_gib(shape: Shape, config: Config) -> float:
    """GiB of the copy of a layer's factors of experts, in the compute dtype, that its backward pass needs."""
    return shape.expert_adapter(_padded_rank(config)) * value_bytes(config) / GIB


def stack_gib(shape: Shape, config: Config) -> tuple[float, float]:
    """GiB of all experts of a layer in the compute dtype, with their scales in float32: gate and up, and down."""
    if shape.experts is None or config.policy.quantization == "none":
        return 0.0, 0.0
    each = shape.experts.count * (value_bytes(config) + 8 / NF4_BLOCK) / GIB
    first, second = (each * math.prod(matrix) for matrix in shape.expert_matrices)
    return first, second


def experts_gib(shape: Shape, config: Config, tokens: int) -> float:
    """GiB at the peak of the backward pass through a layer's experts, beyond what the layer keeps for it.

    The largest of four moments: rows of outputs on their way to their experts; gradients of gate and up; the products
    with down and with gate and up, by when part of the activations is released.
    """
    if (experts := shape.experts) is None:
        return 0.0
    narrow, rows, copied = value_bytes(config), tokens * experts.taken, copied_gib(shape, config)
    hidden, inner = (narrow * rows * size / GIB for size in (shape.hidden, experts.intermediate))
    both, down = stack_gib(shape, config)
    moved = 3 * hidden + 2 * narrow * tokens * shape.hidden / GIB
    return copied + max(moved, 2 * inner, inner + down, both - 2 * inner)


def _mlp_parts(shape: Shape, config: Config) -> list[Part]:
    found = [_mlp_part(shape, config, shape.intermediate, shape.dense_layers)]
    if shape.experts is not None:
        found.append(_experts_part(shape, config, shape.experts))
    return [one for one in found if one.layers]


def _normed_bytes(config: Config) -> int:
    """Bytes per value of a norm's input: torch's keep it in float32, the other kernels as it is."""
    return 4 if config.policy.kernels == "torch" else value_bytes(config)


def layer_bytes(shape: Shape, config: Config, padded: bool) -> float:
    """Bytes per token that a decoder layer keeps for its backward pass; the mean of all layers."""
    parts = _attention_parts(shape, config, padded) + _mlp_parts(shape, config)
    norms = shape.norms * _normed_bytes(config) * shape.hidden
    return norms + sum(one.layers * one.kept for one in parts) / shape.layers


def backward_bytes(shape: Shape, config: Config, padded: bool) -> float:
    """Bytes per token at the peak of one layer's backward pass with checkpointing.

    Sums the activations that the layer keeps, the gradients of the hidden states and those of the MLP; of the layer
    without experts that takes most.
    """
    (mlp,) = [one for one in _mlp_parts(shape, config) if one.gradients]
    above = _above_mlp_bytes(shape, config, padded) + 3 * value_bytes(config) * shape.hidden
    return above + mlp.kept - mlp.products + mlp.gradients


def _above_mlp_bytes(shape: Shape, config: Config, padded: bool) -> float:
    """Bytes per token of norms and attention while the MLP's backward pass runs, of the layer that takes most.

    What the first pass kept is counted with the checkpoints.
    """
    attention = max(one.kept - one.products for one in _attention_parts(shape, config, padded))
    return shape.norms * _normed_bytes(config) * shape.hidden + attention


def backward_gib(shape: Shape, config: Config, card: Card, tokens: int, padded: bool) -> float:
    """GiB at the peak of one recomputed layer's backward pass, with the weights that it makes."""
    made, hidden = weight_gib(shape, config, card, tokens), value_bytes(config) * shape.hidden
    # The MLP's part is released by then.
    above = _above_mlp_bytes(shape, config, padded) + 3 * hidden
    moving = max(one.gradients for one in _attention_parts(shape, config, padded))
    found = [tokens * (above + moving) / GIB + made]
    if shape.dense_layers:
        more = quantized.kept_bytes(shape, config, card) + quantized.backward_bytes(shape, config, card)
        found.append(tokens * (backward_bytes(shape, config, padded) + more) / GIB + made)
    if shape.experts is not None:
        part = _experts_part(shape, config, shape.experts)
        above = tokens * (_above_mlp_bytes(shape, config, padded) + part.kept - part.products) / GIB
        found.append(above + max(made, experts_gib(shape, config, tokens)))
    return max(found)


def checkpoint_bytes(shape: Shape, config: Config) -> float:
    """Bytes per token that a recomputed layer keeps until then, the mean of all layers: its input.

    With selective, also the outputs of attention and of the matmuls with the base, except a last one that is not read.
    """
    parts = _attention_parts(shape, config, padded=False) + _mlp_parts(shape, config)
    return value_bytes(config) * shape.hidden + sum(one.layers * one.products for one in parts) / shape.layers


def expert_rank(config: Config) -> int:
    """Rank of the adapter on each routed expert; 0: none."""
    rank = config.policy.expert_rank
    return config.policy.lora_rank if rank is None else rank


def adapter_weights(shape: Shape, config: Config) -> int:
    """Trained weights: the adapter's on linear layers and on routed experts."""
    return shape.adapter_weights(config.policy.lora_rank, config.policy.target_modules, expert_rank(config))


def sync_bytes(shape: Shape, config: Config) -> int:
    """Bytes of an adapter's file, which a sync hands to every replica."""
    return adapter_weights(shape, config) * (2 if config.policy.adapter_dtype == "bfloat16" else 4)


def run_again(shape: Shape, config: Config) -> int:
    """Number of decoder layers that the backward pass recomputes."""
    if config.train.recompute == "none":
        return 0
    return len(recomputed_layers(shape.layers, config.train.recompute_fraction))


def micro_batch(config: Config) -> tuple[int, int]:
    """Maximum tokens of a forward pass, and how many of them are scored."""
    train, length = config.train, row_tokens(config)
    if train.micro_batch_tokens is None:
        rows = train.per_device_train_batch_size
        return rows * length, rows * config.rollout.max_completion_length
    # A longer row gets a pack of its own.
    tokens = max(least_pack(config), min(train.micro_batch_tokens, process_completions(config) * length))
    return tokens, tokens


def resident(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB that a trainer process holds in every phase, without its context; a base that it maps is the server's."""
    narrow = value_bytes(config)
    elsewhere = shape.vocabulary * shape.hidden if config.policy.embeddings == "host" and not card.is_cpu else 0
    trained = adapter_weights(shape, config)
    stored = 2 if config.policy.adapter_dtype == "bfloat16" else 4
    start = {REFERENCE: trained * stored / GIB} if config.policy.reference == "init_adapter" else {}
    base = {
        STORED[config.policy.quantization]: shape.linear_weights * stored_bytes(config) / GIB,
        "16-bit layers": (shape.other_weights - elsewhere) * narrow / GIB,
    }
    if config.train.keep_weights:
        base[CODES] = 2 * shape.linear_weights / GIB
    return (
        ({} if config.server.share_base else base)
        | {
            "adapter": trained * stored / GIB,
            "optimizer": trained * optimizer_bytes(config.train.optimizer, stored) / GIB,
        }
        | _teacher(shape, config, narrow, trained * stored)
        | start
    )


def _teacher(shape: Shape, config: Config, narrow: int, adapter: int) -> dict[str, float]:
    """GiB of a teacher that stay in memory; empty if the teacher is the base."""
    if not config.distill.is_given:
        return {}
    if (other := teacher.shape_of(shape, config)) is shape:
        return {TEACHER[-1]: adapter / GIB} if config.distill.teacher_adapter else {}
    name = f"teacher's {STORED[config.policy.quantization]}"
    stored = other.linear_weights * stored_bytes(config)
    return {name: stored / GIB, TEACHER[-2]: other.other_weights * narrow / GIB}


def tile_gib(shape: Shape, tokens: int, narrow: int, card: Card) -> float:
    """GiB of the tile of logits that TRL's log-prob head works on.

    On a CPU a smaller one (head_tiles.py) and PyTorch's float32 copies. The tile is as wide for a small vocabulary,
    but a CPU commits memory only for what is written.
    """
    if not card.is_cpu:
        return min(tokens, value("head_rows")) * value("head_columns") * narrow / GIB
    words = min(tokens, value("head_rows_cpu")) * min(value("head_columns"), shape.vocabulary)
    return words * (narrow + 4 * value("head_copies_cpu")) / GIB


def workspace_gib(card: Card) -> float:
    return 0.0 if card.is_cpu else value("workspace_gib")


def dequantized_gib(shape: Shape, narrow: int) -> float:
    """GiB of the largest linear layer in the compute dtype, with its scales in float32."""
    return shape.largest_linear * (narrow + 8 / NF4_BLOCK) / GIB


def weight_gib(shape: Shape, config: Config, card: Card, tokens: int) -> float:
    """GiB of the weight made for a matmul with the base: the largest layer in the compute dtype.

    With FP8, the two MLP layers that share an input, a byte per weight, and their gradients, whose tokens become FP8
    too.
    """
    if config.policy.quant_cfg:
        return quantized.weight_gib(shape, config, card)
    if config.policy.quantization == "none":
        return 0.0
    if config.policy.compute != "fp8":
        return dequantized_gib(shape, value_bytes(config))
    outs = (1 + shape.gated) * shape.intermediate
    return (shape.hidden * outs * (1 + 8 / NF4_BLOCK) + tokens * outs) / GIB


def update_parts(
    shape: Shape, config: Config, card: Card, processes: int = 1, padded: bool = True
) -> dict[str, float]:
    """GiB allocated at the peak of an update, by part: the larger of the layers' and of the head's peak.

    `padded`: whether prompts or completions differ in length, as they do in a run; then a mask is made.
    """
    train, narrow, length = config.train, value_bytes(config), row_tokens(config)
    tokens, scored = micro_batch(config)
    packed = train.micro_batch_tokens is not None
    padded = padded and not packed
    kept, hidden = layer_bytes(shape, config, padded) + quantized.kept_bytes(shape, config, card), shape.hidden
    trained = adapter_weights(shape, config)
    gradient = trained * (2 if config.policy.adapter_dtype == "bfloat16" else 4) / GIB
    found = resident(shape, config, card) | {"gradients": gradient * (2 if processes > 1 else 1)}
    kinds = padded * (shape.attention_layers > shape.windowed)
    kinds += shape.windowed > 0 and (padded or has_window(shape, config))
    mask = kinds * train.per_device_train_batch_size * length**2 * (1 + narrow) / GIB
    if packed and card.is_cpu:  # on a GPU blocks of 128 x 128 tokens are one entry
        mask = (tokens * train.sequence_parallel) ** 2 * (1 + narrow) / GIB
    again = run_again(shape, config)
    whole = shape.layers - again
    if again:
        found["checkpoints"] = tokens * again * checkpoint_bytes(shape, config) / GIB
        if train.recompute_offload and not card.is_cpu:  # one is in transit, one in use
            found["checkpoints"] -= tokens * max(0, again - 2) * narrow * hidden / GIB
        layers = backward_gib(shape, config, card, tokens, padded)
    else:
        parts = _attention_parts(shape, config, padded) + _mlp_parts(shape, config)
        moving = max(10 * narrow * hidden, *(one.gradients for one in parts))
        layers = tokens * (moving + quantized.backward_bytes(shape, config, card)) / GIB
        layers = max(layers + weight_gib(shape, config, card, tokens), experts_gib(shape, config, tokens))
    if whole:
        found["activations"] = tokens * whole * kept / GIB
        if shape.experts is not None:
            found["activations"] += whole * shape.experts.layers / shape.layers * copied_gib(shape, config)
        if mask and not packed:  # each layer's own in 16 bits; the mean of full and windowed ones
            masked = (shape.attention_layers if padded else shape.windowed) / shape.layers
            each = mask / kinds * narrow / (1 + narrow)
            found["activations"] += (whole * masked - (again == 0)) * each
    head = (tokens + scored) * (4 + narrow) * hidden / GIB + _tiles(shape, config, scored, narrow, card)
    last = "divergence, teacher's states" if config.distill.is_given else "log-prob head"
    name = "one layer's backward pass" if layers > head else last
    found |= {name: max(layers, head), "padding mask": mask, "workspace": workspace_gib(card)}
    return found


def _tiles(shape: Shape, config: Config, scored: int, narrow: int, card: Card) -> float:
    """GiB of a log-prob head's logits tiles; in a distillation, of the divergence's tiles and the teacher's states."""
    tile = tile_gib(shape, scored, narrow, card)
    if not config.distill.is_given:
        kept = scored * shape.vocabulary * narrow / GIB
        return tile + kept if config.train.keep_logits else tile
    tile = max(tile * (config.rollout.backend == "server"), teacher.tiles_gib(shape, config, scored, card))
    return tile + teacher.states_gib(shape, config, scored)


def scoring_parts(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB allocated at the peak of a pass without gradients, the reference's, by part."""
    narrow = value_bytes(config)
    tokens, scored = micro_batch(config)
    layer = _forward_gib(shape, config, tokens)
    layer += max(weight_gib(shape, config, card, tokens), *stack_gib(shape, config))
    head = tokens * 2 * narrow * shape.hidden / GIB + tile_gib(shape, scored, narrow, card)
    name = "one layer's forward pass" if layer > head else "log-prob head"
    return resident(shape, config, card) | {name: max(layer, head), "workspace": workspace_gib(card)}


def _forward_gib(shape: Shape, config: Config, tokens: int) -> float:
    """GiB of one layer's forward pass without gradients, of the layer that takes most."""
    narrow = value_bytes(config)
    width = 4.0 * (shape.intermediate + shape.hidden)
    if (experts := shape.experts) is not None:
        rows = experts.taken * (2 * shape.hidden + 3 * experts.intermediate)
        width = max(width * (shape.dense_layers > 0), rows + 4 * (experts.shared + shape.hidden))
    if is_eager(shape, config):
        width += shape.heads * row_tokens(config) * (4 + 2 * narrow) / narrow
    return tokens * narrow * width / GIB


def teaching_parts(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB allocated at the peak of the teacher's pass, which runs without quantizers, by part."""
    narrow = value_bytes(config)
    (tokens, scored), model = micro_batch(config), teacher.shape_of(shape, config)
    layer = _forward_gib(model, config, tokens) + max(dequantized_gib(model, narrow), *stack_gib(model, config))
    found = {"one layer's forward pass": layer, "teacher's states": teacher.states_gib(shape, config, scored)}
    return resident(shape, config, card) | found | {"workspace": workspace_gib(card)}


def calibration_parts(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB allocated at the peak of the calibration of input ranges, which runs without quantizers, by part."""
    narrow = value_bytes(config)
    tokens = quantized.calibration_tokens(config)
    layer = _forward_gib(shape, config, tokens) + dequantized_gib(shape, narrow)
    looked_at = 2 * narrow * tokens * shape.intermediate / GIB  # the real tokens' inputs, and their magnitudes
    return resident(shape, config, card) | {"one layer's forward pass": layer + looked_at}


def generation_parts(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB allocated at the peak of a rollout, by part.

    In process, the KV cache of all completions of the step; with a server, the canary's logits.
    """
    narrow = value_bytes(config)
    rollout, found = config.rollout, resident(shape, config, card) | {"workspace": workspace_gib(card)}
    if rollout.backend == "server":
        length = min(CANARY_TOKENS, row_tokens(config))
        logits = rollout.canary_prompts * length * shape.vocabulary * narrow
        return found | {"canary": (logits + bool(logits) * length * shape.vocabulary * 8) / GIB}
    sequences = process_completions(config)
    prompts = sequences * rollout.max_prompt_length
    prefill = sequences * shape.cached_bytes(rollout.max_prompt_length, narrow) / GIB
    prefill += _forward_gib(shape, config, prompts)
    cache = sequences * shape.cached_bytes(row_tokens(config), narrow) / GIB
    # Growing by one token copies a layer's cache.
    decode = cache * (1 + 1 / shape.layers) + sequences * shape.vocabulary * 4 * value("sampling_copies") / GIB
    kept = kept_gib(shape, config, card, allocated(found) + decode)
    if kept:
        found[KEPT] = kept
    elif config.policy.quant_cfg:
        found["weight"] = weight_gib(shape, config, card, 0)
    elif shape.experts is not None:
        found["weight"] = max(stack_gib(shape, config))
    if prefill > decode:
        return found | {"prompts' forward pass": prefill}
    return found | {"KV cache": cache, "sampling": decode - cache}


def kept_gib(shape: Shape, config: Config, card: Card, taken_gib: float) -> float:
    """GiB of weights made once per in-process rollout (`rollout.keep_weights`), with `taken_gib` allocated besides.

    0 if each weight is made for its matmul, is stored as it is multiplied, or is a part of one.
    """
    policy, mode = config.policy, config.rollout.keep_weights
    made_once = policy.quantization == "nf4" or policy.quant_cfg is not None
    # The FP8 codes of a format are made for every matmul.
    if (
        config.rollout.backend == "server"
        or mode == "never"
        or config.train.keep_weights  # counted there
        or not made_once
        or announced() is not None
        or quantized.multiplies_fp8(config, card)
    ):
        return 0.0
    width = 1 if policy.compute == "fp8" else value_bytes(config)
    needed = shape.linear_weights * width / GIB
    limit = None if card.is_cpu else config.train.max_gpu_gib  # of torch's allocator, which excludes the context
    context = value("cpu_trainer_gib" if card.is_cpu else "trainer_context_gib")
    free = (card.gib - context if limit is None else limit) - taken_gib
    return needed if mode == "always" or needed <= ROOM_FOR_KEPT * free else 0.0


def trainer_phases(
    shape: Shape, config: Config, card: Card, processes: int = 1, padded: bool = True
) -> dict[str, dict[str, float]]:
    """Parts by phase: calibration if a format has input ranges, rollout, log-probs or the teacher's pass, update.

    The sum of a phase's parts is the most that torch has allocated.
    """
    if config.sft.is_given:  # samples nothing; held-out rows take less than the update
        return {"update": update_parts(shape, config, card, processes, padded)}
    found = {"calibration": calibration_parts(shape, config, card)} if quantized.calibration_tokens(config) else {}
    found["rollout"] = generation_parts(shape, config, card)
    if config.distill.is_given:
        found["teacher"] = teaching_parts(shape, config, card)
    else:
        found["log-probs"] = scoring_parts(shape, config, card)
    return found | {"update": update_parts(shape, config, card, processes, padded)}


def allocated(parts: dict[str, float]) -> float:
    return sum(parts.values())


def process_memory(parts: dict[str, float], card: Card, processes: int = 1) -> Estimate:
    """Memory that a process takes on its card at the peak of a phase: allocated, fragmented, and the context."""
    moving = sum(gib for name, gib in parts.items() if name not in RESIDENT)
    context = value("cpu_trainer_gib" if card.is_cpu else "trainer_context_gib")
    if processes > 1 and not card.is_cpu:
        context += value("process_group_gib")
    low = allocated(parts) + context
    if card.is_cpu:  # no caching allocator
        expected = low + (value("malloc_holes") - 1) * parts.get("activations", 0.0) * _has_holes()
        return Estimate(low, expected, expected * 1.2)
    expected, high = (low + min(moving, value(name)) for name in ("fragmentation_gib", "fragmentation_high_gib"))
    return Estimate(low, expected, high)


def _has_holes() -> bool:
    """Whether glibc's malloc leaves holes between activations.

    With MALLOC_MMAP_THRESHOLD_ set it asks the system for each large tensor: no more memory than the tensor, but
    slower.
    """
    return "MALLOC_MMAP_THRESHOLD_" not in os.environ


def server_parts(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB that one GPU of a replica holds once it has synced, by part."""
    server, rollout, share = config.server, config.rollout, config.server.tensor_parallel
    width = 2 if config.model.dtype != "float32" or server.weights != "bf16" else 4
    linear = served_bytes(server.weights, width)
    found = {
        "weights": shape.linear_weights * linear / share / GIB,
        "16-bit layers": shape.other_weights * width / share / GIB,
    }
    if shape.vision:
        found["vision weights"] = 2 * shape.vision / share / GIB
    if rollout.sync == "adapter":
        rank = min((rank for rank in SERVED_RANKS if rank >= config.policy.lora_rank), default=SERVED_RANKS[-1])
        # Two slots; the replica's halves of the factors are sharded like the layers, the other halves are not.
        found["LoRA slots"] = 2 * shape.adapter_weights(rank, config.policy.target_modules) * width / GIB
    else:
        copied = shape.linear_weights * copy_bytes(config) / share / GIB
        if server.nf4_copy == "gpu":
            found["copy of the base"] = copied
        elif not card.is_cpu:
            found["layers fetched"] = copied * value("fetched_share_sleep" if server.sleep else "fetched_share")
        outs = max((1 + shape.gated) * shape.mlp_width, shape.q_size + 2 * shape.kv_size)
        fused = max(shape.hidden * outs, _folded_experts(shape))
        found["folding a layer"] = fused * value("fold_bytes") / share / GIB + _format_gib(config, card, fused / share)
    tokens = batched_tokens(config, card)
    wide = 3 * shape.mlp_width
    if shape.experts is not None:  # rows by expert: gate and up, their product, outputs
        wide += shape.experts.taken * (3 * shape.experts.intermediate + shape.hidden)
    activations = tokens * (wide / share + 5 * shape.hidden) * width
    sampler = server.max_num_seqs * shape.vocabulary * 4 * value("sampler_copies")
    found["activations"] = max(activations, sampler) / GIB
    if server.speculation != "none":
        found[DRAFTS] = draft_gib(server.max_num_seqs, server.draft_tokens, shape.vocabulary)
        if (draft := draft_of(config)) is not None:
            found[DRAFT_MODEL] = draft.weights * width / GIB
    if may_use_flashinfer(shape, config, card):
        found[FLASHINFER] = flashinfer_gib(shape.q_size, tokens)
    if not server.enforce_eager and not card.is_cpu:
        scale = shape.layers / 36 * min(server.max_num_seqs, 512) / 256
        found["CUDA graphs"] = value("graph_gib") * scale
    # On a CPU the API and the engine are separate processes.
    found["context"] = 2 * value("cpu_process_gib") if card.is_cpu else value("server_context_gib")
    found["KV cache"] = cache_gib(shape, config, card, found)
    return found


def _folded_experts(shape: Shape) -> int:
    """Weights of a layer's gate and up matrices of all experts; 0 without experts."""
    return shape.experts.count * math.prod(shape.expert_matrices[0]) if shape.experts else 0


def _format_gib(config: Config, card: Card, weights: float) -> float:
    """Extra GiB needed to fold a layer of this many weights in a quantized format.

    It is held in float32 for vLLM to quantize; on a card without the kernels PyTorch's temporaries for some rows are
    added, as they are for packed weights.
    """
    if packed := packed_format(config.server.weights):
        return quantized.TORCH_WEIGHT[packed.weight.kind] * min(weights, PACK_CHUNK) / GIB
    if (fmt := quantized.format_of(config)) is None:
        return 0.0
    made = 0 if quantized.has_kernels(card) else quantized.TORCH_WEIGHT[fmt.weight.kind] * min(weights, FOLD_CHUNK)
    return (4 * weights * fmt.by_vllm + made) / GIB


def cache_gib(shape: Shape, config: Config, card: Card, others: dict[str, float]) -> float:
    """GiB of KV cache on one GPU: `server.kv_cache_gib`, or else what the other parts leave of the server's share."""
    if config.server.kv_cache_gib is not None:
        return config.server.kv_cache_gib
    if card.is_cpu:
        return min(4.0, full_cache_gib(shape, config))
    # launch.server subtracts the copy and a layer's part from the share; vLLM does not know what else a fold needs.
    fmt = quantized.format_of(config)
    known = fold_gib(_folded_experts(shape) / config.server.tensor_parallel)
    known += FORMAT_GIB * (fmt is not None and fmt.by_vllm)
    unknown = max(0.0, others.get("folding a layer", 0.0) - known) + others.get("layers fetched", 0.0)
    return max(0.0, config.server.gpu_memory_utilization * card.gib - sum(others.values()) + unknown)


def may_use_flashinfer(shape: Shape, config: Config, card: Card) -> bool:
    """Whether a server on this card chooses an FP8 KV cache by `server.kv_cache: fastest`, if its machine has
    FlashInfer's kernels, which a plan cannot know."""
    is_plain = not (shape.windowed or shape.linear_attention or shape.soft_cap)
    attention = Attention(shape.heads, shape.kv_heads, shape.head_dim, is_plain)
    return config.server.kv_cache == FASTEST and not model_dtype_because(config, card.capability, attention)


def kv_width(config: Config) -> int:
    """Bytes of a value in the KV cache; `fastest` counts as the model's dtype, so the cache holds no less."""
    if config.server.kv_cache == "fp8":
        return 1
    return 4 if config.model.dtype == "float32" and config.server.weights == "bf16" else 2


def draft_of(config: Config) -> DraftCheckpoint | None:
    """The checkpoint that drafts for a replica; None without one, or if it cannot be read here."""
    if config.server.speculation not in BY_MODEL or not config.server.draft_model:
        return None
    return _draft_in(draft_directory(config.server))


@functools.cache  # a plan asks for every layout that it tries
def _draft_in(directory: Path) -> DraftCheckpoint | None:
    try:
        return read_draft(directory)
    except BadInput:
        return None


def sequence_gib(shape: Shape, config: Config) -> float:
    """GiB of KV cache for one sequence of full length on one GPU of a replica, a draft model's included."""
    found = shape.cached_bytes(row_tokens(config), kv_width(config))
    if (draft := draft_of(config)) is not None:
        found += draft.cached_values() * row_tokens(config) * kv_width(config)
    return found / config.server.tensor_parallel / GIB


def full_cache_gib(shape: Shape, config: Config) -> float:
    """GiB of KV cache in which all `server.max_num_seqs` sequences reach full length."""
    return config.server.max_num_seqs * sequence_gib(shape, config)


def batched_tokens(config: Config, card: Card) -> float:
    """Maximum tokens of one forward pass of the server."""
    given = config.server.vllm.get("max_num_batched_tokens")
    if given is not None:
        return given
    default = value("batched_tokens_large" if card.gib >= 70 else "batched_tokens_small")
    return min(default, config.server.max_num_seqs * (row_tokens(config) + 1))


def server_memory(parts: dict[str, float], config: Config) -> Estimate:
    """Memory that a replica takes on one card. Without `server.kv_cache_gib` the cache takes what the rest leaves."""
    total, spread = sum(parts.values()), value("server_spread")
    if config.server.kv_cache_gib is None:
        return Estimate(total, total, total + parts.get("CUDA graphs", 0.0))
    return Estimate(total * (1 - spread), total, total * (1 + spread))


def asleep_memory(parts: dict[str, float]) -> Estimate:
    """Memory that a sleeping replica keeps: its copy of the base, if it is on the card, context, CUDA graphs, and
    FlashInfer's buffers."""
    kept = parts.get("copy of the base", 0.0) + value("asleep_gib")
    kept += parts.get(FLASHINFER, 0.0)
    return Estimate(kept * 0.7, kept, kept * 1.3)


def full_precision(shape: Shape, config: Config, card: Card) -> dict[str, float]:
    """GiB over all cards that GRPO without quantization would need, with this configuration for comparison.

    Counts weights, optimizer and activations, without KV cache, contexts and CUDA graphs. Either every weight is
    trained (BF16 weights and gradients, float32 masters and Adam moments, a frozen reference), or a LoRA on a BF16
    base; both include the BF16 weights of rollout server and teacher.
    """
    trained = adapter_weights(shape, config)
    parts = update_parts(shape, config, card)
    moving = sum(gib for name, gib in parts.items() if name not in (*RESIDENT, "gradients"))
    has_server = config.rollout.backend == "server"
    serving = 2 * shape.parameters / GIB if has_server else 0.0
    if config.distill.is_given and (other := teacher.shape_of(shape, config)) is not shape:
        serving += 2 * other.parameters / GIB
    copy = copy_bytes(config) if config.rollout.sync == "remerge" and config.server.nf4_copy == "gpu" else 0.0
    linear = shape.linear_weights * served_bytes(config.server.weights) / GIB
    served = linear + shape.other_weights * 2 / GIB + shape.linear_weights * copy / GIB
    return {
        "full fine-tuning": (2 + 2 + 12 + 2) * shape.parameters / GIB + moving + serving,
        "BF16 LoRA": 2 * shape.parameters / GIB + 16 * trained / GIB + moving + serving,
        "this configuration": allocated(parts) + (served if has_server else 0.0),
    }
