"""Estimate the seconds of a step before anything runs, to split GPUs between trainer and server.

Covers rollouts and update. Counts floating-point operations and bytes on a shape; the share of a card's peak that is
reached was measured on an H200 (coefficients.py). Every completion is assumed to reach its limit. Not covered:
rewards, a calibration, a CPU, networks between machines, waiting for the longest completion of a step if lengths
differ.
"""

import math
from dataclasses import dataclass, replace

from kit.core.cards import W8A8
from kit.core.config.card_rules import served_product
from kit.core.config.schema import Config
from kit.core.formats import served_bytes
from kit.plan import quantized, teacher
from kit.plan.coefficients import value
from kit.plan.decoder import Shape
from kit.plan.gpus import CARDS, Card
from kit.plan.memory import (
    GIB,
    KEPT,
    generation_parts,
    kv_width,
    layer_bytes,
    run_again,
    sequence_gib,
    stored_bytes,
    sync_bytes,
)
from kit.plan.sizes import is_flex

MEASURED_CARD = "h200"


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of a step by phase, and the low and high of the whole step; `completions` of all processes.

    With `overlaps` the rollout runs during the update (`rollout.overlap`, on cards of its own).
    """

    rollout: float
    update: float
    other: float
    completions: int
    low: float
    high: float
    overlaps: bool = False

    @property
    def step(self) -> float:
        return whole_step(self.rollout, self.update, self.other, self.overlaps)


def whole_step(rollout: float, update: float, other: float, overlaps: bool) -> float:
    """Seconds of a step: its phases in sequence, or rollout and update at the same time."""
    return (max(rollout, update) if overlaps else rollout + update) + other


def can_estimate(card: Card) -> bool:
    return card.half_tflops is not None and card.gb_per_s is not None


def spread(card: Card) -> float:
    """How far low and high are from the expected time, as a share, apart from the host's speed."""
    return value("time_spread" if card.name == MEASURED_CARD else "time_spread_other")


@dataclass(frozen=True)
class Forwards:
    """The forward passes that a process makes over its completions once: how many, and the size of each.

    Per pass: tokens, scored tokens, and operations of attention. A backward pass through frozen weights takes as many
    operations.
    """

    count: int
    tokens: float
    scored: float
    attention: float


def forwards(shape: Shape, config: Config, completions: int) -> Forwards:
    """Forwards over micro-batches of rows, or of tokens (`train.micro_batch_tokens`).

    With tokens, a group's prompt may be there only once.
    """
    rollout, train = config.rollout, config.train
    prompt, completion = rollout.max_prompt_length, rollout.max_completion_length
    # Causal: half of both matmuls.
    pairs = 2 * shape.q_size * shape.layers * shape.attended_share(prompt + completion)
    if train.micro_batch_tokens is None:
        micro, length = min(train.per_device_train_batch_size, completions), prompt + completion
        count = math.ceil(completions / micro)
        return Forwards(count, micro * length, micro * completion, micro * pairs * length**2)
    shared = min(rollout.group_size, completions) if train.share_prompts else 1
    prompts = completions / shared
    tokens = completions * completion + prompts * prompt
    attention = pairs * (completions * (completion**2 + 2 * prompt * completion) + prompts * prompt**2)
    together = train.sequence_parallel  # processes that compute a pack of all their rows
    count = math.ceil(tokens * together / max(train.micro_batch_tokens * together, prompt + completion))
    return Forwards(count, tokens / count, completions * completion / count, attention / count)


def update_seconds(shape: Shape, config: Config, card: Card, completions: int, sign: int = 0) -> float:
    """Reference or teacher pass, loss and backward pass of one process for its `completions`, per optimizer step.

    `sign` is -1 for a host that launches kernels fast, 1 for a slow one.
    """
    train, policy, distills = config.train, config.policy, config.distill.is_given
    one = forwards(shape, config, completions)
    # Forward and backward, and once per batch of rollouts the reference pass, which a distillation does not have.
    passes = 2 + (train.beta != 0 and not distills and not config.sft.is_given) / train.num_iterations
    again = run_again(shape, config) / shape.layers
    is_full = train.recompute == "full"
    last = shape.layers * shape.intermediate * shape.hidden if shape.skips_down else 0
    products = passes + again * is_full * (1 - last / shape.active_weights)
    attending = passes + again * (is_full or (train.micro_batch_tokens is not None and is_flex(config)))
    if policy.compute == "fp8" and card.fp8_tflops is not None:
        products /= value("fp8_products")
    elif quantized.multiplies_fp8(config, card):
        products = 1 + (products - 1) / value("fp8_products")  # all but the backward pass
    linear = 2 * shape.active_weights * one.tokens
    head = 2 * shape.vocabulary * shape.hidden * one.scored
    heads = teacher.head_products(config)[0] if distills else passes
    arithmetic = (products * linear + heads * head + attending * one.attention) / _reached(card)
    moved = _weight_bytes(shape, config, card) + one.tokens * _layer_traffic(shape, config)
    memory = (passes + again) * (moved + _input_traffic(shape, config, card, one.tokens))
    memory -= (2 + again) * one.tokens * _adapter_traffic(shape, config)
    seconds = arithmetic + memory / (card.gb_per_s * 1e9)
    # The host launches kernels while the card computes: a pass takes as long as the slower of the two.
    launch = shape.layers * value("launch_s") * (1 + sign * value("launch_spread"))
    found = one.count * max(seconds, (passes + again) * launch)
    if distills:
        found += teacher_seconds(shape, config, card, completions, sign)
    return found + _peak_seconds(shape, config, card)


