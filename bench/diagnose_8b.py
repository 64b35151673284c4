"""Diagnostics of an 8B shape's linear layers on a GPU: seconds, memory, and whether the figures match the CPU's.

    python bench/diagnose_8b.py                                    # 36 layers; exits 1 above 300 s or 1e-4
    python bench/diagnose_8b.py --device cpu --layers 1 --size 512

Random weights and updates are generated on the device, so reading and dequantizing the base (timed by `merge_8b.py`)
is left out. NF4's error may differ by more than the other bound allows: ties in its scales round by device.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from merge.diagnose import computed
from merge.diagnose_layer import measure_layer
from merge.quantize import STORED

MOST_SECONDS, BOUND, NF4_BOUND = 300, 1e-4, 1e-3


def shapes(size: int) -> dict[str, tuple[int, int]]:
    """Linear layers of a Qwen3-8B decoder layer, at a hidden size of 4,096."""
    attention = {"q_proj": (size, size), "k_proj": (size // 4, size), "v_proj": (size // 4, size)}
    mlp = {"gate_proj": (3 * size, size), "up_proj": (3 * size, size), "down_proj": (size, 3 * size)}
    return attention | {"o_proj": (size, size)} | mlp


def make(shape: tuple[int, int], device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(BF16 weight of std 0.02, rank-16 update of about 1 % of it)."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = 0.02 * torch.randn(shape, generator=generator, device=device)
    a = torch.randn(16, shape[1], generator=generator, device=device)
    b = torch.randn(shape[0], 16, generator=generator, device=device)
    return weight.bfloat16(), 5e-5 * (b @ a)


def flat(record: dict, prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            found[prefix + key] = value
    return found


def compare(device: str, readers: dict) -> float:
    """Largest relative difference of a figure between device and CPU, for one layer of 512 x 1,024."""
    weight, delta = make((512, 1024), device, 7)
    here, there = (flat(measure_layer("m.0.q_proj", weight.to(d), delta.to(d), readers)) for d in (device, "cpu"))
    worst = 0.0
    for name, value in there.items():
        # A share of outliers changes by whole weights, and the excess kurtosis of a Gaussian is a small difference.
        difference = abs(here[name] - value) / max(abs(value), 1e-2)
        allowed = NF4_BOUND if ".nf4." in name else BOUND
        if difference > allowed:
            print(f"{name}: {here[name]:.6g} on {device}, {value:.6g} on the CPU")
        worst = max(worst, difference / allowed)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--size", type=int, default=4096, help="hidden size")
    arguments = parser.parse_args()
    readers = {name: computed(fmt) for name, fmt in STORED.items()}
    worst = compare(arguments.device, readers)
    started, weights = time.perf_counter(), 0
    for index in range(arguments.layers):
        for name, shape in shapes(arguments.size).items():
            record = measure_layer(f"m.{index}.{name}", *make(shape, arguments.device, index), readers)
            weights += shape[0] * shape[1]
    seconds = time.perf_counter() - started
    for name, figures in record["formats"].items():
        error = figures["error"]
        print(
            f"{name:<10} error {error['base']:.5f} -> {error['grpo']:.5f}  snr {figures['snr']:.4f}  "
            f"kept {figures['retained']:.4f}"
        )
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if arguments.device == "cuda" else ""
    print(
        f"{weights / 1e9:.2f} B weights in {len(readers)} formats with control: {seconds:.1f} s{peak}; figures "
        f"against the CPU: {worst:.2g} of the bound"
    )
    return int(worst > 1 or (arguments.device == "cuda" and seconds > MOST_SECONDS))


if __name__ == "__main__":
    sys.exit(main())
