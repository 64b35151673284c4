"""`GRPOTrainer` and `GRPOConfig` of TRL without importing vLLM, which takes a third of a trainer's start.

TRL (1.16) imports vLLM with its trainer wherever it is installed, for servers and engines of its own.
The kit's rollouts come from the model or over HTTP, so vLLM is hidden from TRL while it is imported.
"""

import typing
from typing import Any

from trl import import_utils

from kit.core.config.field_types import match_type, spell_type
from kit.core.errors import BadInput

_asked = import_utils.is_vllm_available
import_utils.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOConfig, GRPOTrainer
finally:
    import_utils.is_vllm_available = _asked

__all__ = ["GRPOConfig", "GRPOTrainer", "typed_fields"]


def typed_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of `train.trl`, converted to the types of `GRPOConfig`; raises `BadInput` for an unknown field and
    for a value of another type, which `GRPOConfig` itself accepts."""
    hints, typed = typing.get_type_hints(GRPOConfig), {}
    for key, value in values.items():
        if key not in GRPOConfig.__dataclass_fields__:
            raise BadInput(f"train.trl.{key} is not a field of trl's GRPOConfig.")
        matched, typed[key] = match_type(value, hints[key])
        if not matched:
            kind = type(value).__name__
            raise BadInput(f"train.trl.{key} must be {spell_type(hints[key])}, it is {value!r:.60} ({kind}).")
    return typed
