"""Workloads of the benchmarks: shapes, lengths, and the floating point operations that count as useful.

Operations per token (recomputed activations and a second pass over the same weights do not count; a prompt counts for
each of its completions, even if it is computed once):
a forward is 2 N + 2 L d T, with N the weights of all linear layers and the output layer (the embedding is a lookup),
L layers, d = heads x head_dim and T tokens of context, of which causal attention sees half (QK^T and PV are each
2 d T / 2). The base is frozen, so a backward needs only the gradient of the activations: 2 N + 4 L d T. An update is
therefore 4 N + 6 L d T, the forward of the KL reference 2 N + 2 L d T. LoRA, norms and sampling are left out.
"""

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "bench"))

CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
PEAK_FLOPS = 989e12  # H200, BF16 without sparsity
TARGETS = {
    "qkvo": "[q_proj, k_proj, v_proj, o_proj]",
    "all": "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]",
}
# Configuration keys of every lever of the update. A pack holds two groups of work A, 2 x (250 + 8 x 1,024) tokens, or
# all rows of a batch of 8 x 2,048.
LEVERS: dict[str, dict[str, str]] = {
    "full": {},
    "packed": {"train.micro_batch_tokens": "17408", "train.share_prompts": "false"},
    "shared": {"train.micro_batch_tokens": "17408", "train.share_prompts": "true"},
    "flash": {"train.packed_attention": "flash"},  # with packed or shared
    "cudnn": {"train.packed_attention": "cudnn"},
    "fused": {"policy.compute": "fused"},
    "fp8": {"policy.compute": "fp8"},
    "liger": {"policy.kernels": "liger"},
    "kernels": {"policy.kernels": "fused"},
    "mlp": {"policy.fused_mlp": "true"},  # with fused or fp8
    "codes": {"train.keep_weights": "true"},  # with fp8
    "logits": {"train.keep_logits": "true"},
    "none": {"train.recompute": "none"},
    "selective": {"train.recompute": "selective"},
    "half": {"train.recompute_fraction": "0.5"},
    "offload": {"train.recompute_offload": "true"},
    "hostembed": {"policy.embeddings": "host"},
    "adamw_fused": {"train.optimizer": "adamw_torch_fused"},
    "adamw_8bit": {"train.optimizer": "adamw_bnb_8bit"},
}
MEDIAN, SIGMA = 400, 0.8  # of work B's log-normal lengths


@dataclass(frozen=True)
class Work:
    """Completions of a step by number and length, with prompts of `prompt` tokens in groups of `group`."""

    completions: int
    longest: int
    prompt: int = 250
    group: int = 8
    is_lognormal: bool = False

    @property
    def lengths(self) -> list[int]:
        """Length of every completion of a step, in start order; the same for all sides."""
        if not self.is_lognormal:
            return [self.longest] * self.completions
        draw = random.Random(0)
        # In rehearsals the median shrinks with the cutoff.
        median = MEDIAN * self.longest / 2048
        drawn = [draw.lognormvariate(math.log(median), SIGMA) for _ in range(self.completions)]
        return [max(1, min(self.longest, round(one))) for one in drawn]

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of a step."""
        return sum(self.lengths) + self.completions * self.prompt


WORKS = {
    "A": Work(128, 1024),
    "B": Work(128, 2048, is_lognormal=True),
    "C": Work(128, 4096),
    "D": Work(32, 4096),
}
TINY_WORKS = {
    "A": Work(16, 24, prompt=40, group=4),
    "B": Work(16, 40, prompt=40, group=4, is_lognormal=True),
    "C": Work(16, 64, prompt=40, group=4),
    "D": Work(8, 64, prompt=40, group=4),
}


def linear_weights(shape: dict[str, Any]) -> int:
    """N: weights of the linear layers and the output layer."""
    hidden, width = shape["hidden_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * width, shape["num_key_value_heads"] * width
    layer = hidden * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


def _attention(shape: dict[str, Any], context: float) -> float:
    return 2 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * context


def forward_flops(shape: dict[str, Any], context: float) -> float:
    """Operations of one token's forward, in a sequence of `context` tokens."""
    return 2 * linear_weights(shape) + _attention(shape, context)


def update_flops(shape: dict[str, Any], context: float) -> float:
    """Operations of one token's forward and backward through a frozen base."""
    return 4 * linear_weights(shape) + 3 * _attention(shape, context)


def step_flops(shape: dict[str, Any], work: Work) -> float:
    """Operations of a step's training half: the update and, for the KL, the reference's forward."""
    sequences = [work.prompt + length for length in work.lengths]
    return sum(t * (update_flops(shape, t) + forward_flops(shape, t)) for t in sequences)
