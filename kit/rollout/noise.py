"""Noise on the sampler's RMSNorm scales, as in QeRL (arXiv 2510.11696, adaptive quantization noise).

A norm's scale w feeds q, k, v or gate and up, so w + z is equivalent to noise on all of their weights' columns, and
costs nothing to compute. z ~ N(0, σ²) is drawn anew per component for each adapter version. σ follows stages of equal
length over `train.max_steps`: zero in the first, then from `policy.quant_noise_start` to `quant_noise_end`, each stage
lower than the previous one by the same factor. This matches QeRL's published code (its noise_scheduler.py; its scripts
go from 1e-2 to 1e-4 in 10 stages), as do these two choices, which decide what is learned:

- Only the sampler is noisy. Log-probs of the update, of the reference and of the canary are computed without noise.
  The held-out accuracy during training (`watch.eval_every`) is the sampler's, so it includes noise.
- QeRL does not correct for the noise. Here `rollout.correction` does with rollouts from servers, as for any sampler
  that is not the policy; `none` matches QeRL, and so does generation in the trainer's process. `sampler_k3` includes
  the noise.

A BF16 scale changes only if the draw exceeds half the distance to its neighbour, 2^-9 to 2^-8 near 1: at σ 1e-2 77 %
of the components move, at 1e-3 3 %, below 5e-4 none. In BF16 the last stages of 1e-2 to 1e-4 are therefore without
noise.

Unlike in QeRL, the scales are restored before each draw (QeRL's noise accumulates where it does not train the norms),
and the last norm and the norms of queries and keys get no noise: no quantized weight follows them directly. Imports
torch inside functions: the rollout servers and the checks of a configuration share this file.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.core.config.schema import Config
from kit.core.errors import CheckFailed

NORMS = re.compile(r"(?:^|\.)(layers\.\d+\.(?:input|post_attention)_layernorm)\.weight$")
# A different prime from those that TRL and torch add to seeds, so that runs with neighbouring seeds share no draw.
SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class Noise:
    """Standard deviation of an adapter version's noise, and the seed of its draw."""

    sigma: float
    seed: int


def noise_of(config: Config, version: int) -> Noise | None:
    """Noise of the sampler for adapter `version`, the number of updates made; None if it is off in this run.

    Depends only on the configuration and the version, so a resumed run continues it.
    """
    policy = config.policy
    if not policy.quant_noise_start:
        return None
    stages, steps = policy.quant_noise_stages, config.train.max_steps
    sigma = sigma_at(version, steps, policy.quant_noise_start, policy.quant_noise_end, stages)
    return Noise(sigma, config.run.seed * SEED_STRIDE + version)


def sigma_at(step: int, steps: int, start: float, end: float, stages: int) -> float:
    """σ at a step (from 0): 0 in the first of `stages`, then start · (end / start)^(i / (stages - 2)), i from 0."""
    stage = min(step * stages // steps, stages - 1)
    if stage == 0:
        return 0.0
    return start * (end / start) ** ((stage - 1) / max(1, stages - 2))


def norms(model: Any) -> dict[str, Any]:
    """Return {name from `layers.` on: scale (hidden,)} of the norms that get noise, with the same names in a trainer
    and in a server; `CheckFailed` if there is none."""
    found = {match[1]: weight for name, weight in model.named_parameters() if (match := NORMS.search(name))}
    if not found:
        raise CheckFailed(
            "policy.quant_noise_start: this model has no input_layernorm or post_attention_layernorm for the noise. "
            "Set it to 0."
        )
    return found


def draw(name: str, size: int, noise: Noise) -> Any:
    """Draw z (size,) float32 for the norm of this name: the same on every machine and device."""
    import torch

    digest = hashlib.sha256(f"{noise.seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return noise.sigma * torch.randn(size, generator=generator)


class NoisyNorms:
    """Norms of one model, with a copy of their own scales; `set` adds noise to that copy, so it never accumulates."""

    def __init__(self, model: Any):
        self.weights = norms(model)
        self.own = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def set(self, noise: Noise | None) -> None:
        """Set noise on every norm, in place and rounded once to its dtype; None and σ = 0 remove it."""
        for name, weight in self.weights.items():
            own = self.own[name]
            if noise is None or not noise.sigma:
                weight.data.copy_(own)
            else:
                weight.data.copy_(own.float() + draw(name, own.numel(), noise).to(own.device))


@contextlib.contextmanager
def noisy(model: Any, noise: Noise | None) -> Iterator[None]:
    """Add noise to the norms of `model` within the block; restore them on exit."""
    if noise is None or not noise.sigma:
        yield
        return
    held = NoisyNorms(model)
    held.set(noise)
    try:
        yield
    finally:
        held.set(None)


def facts(noise: Noise | None) -> dict[str, Any]:
    """Entries of a step's noise in metrics.jsonl; empty if it is off in this run."""
    return {} if noise is None else {"noise_sigma": noise.sigma, "noise_seed": noise.seed}
