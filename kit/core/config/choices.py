"""Values of configuration fields that are checked later than their types, listed so that `--help` can name them.

Each list mirrors the module that checks it; a test compares them. Needs only the standard library.
"""

REFERENCES = ("adapter_off", "init_adapter", "none")
TRACKERS = ("trackio", "tensorboard", "wandb")
# From transformers.training_args.OptimizerNames, whose import would load torch.
OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor"),
    *("adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit"),
    *("adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit"),
    *("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit"),
    *("galore_adafactor", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
    *("lomo", "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    *("apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
)
# Reward functions in reward/.
REWARDS: tuple[str, ...] = ("math", "gsm8k_strict", "gsm8k_lenient", "code", "countdown", "arithmetic")
REWARDS += ("boxed_format", "think_format", "length", "repetition", "language", "llm_judge", "reward_model")
