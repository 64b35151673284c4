"""Fields of TRL's GRPOConfig that `train.trl` rejects.

The kit does their work itself, does not support them, or could not keep its promises about a run with them. Some of
these would end the run after its base is recorded, so that its directory could be neither resumed nor started anew;
others would change the policy behind the kit's back or upload an incomplete checkpoint. Fields that the kit sets are
refused where it sets them (`trainer.trainer_arguments`). Imports no torch.
"""

from typing import Any

from kit.core.config import sharding_rules
from kit.core.config.schema import Config

# Field -> what to do instead.
INSTEAD = {
    "accelerator_config": "the kit sets how accelerate splits a batch",
    "cast_lm_head_to_fp32": "the output layer is the base's, which no run changes. Set model.dtype to float32",
    "chat_template_kwargs": "data.chat_template_kwargs sets them for training and evaluation alike",
    "eval_strategy": "watch.eval_every measures the held-out accuracy while training",
    "eval_on_start": "watch.eval_every measures the held-out accuracy while training, in step 1 too",
    "log_completions": "watch.completions_every writes completions to the run's directory and to trackers",
    "max_tool_calling_iterations": "environment.max_turns bounds the turns of an episode",
    "neftune_noise_alpha": "policy and reference would not be one model with the adapter on and off",
    "push_to_hub": "merged checkpoints are uploaded by python -m merge --push_to_hub REPO_ID",
    "sync_ref_model": "policy.reference names the reference, which stays as it is",
    "torch_compile": "policy.kernels fused computes norms, rotary embedding and SwiGLU in one pass each",
    # Either of these turns on torch_compile.
    "torch_compile_backend": "policy.kernels fused computes norms, rotary embedding and SwiGLU in one pass each",
    "torch_compile_mode": "policy.kernels fused computes norms, rotary embedding and SwiGLU in one pass each",
    "use_transformers_continuous_batching": "it casts the adapter's masters. rollout.backend server samples fast",
    "use_transformers_paged": "it casts the adapter's masters. rollout.backend server samples fast",
    "use_liger_kernel": "policy.kernels liger fuses norms, rotary embedding and SwiGLU",
}
# Fields that desynchronize generation and the optimizer, or leave state out of the checkpoints.
INEXACT_ON_RESUME: tuple[str, ...] = (
    "use_adaptive_entropy",
    "steps_per_generation",
    "generation_batch_size",
    "ignore_data_skip",
)
INEXACT_ON_RESUME += ("save_only_model",)
# Fields that split the base over processes.
SHARDING_FIELDS = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
# Fields that change what is sampled, with the values that do not; they are not sent to a server.
SAMPLER_FIELDS = {"min_p": (None, 0), "repetition_penalty": (None, 1), "generation_kwargs": (None, {})}
# Fields for generation in the trainer's own process.
OWN_GENERATION_FIELDS = ("cache_implementation", "transformers_continuous_batching_config")
# The one field of TRL's vLLM client that the kit's loss reads without a key of its own.
FLOOR_FIELD = "vllm_importance_sampling_clip_min"
LEVELS = ("token", "sequence")  # of importance_sampling_level
# Loss terms over a whole batch, with the values that disable them: no sum over micro-batches yields them.
WHOLE_BATCH_FIELDS = {"top_entropy_quantile": (1,)}


def faults(config: Config) -> list[str]:
    """One sentence for each field of `train.trl` that would be ignored or would break a guarantee of the kit."""
    found = [_fault(config, key, value) for key, value in config.train.trl.items()]
    return [f"train.trl.{fault}" for fault in found if fault]


def _fault(config: Config, key: str, value: Any) -> str:
    """Error text starting with the field's name; empty if valid."""
    rollout = config.rollout
    is_server = rollout.backend == "server"
    is_off = value is None or value is False or value == "no"
    if key == "logging_strategy" and value != "steps":
        return (
            f"{key} ({value!r}) is not supported: every step is recorded and checked for NaN, which `steps` does. "
            "Remove it."
        )
    if key == "importance_sampling_level" and value not in LEVELS:
        return f"{key} is {value!r}. Use {' or '.join(LEVELS)}."
    if key in INSTEAD and not is_off:
        return f"{key} ({value!r}) is not supported: {INSTEAD[key]}. Remove it."
    if key in INEXACT_ON_RESUME and not is_off:
        return f"{key} ({value!r}) is not supported: a run with it could not be resumed exactly. Remove it."
    if key in SHARDING_FIELDS:
        return f"{key} is not supported: {sharding_rules.refused('it')}"
    if key.startswith("vllm_") and key != FLOOR_FIELD:
        return (
            f"{key} belongs to trl's own vLLM client, which the kit does not use. Remove it; the keys of the groups "
            "rollout and server take its place."
        )
    if is_server and key in OWN_GENERATION_FIELDS and value:
        return f"{key} is for generation in the trainer's process; rollout.backend is server. Remove it."
    if value in SAMPLER_FIELDS.get(key, (value,)):
        return ""
    if is_server:
        return f"{key} does not reach the server, which samples without it. Remove it."
    if rollout.correction == "none":
        return ""
    return (
        f"{key} is {value!r} with rollout.correction {rollout.correction}: the correction compares the sampler's "
        "log-probs with the policy's, and such a sampler is another distribution. Remove it, or set "
        "rollout.correction to none."
    )
