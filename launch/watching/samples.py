"""One group of a run's newest completions: its best, median and worst answer, for a person to read."""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kit.core.metrics_log import group, number, read_completions
from kit.core.run_directory import RunDir


@dataclass(frozen=True)
class Sample:
    """A completion with its rewards by function; `advantage` ranks it within its group."""

    text: str
    rewards: dict[str, float | None]
    advantage: float


@dataclass(frozen=True)
class SampleGroup:
    """The completions of one prompt at one step, best first; at least one."""

    step: int
    prompt: str
    samples: tuple[Sample, ...]

    def picks(self) -> dict[str, Sample]:
        """Best, median and worst; with fewer than three completions, no median."""
        last = len(self.samples) - 1
        names = {"best": 0, "median": (last + 1) // 2, "worst": last}
        return {name: self.samples[place] for name, place in names.items() if name != "median" or last > 1}


def latest_group(run: RunDir) -> SampleGroup | None:
    """The group with the widest spread of advantages in the newest `completions/step-*.jsonl` with a complete line."""
    for file in sorted(run.completions.glob("step-*.jsonl"), reverse=True)[:2]:
        try:
            status = file.stat()
        except OSError:
            continue
        if found := _read(file, status.st_mtime_ns, status.st_size):
            return found
    return None


@lru_cache(maxsize=64)
def _read(file: Path, changed: int, size: int) -> SampleGroup | None:
    del changed, size  # part of the cache key: a file that still grows is read again
    step = file.stem.removeprefix("step-")
    groups: dict[Any, list[dict]] = {}
    for row in read_completions(file):
        groups.setdefault(str(row.get("problem_id")), []).append(row)
    made = [_group(int(step), rows) for rows in groups.values()] if step.isdigit() else []
    return max(made, key=lambda one: one.samples[0].advantage - one.samples[-1].advantage, default=None)


def _group(step: int, rows: list[dict]) -> SampleGroup:
    samples = [
        Sample(
            _said(row),
            group(row, "rewards"),
            number(row, "advantage") or 0.0,
        )
        for row in rows
    ]
    samples = sorted(samples, key=lambda sample: -sample.advantage if math.isfinite(sample.advantage) else 0.0)
    prompt = rows[0].get("prompt") or ""
    if isinstance(prompt, list):  # the messages of a conversation
        prompt = "\n\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    return SampleGroup(step, str(prompt), tuple(samples))


def _said(row: dict) -> str:
    """The completion of a row; of an episode all its messages, those that the model did not write by their role."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return row["completion"]
    return " ".join(
        " ".join(
            [
                *([] if one.get("role") == "assistant" else [f"[{one.get('role')}]"]),
                *([text] if (text := one.get("content")) and isinstance(text, str) else []),
                *(_call(call) for call in one.get("tool_calls") or [] if isinstance(call, dict)),
            ]
        )
        for one in messages
    )


def _call(call: dict) -> str:
    called = group(call, "function") or call
    return f"{called.get('name')}({json.dumps(called.get('arguments'), ensure_ascii=False)})"
