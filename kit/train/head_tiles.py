"""TRL's log-prob head on a CPU: few rows of logits at a time, and only those that are scored.

Written for trl 1.16, whose head works on tiles of 4,096 tokens by 32,768 words. A GPU reduces a tile in one kernel. On
a CPU PyTorch does it in several operations, with several copies of the tile in memory at the peak of the backward
pass. There TRL also scores prompts and padding, and discards the result.

Log-probs, entropies and gradients are the same up to float32 rounding.
"""

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils

ROWS = 128  # 16 MiB of float32 logits


def use_host_tiles(device: torch.device) -> None:
    """Make TRL's head work on small tiles of scored positions in this process; a no-op on a GPU."""
    if device.type == "cpu":
        chunked_logprob.TOKEN_CHUNK_SIZE = ROWS
        # `add_fused_lm_head` goes by this name to decide whether the head gets only the positions with a label.
        utils._use_triton = lambda device: True
