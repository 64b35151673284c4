"""Everything in the plan that is not arithmetic on shapes, in one table, each with where it comes from.

What can be counted (bytes of a tensor whose shape is known) is counted in memory.py; what stands here was measured.
"""

from typing import NamedTuple


class Coefficient(NamedTuple):
    """A measured constant: its value, unit and source."""

    value: float
    unit: str
    source: str


_POINTS = "fit to tests/gpu/memory_points.json"
_READ_TRL = "read in trl 1.16.0, kernels/chunked_logprob.py and trainer/utils.py"
_ROLLOUT_8B = "tests/gpu/README.md, rollout_8b.py --part speed, fit over 64, 256 and 512 sequences"

TABLE = {
    # Trainer
    "trainer_context_gib": Coefficient(0.6, "GiB a process", _POINTS + ": CUDA context, cuBLAS, kernels"),
    "process_group_gib": Coefficient(0.4, "GiB a process", "NCCL's buffers between two GPUs of one host; assumed"),
    "workspace_gib": Coefficient(0.07, "GiB", "cuBLAS and cuBLASLt workspaces on Hopper, allocated through torch"),
    "head_rows": Coefficient(4096, "tokens", _READ_TRL + ": rows of a tile of logits"),
    "head_columns": Coefficient(32768, "logits", _READ_TRL + ": columns of a tile of logits"),
    "fragmentation": Coefficient(0.15, "share of what comes and goes", _POINTS + ": reserved over allocated"),
    "fragmentation_high": Coefficient(0.4, "share of what comes and goes", _POINTS + ": the worst point"),
    "sampling_copies": Coefficient(4, "float32 copies of (sequences, vocabulary)", _POINTS + ": generate's logits"),
    "cpu_process_gib": Coefficient(1.0, "GiB", "resident memory of torch, transformers and trl, recipes/README.md"),
    # Server
    "server_context_gib": Coefficient(1.3, "GiB a GPU", _POINTS + ": CUDA context, NCCL, attention's workspaces"),
    "server_spread": Coefficient(0.08, "share", _POINTS + ": low and high beside the expected figure"),
    "graph_gib": Coefficient(0.6, "GiB", _POINTS + ": CUDA graphs at 256 sequences, 36 layers"),
    "sampler_copies": Coefficient(4, "float32 copies of (sequences, vocabulary)", _POINTS + ": vLLM's sampler"),
    "fold_bytes": Coefficient(7, "bytes a weight of the largest fused layer", "launch/vllm_command.py FOLD_GIB"),
    "batched_tokens_large": Coefficient(8192, "tokens", "vLLM 0.26 default of a server on a card of 70 GiB or more"),
    "batched_tokens_small": Coefficient(2048, "tokens", "vLLM 0.26 default of a server on a smaller card"),
    "asleep_gib": Coefficient(1.5, "GiB", "what a sleeping server keeps: context and graphs; assumed"),
    # Time
    "update_efficiency": Coefficient(
        0.41, "share of the dense BF16 peak", "8 x 2,048 tokens of an 8B shape on an H200: 8,622 tokens/s"
    ),
    "dequantize_bandwidth": Coefficient(
        0.36, "share of the bandwidth", "252 linear layers of an 8B shape on an H200 in 10 ms"
    ),
    "launch_s": Coefficient(5.3e-4, "s a layer and pass", "1 x 2,048 tokens of the same, 4.3 s for 8 (one_card)"),
    "step_s": Coefficient(1.34e-3, "s a decode step", _ROLLOUT_8B),
    "eager_s": Coefficient(
        4.0e-4, "s a layer and decode step", "one_card of tests/gpu/README.md: 477 tok/s, no graphs"
    ),
    "decode_bandwidth": Coefficient(1.0, "share of the bandwidth, KV cache", _ROLLOUT_8B),
    "decode_efficiency_fp8": Coefficient(0.45, "share of the dense FP8 peak", _ROLLOUT_8B),
    "decode_efficiency_bf16": Coefficient(0.70, "share of the dense BF16 peak", _ROLLOUT_8B),
    "adapter_slowdown": Coefficient(1.33, "factor", _ROLLOUT_8B),
    "sync_s": Coefficient(0.16, "s a step", "tests/gpu/README.md, split: 157 ms"),
    "sleep_s": Coefficient(0.42, "s a step", "tests/gpu/README.md, one card: wake and sleep of an 8B shape"),
    "own_decode_s": Coefficient(1.7e-3, "s a layer and decode step", "transformers' generate; " + _POINTS),
    "time_spread": Coefficient(0.2, "share", "points between 7 and 17 % off on an H200"),
    "time_spread_other": Coefficient(0.4, "share", "cards that were not measured; assumed"),
}


def value(name: str) -> float:
    """The value of a row of the table."""
    return TABLE[name].value
