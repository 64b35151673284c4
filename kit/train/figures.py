"""Measurements of a step for metrics.jsonl: seconds by phase, counts, peak memory, the sampler's figures."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from kit.policy.host_memory import peak_resident_gib, reset_peak_resident
from kit.rollout.policy_view import Report


class StepFigures:
    """Figures of the current step. `version` is the adapter version that sampled its rows; it is kept for further
    updates with them."""

    def __init__(self, device: torch.device):
        self.device, self.version = device, 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.peak_gib: dict[str, float] = {}
        self.values: dict[str, Any] = {}
        self.started: float | None = None
        self.routing = torch.zeros(4, dtype=torch.float64, device=device)  # counts of kit/policy/routing.py

    def take_routing(self) -> torch.Tensor:
        """Return the step's counts of differing expert choices of sampler and trainer (4,), and reset them."""
        counts, self.routing = self.routing, torch.zeros_like(self.routing)
        return counts

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's wall-clock seconds to a phase of this step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.synchronize()
            self.seconds[phase] += time.perf_counter() - started

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def add(self, report: Report) -> None:
        """Add a sampler's report."""
        self.values |= report.figures
        for phase, seconds in report.seconds.items():
            self.seconds[phase] += seconds

    def begin(self) -> None:
        """Start the step's clock and reset its peak memory; a no-op if already started."""
        if self.started is None:
            self.started = time.perf_counter()
            reset_peak()

    def note_peak(self, phase: str) -> None:
        """Record the peak memory since the last reset under `phase`, at least that of its earlier parts, and reset
        it."""
        self.peak_gib[phase] = max(self.peak_gib.get(phase, 0.0), peak_gib())
        reset_peak()

    def clear(self) -> None:
        self.started = None
        for figures in (self.seconds, self.counts, self.peak_gib, self.values):
            figures.clear()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak_resident()


def peak_gib() -> float:
    """Peak GPU memory since the last reset; without a GPU, the process's peak resident memory."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else peak_resident_gib()