def _reached(card: Card) -> float:
    return value("update_efficiency") * card.half_tflops * 1e12


def _layer_traffic(shape: Shape, config: Config) -> float:
    """Bytes per token that a pass moves outside matmuls."""
    share = 1.0 if config.policy.kernels == "torch" else value("liger_traffic")
    # An MLP as one function keeps less and moves as much: 1.2 % more tokens a second (bench/STEP.md).
    moving = replace(config, policy=replace(config.policy, fused_mlp=False))
    return layer_bytes(shape, moving, padded=False) * shape.layers * value("update_traffic") * share


def _adapter_traffic(shape: Shape, config: Config) -> float:
    """Bytes per token and pass that peft's path moves and layers fused with their adapter do not."""
    if config.policy.compute == "plain" and config.policy.quant_cfg is None:
        return 0.0
    targets = shape.targeted(config.policy.target_modules)
    outputs = sum(one.outs * one.layers for one in shape.linears if one.name in targets)
    return value("merged_bytes" if config.policy.quant_cfg else "peft_bytes") * outputs


def _dequantized_bytes(shape: Shape, config: Config) -> float:
    """Bytes moved to dequantize all linear layers, as if at the card's full bandwidth."""
    if (config.policy.quantization == "none" and config.policy.quant_cfg is None) or config.train.keep_weights:
        return 0.0
    return (2 + stored_bytes(config)) * shape.linear_weights / value("dequantize_bandwidth")


def _weight_bytes(shape: Shape, config: Config, card: Card) -> float:
    """Bytes moved to make the weights of a pass."""
    plain, fmt = _dequantized_bytes(shape, config), quantized.format_of(config)
    if fmt is None:
        return plain
    if quantized.has_kernels(card):
        return plain * value("dequantize_bandwidth") / value("format_bandwidth")
    return quantized.TORCH_WEIGHT_MOVES[fmt.weight.kind] * shape.linear_weights


def _input_traffic(shape: Shape, config: Config, card: Card, tokens: float) -> float:
    """Bytes moved to quantize the inputs of a pass, if PyTorch does it."""
    fmt = quantized.format_of(config)
    if fmt is None or fmt.activation is None or quantized.has_kernels(card):
        return 0.0
    inputs = 2 * shape.hidden + shape.q_size + shape.mlp_width
    return quantized.TORCH_INPUT_MOVES[fmt.activation.kind] * inputs * shape.layers * tokens


def _peak_seconds(shape: Shape, config: Config, card: Card) -> float:
    """Seconds for the weights' peaks, once per optimizer step, in formats that have them."""
    fmt = quantized.format_of(config)
    if fmt is None or (fmt.weight.kind != "nvfp4" and fmt.weight.block[1] is not None):
        return 0.0
    return value("peaks_share") * _weight_bytes(shape, config, card) / (card.gb_per_s * 1e9)


def format_seconds(shape: Shape, config: Config, card: Card, completions: int) -> float:
    """The part of `update_seconds` that making the weights of `policy.quant_cfg` takes, peaks included."""
    one, reference = forwards(shape, config, completions), config.train.beta != 0 and not config.distill.is_given
    passes = 2 + reference / config.train.num_iterations + run_again(shape, config) / shape.layers
    made = one.count * passes * _weight_bytes(shape, config, card) / (card.gb_per_s * 1e9)
    return made + _peak_seconds(shape, config, card)


def teacher_seconds(shape: Shape, config: Config, card: Card, completions: int, sign: int = 0) -> float:
    """The part of `update_seconds` that the teacher's pass, unquantized, and its share of the divergence take."""
    model = teacher.shape_of(shape, config)
    one = forwards(model, config, completions)
    head = teacher.head_products(config)[1] * 2 * model.vocabulary * model.hidden * one.scored
    arithmetic = (2 * model.active_weights * one.tokens + one.attention + head) / _reached(card)
    own = config if model is shape else replace(config, policy=replace(config.policy, kernels="torch"))
    moved = _dequantized_bytes(model, config) + one.tokens * _layer_traffic(model, own)
    launch = model.layers * value("launch_s") * (1 + sign * value("launch_spread"))
    return one.count * max(arithmetic + moved / (card.gb_per_s * 1e9), launch)


