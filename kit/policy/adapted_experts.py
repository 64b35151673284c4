"""LoRA on a layer's routed experts: peft's wrappers and file format, without its dense updates.

peft adapts fused experts by `target_parameters`: a wrapper for each parameter holds the factors of all experts, and
its forward writes the whole updated parameter (E, out, in), which for 128 experts is more memory than the layer in
NF4. Here the wrappers stay, with their names, initialization, saving and loading, and only their forward is replaced:
the factors go to `FrozenExperts`, which multiplies the tokens of each expert with its own.

Layout, as in peft 0.21: lora_A (r·E, in) holds the experts one after the other, lora_B (out, r·E) has the expert as
its last axis. Not covered: LoRA dropout (peft refuses it), several active adapters.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import ParamWrapper

from kit.core.lora import EXPERT_PARAMETERS
from kit.policy.recompute import base_product, is_answered
from kit.weights.experts import FrozenExperts, Update, experts_of


class AdaptedExperts(ParamWrapper):
    """peft's wrapper of a parameter of `FrozenExperts`, inner or outer."""

    def updates(self) -> dict[str, Update]:
        """{parameter: its update} of this wrapper and of those inside it; empty while the adapter is off."""
        inner = self.base_layer.updates() if isinstance(self.base_layer, AdaptedExperts) else {}
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if len(active) > 1:
            raise ValueError(f"{len(active)} adapters are active on experts; one at a time is computed.")
        for name in active:
            a, b = split_factors(self.lora_A[name].weight, self.lora_B[name].weight, self.num_experts)
            inner[self.parameter_name] = Update(a, b, self.scaling[name])
        return inner

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.get_base_layer()(hidden_states, top_k_index, top_k_weights, self.updates())


def split_factors(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a (E, r, in), b (E, out, r)), as views, of peft's stacked factors (r·E, in) and (out, r·E)."""
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


def use_adapted_experts(model: torch.nn.Module) -> int:
    """Make peft's wrappers of frozen experts compute grouped products; return how many experts are adapted."""
    count = 0
    for module in model.modules():
        if isinstance(module, ParamWrapper) and isinstance(module.get_base_layer(), FrozenExperts):
            module.__class__ = AdaptedExperts
            count += module.num_experts if module.parameter_name == EXPERT_PARAMETERS[0] else 0
    for experts in experts_of(model).values():
        experts.base_product = _tagged
    return count


@contextlib.contextmanager
def targets_as_named() -> Iterator[None]:
    """Let peft adapt within the block what a LoraConfig names and nothing else.

    For models whose experts transformers 5 fused, peft 0.21 rewrites a config first: `gate_proj`, `up_proj` and
    `down_proj` among `target_modules` become the fused experts, with twice the rank. Here they are the layers of that
    name, those of shared experts; routed experts are named by `target_parameters`.
    """
    from peft.utils import transformers_weight_conversion as conversion

    kept, conversion._MOE_TARGET_MODULE_MAPPING = conversion._MOE_TARGET_MODULE_MAPPING, {}
    try:
        with warnings.catch_warnings():
            # It looks for the patterns of parameters among the modules only.
            warnings.filterwarnings("ignore", message=r"The following rank_pattern keys did not match")
            yield
    finally:
        conversion._MOE_TARGET_MODULE_MAPPING = kept


@contextlib.contextmanager
def _tagged() -> Iterator[bool]:
    """Tag a grouped product of the base for `recompute.py`; yield whether its result is already known."""
    with base_product():
        yield is_answered()
