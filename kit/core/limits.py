"""Limits shared by the rooms: vLLM versions, LoRA ranks, the memory of a fold, and how far anything is counted."""

# The tested range, upper end exclusive; the server and the trainer share this check.
VLLM_FROM, VLLM_BELOW = (0, 26), (0, 32)
# The ranks that vLLM 0.26 to 0.31 allocates LoRA slots for (vllm/config/lora.py).
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
KERNEL_RANK = 64  # the largest that the kit's own kernels multiply with

# Beyond these a number is a mistake, and what counts up to it would not end.
MOST_GPUS = 1024  # of one machine
MOST_NODES = 10_000
MOST_COMPLETIONS = 1 << 20  # of a step
MOST_LAYERS = 4096

# The largest layer of an 8B model (gate and up, 100 M weights) in BF16, in FP8 and as vLLM quantizes it.
FOLD_GIB = 0.7
FOLD_BYTES = 7  # per weight of that layer, or of a layer's gate and up matrices of all experts
# The same layer in float32, the input of vLLM's FP8 quantization with a format (quantized_fold.py).
FORMAT_GIB = 0.4
FOLD_CHUNK = 1 << 24  # weights quantized at once; without a kernel this takes 20 bytes per weight
PACK_CHUNK = 1 << 22  # weights packed to INT4 at once, 15 bytes each

# vLLM's rejection sampler per drafted token and entry of the vocabulary, with log-probs: logits in 16 bits, and in
# float32 those that it verifies, all of them in order, those of the returned tokens, and their log-probs.
DRAFT_BYTES = 18

# FlashInfer's buffers in vLLM 0.31 (v1/attention/backends/flashinfer.py), taken after vLLM has measured the
# memory: one of this size for decoding, one for prompts, at least as large.
FLASHINFER_GIB = 394 / 1024
FLASHINFER_BYTES = 16  # of the second, per value of the queries of a forward pass
BATCHED_TOKENS = 8192  # of a forward pass of a server on a GPU of 70 GiB or more, vLLM's default


def draft_gib(sequences: int, draft_tokens: int, vocabulary: int) -> float:
    """GiB that a server keeps free to verify drafts: its own measurement at the start drafts hardly any."""
    return DRAFT_BYTES * sequences * draft_tokens * vocabulary / 2**30


def flashinfer_gib(query_size: int, tokens: float) -> float:
    """GiB of FlashInfer's buffers in a server: `query_size` is heads x head dimension, `tokens` those of a pass."""
    return FLASHINFER_GIB + max(FLASHINFER_GIB, FLASHINFER_BYTES * tokens * query_size / 2**30)


def fold_gib(experts: float) -> float:
    """GiB that a server keeps free to fold a layer; `experts`: weights of a layer's gate and up matrices on one GPU, 0
    without experts."""
    return max(FOLD_GIB, FOLD_BYTES * experts / 2**30)
