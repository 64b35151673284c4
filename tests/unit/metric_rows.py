"""Lines of metrics.jsonl for tests: made up, and recorded from runs of the tiny configuration."""

import json
import time
from pathlib import Path

from kit.core.metrics_log import MetricsLog

RECORDED = Path(__file__).parent / "recorded"


def step_row(step: int, total: int = 40, **changes) -> dict:
    """One metrics line as the trainer writes it, of a run in good health, a step a second, written just now."""
    row = {
        "step": step,
        "total_steps": total,
        "time": time.time() + step - total,
        "loss": 0.01,
        "reward": 0.45 + 0.4 * step / total,
        "reward_std": 0.4,
        "rewards": {"math": 0.45 + 0.4 * step / total},
        "zero_spread_fraction": 0.25,
        "kl": 0.001 * step,
        "entropy": 0.8 - 0.4 * step / total,
        "clip_fraction": 0.01,
        "truncated_fraction": 0.02,
        "completion_length": 31.5,
        "masked_fraction": None,
        "grad_norm": 0.4,
        "learning_rate": 1e-3,
        "sampler_k3": None,
        "effective_sample_size": None,
        "corrected_token_fraction": 0.001,
        "canary_delta": None,
        "sync_seconds": None,
        "rollout_tokens_per_s": 5321.0,
        "update_tokens_per_s": 8123.0,
        "seconds": {"rollout": 0.5, "reward": 0.1, "update": 0.3, "step": 1.0},
        "peak_gib": {"rollout": 1.2, "update": 1.4},
        "adapter_version": step,
    }
    return row | changes


def rows_of(count: int, total: int = 40, **changes) -> list[dict]:
    return [step_row(step, total, **changes) for step in range(1, count + 1)]


def make_run(path: Path, rows: list[dict] | None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"config": {}}')
    if rows is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log_of(path: Path) -> MetricsLog:
    log = MetricsLog(path / "metrics.jsonl")
    log.poll()
    return log


def recorded(name: str) -> list[dict]:
    """The steps of a finished run: "in_process", "server" (vLLM for CPUs), "diverged"; what the rules read."""
    return [json.loads(line) for line in (RECORDED / f"metrics_{name}_2026-11-21.jsonl").read_text().splitlines()]
