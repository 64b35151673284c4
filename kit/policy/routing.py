"""The experts that a sampler took, compared with those of the trainer's routers, or replayed in their place.

A router takes the k experts of the largest probabilities. Sampler and trainer compute these in other numbers (FP8
against BF16, other kernels), and where two probabilities are close, one of them sends the token to another expert. The
log-probs of that token then differ by more than rounding. With `rollout.routing: replay` every forward of the step,
the reference's included, uses the sampler's experts, weighted by the trainer's own router, which stays differentiable;
with `compare` the trainer's routing stands and the difference is counted. Source: "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers" (rollout routing replay).

Covers routers that take the largest of a softmax (Qwen2 MoE, Qwen3 MoE, Mixtral, OLMoE). `use_routing` refuses others.
"""

import contextlib
import re
import threading
import types
from collections.abc import Iterator

import torch

from kit.core.errors import BadInput
from kit.weights.experts import experts_of

UNKNOWN = -1  # in place of an expert where the sampler's is not known


class _Now(threading.local):
    """Routing of the forward that this thread computes; backward passes recompute in their own threads."""

    routing: "Routing | None" = None


_now = _Now()


class Routing:
    """Experts of a forward's tokens: `experts` (N, L, k) int16 in the order of the model's tokens and decoder layers
    (those without experts are not read), `UNKNOWN` where the sampler's are not known. The forward adds to `counts`
    (4,), if given: pairs of token and layer with another set of experts, pairs compared, tokens with another set in
    any layer, tokens compared."""

    def __init__(self, experts: torch.Tensor, is_replayed: bool, counts: torch.Tensor | None):
        self.experts, self.is_replayed, self.counts = experts, is_replayed, counts
        self.is_recomputed = False
        self._differs = torch.zeros(len(experts), dtype=torch.bool, device=experts.device)

    def of_tokens(self, index: torch.Tensor, real: int) -> "Routing":
        """The routing of a forward over the tokens `index` (T,) of these, the first `real` of them not padding; counts
        into the same figures."""
        experts = self.experts[index]
        experts[real:] = UNKNOWN
        return Routing(experts, self.is_replayed, self.counts)

    def choose(self, layer: int, own: torch.Tensor, is_last: bool) -> torch.Tensor:
        """Experts (N, k) to take in a layer, given the router's own; `is_last`: no other layer has experts."""
        theirs = self.experts[:, layer].to(own.dtype)
        is_known = (theirs != UNKNOWN).all(dim=1)
        if self.counts is not None and not self.is_recomputed:
            differs = (theirs.sort(dim=1).values != own.sort(dim=1).values).any(dim=1) & is_known
            self._differs |= differs
            self.counts[:2] += torch.stack([differs.sum(), is_known.sum()])
            if is_last:
                self.counts[2:] += torch.stack([self._differs.sum(), is_known.sum()])
        return torch.where(is_known[:, None], theirs, own) if self.is_replayed else own


def current() -> Routing | None:
    """The routing in force, for a recomputation to put in force again."""
    return _now.routing


@contextlib.contextmanager
def routed(routing: Routing | None, is_recomputed: bool = False) -> Iterator[None]:
    """Put `routing` in force for the forwards of this thread, or for their recomputation, which is not counted again;
    None: the routers' own."""
    before, _now.routing = _now.routing, routing
    if routing is not None:
        routing.is_recomputed = is_recomputed
    try:
        yield
    finally:
        _now.routing = before


def routers_of(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """{decoder layer: its router} of a model, in order; `BadInput` for a kind that is not known here."""
    modules = dict(model.named_modules())
    found = {}
    for name in experts_of(model):
        parent = name.partition(".experts")[0]
        router = modules.get(f"{parent}.gate")
        if router is None or not hasattr(router, "top_k") or not hasattr(router, "weight"):
            raise BadInput(
                f"rollout.routing: {parent} has no router of a kind that is known here (a softmax whose largest "
                "probabilities are taken). Set rollout.routing to own."
            )
        found[int(re.search(r"\.layers\.(\d+)\.", name)[1])] = router
    return found


def use_routing(model: torch.nn.Module) -> int:
    """Let the routers of `model` follow `routed`; return how many there are.

    `BadInput` unless each of them takes the largest probabilities of a softmax, which is tried on random inputs.
    """
    routers = routers_of(model)
    for layer, router in routers.items():
        _check_softmax(router)
        router.forward = types.MethodType(_forward, router)
        router.layer, router.is_last = layer, layer == max(routers)
    return len(routers)


def _forward(router: torch.nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, scores, own = type(router).forward(router, hidden_states)
    if (routing := _now.routing) is None:
        return logits, scores, own
    chosen = routing.choose(router.layer, own, router.is_last)
    return (
        (logits, scores, own) if chosen is own else (logits, weights_of(router, logits, chosen, scores.dtype), chosen)
    )


def weights_of(
    router: torch.nn.Module, logits: torch.Tensor, chosen: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Routing weights (N, k) of given experts (N, k) for a router's logits (N, E)."""
    found = logits.float().softmax(dim=-1).gather(1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's always do and do not say so
        found = found / found.sum(dim=-1, keepdim=True)
    return found.to(dtype)


def _check_softmax(router: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(8, router.weight.shape[1], generator=generator).to(router.weight)
    with torch.no_grad():
        logits, scores, chosen = type(router).forward(router, states)
        again = weights_of(router, logits, chosen, scores.dtype)
    if not torch.allclose(again, scores, atol=1e-3):
        raise BadInput(
            f"rollout.routing: {type(router).__name__} does not weight its experts by a softmax of their logits, so "
            "the sampler's experts cannot be replayed. Set rollout.routing to own."
        )
