"""Seconds of a step before anything runs: rollouts, update, and how to split GPUs between trainer and server.

Counts floating-point operations and bytes on a shape; how much of a card's peak is reached was measured on an H200
(coefficients.py). Every completion is taken to reach its limit. Not covered: rewards, a CPU, networks between
machines, waiting for the longest completion of a step where lengths differ.
"""

import math
from dataclasses import dataclass

from launch.planning.coefficients import value
from launch.planning.gpus import Card
from launch.planning.memory import kv_token_bytes, kv_width, layer_bytes, nf4_bytes, run_again, sequence_gib
from launch.planning.shapes import Shape
from recipes.parts.config import Config

MEASURED_CARD = "h200"


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of a step by phase, and the whole step at least and at most; `completions` of all processes.
    With `overlaps` the rollout runs behind the update (`rollout.overlap`)."""

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
    """Seconds of a step: its phases one after the other, or rollout and update at the same time."""
    return (max(rollout, update) if overlaps else rollout + update) + other


def can_estimate(card: Card) -> bool:
    return card.bf16_tflops is not None and card.gb_per_s is not None


def spread(card: Card) -> float:
    """How far low and high are from what is expected, as a share, besides the host's pace."""
    return value("time_spread" if card.name == MEASURED_CARD else "time_spread_other")


@dataclass(frozen=True)
class Forwards:
    """The forward passes that a process makes over its completions once: how many, and for each of them tokens, scored
    tokens, and operations of attention. A backward pass through frozen weights takes as many operations."""

    count: int
    tokens: float
    scored: float
    attention: float


def forwards(shape: Shape, config: Config, completions: int) -> Forwards:
    """Micro-batches of rows, or of tokens (`train.micro_batch_tokens`), where a group's prompt may be there once."""
    rollout, train = config.rollout, config.train
    prompt, completion = rollout.max_prompt_length, rollout.max_completion_length
    # Causal: half of both products.
    pairs = 2 * shape.q_size * shape.layers
    if train.micro_batch_tokens is None:
        micro, length = min(train.per_device_train_batch_size, completions), prompt + completion
        count = math.ceil(completions / micro)
        return Forwards(count, micro * length, micro * completion, micro * pairs * length**2)
    shared = min(rollout.group_size, completions) if train.share_prompts else 1
    prompts = completions / shared
    tokens = completions * completion + prompts * prompt
    attention = pairs * (completions * (completion**2 + 2 * prompt * completion) + prompts * prompt**2)
    count = math.ceil(tokens / max(train.micro_batch_tokens, prompt + completion))
    return Forwards(count, tokens / count, completions * completion / count, attention / count)


def update_seconds(shape: Shape, config: Config, card: Card, completions: int, sign: int = 0) -> float:
    """The reference's pass, loss and backward pass of one process for its `completions`, per optimizer step; `sign` -1
    is a fast host that starts the kernels, 1 a slow one."""
    train, policy = config.train, config.policy
    one = forwards(shape, config, completions)
    # Forward and backward, and once per batch of rollouts the reference.
    passes = 2 + (train.beta != 0) / train.num_iterations
    again = run_again(shape, config) / shape.layers
    is_full = train.recompute == "full"
    # The last product of a layer is not computed again.
    layer = shape.linear_weights / shape.layers
    products = passes + again * is_full * (1 - shape.intermediate * shape.hidden / layer)
    is_flex = train.packed_attention == "flex" or config.model.dtype == "float32"  # which selective runs again, too
    attending = passes + again * (is_full or (train.micro_batch_tokens is not None and is_flex))
    fp8 = policy.compute == "fp8" and card.fp8_tflops is not None
    reached = value("update_efficiency") * card.bf16_tflops * 1e12
    linear = 2 * shape.linear_weights * one.tokens / (value("fp8_products") if fp8 else 1)
    head = 2 * shape.vocabulary * shape.hidden * one.scored
    arithmetic = (products * linear + passes * head + attending * one.attention) / reached
    kept = layer_bytes(shape, config, padded=False) * shape.layers
    moved = (2 + nf4_bytes(policy.double_quantization)) * shape.linear_weights / value("dequantize_bandwidth")
    traffic = one.tokens * kept * value("update_traffic") + moved
    memory = (passes + again) * traffic / (card.gb_per_s * 1e9)
    # The host starts kernels while the card computes: the slower of the two is what a pass takes.
    launch = (passes + again) * shape.layers * value("launch_s") * (1 + sign * value("launch_spread"))
    return one.count * max(arithmetic + memory, launch)


