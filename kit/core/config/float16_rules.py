"""`model.dtype: float16`, for GPUs without BF16: settings and models that it does not go with. Imports no torch."""

from kit.core.config.schema import Config

# Models whose activations exceed float16's largest number, 65,504: _FLOAT16_NOT_SUPPORTED_MODELS of vLLM 0.31,
# vllm/config/model.py, which its server refuses too.
OVERFLOWING = ("gemma2", "gemma3", "gemma3_text", "glm4")


def faults(config: Config, sharded: str | None) -> list[str]:
    """Settings that conflict with float16. `sharded` is what splits the base, or DeepSpeed."""
    if config.model.dtype != "float16":
        return []
    policy, found, key = config.policy, [], "with model.dtype float16"
    if policy.adapter_dtype != "float32":
        found.append(
            f"policy.adapter_dtype is {policy.adapter_dtype} {key}: loss scaling divides and clips float32 gradients. "
            "Set it to float32."
        )
    if policy.quant_cfg is not None:
        found.append(
            f"policy.quant_cfg is {policy.quant_cfg} {key}: formats are defined on BF16 weights, whose numbers "
            "float16 does not hold. Leave it out and quantize the merged checkpoint, or set model.dtype to bfloat16."
        )
    if policy.compute == "fp8":
        found.append(f"policy.compute is fp8 {key}: FP8 products come out in bfloat16 only. Set it to fused.")
    if policy.quantization == "fp8":
        found.append(
            f"policy.quantization is fp8 {key}: the codes of the server's copy were compared in BF16 only. Set it to "
            "nf4 or none."
        )
    if policy.kernels != "torch":
        found.append(
            f"policy.kernels is {policy.kernels} {key}: its kernels were not compared in float16. Set it to torch."
        )
    if policy.fused_mlp:
        found.append(f"policy.fused_mlp is true {key}: its kernels were not compared in float16. Set it to false.")
    if sharded:
        found.append(
            f"model.dtype is float16 under {sharded}, which scales the loss by itself. Use accelerate_configs/"
            "one_gpu.yaml or ddp.yaml."
        )
    return found


def model_fault(config: Config, model_type: str) -> str:
    """Why a model cannot compute in float16; empty if it can."""
    if config.model.dtype != "float16" or model_type not in OVERFLOWING:
        return ""
    return (
        f"model.dtype is float16 and the model is a {model_type}, whose activations exceed float16's largest number "
        "(65,504); vLLM refuses it too. Set model.dtype to bfloat16, or float32 on a GPU without BF16."
    )
