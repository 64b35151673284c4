"""`GRPOTrainer` and `GRPOConfig` of TRL without the import of vLLM, a third of the time that a trainer takes to start.

TRL (1.16) imports vLLM with its trainer wherever it is installed, for servers and engines that TRL itself talks to.
The kit's rollouts come from the model or over HTTP, so here TRL is told that there is none while it is imported.
"""

from trl import import_utils

_asked = import_utils.is_vllm_available
import_utils.is_vllm_available = lambda min_version=None: False
try:
    from trl import GRPOConfig, GRPOTrainer
finally:
    import_utils.is_vllm_available = _asked

__all__ = ["GRPOConfig", "GRPOTrainer"]