def decode_seconds(shape: Shape, config: Config, card: Card, sequences: float) -> float:
    """One token for every one of `sequences` at half of the full length, on a vLLM server."""
    server, rollout, share = config.server, config.rollout, config.server.tensor_parallel
    fp8 = server.weights != "bf16" and card.fp8_tflops is not None
    read = shape.linear_weights * (1 if server.weights != "bf16" else 2) + 2 * shape.vocabulary * shape.hidden
    bandwidth = card.gb_per_s * 1e9
    if fp8:
        reached = value("decode_efficiency_fp8") * card.fp8_tflops * 1e12
    else:
        reached = value("decode_efficiency_bf16") * card.bf16_tflops * 1e12
    length = rollout.max_prompt_length + rollout.max_completion_length / 2
    cache = length * kv_token_bytes(shape, kv_width(config)) / (value("decode_bandwidth") * bandwidth)
    flops = 2 * (shape.linear_weights + shape.vocabulary * shape.hidden) / reached
    fixed = value("eager_s") * shape.layers if server.enforce_eager else value("step_s")
    seconds = fixed + (read / bandwidth + sequences * (cache + flops)) / share
    return seconds * (value("adapter_slowdown") if rollout.sync == "adapter" else 1.0)


def served_seconds(shape: Shape, config: Config, card: Card, completions: float, cache_gib: float) -> float:
    """A rollout of `completions` on one replica with `cache_gib` of KV cache a GPU."""
    at_once = max(1, min(config.server.max_num_seqs, int(cache_gib / sequence_gib(shape, config))))
    waves = math.ceil(completions / at_once)
    decode = decode_seconds(shape, config, card, completions / waves)
    prompts = completions / config.rollout.group_size * config.rollout.max_prompt_length
    peak = value("decode_efficiency_bf16") * card.bf16_tflops * 1e12 * config.server.tensor_parallel
    return waves * config.rollout.max_completion_length * decode + 2 * shape.linear_weights * prompts / peak


def own_seconds(shape: Shape, config: Config, card: Card, completions: int) -> float:
    """A rollout of `completions` by transformers in the trainer's process."""
    rollout = config.rollout
    length = rollout.max_prompt_length + rollout.max_completion_length / 2
    bandwidth = value("decode_bandwidth") * card.gb_per_s * 1e9
    # The cache is read by attention, and read and written when it grows by a token.
    read = completions * length * kv_token_bytes(shape, 2) * 3 + shape.linear_weights * 0.52
    decode = max(value("own_decode_s") * shape.layers, read / bandwidth)
    return rollout.max_completion_length * decode


def step_time(
    shape: Shape, config: Config, card: Card, completions: int, trainers: int, replicas: int, cache_gib: float
) -> StepTime:
    """A step of `completions` on `trainers` processes; without replicas each process generates its own."""
    expected, low, high = (
        _seconds(shape, config, card, completions, trainers, replicas, cache_gib, sign) for sign in (0, -1, 1)
    )
    share = spread(card)
    overlaps = config.rollout.overlap and replicas > 0
    least, most = whole_step(*low, overlaps) * (1 - share), whole_step(*high, overlaps) * (1 + share)
    return StepTime(*expected, completions, least, most, overlaps)


def _seconds(
    shape: Shape,
    config: Config,
    card: Card,
    completions: int,
    trainers: int,
    replicas: int,
    cache_gib: float,
    sign: int,
) -> tuple[float, float, float]:
    mine = math.ceil(completions / trainers)
    if replicas:
        rollout = served_seconds(shape, config, card, completions / replicas, cache_gib)
        other = value("sync_s") + value("sleep_s") * config.server.sleep
    else:
        rollout, other = own_seconds(shape, config, card, mine), 0.0
    share = config.train.num_iterations
    return rollout / share, update_seconds(shape, config, card, mine, sign), other / share