def decode_seconds(shape: Shape, config: Config, card: Card, sequences: float) -> float:
    """Seconds to decode one token for each of `sequences` at half of the full length, on a vLLM server."""
    server, rollout, share = config.server, config.rollout, config.server.tensor_parallel
    fp8 = card.fp8_tflops is not None and served_product(config, card.capability)[0] == W8A8
    read = shape.weights_read(sequences) * served_bytes(server.weights) + 2 * shape.vocabulary * shape.hidden
    bandwidth = card.gb_per_s * 1e9
    if fp8:
        reached = value("decode_efficiency_fp8") * card.fp8_tflops * 1e12
    else:
        reached = value("decode_efficiency_bf16") * card.half_tflops * 1e12
    length = rollout.max_prompt_length + rollout.max_completion_length / 2
    cache = shape.cached_bytes(length, kv_width(config)) / (value("decode_bandwidth") * bandwidth)
    flops = 2 * (shape.active_weights + shape.vocabulary * shape.hidden) / reached
    fixed = value("eager_s") * shape.layers if server.enforce_eager else value("step_s")
    seconds = fixed + (read / bandwidth + sequences * (cache + flops)) / share
    return seconds * (value("adapter_slowdown") if rollout.sync == "adapter" else 1.0)


def served_seconds(shape: Shape, config: Config, card: Card, completions: float, cache_gib: float) -> float:
    """Seconds of a rollout of `completions` on one replica with `cache_gib` of KV cache per GPU."""
    at_once = max(1, min(config.server.max_num_seqs, int(cache_gib / sequence_gib(shape, config))))
    waves = math.ceil(completions / at_once)
    decode = decode_seconds(shape, config, card, completions / waves)
    prompts = completions / config.rollout.group_size * config.rollout.max_prompt_length
    peak = value("decode_efficiency_bf16") * card.half_tflops * 1e12 * config.server.tensor_parallel
    return waves * config.rollout.max_completion_length * decode + 2 * shape.active_weights * prompts / peak


def sync_seconds(shape: Shape, config: Config, card: Card) -> float:
    """Seconds to hand a new adapter to the replicas: write, read and fold it, score the canary."""
    found = value("sync_s") + value("sync_s_gb") * sync_bytes(shape, config) / 1e9
    if config.rollout.sync == "remerge":
        slower = CARDS[MEASURED_CARD].gb_per_s / card.gb_per_s
        found += value("fold_s") * slower * shape.linear_weights / config.server.tensor_parallel
    return found


def own_seconds(shape: Shape, config: Config, card: Card, completions: int) -> float:
    """Seconds of a rollout of `completions` by transformers in the trainer's process."""
    rollout = config.rollout
    length = rollout.max_prompt_length + rollout.max_completion_length / 2
    bandwidth = value("decode_bandwidth") * card.gb_per_s * 1e9
    # The cache is read by attention, and read and written when it grows by a token.
    read = completions * shape.cached_bytes(length, 2) * 3
    if kept := generation_parts(shape, config, card).get(KEPT):
        read += kept * GIB  # made once
    elif config.policy.quant_cfg is None:
        read += shape.weights_read(completions) * 0.52
    else:
        read += _weight_bytes(shape, config, card)
    decode = max(value("own_decode_s") * shape.layers, read / bandwidth)
    return rollout.max_completion_length * decode


def step_time(
    shape: Shape,
    config: Config,
    card: Card,
    completions: int,
    trainers: int,
    replicas: int,
    cache_gib: float,
    shares: bool = False,
) -> StepTime:
    """Time of a step of `completions` on `trainers` processes; without replicas each process generates its own.

    With `shares` a card trains and serves. Sampling and training slow each other down there, so phases are added up.
    """
    mine = math.ceil(completions / trainers)
    if replicas:
        rollout = served_seconds(shape, config, card, completions / replicas, cache_gib)
        other = sync_seconds(shape, config, card) + value("sleep_s") * config.server.sleep
    else:
        rollout, other = 0.0 if config.sft.is_given else own_seconds(shape, config, card, mine), 0.0
    rollout, other = rollout / config.train.num_iterations, other / config.train.num_iterations
    expected, low, high = ((rollout, update_seconds(shape, config, card, mine, sign), other) for sign in (0, -1, 1))
    share = spread(card)
    overlaps = config.rollout.overlap and replicas > 0 and not shares
    least, most = whole_step(*low, overlaps) * (1 - share), whole_step(*high, overlaps) * (1 + share)
    return StepTime(*expected, completions, least, most, overlaps)
