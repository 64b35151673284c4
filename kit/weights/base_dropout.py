"""Turn off the dropout that a base model's own configuration asks for.

The base is frozen, so its dropout regularizes nothing. It would only make the trained policy a different distribution
from the one that samples, that the reference scores and that is deployed. The adapter's own dropout
(`policy.lora_dropout`) is added later and stays. Imports torch only when given a module.
"""

from typing import Any


def _is_rate(name: str, value: Any) -> bool:
    """Whether an attribute is a dropout rate above 0: attention_dropout, resid_pdrop, layerdrop, drop_path_rate, …"""
    return "drop" in name.lower() and type(value) in (int, float) and value != 0


def clear_dropout_rates(config: Any) -> None:
    """Set every dropout rate of a transformers config, and of the configs in it, to 0."""
    for name, value in list(vars(config).items()):
        if _is_rate(name, value):
            vars(config)[name] = type(value)(0)  # bypasses validators
        elif isinstance(value, dict):
            value |= {key: type(rate)(0) for key, rate in value.items() if _is_rate(str(key), rate)}
        elif hasattr(value, "to_dict") and hasattr(value, "__dict__"):
            clear_dropout_rates(value)


def turn_off_dropout(model: Any) -> None:
    """Zero the rate of every dropout layer of a model and every rate that a module keeps for a functional call."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_rate(name, value):
                setattr(module, name, type(value)(0))
