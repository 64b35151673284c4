"""Limits shared by the trainer, the server and the plan: vLLM versions, LoRA ranks and the memory of a fold."""

# The tested range, upper end exclusive; the server and the trainer share this check.
VLLM_FROM, VLLM_BELOW = (0, 26), (0, 32)
# The ranks that vLLM 0.26 to 0.31 allocates LoRA slots for (vllm/config/lora.py).
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# The largest layer of an 8B model (gate and up, 100 M weights) in BF16, in FP8 and as vLLM quantizes it.
FOLD_GIB = 0.7
# The same layer in float32, the input of vLLM's FP8 quantization with a format (quantized_fold.py).
FORMAT_GIB = 0.4
FOLD_CHUNK = 1 << 24  # weights quantized at once; without a kernel this takes 20 bytes per weight
