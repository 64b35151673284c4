"""Everything in the plan that is not arithmetic on shapes, in one table, each with its source.

What can be counted (bytes of a tensor whose shape is known) is counted in memory.py. "Confirmed" means that the value
was assumed before the points were measured, and that they agreed with it.
"""

from typing import NamedTuple

from kit.core.limits import FOLD_BYTES


class Coefficient(NamedTuple):
    """A constant: its value, unit and source."""

    value: float
    unit: str
    source: str


_POINTS = "bench/memory_points.json (H200)"
_CONFIRMED = "assumed, confirmed by " + _POINTS
_ONE_CARD = "bench/README.md, trainer and server on one card"
_READ_TRL = "read in trl 1.16.0, kernels/chunked_logprob.py and trainer/utils.py"
_FORMATS = "bench/README.md, training for a format"
_SPLIT = "bench/README.md, trainer and server on a card each, of 157 ms a sync of the 8B shape on an H200"
_ROLLOUT_8B = "bench/README.md, rollout_8b.py --part speed, fit over 64, 256 and 512 sequences"

TABLE = {
    # Trainer
    "trainer_context_gib": Coefficient(
        0.73, "GiB a process", _POINTS + ": CUDA context, kernels; the same in every point"
    ),
    "process_group_gib": Coefficient(0.4, "GiB a process", "NCCL's buffers between two GPUs of one host; assumed"),
    "workspace_gib": Coefficient(0.07, "GiB", _CONFIRMED + ": cuBLAS on Hopper, through torch"),
    "head_rows": Coefficient(4096, "tokens", _READ_TRL + ": rows of a tile of logits"),
    "head_rows_cpu": Coefficient(128, "tokens", "kit/train/head_tiles.py: rows of a tile of logits on a CPU"),
    "head_copies_cpu": Coefficient(
        7, "float32 copies of a tile", "counted in trl 1.16.0, kernels/chunked_logprob.py, _backward_tile"
    ),
    "head_columns": Coefficient(32768, "logits", _READ_TRL + ": columns of a tile of logits"),
    "fragmentation_gib": Coefficient(0.6, "GiB", _POINTS + ": reserved over allocated, mean of 15, at most 0.96"),
    "fragmentation_high_gib": Coefficient(2.0, "GiB", "bench/STEP.md: enough with segments that grow"),
    "sampling_copies": Coefficient(4, "float32 copies of (sequences, vocabulary)", _CONFIRMED + ": one point"),
    "cpu_trainer_gib": Coefficient(
        0.75, "GiB", "tests/evidence/host_memory.py: torch, transformers, trl and peft loaded"
    ),
    "malloc_holes": Coefficient(
        1.8,
        "times what activations hold",
        "tests/evidence/host_memory.py: glibc 2.36, 8 rows of SmolLM2-135M; 2.0 alone",
    ),
    "cpu_process_gib": Coefficient(1.0, "GiB", "a process of vLLM for CPUs, assumed"),
    # Server
    "server_context_gib": Coefficient(1.3, "GiB a GPU", _CONFIRMED + ": three servers"),
    "server_spread": Coefficient(0.08, "share", "assumed; three servers before a sync are within 3.3 %"),
    "graph_gib": Coefficient(0.6, "GiB", _CONFIRMED + ": two servers, at 256 sequences and 36 layers"),
    "sampler_copies": Coefficient(
        4, "float32 copies of (sequences, vocabulary)", _CONFIRMED + ": vLLM's sampler, up to 512 sequences"
    ),
    "fold_bytes": Coefficient(FOLD_BYTES, "bytes a weight of the largest fused layer", "kit/core/limits.py FOLD_GIB"),
    # Layers of an NF4 copy in host memory are fetched faster than earlier ones are released.
    "fetched_share": Coefficient(1.0, "share of the NF4 copy", _ONE_CARD + ": 26.3 GiB, no sleep"),
    "fetched_share_sleep": Coefficient(0.5, "share of the NF4 copy", _ONE_CARD + ": 22.6 GiB, sleeping between steps"),
    "batched_tokens_large": Coefficient(8192, "tokens", "vLLM 0.26 default of a server on a card of 70 GiB or more"),
    "batched_tokens_small": Coefficient(2048, "tokens", "vLLM 0.26 default of a server on a smaller card"),
    "asleep_gib": Coefficient(1.5, "GiB", "what a sleeping server keeps: context and graphs; assumed"),
    # Time
    "update_efficiency": Coefficient(
        0.69, "share of the dense BF16 peak", "an 8B shape's linear layers, 650-725 TFLOP/s"
    ),
    "update_traffic": Coefficient(
        15.5, "times the bytes that a layer keeps, a pass", _POINTS + ": norms, casts, copies"
    ),
    "liger_traffic": Coefficient(
        0.65, "of update_traffic with policy.kernels liger", "a layer of 8 x 1,024 tokens: 23.0 to 17.2 ms on an H200"
    ),
    "peft_bytes": Coefficient(
        12,
        "bytes an output, token and pass",
        "peft's copies, counted: 3.2 ms per layer, measured 24.7 to 21.5 on an H200",
    ),
    "merged_bytes": Coefficient(
        20, "bytes an output, token and pass", _FORMATS + ": fit, the four formats' updates are within 7 %"
    ),
    "format_bandwidth": Coefficient(
        0.12, "share of the bandwidth", _FORMATS + ": a model's weights in 29.2 to 39.6 ms, fp8_block the slowest"
    ),
    "peaks_share": Coefficient(1.0, "of the time for a model's weights", _FORMATS + ": 23.6 of 29.3, 34.3 of 29.2 ms"),
    "dequantize_bandwidth": Coefficient(
        0.36, "share of the bandwidth", "252 linear layers of an 8B shape on an H200 in 10 ms"
    ),
    "fp8_products": Coefficient(
        1.7,
        "times as fast as BF16",
        "kit/policy/fused_linear.py: a product with its conversions, 1.65 to 1.8 on an H200",
    ),
    "launch_s": Coefficient(4.0e-3, "s per layer and pass, minimum", _POINTS + ": small shapes wait for the host"),
    "launch_spread": Coefficient(0.4, "share", "3.0e-3 in " + _ONE_CARD + ", 5.6e-3 in " + _POINTS),
    "step_s": Coefficient(1.34e-3, "s a decode step", _ROLLOUT_8B),
    "eager_s": Coefficient(4.0e-4, "s a layer and decode step", _ONE_CARD + ": 477 tok/s, no graphs"),
    "decode_bandwidth": Coefficient(1.0, "share of the bandwidth, KV cache", _ROLLOUT_8B),
    "decode_efficiency_fp8": Coefficient(0.45, "share of the dense FP8 peak", _ROLLOUT_8B),
    "decode_efficiency_bf16": Coefficient(0.70, "share of the dense BF16 peak", _ROLLOUT_8B),
    "adapter_slowdown": Coefficient(1.33, "factor", _ROLLOUT_8B),
    "sync_s": Coefficient(0.076, "s a step", _SPLIT + ": the canary, and what no other row covers"),
    "sync_s_gb": Coefficient(0.6, "s a GB of the adapter", _SPLIT + ": written and read, 52 ms for 87 MB"),
    "fold_s": Coefficient(4.2e-12, "s a weight", _SPLIT + ": 29 ms for 6.95e9 weights"),
    "sleep_s": Coefficient(0.42, "s a step", "bench/README.md, one card: wake and sleep of an 8B shape"),
    "own_decode_s": Coefficient(
        3.8e-3, "s a layer and decode step", _POINTS + ": transformers' generate, 302 tokens/s"
    ),
    "time_spread": Coefficient(0.2, "share", _POINTS + ": updates of 8B and more, -20 to 8 %"),
    "time_spread_other": Coefficient(0.4, "share", "cards that were not measured; assumed"),
}


def value(name: str) -> float:
    """The value of a row of the table."""
    return TABLE[name].value
