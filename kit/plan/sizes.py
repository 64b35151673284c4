"""Sizes that follow from a configuration alone, and copies of it with other keys."""

import copy
from typing import Any

from kit.core.config.schema import Config

Keys = dict[str, Any]  # {"group.key": value}, as in a YAML
Facts = dict[str, Any]  # a model's config.json


def value_bytes(config: Config) -> int:
    """Bytes of a value that the model computes with."""
    return 4 if config.model.dtype == "float32" else 2


def row_tokens(config: Config) -> int:
    """Maximum tokens of a prompt and its completion."""
    return config.rollout.max_prompt_length + config.rollout.max_completion_length


def least_pack(config: Config) -> int:
    """Tokens that one process computes of the longest prompt and completion, in a pack of their own."""
    return -(-row_tokens(config) // config.train.sequence_parallel)


def process_completions(config: Config) -> int:
    """Completions of one trainer process per step."""
    return config.train.per_device_train_batch_size * config.train.gradient_accumulation_steps


def is_flex(config: Config) -> bool:
    """Whether packed rows use FlexAttention, which selective recomputes."""
    return config.train.packed_attention == "flex" or config.model.dtype == "float32"


def with_keys(config: Config, keys: Keys) -> Config:
    """A copy of the configuration with `group.key` set to each value; groups that do not change are shared."""
    made = copy.copy(config)
    for key, value in keys.items():
        group, _, name = key.partition(".")
        if getattr(made, group) is getattr(config, group):
            setattr(made, group, copy.copy(getattr(config, group)))
        setattr(getattr(made, group), name, value)
    return made
