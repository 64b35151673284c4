"""Fields of trl's GRPOConfig whose work the kit does itself or does not do: `train.trl` passes the others on.

Some of these would end the run after its base is recorded, so that its directory could be neither resumed nor started
anew; others would change the policy behind the kit's back or upload a checkpoint that is not whole. Imports no torch.
"""

from recipes.parts.config import Config

OFF = (None, False, "no")
# Field -> what to do instead.
INSTEAD = {
    "accelerator_config": "accelerate's part in a batch is the kit's",
    "cast_lm_head_to_fp32": "the output layer is the base's, which no run changes. Set model.dtype to float32",
    "eval_strategy": "watch.eval_every measures the held-out accuracy while training",
    "eval_on_start": "watch.eval_every measures the held-out accuracy while training, in step 1 too",
    "log_completions": "watch.completions_every writes completions to the run's directory",
    "neftune_noise_alpha": "policy and reference would not be one model with the adapter on and off",
    "push_to_hub": "python -m merge --push_to_hub uploads merged checkpoints",
    "sync_ref_model": "the reference is the base itself, the policy with its adapter off, which stays as it is",
    "torch_compile": "policy.kernels liger fuses norms, rotary embedding and SwiGLU",
}


def problems(config: Config) -> list[str]:
    """A sentence for each field of `train.trl` that is in the way."""
    return [
        f"train.trl.{key} ({value!r}) is not supported: {INSTEAD[key]}. Remove it."
        for key, value in config.train.trl.items()
        if key in INSTEAD and value not in OFF
    ]
