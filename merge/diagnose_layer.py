"""Figures of one linear layer before and after training: how large the update is and how well a format stores it.

All are Frobenius norms and moments of whole tensors: float32 within a row, float64 over the rows. Covers: weights as
the merge would fold them. Not covered: activations (formats that round them do more harm than is shown).
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch

OUTLIER_DEVIATIONS = 6.0  # standard deviations of the tensor
OUTLIER_MEDIANS = 6.0  # medians of |w|
# Values that a reader of a format computes with, float32 (out, in): (module, "base" or "grpo", its float32 weight) →
# value; None if unknown.
Reader = Callable[[str, str, torch.Tensor], torch.Tensor | None]


def squared_norm(value: torch.Tensor) -> float:
    """Σ value² of (out, in) float32. A row's norm in float32 is within 1e-7 of float64's and ten times as fast."""
    return torch.linalg.vector_norm(value, dim=-1).double().square().sum().item()


def inner(left: torch.Tensor, right: torch.Tensor) -> float:
    """<left, right> of two (out, in) float32 tensors."""
    return torch.linalg.vecdot(left, right).double().sum().item()


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None when either is unknown, the divisor is zero, or the quotient is not finite."""
    if above is None or not below:
        return None
    return quotient if math.isfinite(quotient := above / below) else None


def distribution(weight: torch.Tensor) -> dict[str, float | None]:
    """Kurtosis and outlier shares of a float32 tensor; None if it has no spread to measure against.

    `kurtosis` is the excess kurtosis of the whole tensor, without bias correction: 0 for a Gaussian, -1.2 for a
    uniform distribution (as scipy.stats.kurtosis). `outlier_fraction` is the share with |w| > 6 standard deviations of
    the whole tensor; `beyond_6_medians` is the share with |w| > 6 medians of |w|, which is 4.05 standard deviations of
    a Gaussian.
    """
    mean = weight.sum(-1).double().sum() / weight.numel()
    centered = weight - mean.float()
    deviation = math.sqrt(squared_norm(centered) / weight.numel())
    magnitude = weight.abs()
    # For equal weights, the rounding error of their mean would look like a deviation.
    if deviation <= 1e-6 * magnitude.max().item():
        return {"kurtosis": None, "outlier_fraction": None, "beyond_6_medians": None}
    # Divide first: the fourth power of a weight of 1e-10 is below float32's range.
    fourth = squared_norm((centered / deviation).square())
    share = torch.count_nonzero(magnitude > OUTLIER_DEVIATIONS * deviation).item() / weight.numel()
    median = magnitude.flatten().median()
    beyond = None
    if median > 0:
        beyond = torch.count_nonzero(magnitude > OUTLIER_MEDIANS * median).item() / weight.numel()
    return {"kurtosis": fourth / weight.numel() - 3, "outlier_fraction": share, "beyond_6_medians": beyond}


def shuffled(module: str, delta: torch.Tensor) -> torch.Tensor:
    """The update with its rows and its columns permuted, always in the same order for a module.

    It keeps the norm, singular values and entries, but is no longer related to the weights it is added to.
    """
    seed = int.from_bytes(hashlib.blake2b(module.encode(), digest_size=7).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(size, generator=generator).to(delta.device) for size in delta.shape)
    return delta[rows][:, columns]


def measure_layer(
    module: str, weight: torch.Tensor, delta: torch.Tensor | None, readers: dict[str, Reader], control: bool = True
) -> dict:
    """Return the record of one layer in diagnostics.json.

    `weight` (out, in) is the base's, `delta` (out, in) float32 is the update, None if the adapter does not change the
    layer. Per format: `error` ‖Q(W) − W‖/‖W‖ before and after training, `snr` ‖Δ‖/‖Q(W+Δ) − (W+Δ)‖, `retained`
    <Q(W+Δ) − Q(W), Δ>/<Δ, Δ>, and with `control` the `control_error` of W plus the shuffled Δ. Without an update, snr
    and retained are None and the error after equals the error before. Figures with a zero divisor are None as well.
    """
    before = weight.float()
    size = squared_norm(before)
    update = 0.0 if delta is None else squared_norm(delta)
    changed = update > 0
    after = before + delta if changed else before
    size_after = squared_norm(after) if changed else size
    spread = {"base": distribution(before)}
    spread["grpo"] = distribution(after) if changed else spread["base"]
    twin = before + shuffled(module, delta) if changed and control else None
    found = {
        reader: _in_format(module, before, after, delta if changed else None, twin, reader)
        for reader in set(readers.values())  # formats that store the same weights share a reader
    }
    return {
        "name": module,
        "shape": list(weight.shape),
        "update_norm": math.sqrt(update),
        "weight_norm": {"base": math.sqrt(size), "grpo": math.sqrt(size_after)},
        "relative_update": ratio(math.sqrt(update), math.sqrt(size)),
        **{key: {policy: spread[policy][key] for policy in spread} for key in spread["base"]},
        "formats": {name: found[reader] for name, reader in readers.items()},
    }


def _in_format(
    module: str,
    before: torch.Tensor,
    after: torch.Tensor,
    delta: torch.Tensor | None,
    twin: torch.Tensor | None,
    reader: Reader,
) -> dict:
    value = reader(module, "base", before)
    error: dict[str, float | None] = {"base": _relative_error(value, before), "grpo": None}
    found: dict[str, Any] = {"error": error, "snr": None, "retained": None, "control_error": None}
    if delta is None:
        error["grpo"] = error["base"]
        return found
    value_after = reader(module, "grpo", after)
    error["grpo"] = _relative_error(value_after, after)
    if value_after is not None:
        size = squared_norm(delta)
        found["snr"] = ratio(math.sqrt(size), math.sqrt(squared_norm(value_after - after)))
        if value is not None:
            found["retained"] = ratio(inner(value_after - value, delta), size)
    if twin is not None:
        found["control_error"] = _relative_error(reader(module, "control", twin), twin)
    return found


def _relative_error(value: torch.Tensor | None, exact: torch.Tensor) -> float | None:
    if value is None:
        return None
    return ratio(math.sqrt(squared_norm(value - exact)), math.sqrt(squared_norm(exact)))
