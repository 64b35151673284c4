"""The canary of a sync: score the same tokens in the trainer and on a replica, and interpret the difference.

A replica that serves other weights, a stale adapter or none samples from another policy, and nothing in its answers
shows it. So after every sync it scores a few fixed sequences, and the trainer compares. Needs numpy, no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kit.core.file_kinds import CANARY
from kit.core.run_directory import write_json
from kit.core.run_files import read_object

# The adapter's own shift must be this many times the noise before a replica counts as nearer to one side.
DECISIVE = 2.0


@dataclass(frozen=True)
class CanaryResult:
    """Distances on the canary's tokens, in nats per token.

    `mean` and `max` are |server - policy|, `k3` is the estimator of KL(server || policy) on these tokens (which the
    server did not sample, so it is a distance, not that KL). `to_base` is the mean |server - base|, `shift` the mean
    |policy - base|: what the adapter changes.

    `nearest` says which of the two the server holds. `noise` is the smaller of `mean` and `to_base`: the remaining
    distance between the server and the model it is nearest to. A shift below `DECISIVE` times the noise cannot be told
    apart from it, and the result is "undecided", as it is for an adapter that is still zero.
    """

    mean: float
    max: float
    k3: float
    to_base: float
    shift: float
    noise: float
    nearest: Literal["policy", "base", "undecided"]
    tokens: int
    not_finite: int

    def problem(self, max_delta: float) -> str | None:
        """Explain why this replica must not be sampled from, or None. `max_delta`: rollout.max_canary_delta."""
        if self.not_finite:
            return (
                f"{self.not_finite} of {self.tokens} canary tokens have a log-prob that is not finite: the weights "
                "it serves are damaged"
            )
        if not self.mean <= max_delta:
            return (
                f"its log-probs differ from the trainer's by {self.mean:.4g} nats a token (max {self.max:.4g}), limit "
                f"rollout.max_canary_delta {max_delta:g}: it serves other weights than the trainer's, or rounds them "
                "more than this model bears (server.weights bf16 with server.kv_cache auto tells which)"
            )
        if self.nearest == "base":
            return (
                f"it is {self.to_base:.4g} nats a token from the base and {self.mean:.4g} from the policy, which are "
                f"{self.shift:.4g} apart: it serves the base without this adapter"
            )
        return None


def compare(
    server: Sequence[np.ndarray], policy: Sequence[np.ndarray], base: Sequence[np.ndarray] | None
) -> CanaryResult:
    """Compare log-probs (len - 1,) per sequence of one replica with the trainer's, adapter on (`policy`) and off
    (`base`). Without `base`, `nearest` is "undecided". ValueError if lengths differ."""
    theirs, ours = _flat(server), _flat(policy)
    off = _flat(base) if base is not None else ours
    if not theirs.shape == ours.shape == off.shape:
        raise ValueError(f"{theirs.size} tokens of the server, {ours.size} of the policy, {off.size} of the base")
    with np.errstate(invalid="ignore", over="ignore"):
        difference = ours - theirs
        mean, to_base = _mean_abs(difference), _mean_abs(off - theirs)
        k3 = float(np.mean(np.expm1(difference) - difference)) if difference.size else 0.0
    shift, noise = _mean_abs(ours - off), min(mean, to_base)
    nearest: Literal["policy", "base", "undecided"] = "undecided"
    if shift > 0 and shift >= DECISIVE * noise:
        nearest = "policy" if mean <= to_base else "base"
    return CanaryResult(
        mean=mean,
        max=float(np.max(np.abs(difference), initial=0.0)),
        k3=k3,
        to_base=to_base,
        shift=shift,
        noise=noise,
        nearest=nearest,
        tokens=theirs.size,
        not_finite=int((~np.isfinite(theirs)).sum()),
    )


def _flat(scores: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(one, dtype=np.float64).ravel() for one in scores)])


def _mean_abs(values: np.ndarray) -> float:
    return float(np.mean(np.abs(values))) if values.size else 0.0


def write_canary(
    path: Path,
    *,
    session: str,
    version: int,
    way: str,
    sequences: Sequence[Sequence[int]],
    policy: Sequence[np.ndarray],
    base: Sequence[np.ndarray],
) -> None:
    """Write what `python -m launch.server canary` needs to check a replica by hand, without any model."""
    facts: dict[str, Any] = {"session": session, "version": version, "way": way}
    facts["sequences"] = [[int(token) for token in ids] for ids in sequences]
    facts |= {"policy": [_list(one) for one in policy], "base": [_list(one) for one in base]}
    write_json(path, facts)


def read_canary(path: Path) -> dict:
    """Read what `write_canary` wrote, with scores as arrays; `BadInput` if there is none."""
    facts = read_object(path, CANARY)
    for name in ("policy", "base"):
        facts[name] = [np.asarray(one, dtype=np.float32) for one in facts[name]]
    return {name: facts[name] for name in ("session", "version", "way", "sequences", "policy", "base")}


def _list(scores: np.ndarray) -> list[float]:
    return [float(value) for value in scores]
