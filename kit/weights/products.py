"""Whether this process's GPU multiplies right, compared with the CPU before any weight is loaded.

CUDA's multi-process service can keep a process to a part of a card's multiprocessors. On an H200 (torch 2.11.0+cu130)
with 92 of its 132, cuBLAS's BF16 products of up to 2,048 rows are 41 to 59 % off, without an error; with 66, 118 and
all of them they are right (bench/STEP.md, "A part of a card"). A run's canary would notice; a merge has none.
"""

import functools
import math
import os

import torch

from kit.core.cards import PART_OF_CARD, generation
from kit.core.errors import CheckFailed

# (rows, inputs, outputs) of layers of an 8B and of an adapter's update. On 92 multiprocessors all but the last are
# wrong.
SHAPES = (
    (128, 4096, 4096),
    (512, 4096, 12288),
    (512, 12288, 4096),
    (512, 16, 4096),
    (2048, 4096, 4096),
    (10192, 4096, 4096),
)
LARGEST_ERROR = 0.02  # relative; BF16 is .002 off there
SAMPLED = 64  # outputs of each of these rows


def product_error(rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype) -> float:
    """Relative error of a random product (rows, inputs) · (inputs, outputs) on `device`, of some outputs of four rows,
    against float64 on the CPU; infinite for NaN."""
    draw = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(n, inputs, generator=draw, device=device, dtype=dtype) for n in (rows, outputs))
    some = torch.tensor([0, 1, rows // 2, rows - 1], device=device)
    columns = torch.arange(0, outputs, max(1, outputs // SAMPLED), device=device)
    found = torch.nn.functional.linear(x, weight)[some][:, columns].double().cpu()
    exact = x[some].double().cpu() @ weight[columns].double().cpu().T
    error = ((found - exact).norm() / exact.norm()).item()
    return math.inf if math.isnan(error) else error


def product_fault(device: torch.device) -> str | None:
    """Error text if products of a GPU are wrong in its 16-bit dtype; None if they are right."""
    kind = generation(torch.cuda.get_device_capability(device)).dtypes[0]
    errors = {shape: product_error(*shape, device, getattr(torch, kind)) for shape in SHAPES}
    torch.cuda.empty_cache()
    wrong = {shape: error for shape, error in errors.items() if error > LARGEST_ERROR}
    if not wrong:
        return None
    (rows, inputs, outputs), error = max(wrong.items(), key=lambda one: one[1])
    card = torch.cuda.get_device_properties(device)
    why = "If CUDA's multi-process service keeps it to a part of the card, lift that; if not, test card and driver."
    if part := os.environ.get(PART_OF_CARD):
        why = f"{PART_OF_CARD} is {part}; leave that variable out."
    return (
        f"{len(wrong)} of {len(errors)} products of {card.name} are wrong: that of ({rows}, {inputs}) and ({inputs}, "
        f"{outputs}) in {kind} by {error:.0%}. This process may use {card.multi_processor_count} of its "
        f"multiprocessors. {why}"
    )


@functools.cache
def check_products(device: torch.device) -> None:
    """Raise `CheckFailed` if products of `device` are wrong; once per process and device, a no-op for a CPU."""
    if device.type == "cuda" and (fault := product_fault(device)):
        raise CheckFailed(fault)
